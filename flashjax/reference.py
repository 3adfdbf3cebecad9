"""The oracle: attention written for reading, in float32 and quadratic memory.

Every backend is tested against this file, and this file against numerical derivatives. It has the form
of a backend (``forward``, ``backward``), so ``implementation="reference"`` runs it through the public
function. Nothing chooses it by itself.

With ``P = softmax(S)`` over visible keys, ``O = P V`` and ``L = logsumexp(S)``, the gradients are

    dV = P^T dO,   dP = dO V^T,   delta = rowsum(dO * O),
    dS = P * (dP - delta + dL),
    dQ = scale * dS K,   dK = scale * dS^T Q,

where dS passes back through whatever changed a logit on its way to Q and K, and dropout multiplies P in O
and dP by the keep mask over ``1 - rate``. A sink is one more key, with the value 0.

Source: Dao et al., "FlashAttention" (2022), appendix B.2; the term dL follows from dL/dS = P.
"""

from typing import Any

import jax
import jax.numpy as jnp

from flashjax import dropout, scores, softmax
from flashjax.operands import indices, whole
from flashjax.problem import Gradients, Inputs, Problem, Results, Wanted


def _einsum(spec: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *arrays, precision="highest")


def _repeat(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q, k, v as ``[B, N, length, dim]`` in the accumulator dtype, heads repeated."""
    q, k, v = (x.astype(problem.accumulator).swapaxes(1, 2) for x in inputs[:3])
    return q, jnp.repeat(k, problem.group, 1), jnp.repeat(v, problem.group, 1)


def _positions(problem: Problem) -> list[jax.Array]:
    """Return b, h, q, k as broadcastable int32 arrays."""
    b, h, q, k = indices(problem.batch, problem.heads, problem.query_length, problem.key_length)
    return [b % problem.batch_period, h, q, k]


def _rows(problem: Problem, x: jax.Array) -> jax.Array:
    """Repeat an operand to the whole batch: row r reads row r % size."""
    return jnp.tile(x, (problem.batch // x.shape[0], *[1] * (x.ndim - 1)))


def _visible(problem: Problem, inputs: Inputs) -> jax.Array:
    b, h, q, k = _positions(problem)
    shape = (problem.batch, problem.heads, problem.query_length, problem.key_length)
    if inputs.mask is None:
        return jnp.ones(shape, bool)
    operands = {
        name: _rows(problem, whole(operand, q, k)) for name, operand in inputs.mask.operands().items()
    }
    return jnp.broadcast_to(inputs.mask.element(b, h, q, k, **operands), shape)


def _kept(problem: Problem, inputs: Inputs) -> jax.Array | float:
    """Return the factor that dropout puts on each weight: 0 or 1 / (1 - rate)."""
    if problem.dropout_rate == 0:
        return 1.0
    b, h, q, k = _positions(problem)
    if problem.broadcast_dropout:
        b, h = b * 0, h * 0
    words = _rows(problem, inputs.dropout_words)[:, :, None, None, None]
    keep = dropout.keep((words[:, 0], words[:, 1]), b, h, q, k, problem.dropout_rate)
    return keep.astype(problem.accumulator) / (1 - problem.dropout_rate)


def _logits(problem: Problem, inputs: Inputs, q: jax.Array, k: jax.Array, visible: jax.Array) -> Any:
    """Return ``(logits, pull, scale)``: ``pull(ds)`` returns the gradients of the scaled products and of the
    operands of the scores, by name."""
    scale = _rows(problem, inputs.scale) if problem.scaled else problem.default_scale
    s, slope = scores.logits(_einsum("bhqd,bhkd->bhqk", q, k), scale, problem.softcap)
    if inputs.scores is None:
        return jnp.where(visible, s, -jnp.inf), lambda ds: (scores.through_softcap(ds, slope), {}), scale
    position, operands = _positions(problem), inputs.scores.operands()

    def change(s, arrays):
        spread = lambda n, x: _rows(problem, whole(x._replace(array=arrays[n]), *position[2:]))
        return inputs.scores.apply(s, position, {n: spread(n, x) for n, x in operands.items()})

    s, back = jax.vjp(change, s, scores.in_dtype({n: x.array for n, x in operands.items()}, s.dtype))

    def pull(ds):
        ds, gradients = back(ds)
        return scores.through_softcap(ds, slope), gradients

    return jnp.where(visible, s, -jnp.inf), pull, scale


def forward(problem: Problem, inputs: Inputs) -> Results:
    """Compute the results of a call."""
    q, k, v = _repeat(problem, inputs)
    visible = _visible(problem, inputs)
    s, _, _ = _logits(problem, inputs, q, k, visible)
    top = jnp.max(s, axis=-1)
    sink = _rows(problem, inputs.sinks)[..., 0] if problem.sinks else -jnp.inf
    pivot = softmax.pivot_of(jnp.maximum(top, sink))
    total = jnp.sum(jnp.exp(s - pivot[..., None]), axis=-1) + jnp.exp(sink - pivot)
    lse = jnp.where(total > 0, pivot + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    # Not from lse: where logits are as large as a float can be, what the sum adds to them is lost in it.
    p = jnp.exp(s - pivot[..., None]) / jnp.where(total > 0, total, 1)[..., None] * _kept(problem, inputs)
    dead = ~jnp.any(visible, axis=2)[..., None]
    out = _einsum("bhqk,bhkd->bhqd", p, jnp.where(dead, 0, v))
    return Results(out.swapaxes(1, 2).astype(problem.dtype), lse, top if problem.max_logit else None)


def backward(
    problem: Problem,
    inputs: Inputs,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Wanted,
) -> Gradients:
    """Compute the gradients of a call from its saved ``out`` and ``lse`` and their cotangents."""
    q, k, v = _repeat(problem, inputs)
    visible = _visible(problem, inputs)
    do, o = (x.astype(problem.accumulator).swapaxes(1, 2) for x in (dout, out))
    # Rows that see nothing and keys that nobody sees may hold anything; 0 * NaN must not enter a sum.
    seen = jnp.any(visible, axis=2)[..., None]
    sees = jnp.any(visible, axis=3)[..., None]
    q, do, k, v = (jnp.where(m, x, 0) for m, x in ((sees, q), (sees, do), (seen, k), (seen, v)))
    s, pull, scale = _logits(problem, inputs, q, k, visible)
    p, kept = softmax.weights(s, lse), _kept(problem, inputs)
    delta = jnp.sum(do * o, axis=-1)
    if dlse is not None:
        delta = delta - dlse
    dp = _einsum("bhqd,bhkd->bhqk", do, v) * kept
    ds = jnp.where(visible, p * (dp - delta[..., None]), 0)
    dv = _einsum("bhqk,bhqd->bhkd", p * kept, do)
    dqk, dscores = pull(ds)
    dq = _einsum("bhqk,bhkd->bhqd", dqk, k)
    dk = _einsum("bhqk,bhqd->bhkd", dqk, q) * scale
    dscale = jnp.sum(dq * q, axis=(1, 2, 3), keepdims=True)
    return Gradients(
        query=(dq * scale).swapaxes(1, 2).astype(problem.dtype),
        key=_over_group(problem, dk),
        value=_over_group(problem, dv),
        scores={n: dscores[n].astype(inputs.scores.operands()[n].array.dtype) for n in wanted.scores},
        scale=_sum_to(dscale, inputs.scale) if wanted.scale else None,
        sinks=scores.sink_gradient(inputs.sinks, lse, delta) if wanted.sinks else None,
    )


def _over_group(problem: Problem, x: jax.Array) -> jax.Array:
    """Sum ``[B, N, S, d]`` over the query heads of each key/value head; return ``[B, S, K, d]``."""
    batch, _, length, dim = x.shape
    x = x.reshape(batch, problem.kv_heads, problem.group, length, dim).sum(2)
    return x.swapaxes(1, 2).astype(problem.dtype)


def _sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over the axes along which ``like`` was broadcast."""
    x = x.reshape(-1, like.shape[0], *x.shape[1:]).sum(0)
    axes = tuple(a for a in range(1, 4) if like.shape[a] == 1)
    return x.sum(axes, keepdims=True).astype(like.dtype)

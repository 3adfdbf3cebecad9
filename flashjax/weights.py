"""The attention map, row by row: the probabilities of chosen queries, from the log-sum-exp of a call.

`flash_attention` never stores its weights, but they are not lost: one number a row, the lse, gives every
weight of that row back as ``exp(s - lse)``. What hides a key and what changes a logit is the same code as in
the call (`masks`, `scores`, `softmax`), on operands that are cut to the chosen rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import api, scores, softmax
from flashjax import problem as problems
from flashjax.operands import Operand, as_position, indices, whole
from flashjax.problem import Inputs, Problem


def attention_weights(
    query: Any,
    key: Any,
    lse: Any,
    rows: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    position_bias: Any = None,
    alibi_slopes: Any = None,
    score_fn: Any = None,
    sinks: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    softcap: float | None = None,
    precision: Any = None,
) -> jax.Array:
    r"""Compute the exact attention weights of chosen queries over all keys, to look at.

    .. math::
        P_{ij} = \exp(s_{ij} - \mathrm{lse}_i) \quad \text{for } i \text{ in rows, all } j

    where s are the logits of `flash_attention` with the same arguments, and a hidden key has the weight 0.
    Letters: as there; R chosen rows.

    Args:
      query: ``[B, T, N, D]`` or ``[T, N, D]``, all of it: positions count from its start.
      key: ``[B, S, K, D]`` or ``[S, K, D]``, dtype of query.
      lse: ``[B, T, N]`` or ``[T, N]``, float32 (float64 for float64 inputs): what
        ``flash_attention(..., return_residual=True)`` returned for these very arguments.
      rows: int ``[R]``: positions of queries, in any order, also repeated; a list, or an array, which may be
        traced. Negative ones do not count from the end. All batch rows share them; `jax.vmap` gives each
        its own.
      bias, mask, position_bias, alibi_slopes, score_fn, scale, is_causal, query_seq_lengths,
        key_value_seq_lengths, local_window_size, softcap, precision: those of the call.
      sinks: those of the call. They are in lse already; here they are only checked.

    Returns:
      ``[B, N, R, S]``, or ``[N, R, S]`` where query has three dimensions, float32 (float64 for float64
      inputs), before dropout. A row sums to 1; with sinks to less, since the sink's share is no key's. A row
      that sees no key is 0 throughout. Without dropout
      ``weights @ value`` are the rows of ``out``.

    Raises:
      ValueError, TypeError: an argument is wrong, as in `flash_attention` (where a message names value, it
        speaks of key); or lse is not what that call returns; or a row lies outside of 0 to T - 1. Traced
        rows are not looked at but clipped to that range.

    Notes:
      Memory is ``B N R S``, and with a mask a copy of key; nothing is T x S, but for all rows at once.
      A weight is as exact as its logit and lse: its relative error is the absolute error of these. NaN in a
      hidden key stays out of the weights, and out of gradients where no chosen row sees the key. It is plain
      JAX, which differentiates it in every argument, in both modes; a gradient that shall pass through lse
      too needs the call inside of the differentiated function.

    Example:
      >>> import jax
      >>> from flashjax import attention_weights, flash_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1000, 4, 64))
      >>> out, lse = flash_attention(q, k, v, is_causal=True, return_residual=True)
      >>> p = attention_weights(q, k, lse, [0, 999], is_causal=True)
      >>> p.shape, p[0, 0, 0, :3].round(3).tolist()
      ((2, 4, 2, 1000), [1.0, 0.0, 0.0])

    Source: Dao et al., "FlashAttention" (2022), appendix B.2: the backward pass recomputes P likewise.
    """
    problem, inputs = api._prepare(
        query,
        key,
        key,
        bias,
        mask,
        position_bias=position_bias,
        alibi_slopes=alibi_slopes,
        score_fn=score_fn,
        sinks=sinks,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        softcap=softcap,
        dropout_rate=0.0,
        dropout_key=None,
        broadcast_dropout=False,
        precision=precision,
        deterministic=False,
        return_max_logit=False,
    )
    single = jnp.ndim(query) == 3
    lse = _check_lse(lse, problem, single)
    rows = _check_rows(rows, problem.query_length)
    if problem.empty:
        shape = (problem.batch, problem.heads, rows.size, problem.key_length)
        weights = jnp.zeros(shape, problem.accumulator)
    else:
        weights = _weights(problem, inputs._replace(value=None, sinks=None), lse, rows)
    return weights[0] if single else weights


def _check_lse(lse: Any, problem: Problem, single: bool) -> jax.Array:
    """Check that lse is in the public layout of this call, and return it as ``[B, T, N]``."""
    lse = problems.check_array("lse", lse)
    full = (problem.batch, problem.query_length, problem.heads)
    wanted, layout = (full[1:], "[T, N]") if single else (full, "[B, T, N]")
    origin = "as flash_attention(..., return_residual=True) returns it"
    if lse.shape != wanted:
        raise ValueError(f"lse has shape {lse.shape}; it must be {layout} = {wanted}, {origin}")
    if lse.dtype != problem.accumulator:
        raise TypeError(
            f"lse has dtype {lse.dtype}; it must be {problem.accumulator} for a query of {problem.dtype}, "
            f"{origin}"
        )
    return lse.reshape(full)


def _check_rows(rows: Any, length: int) -> jax.Array:
    """Check the chosen rows and return them as int32 ``[R]`` within 0 to ``length - 1``."""
    if isinstance(rows, list | tuple) and not rows:
        rows = np.zeros(0, np.int32)
    array = problems.check_integers("rows", rows)
    if array.ndim != 1:
        raise ValueError(
            f"rows has shape {array.shape}; it must be [R]: positions of queries, such as [0, 7]"
        )
    if not problems.is_traced(rows):
        values = np.asarray(rows)
        outside = values[(values < 0) | (values >= length)]
        if outside.size:
            raise ValueError(
                f"rows holds {outside[0]}, and query has length {length}; rows must be at least 0 and less "
                f"than {length}. The last one is query.shape[-3] - 1, not -1"
            )
    return jnp.clip(as_position(array), 0, max(length - 1, 0))


@functools.partial(jax.jit, static_argnums=0)
def _weights(problem: Problem, inputs: Inputs, lse: jax.Array, rows: jax.Array) -> jax.Array:
    """Return ``[B, N, R, S]`` from lse ``[B, T, N]`` and rows ``[R]``."""
    query, key = jnp.take(inputs.query, rows, axis=1), inputs.key
    b, h, q, k = indices(problem.batch, problem.heads, rows.size, problem.key_length)
    position = (b, h, rows.reshape(q.shape), k)
    visible = None
    if inputs.mask is not None:
        visible = inputs.mask.element(*position, **_cut(problem, inputs.mask, *position[2:]))
        visible = jnp.broadcast_to(visible, (problem.batch, problem.heads, rows.size, problem.key_length))
        query, key = _without_dead(problem, visible, query, key)
    qk = _products(problem, query, key)
    s, _ = scores.logits(qk, inputs.scale if problem.scaled else problem.default_scale, problem.softcap)
    if inputs.scores is not None:
        s = inputs.scores.apply(s, position, _cut(problem, inputs.scores, *position[2:]))
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    return softmax.weights(s, jnp.take(lse, rows, axis=1).swapaxes(1, 2))


def _products(problem: Problem, query: jax.Array, key: jax.Array) -> jax.Array:
    """Multiply ``[B, R, N, D]`` and ``[B, S, K, D]`` to ``[B, N, R, S]``; no key head is repeated."""
    batch, count, heads, dim = query.shape
    grouped = query.reshape(batch, count, problem.kv_heads, problem.group, dim)
    qk = jnp.einsum(
        "brkgd,bskd->bkgrs",
        grouped,
        key,
        precision=problem.precision,
        preferred_element_type=problem.accumulator,
    )
    return qk.reshape(batch, heads, count, problem.key_length)


def _without_dead(
    problem: Problem, visible: jax.Array, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Zero chosen rows that see nothing and keys that none of them sees. They may hold NaN, and 0 * NaN must
    not enter a sum of the backward pass."""
    sees = jnp.any(visible, axis=3).swapaxes(1, 2)[..., None]
    seen = jnp.any(visible, axis=2).reshape(problem.batch, problem.kv_heads, problem.group, -1)
    seen = jnp.any(seen, axis=2).swapaxes(1, 2)[..., None]
    return jnp.where(sees, query, 0), jnp.where(seen, key, 0)


def _cut(problem: Problem, part: Any, q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """Give each operand of a mask or of the scores one entry per chosen row and key, ready to broadcast."""
    return {name: _cut_operand(problem, x, q, k) for name, x in part.operands().items()}


def _cut_operand(problem: Problem, operand: Operand, q: jax.Array, k: jax.Array) -> jax.Array:
    array = operand.array
    if operand.relative:
        if array.shape[3] == 1:
            return array
        return array[:, :, 0, (k - q + (problem.query_length - 1))[0, 0]]
    if array.shape[2] > 1:
        array = jnp.take(array, q.reshape(-1) // operand.block[0], axis=2)
    return whole(operand._replace(array=array, block=(1, operand.block[1])), q, k)

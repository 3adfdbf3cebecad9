"""How wrong an answer may be: twice as wrong as the same maths done plainly, plus one rounding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import backends, dropout, flash_attention, masks, operands, reference, scores, softmax
from flashjax.problem import Results


def run(
    function: Callable[..., Any],
    arrays: dict[str, Any],
    cotangents: Any,
    jit: bool = True,
) -> dict[str, jax.Array]:
    """Return out, lse and the gradient of every array of ``function(**arrays) -> (out, lse)``.

    The cotangent of lse is zero where lse is infinite: there is nothing to differentiate.
    """

    def both(arrays, cotangents):
        (out, lse), pull = jax.vjp(lambda a: function(**a), arrays)
        dlse = jnp.where(jnp.isfinite(lse), cotangents[1], 0).astype(lse.dtype)
        (gradients,) = pull((cotangents[0].astype(out.dtype), dlse))
        return {"out": out, "lse": lse, **{f"d{name}": x for name, x in named(gradients).items()}}

    return (jax.jit(both) if jit else both)(arrays, cotangents)


def named(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a dict by name; those of pytrees under a number of their own."""
    flat = {}
    for name, tree in arrays.items():
        leaves = jax.tree.leaves(tree)
        whole = len(leaves) == 1 and leaves[0] is tree
        flat |= {name: tree} if whole else {f"{name}.{n}": x for n, x in enumerate(leaves)}
    return flat


def dtypes(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the dtypes that the results of `run` must have."""
    gradients = {f"d{name}": x.dtype for name, x in named(arrays).items()}
    return {"out": arrays["query"].dtype, "lse": jnp.float32, **gradients}


def oracle(arrays: dict[str, Any], options: dict[str, Any], cotangents: Any) -> dict[str, np.ndarray]:
    """Run the reference on the same values, in float64 so that its own rounding does not count."""
    with jax.enable_x64(True):
        wide, (dout, dlse) = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arrays, cotangents))
        call = lambda **a: flash_attention(**a, **options, implementation="reference", return_residual=True)
        return jax.tree.map(np.asarray, run(call, wide, (dout, dlse)))


def plain(arrays: dict[str, Any], options: dict[str, Any], cotangents: Any) -> dict[str, jax.Array]:
    """Do the same maths in the dtype of the inputs: what the error is measured by.

    For half precision that is the textbook, differentiated by JAX. In float32 the formula of the gradient
    itself counts (``delta = rowsum(dO * O)`` is rounded apart from dP), so there it is the reference's; and
    so it is in half precision for what sums over places, with P and O rounded.
    """
    attend = functools.partial(flash_attention, **options, return_residual=True)
    if arrays["query"].dtype == jnp.float32:
        return run(functools.partial(attend, implementation="reference"), arrays, cotangents)
    results = run(lambda **a: plain_attention(**a, **options), arrays, cotangents)
    if any(name.startswith(SUMS) for name in results):
        shipped = backends.BACKENDS
        backends.BACKENDS = (*shipped, _ROUNDED)
        try:
            # Not in one program, in which XLA would leave the rounding of O out.
            call = functools.partial(attend, implementation=_ROUNDED.name)
            summed = run(call, arrays, cotangents, jit=False)
        finally:
            backends.BACKENDS = shipped
        results |= {name: x for name, x in summed.items() if name.startswith(SUMS)}
    return results


def _forward_rounded(problem, inputs):
    """Compute results as the reference does, with P rounded before it is multiplied by V."""
    lse = reference.forward(problem, inputs).lse
    q, k, v = reference._repeat(problem, inputs)
    visible = reference._visible(problem, inputs)
    s, _, _ = reference._logits(problem, inputs, q, k, visible)
    p = softmax.weights(s, lse) * reference._kept(problem, inputs)
    kind = jnp.finfo(problem.dtype)
    p = jax.lax.reduce_precision(p, kind.nexp, kind.nmant)
    out = jnp.einsum("bhqk,bhkd->bqhd", p, jnp.where(jnp.any(visible, 2)[..., None], v, 0))
    return Results(out.astype(problem.dtype), lse)


_ROUNDED = backends.Backend("rounded", lambda problem: None, _forward_rounded, reference.backward, False)


def plain_attention(
    query,
    key,
    value,
    bias=None,
    scale=None,
    position_bias=None,
    alibi_slopes=None,
    score_fn=None,
    sinks=None,
    *,
    mask=None,
    softcap=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    dropout_rate=0.0,
    dropout_key=None,
):
    """Attention as a textbook would write it in the dtype of the inputs; JAX differentiates it.

    Products take inputs of that dtype and the softmax is in float32, as in `jax.nn`. Rows that see nothing
    give 0 and -inf.
    """
    batch, t, heads, dim = query.shape
    s_len = key.shape[1]
    group = heads // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    qk = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    s, _ = scores.logits(qk, dim**-0.5 if scale is None else scale, softcap)
    sizes = operands.Sizes(batch, heads, t, s_len, query_seq_lengths, key_value_seq_lengths)
    changes = scores.from_arguments(bias, position_bias, alibi_slopes, score_fn, sizes)
    if changes is not None:
        positions = operands.indices(batch, heads, t, s_len)
        spread = {n: operands.whole(x, *positions[2:]) for n, x in changes.operands().items()}
        s = changes.apply(s, positions, spread)
    visible = jnp.ones((batch, heads, t, s_len), bool)
    whole = masks.from_arguments(
        None,
        operands.Sizes(batch, heads, t, s_len),
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    sizes = {"batch": batch, "heads": heads}
    if whole is not None:
        b, h, q, k = jnp.ix_(*(jnp.arange(n) for n in (batch, heads, t, s_len)))
        visible &= whole.element(b, h, q, k, **{n: o.array for n, o in whole.operands().items()})
    if mask is not None:
        lengths = {
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
        }
        visible &= masks.as_mask(mask).dense(t, s_len, **sizes, **lengths)
    s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:  # one more key, whose value is 0
        column = jnp.broadcast_to(jnp.asarray(sinks, s.dtype).reshape(-1, 1, 1), (batch, heads, t, 1))
        s, visible = (jnp.concatenate(x, -1) for x in ((s, column), (visible, column > -jnp.inf)))
    any_visible = visible.any(-1)
    safe = jnp.where(any_visible[..., None], s, 0)
    lse = jnp.where(any_visible, jax.nn.logsumexp(safe, -1), -jnp.inf)
    p = jnp.where(any_visible[..., None], jax.nn.softmax(safe, -1), 0)[..., :s_len]
    if dropout_rate:
        b, h, q, k = jnp.ix_(*(jnp.arange(n) for n in (batch, heads, t, s_len)))
        first, second = dropout.key_words(dropout_key)
        p = p * dropout.keep((first, second), b, h, q, k, dropout_rate).astype(p.dtype) / (1 - dropout_rate)
    out = jnp.einsum("bnts,bsnd->btnd", p.astype(value.dtype), value)
    return out, lse.swapaxes(1, 2)


SUMS = "dbias", "dposition_bias", "dalibi_slopes", "dscore_fn", "dsinks", "dscale"
FEW = 2  # numbers of a result for which one draw says little: they may all be right or wrong by luck


def check_draws(draw: Callable[[int], Any], dtypes: dict[str, Any]) -> None:
    """Check ``draw(seed) -> (got, plain, truth)``; where a result has few numbers, those of several draws."""
    results = draw(0)
    few = [name for name, x in results[2].items() if np.size(x) <= FEW]
    if few:
        draws = [results, draw(1), draw(2)]
        for i, result in enumerate(results):
            result |= {name: np.stack([np.asarray(x[i][name]) for x in draws]) for name in few}
    check(*results, dtypes)


def check(
    got: dict[str, jax.Array],
    plain: dict[str, jax.Array],
    truth: dict[str, np.ndarray],
    dtypes: dict[str, Any],
) -> None:
    """Assert ``err(got, truth) <= 2 * err(plain, truth) + one ulp`` for every result.

    The error is the largest absolute difference, the ulp that of the largest value in the result's dtype. For
    what sums over places that largely cancel the error is the root of the mean square: the largest one is by
    luck several times that of another order of the same sum. So is that of few numbers: of n of them, a root
    of the mean square is known to about ``1 / sqrt(n)`` of itself, and twice that is allowed on top.
    """
    for name, wanted in truth.items():
        x, y, z = (np.asarray(a, np.float64) for a in (got[name], plain[name], wanted))
        assert x.shape == z.shape, name
        assert got[name].dtype == dtypes[name], name
        finite = np.isfinite(z)
        np.testing.assert_array_equal(x[~finite], z[~finite], err_msg=name)
        if not finite.any():
            continue
        size = (lambda e: np.sqrt((e**2).mean())) if name.startswith(SUMS) else (lambda e: np.abs(e).max())
        error, allowed = (size(a[finite] - z[finite]) for a in (x, y))
        ulp = float(jnp.finfo(got[name].dtype).eps) * np.abs(z[finite]).max()
        if name.startswith(SUMS):
            allowed *= 1 + 2 / np.sqrt(finite.sum())
        assert error <= 2 * allowed + ulp, f"{name}: error {error:.2e}, plain {allowed:.2e}, ulp {ulp:.2e}"

"""What the kernels of the backward pass share: the probabilities of a tile anew, and what goes with them.

    P = exp(S - lse)        dP = dO Vᵀ        dS = P ∘ (dP - (delta - dlse))        delta = rowsum(dO ∘ O)

Where logits are a constant times the products, the accumulator of S starts at ``-lse / scale``, and that of
dP at ``dlse - delta`` always: neither then takes a register beside the products.

A query beyond T, and one that sees no key, has ``lse = inf``, so that its probabilities are 0 whatever the
mask says.

Source: Dao et al., "FlashAttention" (2022), appendix B.2, algorithm 4; Dao, "FlashAttention-2" (2023),
algorithm 2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import scores
from flashjax.backends.hopper import logits, reading
from flashjax.backends.hopper.logits import LOG2E
from flashjax.problem import Problem

COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def starts(
    problem: Problem,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """Return what S and dP start from, float32 ``[B, N, length]`` with T rounded up to whole tiles.

    The first is ``-lse / scale`` where `logits.folds`, else ``lse * log2(e)``; the second ``dlse - delta``.
    """
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    begin = -delta if dlse is None else dlse - delta
    dead = lse == -jnp.inf
    begin = jnp.where(dead, 0, begin)
    lse = jnp.where(dead, jnp.inf, lse)
    lse = lse * (-1 / problem.default_scale if logits.folds(problem) else LOG2E)
    missing = ((0, 0), (0, 0), (0, length - problem.query_length))
    beyond = -jnp.inf if logits.folds(problem) else jnp.inf
    return jnp.pad(lse, missing, constant_values=beyond), jnp.pad(begin, missing)


def along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """Load a number for each column, and repeat it down the rows."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=COLUMNS), shape, [1])


def weights(
    plan: Any, scales: Any, b: Any, s: jax.Array, lse: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the probabilities of a tile, before the mask, and the slope of the softcap.

    Args:
      plan, scales, b: of the kernel, of the call, and the batch row.
      s: what the accumulator of the products holds; it started at `starts` where `logits.folds`.
      lse: ``lse()`` is lse in base 2 like ``s``, where it did not.
    """
    problem = plan.problem
    if logits.folds(problem):
        return jnp.exp2(s * (problem.default_scale * LOG2E)), None
    s, slope = logits.logits(problem, scales, b, s)
    return jnp.exp2(s * LOG2E - lse()), slope


def hide(plan: Any, rows: Any, cols: Any, slot: Any, tile: Any, p: jax.Array) -> jax.Array:
    """Zero the probabilities of a tile that the mask hides; ``rows()`` are its `reading.Rows`."""
    if not plan.masked:
        return p
    block = plan.view.block_columns
    count = p.shape[1]

    def hidden(p):
        seen = reading.seen(plan, rows(), cols, slot, tile.index * block, count)
        return jnp.where(seen, p, 0.0)

    return lax.cond(tile.partial, hidden, lambda p: p, p)


def through(p: jax.Array, dp: jax.Array, slope: jax.Array | None, dtype: Any) -> jax.Array:
    """Return dS with respect to the products up to the scale, in the dtype in which it is multiplied."""
    return scores.through_softcap(p * dp, slope).astype(dtype)

"""Values that no query sees and that are not numbers.

A hidden key has weight 0, but 0 · NaN is NaN, so a value that is not finite must not reach P V where no query
sees it: padding beyond a row's length may hold anything. (What lies beyond S is zero already, and a hidden
key's NaN ends in a logit that the mask replaces.)

The loader looks through V of each tile that is not wholly visible, while the others compute, and only
where it finds something does it ask the mask, query by query, and zeroes the rows of V that none of the
block's queries sees. A mask under which every query sees its own key needs none of this (`Mask.shows_own`).
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import reading
from flashjax.backends.hopper.config import ROWS
from flashjax.problem import Problem

WGMMA = plgpu.Layout.WGMMA


def possible(problem: Problem) -> bool:
    """Whether the mask may hide a key from every query."""
    if problem.mask is None:
        return False
    return not (problem.mask.shows_own() and problem.key_length <= problem.query_length)


def dead_queries_possible(problem: Problem) -> bool:
    """Whether the mask may hide every key from a query."""
    if problem.mask is None:
        return False
    return not (problem.mask.shows_own() and problem.query_length <= problem.key_length)


def clear_keys(ref: Any) -> None:
    """Zero what is not finite in a tile of K or V in the backward pass.

    A key that some query sees has made that query's lse or output NaN, and so its gradients: no zero hides
    it.
    """
    for start in range(0, ref.shape[0], ROWS):
        for part in _parts(ref, start):
            x = plgpu.load(part, layout=WGMMA)
            wide = x.astype(jnp.float32)
            part[...] = jnp.where(wide - wide == 0.0, x, jnp.zeros_like(x))


def clear_queries(shared: Any, slot: Any) -> None:
    """Zero the rows of a tile of Q and dO that see no key: their lse is infinite (`backward_start`)."""
    lse = shared.lse.at[slot]
    for start in range(0, lse.shape[0], ROWS):
        x = plgpu.load(lse.at[pl.ds(start, ROWS)], layout=WGMMA.reduce(1), optimized=False)
        dead = jnp.where(x - x == 0.0, 0, 1)

        @pl.when(jnp.max(dead) != 0)
        def _(start=start, dead=dead):
            for buffer in (shared.q, shared.do):
                for part in _parts(buffer.tile(slot), start):
                    x = plgpu.load(part, layout=WGMMA)
                    alive = lax.broadcast_in_dim(dead, x.shape, [0]) == 0
                    part[...] = jnp.where(alive, x, jnp.zeros_like(x))
            plgpu.commit_smem()


def clear(plan: Any, shared: Any, reader: reading.Reader, q0: Any, j: Any, slot: Any) -> None:
    """Zero what is not finite in the tile of V in a slot, where no query of the block from q0 on sees it."""
    v = shared.v.tile(slot)
    found = jnp.int32(0)
    for start in range(0, plan.config.block_k, ROWS):
        for part in _parts(v, start):
            x = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
            wrong = jnp.max(jnp.where(x - x == 0.0, 0, 1), axis=1)
            found = jnp.maximum(found, jnp.max(wrong))

    @pl.when(found != 0)
    def _():
        for start in range(0, plan.config.block_k, ROWS):
            seen = _seen(plan, shared, reader, q0, j, start, slot)
            for part in _parts(v, start):
                x = plgpu.load(part, layout=WGMMA)
                part[...] = jnp.where(lax.broadcast_in_dim(seen, x.shape, [0]) != 0, x, jnp.zeros_like(x))
        plgpu.commit_smem()


def _parts(v: Any, start: int) -> list[Any]:
    """Cut 64 rows of a tile to pieces that fit few registers."""
    columns = v.shape[1]
    width = min(columns, 64)
    return [v.at[pl.ds(start, ROWS), pl.ds(c, width)] for c in range(0, columns, width)]


def _seen(
    plan: Any, shared: Any, reader: reading.Reader, q0: Any, j: Any, start: int, slot: Any
) -> jax.Array:
    """Say of 64 keys of tile j, from ``start`` on, whether any query of the block sees them: 0 or 1."""
    config, problem = plan.config, plan.problem
    layout = WGMMA.reduce(1)
    k0 = j * config.block_k + start
    k = plgpu.layout_cast(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout) + k0, layout)
    b = lax.rem(reader.b, jnp.int32(problem.batch_period))

    def query(n, seen):
        q = q0 + n
        operands = reader.line(problem.mask.operands(), shared.cols, slot, start, k0, q)
        q = lax.broadcast_in_dim(q, k.shape, [])
        now = reading.visible(problem.mask, (b, reader.h, q, k), operands, layout)
        return jnp.where(now & (k < problem.key_length), one, seen)

    one, zero = (plgpu.layout_cast(jnp.full((ROWS,), n, jnp.int32), layout) for n in (1, 0))
    queries = jnp.minimum(config.block_q, problem.query_length - q0)
    return lax.fori_loop(0, queries, query, zero)

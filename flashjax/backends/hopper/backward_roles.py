"""The backward pass where the compute warpgroups share out the work on a tile: head dims up to 256.

A tile has 64 keys and 64 queries. One warpgroup makes P, the other dS; both go through shared memory, from
where each of them computes half of the columns of dV, dK and dQ. Tile n:

    warpgroup 0: S = K Qᵀ; P; mask; to shared memory
    warpgroup 1: dP = V dOᵀ; P from shared memory; dS; to shared memory
    both: issue dV += P dO of half of the columns, then dQ and dK of half of the columns
          wait for dQ, 64 columns at a time; add it to global memory
          wait for dK

Under a softcap the first passes P times its slope on as well.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import hidden, intrinsics, logits, recompute
from flashjax.backends.hopper.backward_keys import add_part, current, meet, rows_of
from flashjax.backends.hopper.config import ROWS

WGMMA = plgpu.Layout.WGMMA
TILE = (ROWS, ROWS)
P, DS = 0, 1  # which of the barriers of what is exchanged


def compute(
    plan: Any, inputs: Any, results: Any, shared: Any, barriers: Any, item: Any, base: Any, count: Any
) -> Any:
    """Compute half of the columns of dK and dV of 64 keys, and of this block's shares of dQ."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    d, dv = plan.columns
    parts = d // 2 // plan.part

    if plan.traits.clears_keys:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: hidden.clear_keys(shared.k.tile(0)))
        pl.when(warpgroup == 1)(lambda: hidden.clear_keys(shared.v.tile(0)))
        plgpu.commit_smem()
        meet(barriers)

    def step(dk_acc, dv_acc, n):
        # Behind barriers: the loop would otherwise keep addresses of shared memory in registers.
        warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
        zero = lax.optimization_barrier(jnp.int32(0))
        slot = lax.rem(n, jnp.int32(config.stages))
        k, v = shared.k.tile(zero), shared.v.tile(zero)
        q, do = shared.q.tile(slot), shared.do.tile(slot)
        p_smem, ds_smem = shared.p.at[zero], shared.ds.at[zero]
        ps_smem = p_smem if shared.ps is None else shared.ps.at[zero]
        half = lambda ref, columns: ref.at[:, pl.ds(warpgroup * (columns // 2), columns // 2)]

        plgpu.barrier_wait(barriers.tile_full.at[slot])
        place = recompute.read_place(plan, shared, n)
        plgpu.barrier_wait(barriers.taken.at[P])
        plgpu.barrier_wait(barriers.taken.at[DS])

        def first(acc):
            lse = lambda: recompute.along_columns(shared.lse.at[slot], TILE)
            if logits.folds(problem):
                acc[...] = lse()
            plgpu.wgmma(acc, k, q.T)
            p, slope = recompute.weights(plan, inputs.scale, lambda: place.head[0], acc[...], lse)
            rows = lambda: rows_of(plan, inputs, shared, place, 0)
            p = recompute.hide(plan, shared.cols, slot, place.partial, lambda: place.q0, rows, p)
            p_smem[...] = p.astype(dtype)
            if slope is not None:
                ps_smem[...] = (p * slope).astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.handed.at[P])

        def second(acc):
            acc[...] = recompute.along_columns(shared.delta.at[slot], TILE)
            plgpu.wgmma(acc, v, do.T)
            dp = acc[...]
            plgpu.barrier_wait(barriers.handed.at[P])
            p = plgpu.load(ps_smem, layout=WGMMA).astype(jnp.float32)
            ds_smem[...] = (p * dp).astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.handed.at[DS])

        for role, makes in ((0, first), (1, second)):
            pl.when(warpgroup == role)(lambda makes=makes: pl.run_scoped(makes, plgpu.ACC(TILE, jnp.float32)))
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.handed.at[P]))
        plgpu.wgmma(dv_acc, p_smem, half(do, dv))
        plgpu.barrier_wait(barriers.handed.at[DS])

        def gradients(*dq_accs):
            part = lambda c: warpgroup * parts + c
            for c, acc in enumerate(dq_accs):
                plgpu.wgmma(acc, ds_smem.T, k.at[:, pl.ds(part(c) * plan.part, plan.part)])
            plgpu.wgmma(dk_acc, ds_smem, half(q, d))
            plgpu.wgmma_wait(len(dq_accs) + 1)
            plgpu.barrier_arrive(barriers.taken.at[P])
            for c, acc in enumerate(dq_accs):
                dq = plgpu.wgmma_accumulator_load(acc, wait_n=len(dq_accs) - c)
                add_part(plan, inputs, place.number, 0, part(c), dq)

        if plan.adds:
            pl.run_scoped(gradients, *[plgpu.ACC((ROWS, plan.part), jnp.float32)] * parts)
        else:
            gradients()
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.tile_empty.at[slot])
        plgpu.barrier_arrive(barriers.taken.at[DS])

    def all_tiles(dk_acc, dv_acc):
        end = base + count
        # At least one, as always: the compiler then needs no way around the loop.
        lax.fori_loop(0, jnp.maximum(count, 1), lambda n, _: step(dk_acc, dv_acc, base + n), None)
        return *(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in (dk_acc, dv_acc)), end

    dk, dvalue, end = pl.run_scoped(
        all_tiles, plgpu.ACC((ROWS, d // 2), jnp.float32), plgpu.ACC((ROWS, dv // 2), jnp.float32)
    )
    item = current(plan, shared)
    intrinsics.gather_warps()  # all have read the item
    plgpu.barrier_arrive(barriers.kv_empty)
    warpgroup, k0 = lax.axis_index("warpgroup"), item.i * config.block_k
    dk = dk * logits.factor(problem, inputs.scale, lambda: item.b)
    for array, x in zip(results, (dk, dvalue), strict=True):
        intrinsics.store_tile(array.at[item.b, :, item.h], x.astype(dtype), k0, warpgroup * x.shape[1])
    return end

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

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import hidden, intrinsics, logits, reading, recompute, walk
from flashjax.backends.hopper.backward_keys import meet
from flashjax.backends.hopper.config import ROWS

WGMMA = plgpu.Layout.WGMMA
TILE = (ROWS, ROWS)


def compute(plan: Any, inputs: Any, shared: Any, barriers: Any, item: Any, base: Any, count: Any) -> Any:
    """Compute half of the columns of dK and dV of 64 keys, and of this block's shares of dQ."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    d, dv = plan.columns
    run = None if plan.hands_on else walk.run_of(plan, inputs, item, item.i * config.block_k, config.block_k)
    if run is not None:
        count = lax.optimization_barrier(jnp.int32(run.count))
    parts = d // 2 // plan.part

    plgpu.barrier_wait(barriers.kv_full)
    if plan.traits.clears_keys:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(lambda: hidden.clear_keys(shared.k.tile(0)))
        pl.when(warpgroup == 1)(lambda: hidden.clear_keys(shared.v.tile(0)))
        plgpu.commit_smem()
        meet(barriers)
    held = reading.hold(plan, inputs, item, item.i * config.block_k)

    def step(dk_acc, dv_acc, n, _):
        # Behind barriers: the loop would otherwise keep addresses of shared memory in registers.
        warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
        zero = lax.optimization_barrier(jnp.int32(0))
        q_slot = lax.rem(base + n, jnp.int32(config.stages_q))
        do_slot = lax.rem(base + n, jnp.int32(config.stages_do))
        k, v = shared.k.tile(zero), shared.v.tile(zero)
        q, do = shared.q.tile(q_slot), shared.do.tile(do_slot)
        p_smem, ds_smem = shared.p.at[zero], shared.ds.at[zero]
        ps_smem = p_smem if shared.ps is None else shared.ps.at[zero]
        half = lambda ref, columns: ref.at[:, pl.ds(warpgroup * (columns // 2), columns // 2)]

        plgpu.barrier_wait(barriers.q_full.at[q_slot])
        tile = walk.decode(plan, shared.tile[q_slot]) if run is None else walk.nth(plan, run, item, n)
        plgpu.barrier_wait(barriers.do_full.at[do_slot])
        plgpu.barrier_wait(barriers.p_empty)
        plgpu.barrier_wait(barriers.ds_empty)

        def first(acc):
            lse = lambda: recompute.along_columns(shared.lse.at[q_slot], TILE)
            if logits.folds(problem):
                acc[...] = lse()
            plgpu.wgmma(acc, k, q.T)
            p, slope = recompute.weights(plan, inputs.scale, item.b, acc[...], lse)
            p = recompute.hide(plan, functools.partial(held.rows, tile), shared.cols, q_slot, tile, p)
            p_smem[...] = p.astype(dtype)
            if slope is not None:
                ps_smem[...] = (p * slope).astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.p_full)

        def second(acc):
            acc[...] = recompute.along_columns(shared.delta.at[do_slot], TILE)
            plgpu.wgmma(acc, v, do.T)
            dp = acc[...]
            plgpu.barrier_wait(barriers.p_full)
            p = plgpu.load(ps_smem, layout=WGMMA).astype(jnp.float32)
            ds_smem[...] = recompute.through(p, dp, None, dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.ds_full)

        for role, makes in ((0, first), (1, second)):
            pl.when(warpgroup == role)(lambda makes=makes: pl.run_scoped(makes, plgpu.ACC(TILE, jnp.float32)))
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.p_full))
        plgpu.wgmma(dv_acc, p_smem, half(do, dv))
        plgpu.barrier_wait(barriers.ds_full)

        def gradients(*dq_accs):
            part = lambda c: warpgroup * parts + c
            for c, acc in enumerate(dq_accs):
                plgpu.wgmma(acc, ds_smem.T, k.at[:, pl.ds(part(c) * plan.part, plan.part)])
            plgpu.wgmma(dk_acc, ds_smem, half(q, d))
            plgpu.wgmma_wait(len(dq_accs) + 1)
            plgpu.barrier_arrive(barriers.do_empty.at[do_slot])
            plgpu.barrier_arrive(barriers.p_empty)
            for c, acc in enumerate(dq_accs):
                dq = plgpu.wgmma_accumulator_load(acc, wait_n=len(dq_accs) - c)
                head = item.h * plan.group + tile.g
                intrinsics.add_tile(inputs.dq.at[item.b, head, tile.index, part(c)], dq)

        count_dq = parts if plan.adds else 0
        if count_dq:
            pl.run_scoped(gradients, *[plgpu.ACC((ROWS, plan.part), jnp.float32)] * count_dq)
        else:
            gradients()
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_empty.at[q_slot])
        plgpu.barrier_arrive(barriers.ds_empty)

    def all_tiles(dk_acc, dv_acc):
        lax.fori_loop(0, count, functools.partial(step, dk_acc, dv_acc), None)
        return plgpu.wgmma_accumulator_load(dk_acc, wait_n=0), plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)

    dk, dvalue = pl.run_scoped(
        all_tiles, plgpu.ACC((ROWS, d // 2), jnp.float32), plgpu.ACC((ROWS, dv // 2), jnp.float32)
    )
    meet(barriers)  # both have read K and V
    warpgroup = lax.axis_index("warpgroup")
    half = lambda ref, columns: ref.at[:, pl.ds(warpgroup * (columns // 2), columns // 2)]
    scale = logits.factor(problem, inputs.scale, item.b)
    half(shared.k.tile(0), d)[...] = (dk * scale).astype(dtype)
    half(shared.v.tile(0), dv)[...] = dvalue.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.results)
    return base + count

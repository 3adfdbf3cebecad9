"""The backward pass where the compute warpgroups share out the keys of a tile: head dims up to 128.

Each of two warpgroups owns 64 keys, with their dK and dV in registers. S and dP are computed transposed,
keys by queries, so that P and dS are left operands of the products for dV and dK as they lie in registers.
dS goes through shared memory too, because dQ sums over the keys of both; each warpgroup computes half of it:
64 of 128 queries, or 64 of 128 columns where a tile has 64 queries. dQ of a tile is computed in the next
one's turn: its dS is there by then, and nobody waits for the other. Tile n:

    issue S = K Qᵀ and dP = V dOᵀ    tensor cores, asynchronous
    wait for S; P; mask              runs under dP
    issue dV += P dO                 before the wait for dP, which the compiler would else hoist over P
    wait for dP; dS
    issue dQ of tile n - 1, then dS to shared memory, issue dK += dS Q
    wait for dQ; add it to global memory
    wait for dK
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import hidden, intrinsics, logits, reading, recompute, walk
from flashjax.backends.hopper.config import ROWS


def compute(plan: Any, inputs: Any, shared: Any, barriers: Any, item: Any, base: Any, count: Any) -> Any:
    """Compute dK and dV of 64 keys, and half of this block's shares of dQ."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    block_q, (d, dv) = config.block_q, plan.columns
    warpgroup = lax.axis_index("warpgroup")
    run = None if plan.hands_on else walk.run_of(plan, inputs, item, item.i * config.block_k, config.block_k)
    if run is not None:
        count = lax.optimization_barrier(jnp.int32(run.count))
    k_all, v_all = shared.k.tile(0), shared.v.tile(0)
    own = lambda ref, warpgroup: ref.at[pl.ds(warpgroup * ROWS, ROWS)]

    plgpu.barrier_wait(barriers.kv_full)
    if plan.traits.clears_keys:
        for ref in (k_all, v_all):
            hidden.clear_keys(own(ref, warpgroup))
        plgpu.commit_smem()
        meet(barriers)
    held = reading.hold(plan, inputs, item, item.i * config.block_k + warpgroup * ROWS)

    def tile_of(n, slot):
        if run is not None:
            return walk.nth(plan, run, item, n)
        return walk.decode(plan, shared.tile[slot])

    def step(dk_acc, dv_acc, n, before):
        # Behind a barrier: the loop would otherwise keep addresses of shared memory in registers.
        warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
        q_slot = lax.rem(base + n, jnp.int32(config.stages_q))
        do_slot = lax.rem(base + n, jnp.int32(config.stages_do))
        ds_slot = lax.optimization_barrier(lax.rem(n, jnp.int32(2)))
        q, do = shared.q.tile(q_slot), shared.do.tile(do_slot)
        plgpu.barrier_wait(barriers.q_full.at[q_slot])
        tile = tile_of(n, q_slot)

        def probabilities(s_acc, dp_acc):
            shape = (ROWS, block_q)
            lse = lambda: recompute.along_columns(shared.lse.at[q_slot], shape)
            if logits.folds(problem):
                s_acc[...] = lse()
            plgpu.barrier_wait(barriers.do_full.at[do_slot])
            dp_acc[...] = recompute.along_columns(shared.delta.at[do_slot], shape)
            if config.ordered:
                intrinsics.await_turn(warpgroup)
            plgpu.wgmma(s_acc, own(k_all, warpgroup), q.T)
            plgpu.wgmma(dp_acc, own(v_all, warpgroup), do.T)
            if config.ordered:
                intrinsics.give_turn(1 - warpgroup)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, slope = recompute.weights(plan, inputs.scale, item.b, s, lse)
            rows = functools.partial(held.rows, tile)
            p = recompute.hide(plan, rows, shared.cols, q_slot, tile, p)
            narrow = p.astype(dtype)
            plgpu.wgmma(dv_acc, narrow, do)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            if config.narrow and slope is None:
                return narrow * dp.astype(dtype)
            return recompute.through(p, dp, slope, dtype)

        ds = pl.run_scoped(
            probabilities, plgpu.ACC((ROWS, block_q), jnp.float32), plgpu.ACC((ROWS, block_q), jnp.float32)
        )
        if not plan.adds:
            plgpu.wgmma(dk_acc, ds, q)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(barriers.do_empty.at[do_slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers.q_empty.at[q_slot])
            return before

        def last(dq_acc):
            other = 1 - ds_slot
            plgpu.barrier_wait(barriers.ds_full.at[other])
            issue_dq(dq_acc, other, warpgroup)
            plgpu.barrier_wait(barriers.ds_empty.at[ds_slot])
            own(shared.ds.at[ds_slot], warpgroup)[...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.ds_full.at[ds_slot])
            plgpu.wgmma(dk_acc, ds, q)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            plgpu.barrier_arrive(barriers.do_empty.at[do_slot])
            plgpu.barrier_arrive(barriers.ds_empty.at[other])
            pl.when(n > 0)(lambda: send_dq(dq, before, warpgroup))

        pl.run_scoped(last, plgpu.ACC((ROWS, plan.part), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_empty.at[q_slot])
        return place_of(tile)

    def place_of(tile):
        """Make one number of where a tile's dQ goes."""
        return tile.index if plan.group == 1 else tile.g * plan.view.count_columns + tile.index

    def issue_dq(dq_acc, slot, warpgroup):
        ds = shared.ds.at[slot]
        if block_q == ROWS:
            plgpu.wgmma(dq_acc, ds.T, k_all.at[:, pl.ds(warpgroup * (d // 2), d // 2)])
        else:
            plgpu.wgmma(dq_acc, ds.at[:, pl.ds(warpgroup * ROWS, ROWS)].T, k_all)

    def send_dq(dq, place, warpgroup):
        g, index = 0, place
        if plan.group > 1:
            count = jnp.int32(plan.view.count_columns)
            g, index = lax.div(place, count), lax.rem(place, count)
        tile, part = (index, warpgroup) if block_q == ROWS else (2 * index + warpgroup, 0)
        intrinsics.add_tile(inputs.dq.at[item.b, item.h * plan.group + g, tile, part], dq)

    def all_tiles(dk_acc, dv_acc):
        first = jnp.int32(0)
        if plan.adds:
            # As if a tile before the first had left its dS: what is made of it is not sent.
            plgpu.barrier_wait(barriers.ds_empty.at[1])
            plgpu.barrier_arrive(barriers.ds_full.at[1])
        place = lax.fori_loop(0, count, functools.partial(step, dk_acc, dv_acc), first)
        if plan.adds:

            def end(dq_acc):
                warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
                slot = lax.optimization_barrier(lax.rem(count - 1, jnp.int32(2)))
                plgpu.barrier_wait(barriers.ds_full.at[slot])
                issue_dq(dq_acc, slot, warpgroup)
                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                plgpu.barrier_arrive(barriers.ds_empty.at[slot])
                send_dq(dq, place, warpgroup)

            pl.run_scoped(end, plgpu.ACC((ROWS, plan.part), jnp.float32))
        return plgpu.wgmma_accumulator_load(dk_acc, wait_n=0), plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)

    dk, dvalue = pl.run_scoped(
        all_tiles, plgpu.ACC((ROWS, d), jnp.float32), plgpu.ACC((ROWS, dv), jnp.float32)
    )
    if plan.adds:
        meet(barriers)  # both have read K
    warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
    scale = logits.factor(problem, inputs.scale, item.b)
    own(k_all, warpgroup)[...] = (dk * scale).astype(dtype)
    own(v_all, warpgroup)[...] = dvalue.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.results)
    return base + count


def meet(barriers: Any) -> None:
    """Wait until all compute warpgroups are here."""
    plgpu.barrier_arrive(barriers.met)
    plgpu.barrier_wait(barriers.met)

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

Registers decide: one too many and the compiler has the products wait for one another. What changes with the
item only is therefore read from shared memory anew where it is needed.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import scores
from flashjax.backends.hopper import hidden, intrinsics, logits, reading, recompute, schedule
from flashjax.backends.hopper.config import ROWS


def compute(
    plan: Any, inputs: Any, results: Any, shared: Any, barriers: Any, item: Any, base: Any, count: Any
) -> Any:
    """Compute dK and dV of 64 keys, and half of this block's shares of dQ."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    rate = problem.dropout_rate
    block_q, (d, dv) = config.block_q, plan.columns
    k_all, v_all = shared.k.tile(0), shared.v.tile(0)
    own = lambda ref, warpgroup: ref.at[pl.ds(warpgroup * ROWS, ROWS)]

    if plan.traits.clears_keys:
        for ref in (k_all, v_all):
            hidden.clear_keys(own(ref, lax.axis_index("warpgroup")))
        plgpu.commit_smem()
        meet(barriers)

    def step(dk_acc, dv_acc, n):
        # Behind a barrier: the loop would otherwise keep addresses of shared memory in registers.
        warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
        slot = lax.rem(n, jnp.int32(config.stages))
        ds_slot = lax.optimization_barrier(lax.rem(n, jnp.int32(2)))
        q, do = shared.q.tile(slot), shared.do.tile(slot)
        plgpu.barrier_wait(barriers.tile_full.at[slot])
        place = recompute.read_place(plan, shared, n)

        def probabilities(s_acc, dp_acc):
            shape = (ROWS, block_q)
            lse = lambda: recompute.along_columns(shared.lse.at[slot], shape)
            rows = lambda: rows_of(plan, inputs, shared, place, lax.axis_index("warpgroup") * ROWS)
            tile = recompute.Tile(plan, shared.cols, slot, lambda: place.q0, rows)
            if plan.alone:
                plgpu.barrier_wait(barriers.alone_full)
            recompute.begin(s_acc, tile, lse)
            if plan.alone:
                intrinsics.gather_warps()  # all have read it
                plgpu.barrier_arrive(barriers.alone_empty)
            delta = lambda: recompute.along_columns(shared.delta.at[slot], shape)
            # (1 - rate) (dP - delta) where dropout keeps: the difference before anything is rounded.
            begin = delta if rate == 0 else lambda: delta() * (1 - rate)
            dp_acc[...] = begin()
            if config.ordered:
                intrinsics.await_turn(warpgroup)
            plgpu.wgmma(s_acc, own(k_all, warpgroup), q.T)
            plgpu.wgmma(dp_acc, own(v_all, warpgroup), do.T)
            if config.ordered == "early":
                intrinsics.give_turn(1 - warpgroup)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, slope = recompute.weights(inputs.scale, s, tile, lse)
            p = recompute.hide(tile, place.partial, p)
            narrow = p.astype(dtype)
            kept = recompute.dropped(tile, p).astype(dtype) if rate > 0 else narrow
            plgpu.wgmma(dv_acc, kept, do)
            if config.ordered == "late":
                intrinsics.give_turn(1 - warpgroup)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
            if rate > 0:
                # (1 - rate) dS: what is dropped has no share in dP.
                wide = dtype if config.narrow == "product" else jnp.float32
                kept, lost, dp, missing = (x.astype(wide) for x in (kept, narrow - kept, dp, begin()))
                return (kept * dp + lost * missing).astype(dtype)
            if config.narrow == "product":
                return narrow * dp.astype(dtype)
            if config.narrow == "weights":
                p = narrow.astype(jnp.float32)
            return scores.through_softcap(p * dp, slope).astype(dtype)

        ds = pl.run_scoped(
            probabilities, plgpu.ACC((ROWS, block_q), jnp.float32), plgpu.ACC((ROWS, block_q), jnp.float32)
        )
        if not plan.adds:
            plgpu.wgmma(dk_acc, ds, q)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers.tile_empty.at[slot])
            return

        def last(dq_acc):
            other = 1 - ds_slot
            plgpu.barrier_wait(barriers.handed.at[other])
            issue_dq(dq_acc, other, warpgroup)
            plgpu.barrier_wait(barriers.taken.at[ds_slot])
            own(shared.ds.at[ds_slot], warpgroup)[...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.handed.at[ds_slot])
            plgpu.wgmma(dk_acc, ds, q)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            plgpu.barrier_arrive(barriers.taken.at[other])
            pl.when(~place.first)(lambda: add_dq(dq, n - 1, warpgroup))

        pl.run_scoped(last, plgpu.ACC((ROWS, plan.part), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.tile_empty.at[slot])

    def issue_dq(dq_acc, slot, warpgroup):
        ds = shared.ds.at[slot]
        if block_q == ROWS:
            plgpu.wgmma(dq_acc, ds.T, k_all.at[:, pl.ds(warpgroup * (d // 2), d // 2)])
        else:
            plgpu.wgmma(dq_acc, ds.at[:, pl.ds(warpgroup * ROWS, ROWS)].T, k_all)

    def add_dq(dq, n, warpgroup):
        number = recompute.read_place(plan, shared, n).number
        split, part = (0, warpgroup) if block_q == ROWS else (warpgroup, 0)
        add_part(plan, inputs, number, split, part, dq)

    def all_tiles(dk_acc, dv_acc):
        if plan.adds:
            # As if a tile before the first had left its dS: what is made of it is not added.
            slot = lax.rem(base + 1, jnp.int32(2))
            plgpu.barrier_wait(barriers.taken.at[slot])
            plgpu.barrier_arrive(barriers.handed.at[slot])
        end = base + count
        # At least one, as always: the compiler then needs no way around the loop.
        lax.fori_loop(0, jnp.maximum(count, 1), lambda n, _: step(dk_acc, dv_acc, base + n), None)
        if plan.adds:

            def last_dq(dq_acc):
                warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
                slot = lax.optimization_barrier(lax.rem(end + 1, jnp.int32(2)))
                plgpu.barrier_wait(barriers.handed.at[slot])
                issue_dq(dq_acc, slot, warpgroup)
                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                plgpu.barrier_arrive(barriers.taken.at[slot])
                add_dq(dq, end - 1, warpgroup)

            pl.run_scoped(last_dq, plgpu.ACC((ROWS, plan.part), jnp.float32))
        item = current(plan, shared)
        k0 = item.i * config.block_k + lax.axis_index("warpgroup") * ROWS
        intrinsics.gather_warps()  # all have read the item
        for array, acc in zip(results, (dk_acc, dv_acc), strict=True):
            x = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            if acc is dk_acc:
                plgpu.barrier_arrive(barriers.kv_empty)
                x = x * logits.factor(problem, inputs.scale, lambda: item.b)
            x = recompute.restore(problem, x)
            intrinsics.store_tile(array.at[item.b, :, item.h], x.astype(dtype), k0, jnp.int32(0))
        return end

    return pl.run_scoped(all_tiles, plgpu.ACC((ROWS, d), jnp.float32), plgpu.ACC((ROWS, dv), jnp.float32))


def rows_of(plan: Any, inputs: Any, shared: Any, place: Any, offset: Any) -> reading.Rows:
    """Return the `reading.Rows` of a tile: 64 keys that begin ``offset`` after the block's first."""
    b, h = place.head
    start = current(plan, shared).i * plan.config.block_k + offset
    reader = reading.Reader(plan.kinds, inputs.operands, b, h, start, offset)
    layout = plgpu.Layout.WGMMA.reduce(1)
    load = lambda ref: plgpu.load(ref.at[pl.ds(offset, ROWS)], layout=layout, optimized=False)
    values = {name: load(ref) for name, ref in shared.rows.items()}
    return reading.Rows(reader, values | reader.rows(known=values))


def add_part(plan: Any, inputs: Any, number: Any, split: Any, part: Any, dq: Any) -> None:
    """Add a part of a tile's dQ to global memory, if q has such columns."""
    add = lambda: intrinsics.add_tile(inputs.dq.at[number, split, part], dq)
    if plan.parts * plan.part == plan.columns[0]:
        add()
    else:
        pl.when(part < plan.parts)(add)


def current(plan: Any, shared: Any) -> schedule.Item:
    """Return the item that the block works on."""
    return schedule.item_of(plan.work, shared.order[0])


def meet(barriers: Any) -> None:
    """Wait until all compute warpgroups are here."""
    met = barriers.taken.at[recompute.MET]
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)

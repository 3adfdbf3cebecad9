"""The backward pass where the compute warpgroups share out the work on a tile: head dims up to 256.

A tile has 64 keys and 64 queries. One warpgroup makes P, the other dS; both go through shared memory, from
where each of them computes its columns of dV, dK and dQ. The next tile's product is begun before this tile's
dQ, and where there is a third stage, before its dV and dK too. Tile n, of which P and dS are there:

    issue dV += P dO and dK += dS Q of some of the columns
    with two stages: wait for these, so that Q and dO can be loaded anew
    issue S = K Qᵀ (warpgroup 0) or dP = V dOᵀ (warpgroup 1) of tile n + 1; three stages: before dV and dK
    issue dQ of the first 64 of the columns
    wait for S or dP; P or dS of tile n + 1; to shared memory
    wait for dQ; issue it for the next 64 columns; add the first to global memory

Where logits have a slope (a softcap, a function of the user's), warpgroup 0 passes P times it on as well, in
the place of dS; with dropout likewise P as it was before.
"""

import itertools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import scores
from flashjax.backends.hopper import hidden, intrinsics, logits, recompute
from flashjax.backends.hopper.backward_keys import current, meet, rows_of
from flashjax.backends.hopper.config import ROWS

WGMMA = plgpu.Layout.WGMMA
TILE = (ROWS, ROWS)
WEIGHTS, SLOPES = 0, 1  # the two roles
DS_HANDED, P_TAKEN = 2, 2  # of the barriers ``handed`` and ``taken``, the first of dS and of P


def compute(
    plan: Any, inputs: Any, results: Any, shared: Any, barriers: Any, item: Any, base: Any, count: Any
) -> Any:
    """Compute some of the columns of dK and dV of 64 keys, and of this block's shares of dQ."""
    warpgroup = lax.axis_index("warpgroup")
    if plan.traits.clears_keys:
        pl.when(warpgroup == 0)(lambda: hidden.clear_keys(shared.k.tile(0)))
        pl.when(warpgroup == 1)(lambda: hidden.clear_keys(shared.v.tile(0)))
        plgpu.commit_smem()
        meet(barriers)
    for role in (WEIGHTS, SLOPES):
        play = lambda role=role: _play(plan, inputs, results, shared, barriers, base, count, role)
        pl.when(warpgroup == role)(play)
    return base + count


def _play(
    plan: Any, inputs: Any, results: Any, shared: Any, barriers: Any, base: Any, count: Any, role: int
) -> None:
    """Do what one of the warpgroups does."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    d, dv = (_own(columns // plan.part, role) for columns in plan.columns)
    columns = lambda parts: pl.ds(parts.start * plan.part, len(parts) * plan.part)
    own_dq = [part for part in d if part < plan.parts] if plan.adds else []
    dq_type = plgpu.ACC((ROWS, plan.part), jnp.float32)
    apart = problem.bends or problem.dropout_rate > 0  # dS is not made of what dV is made of
    # Behind barriers: the loop would otherwise keep addresses of shared memory in registers.
    anew = lax.optimization_barrier
    slot_of = lambda n: anew(lax.rem(n, jnp.int32(2)))
    p_slot_of = lambda n: anew(lax.rem(n, jnp.int32(plan.p_slots)))
    stage_of = lambda n: anew(lax.rem(n, jnp.int32(config.stages)))

    def issue_first(acc, n):
        stage, zero = stage_of(n), anew(jnp.int32(0))
        plgpu.barrier_wait(barriers.tile_full.at[stage])
        if role == WEIGHTS:
            recompute.begin(acc, tile_of(n), lse_of(n))
            plgpu.wgmma(acc, shared.k.tile(zero), shared.q.tile(stage).T)
        else:
            recompute.begin_slopes(acc, plan, delta_of(n))
            plgpu.wgmma(acc, shared.v.tile(zero), shared.do.tile(stage).T)

    def lse_of(n):
        return lambda: recompute.along_columns(shared.lse.at[stage_of(n)], TILE)

    def delta_of(n):
        return lambda: recompute.along_columns(shared.delta.at[stage_of(n)], TILE)

    def tile_of(n):
        place = lambda: recompute.read_place(plan, shared, n)
        rows = lambda: rows_of(plan, inputs, shared, place(), 0)
        return recompute.Tile(plan, shared.cols, stage_of(n), lambda: place().q0, rows)

    def hand_on(x, n):
        """Make P or dS of its product, and hand it on."""
        slot, p_slot = slot_of(n), p_slot_of(n)
        if role == WEIGHTS:
            tile = tile_of(n)
            p, slope = recompute.weights(inputs.scale, x, tile, lse_of(n))
            p = recompute.hide(tile, recompute.read_place(plan, shared, n).partial, p)
            plgpu.barrier_wait(barriers.taken.at[P_TAKEN + p_slot])
            shared.p.at[p_slot][...] = recompute.dropped(tile, p).astype(dtype)
            if apart:
                plgpu.barrier_wait(barriers.taken.at[slot])
                shared.ds.at[slot][...] = scores.through_softcap(p, slope).astype(dtype)
        else:
            plgpu.barrier_wait(barriers.handed.at[p_slot])
            source = shared.ds.at[slot] if apart else shared.p.at[p_slot]
            p = plgpu.load(source, layout=WGMMA).astype(jnp.float32)
            if not apart:
                plgpu.barrier_wait(barriers.taken.at[slot])
            shared.ds.at[slot][...] = (p * recompute.slopes(tile_of(n), x, delta_of(n))).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.handed.at[p_slot if role == WEIGHTS else DS_HANDED + slot])

    def issue_dk_dv(dk_acc, dv_acc, n):
        # P is there: one has made it, and the other has made dS of it.
        slot, p_slot, stage = slot_of(n), p_slot_of(n), stage_of(n)
        plgpu.wgmma(dv_acc, shared.p.at[p_slot], shared.do.tile(stage).at[:, columns(dv)])
        if role == WEIGHTS:
            plgpu.barrier_wait(barriers.handed.at[DS_HANDED + slot])
        plgpu.wgmma(dk_acc, shared.ds.at[slot], shared.q.tile(stage).at[:, columns(d)])

    def release(n):
        plgpu.barrier_arrive(barriers.tile_empty.at[stage_of(n)])
        plgpu.barrier_arrive(barriers.taken.at[P_TAKEN + p_slot_of(n)])

    def issue_dq(acc, n, part):
        k = shared.k.tile(anew(jnp.int32(0)))
        plgpu.wgmma(acc, shared.ds.at[slot_of(n)].T, k.at[:, pl.ds(part * plan.part, plan.part)])

    def add_dq(dq, n):
        """Add the first part of dQ, and compute and add the others."""
        number = recompute.read_place(plan, shared, n).number
        add = lambda part, dq: intrinsics.add_tile(inputs.dq.at[number, 0, part], dq)
        for before, part in itertools.pairwise(own_dq):

            def one(acc, before=before, part=part, dq=dq):
                issue_dq(acc, n, part)
                add(before, dq)
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            dq = pl.run_scoped(one, dq_type)
        plgpu.barrier_arrive(barriers.taken.at[slot_of(n)])
        if own_dq:
            add(own_dq[-1], dq)

    def step(dk_acc, dv_acc, n):
        def products(acc, dq_acc=None):
            if config.ahead:
                issue_first(acc, n + 1)
            issue_dk_dv(dk_acc, dv_acc, n)
            if not config.ahead:
                plgpu.wgmma_wait(0)
                release(n)
                issue_first(acc, n + 1)
            if dq_acc is not None:
                issue_dq(dq_acc, n, own_dq[0])
            later = (2 if config.ahead else 0) + (dq_acc is not None)
            hand_on(plgpu.wgmma_accumulator_load(acc, wait_n=later), n + 1)
            return None if dq_acc is None else plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = pl.run_scoped(products, plgpu.ACC(TILE, jnp.float32), *[dq_type] * bool(own_dq))
        if config.ahead:
            plgpu.wgmma_wait(0)
            release(n)
        add_dq(dq, n)

    def last_step(dk_acc, dv_acc, n):
        def first_dq(acc):
            issue_dq(acc, n, own_dq[0])
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        issue_dk_dv(dk_acc, dv_acc, n)
        dq = pl.run_scoped(first_dq, dq_type) if own_dq else None
        plgpu.wgmma_wait(0)
        release(n)
        add_dq(dq, n)

    def all_tiles(dk_acc, dv_acc):
        def first(acc):
            issue_first(acc, base)
            hand_on(plgpu.wgmma_accumulator_load(acc, wait_n=0), base)

        pl.run_scoped(first, plgpu.ACC(TILE, jnp.float32))
        lax.fori_loop(0, count - 1, lambda n, _: step(dk_acc, dv_acc, base + n), None)
        last_step(dk_acc, dv_acc, base + count - 1)
        return tuple(plgpu.wgmma_accumulator_load(x, wait_n=0) for x in (dk_acc, dv_acc))

    accumulator = lambda parts: plgpu.ACC((ROWS, len(parts) * plan.part), jnp.float32)
    dk, dvalue = pl.run_scoped(all_tiles, accumulator(d), accumulator(dv))
    item = current(plan, shared)
    intrinsics.gather_warps()  # all have read the item
    plgpu.barrier_arrive(barriers.kv_empty)
    k0 = item.i * config.block_k
    dk = dk * logits.factor(problem, inputs.scale, lambda: item.b)
    dk, dvalue = (recompute.restore(problem, x) for x in (dk, dvalue))
    for array, x, parts in zip(results, (dk, dvalue), (d, dv), strict=True):
        column = jnp.int32(parts.start * plan.part)
        intrinsics.store_tile(array.at[item.b, :, item.h], x.astype(dtype), k0, column)


def _own(parts: int, role: int) -> range:
    """Return which of the parts of a head, of 64 columns each, are a role's."""
    half = -(-parts // 2)
    return range(half) if role == WEIGHTS else range(half, parts)

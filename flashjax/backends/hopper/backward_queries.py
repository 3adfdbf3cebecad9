"""dQ by query tile, where the backward pass must repeat bit for bit or the scale has a gradient.

A block owns 64 queries a warpgroup and walks along the keys as the forward kernel does: S and dP anew, dS,
then dQ += dS K, which stays in registers. Three products a tile, beside the four of the kernel for dK and dV.

Barriers (full: loader to compute, empty: compute to loader):

    q_full, q_empty    a warpgroup's 64 rows of Q and dO
    kv_full, kv_empty  a stage of K and V, with the mask's vectors over keys and the tile's number
    kv_landed          the same, where the loader clears it before it is full (see `hidden`)
    order_full, order_empty
                       what comes next, where only the loader knows it (see `schedule`)

Shared memory, in bytes, with padded head dims D and Dv: Q (later dQ) and dO 128 * warpgroups * (D + Dv); K
and V 2 * stages * block_k * (D + Dv); the mask's vectors over keys 4 * stages * block_k each.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, with the loops exchanged.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import scores
from flashjax.backends import hopper
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper import (
    hidden,
    logits,
    packing,
    plans,
    reading,
    recompute,
    schedule,
    transfers,
    walk,
)
from flashjax.backends.hopper.config import ROWS, QueriesConfig
from flashjax.problem import Inputs, Problem

WGMMA = plgpu.Layout.WGMMA
SUMS = 3
BLOCK_Q = QueriesConfig().block_q  # queries of a block, of which other kernels' tiles are a part


@dataclasses.dataclass(frozen=True)
class Plan(plans.Plan):
    """What the kernel knows when it is traced.

    Attributes:
      sums: whether it returns sums over the keys too: dS ∘ U, dS and P ∘ U, where U = d logits / d scale.
    """

    sums: bool

    @property
    def shapes(self) -> dict[str, transfers.Shape]:
        """The tiles of q, dout, k and v; those of dq are those of q."""
        problem, config = self.problem, self.config
        queries = config.warpgroups, ROWS, problem.query_length
        keys = config.stages, config.block_k, problem.key_length
        return {
            "q": transfers.shape(*queries, problem.head_dim),
            "do": transfers.shape(*queries, problem.value_dim),
            "k": transfers.shape(*keys, problem.head_dim),
            "v": transfers.shape(*keys, problem.value_dim),
        }


class Global(NamedTuple):
    """Arrays in global memory; lse and delta are `backward_start.starts`."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    scale: Any
    operands: dict[str, Any]
    bounds: dict[str, Any]


class Shared(NamedTuple):
    """Buffers in shared memory."""

    q: Any
    k: Any
    v: Any
    do: Any
    sums: Any
    cols: dict[str, Any]
    tile: Any
    order: Any


class Barriers(NamedTuple):
    """See the module's docstring."""

    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    kv_landed: Any
    order_full: Any
    order_empty: Any


def dq(
    problem: Problem,
    inputs: Inputs,
    starts: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    dlse: jax.Array | None,
    weight: jax.Array | float,
    sums: bool,
    config: QueriesConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute ``(dq [B, T, N, D], gradient of the scale by query [B, N, T] or None)``.

    ``starts`` are those of `backward_start`, of `BLOCK_Q` queries a tile; ``weight`` is the sink's.
    """
    traits = recompute.traits(problem, by_key=False)
    config = config or configs.choose_queries(problem, traits)
    plan = Plan(problem, traits, config, packing.kinds(problem), sums)
    view = plan.view
    arrays = Global(
        inputs.query,
        inputs.key,
        inputs.value,
        dout,
        *starts,
        inputs.scale.reshape(-1) if problem.scaled else None,
        packing.pack_all(problem, inputs, view),
        walk.bounds(inputs.mask, problem, view) if traits.scans else {},
    )
    results = _kernel(plan)(arrays)
    if not sums:
        return results[0], None
    slopes, changes, means = results[1][..., : problem.query_length]
    begin = starts[1][..., : problem.query_length]
    return results[0], slopes + means * recompute.missing(changes, begin, dlse, weight)


def _kernel(plan: Plan) -> Any:
    problem, traits, config, shapes = plan.problem, plan.traits, plan.config, plan.shapes
    stages, warpgroups = config.stages, config.warpgroups
    cols = {
        n: plgpu.SMEM((stages, config.block_k), k.dtype) for n, k in plan.kinds.items() if k.form == "cols"
    }
    shared = Shared(
        *(transfers.buffer(problem.dtype, shapes[name]) for name in ("q", "k", "v", "do")),
        sums=plgpu.SMEM((warpgroups, SUMS, ROWS), jnp.float32) if plan.sums else None,
        cols=cols,
        tile=plgpu.SMEM((stages,), jnp.int32) if plan.traits.scans else None,
        order=plgpu.SMEM((2,), jnp.int32) if plan.orders else None,
    )
    barrier = lambda arrivals, count=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    copies = shapes["k"].copies + shapes["v"].copies + len(cols)
    clears = traits.clears_keys
    barriers = Barriers(
        q_full=barrier(shapes["q"].copies + shapes["do"].copies, warpgroups),
        q_empty=barrier(1, warpgroups),
        kv_full=barrier(1 if clears else copies, stages),
        kv_empty=barrier(warpgroups, stages),
        kv_landed=barrier(copies, stages) if clears else None,
        order_full=barrier(1) if plan.orders else None,
        order_empty=barrier(warpgroups) if plan.orders else None,
    )

    def body(inputs, *rest):
        *results, shared, barriers = rest
        name = lambda key: transfers.names(getattr(shared, key), shapes[key])[0]
        shared = shared._replace(**{key: name(key) for key in shapes})
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            schedule.lead(
                plan, shared, barriers, None, functools.partial(load, plan, inputs, shared, barriers)
            )

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(barriers.kv_empty.at[slot])
            plgpu.barrier_arrive(barriers.q_empty.at[warpgroup])
            if plan.orders:
                plgpu.barrier_arrive(barriers.order_empty)
            work = functools.partial(compute, plan, inputs, results, shared, barriers)
            schedule.follow(plan, shared, barriers, work)
            plgpu.wait_smem_to_gmem(0)

    shape = (problem.batch, problem.query_length, problem.heads, problem.head_dim)
    rows = (SUMS, problem.batch, problem.heads, plan.view.count_rows * plan.view.block_rows)
    out = [jax.ShapeDtypeStruct(shape, problem.dtype)]
    return plgpu.kernel(
        hopper.without_mesh(body),
        out_type=out + [jax.ShapeDtypeStruct(rows, jnp.float32)] * plan.sums,
        scratch_types=[shared, barriers],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            **({} if traits.scans else {"reduction_scratch_bytes": 0}),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_queries",
    )


def load(
    plan: Plan, inputs: Global, shared: Shared, barriers: Barriers, item: Any, base: Any, publish: Any
) -> Any:
    """Load Q and dO, then K and V of every tile that the query tile may see."""
    config = plan.config
    kv_head = lax.div(item.h, jnp.int32(plan.problem.group))
    clears, later = plan.traits.clears_keys, config.stages > 1  # whether the next tile is loaded first
    arrives = barriers.kv_landed if clears else barriers.kv_full
    slot_of = lambda n: lax.rem(base + n, jnp.int32(config.stages))
    reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h, None)

    def begin(count):
        publish(count)
        for w in range(config.warpgroups):
            plgpu.barrier_wait(barriers.q_empty.at[w])
            q0 = item.i * plan.view.block_rows + w * ROWS
            for array, buffer in ((inputs.q, shared.q), (inputs.do, shared.do)):
                transfers.fetch(array, item.b, q0, item.h, buffer, w, barriers.q_full.at[w])

    def load_tile(n, tile, meanwhile):
        slot, k0 = slot_of(n), tile.index * config.block_k
        plgpu.barrier_wait(barriers.kv_empty.at[slot])
        if shared.tile is not None:
            shared.tile[slot] = tile.key
        transfers.fetch(inputs.k, item.b, k0, kv_head, shared.k, slot, arrives.at[slot])
        for name, ref in shared.cols.items():
            keys = reader.at(name).at[pl.ds(k0, config.block_k)]
            plgpu.copy_gmem_to_smem(keys, ref.at[slot], arrives.at[slot])
        transfers.fetch(inputs.v, item.b, k0, kv_head, shared.v, slot, arrives.at[slot])
        if clears and not later:
            look(n, tile)
        meanwhile()

    def look(n, tile):
        slot = slot_of(n)
        plgpu.barrier_wait(barriers.kv_landed.at[slot])

        @pl.when(tile.partial)
        def _():
            for buffer in (shared.k, shared.v):
                hidden.clear_keys(buffer.tile(slot))
            plgpu.commit_smem()

        plgpu.barrier_arrive(barriers.kv_full.at[slot])

    return base + walk.drive(plan, inputs, item, load_tile, begin, look if clears and later else None)


def compute(
    plan: Plan,
    inputs: Global,
    results: Any,
    shared: Shared,
    barriers: Barriers,
    item: Any,
    base: Any,
    count: Any,
) -> Any:
    """Compute dQ of 64 rows of one query tile."""
    problem, config, dtype = plan.problem, plan.config, plan.problem.dtype
    warpgroup = lax.axis_index("warpgroup")
    q0 = item.i * plan.view.block_rows + warpgroup * ROWS
    reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h, q0)
    rows = reading.Rows(reader, reader.rows())
    shape = (ROWS, config.block_k)
    own = lambda ref: plgpu.load(
        ref.at[item.b, item.h, pl.ds(q0, ROWS)], layout=WGMMA.reduce(1), optimized=False
    )
    lse, delta = own(inputs.lse), own(inputs.delta)
    along_rows = lambda x: lax.broadcast_in_dim(x, shape, [0])
    visit = walk.follow(plan, inputs, item, q0, count)
    plgpu.barrier_wait(barriers.q_full.at[warpgroup])

    def step(dq_acc, n, total):
        # Behind barriers: the loop would otherwise keep addresses of shared memory in registers.
        slot = lax.optimization_barrier(lax.rem(base + n, jnp.int32(config.stages)))
        q, do = (x.tile(lax.optimization_barrier(warpgroup)) for x in (shared.q, shared.do))
        k, v = shared.k.tile(slot), shared.v.tile(slot)
        plgpu.barrier_wait(barriers.kv_full.at[slot])
        tile = visit.tile(plan, n, None if shared.tile is None else shared.tile[slot])

        def difference(s_acc, dp_acc):
            where = recompute.Tile(plan, shared.cols, slot, lambda: tile.index * config.block_k, lambda: rows)
            recompute.begin(s_acc, where, lambda: along_rows(lse))
            recompute.begin_slopes(dp_acc, plan, lambda: along_rows(delta))
            plgpu.wgmma(s_acc, q, k.T)
            plgpu.wgmma(dp_acc, do, v.T)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, slope = recompute.weights(inputs.scale, s, where, lambda: along_rows(lse))
            p = recompute.hide(where, tile.partial, p)
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            ds = recompute.restore(problem, p * recompute.slopes(where, dp, lambda: along_rows(delta)))
            more = total
            if plan.sums:
                # Zeros where the mask hides a key, whose product may be anything.
                slopes = jnp.where(p > 0, scores.through_softcap(s, slope), 0.0)
                more = tuple(
                    x + jnp.sum(y, axis=1) for x, y in zip(total, (ds * slopes, ds, p * slopes), strict=True)
                )
            return scores.through_softcap(ds, slope).astype(dtype), more

        ds, total = pl.run_scoped(difference, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        plgpu.wgmma(dq_acc, ds, k)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.kv_empty.at[slot])
        return total

    def skip(n, _):
        slot = lax.rem(base + n, jnp.int32(config.stages))
        plgpu.barrier_wait(barriers.kv_full.at[slot])
        plgpu.barrier_arrive(barriers.kv_empty.at[slot])

    def all_tiles(dq_acc):
        first, end = (lax.optimization_barrier(jnp.int32(x)) for x in (visit.first, visit.end))
        if visit.uneven:
            lax.fori_loop(0, visit.first, skip, None)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WGMMA.reduce(1))
        total = (zeros,) * SUMS if plan.sums else ()
        # At least one, as always: the compiler then needs no way around the loop.
        count = jnp.maximum(end - first, 1)
        total = lax.fori_loop(0, count, lambda n, total: step(dq_acc, first + n, total), total)
        if visit.uneven:
            lax.fori_loop(visit.end, visit.count, skip, None)
        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), total

    columns = plan.shapes["q"].columns
    dq, total = pl.run_scoped(all_tiles, plgpu.ACC((ROWS, columns), jnp.float32))
    if plan.traits.clears_queries:
        # What NaN in a query that sees nothing has made.
        alive = jnp.where(lse - lse == 0.0, 1, 0)
        dq = jnp.where(lax.broadcast_in_dim(alive, dq.shape, [0]) != 0, dq, 0.0)
    if plan.sums:
        for n, x in enumerate(total):
            shared.sums.at[warpgroup, n][...] = x
    scale = logits.factor(problem, inputs.scale, lambda: item.b)
    shared.q.tile(warpgroup)[...] = (dq * scale).astype(dtype)
    plgpu.commit_smem()
    transfers.store(shared.q, warpgroup, results[0], item.b, q0, item.h)
    if plan.sums:
        for n in range(SUMS):
            target = results[1].at[n, item.b, item.h, pl.ds(q0, ROWS)]
            plgpu.copy_smem_to_gmem(shared.sums.at[warpgroup, n], target)
    return base + visit.count

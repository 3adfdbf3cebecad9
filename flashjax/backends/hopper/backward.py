"""The backward kernel: dQ, dK and dV of FlashAttention in one pass over the tiles, in Pallas Mosaic GPU.

Work partition. A block computes dK and dV of ``block_k`` keys of one key/value head at a time: it walks along
the queries of every head of the group, recomputes the probabilities of each tile, and adds the tile's share
of dQ to float32 numbers in global memory. One more warpgroup loads. How the compute warpgroups share a tile
out:

    backward_keys   by keys, 64 each: head dims up to 128
    backward_roles  one makes P, one dS, and each has half of the columns of all gradients: up to 256

dQ is added to in whatever order the blocks arrive at it, straight from registers (`intrinsics.add_tile`),
and another kernel, `backward_finish`, brings it into the shape and dtype of q. Where the backward pass must
repeat bit for bit, or the scale has a gradient, this kernel leaves dQ out, and another one computes it by
query tile (`backward_queries`): seven products a tile instead of five. Gradients of what the scores read are
kernels of their own too (`backward_scores`).

Barriers (full: loader to compute, empty: compute to loader):

    kv_full, kv_empty  the block's K and V, with the mask's vectors over keys, and what comes next (see
                       `schedule`)
    tile_full, tile_empty
                       a stage of Q and dO, with lse, delta, the mask's vectors over queries and the tile's
                       number; the second half of tile_full is for stages that have landed and that the loader
                       clears before they are full (see `hidden`)
    alone_full, alone_empty
                       a tile of what is staged, where there is room for one
    handed, taken      dS (by keys), or P and dS (by roles), on their way from one compute warpgroup to the
                       other; the last of `taken`: the compute warpgroups wait for one another

A thread that waits for barriers keeps a register for each array of them, so there are few.

Shared memory, in bytes, with padded head dims D and Dv: K and V 2 * block_k * (D + Dv); Q and dO
2 * stages * block_q * (D + Dv); dS 4 * block_k * block_q; by roles P, 2 or 4 * block_k * block_q; lse, delta
and the mask's vectors over queries 4 * block_q a stage; those over keys 4 * block_k; a bias that is staged
block_q * block_k of its numbers a stage. A block may have 232,448.

Source: Dao et al., "FlashAttention" (2022), algorithm 4; Dao, "FlashAttention-2" (2023), algorithm 2; Shah et
al., "FlashAttention-3" (2024), section 3 and appendix B.1.
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
from flashjax.backends.hopper import (
    backward_finish,
    backward_keys,
    backward_pairs,
    backward_queries,
    backward_roles,
    backward_scores,
    backward_start,
    hidden,
    intrinsics,
    packing,
    plans,
    reading,
    recompute,
    schedule,
    transfers,
    walk,
)
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper.config import ROWS, BackwardConfig
from flashjax.problem import Gradients, Inputs, Problem, Wanted

PART = 64  # columns of dQ that a warpgroup adds at a time, at most, with 64 rows


@dataclasses.dataclass(frozen=True)
class Plan(plans.Plan):
    """What the kernel knows when it is traced.

    Attributes:
      adds: whether it adds up dQ.
      alone: whether there is room for one tile of what is staged, whatever the stages.
    """

    adds: bool
    alone: bool = False

    @property
    def view(self) -> walk.View:
        problem, config = self.problem, self.config
        lengths = problem.key_length, problem.query_length
        return walk.View(True, *lengths, config.block_k, config.block_q)

    @property
    def work(self) -> schedule.Work:
        problem = self.problem
        return schedule.Work(problem.batch, problem.kv_heads, self.view.count_rows, heads_first=False)

    @property
    def group(self) -> int:
        """Heads that a block walks along."""
        return self.problem.group

    @property
    def takes_late(self) -> bool:
        """Whether a block takes the next key tile when it has loaded for this one."""
        return True

    @property
    def keeps_order(self) -> bool:
        """Whether the work reads what comes next again: the others have no registers to spare."""
        return True

    @property
    def tells_count(self) -> bool:
        """Whether the loader counts the tiles for all."""
        return True

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of q and k, and of v, in shared memory."""
        if self.config.roles:
            return configs.columns_by_roles(self.problem)
        d, dv = (configs.padded(x) for x in (self.problem.head_dim, self.problem.value_dim))
        return (d, dv) if self.config.block_q == 2 * ROWS else (2 * PART, dv)

    @property
    def p_slots(self) -> int:
        """Tiles of P in shared memory, by roles: two where the next is made before this one has been read."""
        return 2 if self.config.ahead else 1

    @property
    def part(self) -> int:
        """Columns of dQ that a warpgroup adds at a time, with 64 rows."""
        return min(PART, self.columns[0])

    @property
    def parts(self) -> int:
        """Parts of a head that hold any column of q."""
        return -(-self.problem.head_dim // self.part)

    @property
    def shapes(self) -> dict[str, transfers.Shape]:
        """The tiles of q, k, v and dout."""
        problem, config = self.problem, self.config
        d, dv = self.columns
        keys = 1, config.block_k, problem.key_length
        queries = config.block_q, problem.query_length
        return {
            "q": transfers.shape(config.stages, *queries, problem.head_dim, d),
            "do": transfers.shape(config.stages, *queries, problem.value_dim, dv),
            "k": transfers.shape(*keys, problem.head_dim, d),
            "v": transfers.shape(*keys, problem.value_dim, dv),
        }

    @property
    def copies_of_keys(self) -> int:
        """Copies that bring K, V and the mask's vectors over keys."""
        return self.shapes["k"].copies + self.shapes["v"].copies + len(self.rows)

    @property
    def copies_of_queries(self) -> int:
        """Copies that bring Q, dO, lse, delta, the mask's vectors over queries, and what is staged."""
        staged = 0 if self.alone else len(self.staged)
        return self.shapes["q"].copies + self.shapes["do"].copies + 2 + len(self.cols) + staged

    @property
    def rows(self) -> list[str]:
        """The mask's vectors over keys that are the same for all heads of a group."""
        kinds = self.kinds.items()
        return [n for n, k in kinds if k.form == "rows" and (self.group == 1 or not k.heads)]

    @property
    def cols(self) -> list[str]:
        """The mask's vectors over queries."""
        return [n for n, k in self.kinds.items() if k.form == "cols"]

    @property
    def staged(self) -> list[str]:
        """What the scores read by query and key, and the loader brings."""
        return [n for n, k in self.kinds.items() if k.form == "staged"]


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
    dq: Any


class Shared(NamedTuple):
    """Buffers in shared memory.

    Attributes:
      starts: lse and delta.
      rows, cols: the mask's vectors over keys and over queries, by name; as scratch types, by dtype. What is
        staged comes to be among the latter.
      tiles: what is staged, by name.
      numbers: the tiles handed on, the order (see `schedule`), and the mailbox (see `intrinsics.take`).

    What is small shares a buffer where it can: each is rounded up to 1024 bytes.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    starts: Any
    p: Any
    ds: Any
    rows: dict[str, Any]
    cols: dict[str, Any]
    tiles: dict[str, Any]
    numbers: Any

    @property
    def lse(self) -> Any:
        return self.starts.at[0]

    @property
    def delta(self) -> Any:
        return self.starts.at[1]

    @property
    def tile(self) -> Any:
        return self.numbers.at[pl.ds(0, self.numbers.shape[0] - 3)]

    @property
    def order(self) -> Any:
        return self.numbers.at[pl.ds(self.numbers.shape[0] - 3, 2)]

    @property
    def mailbox(self) -> Any:
        return self.numbers.at[pl.ds(self.numbers.shape[0] - 1, 1)]


class Barriers(NamedTuple):
    """See the module's docstring."""

    kv_full: Any
    kv_empty: Any
    tile_full: Any
    tile_empty: Any
    handed: Any
    taken: Any
    alone_full: Any
    alone_empty: Any

    @property
    def order_full(self) -> Any:
        return self.kv_full

    @property
    def order_empty(self) -> Any:
        return self.kv_empty


def backward(
    problem: Problem,
    inputs: Inputs,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Wanted,
    config: BackwardConfig | None = None,
) -> Gradients:
    """Compute the gradients of a call; see the module's docstring."""
    traits = recompute.traits(problem, by_key=True)
    config = config or configs.choose_backward(problem, traits)
    split = problem.deterministic or wanted.scale
    plan = _plan(problem, traits, config, adds=not split)
    pairs = backward_pairs.plan_of(problem, wanted)
    view = plan.view
    scale = inputs.scale.reshape(-1) if problem.scaled else None
    total = None if split else backward_finish.shape_of(plan)
    if pairs is not None:
        total = pairs.totals[0]
    block_q = backward_queries.BLOCK_Q if split else view.block_columns
    if wanted.scores:
        block_q = max(block_q, 2 * ROWS)
    length = -(-problem.query_length // block_q) * block_q
    weight = 0.0  # of the sink in each row
    if problem.sinks:
        # A row of which only the sink counts is like one that sees nothing.
        sinks = jnp.tile(inputs.sinks[..., 0], (problem.batch // inputs.sinks.shape[0], 1, 1))
        blind = lse <= sinks
        weight = jnp.where(blind, 1.0, jnp.exp(sinks - lse))
        lse = jnp.where(blind, -jnp.inf, lse)
    *rows, zeros = backward_start.starts(problem, out, lse, dout, dlse, length, total)
    names, dscores = wanted.scores, {}
    if pairs is not None:
        dq, dk, dv, dscores[pairs.name] = backward_pairs.gradients(pairs, inputs, tuple(rows), dout, zeros)
        names = ()
    else:
        bounds = walk.bounds(inputs.mask, problem, view) if traits.scans else {}
        operands = packing.pack_all(problem, inputs, view)
        qkv = inputs.query, inputs.key, inputs.value
        dq, dk, dv = _run(plan, Global(*qkv, dout, *rows, scale, operands, bounds, zeros))
    dscale = dsinks = None
    if split:
        dq, sums = backward_queries.dq(problem, inputs, tuple(rows), dout, dlse, weight, sums=wanted.scale)
        dscale = _scale_gradient(inputs.scale, lse, sums) if wanted.scale else None
    elif pairs is None:
        dq = backward_finish.finish(problem, dq, inputs.query.shape, scale)
    if wanted.sinks:
        delta = -rows[1][..., : problem.query_length]
        if dlse is not None:  # which `starts` leaves out for queries that see nothing
            delta = jnp.where(blind, -dlse, delta)
        dsinks = scores.sink_gradient(inputs.sinks, jnp.where(blind, sinks, lse), delta)
    dscores |= backward_scores.gradients(problem, inputs, tuple(rows), dout, names, weight, dlse)
    return Gradients(dq, dk, dv, dscores, dscale, dsinks)


def _run(plan: Plan, arrays: Global) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Run the kernel; dQ is not scaled and as `backward_finish` takes it, or None."""
    kernel = _kernel(plan)
    if not plan.adds:
        return None, *kernel(arrays)

    def body(refs):
        dq, dk, dv = refs
        dk[...], dv[...] = kernel(arrays._replace(dq=dq))

    # The kernel adds to dQ in place; dK and dV are written as a whole, and their zeros never come to be.
    return pl.run_state(body)((arrays.dq, jnp.zeros_like(arrays.k), jnp.zeros_like(arrays.v)))


def _scale_gradient(scale: jax.Array, lse: jax.Array, sums: jax.Array) -> jax.Array:
    """Sum dS times the products over all that share a scale; ``sums [B, N, T]`` has them for each query."""
    sums = jnp.where(lse == -jnp.inf, 0, sums)
    return jnp.sum(sums.reshape(-1, scale.shape[0], *sums.shape[1:]), axis=(0, 2, 3)).reshape(-1, 1, 1, 1)


def _plan(problem: Problem, traits: configs.BackwardTraits, config: BackwardConfig, adds: bool) -> Plan:
    """Return a plan in which the loader brings what there is room for."""
    kinds = packing.kinds(problem, by_key=True, staged=config.staged)
    for alone in (False, True):
        plan = Plan(problem, traits, config, kinds, adds, alone and not config.roles)
        if plans.fits(_shared(plan)):
            return plan
    return Plan(problem, traits, config, packing.kinds(problem, by_key=True), adds)


def _shared(plan: Plan) -> Shared:
    """Return the scratch types of the buffers."""
    problem, config, shapes = plan.problem, plan.config, plan.shapes
    (block_q, block_k), roles = (config.block_q, config.block_k), config.roles
    swizzled = transfers.swizzled(plan.columns[0])  # like K, by which dS is multiplied
    exchanged = lambda count: plgpu.SMEM((count, block_k, block_q), problem.dtype, transforms=swizzled)
    return Shared(
        q=transfers.buffer(problem.dtype, shapes["q"]),
        k=transfers.buffer(problem.dtype, shapes["k"]),
        v=transfers.buffer(problem.dtype, shapes["v"]),
        do=transfers.buffer(problem.dtype, shapes["do"]),
        starts=plgpu.SMEM((2, config.stages, block_q), jnp.float32),
        p=exchanged(plan.p_slots) if roles else None,
        ds=exchanged(2) if roles or plan.adds else None,
        rows=_stacked(plan, plan.rows, (block_k,)),
        cols=_stacked(plan, plan.cols, (config.stages, block_q)),
        tiles={
            n: packing.stage(plan.kinds[n], 1 if plan.alone else config.stages, block_q, block_k)
            for n in plan.staged
        },
        numbers=plgpu.SMEM((2 * config.stages + 3,), jnp.int32),
    )


def _kernel(plan: Plan) -> Any:
    problem, traits, config = plan.problem, plan.traits, plan.config
    warpgroups, roles = config.warpgroups, config.roles
    shared = _shared(plan)
    barrier = lambda arrivals, count=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    clears = traits.clears_queries
    barriers = Barriers(
        kv_full=barrier(1 + plan.copies_of_keys),
        kv_empty=barrier(warpgroups),
        tile_full=barrier(plan.copies_of_queries, (2 if clears else 1) * config.stages),
        tile_empty=barrier(warpgroups, config.stages),
        handed=barrier(1 if roles else warpgroups, 4 if roles else 2),
        taken=barrier(warpgroups, recompute.MET + 1),
        alone_full=barrier(len(plan.staged)) if plan.alone else None,
        alone_empty=barrier(warpgroups) if plan.alone else None,
    )
    compute = backward_roles.compute if roles else backward_keys.compute

    def body(inputs, dk, dv, shared, barriers):
        shared = _named(plan, shared)
        warpgroup = lax.axis_index("warpgroup")
        counter = intrinsics.counter() if plan.queue else None

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            work = functools.partial(load, plan, inputs, shared, barriers)
            schedule.lead(plan, shared, barriers, counter, work)
            if plan.queue:
                # The end of the queue comes without keys.
                for _ in range(plan.copies_of_keys):
                    plgpu.barrier_arrive(barriers.kv_full)

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for slot in range(config.stages):
                plgpu.barrier_arrive(barriers.tile_empty.at[slot])  # every stage is free
            plgpu.barrier_arrive(barriers.kv_empty)
            if plan.alone:
                plgpu.barrier_arrive(barriers.alone_empty)
            for slot in range(recompute.MET):
                plgpu.barrier_arrive(barriers.taken.at[slot])
            if config.ordered:
                pl.when(warpgroup == 0)(lambda: intrinsics.give_turn(warpgroup))  # the first turn is its own
            work = functools.partial(compute, plan, inputs, (dk, dv), shared, barriers)
            schedule.follow(plan, shared, barriers, work)

    shape = lambda heads, dim: jax.ShapeDtypeStruct(
        (problem.batch, problem.key_length, heads, dim), problem.dtype
    )
    looks = traits.scans or clears
    return plgpu.kernel(
        hopper.without_mesh(body),
        out_type=[
            shape(problem.kv_heads, problem.head_dim),
            shape(problem.kv_heads, problem.value_dim),
        ],
        scratch_types=[shared, barriers],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # Only the loader reduces over warps, and only where it looks at tiles or at rows.
            **({} if looks else {"reduction_scratch_bytes": 0}),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward",
    )


def _stacked(plan: Plan, names: list[str], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a buffer for all vectors of a dtype, by dtype."""
    groups = _by_dtype(plan, names).items()
    return {dtype: plgpu.SMEM((len(group), *shape), jnp.dtype(dtype)) for dtype, group in groups}


def _named(plan: Plan, shared: Shared) -> Shared:
    """Give each of the big buffers its names, and each of the mask's vectors."""
    name = lambda key: transfers.names(getattr(shared, key), plan.shapes[key])[0]

    def vectors(names, stacks):
        groups = _by_dtype(plan, names).items()
        return {n: stacks[dtype].at[i] for dtype, group in groups for i, n in enumerate(group)}

    return shared._replace(
        rows=vectors(plan.rows, shared.rows),
        cols=vectors(plan.cols, shared.cols) | shared.tiles,
        **{key: name(key) for key in plan.shapes},
    )


def _by_dtype(plan: Plan, names: list[str]) -> dict[str, list[str]]:
    groups = {}
    for name in names:
        groups.setdefault(jnp.dtype(plan.kinds[name].dtype).name, []).append(name)
    return groups


# ---- the loader --------------------------------------------------------------------------------


def load(
    plan: Plan,
    inputs: Global,
    shared: Shared,
    barriers: Barriers,
    item: schedule.Item,
    base: Any,
    publish: Any,
) -> Any:
    """Load K and V, and Q and dO of every tile that may see the keys."""
    config = plan.config
    k0 = item.i * config.block_k
    clears = plan.traits.clears_queries
    # Behind a barrier: the loop would otherwise keep addresses of shared memory in registers.
    slot_of = lambda n: lax.optimization_barrier(lax.rem(base + n, jnp.int32(config.stages)))

    def arrival(slot, tile):
        """Return the barrier at which a tile arrives: only where the mask is due may a query see nothing."""
        landed = jnp.where(tile.partial, config.stages, 0) if clears else 0
        return barriers.tile_full.at[slot + landed]

    def load_keys():
        transfers.fetch(inputs.k, item.b, k0, item.h, shared.k, 0, barriers.kv_full)
        transfers.fetch(inputs.v, item.b, k0, item.h, shared.v, 0, barriers.kv_full)
        reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h * plan.group, None)
        for name, ref in shared.rows.items():
            keys = reader.at(name).at[pl.ds(k0, config.block_k)]
            plgpu.copy_gmem_to_smem(keys, ref, barriers.kv_full)

    def load_tile(n, tile, meanwhile):
        h, q0 = item.h * plan.group + tile.g, tile.index * config.block_q
        rows, keys = pl.ds(q0, config.block_q), pl.ds(k0, config.block_k)
        slot = slot_of(n)
        plgpu.barrier_wait(barriers.tile_empty.at[slot])
        recompute.write_place(plan, shared, base + n, item.b, h, n == 0, tile)
        reader = reading.Reader(plan.kinds, inputs.operands, item.b, h, None)
        arrives = arrival(slot, tile)
        transfers.fetch(inputs.q, item.b, q0, h, shared.q, slot, arrives)
        reader.touch(q0, k0, config.block_q, config.block_k)
        for array, ref in ((inputs.lse, shared.lse), (inputs.delta, shared.delta)):
            plgpu.copy_gmem_to_smem(array.at[item.b, h, rows], ref.at[slot], arrives)
        for name, ref in shared.cols.items():
            # Of a vector over columns they are the queries, of a tile the rows.
            source = reader.source(name, rows=rows, columns=rows if name in plan.cols else keys)
            if name in plan.cols or not plan.alone:
                plgpu.copy_gmem_to_smem(source, ref.at[slot], arrives)
        pl.when(n == 0)(load_keys)
        transfers.fetch(inputs.do, item.b, q0, h, shared.do, slot, arrives)
        if plan.alone:
            plgpu.barrier_wait(barriers.alone_empty)
            for name in plan.staged:
                source = reader.source(name, rows=rows, columns=keys)
                plgpu.copy_gmem_to_smem(source, shared.cols[name].at[0], barriers.alone_full)
        meanwhile()

    def look(n, tile):
        @pl.when(tile.partial)
        def _():
            slot = slot_of(n)
            plgpu.barrier_wait(arrival(slot, tile))
            hidden.clear_queries(shared, slot)
            for _ in range(plan.copies_of_queries):
                plgpu.barrier_arrive(barriers.tile_full.at[slot])

    return base + walk.drive(plan, inputs, item, load_tile, publish, look if clears else None)

"""The forward kernel: FlashAttention on Hopper's tensor cores, in Pallas Mosaic GPU.

Work partition. A block computes ``64 * warpgroups`` queries of one head at a time: each compute warpgroup
owns 64 of them, and one more warpgroup loads. Which block computes which, and when: `schedule`.

Within a compute warpgroup, tile n:

    issue S = Q Kᵀ of tile n          tensor cores, asynchronous
    issue O += P V of tile n - 1      likewise
    wait for S; mask; softmax         runs under P V
    wait for P V; rescale O           only where the row maximum grew by more than 2**8, or at all where the
                                      largest logit is asked for

Barriers, each an array over stages or warpgroups (full: loader to compute, empty: compute to loader):

    q_full, q_empty    a warpgroup's 64 rows of Q
    k_full, k_empty    a stage of K, with the mask's vectors over keys and the tile's number
    v_full, v_empty    a stage of V
    v_landed           a stage of V that the loader looks through before it is full (see `hidden`)
    order_full, order_empty
                       what comes next, where only the loader knows it (see `schedule`)

Shared memory, in bytes, with padded head dims D and Dv: Q and O share 128 * warpgroups * max(D, Dv), or have
128 * warpgroups * D and * Dv in a persistent kernel; K and V take 2 * stages * block_k * (D + Dv); lse, and
the row maximum where it is asked for, 256 a warpgroup each; the mask's vectors over keys 4 * stages * block_k
each; a bias that is staged 64 * warpgroups * block_k of its numbers a stage. A block may have 232,448.

Rows beyond T and keys beyond S are zeros that the TMA fills in, and are clipped when stored; keys beyond
S are masked. Head dims are padded in shared memory only, by the same zero fill.

Source: Shah et al., "FlashAttention-3" (2024), algorithm 2 and section 3.1 (warpgroups in turn); Dao,
"FlashAttention-2" (2023); rescaling only where it is due: FlashAttention-4 (2025).
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import dropout, softmax
from flashjax.backends import hopper
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper import (
    hidden,
    intrinsics,
    logits,
    packing,
    plans,
    reading,
    schedule,
    transfers,
    walk,
)
from flashjax.backends.hopper.config import ROWS, Config
from flashjax.backends.hopper.logits import LOG2E
from flashjax.problem import Inputs, Problem, Results

WGMMA = plgpu.Layout.WGMMA
SLACK = 8.0  # O is rescaled where the row maximum grew by more than this, in powers of two
PARTS = 8  # row sums are kept as this many columns until the end: adding them up needs other threads


class Plan(plans.Plan):
    """What the kernel knows when it is traced."""

    @property
    def persistent(self) -> bool:
        """Whether a block may compute several query tiles."""
        return self.config.schedule != "blocks"

    @property
    def natural(self) -> bool:
        """Whether row maxima are in units of the logits: what scores add may be as large as a float can be,
        and a factor of ``log2(e)`` would make it infinite. Otherwise they are in base 2: a product less."""
        return self.problem.scores is not None

    @property
    def tight(self) -> bool:
        """Whether shared memory has no room for lse beside vectors over keys: it is stored from registers."""
        return self.config.block_k > 128 and any(k.form == "cols" for k in self.kinds.values())

    @property
    def value_columns(self) -> int:
        """Columns of O in registers."""
        return configs.padded(self.problem.value_dim)

    @property
    def shapes(self) -> dict[str, transfers.Shape]:
        """The tiles of q, k, v and out."""
        problem, config = self.problem, self.config
        queries = config.warpgroups, ROWS, problem.query_length
        keys = config.stages, config.block_k, problem.key_length
        q, o = (transfers.shape(*queries, dim) for dim in (problem.head_dim, problem.value_dim))
        if not self.own_output:
            q, o = transfers.shared(q, o)
        return {
            "q": q,
            "k": transfers.shape(*keys, problem.head_dim),
            "v": transfers.shape(*keys, problem.value_dim),
            "o": o,
        }

    @property
    def own_output(self) -> bool:
        """Whether O has a buffer of its own: the next query tile may take Q's, or O does not fit there."""
        problem = self.problem
        q, o = (transfers.shape(1, ROWS, 1, dim) for dim in (problem.head_dim, problem.value_dim))
        return self.persistent or transfers.shared(q, o) is None


class Global(NamedTuple):
    """Arrays in global memory."""

    q: Any
    k: Any
    v: Any
    scale: Any
    sinks: Any
    operands: dict[str, Any]
    bounds: dict[str, Any]


class Shared(NamedTuple):
    """Buffers in shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    top: Any
    cols: dict[str, Any]
    tile: Any
    order: Any
    mailbox: Any


class Barriers(NamedTuple):
    """See the module's docstring."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    v_landed: Any
    order_full: Any
    order_empty: Any


def forward(problem: Problem, inputs: Inputs, config: Config | None = None) -> Results:
    """Compute the results of a call; see the module's docstring."""
    traits = _traits(problem)
    plan = _plan(problem, traits, config or configs.choose(problem, traits))
    rows = plan.view.count_rows * plan.view.block_rows
    operands = packing.pack_all(problem, inputs, plan.view)
    bounds = walk.bounds(inputs.mask, problem, plan.view) if traits.scans else {}
    scale = inputs.scale.reshape(-1) if problem.scaled else None
    sinks = inputs.sinks[:, :, 0, 0] if problem.sinks else None
    arrays = Global(inputs.query, inputs.key, inputs.value, scale, sinks, operands, bounds)
    out, *by_row = _kernel(plan, rows)(arrays)
    return Results(out, *(x[:, :, : problem.query_length] for x in by_row))


def _traits(problem: Problem) -> configs.Traits:
    return configs.Traits(
        scans=walk.scans(problem),
        looks=hidden.possible(problem),
        pieces=transfers.in_pieces(problem),
        adds_halves=logits.adds(problem) and problem.dropout_rate == 0 and _halves(problem),
    )


def _halves(problem: Problem) -> bool:
    """Whether all that scores read is of 16 bits and can be staged."""
    kinds = packing.kinds(problem, staged=True)
    own = [kinds[packing.SCORES + name] for name in problem.scores.operands()]
    return bool(own) and all(kind.form == "staged" and kind.dtype.itemsize == 2 for kind in own)


def _plan(problem: Problem, traits: configs.Traits, config: Config) -> Plan:
    """Return a plan in which the loader brings what it can, with as many stages as there is room for."""
    for stages in range(config.stages, 1, -1) if config.staged else ():
        plan = Plan(
            problem, traits, config._replace(stages=stages), packing.kinds(problem, staged=config.staged)
        )
        if plans.fits(_shared(plan)):
            return plan
    return Plan(problem, traits, config, packing.kinds(problem))


def _shared(plan: Plan) -> Shared:
    """Return the scratch types of the buffers."""
    problem, traits, config, shapes = plan.problem, plan.traits, plan.config, plan.shapes
    stages, warpgroups = config.stages, config.warpgroups
    buffer = lambda *names: transfers.buffer(problem.dtype, *(shapes[n] for n in names))
    cols = {}
    for name, kind in plan.kinds.items():
        if kind.form == "cols":
            cols[name] = plgpu.SMEM((stages, config.block_k), kind.dtype)
        elif kind.form == "staged":
            cols[name] = packing.stage(kind, stages, config.block_q, config.block_k)
    return Shared(
        q=buffer("q") if plan.own_output else buffer("q", "o"),
        k=buffer("k"),
        v=buffer("v"),
        o=buffer("o") if plan.own_output else None,
        lse=None if plan.tight else plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        top=plgpu.SMEM((warpgroups, ROWS), jnp.float32) if problem.max_logit and not plan.tight else None,
        cols=cols,
        tile=plgpu.SMEM((stages,), jnp.int32) if traits.scans else None,
        order=plgpu.SMEM((2,), jnp.int32) if plan.orders else None,
        mailbox=plgpu.SMEM((1,), jnp.int32) if plan.queue else None,
    )


def _kernel(plan: Plan, rows: int) -> Any:
    problem, traits, config, shapes = plan.problem, plan.traits, plan.config, plan.shapes
    stages, warpgroups = config.stages, config.warpgroups
    full = lambda name, more=0: plgpu.Barrier(
        num_arrivals=shapes[name].copies + more, num_barriers=shapes[name].count
    )
    empty = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    shared = _shared(plan)
    barriers = Barriers(
        q_full=full("q"),
        q_empty=plgpu.Barrier(num_barriers=warpgroups),
        k_full=full("k", len(shared.cols)),
        k_empty=empty,
        v_full=plgpu.Barrier(num_barriers=stages) if traits.looks else full("v"),
        v_empty=empty,
        v_landed=full("v") if traits.looks else None,
        order_full=plgpu.Barrier() if plan.orders else None,
        order_empty=plgpu.Barrier(num_arrivals=warpgroups) if plan.orders else None,
    )

    def body(inputs, *rest):
        *results, shared, barriers = rest
        results, shared = Results(*results), _named(plan, shared)
        warpgroup = lax.axis_index("warpgroup")
        counter = intrinsics.counter() if plan.queue else None

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            work = functools.partial(load, plan, inputs, shared, barriers)
            schedule.lead(plan, shared, barriers, counter, work)

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for barrier in (barriers.k_empty, barriers.v_empty):
                for slot in range(stages):
                    plgpu.barrier_arrive(barrier.at[slot])  # every stage is free
            plgpu.barrier_arrive(barriers.q_empty.at[warpgroup])
            if plan.orders:
                plgpu.barrier_arrive(barriers.order_empty)
            if config.ordered:
                pl.when(warpgroup == 0)(lambda: intrinsics.give_turn(warpgroup))  # the first turn is its own
            work = functools.partial(compute, plan, inputs, results, shared, barriers)
            schedule.follow(plan, shared, barriers, work)
            plgpu.wait_smem_to_gmem(0)

    by_row = 2 if problem.max_logit else 1
    return plgpu.kernel(
        hopper.without_mesh(body),
        out_type=[
            jax.ShapeDtypeStruct(
                (problem.batch, problem.query_length, problem.heads, problem.value_dim), problem.dtype
            ),
            *[jax.ShapeDtypeStruct((problem.batch, problem.heads, rows), jnp.float32)] * by_row,
        ],
        scratch_types=[shared, barriers],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # Only the loader reduces over warps, and only where it looks at tiles or at their values.
            **({} if traits.scans or traits.looks else {"reduction_scratch_bytes": 0}),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flash_attention_forward",
    )


def _named(plan: Plan, shared: Shared) -> Shared:
    """Give each of the big buffers its names."""
    shapes = plan.shapes
    names = lambda ref, *arrays: transfers.names(ref, *(shapes[a] for a in arrays))
    if plan.own_output:
        q, o = *names(shared.q, "q"), *names(shared.o, "o")
    else:
        q, o = names(shared.q, "q", "o")
    return shared._replace(q=q, k=names(shared.k, "k")[0], v=names(shared.v, "v")[0], o=o)


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
    """Load Q, then K and V of every tile that the query tile may see."""
    config = plan.config
    kv_head = lax.div(item.h, jnp.int32(plan.problem.group))

    def begin(count):
        publish(count)
        for w in range(config.warpgroups):
            plgpu.barrier_wait(barriers.q_empty.at[w])
            q0 = item.i * config.block_q + w * ROWS
            transfers.fetch(inputs.q, item.b, q0, item.h, shared.q, w, barriers.q_full.at[w])

    reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h, None)

    slot_of = lambda n: lax.rem(base + n, jnp.int32(config.stages))
    looks, direct = barriers.v_landed is not None, plan.shapes["v"].copies == 1

    def load_tile(n, tile, meanwhile):
        slot, k0 = slot_of(n), tile.index * config.block_k
        plgpu.barrier_wait(barriers.k_empty.at[slot])
        if shared.tile is not None:
            shared.tile[slot] = tile.key
        transfers.fetch(inputs.k, item.b, k0, kv_head, shared.k, slot, barriers.k_full.at[slot])
        reader.touch(item.i * config.block_q, k0, config.block_q, config.block_k)
        for name, ref in shared.cols.items():
            rows, columns = pl.ds(item.i * config.block_q, config.block_q), pl.ds(k0, config.block_k)
            plgpu.copy_gmem_to_smem(
                reader.source(name, rows, columns), ref.at[slot], barriers.k_full.at[slot]
            )
        meanwhile()
        plgpu.barrier_wait(barriers.v_empty.at[slot])
        fetch_to = lambda barrier: transfers.fetch(
            inputs.v, item.b, k0, kv_head, shared.v, slot, barrier.at[slot]
        )
        if not looks:
            fetch_to(barriers.v_full)
        elif direct:
            lax.cond(tile.partial, lambda: fetch_to(barriers.v_landed), lambda: fetch_to(barriers.v_full))
        else:
            fetch_to(barriers.v_landed)

    def look(n, tile):
        slot = slot_of(n)
        if shared.cols:
            # On every tile, read or not: a waiter keeps count of a barrier's phases by its waits.
            plgpu.barrier_wait(barriers.k_full.at[slot])
        clear = lambda: hidden.clear(plan, shared, reader, item.i * config.block_q, tile.index, slot)

        def pass_on(prepare):
            plgpu.barrier_wait(barriers.v_landed.at[slot])
            prepare()
            plgpu.barrier_arrive(barriers.v_full.at[slot])

        if direct:
            pl.when(tile.partial)(lambda: pass_on(clear))
        else:
            pass_on(lambda: pl.when(tile.partial)(clear))

    return base + walk.drive(plan, inputs, item, load_tile, begin, look if looks else None)


# ---- compute -----------------------------------------------------------------------------------


class State(NamedTuple):
    """What one tile hands to the next: O, the row maximum and sums, and P of the tile before."""

    o: jax.Array
    m: jax.Array
    l: jax.Array
    p: jax.Array


def compute(
    plan: Plan,
    inputs: Global,
    results: Results,
    shared: Shared,
    barriers: Barriers,
    item: schedule.Item,
    base: Any,
    count: Any,
) -> Any:
    """Compute 64 rows of one query tile."""
    config, problem = plan.config, plan.problem
    warpgroup = _own_warpgroup()
    q0 = item.i * config.block_q + warpgroup * ROWS
    q_smem = shared.q.tile(warpgroup)
    slot_of = lambda n: lax.rem(base + n, jnp.int32(config.stages))
    reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h, q0, warpgroup * ROWS)
    rows = reading.Rows(reader, reader.rows())
    tile_added = functools.partial(_added, plan, shared, rows)
    tile_scores = functools.partial(_scores, plan, inputs.scale, shared, rows)
    drop = functools.partial(_drop, plan, shared, rows)

    def release(slot):
        if shared.cols:
            intrinsics.gather_warps()  # all have read what came with the keys
        plgpu.barrier_arrive(barriers.k_empty.at[slot])

    # Dropout reads the vectors over keys after the softmax.
    nothing = lambda slot: None
    release_early, release_late = (release, nothing) if problem.dropout_rate == 0 else (nothing, release)

    plgpu.barrier_wait(barriers.q_full.at[warpgroup])
    visit = walk.follow(plan, inputs, item, q0, count)

    @contextlib.contextmanager
    def turn():
        """Issue products after the warpgroup before and before the next: so their softmaxes alternate."""
        if config.ordered:
            intrinsics.await_turn(warpgroup)
        yield
        if config.ordered:
            intrinsics.give_turn(lax.rem(warpgroup + 1, jnp.int32(config.warpgroups)))

    # Tiles of the block that this warpgroup's rows do not see.
    def skip(n, _):
        slot = slot_of(n)
        with turn():
            pass
        for full, empty in ((barriers.k_full, barriers.k_empty), (barriers.v_full, barriers.v_empty)):
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(empty.at[slot])

    if visit.uneven:
        lax.fori_loop(0, visit.first, skip, None)

    # The first tile, on its own: nothing to overlap with yet.
    slot = slot_of(visit.first)
    plgpu.barrier_wait(barriers.k_full.at[slot])

    def first_product(s_acc):
        with turn():
            plgpu.wgmma(s_acc, q_smem, shared.k.tile(slot).T)
        return s_acc[...]

    s = pl.run_scoped(first_product, plgpu.ACC((ROWS, config.block_k), jnp.float32))
    s = tile_scores(visit, visit.first, slot, s, tile_added(visit, visit.first, slot))
    m, l = _begin(None if problem.max_logit else _sink(plan, inputs.sinks, item))
    release_early(slot)
    p, _, m, l = _softmax(plan, m, l, s)
    p = drop(slot, p)
    release_late(slot)
    state = State(_full((ROWS, plan.value_columns), 0.0, WGMMA), m, l, p.astype(problem.dtype))

    def wait_for_keys(n):
        plgpu.barrier_wait(barriers.k_full.at[slot_of(n)])

    if config.wait_early:
        pl.when(visit.first + 1 < visit.end)(lambda: wait_for_keys(visit.first + 1))

    def step(n, state):
        slot, before = slot_of(n), slot_of(n - 1)
        if not config.wait_early:
            wait_for_keys(n)

        def products(s_acc, o_acc):
            o_acc[...] = state.o
            with turn():
                plgpu.wgmma(s_acc, q_smem, shared.k.tile(slot).T)
                plgpu.barrier_wait(barriers.v_full.at[before])
                plgpu.wgmma(o_acc, state.p, shared.v.tile(before))
            more = tile_added(visit, n, slot)  # loads under the products
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            s = tile_scores(visit, n, slot, s, more)
            release_early(slot)
            p, alpha, m, l = _softmax(plan, state.m, state.l, s)
            p = drop(slot, p)
            release_late(slot)
            if config.sums_first:
                grew = intrinsics.any_in_warp(alpha - 1, negative=l)
            if config.wait_early:
                pl.when(n + 1 < visit.end)(lambda: wait_for_keys(n + 1))
            o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
            plgpu.barrier_arrive(barriers.v_empty.at[before])
            if not config.sums_first:
                grew = intrinsics.any_in_warp(alpha - 1)
            o = lax.cond(grew, lambda o: o * softmax.spread(alpha, o), lambda o: o, o)
            return State(o, m, l, p.astype(problem.dtype))

        return pl.run_scoped(
            products,
            plgpu.ACC((ROWS, config.block_k), jnp.float32),
            plgpu.ACC((ROWS, plan.value_columns), jnp.float32),
        )

    state = State(*lax.fori_loop(visit.first + 1, visit.end, step, state))

    # The last P V, the end of the softmax, the store.
    plgpu.barrier_arrive(barriers.q_empty.at[warpgroup])
    last = slot_of(visit.end - 1)
    plgpu.barrier_wait(barriers.v_full.at[last])

    def last_product(o_acc):
        plgpu.wgmma(o_acc, state.p, shared.v.tile(last))

    o = pl.run_state(last_product)(plgpu.ACC.init(state.o))
    plgpu.barrier_arrive(barriers.v_empty.at[last])
    if visit.uneven:
        lax.fori_loop(visit.end, visit.count, skip, None)
    _store(plan, results, shared, item, inputs.sinks, (o, state.m, state.l))
    return base + visit.count


def _own_warpgroup() -> jax.Array:
    """Return the number of this warpgroup, found anew: no register need hold it meanwhile."""
    return lax.axis_index("warpgroup")


def _full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _sink(plan: Plan, sinks: Any, item: schedule.Item) -> jax.Array | None:
    """Return the sink of each row, in the unit of the row maximum."""
    if not plan.problem.sinks:
        return None
    count, _ = sinks.shape
    sink = sinks[lax.rem(item.b, jnp.int32(count)), item.h] * (1.0 if plan.natural else LOG2E)
    return plgpu.layout_cast(lax.broadcast_in_dim(sink, (ROWS,), []), WGMMA.reduce(1))


def _begin(sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the row maximum and sums before the first tile: `softmax.begin`, the sum in parts."""
    if sink is None:
        return _full((ROWS,), -jnp.inf, WGMMA.reduce(1)), _full((ROWS, PARTS), 0.0, WGMMA)
    return sink, _full((ROWS, PARTS), 1 / PARTS, WGMMA)


def _tile(plan: Plan, shared: Shared, visit: walk.Visit, n: Any, slot: Any) -> walk.Tile:
    return visit.tile(plan, n, None if shared.tile is None else shared.tile[slot])


def _added(
    plan: Plan, shared: Shared, rows: reading.Rows, visit: walk.Visit, n: Any, slot: Any
) -> jax.Array | None:
    """Return what is added to the logits of the n-th tile, None where the scores do more than add."""
    if plan.problem.scores is None or not plan.problem.scores.additive:
        return None
    block_k = plan.config.block_k
    first = _tile(plan, shared, visit, n, slot).index * block_k
    return reading.added(plan, rows, shared.cols, slot, first, block_k)


def _scores(
    plan: Plan,
    scales: Any,
    shared: Shared,
    rows: reading.Rows,
    visit: walk.Visit,
    n: Any,
    slot: Any,
    s: jax.Array,
    more: jax.Array | None,
) -> jax.Array:
    """Turn the products [64, block_k] of the n-th tile into logits, and hide what the mask hides.

    ``more`` is what `_added` returned.
    """
    problem = plan.problem
    if not logits.folds(problem):
        s, _ = logits.logits(problem, scales, lambda: rows.reader.b, s)
    if not plan.masked and problem.scores is None:
        return s
    tile = _tile(plan, shared, visit, n, slot)
    block_k = plan.config.block_k
    if more is not None:
        s = s + more
    elif problem.scores is not None:
        s = reading.changed(plan, rows, shared.cols, slot, tile.index * block_k, s)
    if not plan.masked:
        return s

    def hide(s):
        seen = reading.seen(plan, rows, shared.cols, slot, tile.index * block_k, block_k)
        return jnp.where(seen, s, -jnp.inf)

    return lax.cond(tile.partial, hide, lambda s: s, s)


def _drop(plan: Plan, shared: Shared, rows: reading.Rows, slot: Any, p: jax.Array) -> jax.Array:
    """Zero what dropout drops; the sums of the row are of all."""
    rate = plan.problem.dropout_rate
    if rate == 0:
        return p
    words = reading.dropout_words(plan, rows, shared.cols, slot, None, p.shape[1])
    return intrinsics.drop(p, words, dropout.threshold(rate), turned=False)


def _softmax(plan: Plan, m: jax.Array, l: jax.Array, s: jax.Array) -> tuple[jax.Array, ...]:
    """Take one step of the online softmax: in base 2, with the scale folded in where it can be."""
    problem = plan.problem
    unit = (problem.default_scale if logits.folds(problem) else 1.0) * LOG2E

    def total(p):
        parts = [p[:, i : i + PARTS] for i in range(0, p.shape[1], PARTS)]
        while len(parts) > 1:
            rest = parts[-1:] if len(parts) % 2 else []
            parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + rest
        return parts[0]

    slack = 0.0 if problem.max_logit else SLACK
    if plan.natural:
        return softmax.step(m, l, s, exp=_exp, total=total, slack=slack / LOG2E)
    return softmax.step(m, l, s, unit=unit, exp=jnp.exp2, total=total, slack=slack)


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * LOG2E)


def _store(plan: Plan, results: Results, shared: Shared, item: schedule.Item, sinks: Any, state: Any) -> None:
    """Divide by the row sums, and write O, lse and the row maximum."""
    problem, config = plan.problem, plan.config
    o, m, l = state
    warpgroup = _own_warpgroup()
    exp, log = (_exp, lambda x: jnp.log2(x) / LOG2E) if plan.natural else (jnp.exp2, jnp.log2)
    sink = _sink(plan, sinks, item) if problem.max_logit else None
    inverse, total = softmax.finish(m, l.sum(axis=1), sink, exp=exp, log=log)
    if problem.dropout_rate > 0:
        inverse = inverse * (1 / (1 - problem.dropout_rate))
    if plan.persistent:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    shared.o.tile(warpgroup)[...] = (o * softmax.spread(inverse, o)).astype(problem.dtype)
    q0 = item.i * config.block_q + warpgroup * ROWS
    by_row = [(shared.lse, results.lse, total), (shared.top, results.top, m)][: 1 + problem.max_logit]
    for buffer, array, x in by_row:
        x = x if plan.natural else x / LOG2E
        if plan.tight:
            array.at[item.b, item.h, pl.ds(q0, ROWS)][...] = x
        else:
            buffer.at[warpgroup][...] = x
    plgpu.commit_smem()
    transfers.store(shared.o, warpgroup, results.out, item.b, q0, item.h)
    for buffer, array, _ in () if plan.tight else by_row:
        plgpu.copy_smem_to_gmem(buffer.at[warpgroup], array.at[item.b, item.h, pl.ds(q0, ROWS)])

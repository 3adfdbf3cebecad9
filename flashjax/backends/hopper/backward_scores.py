"""Gradients of what the scores read: of a bias, of slopes, of a user's operands, summed in the kernel.

A block owns entries of one operand and goes through every tile of scores that reads them: S, P and dP anew,
then the share of each place in the gradient, which stays in registers and is summed once, at the end. Nothing
is added to in global memory, so results repeat bit for bit, and no array is larger than the operand, or than
one number for each head and position. Two products a tile. What a block owns follows from the operand's form:

    "tile"      64 queries a warpgroup by 64 keys; it goes through the batch rows and heads that share them,
                or through some of these where there are few tiles, and XLA adds up what the blocks make
    "rows", "cols", "scalar"
                64 queries a warpgroup (or keys) of one head; it walks along the others (see `walk`), and XLA
                adds up what shares an entry. Along a query delta counts, which is rounded as O is: what that
                does is worked out of the sum of dS, and taken out again
    "diagonal"  64 diagonals of tiles; it goes down them, through batch rows and heads that share them

One more warpgroup loads, and says of each tile where it is; one with a negative number is the end.

Barriers: full, empty: a stage of Q, dO, K and V, with lse, delta, the vectors over columns and the tile's
place.

Shared memory, in bytes, with padded head dims D and Dv: a stage takes 2 * (block_rows + 64) * (D + Dv), lse
and delta 8 for each query, the vectors over columns 4 * 64 each; the sums of diagonals 16,384 a warpgroup.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends import hopper
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper import hidden, intrinsics, packing, plans, reading, recompute, transfers, walk
from flashjax.backends.hopper.config import ROWS, ScoresConfig
from flashjax.problem import Inputs, Problem

WGMMA = plgpu.Layout.WGMMA
MOST_SPLITS = 16
NEARLY_ALL = 0.95
SUMS = 3  # along a query: of dS times the operand's derivative, of dS, and of P times the derivative
DIAGONALS = 2 * ROWS  # of a square tile, and one that is always 0


@dataclasses.dataclass(frozen=True)
class Plan(plans.Plan):
    """What the kernel knows when it is traced.

    Attributes:
      name: of the operand whose gradient it computes.
      shape: of that operand.
      form: how the operand lies (see `packing`) where rows are queries.
    """

    name: str
    shape: tuple[int, ...]
    form: str

    @property
    def by_key(self) -> bool:
        """Whether rows are keys."""
        return self.form == "cols"

    @property
    def view(self) -> walk.View:
        problem, config = self.problem, self.config
        lengths = problem.query_length, problem.key_length
        if self.by_key:
            lengths = lengths[::-1]
        return walk.View(self.by_key, *lengths, config.block_q, config.block_k)

    @property
    def clears_queries(self) -> bool:
        """Whether the loader zeroes queries that see nothing: not where none of their numbers is summed."""
        return False

    @property
    def walks(self) -> bool:
        """Whether a block owns a tile of rows and walks along the columns."""
        return self.form in ("rows", "cols", "scalar")

    @property
    def tells_count(self) -> bool:
        return True

    @property
    def ragged(self) -> bool:
        """Whether the last key tile reaches beyond S."""
        block = self.config.block_q if self.by_key else self.config.block_k
        return self.problem.key_length % block != 0

    @property
    def sums(self) -> int:
        """How many numbers are summed for each place."""
        return SUMS if self.form in ("rows", "scalar") else 1

    @property
    def owned(self) -> tuple[int, int]:
        """Batch rows and heads of the operand, or all where a block walks."""
        return (self.problem.batch, self.problem.heads) if self.walks else self.shape[:2]

    @property
    def places(self) -> int:
        """Blocks a batch row and head."""
        rows, columns = self.view.count_rows, self.view.count_columns
        if self.form == "tile":
            return rows * columns
        if self.form == "diagonal":
            return self.config.warpgroups * (rows - 1) + columns
        return rows

    @property
    def held(self) -> list[str]:
        """What a block reads by query and key and is the same in all its tiles: it stays in registers."""
        shapes = {n: x.array.shape for n, x in self.problem.scores.operands().items()}
        names = {n: packing.SCORES + n for n in shapes}
        if self.form != "tile":
            return []
        same = lambda b, h, *_: b == 1 and h in (1, self.shape[1])
        return [
            names[n] for n, shape in shapes.items() if self.kinds[names[n]].form == "tile" and same(*shape)
        ]

    @property
    def sharing(self) -> int:
        """Heads of all batch rows that share what a block owns."""
        rows, heads = self.owned
        return self.problem.batch * self.problem.heads // (rows * heads)

    @property
    def splits(self) -> int:
        """Blocks that own the same and go through different batch rows and heads.

        As few as keep nearly all of the GPU busy until the end: a block more than it has room for at once
        would take as long as all others.
        """
        if self.form != "tile":
            return 1
        rows, heads = self.owned
        room, owned = hopper.multiprocessors(), rows * heads * self.places
        busy = lambda n: owned * n / (-(-owned * n // room) * room)
        most = max(1, min(self.sharing // 4, MOST_SPLITS))
        enough = NEARLY_ALL * max(busy(n) for n in range(1, most + 1))
        return next(n for n in range(1, most + 1) if busy(n) >= enough)

    @property
    def blocks(self) -> int:
        rows, heads = self.owned
        return rows * heads * self.places * self.splits

    @property
    def shapes(self) -> dict[str, transfers.Shape]:
        """The tiles of q, dout, k and v."""
        problem, config = self.problem, self.config
        queries, keys = (config.block_k, config.block_q) if self.by_key else (config.block_q, config.block_k)
        of = lambda rows, length, dim: transfers.shape(config.stages, rows, length, dim)
        return {
            "q": of(queries, problem.query_length, problem.head_dim),
            "do": of(queries, problem.query_length, problem.value_dim),
            "k": of(keys, problem.key_length, problem.head_dim),
            "v": of(keys, problem.key_length, problem.value_dim),
        }

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.shapes["q"].rows

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of what the kernel returns."""
        rows, heads = self.owned
        if self.form == "tile":
            return self.splits, *self.shape
        if self.form == "diagonal":
            return rows, heads, self.places, self.config.warpgroups, DIAGONALS
        return self.sums, rows, heads, self.view.count_rows * self.view.block_rows


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
    """Buffers in shared memory; places are b, h, the tiles of rows and columns, and whether it is partial."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    cols: dict[str, Any]
    places: Any
    sums: Any


class Barriers(NamedTuple):
    """See the module's docstring."""

    full: Any
    empty: Any


def gradients(
    problem: Problem,
    inputs: Inputs,
    starts: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    names: tuple[str, ...],
    weight: jax.Array | float,
    dlse: jax.Array | None,
    config: ScoresConfig | None = None,
) -> dict[str, jax.Array]:
    """Compute the gradients of the named operands of the scores, each in a kernel.

    Args:
      problem, inputs, dout: of the call.
      starts: those of `backward_start`, of whole tiles of 128 queries.
      names: of the operands.
      weight: of the sink in each row ``[B, N, T]``; 0 without one.
      dlse: cotangent of lse, likewise; None means 0.
    """
    found = {}
    for name in names:
        operand = inputs.scores.operands()[name]
        form = packing.form_of(operand)
        traits = recompute.traits(problem, by_key=False)
        kinds = packing.kinds(problem, form == "cols")
        own = config or configs.choose_scores(problem, form)
        plan = Plan(problem, traits, own, kinds, name, operand.array.shape, form)
        arrays = Global(
            inputs.query,
            inputs.key,
            inputs.value,
            dout,
            *starts,
            inputs.scale.reshape(-1) if problem.scaled else None,
            packing.pack_all(problem, inputs, plan.view),
            walk.bounds(inputs.mask, problem, plan.view) if traits.scans else {},
        )
        rounds = form == "tile" and operand.array.dtype.itemsize <= 4 and plan.splits == 1
        dtype = operand.array.dtype if rounds else jnp.float32
        sums = _kernel(plan, dtype)(arrays)
        if plan.sums == SUMS:
            shares, changes, means = sums[..., : problem.query_length]
            begin = starts[1][..., : problem.query_length]
            error = recompute.missing(changes, begin, dlse, weight)
            sums = shares + jnp.where(means == 0, 0, error * means)
        elif plan.by_key:
            sums = sums[0]
        found[name] = _gather(plan, sums).astype(operand.array.dtype)
    return found


def _gather(plan: Plan, x: jax.Array) -> jax.Array:
    """Add up what the blocks have summed for the same entries."""
    b, h, *_ = plan.shape
    if plan.form == "tile":
        return x[0] if plan.splits == 1 else x.sum(0)
    if plan.form == "diagonal":
        return _along_diagonals(plan, x)
    x = x[:, :, : plan.view.rows]
    x = x.reshape(-1, b, *x.shape[1:]).sum(0)
    if h == 1:
        x = x.sum(1, keepdims=True)
    if plan.form == "scalar":
        return x.sum(2)[..., None, None]
    return x[:, :, None] if plan.by_key else x[..., None]


def _along_diagonals(plan: Plan, x: jax.Array) -> jax.Array:
    """Return ``[b, h, 1, T + S - 1]`` of the sums ``[b, h, e, warpgroup, diagonal of the tile]``.

    The tile of warpgroup w in block e lies ``e - w`` tiles of 64 above the diagonal that ``e = 0`` begins at.
    """
    warpgroups = plan.config.warpgroups
    first = warpgroups * (plan.view.count_rows - 1)  # tiles of 64 below it that the lowest block lies
    own = [x[:, :, :, w] for w in range(warpgroups)]
    pad = lambda y, before, after: jnp.pad(y, ((0, 0), (0, 0), (before, after), (0, 0)))
    # By tiles above the lowest one: e - w.
    total = sum(pad(y, warpgroups - 1 - w, w) for w, y in enumerate(own))
    lowest = first + warpgroups - 1
    low, high = total[..., :ROWS], total[..., ROWS:]
    line = (pad(low, 0, 1) + pad(high, 1, 0)).reshape(*x.shape[:2], -1)
    # The first number is of relative position -64 * lowest - 63.
    start = plan.problem.query_length - 1 - ROWS * lowest - (ROWS - 1)
    count = plan.shape[3]
    line = jnp.pad(line, ((0, 0), (0, 0), (max(start, 0), max(count - start - line.shape[2], 0))))
    return line[:, :, None, max(-start, 0) : max(-start, 0) + count]


def _kernel(plan: Plan, dtype: Any) -> Any:
    problem, config, shapes = plan.problem, plan.config, plan.shapes
    stages, warpgroups = config.stages, config.warpgroups
    cols = {
        n: plgpu.SMEM((stages, config.block_k), k.dtype) for n, k in plan.kinds.items() if k.form == "cols"
    }
    vector = plgpu.SMEM((stages, plan.queries), jnp.float32)
    sums = {"diagonal": plgpu.SMEM((warpgroups, ROWS, ROWS), jnp.float32), "tile": None}
    shared = Shared(
        *(transfers.buffer(problem.dtype, shapes[name]) for name in ("q", "k", "v", "do")),
        lse=vector,
        delta=vector,
        cols=cols,
        places=plgpu.SMEM((2 * stages, 5), jnp.int32),
        sums=sums.get(plan.form, plgpu.SMEM((warpgroups, plan.sums, ROWS), jnp.float32)),
    )
    barriers = Barriers(
        full=plgpu.Barrier(num_arrivals=copies(plan, shared), num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )

    def body(inputs, result, shared, barriers):
        name = lambda key: transfers.names(getattr(shared, key), shapes[key])[0]
        shared = shared._replace(**{key: name(key) for key in shapes})
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        owner = owner_of(plan, block)

        @pl.when(warpgroup == warpgroups)
        def _load():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            load(plan, inputs, shared, barriers, owner, jnp.int32(0))

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(barriers.empty.at[slot])
            compute(plan, inputs, result, shared, barriers, owner)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        hopper.without_mesh(body),
        out_type=jax.ShapeDtypeStruct(plan.result, dtype),
        scratch_types=[shared, barriers],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            **({} if plan.traits.scans and plan.walks else {"reduction_scratch_bytes": 0}),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_scores",
    )


# ---- the loader --------------------------------------------------------------------------------


class Owner(NamedTuple):
    """What a block owns.

    Attributes:
      b, h: first batch row and head that share it.
      place: which of the `Plan.places`.
      part: which of the `Plan.splits`.
    """

    b: Any
    h: Any
    place: Any
    part: Any


def owner_of(plan: Plan, block: Any) -> Owner:
    """Return what a block owns, one of `Plan.blocks`.

    Blocks that run at the same time go through the same batch rows, so that these, and what is added for
    them, stay in the L2 cache.
    """
    part, block = _split(block, plan.blocks // plan.splits)
    head, place = _split(block, plan.places)
    return Owner(*_split(head, plan.owned[1]), place, part)


def tile_of(plan: Plan, owner: Owner) -> tuple[Any, Any]:
    """Return the numbers of the tiles of rows and of columns of a block that owns such a pair."""
    return _split(owner.place, plan.view.count_columns)


def _split(n: Any, count: int) -> tuple[Any, Any]:
    return lax.div(n, jnp.int32(count)), lax.rem(n, jnp.int32(count))


class Item(NamedTuple):
    """A tile of rows of one head, as `walk` takes it."""

    b: Any
    h: Any
    i: Any


def load(plan: Plan, inputs: Global, shared: Shared, barriers: Barriers, owner: Owner, start: Any) -> Any:
    """Load what every tile needs that reads the block's entries, and say where each is.

    Args:
      start: number of the first tile, 0 where the kernel walks.

    Returns:
      The number after that of the end.
    """
    problem, config = plan.problem, plan.config

    def load_tile(n, b, h, i, j, partial):
        slot = lax.rem(n, jnp.int32(config.stages))
        plgpu.barrier_wait(barriers.empty.at[slot])
        _write_place(plan, shared, n, (b, h, i, j, jnp.where(partial, 1, 0)))
        # Only where the mask is due may a query see nothing.
        landed = jnp.where(partial, config.stages, 0) if plan.clears_queries else 0
        full = barriers.full.at[slot + landed]
        kv_head = lax.div(h, jnp.int32(problem.group))
        r0, c0 = i * plan.view.block_rows, j * plan.view.block_columns
        q0, k0 = (c0, r0) if plan.by_key else (r0, c0)
        for array, buffer, row, head in (
            (inputs.q, shared.q, q0, h),
            (inputs.do, shared.do, q0, h),
            (inputs.k, shared.k, k0, kv_head),
            (inputs.v, shared.v, k0, kv_head),
        ):
            transfers.fetch(array, b, row, head, buffer, slot, full)
        for array, ref in ((inputs.lse, shared.lse), (inputs.delta, shared.delta)):
            plgpu.copy_gmem_to_smem(array.at[b, h, pl.ds(q0, plan.queries)], ref.at[slot], full)
        reader = reading.Reader(plan.kinds, inputs.operands, b, h, None)
        reader.touch(q0, k0, plan.queries, plan.shapes["k"].rows, known=plan.held)
        for name, ref in shared.cols.items():
            source = reader.at(name).at[pl.ds(c0, config.block_k)]
            plgpu.copy_gmem_to_smem(source, ref.at[slot], full)

        def clear():
            plgpu.barrier_wait(full)
            hidden.clear_queries(shared, slot)
            _arrive(plan, shared, barriers.full.at[slot])

        if plan.clears_queries:
            pl.when(partial)(clear)

    def visit(b, h, i, j, n):
        """Load a tile, the n-th so far, that may be hidden, and return the next number."""
        empty, partial = walk.look_at(plan, inputs, b, h, i, j)
        pl.when(~empty)(lambda: load_tile(n, b, h, i, j, partial))
        return n + jnp.where(empty, 0, 1)

    b0, h0, place, _ = owner
    if plan.walks:
        item = Item(b0, h0, place)

        def one(n, tile, meanwhile):
            load_tile(n, b0, h0, place, tile.index, tile.partial)
            meanwhile()

        count = walk.drive(plan, inputs, item, one, lambda count: None, None)
    else:
        count = _each_sharing(plan, owner, functools.partial(_each_tile, plan, owner, visit), start)
    slot = lax.rem(count, jnp.int32(config.stages))
    plgpu.barrier_wait(barriers.empty.at[slot])
    _write_place(plan, shared, count, (jnp.int32(-1), *[jnp.int32(0)] * 4))
    _arrive(plan, shared, barriers.full.at[slot])
    return count + 1


def _arrive(plan: Plan, shared: Any, full: Any) -> None:
    """Arrive as all copies of a tile would."""
    for _ in range(copies(plan, shared)):
        plgpu.barrier_arrive(full)


def copies(plan: Plan, shared: Any) -> int:
    """Return how many copies bring a tile."""
    return sum(x.copies for x in plan.shapes.values()) + 2 + len(shared.cols)


def _each_sharing(plan: Plan, owner: Owner, each: Any, start: Any) -> Any:
    """Run ``each(b, h, n) -> n`` for the batch rows and heads that share what a block owns, from start."""
    b, h, *_ = plan.shape
    heads = plan.problem.heads if h == 1 else 1

    def step(m, n):
        row, head = lax.div(m, jnp.int32(heads)), lax.rem(m, jnp.int32(heads))
        return each(owner.b + row * b, owner.h + head, n)

    first, end = (lax.div((owner.part + i) * plan.sharing, jnp.int32(plan.splits)) for i in (0, 1))
    return lax.fori_loop(first, end, step, start)


def _each_tile(plan: Plan, owner: Owner, visit: Any, b: Any, h: Any, n: Any) -> Any:
    """Visit the tiles of a head that read the block's entries."""
    rows, columns = plan.view.count_rows, jnp.int32(plan.view.count_columns)
    if plan.form == "tile":
        return visit(b, h, *tile_of(plan, owner), n)
    warpgroups = plan.config.warpgroups
    # Tiles of 64 that the block's diagonal lies above the main one.
    above = owner.place - warpgroups * (rows - 1)

    def down(i, n):
        j = warpgroups * i + above
        inside = (j >= 0) & (j < columns)
        return lax.cond(inside, lambda n: visit(b, h, i, j, n), lambda n: n, n)

    return lax.fori_loop(0, rows, down, n)


def _write_place(plan: Plan, shared: Shared, n: Any, place: Any) -> None:
    at = lax.rem(n, jnp.int32(2 * plan.config.stages))
    for entry, x in enumerate(place):
        shared.places[at, entry] = x


def read_place(plan: Plan, shared: Any) -> Any:
    """Return ``entry(n, which)``: a number of the n-th tile's place."""
    return lambda n, which: shared.places[lax.rem(n, jnp.int32(2 * plan.config.stages)), which]


def wait_for_tile(plan: Plan, shared: Any, barriers: Any) -> Any:
    """Return ``wait(n)``, which waits for the n-th tile and says whether there is one."""

    def wait(n):
        plgpu.barrier_wait(barriers.full.at[lax.rem(n, jnp.int32(plan.config.stages))])
        return read_place(plan, shared)(n, 0) >= 0

    return wait


# ---- compute -----------------------------------------------------------------------------------


def compute(
    plan: Plan, inputs: Global, result: Any, shared: Shared, barriers: Barriers, owner: Owner
) -> None:
    """Sum the shares of 64 rows by 64 columns of each tile, and store what the block owns of it."""
    config = plan.config
    warpgroup = lax.axis_index("warpgroup")
    shape = (ROWS, config.block_k)

    entry, wait = read_place(plan, shared), wait_for_tile(plan, shared, barriers)
    held = _held(plan, inputs, warpgroup, owner)

    def step(state):
        n, _, total = state
        slot = lax.optimization_barrier(lax.rem(n, jnp.int32(config.stages)))
        shares = _shares(plan, inputs, shared, warpgroup, slot, [entry(n, i) for i in range(5)], held)
        total = tuple(x + y for x, y in zip(total, shares, strict=True))
        intrinsics.gather_warps()  # all have read the place and the vectors
        plgpu.barrier_arrive(barriers.empty.at[slot])
        return n + 1, wait(n + 1), total

    start = (plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA),) * plan.sums
    _, _, total = lax.while_loop(lambda state: state[1], step, (jnp.int32(0), wait(jnp.int32(0)), start))
    _store(plan, result, shared, warpgroup, owner, total)


def _held(plan: Plan, inputs: Global, warpgroup: Any, owner: Owner) -> dict[str, jax.Array]:
    """Load what the block's tiles have in common, once."""
    (i, j), count = tile_of(plan, owner), plan.config.block_k
    start = i * plan.view.block_rows + warpgroup * ROWS
    reader = reading.Reader(plan.kinds, inputs.operands, owner.b, owner.h, start)
    return {n: reader.numbers(n, j * count, count, plan.by_key) for n in plan.held}


def _shares(
    plan: Plan,
    inputs: Global,
    shared: Shared,
    warpgroup: Any,
    slot: Any,
    place: Any,
    held: dict[str, jax.Array],
) -> tuple[jax.Array, ...]:
    """Return the share of each place of a tile in the gradient, or the `SUMS`."""
    config = plan.config
    b, h, i, j, partial = place
    shape = (ROWS, config.block_k)
    own = pl.ds(warpgroup * ROWS, ROWS)
    reader = reading.Reader(plan.kinds, inputs.operands, b, h, i * plan.view.block_rows + warpgroup * ROWS)
    rows = lambda: reading.Rows(reader, held | reader.rows())
    tile = recompute.Tile(plan, shared.cols, slot, lambda: j * config.block_k, rows)
    if plan.by_key:
        spread = lambda ref: recompute.along_columns(ref.at[slot], shape)
        left, right = (shared.k, shared.v), (shared.q, shared.do)
    else:
        load = lambda ref: plgpu.load(ref.at[slot, own], layout=WGMMA.reduce(1), optimized=False)
        spread = lambda ref: lax.broadcast_in_dim(load(ref), shape, [0])
        left, right = (shared.q, shared.do), (shared.k, shared.v)
    lse = lambda: spread(shared.lse)

    def products(s_acc, dp_acc):
        recompute.begin(s_acc, tile, lse)
        delta = lambda: spread(shared.delta)
        recompute.begin_slopes(dp_acc, plan, delta)
        for acc, x, y in zip((s_acc, dp_acc), left, right, strict=True):
            plgpu.wgmma(acc, x.tile(slot).at[own], y.tile(slot).T)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        p, _ = recompute.weights(inputs.scale, s, tile, lse)
        p = recompute.hide(tile, partial != 0, p)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        # What is hidden may be anything, and so may its products.
        ds = recompute.restore(plan.problem, p * recompute.slopes(tile, dp, delta))
        ds = jnp.where(p > 0, ds, 0.0)
        by_operand = functools.partial(recompute.by_operand, inputs.scale, tile, plan.name, s)
        return (by_operand(ds),) if plan.sums == 1 else (by_operand(ds), ds, by_operand(p))

    accumulator = plgpu.ACC(shape, jnp.float32)
    return pl.run_scoped(products, accumulator, accumulator)


def _store(plan: Plan, result: Any, shared: Shared, warpgroup: Any, owner: Owner, total: Any) -> None:
    """Store what a warpgroup has summed of its 64 rows."""
    b, h, place, part = owner
    if plan.form == "tile":
        i, j = tile_of(plan, owner)
        row = i * plan.view.block_rows + warpgroup * ROWS
        intrinsics.store_numbers(result.at[part, b, h], total[0], row, j * plan.config.block_k)
    elif plan.form == "diagonal":
        own = shared.sums.at[warpgroup]
        if hasattr(plgpu, "store"):  # jax 0.12 asks for a swizzled buffer otherwise
            plgpu.store(own, total[0], optimized=False)
        else:
            own[...] = total[0]
        intrinsics.gather_warps()
        result.at[b, h, place, warpgroup][...] = intrinsics.sum_diagonals(shared.sums.at[warpgroup])
    else:
        for n, x in enumerate(total):
            shared.sums.at[warpgroup, n][...] = jnp.sum(x, axis=1)
        plgpu.commit_smem()
        rows = pl.ds(place * plan.view.block_rows + warpgroup * ROWS, ROWS)
        for n in range(plan.sums):
            plgpu.copy_smem_to_gmem(shared.sums.at[warpgroup, n], result.at[n, b, h, rows])

"""All gradients of a call in one kernel, where batch rows share a bias by query and key, and heads are small.

A block owns a tile of the bias and goes through the batch rows, as in `backward_scores`. Where heads are
small the products are cheap, and the probabilities are what costs: here they are made once, in place of once
for dQ, dK and dV and once more for the bias. The block adds its shares of dQ, dK and dV to float32 numbers in
global memory, as `backward_keys` does with dQ, and keeps the sum of dS in registers. Rows are keys. Each of
two warpgroups has 64 of them and takes 128 queries in four parts:

    issue S = K Qᵀ and dP = V dOᵀ of a part
    the bias, from shared memory; wait for S; P; mask; issue dV += P dO
    wait for dP; dS to shared memory, and to its sum; wait for dV

and adds its dV. A third one computes and adds dQ and dK from dS, a tile behind them. The TMA adds, from
shared memory: where threads add, stores to shared memory wait until what they add has left.

A block owns several tiles of the bias in turn, so that the loads of one run under the end of the one before.
At the end of each it adds the sum of dS to what other blocks, with other batch rows, found for the tile. A
last kernel, of a warpgroup a block, turns these sums into the shape and dtype of the bias.

Barriers beside those of `backward_scores`: held, the tile of the bias, and let_go, that nobody needs it any
more; handed and taken, a tile of dS, of which there are two, on its way from the first two warpgroups to the
third.

Shared memory, in bytes, with padded head dims D and Dv: a stage takes 512 * (D + Dv), and 1024 for lse and
delta; the tile of the bias 16,384 times the size of its numbers; dS 65,536; what is to be added 512 * Dv,
and 256 * D once or twice.

Source: as of `backward`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends import hopper
from flashjax.backends.hopper import (
    backward_finish,
    backward_scores,
    hidden,
    intrinsics,
    logits,
    packing,
    plans,
    reading,
    recompute,
    transfers,
    walk,
)
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper.config import ROWS, ScoresConfig
from flashjax.backends.hopper.logits import LOG2E
from flashjax.problem import Inputs, Problem, Wanted

HALVES = 2  # of the queries of a tile
PARTS = 4  # of these, for S and dP
TILE = (ROWS, HALVES * ROWS // PARTS)
# Stages, and buffers of the warpgroup that adds: the first that there is room for.
DEPTHS = ((3, 1), (2, 2), (2, 1))
REGISTERS = {"compute": 184, "add": 112, "load": 32}
WIDEST = 32  # padded head dim: larger ones spill, and what is added in global memory grows with it
FEWEST = 4  # batch rows that share the bias


@dataclasses.dataclass(frozen=True)
class Plan(backward_scores.Plan):
    """What the kernel knows when it is traced; rows are keys, columns queries.

    Attributes:
      sends: buffers of the warpgroup that adds.
    """

    sends: int

    @property
    def splits(self) -> int:
        """Those with which the GPU is done first; a tile of the bias costs about as much as a batch row."""
        rows, heads = self.owned
        room, owned = hopper.multiprocessors(), rows * heads * self.places
        time = lambda n: -(-owned * n // room) * (self.sharing / n + 1)
        return min(range(1, max(1, self.sharing // FEWEST) + 1), key=time)

    @property
    def at_once(self) -> int:
        """Blocks of the kernel, each of which is several of `blocks` in turn."""
        return min(self.blocks, hopper.multiprocessors())

    def each_owner(self, visit: Any) -> None:
        """Run ``visit(owner, n) -> n`` for all that this block owns, from n = 0."""
        block, step = lax.axis_index("block"), jnp.int32(self.at_once)
        count = lax.div(jnp.int32(self.blocks - 1) - block, step) + 1
        owner = lambda turn: backward_scores.owner_of(self, block + turn * step)
        lax.fori_loop(0, count, lambda turn, n: visit(owner(turn), n), jnp.int32(0))

    @property
    def by_key(self) -> bool:
        return True

    @property
    def clears_queries(self) -> bool:
        return self.traits.clears_queries

    @property
    def held(self) -> list[str]:
        """What no tile loads: the bias, which lies in shared memory."""
        return [self.operand]

    @property
    def operand(self) -> str:
        """Name of the bias among the packed operands."""
        return packing.SCORES + self.name

    @property
    def padded(self) -> tuple[int, int]:
        """Columns of q and k, and of v, in shared memory."""
        return configs.padded(self.problem.head_dim), configs.padded(self.problem.value_dim)

    @property
    def totals(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the sums for dQ, dK and dV, as `backward_finish.finish` takes them."""
        problem, (d, dv) = self.problem, self.padded
        queries = problem.batch * problem.heads * self.view.count_columns
        keys = problem.batch * problem.kv_heads * self.view.count_rows
        return tuple(
            (count, HALVES, 1, ROWS * columns) for count, columns in ((queries, d), (keys, d), (keys, dv))
        )

    @property
    def sums_of_tiles(self) -> tuple[int, ...]:
        """Shape of the sums of dS, of a tile in parts."""
        rows, heads = self.owned
        return rows * heads * self.places, self.config.warpgroups, PARTS, ROWS * TILE[1]


class Global(NamedTuple):
    """Arrays in global memory: those of `backward_scores.Global`, and what is added to."""

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
    dk: Any
    dv: Any
    sums: Any


class Shared(NamedTuple):
    """Buffers in shared memory, those of `backward_scores.Shared` among them.

    Attributes:
      bias: the block's tile, queries by keys.
      ds: of two tiles, by half of the queries each, keys by queries.
      dv, send: what is to be added.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    cols: dict[str, Any]
    places: Any
    bias: Any
    ds: Any
    dv: Any
    send: Any


class Barriers(NamedTuple):
    """See the module's docstring."""

    full: Any
    empty: Any
    held: Any
    let_go: Any
    handed: Any
    taken: Any


def plan_of(problem: Problem, wanted: Wanted) -> Plan | None:
    """Return the plan of the kernel, or None where it does not do a call or would not be the faster way.

    It adds in no fixed order.
    """
    if not wanted.scores or problem.deterministic or wanted.scale or problem.dropout_rate > 0:
        return None
    operands = problem.scores.operands()
    if len(operands) > 1 or not logits.adds(problem):
        return None
    traits = recompute.traits(problem, by_key=False)
    ((name, operand),) = operands.items()
    staged = packing.kinds(problem, by_key=True, staged=True)[packing.SCORES + name].form == "staged"
    shared_by = problem.batch // operand.array.shape[0]
    fields = packing.kinds(problem, by_key=True), name, operand.array.shape, packing.form_of(operand)
    config = ScoresConfig(block_k=HALVES * ROWS)
    candidates = [Plan(problem, traits, config._replace(stages=n), *fields, sends) for n, sends in DEPTHS]
    if not staged or shared_by < FEWEST or max(candidates[0].padded) > WIDEST:
        return None
    return next((plan for plan in candidates if plans.fits(_shared(plan))), None)


def gradients(
    plan: Plan, inputs: Inputs, starts: tuple[jax.Array, jax.Array], dout: jax.Array, zeros: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute ``(dq, dk, dv, gradient of the bias)``.

    Args:
      plan: of `plan_of`.
      inputs, dout: of the call.
      starts: those of `backward_start`, of whole tiles of 128 queries.
      zeros: float32, the first of `Plan.totals`.
    """
    problem = plan.problem
    scale = inputs.scale.reshape(-1) if problem.scaled else None
    operands = packing.pack_all(problem, inputs, plan.view)
    bounds = walk.bounds(inputs.mask, problem, plan.view) if plan.traits.scans else {}
    qkv = inputs.query, inputs.key, inputs.value
    arrays = Global(*qkv, dout, *starts, scale, operands, bounds, None, None, None, None)
    bias = inputs.scores.operands()[plan.name].array
    kernel = _kernel(plan)

    def body(refs):
        kernel(arrays._replace(**dict(zip(("dq", "dk", "dv", "sums"), refs, strict=True))))

    # The kernel adds to the totals in place.
    starts_at = [jnp.zeros(shape, jnp.float32) for shape in (*plan.totals[1:], plan.sums_of_tiles)]
    *totals, sums = pl.run_state(body)((zeros, *starts_at))
    finish = lambda total, x, scales: backward_finish.finish(problem, total, x.shape, scale, scales)
    found = map(finish, totals, (inputs.query, inputs.key, inputs.value), (True, True, False))
    return *found, _gather(plan, sums, bias.dtype)


def _gather(plan: Plan, sums: jax.Array, dtype: Any) -> jax.Array:
    """Return the gradient of the bias: the sums of its tiles, in the shape and dtype of the bias."""
    owners, warpgroups, parts, _ = sums.shape

    def body(sums, result):
        tile, warpgroup, part = (lax.axis_index(name) for name in ("tile", "warpgroup", "part"))
        # Which batch rows were whose does not matter here.
        owner = backward_scores.owner_of(plan, tile)
        i, j = backward_scores.tile_of(plan, owner)
        intrinsics.store_numbers(
            result.at[owner.b, owner.h],
            intrinsics.load_tile(sums.at[tile, warpgroup, part], TILE[1]),
            i * plan.view.block_rows + warpgroup * ROWS,
            j * plan.view.block_columns + part * TILE[1],
            turned=True,
        )

    kernel = plgpu.kernel(
        hopper.without_mesh(body),
        out_type=jax.ShapeDtypeStruct(plan.shape, dtype if dtype.itemsize <= 4 else jnp.float32),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        grid=(owners, warpgroups, parts),
        grid_names=("tile", "warpgroup", "part"),
        kernel_name="flash_attention_backward_bias",
    )
    return kernel(sums).astype(dtype)


def _shared(plan: Plan) -> Shared:
    """Return the scratch types of the buffers."""
    problem, config, shapes = plan.problem, plan.config, plan.shapes
    vector = lambda dtype: plgpu.SMEM((config.stages, plan.queries), dtype)
    kind = plan.kinds[plan.operand]
    ds = plgpu.SMEM(
        (2 * HALVES, config.block_q, ROWS), problem.dtype, transforms=transfers.swizzled(plan.padded[0])
    )
    return Shared(
        *(transfers.buffer(problem.dtype, shapes[name]) for name in ("q", "k", "v", "do")),
        lse=vector(jnp.float32),
        delta=vector(jnp.float32),
        cols={n: vector(k.dtype) for n, k in plan.kinds.items() if k.form == "cols"},
        places=plgpu.SMEM((2 * config.stages, 5), jnp.int32),
        bias=packing.stage(kind, 1, config.block_k, config.block_q),
        ds=ds,
        dv=plgpu.SMEM((config.warpgroups, ROWS * plan.padded[1]), jnp.float32),
        send=plgpu.SMEM((plan.sends, ROWS * plan.padded[0]), jnp.float32),
    )


def _kernel(plan: Plan) -> Any:
    config, shapes = plan.config, plan.shapes
    stages, warpgroups = config.stages, config.warpgroups
    scratch = _shared(plan)
    copies = backward_scores.copies(plan, scratch)
    # The second half is for stages that have landed, and that the loader clears before they are full.
    barriers = Barriers(
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=(2 if plan.clears_queries else 1) * stages),
        empty=plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=stages),
        held=plgpu.Barrier(),
        let_go=plgpu.Barrier(num_arrivals=warpgroups),
        handed=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
        taken=plgpu.Barrier(num_barriers=2),
    )

    def body(inputs, shared, barriers):
        name = lambda key: transfers.names(getattr(shared, key), shapes[key])[0]
        shared = shared._replace(**{key: name(key) for key in shapes})
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == warpgroups + 1)
        def _load():
            plgpu.set_max_registers(REGISTERS["load"], action="decrease")

            def visit(owner, n):
                i, j = backward_scores.tile_of(plan, owner)
                reader = reading.Reader(plan.kinds, inputs.operands, owner.b, owner.h, None)
                queries, keys = (
                    pl.ds(j * config.block_k, config.block_k),
                    pl.ds(i * config.block_q, config.block_q),
                )
                plgpu.barrier_wait(barriers.let_go)
                plgpu.copy_gmem_to_smem(
                    reader.at(plan.operand).at[queries, keys], shared.bias.at[0], barriers.held
                )
                return backward_scores.load(plan, inputs, shared, barriers, owner, n)

            plan.each_owner(visit)

        @pl.when(warpgroup < warpgroups)
        def _compute():
            plgpu.set_max_registers(REGISTERS["compute"], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(barriers.empty.at[slot])
            plgpu.barrier_arrive(barriers.let_go)

            def visit(owner, n):
                n, sums = compute(plan, inputs, shared, barriers, n)
                number = (owner.b * plan.owned[1] + owner.h) * plan.places + owner.place
                for part, x in enumerate(sums):
                    intrinsics.add_tile(inputs.sums.at[number, warpgroup, part], x)
                return n

            plan.each_owner(visit)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups)
        def _add():
            plgpu.set_max_registers(REGISTERS["add"], action="decrease")
            for slot in range(stages):
                plgpu.barrier_arrive(barriers.empty.at[slot])
            for slot in range(2):
                plgpu.barrier_arrive(barriers.taken.at[slot])
            plan.each_owner(lambda _, n: add(plan, inputs, shared, barriers, n))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        hopper.without_mesh(body),
        out_type=(),
        scratch_types=[scratch, barriers],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            # Only the loader reduces over warps, and only where it looks at queries.
            **({} if plan.clears_queries else {"reduction_scratch_bytes": 0}),
        ),
        grid=(plan.at_once,),
        grid_names=("block",),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_pairs",
    )


def compute(
    plan: Plan, inputs: Global, shared: Shared, barriers: Barriers, start: Any
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Go through what shares a tile of the bias: add its shares of dV, hand dS on, and sum it.

    Args:
      start: number of the first tile.

    Returns:
      The number after that of the end, and the sums of 64 keys by all queries, in parts.
    """
    dtype, stages, dv = plan.problem.dtype, jnp.int32(plan.config.stages), plan.padded[1]
    plgpu.barrier_wait(barriers.held)
    entry = backward_scores.read_place(plan, shared)
    wait = backward_scores.wait_for_tile(plan, shared, barriers)

    def step(state):
        n, _, sums = state
        # Behind a barrier: the loop would otherwise keep addresses of shared memory in registers.
        warpgroup = lax.optimization_barrier(lax.axis_index("warpgroup"))
        own = pl.ds(warpgroup * ROWS, ROWS)
        slot = lax.optimization_barrier(lax.rem(n, stages))
        # Read anew where it is needed, for the same reason.
        b, h, i, j, partial = (lambda which=which: entry(n, which) for which in range(5))
        k, v = shared.k.tile(slot), shared.v.tile(slot)
        ds_slot = lax.optimization_barrier(lax.rem(n, jnp.int32(2)))
        if plan.traits.clears_keys:
            for ref in (k, v):
                hidden.clear_keys(ref.at[own])
            plgpu.commit_smem()

        def shares(part, dv_acc):
            queries = pl.ds(part * TILE[1], TILE[1])
            q, do = (x.tile(slot).at[queries] for x in (shared.q, shared.do))
            along = lambda ref: recompute.along_columns(ref.at[slot, queries], TILE)

            def rows():
                start = i() * plan.view.block_rows + warpgroup * ROWS
                reader = reading.Reader(plan.kinds, inputs.operands, b(), h(), start)
                bias = plgpu.load(shared.bias.at[0, queries, own].T, layout=plgpu.Layout.WGMMA)
                return reading.Rows(reader, {plan.operand: intrinsics.widen(bias), **reader.rows()})

            cols = {name: ref.at[:, queries] for name, ref in shared.cols.items()}
            column = lambda: j() * plan.view.block_columns + part * TILE[1]
            tile = recompute.Tile(plan, cols, slot, column, rows)

            def slopes(s_acc, dp_acc):
                plgpu.wgmma(s_acc, k.at[own], q.T)
                plgpu.wgmma(dp_acc, v.at[own], do.T)
                # The difference first: a bias may be as large as a float can be, and lse with it.
                added = (tile.ask(reading.added, TILE[1]) - along(shared.lse)) * LOG2E
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                p = jnp.exp2(s * (plan.problem.default_scale * LOG2E) + added)
                p = recompute.hide(tile, partial() != 0, p)
                plgpu.wgmma(dv_acc, p.astype(dtype), do)
                ds = p * (plgpu.wgmma_accumulator_load(dp_acc, wait_n=1) + along(shared.delta))
                if part == 0:
                    plgpu.barrier_wait(barriers.taken.at[ds_slot])
                half, column = divmod(part * TILE[1], ROWS)
                columns = pl.ds(column, TILE[1])
                shared.ds.at[ds_slot * HALVES + half, own, columns][...] = ds.astype(dtype)
                # Added here, and not where the sums are next needed: dS would be kept until then.
                total = lax.optimization_barrier(sums[part] + ds)
                plgpu.wgmma_wait(0)  # nothing may be under way where the next accumulators begin
                return total

            return pl.run_scoped(slopes, plgpu.ACC(TILE, jnp.float32), plgpu.ACC(TILE, jnp.float32))

        def all_shares(dv_acc):
            total = tuple(shares(part, dv_acc) for part in range(PARTS))
            return plgpu.wgmma_accumulator_load(dv_acc, wait_n=0), total

        dvalue, sums = pl.run_scoped(all_shares, plgpu.ACC((ROWS, dv), jnp.float32))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        intrinsics.stage_tile(shared.dv.at[warpgroup], dvalue)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.handed.at[ds_slot])
        number = _tile_of_keys(plan, b(), h(), i())
        intrinsics.add_staged(inputs.dv.at[number, warpgroup, 0], shared.dv.at[warpgroup])
        intrinsics.gather_warps()  # all have read the place and the vectors
        plgpu.barrier_arrive(barriers.empty.at[slot])
        return n + 1, wait(n + 1), sums

    zeros = (plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), plgpu.Layout.WGMMA),) * PARTS
    end, _, sums = lax.while_loop(lambda state: state[1], step, (start, wait(start), zeros))
    intrinsics.gather_warps()  # all have read that it is the end
    plgpu.barrier_arrive(barriers.empty.at[lax.rem(end, stages)])
    plgpu.barrier_arrive(barriers.let_go)
    return end + 1, sums


def add(plan: Plan, inputs: Global, shared: Shared, barriers: Barriers, start: Any) -> Any:
    """Compute dQ and dK of these tiles from dS, and add them; arguments and numbers as of `compute`."""
    stages = jnp.int32(plan.config.stages)
    entry = backward_scores.read_place(plan, shared)
    wait = backward_scores.wait_for_tile(plan, shared, barriers)

    def step(state):
        n, _ = state
        slot, ds_slot = (lax.optimization_barrier(lax.rem(n, x)) for x in (stages, jnp.int32(2)))
        b, h, i, j = (entry(n, which) for which in range(4))
        q, k = shared.q.tile(slot), shared.k.tile(slot)
        halves = [shared.ds.at[ds_slot * HALVES + part] for part in range(HALVES)]
        plgpu.barrier_wait(barriers.handed.at[ds_slot])

        def product(*pairs):
            def multiply(acc):
                for x, y in pairs:
                    plgpu.wgmma(acc, x, y)
                return plgpu.wgmma_accumulator_load(acc, wait_n=0)

            return pl.run_scoped(multiply, plgpu.ACC((ROWS, plan.padded[0]), jnp.float32))

        def send(count, ref, tile):
            buffer = shared.send.at[count % plan.sends]
            plgpu.wait_smem_to_gmem(plan.sends - 1, wait_read_only=True)
            intrinsics.stage_tile(buffer, tile)
            plgpu.commit_smem()
            intrinsics.add_staged(ref, buffer)

        number = (b * plan.problem.heads + h) * plan.view.count_columns + j
        for part, ds in enumerate(halves):
            send(part, inputs.dq.at[number, part, 0], product((ds.T, k)))
        number = _tile_of_keys(plan, b, h, i)
        for own in range(plan.config.warpgroups):
            keys = pl.ds(own * ROWS, ROWS)
            pairs = [(ds.at[keys], q.at[pl.ds(part * ROWS, ROWS)]) for part, ds in enumerate(halves)]
            dk = product(*pairs)
            if own == plan.config.warpgroups - 1:
                intrinsics.gather_warps()  # all have read the place
                plgpu.barrier_arrive(barriers.taken.at[ds_slot])
                plgpu.barrier_arrive(barriers.empty.at[slot])
            send(HALVES + own, inputs.dk.at[number, own, 0], dk)
        return n + 1, wait(n + 1)

    end, _ = lax.while_loop(lambda state: state[1], step, (start, wait(start)))
    intrinsics.gather_warps()  # all have read that it is the end
    plgpu.barrier_arrive(barriers.empty.at[lax.rem(end, stages)])
    return end + 1


def _tile_of_keys(plan: Plan, b: Any, h: Any, i: Any) -> Any:
    """Return where a tile of keys lies among the sums for dK or dV."""
    kv_head = lax.div(h, jnp.int32(plan.problem.group))
    return (b * plan.problem.kv_heads + kv_head) * plan.view.count_rows + i

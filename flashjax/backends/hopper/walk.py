"""Which tiles a block visits.

A block owns a tile of rows and walks along the columns: rows are queries and columns keys, or the other
way round where the kernel is by key. Then it walks along the queries of each head of the group in turn. Two
ways, chosen by the mask when the kernel is traced:

- A closed form (`Mask.span`, `Mask.seen_by`): causal, windows, lengths, prefixes and what they compose to see
  one run. Its ends are worked out from a few scalars, and it is walked from the masked end: keys from the
  last tile to the first, queries from the first to the last.
- A scan, for everything else: the loader classifies up to 1024 tiles at once, a few a thread, by
  `Mask.tile` on the bounds of each operand, and then finds the next visible one by a minimum over the
  warpgroup, while the others compute. It hands each tile's number on through shared memory.

Either way a block that sees nothing visits one tile, masked throughout.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax import tiles
from flashjax.backends.hopper import packing, reading
from flashjax.backends.hopper.config import ROWS, WARPGROUP
from flashjax.masks import Mask, Range
from flashjax.problem import Problem

MOST = 8 * WARPGROUP  # tiles that are classified at once
NEVER = 2**30


class View(NamedTuple):
    """The lengths and tiles of a kernel.

    Attributes:
      by_key: whether its rows are keys and its columns queries; otherwise the reverse.
      rows, columns: lengths.
      block_rows, block_columns: of a tile.
    """

    by_key: bool
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def count_rows(self) -> int:
        """Tiles of rows."""
        return -(-self.rows // self.block_rows)

    @property
    def count_columns(self) -> int:
        """Tiles of columns."""
        return -(-self.columns // self.block_columns)


class Tile(NamedTuple):
    """One tile that a block visits.

    Attributes:
      g: head of the group.
      index: number of the tile of columns.
      partial: whether the mask must be evaluated there.
      key: what `decode` makes this tile of; None where the loader does not scan.
    """

    g: Any
    index: Any
    partial: Any
    key: Any


class Visit(NamedTuple):
    """The tiles of one warpgroup, counted as the loader counts them.

    Attributes:
      count: tiles that the loader loads.
      first, end: of these, the run that this warpgroup computes.
      uneven: whether that may be less than all.
      run: the closed form's run of tiles and of those wholly visible; None where the loader scans.
    """

    count: Any
    first: Any
    end: Any
    uneven: bool
    run: Any

    def tile(self, plan: Any, n: Any, key: Any) -> Tile:
        """Return the n-th tile; key is what the loader handed on with it."""
        return decode(plan, key) if self.run is None else self.run.tile(n)


class Run(NamedTuple):
    """Tiles first..end - 1, of which whole_first..whole_end - 1 need no mask.

    Where there is a ``turn``, the walk begins so many tiles later, and goes round.
    """

    by_key: bool
    first: Any
    end: Any
    whole_first: Any
    whole_end: Any
    turn: Any = None

    @property
    def count(self) -> Any:
        return self.end - self.first

    def tile(self, n: Any) -> Tile:
        """Return the n-th tile of the walk along one head."""
        index = self.first + n if self.by_key else self.end - 1 - n
        if self.turn is not None:
            index = lax.rem(n + self.turn, self.end)
        return Tile(jnp.int32(0), index, (index < self.whole_first) | (index >= self.whole_end), None)


def scans(problem: Problem, by_key: bool = False) -> bool:
    """Whether the loader must look for the visible tiles."""
    if problem.mask is None:
        return False
    operands = problem.mask.operands()
    zeros = {name: jnp.int32(0) for name in operands}
    # A walk along several heads takes one run for all of them.
    if any(max(x.array.shape[1 if by_key else 2 :]) > 1 for x in operands.values()):
        return True
    found = []
    jax.eval_shape(lambda: found.append(problem.mask.span(0, 0, Range(jnp.int32(0), jnp.int32(1)), **zeros)))
    return found[0] is None


def bounds(mask: Mask, problem: Problem, view: View) -> dict[str, Range]:
    """Bound every operand in every tile, where the loader scans: int32 or float ``[b, h, rows, columns]``."""
    block_q, block_k = view.block_rows, view.block_columns
    if view.by_key:
        block_q, block_k = block_k, block_q
    blocks = tiles.Blocks(problem.query_length, problem.key_length, block_q, block_k)
    size, chunks = _chunks(view.count_columns)

    def stored(x):
        x = x.swapaxes(2, 3) if view.by_key else x
        missing = size * chunks - x.shape[3] if x.shape[3] > 1 or view.count_columns == 1 else 0
        return jnp.pad(x.astype(packing.stored(x.dtype)), ((0, 0), (0, 0), (0, 0), (0, missing)))

    return {name: Range(*(stored(x) for x in pair)) for name, pair in tiles.summarize(mask, blocks).items()}


def _chunks(count: int) -> tuple[int, int]:
    """Return how many tiles are classified at once, and in how many rounds."""
    size = min(-(-count // WARPGROUP) * WARPGROUP, MOST)
    return size, -(-count // size)


def drive(plan: Any, inputs: Any, item: Any, load: Any, publish: Any, look: Any) -> Any:
    """Go through the tiles of an item as their loader.

    Args:
      plan, inputs, item: what the kernel knows, its arrays, and what it works on.
      load: ``load(n, tile, meanwhile)`` for each `Tile`; meanwhile is what to do once the first of its copies
        is on its way.
      publish: ``publish(count)`` before the first; None where all can work the count out.
      look: ``look(n, tile)`` for each tile, in the next one's meanwhile; None looks at none.

    Returns:
      How many tiles there were.
    """
    if plan.traits.scans:
        return _scan(plan, inputs, item, load, publish, look)
    view = plan.view
    if not plan.tells_count:
        publish(None)
    run = run_of(plan, inputs, item, item.i * view.block_rows, view.block_rows)
    count = run.count * plan.group
    if plan.tells_count:
        publish(count)
    meanwhile = functools.partial(_look_back, look)
    tile_of = lambda n: nth(plan, run, n)

    def step(n, _):
        tile = tile_of(n)
        load(n, tile, meanwhile(n, lambda: tile_of(n - 1)))

    lax.fori_loop(0, count, step, None)
    if look is not None:
        look(count - 1, tile_of(count - 1))
    return count


def nth(plan: Any, run: Run, n: Any) -> Tile:
    """Return the n-th tile of a walk along all heads of the group."""
    if plan.group == 1:
        return run.tile(n)
    return run.tile(lax.rem(n, run.count))._replace(g=lax.div(n, run.count))


def decode(plan: Any, key: Any) -> Tile:
    """Return the tile of a number that the loader's scan has found."""
    index, partial = lax.div(key, jnp.int32(2)), lax.rem(key, jnp.int32(2)) == 1
    if plan.group == 1:
        return Tile(jnp.int32(0), index, partial, key)
    count = jnp.int32(plan.view.count_columns)
    return Tile(lax.div(index, count), lax.rem(index, count), partial, key)


def _scan(plan: Any, inputs: Any, item: Any, load: Any, publish: Any, look: Any) -> Any:
    _, chunks = _chunks(plan.view.count_columns)
    rounds = chunks * plan.group
    keys_of = functools.partial(_keys, plan, inputs, item)
    visible = lambda keys: jnp.sum(jnp.where(keys < NEVER, 1, 0))
    tile_of = functools.partial(decode, plan)

    def go(keys, state):
        def step(_, state):
            n, before = state
            key = jnp.min(jnp.where(keys > before, keys, NEVER))
            load(n, tile_of(key), _look_back(look, n, lambda: tile_of(before)))
            return n + 1, key

        return lax.fori_loop(0, visible(keys), step, state)

    start = (jnp.int32(0), jnp.int32(-1))
    if rounds == 1:
        keys = keys_of(0)
        total = visible(keys)
        publish(jnp.maximum(total, 1))
        count, key = go(_at_least_first(keys, 0, total), start)
    else:
        total = lax.fori_loop(0, rounds, lambda r, n: n + visible(keys_of(r)), jnp.int32(0))
        publish(jnp.maximum(total, 1))
        visit = lambda r, state: go(_at_least_first(keys_of(r), r, total), state)
        count, key = lax.fori_loop(0, rounds, visit, start)
    if look is not None:
        look(count - 1, tile_of(key))
    return count


def _look_back(look: Any, n: Any, before: Any) -> Any:
    """Return what looks at the tile before the n-th, or does nothing."""
    return lambda: None if look is None else pl.when(n > 0)(lambda: look(n - 1, before()))


def _at_least_first(keys: jax.Array, round_: Any, total: Any) -> jax.Array:
    """Make the first tile count as partly visible where none is visible at all."""
    layout = plgpu.Layout.WG_STRIDED(keys.shape, 1)
    index = plgpu.broadcasted_iota(jnp.int32, keys.shape, 0, layout=layout) + round_ * keys.shape[0]
    return jnp.where((index == 0) & (total == 0), 1, keys)


def _keys(plan: Any, inputs: Any, item: Any, round_: Any) -> jax.Array:
    """Classify a chunk of tiles: twice the number of a tile, and 1 more if partly visible, or NEVER."""
    problem, view = plan.problem, plan.view
    size, chunks = _chunks(view.count_columns)
    layout = plgpu.Layout.WG_STRIDED((size,), 1)
    g, chunk = (0, round_) if plan.group == 1 else _split(round_, chunks)
    head = item.h if plan.group == 1 else item.h * plan.group + g
    index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + chunk * size
    r0, c0 = item.i * view.block_rows, index * view.block_columns
    rows = Range(r0, jnp.minimum(r0 + (view.block_rows - 1), view.rows - 1))
    columns = Range(c0, jnp.minimum(c0 + (view.block_columns - 1), view.columns - 1))

    def bound(ref, boolean):
        b, h, i, _ = ref.shape
        ref = ref.at[lax.rem(item.b, jnp.int32(b)), head if h > 1 else 0, item.i if i > 1 else 0]
        if ref.shape[0] == 1:
            x = ref[0]
        else:
            x = plgpu.load(ref.at[pl.ds(chunk * size, size)], layout=layout, optimized=False)
        return x != 0 if boolean else x

    operands = {
        name: Range(*(bound(ref, plan.kinds[name].boolean) for ref in pair))
        for name, pair in inputs.bounds.items()
    }
    b = lax.rem(item.b, jnp.int32(problem.batch_period))
    known = reading.lowered(lambda *args: problem.mask.tile(*args[:4], **args[4]))
    q, k = (columns, rows) if view.by_key else (rows, columns)
    empty, full = (
        plgpu.layout_cast(jnp.broadcast_to(x, index.shape), layout) for x in known(b, head, q, k, operands)
    )
    if plan.ragged:
        # The tile of keys that reaches beyond S.
        full = full & (item.i != view.count_rows - 1 if view.by_key else index != view.count_columns - 1)
    keys = 2 * (index + g * view.count_columns) + jnp.where(full, 0, 1)
    keys = jnp.where(empty, NEVER, keys)
    return jnp.where(index < view.count_columns, keys, NEVER)


def look_at(plan: Any, inputs: Any, b: Any, h: Any, i: Any, j: Any) -> tuple[Any, Any]:
    """Say of one tile whether it is hidden, and whether the mask is due; i counts rows, and j columns."""
    problem, view = plan.problem, plan.view
    last_keys = i == view.count_rows - 1 if view.by_key else j == view.count_columns - 1
    ragged = last_keys if plan.ragged else j < 0
    if problem.mask is None:
        return j < 0, ragged
    r0, c0 = i * view.block_rows, j * view.block_columns
    q = Range(r0, jnp.minimum(r0 + (view.block_rows - 1), view.rows - 1))
    k = Range(c0, jnp.minimum(c0 + (view.block_columns - 1), view.columns - 1))
    q, k = (k, q) if view.by_key else (q, k)
    names = problem.mask.operands()
    if plan.traits.scans:

        def bound(ref, boolean):
            at = [lax.rem(b, jnp.int32(ref.shape[0])), h, i, j]
            x = ref[tuple(at[n] if n == 0 or ref.shape[n] > 1 else 0 for n in range(4))]
            return x != 0 if boolean else x

        pairs = {n: inputs.bounds[n] for n in names}
        operands = {n: Range(*(bound(x, plan.kinds[n].boolean) for x in pair)) for n, pair in pairs.items()}
    else:
        reader = reading.Reader(plan.kinds, inputs.operands, b, h, None)
        operands = {n: Range(x, x) for n, x in reader.scalars(names).items()}
    known = reading.lowered(lambda *args: problem.mask.tile(*args[:4], **args[4]))
    empty, full = known(lax.rem(b, jnp.int32(problem.batch_period)), h, q, k, operands)
    return jnp.asarray(empty), (jnp.where(full, 0, 1) != 0) | ragged


def _split(n: Any, count: int) -> tuple[Any, Any]:
    return (n, 0) if count == 1 else (lax.div(n, jnp.int32(count)), lax.rem(n, jnp.int32(count)))


def follow(plan: Any, inputs: Any, item: Any, q0: Any, count: Any) -> Visit:
    """Say which tiles the warpgroup of queries q0.. computes."""
    if plan.traits.scans:
        return Visit(count, jnp.int32(0), count, False, None)
    view = plan.view
    block = run_of(plan, inputs, item, item.i * view.block_rows, view.block_rows)
    if plan.problem.mask is None:
        return Visit(block.count, jnp.int32(0), block.count, False, block)
    own = run_of(plan, inputs, item, q0, ROWS)
    # The warpgroup's run lies within the block's, or is the one tile of rows that see nothing.
    end = jnp.clip(own.end, block.first + 1, block.end)
    first = jnp.clip(own.first, block.first, end - 1)
    run = block._replace(whole_first=own.whole_first, whole_end=own.whole_end)
    return Visit(block.count, block.end - end, block.end - first, True, run)


def run_of(plan: Any, inputs: Any, item: Any, start: Any, rows: int) -> Run:
    """Return the run of tiles that so many rows from ``start`` on visit, in closed form."""
    problem, view = plan.problem, plan.view
    block, last = view.block_columns, view.columns - 1
    zero, reach = jnp.int32(0), view.columns
    if view.by_key:
        reach = view.count_columns * block  # no mask is due for queries beyond T
    if problem.mask is None:
        run = Run(view.by_key, zero, jnp.int32(view.count_columns), zero, jnp.int32(reach // block))
        if view.by_key:
            # Neighbours begin apart, so that they do not add to the same tile of dQ at a time.
            turn = lax.div(item.i * view.block_rows, jnp.int32(block))
            run = run._replace(turn=lax.rem(turn, jnp.int32(view.count_columns)))
    else:
        head = item.h if plan.group == 1 else item.h * plan.group
        reader = reading.Reader(plan.kinds, inputs.operands, item.b, head, None)
        b = lax.rem(item.b, jnp.int32(problem.batch_period))
        own = Range(start, jnp.minimum(start + (rows - 1), view.rows - 1))
        bound = problem.mask.seen_by if view.by_key else problem.mask.span
        seen, whole = bound(b, head, own, **reader.scalars(problem.mask.operands()))
        tile_of = lambda x: lax.div(jnp.int32(x), jnp.int32(block))
        end = tile_of(jnp.clip(seen.hi, -1, last) + block)
        first = tile_of(jnp.clip(seen.lo, 0, last))
        end = jnp.maximum(end, 1)
        first = jnp.minimum(first, end - 1)
        whole_first = tile_of(jnp.clip(whole.lo, 0, reach if view.by_key else last) + (block - 1))
        whole_end = tile_of(jnp.clip(whole.hi, -1, reach - 1) + 1)
        run = Run(view.by_key, first, end, whole_first, whole_end)
    if view.by_key and plan.ragged:
        run = run._replace(whole_end=jnp.where(item.i == view.count_rows - 1, 0, run.whole_end))
    return run

"""Which key tiles a query tile visits.

Two ways, chosen by the mask when the kernel is traced:

- A closed form (`Mask.span`): causal, windows, lengths, prefixes and what they compose to see one run of
  keys. Loader and compute warpgroups work its ends out from a few scalars, and go through it from the
  last tile to the first. A warpgroup whose own rows see less than the block's skips what they do not see.
- A scan, for everything else: the loader classifies up to 1024 tiles at once, a few a thread, by
  `Mask.tile` on the bounds of each operand, and then finds the next visible one by a minimum over the
  warpgroup, while the others compute. It hands each tile's number on through shared memory.

Either way a query tile that sees nothing visits one tile, masked throughout.
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
from flashjax.backends.hopper.config import ROWS, WARPGROUP, Config
from flashjax.masks import Mask, Range
from flashjax.problem import Problem

MOST = 8 * WARPGROUP  # tiles that are classified at once
NEVER = 2**30


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

    def tile(self, n: Any, key: Any) -> tuple[Any, Any]:
        """Return the number of the n-th tile, and whether the mask must be evaluated there."""
        if self.run is None:
            return _split(key)
        j = self.run.end - 1 - n
        return j, self.run.partial(j)


class Run(NamedTuple):
    """Tiles first..end - 1, of which whole_first..whole_end - 1 need no mask."""

    first: Any
    end: Any
    whole_first: Any
    whole_end: Any

    def partial(self, j: Any) -> Any:
        """Whether the mask must be evaluated in tile j."""
        return (j < self.whole_first) | (j >= self.whole_end)


def scans(problem: Problem) -> bool:
    """Whether the loader must look for the visible tiles."""
    if problem.mask is None:
        return False
    zeros = {name: jnp.int32(0) for name in problem.mask.operands()}
    if any(max(x.array.shape[2:]) > 1 for x in problem.mask.operands().values()):
        return True
    found = []
    jax.eval_shape(lambda: found.append(problem.mask.span(0, 0, Range(jnp.int32(0), jnp.int32(1)), **zeros)))
    return found[0] is None


def bounds(mask: Mask, problem: Problem, config: Config) -> dict[str, Range]:
    """Bound every operand in every tile, where the loader scans: int32 or float ``[b, h, i, tiles]``."""
    blocks = tiles.Blocks(problem.query_length, problem.key_length, config.block_q, config.block_k)
    size, chunks = _chunks(blocks.count_k)

    def stored(x):
        missing = size * chunks - x.shape[3] if x.shape[3] > 1 or blocks.count_k == 1 else 0
        return jnp.pad(x.astype(packing.stored(x.dtype)), ((0, 0), (0, 0), (0, 0), (0, missing)))

    return {name: Range(*(stored(x) for x in pair)) for name, pair in tiles.summarize(mask, blocks).items()}


def _chunks(count: int) -> tuple[int, int]:
    """Return how many tiles are classified at once, and in how many rounds."""
    size = min(-(-count // WARPGROUP) * WARPGROUP, MOST)
    return size, -(-count // size)


def drive(plan: Any, inputs: Any, item: Any, load: Any, publish: Any, look: Any) -> Any:
    """Go through the tiles of a query tile as their loader.

    Args:
      plan, inputs, item: what the kernel knows, its arrays, and the query tile.
      load: ``load(n, tile, key, partial, meanwhile)`` for each tile; key is what `Visit.tile` takes, partial
        whether the mask must be evaluated there, and meanwhile what to do once K is on its way.
      publish: ``publish(count)`` before the first; None where all can work the count out.
      look: ``look(n, tile, partial)`` for each tile, once the next one's K is on its way; None looks at none.

    Returns:
      How many tiles there were.
    """
    if plan.traits.scans:
        return _scan(plan, inputs, item, load, publish, look)
    publish(None)
    run = _run(plan, inputs, item, item.i * plan.config.block_q, plan.config.block_q)
    count = run.end - run.first
    last = lambda n: (n, run.end - 1 - n, run.partial(run.end - 1 - n))
    meanwhile = functools.partial(_look_back, look)

    def step(n, _):
        _, j, partial = last(n)
        load(n, j, None, partial, meanwhile(n, lambda: last(n - 1)))

    lax.fori_loop(0, count, step, None)
    if look is not None:
        look(*last(count - 1))
    return count


def _scan(plan: Any, inputs: Any, item: Any, load: Any, publish: Any, look: Any) -> Any:
    _, chunks = _chunks(plan.count_k)
    keys_of = functools.partial(_keys, plan, inputs, item)
    visible = lambda keys: jnp.sum(jnp.where(keys < NEVER, 1, 0))
    last = lambda n, key: (n, *_split(key))

    def chunk(keys, state):
        def step(_, state):
            n, before = state
            key = jnp.min(jnp.where(keys > before, keys, NEVER))
            j, partial = _split(key)
            load(n, j, key, partial, _look_back(look, n, lambda: last(n - 1, before)))
            return n + 1, key

        return lax.fori_loop(0, visible(keys), step, state)

    start = (jnp.int32(0), jnp.int32(-1))
    if chunks == 1:
        keys = keys_of(0)
        total = visible(keys)
        publish(jnp.maximum(total, 1))
        count, key = chunk(_at_least_first(keys, 0, total), start)
    else:
        total = lax.fori_loop(0, chunks, lambda c, n: n + visible(keys_of(c)), jnp.int32(0))
        publish(jnp.maximum(total, 1))
        visit = lambda c, state: chunk(_at_least_first(keys_of(c), c, total), state)
        count, key = lax.fori_loop(0, chunks, visit, start)
    if look is not None:
        look(*last(count - 1, key))
    return count


def _look_back(look: Any, n: Any, before: Any) -> Any:
    """Return what looks at the tile before the n-th, or does nothing."""
    return lambda: None if look is None else pl.when(n > 0)(lambda: look(*before()))


def _at_least_first(keys: jax.Array, chunk: Any, total: Any) -> jax.Array:
    """Make the first tile count as partly visible where none is visible at all."""
    layout = plgpu.Layout.WG_STRIDED(keys.shape, 1)
    index = plgpu.broadcasted_iota(jnp.int32, keys.shape, 0, layout=layout) + chunk * keys.shape[0]
    return jnp.where((index == 0) & (total == 0), 1, keys)


def _split(key: Any) -> tuple[Any, Any]:
    """Return the number of a tile, and whether it is only partly visible."""
    return lax.div(key, jnp.int32(2)), lax.rem(key, jnp.int32(2)) == 1


def _keys(plan: Any, inputs: Any, item: Any, chunk: Any) -> jax.Array:
    """Classify a chunk of tiles: ``2 * tile + 1`` where partly visible, ``2 * tile`` if wholly, or NEVER."""
    problem, config = plan.problem, plan.config
    size, _ = _chunks(plan.count_k)
    layout = plgpu.Layout.WG_STRIDED((size,), 1)
    index = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + chunk * size
    q0, k0 = item.i * config.block_q, index * config.block_k
    q = Range(q0, jnp.minimum(q0 + (config.block_q - 1), problem.query_length - 1))
    k = Range(k0, jnp.minimum(k0 + (config.block_k - 1), problem.key_length - 1))

    def bound(ref, boolean):
        b, h, i, _ = ref.shape
        ref = ref.at[lax.rem(item.b, jnp.int32(b)), item.h if h > 1 else 0, item.i if i > 1 else 0]
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
    known = reading.without_not(lambda *args: problem.mask.tile(*args[:4], **args[4]))
    empty, full = (
        plgpu.layout_cast(jnp.broadcast_to(x, index.shape), layout) for x in known(b, item.h, q, k, operands)
    )
    if plan.ragged:
        full = full & (index != plan.count_k - 1)
    keys = 2 * index + jnp.where(full, 0, 1)
    keys = jnp.where(empty, NEVER, keys)
    return jnp.where(index < plan.count_k, keys, NEVER)


def follow(plan: Any, inputs: Any, item: Any, q0: Any, count: Any) -> Visit:
    """Say which tiles the warpgroup of queries q0.. computes."""
    if plan.traits.scans:
        return Visit(count, jnp.int32(0), count, False, None)
    block = _run(plan, inputs, item, item.i * plan.config.block_q, plan.config.block_q)
    count = block.end - block.first
    if plan.problem.mask is None:
        return Visit(count, jnp.int32(0), count, False, block)
    own = _run(plan, inputs, item, q0, ROWS)
    # The warpgroup's run lies within the block's, or is the one tile of rows that see nothing.
    end = jnp.clip(own.end, block.first + 1, block.end)
    first = jnp.clip(own.first, block.first, end - 1)
    run = Run(block.first, block.end, own.whole_first, own.whole_end)
    return Visit(count, block.end - end, block.end - first, True, run)


def _run(plan: Any, inputs: Any, item: Any, q0: Any, rows: int) -> Run:
    problem, block_k = plan.problem, plan.config.block_k
    last_key = problem.key_length - 1
    if problem.mask is None:
        zero = jnp.int32(0)
        return Run(zero, jnp.int32(plan.count_k), zero, jnp.int32(problem.key_length // block_k))
    reader = reading.Reader(plan.kinds, inputs.operands, item.b, item.h, None)
    b = lax.rem(item.b, jnp.int32(problem.batch_period))
    q = Range(q0, jnp.minimum(q0 + (rows - 1), problem.query_length - 1))
    seen, whole = problem.mask.span(b, item.h, q, **reader.scalars())
    tile_of = lambda k: lax.div(jnp.int32(k), jnp.int32(block_k))
    end = tile_of(jnp.clip(seen.hi, -1, last_key) + block_k)
    first = tile_of(jnp.clip(seen.lo, 0, last_key))
    end = jnp.maximum(end, 1)
    first = jnp.minimum(first, end - 1)
    whole_first = tile_of(jnp.clip(whole.lo, 0, last_key) + (block_k - 1))
    whole_end = tile_of(jnp.clip(whole.hi, -1, last_key) + 1)
    return Run(first, end, whole_first, whole_end)

"""Which tiles a mask leaves empty, partial or full.

The score matrix is cut into tiles of ``block_q`` queries by ``block_k`` keys. A backend asks for one row
or one column of tiles at a time, so no table of all tiles is ever stored:

    summaries = summarize(mask, blocks)              # once a call: bounds of each array in each tile
    empty, full = classify(mask, summaries, ...)     # any tiles, by analytic bounds
    order, count = visible_first(empty)              # the walk: tiles to visit, in order

The answer is one-sided. A tile called empty hides every element and one called full shows every
element; a tile called neither may be anything, and the backend evaluates the mask there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flashjax.masks import Mask, Range
from flashjax.operands import indices


class Blocks(NamedTuple):
    """A tiling: lengths and tile sizes.

    Tile i starts at position ``i * block``, or earlier if it would stick out: the last tile ends with the
    axis, and shares positions with the one before where the length is no multiple of the tile.
    """

    query_length: int
    key_length: int
    block_q: int
    block_k: int

    @property
    def count_q(self) -> int:
        """Number of query tiles."""
        return -(-self.query_length // self.block_q)

    @property
    def count_k(self) -> int:
        """Number of key tiles."""
        return -(-self.key_length // self.block_k)

    def queries(self, tile: jax.Array) -> Range:
        """Positions of a query tile."""
        return _span(tile, self.block_q, self.query_length)

    def keys(self, tile: jax.Array) -> Range:
        """Positions of a key tile."""
        return _span(tile, self.block_k, self.key_length)


def fit(length: int, most: int, multiple: int = 8) -> int:
    """Choose the tile size of at most ``most`` that divides ``length`` most evenly."""
    count = -(-length // most)
    even = -(-length // count)
    return min(length, most, -(-even // multiple) * multiple)


def summarize(mask: Mask, blocks: Blocks) -> dict[str, Range]:
    """Bound every array of a resolved mask in every tile.

    Returns:
      By operand name, a `Range` of arrays ``[b, h, tiles of queries, tiles of keys]``; an axis that the
      operand lacks has size 1.
    """
    summaries = {}
    for name, operand in mask.operands().items():
        low = high = operand.array
        axes = (
            (2, blocks.query_length, blocks.block_q, operand.block[0]),
            (3, blocks.key_length, blocks.block_k, operand.block[1]),
        )
        for axis, length, size, entry in axes:
            if low.shape[axis] > 1:
                low = _reduce(low, jnp.min, axis, length, size, entry)
                high = _reduce(high, jnp.max, axis, length, size, entry)
        summaries[name] = Range(low, high)
    return summaries


def classify(
    mask: Mask,
    summaries: dict[str, Range],
    blocks: Blocks,
    b: jax.Array,
    h: jax.Array,
    i: jax.Array,
    j: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Say of tiles whether they are surely empty and whether they are surely full.

    Args:
      mask: a resolved mask.
      summaries: its bounds (see `summarize`), cut by the caller to arrays that broadcast with the rest.
      blocks: the tiling.
      b, h: batch rows and heads, int32.
      i, j: indices of query and key tiles, int32; all four broadcast to one another.

    Returns:
      ``(empty, full)``, boolean, of the broadcast shape.
    """
    empty, full = mask.tile(b, h, blocks.queries(i), blocks.keys(j), **summaries)
    shape = jnp.broadcast_shapes(
        *(jnp.shape(x) for x in (b, h, i, j)), *(jnp.shape(x) for x in (empty, full))
    )
    return jnp.broadcast_to(empty, shape), jnp.broadcast_to(full, shape)


def visible_first(empty: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Order tiles so that those to visit come first, each group in rising order.

    Args:
      empty: boolean ``[tiles]``.

    Returns:
      ``(order, count)``: tile indices int32 ``[tiles]``, and how many of them are to be visited.
    """
    order = jnp.argsort(empty, stable=True).astype(jnp.int32)
    return order, jnp.sum(~empty, dtype=jnp.int32)


def dense(mask: Mask, blocks: Blocks, batch: int, heads: int) -> tuple[jax.Array, jax.Array]:
    """Classify every tile of a resolved mask at once: for tests and pictures.

    Returns:
      ``(empty, full)``, boolean ``[B, N, tiles of queries, tiles of keys]``.
    """
    b, h, i, j = indices(batch, heads, blocks.count_q, blocks.count_k)
    return classify(mask, summarize(mask, blocks), blocks, b, h, i, j)


def _span(tile: jax.Array, block: int, length: int) -> Range:
    start = jnp.minimum(tile * block, max(0, length - block))
    return Range(start, jnp.minimum(start + block, length) - 1)


def _reduce(x: jax.Array, reduction, axis: int, length: int, size: int, entry: int) -> jax.Array:
    """Reduce an axis of ``length`` positions, ``entry`` an entry, to one value per ``size`` of them."""
    count = -(-length // size)
    if entry == 1:
        # All tiles but the last lie one after the other; the last ends with the axis.
        split = (count - 1) * size
        head = lax.slice_in_dim(x, 0, split, axis=axis)
        head = head.reshape(*x.shape[:axis], count - 1, size, *x.shape[axis + 1 :])
        last = lax.slice_in_dim(x, max(0, length - size), length, axis=axis)
        last = reduction(last, axis=axis, keepdims=True)
        return jnp.concatenate([reduction(head, axis=axis + 1), last], axis=axis)
    # Entries are themselves blocks: a tile meets those from its first to its last position.
    span = _span(jnp.arange(count, dtype=jnp.int32), size, length)
    first, last = span.lo // entry, span.hi // entry
    width = -(-size // entry) + 1
    index = jnp.minimum(first[:, None] + jnp.arange(width, dtype=jnp.int32), last[:, None])
    gathered = jnp.take(x, index.reshape(-1), axis=axis)
    shape = (*x.shape[:axis], count, width, *x.shape[axis + 1 :])
    return reduction(gathered.reshape(shape), axis=axis + 1)

"""Masks: which keys a query may see, as frozen pytrees that compose with ``&``, ``|`` and ``~``.

A mask is a function of four global indices, ``element(b, h, q, k, **operands) -> bool``, with declared
operands (see `operands`).

A mask may also say what it knows of a whole rectangle, ``tile(b, h, q, k, **operands) -> (empty, full)``,
where q, k and the operands are ranges of values. Backends never load a tile that is surely empty and
never mask one that is surely full.

`Mask.resolve` fixes a mask to the sizes of one call, where ``align="end"`` becomes an offset.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import problem as checks
from flashjax.operands import Composite, Declared, Indexed, Operand, Sizes, as_position, indices, whole


class Range(NamedTuple):
    """Inclusive bounds on a value within a tile; booleans count as 0 and 1."""

    lo: Any
    hi: Any


class Span(NamedTuple):
    """What is known in closed form of the keys that a run of queries sees, or of the queries that see a run
    of keys.

    Attributes:
      seen: no key outside of this range is visible to any of the queries (no query outside sees any key).
      whole: every key inside of it is visible to each of them (every query inside sees each key).
    """

    seen: Range
    whole: Range


_NO_LIMIT = 2**31 - 1
_EVERYTHING = Range(0, _NO_LIMIT)


# ---- the base ----------------------------------------------------------------------------------


class Mask(Indexed):
    """Base of all masks. True means that the query may attend to the key.

    Combine masks with ``&`` (both), ``|`` (either) and ``~`` (not); a boolean array on either side of
    an operator counts as `Dense`. Masks compare and hash by value, and are pytrees: they pass through
    ``jax.jit``, ``jax.vmap`` and ``jax.lax.scan`` like any argument.
    """

    def element(self, b: Any, h: Any, q: Any, k: Any, **operands: Any) -> jax.Array:
        """Say whether query q of head h in row b may see key k; all arguments broadcast."""
        raise NotImplementedError

    def tile(self, b: Any, h: Any, q: Range, k: Range, **operands: Range) -> tuple[Any, Any]:
        """Say of a rectangle whether it is surely empty and whether it is surely full."""
        return False, False

    def span(self, b: Any, h: Any, q: Range, **operands: Any) -> Span | None:
        """Bound the keys that a run of queries sees; None where no closed form is known.

        Only masks whose operands have neither queries nor keys among their axes have one.
        """
        return None

    def seen_by(self, b: Any, h: Any, k: Range, **operands: Any) -> Span | None:
        """Bound the queries that see a run of keys; None where, and only where, `span` is."""
        return None

    def shows_own(self) -> bool:
        """Say whether query i surely sees key i, for every i: then no key up to T is hidden from all."""
        return False

    def dense(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
    ) -> jax.Array:
        """Materialise the mask, for checks and pictures: quadratic memory.

        Args:
          query_length: T.
          key_length: S; None means T.
          batch, heads: B and N; None takes them from the mask's own arrays, or 1.
          query_seq_lengths, key_value_seq_lengths: lengths that ``align="end"`` counts from, int
            ``[B]``. They hide nothing here; `Lengths` does.

        Returns:
          Boolean ``[B, N, T, S]``, True where a query may attend.

        Example:
          >>> Causal().dense(2)[0, 0].tolist()
          [[True, False], [True, True]]
        """
        if key_length is None:
            key_length = query_length
        if batch is None:
            batch = _own_size(self, "b", query_seq_lengths, key_value_seq_lengths)
        if heads is None:
            heads = _own_size(self, "h")
        mask = self.resolve(
            Sizes(batch, heads, query_length, key_length, query_seq_lengths, key_value_seq_lengths)
        )
        b, h, q, k = indices(batch, heads, query_length, key_length)
        operands = {name: whole(operand, q, k) for name, operand in mask.operands().items()}
        visible = mask.element(b, h, q, k, **operands)
        return jnp.broadcast_to(visible, (batch, heads, query_length, key_length))

    def picture(
        self,
        query_length: int,
        key_length: int | None = None,
        *,
        row: int = 0,
        head: int = 0,
        width: int = 64,
        **sizes: Any,
    ) -> str:
        """Draw the mask: queries downwards, keys to the right.

        ``█`` is visible and ``·`` hidden. A mask larger than ``width`` is drawn in blocks, where ``▒``
        is a block that is partly visible.

        Args:
          query_length, key_length: T and S; S defaults to T.
          row, head: which batch row and query head to draw.
          width: the largest number of characters a side.
          **sizes: further arguments of `dense`.

        Returns:
          The picture as text of at most ``width`` lines.

        Example:
          >>> print(SlidingWindow(1).picture(4))
          █···
          ██··
          ·██·
          ··██
        """
        seen = np.asarray(self.dense(query_length, key_length, **sizes))[row, head]
        step = max(1, -(-max(seen.shape) // width))
        lines = []
        for i in range(0, seen.shape[0], step):
            blocks = (seen[i : i + step, j : j + step] for j in range(0, seen.shape[1], step))
            lines.append("".join("█" if b.all() else "▒" if b.any() else "·" for b in blocks))
        return "\n".join(lines)

    def __and__(self, other: Any) -> Mask:
        return And(self, other)

    def __rand__(self, other: Any) -> Mask:
        return And(other, self)

    def __or__(self, other: Any) -> Mask:
        return Or(self, other)

    def __ror__(self, other: Any) -> Mask:
        return Or(other, self)

    def __invert__(self) -> Mask:
        return Not(self)

    __array_ufunc__ = None  # a NumPy array on the left of an operator leaves it to the mask

    def __bool__(self) -> bool:
        checks.reject_truth_value(self)
        return False


# ---- the stock masks -------------------------------------------------------------------------------


class _Aligned(Mask):
    """What masks share that count from a shifted query position ``q + offset``."""

    def resolve(self, sizes: Sizes) -> Mask:
        if self.align == "end":
            keys = sizes.key_length if sizes.key_lengths is None else sizes.key_lengths
            queries = sizes.query_length if sizes.query_lengths is None else sizes.query_lengths
            if not isinstance(keys, int) or not isinstance(queries, int):
                keys, queries = (as_position(jnp.asarray(x)) for x in (keys, queries))
            self = self._replace(offset=keys - queries, align="start")
        return super().resolve(sizes)


class Causal(_Aligned):
    """Let query i see keys ``<= i + offset``.

    Args:
      offset: how far queries are shifted against keys: an int, or an integer array, a scalar or one
        value per batch row ``[B]``, which may be traced. Default 0: query i sees keys 0..i.
      align: ``"start"`` uses ``offset``; ``"end"`` sets it to ``S - T``, or per row to
        ``key length - query length`` where lengths are given, so that the last query sees every key.

    Raises:
      ValueError: ``align`` is unknown, or ``"end"`` together with an offset.
      TypeError: ``offset`` is not integral.

    Example:
      >>> print(Causal(align="end").picture(2, 4))
      ███·
      ████
    """

    offset: Any = 0
    align: str = "start"
    _axes = {"offset": "b"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(
            offset=checks.check_offset("Causal.offset", self.offset),
            align=checks.check_align(self.align),
        )
        checks.check_align_with_offset(self.align, self.offset)

    def element(self, b, h, q, k, *, offset=None):
        return k <= q + (self.offset if offset is None else offset)

    def tile(self, b, h, q, k, *, offset=None):
        low, high = (self.offset, self.offset) if offset is None else offset
        return k.lo > q.hi + high, k.hi <= q.lo + low

    def span(self, b, h, q, *, offset=None):
        offset = self.offset if offset is None else offset
        return Span(Range(0, q.hi + offset), Range(0, q.lo + offset))

    def seen_by(self, b, h, k, *, offset=None):
        offset = self.offset if offset is None else offset
        return Span(Range(k.lo - offset, _NO_LIMIT), Range(k.hi - offset, _NO_LIMIT))

    def shows_own(self):
        return isinstance(self.offset, int) and self.offset >= 0


class SlidingWindow(_Aligned):
    """Let query i see keys from ``i + offset - left`` to ``i + offset + right``, both included.

    Args:
      left: keys to the left of the query's position, besides its own: an int, an integer array (scalar
        or ``[B]``, may be traced), or None for no limit.
      right: likewise to the right. Default 0, so that ``SlidingWindow(1024)`` alone is causal.
      offset, align: as in `Causal`.

    Raises:
      ValueError: a size is negative; ``align`` is unknown, or ``"end"`` together with an offset.
      TypeError: a size or the offset is not integral.

    Notes:
      A model's ``sliding_window = W`` that counts the token itself is ``SlidingWindow(W - 1)``.

    Example:
      >>> print(SlidingWindow(1, 1).picture(3))
      ██·
      ███
      ·██
    """

    left: Any
    right: Any = 0
    offset: Any = 0
    align: str = "start"
    _axes = {"left": "b", "right": "b", "offset": "b"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(
            left=checks.check_window("left", self.left),
            right=checks.check_window("right", self.right),
            offset=checks.check_offset("SlidingWindow.offset", self.offset),
            align=checks.check_align(self.align),
        )
        checks.check_align_with_offset(self.align, self.offset)

    def _bounds(self, operands: dict[str, Any]) -> list[Any]:
        return [operands.get(name, getattr(self, name)) for name in ("left", "right", "offset")]

    def element(self, b, h, q, k, **operands):
        left, right, offset = self._bounds(operands)
        distance = k - (q + offset)
        visible = jnp.ones_like(distance, dtype=bool)
        if left is not None:
            visible = distance >= -left
        if right is not None:
            visible = visible & (distance <= right)
        return visible

    def tile(self, b, h, q, k, **operands):
        left, right, offset = self._bounds(operands)
        low, high = _as_range(offset)
        nearest, farthest = k.lo - q.hi - high, k.hi - q.lo - low
        empty, full = jnp.zeros_like(nearest, dtype=bool), jnp.ones_like(nearest, dtype=bool)
        if left is not None:
            left = _as_range(left)
            empty, full = empty | (farthest < -left.hi), full & (nearest >= -left.lo)
        if right is not None:
            right = _as_range(right)
            empty, full = empty | (nearest > right.hi), full & (farthest <= right.lo)
        return empty, full

    def span(self, b, h, q, **operands):
        left, right, offset = self._bounds(operands)
        seen, whole = _EVERYTHING, _EVERYTHING
        if left is not None:
            seen = seen._replace(lo=q.lo + (offset - left))
            whole = whole._replace(lo=q.hi + (offset - left))
        if right is not None:
            seen, whole = (x._replace(hi=edge + offset + right) for x, edge in ((seen, q.hi), (whole, q.lo)))
        return Span(seen, whole)

    def seen_by(self, b, h, k, **operands):
        left, right, offset = self._bounds(operands)
        seen, whole = _EVERYTHING, _EVERYTHING
        if right is not None:
            seen, whole = (
                x._replace(lo=edge - (offset + right)) for x, edge in ((seen, k.lo), (whole, k.hi))
            )
        if left is not None:
            seen, whole = (x._replace(hi=edge - (offset - left)) for x, edge in ((seen, k.hi), (whole, k.lo)))
        return Span(seen, whole)

    def shows_own(self):
        if not all(x is None or isinstance(x, int) for x in (self.left, self.right, self.offset)):
            return False
        reaches = self.left is None or self.left >= self.offset
        return reaches and (self.right is None or self.right >= -self.offset)


class Segments(Mask):
    """Let a query see the keys of its own segment: packed documents, or padding with an id of its own.

    Args:
      query_ids: integer ids ``[B, T]`` or ``[T]``.
      key_ids: integer ids ``[B, S]`` or ``[S]``; None means ``query_ids``.

    Raises:
      TypeError: the ids are not integers.

    Notes:
      Ids are compared for equality and need not be sorted. Tiles are skipped by the range of their ids,
      so documents that lie one after the other, with rising ids, skip best.

    Example:
      >>> print(Segments([0, 0, 1]).picture(3))
      ██·
      ██·
      ··█
    """

    query_ids: Any
    key_ids: Any = None
    same: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)
    _axes = {"query_ids": "bq", "key_ids": "bk"}  # noqa: RUF012

    def __post_init__(self) -> None:
        query_ids = checks.check_integers("Segments.query_ids", self.query_ids)
        key_ids = query_ids
        if self.key_ids is not None:
            key_ids = checks.check_integers("Segments.key_ids", self.key_ids)
            checks.check_same_ids(query_ids, key_ids)
        same = self.key_ids is None or self.key_ids is self.query_ids
        self._freeze(query_ids=query_ids, key_ids=key_ids, same=same)

    def element(self, b, h, q, k, *, query_ids, key_ids):
        dtype = np.promote_types(query_ids.dtype, key_ids.dtype)
        return query_ids.astype(dtype) == key_ids.astype(dtype)

    def tile(self, b, h, q, k, *, query_ids, key_ids):
        dtype = np.promote_types(query_ids.lo.dtype, key_ids.lo.dtype)
        ids, other = (Range(*(x.astype(dtype) for x in r)) for r in (query_ids, key_ids))
        empty = (ids.hi < other.lo) | (other.hi < ids.lo)
        return empty, (ids.lo == ids.hi) & (other.lo == other.hi) & (ids.lo == other.lo)

    def shows_own(self):
        return self.same


class PrefixLM(Mask):
    """Let every query see the first ``prefix_lengths`` keys, and the rest causally.

    Args:
      prefix_lengths: an int, or an integer array, a scalar or one length per batch row ``[B]``.

    Raises:
      TypeError: the lengths are not integers.

    Example:
      >>> print(PrefixLM(2).picture(4))
      ██··
      ██··
      ███·
      ████
    """

    prefix_lengths: Any
    _axes = {"prefix_lengths": "b"}  # noqa: RUF012

    def __post_init__(self) -> None:
        lengths = checks.check_offset("PrefixLM.prefix_lengths", self.prefix_lengths)
        self._freeze(prefix_lengths=lengths)

    def element(self, b, h, q, k, *, prefix_lengths=None):
        return (k <= q) | (k < (self.prefix_lengths if prefix_lengths is None else prefix_lengths))

    def tile(self, b, h, q, k, *, prefix_lengths=None):
        prefix = _as_range(self.prefix_lengths if prefix_lengths is None else prefix_lengths)
        return (k.lo > q.hi) & (k.lo >= prefix.hi), (k.hi <= q.lo) | (k.hi < prefix.lo)

    def span(self, b, h, q, *, prefix_lengths=None):
        last = (self.prefix_lengths if prefix_lengths is None else prefix_lengths) - 1
        return Span(Range(0, jnp.maximum(q.hi, last)), Range(0, jnp.maximum(q.lo, last)))

    def seen_by(self, b, h, k, *, prefix_lengths=None):
        prefix = self.prefix_lengths if prefix_lengths is None else prefix_lengths
        first = (jnp.where(edge < prefix, 0, edge) for edge in (k.lo, k.hi))
        return Span(*(Range(x, _NO_LIMIT) for x in first))

    def shows_own(self):
        return True


class Lengths(Mask):
    """Hide what lies beyond the length of a row: queries from ``query_lengths`` on see nothing, keys from
    ``key_lengths`` on are seen by none.

    Args:
      query_lengths: an int or integer array, a scalar or ``[B]``; None hides no query.
      key_lengths: likewise for keys.

    Raises:
      TypeError: the lengths are not integers.

    Example:
      >>> print(Lengths(key_lengths=1).picture(2))
      █·
      █·
    """

    query_lengths: Any = None
    key_lengths: Any = None
    _axes = {"query_lengths": "b", "key_lengths": "b"}  # noqa: RUF012

    def __post_init__(self) -> None:
        lengths = {}
        for name in ("query_lengths", "key_lengths"):
            value = getattr(self, name)
            lengths[name] = value if value is None else checks.check_offset(f"Lengths.{name}", value)
        self._freeze(**lengths)

    def element(self, b, h, q, k, **operands):
        visible = jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), dtype=bool)
        for name, position in (("query_lengths", q), ("key_lengths", k)):
            length = operands.get(name, getattr(self, name))
            if length is not None:
                visible = visible & (position < length)
        return visible

    def tile(self, b, h, q, k, **operands):
        empty, full = False, True
        for name, position in (("query_lengths", q), ("key_lengths", k)):
            length = operands.get(name, getattr(self, name))
            if length is not None:
                length = _as_range(length)
                empty = empty | (position.lo >= length.hi)
                full = full & (position.hi < length.lo)
        return empty, full

    def span(self, b, h, q, **operands):
        queries, keys = (operands.get(name, getattr(self, name)) for name in ("query_lengths", "key_lengths"))
        seen = whole = _NO_LIMIT if keys is None else keys - 1
        if queries is not None:
            seen = jnp.where(q.lo < queries, seen, -1)
            whole = jnp.where(q.hi < queries, whole, -1)
        return Span(Range(0, seen), Range(0, whole))

    def seen_by(self, b, h, k, **operands):
        queries, keys = (operands.get(name, getattr(self, name)) for name in ("query_lengths", "key_lengths"))
        seen = whole = _NO_LIMIT if queries is None else queries - 1
        if keys is not None:
            seen = jnp.where(k.lo < keys, seen, -1)
            whole = jnp.where(k.hi < keys, whole, -1)
        return Span(Range(0, seen), Range(0, whole))


class Dense(Mask):
    """Use a boolean array as the mask.

    Args:
      array: boolean, broadcastable to ``[B, N, T, S]``, True where a query may attend.

    Raises:
      TypeError: the array is not boolean.
      ValueError: it has more than four dimensions, or does not broadcast (when the mask is used).

    Example:
      >>> print(Dense([[True, False], [True, True]]).picture(2))
      █·
      ██
    """

    array: Any
    _axes = {"array": "bhqk"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(array=checks.check_mask_array("mask", self.array))

    def _label(self, name):
        return "mask"

    def element(self, b, h, q, k, *, array):
        return array

    def tile(self, b, h, q, k, *, array):
        return ~array.hi, array.lo


class BlockSparse(Mask):
    """Let whole blocks of queries see whole blocks of keys.

    Args:
      blocks: boolean, broadcastable to ``[B, N, ceil(T / block), ceil(S / block)]``.
      block_size: an int, or a pair (queries, keys).

    Raises:
      TypeError: ``blocks`` is not boolean.
      ValueError: ``block_size`` is not positive; ``blocks`` does not fit (when the mask is used).

    Example:
      >>> print(BlockSparse([[True, False], [True, True]], 2).picture(4))
      ██··
      ██··
      ████
      ████
    """

    blocks: Any
    block_size: Any = 128
    _axes = {"blocks": "bhqk"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(
            blocks=checks.check_mask_array("BlockSparse.blocks", self.blocks),
            block_size=checks.check_block_size(self.block_size),
        )

    def operands(self):
        return {"blocks": Operand(self.blocks, "bhqk", self.block_size)}

    def element(self, b, h, q, k, *, blocks):
        return blocks

    def tile(self, b, h, q, k, *, blocks):
        return ~blocks.hi, blocks.lo


class CustomMask(Declared, Mask):
    """Make a mask of a function.

    Args:
      function: ``function(b, h, q, k, **operands) -> bool``, elementwise jnp on int32 index arrays that
        broadcast to one another: batch row, query head, query position, key position. Arrays that it
        reads must be declared as operands; it must not close over any.
      bounds: optional ``bounds(b, h, q, k, **operands) -> (empty, full)``, where q, k and the operands
        are `Range` pairs (lo, hi): whether the rectangle is surely empty, surely full. Without it no
        tile is skipped. ``False`` is always a right answer.
      **operands: `Operand` arrays by name; each reaches the function broadcast-ready.

    Raises:
      ValueError: an operand's axes are not letters of ``"bhqk"`` in order, or do not fit its array.

    Notes:
      Masks compare by the identity of their function: define it once, outside the training step.

    Example:
      >>> import jax.numpy as jnp
      >>> def same_parity(b, h, q, k, shift):
      ...     return (q + k + shift) % 2 == 0
      >>> print(CustomMask(same_parity, shift=Operand(jnp.array([0]), "b")).picture(3))
      █·█
      ·█·
      █·█
    """

    function: Callable
    bounds: Callable | None
    names: tuple[str, ...]
    axes: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...]
    arrays: tuple[Any, ...]

    def __init__(self, function: Callable, /, bounds: Callable | None = None, **operands: Operand):
        checks.check_function("function", function)
        if bounds is not None:
            checks.check_function("bounds", bounds)
        self._declare(operands, function=function, bounds=bounds)

    def element(self, b, h, q, k, **operands):
        return checks.check_seen(self.function(b, h, q, k, **operands))

    def tile(self, b, h, q, k, **operands):
        if self.bounds is None:
            return False, False
        return self.bounds(b, h, q, k, **operands)


# ---- the algebra -----------------------------------------------------------------------------------


class _Composite(Composite, Mask):
    """What And, Or and Not share."""

    def _each(self, method: str, operands: dict[str, Any], *position: Any) -> list[Any]:
        parts = self.parts().items()
        return [getattr(part, method)(*position, **self.own(name, operands)) for name, part in parts]


class _Pair(_Composite):
    """What And and Or share: two masks."""

    left: Any
    right: Any

    def __post_init__(self) -> None:
        self._freeze(left=as_mask(self.left), right=as_mask(self.right))


class And(_Pair):
    """See what both masks see: ``left & right``."""

    def element(self, b, h, q, k, **operands):
        left, right = self._each("element", operands, b, h, q, k)
        return left & right

    def tile(self, b, h, q, k, **operands):
        left, right = self._each("tile", operands, b, h, q, k)
        return left[0] | right[0], left[1] & right[1]

    def span(self, b, h, q, **operands):
        return _both(*self._each("span", operands, b, h, q))

    def seen_by(self, b, h, k, **operands):
        return _both(*self._each("seen_by", operands, b, h, k))

    def shows_own(self):
        return all(part.shows_own() for part in self.parts().values())


class Or(_Pair):
    """See what either mask sees: ``left | right``."""

    def element(self, b, h, q, k, **operands):
        left, right = self._each("element", operands, b, h, q, k)
        return left | right

    def tile(self, b, h, q, k, **operands):
        left, right = self._each("tile", operands, b, h, q, k)
        return left[0] & right[0], left[1] | right[1]

    def span(self, b, h, q, **operands):
        return _either(*self._each("span", operands, b, h, q))

    def seen_by(self, b, h, k, **operands):
        return _either(*self._each("seen_by", operands, b, h, k))

    def shows_own(self):
        return any(part.shows_own() for part in self.parts().values())


class Not(_Composite):
    """See what the mask hides: ``~mask``."""

    mask: Any

    def __post_init__(self) -> None:
        self._freeze(mask=as_mask(self.mask))

    def element(self, b, h, q, k, **operands):
        (seen,) = self._each("element", operands, b, h, q, k)
        return ~seen

    def tile(self, b, h, q, k, **operands):
        ((empty, full),) = self._each("tile", operands, b, h, q, k)
        return full, empty


def as_mask(value: Any) -> Mask:
    """Return a mask as it is and a boolean array as `Dense`."""
    if isinstance(value, Mask):
        return value
    if not isinstance(value, np.ndarray | jax.Array):
        checks.check_mask_operand(value)
    return Dense(value)


def from_arguments(
    mask: Any,
    sizes: Sizes,
    *,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
) -> Mask | None:
    """Make one resolved mask of all the arguments that hide something; None hides nothing.

    Args:
      mask: a `Mask`, a boolean array, or None.
      sizes: B, N, T and S of the call.
      is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size: as in `flash_attention`.
    """
    query_lengths = checks.check_lengths("query_seq_lengths", query_seq_lengths, sizes.batch)
    key_lengths = checks.check_lengths("key_value_seq_lengths", key_value_seq_lengths, sizes.batch)
    parts = []
    if checks.check_flag("is_causal", is_causal):
        parts.append(Causal())
    if local_window_size is not None:
        parts.append(SlidingWindow(*checks.check_local_window(local_window_size)))
    if query_lengths is not None or key_lengths is not None:
        parts.append(Lengths(query_lengths, key_lengths))
    if isinstance(mask, Mask):
        parts.append(mask)
    elif mask is not None:
        if not isinstance(mask, np.ndarray | jax.Array | list):
            checks.check_mask_type(mask)
        parts.append(Dense(mask))
    if not parts:
        return None
    whole_mask = parts[0]
    for part in parts[1:]:
        whole_mask = whole_mask & part
    return whole_mask.resolve(sizes._replace(query_lengths=query_lengths, key_lengths=key_lengths))


# ---- arrays of masks -------------------------------------------------------------------------------


def _as_range(value: Any) -> Range:
    return value if isinstance(value, Range) else Range(value, value)


def _both(left: Span | None, right: Span | None) -> Span | None:
    """Bound what two masks see both."""
    if left is None or right is None:
        return None
    overlap = lambda a, b: Range(jnp.maximum(a.lo, b.lo), jnp.minimum(a.hi, b.hi))
    return Span(*(overlap(x, y) for x, y in zip(left, right, strict=True)))


def _either(left: Span | None, right: Span | None) -> Span | None:
    """Bound what either of two masks sees."""
    if left is None or right is None:
        return None
    seen = Range(jnp.minimum(left.seen.lo, right.seen.lo), jnp.maximum(left.seen.hi, right.seen.hi))
    # Of two runs that are wholly visible, the one that reaches further: both are right answers.
    longer = _length(left.whole) >= _length(right.whole)
    whole = Range(*(jnp.where(longer, x, y) for x, y in zip(left.whole, right.whole, strict=True)))
    return Span(seen, whole)


def _length(a: Range) -> Any:
    return jnp.maximum(a.hi, -1) - jnp.maximum(a.lo, 0)


def _own_size(mask: Mask, axis: str, *lengths: Any) -> int:
    sizes = [jnp.shape(x)[0] for x in lengths if x is not None and jnp.ndim(x) == 1]
    for operand in mask.operands().values():
        shape = dict(zip(operand.axes[::-1], operand.array.shape[::-1], strict=False))
        sizes.append(shape.get(axis, 1))
    return max(sizes, default=1)

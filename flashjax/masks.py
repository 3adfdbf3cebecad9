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
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax import problem as checks
from flashjax.operands import (
    LIMIT,
    Aligned,
    Composite,
    Declared,
    Indexed,
    Operand,
    Sizes,
    as_position,
    indices,
    whole,
)


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


class Causal(Aligned, Mask):
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


class SlidingWindow(Aligned, Mask):
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
        return _within(k - (q + offset), left, right)

    def tile(self, b, h, q, k, **operands):
        left, right, offset = self._bounds(operands)
        low, high = _as_range(offset)
        return _tile_within(Range(k.lo - q.hi - high, k.hi - q.lo - low), left, right)

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


class Between(Mask):
    """Let query i see keys from ``first[i]`` to ``last[i]``, both included.

    Args:
      first, last: int32 ``[B, T]`` or ``[T]``. A query whose last key comes before its first sees none.

    Raises:
      TypeError: the keys are not integers.

    Example:
      >>> print(Between([0, 3], [1, 4]).picture(2, 5))
      ██···
      ···██
    """

    first: Any
    last: Any
    _axes = {"first": "bq", "last": "bq"}  # noqa: RUF012

    def __post_init__(self) -> None:
        names = ("first", "last")
        self._freeze(**{n: checks.check_integers(f"Between.{n}", getattr(self, n)) for n in names})

    def element(self, b, h, q, k, *, first, last):
        return (k >= first) & (k <= last)

    def tile(self, b, h, q, k, *, first, last):
        return (k.hi < first.lo) | (k.lo > last.hi), (k.lo >= first.hi) & (k.hi <= last.lo)


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

    @classmethod
    def from_cu_seqlens(
        cls,
        query_cu_seqlens: Any,
        key_cu_seqlens: Any = None,
        *,
        query_length: int,
        key_length: int | None = None,
    ) -> Segments:
        """Make segments of packed documents, which are given by their cumulative lengths.

        Args:
          query_cu_seqlens: where each document starts among the queries, and where the last one ends:
            integers ``[documents + 1]`` or ``[B, documents + 1]`` that start at 0 and never fall. They may
            be traced.
          key_cu_seqlens: likewise among the keys; None means ``query_cu_seqlens``.
          query_length: T. Queries from the last end on are padding and see nothing.
          key_length: S; None means T. Keys from the last end on are padding and are seen by none.

        Returns:
          `Segments` with rising ids.

        Raises:
          ValueError: a shape does not fit; or numbers that are in no JAX array do not start at 0, fall, or
            end beyond the length. (In a JAX array nobody looks.)
          TypeError: the numbers are not integers, or a length is no Python int.

        Notes:
          Two equal neighbours are an empty document, so a row with fewer documents repeats its last end.
          Lengths of documents become cumulative lengths by ``np.cumsum([0, *lengths])``.

        Example:
          >>> print(Segments.from_cu_seqlens([0, 2, 3], query_length=4).picture(4))
          ██··
          ██··
          ··█·
          ····
        """
        query_length = checks.check_count("query_length", query_length, 0)
        key_length = query_length if key_length is None else checks.check_count("key_length", key_length, 0)
        queries = checks.check_cu_seqlens("query_cu_seqlens", query_cu_seqlens, query_length)
        keys = query_cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
        name = "query_cu_seqlens" if key_cu_seqlens is None else "key_cu_seqlens"
        keys = checks.check_cu_seqlens(name, keys, key_length)
        checks.check_same_documents(queries, keys)
        # Padding has ids of its own, of queries and of keys, so that a query of it sees no key.
        return cls(_documents(queries, query_length, 0), _documents(keys, key_length, 1))

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

    @classmethod
    def from_lists(cls, lists: Any, block_size: Any = 128, *, key_length: int) -> BlockSparse:
        """Make the table of lists: for each block of queries, the key blocks that it sees.

        Args:
          lists: numbers of key blocks, integers ``[ceil(T / block), most]`` in any order, filled up with -1;
            leading dimensions broadcast to ``[B, N]``. They may be traced.
          block_size: an int, or a pair (queries, keys).
          key_length: S.

        Returns:
          `BlockSparse`; its table holds one boolean per block of queries and block of keys.

        Raises:
          ValueError: a shape or ``block_size`` does not fit; or a number that is in no JAX array lies beyond
            the last key block. (In a JAX array it sees nothing.)
          TypeError: the numbers are not integers, or ``key_length`` is no Python int.

        Example:
          >>> print(BlockSparse.from_lists([[0, -1], [2, 0]], 2, key_length=6).picture(4, 6))
          ██····
          ██····
          ██··██
          ██··██
        """
        block_size = checks.check_block_size(block_size)
        count = -(-checks.check_count("key_length", key_length, 0) // block_size[1])
        lists = as_position(checks.check_block_lists(lists, count))
        numbers = lists.reshape(math.prod(lists.shape[:-1]), lists.shape[-1])
        numbers = jnp.where(numbers < 0, count, numbers)
        rows = jnp.arange(numbers.shape[0], dtype=jnp.int32)[:, None]
        blocks = jnp.zeros((numbers.shape[0], count), bool).at[rows, numbers].set(True, mode="drop")
        return cls(blocks.reshape(*lists.shape[:-1], count), block_size)

    def operands(self):
        return {"blocks": Operand(self.blocks, "bhqk", self.block_size)}

    def element(self, b, h, q, k, *, blocks):
        return blocks

    def tile(self, b, h, q, k, *, blocks):
        return ~blocks.hi, blocks.lo


class BlockPattern(Mask):
    """Let blocks of queries see blocks of keys by a rule: there is no table, whatever the length.

    A block of queries sees its own block of keys, and what each argument adds.

    Args:
      block_size: positions of a block, of queries and keys alike.
      local: neighbours on each side: the windows of Longformer and BigBird, of ``2 * local + 1`` blocks.
      strided: every so-many-th block, counted from the query's own: "strided" in Child et al. (2019).
      fixed: the last of every so many blocks: "fixed" there.
      global_blocks: so many blocks at the start see all and are seen by all: the global tokens of
        Longformer and BigBird.

    Raises:
      ValueError: a number is too small.
      TypeError: a number is no Python int.

    Notes:
      ``& Causal()`` hides the future, inside of a block too. ``BlockPattern(n)`` alone is attention in chunks
      of n, and ``BlockPattern(8 * 128) | BlockPattern(128, fixed=8)`` both parts of "fixed", for a stride of
      8 blocks. ``| BlockSparse.from_lists(...)`` adds BigBird's random blocks.

    Example:
      >>> print((BlockPattern(1, local=1, fixed=4) & Causal()).picture(8))
      █·······
      ██······
      ·██·····
      ··██····
      ···██···
      ···███··
      ···█·██·
      ···█··██
    """

    block_size: int = 128
    _: dataclasses.KW_ONLY
    local: int = 0
    strided: int | None = None
    fixed: int | None = None
    global_blocks: int = 0

    def __post_init__(self) -> None:
        least = {"block_size": 1, "local": 0, "strided": 1, "fixed": 1, "global_blocks": 0}
        for name in ("strided", "fixed"):
            if getattr(self, name) is None:
                del least[name]
        check = lambda name: checks.check_count(f"BlockPattern.{name}", getattr(self, name), least[name])
        self._freeze(**{name: check(name) for name in least})

    def element(self, b, h, q, k):
        # What one of q and k alone decides is said in positions: fewer numbers at a time in a kernel.
        size, local = _clipped(self.block_size), _clipped(self.local)
        row, column = lax.div(q, size), lax.div(k, size)
        visible = _within(column - row, local, local)
        if self.strided is not None:
            stride = _clipped(self.strided)
            visible = visible | (lax.rem(row, stride) == lax.rem(column, stride))
        if self.fixed is not None:
            period, last = (_clipped(n * self.block_size) for n in (self.fixed, self.fixed - 1))
            visible = visible | (lax.rem(k, period) >= last)
        if self.global_blocks:
            end = _clipped(self.global_blocks * self.block_size)
            visible = visible | (q < end) | (k < end)
        return visible

    def tile(self, b, h, q, k):
        size, local = _clipped(self.block_size), _clipped(self.local)
        rows, columns = (Range(*(lax.div(x, size) for x in r)) for r in (q, k))
        distance = Range(columns.lo - rows.hi, columns.hi - rows.lo)
        empty, full = _tile_within(distance, local, local)
        if self.strided is not None:
            none, every = _tile_multiples(distance, _clipped(self.strided))
            empty, full = empty & none, full | every
        if self.fixed is not None:
            after = Range(columns.lo + 1, columns.hi + 1)
            none, every = _tile_multiples(after, _clipped(self.fixed))
            empty, full = empty & none, full | every
        if self.global_blocks:
            end = _clipped(self.global_blocks * self.block_size)
            empty = empty & (q.lo >= end) & (k.lo >= end)
            full = full | (q.hi < end) | (k.hi < end)
        return empty, full

    def shows_own(self):
        return True


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


# ---- packed documents ------------------------------------------------------------------------------


def packed(
    query_cu_seqlens: Any,
    key_cu_seqlens: Any = None,
    *,
    query_length: int,
    key_length: int | None = None,
    left: Any = None,
    right: Any = None,
    align: str = "start",
) -> Mask:
    """Make the mask of packed documents, with a window that counts positions within each document.

    Args:
      query_cu_seqlens, key_cu_seqlens, query_length, key_length: as in `Segments.from_cu_seqlens`.
      left: keys to the left of the query's position, besides its own: an int, an integer array (scalar or
        ``[B]``, may be traced), or None for no limit.
      right: likewise to the right; ``right=0`` is causal.
      align: ``"start"`` puts the first query of a document at its first key; ``"end"`` its last query at its
        last key.

    Returns:
      `Segments`, and a window where there is a limit; `Between` where the keys have ends of their own, too.

    Raises:
      ValueError: as in `Segments.from_cu_seqlens`; a size is negative; ``align`` is unknown.
      TypeError: as there; a size is not integral.

    Example:
      >>> mask = packed([0, 1, 3], [0, 2, 5], query_length=3, key_length=5, right=0, align="end")
      >>> print(mask.picture(3, 5))
      ██···
      ··██·
      ··███
    """
    align = checks.check_align(align)
    left, right = checks.check_window("left", left), checks.check_window("right", right)
    segments = Segments.from_cu_seqlens(
        query_cu_seqlens, key_cu_seqlens, query_length=query_length, key_length=key_length
    )
    if left is None and right is None:
        return segments
    if key_cu_seqlens is None or key_cu_seqlens is query_cu_seqlens:
        # Each document starts at one position among queries and keys, and has as many of both.
        causal = left is None and isinstance(right, int) and right == 0
        return segments & (Causal() if causal else SlidingWindow(left, right))
    return _within_documents(segments.query_ids, query_cu_seqlens, key_cu_seqlens, left, right, align)


def _within_documents(
    ids: jax.Array, query_cu_seqlens: Any, key_cu_seqlens: Any, left: Any, right: Any, align: str
) -> Between:
    """Give each query the run of keys of its document that its window shows."""
    queries, keys = (as_position(jnp.asarray(x)) for x in (query_cu_seqlens, key_cu_seqlens))
    of_query = jnp.vectorize(lambda x, ids: jnp.take(x, ids, mode="clip"), signature="(d),(t)->(t)")
    first, last = of_query(keys[..., :-1], ids), of_query(keys[..., 1:], ids) - 1
    edge = slice(None, -1) if align == "start" else slice(1, None)
    shift = of_query(keys[..., edge] - queries[..., edge], ids)
    stands_at = jnp.arange(ids.shape[-1], dtype=jnp.int32) + shift
    side = lambda x: as_position(jnp.asarray(min(x, LIMIT) if isinstance(x, int) else x))[..., None]
    if left is not None:
        first = jnp.maximum(first, stands_at - side(left))
    if right is not None:
        last = jnp.minimum(last, stands_at + side(right))
    real = ids < queries.shape[-1] - 1
    return Between(jnp.where(real, first, LIMIT), jnp.where(real, last, -1))


def _documents(cu_seqlens: jax.Array, length: int, padding: int) -> jax.Array:
    """Number the document of each position from 0; after the last one comes padding, ``padding`` higher."""
    ends, positions = as_position(cu_seqlens)[..., 1:], jnp.arange(length, dtype=jnp.int32)
    find = lambda x: jnp.searchsorted(x, positions, side="right", method="scan_unrolled")
    ids = jnp.vectorize(find, signature="(d)->(t)")(ends).astype(jnp.int32)
    return jnp.where(ids < ends.shape[-1], ids, ids + padding)


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


def _clipped(count: int) -> np.int32:
    """Return a number of positions or blocks as a kernel takes it."""
    return np.int32(min(count, LIMIT))


def _within(distance: Any, left: Any, right: Any) -> Any:
    """Say whether keys at a distance from a query lie in its window."""
    visible = jnp.ones_like(distance, dtype=bool)
    if left is not None:
        visible = distance >= -left
    if right is not None:
        visible = visible & (distance <= right)
    return visible


def _tile_within(distance: Range, left: Any, right: Any) -> tuple[Any, Any]:
    """Say whether no distance of a range lies in the window, and whether each does."""
    nearest, farthest = distance
    empty, full = jnp.zeros_like(nearest, dtype=bool), jnp.ones_like(nearest, dtype=bool)
    if left is not None:
        left = _as_range(left)
        empty, full = empty | (farthest < -left.hi), full & (nearest >= -left.lo)
    if right is not None:
        right = _as_range(right)
        empty, full = empty | (nearest > right.hi), full & (farthest <= right.lo)
    return empty, full


def _tile_multiples(x: Range, stride: np.int32) -> tuple[Any, Any]:
    """Say whether a range holds no multiple of the stride, and whether it is but one multiple."""
    # The same range of absolute values: of these, division rounds down.
    low, high = jnp.maximum(jnp.maximum(x.lo, -x.hi), 0), jnp.maximum(x.hi, -x.lo)
    some = lax.div(high, stride) * stride >= low
    return ~some, some & (low == high)


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

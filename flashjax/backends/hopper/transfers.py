"""Tiles of q, k, v and out between global and shared memory, by the tensor memory accelerator (TMA).

wgmma reads a tile in shared memory as pieces of 8 rows by one swizzled row. Where the length is a multiple
of 8 and the head dim fills its pieces, one copy moves the whole tile, through a view of the array that is
cut in the same way. Otherwise there is no such view, and each piece is a copy of its own, through the plain
array, beyond whose bounds the TMA fills with zeros and stores nothing. The buffer then has two names, one
for each way to look at the same bytes.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from flashjax.backends.hopper.config import padded
from flashjax.problem import Problem

PIECE = 8  # rows


class Shape(NamedTuple):
    """The tiles of one array.

    Attributes:
      count: how many.
      rows, columns: of one, columns padded.
      split: whether they move in pieces.
      pitch: rows from the start of one tile to that of the next.
    """

    count: int
    rows: int
    columns: int
    split: bool
    pitch: int

    def pieces(self, rows: int) -> tuple[int, int, int, int]:
        """Cut so many rows: rows and columns of pieces, and rows and columns of one."""
        width = _width(self.columns)
        if self.columns == width:
            return 1, 1, rows, width
        return rows // PIECE, self.columns // width, PIECE, width

    @property
    def copies(self) -> int:
        """How many copies fill one tile: the arrivals that its barrier waits for."""
        down, across, _, _ = self.pieces(self.rows)
        return down * across if self.split else 1


def shape(count: int, rows: int, length: int, dim: int, columns: int | None = None) -> Shape:
    """Describe ``count`` buffers for tiles of ``rows`` rows of an array ``[B, length, heads, dim]``.

    Args:
      count, rows, length, dim: see above.
      columns: of a tile in shared memory, at least ``padded(dim)``, which it is by default.
    """
    columns = columns or padded(dim)
    return Shape(count, rows, columns, length % PIECE != 0 or columns != dim, rows)


def in_pieces(problem: Problem) -> bool:
    """Whether any tile of a call moves in pieces."""
    lengths, dims = (problem.query_length, problem.key_length), (problem.head_dim, problem.value_dim)
    return any(shape(1, PIECE, length, dim).split for length in lengths for dim in dims)


def shared(a: Shape, b: Shape) -> tuple[Shape, Shape] | None:
    """Lay two kinds of tiles so that the n-th of each has the same bytes; None where rows do not fit."""
    widest = max(a.columns, b.columns)
    pitches = [x.rows * widest / x.columns for x in (a, b)]
    if any(pitch % PIECE for pitch in pitches):
        return None
    return tuple(x._replace(pitch=int(pitch)) for x, pitch in zip((a, b), pitches, strict=True))


def buffer(dtype: Any, *shapes: Shape) -> Any:
    """Return the scratch type of a buffer that holds tiles of each shape in turn."""
    views = [view for shape in shapes for view in _views(shape, dtype)]
    return views[0] if len(views) == 1 else plgpu.RefUnion(*views)


def _views(shape: Shape, dtype: Any) -> list[Any]:
    tiled = swizzled(shape.columns)
    views = [plgpu.SMEM((shape.count, shape.pitch, shape.columns), dtype, transforms=tiled)]
    if shape.split:
        views.append(plgpu.SMEM((shape.count, *shape.pieces(shape.pitch)), dtype, transforms=tiled[1:]))
    return views


def swizzled(columns: int) -> tuple[Any, Any]:
    """Return the transforms of a buffer that wgmma reads, for so many columns of 16 bits."""
    width = _width(columns)
    return plgpu.TilingTransform((PIECE, width)), plgpu.SwizzleTransform(2 * width)


class Buffer(NamedTuple):
    """A buffer in the kernel: as wgmma reads it, and in pieces where the TMA moves it so."""

    shape: Shape
    ref: Any
    parts: Any

    def tile(self, index: Any) -> Any:
        """Return one tile, as wgmma reads it."""
        tile = self.ref.at[index]
        return tile if self.shape.pitch == self.shape.rows else tile.at[pl.ds(0, self.shape.rows)]


def names(ref: Any, *shapes: Shape) -> list[Buffer]:
    """Return a buffer as tiles of each of the shapes that it was made for."""
    if len(shapes) == 1 and not shapes[0].split:
        return [Buffer(shapes[0], ref, None)]
    views = iter(ref)
    return [Buffer(shape, next(views), next(views) if shape.split else None) for shape in shapes]


def fetch(array: Any, b: Any, row: Any, head: Any, buffer: Buffer, index: Any, barrier: Any) -> None:
    """Load rows ``row..`` of ``array[b, :, head]`` into tile ``index`` of a buffer."""
    if buffer.parts is None:
        rows = pl.ds(row, buffer.shape.rows)
        plgpu.copy_gmem_to_smem(array.at[b, rows, head], buffer.tile(index), barrier)
    else:
        copy = lambda window, piece: plgpu.copy_gmem_to_smem(window, piece, barrier)
        _each_piece(array, (b, row, head), buffer, index, copy)


def store(buffer: Buffer, index: Any, array: Any, b: Any, row: Any, head: Any) -> None:
    """Store tile ``index`` of a buffer to rows ``row..`` of ``array[b, :, head]``."""
    if buffer.parts is None:
        rows = pl.ds(row, buffer.shape.rows)
        plgpu.copy_smem_to_gmem(buffer.tile(index), array.at[b, rows, head])
    else:
        copy = lambda window, piece: plgpu.copy_smem_to_gmem(piece, window)
        _each_piece(array, (b, row, head), buffer, index, copy)


def _each_piece(array: Any, place: tuple[Any, Any, Any], buffer: Buffer, index: Any, copy: Any) -> None:
    """Call ``copy(window of the array, piece of the buffer)`` for each piece of a tile."""
    b, row, head = place
    row = lax.optimization_barrier(row)  # a loop around would otherwise keep addresses in registers
    down, across, height, width = buffer.shape.pieces(buffer.shape.rows)
    short = across == 1 and down == 1 and buffer.shape.pitch != buffer.shape.rows

    def strip(i, _):
        for c in range(across):
            # The sum with i makes the start dynamic: a constant slice may not reach beyond the array.
            columns = pl.ds(c * width + lax.min(i, 0), width)
            piece = buffer.parts.at[index, i, c]
            if short:
                piece = piece.at[pl.ds(0, height)]
            copy(array.at[b, pl.ds(row + i * height, height), head, columns], piece)

    lax.fori_loop(0, down, strip, None)


def _width(columns: int) -> int:
    return min(columns, 64)

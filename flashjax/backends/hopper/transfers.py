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

PIECE = 8  # rows


class Shape(NamedTuple):
    """The tiles of one array: how many, their rows and padded columns, and whether they move in pieces."""

    count: int
    rows: int
    columns: int
    split: bool

    @property
    def pieces(self) -> tuple[int, int, int, int]:
        """Rows and columns of pieces, and rows and columns of one; wide tiles have several columns."""
        width = _width(self.columns)
        if self.columns == width:
            return 1, 1, self.rows, width
        return self.rows // PIECE, self.columns // width, PIECE, width

    @property
    def copies(self) -> int:
        """How many copies fill one tile: the arrivals that its barrier waits for."""
        return self.pieces[0] * self.pieces[1] if self.split else 1


def shape(count: int, rows: int, length: int, dim: int) -> Shape:
    """Describe ``count`` buffers for tiles of ``rows`` rows of an array ``[B, length, heads, dim]``."""
    return Shape(count, rows, padded(dim), length % PIECE != 0 or padded(dim) != dim)


def buffer(shape: Shape, dtype: Any) -> Any:
    """Return the scratch type of a buffer."""
    width = _width(shape.columns)
    swizzle = plgpu.SwizzleTransform(2 * width)
    tiled = (plgpu.TilingTransform((PIECE, width)), swizzle)
    whole = plgpu.SMEM((shape.count, shape.rows, shape.columns), dtype, transforms=tiled)
    if not shape.split:
        return whole
    return plgpu.RefUnion(whole, plgpu.SMEM((shape.count, *shape.pieces), dtype, transforms=(swizzle,)))


class Buffer(NamedTuple):
    """A buffer in the kernel: as wgmma reads it, and in pieces where the TMA moves it so."""

    whole: Any
    parts: Any

    @classmethod
    def of(cls, ref: Any, split: bool) -> "Buffer":
        return cls(*ref) if split else cls(ref, None)


def fetch(array: Any, b: Any, row: Any, head: Any, buffer: Buffer, index: Any, barrier: Any) -> None:
    """Load rows ``row..`` of ``array[b, :, head]`` into buffer ``index``."""
    rows = buffer.whole.shape[1]
    if buffer.parts is None:
        plgpu.copy_gmem_to_smem(array.at[b, pl.ds(row, rows), head], buffer.whole.at[index], barrier)
    else:
        _each_piece(
            array, b, row, head, buffer.parts.at[index], lambda a, s: plgpu.copy_gmem_to_smem(a, s, barrier)
        )


def store(buffer: Buffer, index: Any, array: Any, b: Any, row: Any, head: Any) -> None:
    """Store buffer ``index`` to rows ``row..`` of ``array[b, :, head]``."""
    rows = buffer.whole.shape[1]
    if buffer.parts is None:
        plgpu.copy_smem_to_gmem(buffer.whole.at[index], array.at[b, pl.ds(row, rows), head])
    else:
        _each_piece(array, b, row, head, buffer.parts.at[index], lambda a, s: plgpu.copy_smem_to_gmem(s, a))


def _each_piece(array: Any, b: Any, row: Any, head: Any, parts: Any, copy: Any) -> None:
    down, across, height, width = parts.shape

    def strip(i, _):
        for c in range(across):
            # The sum with i makes the start dynamic: a constant slice may not reach beyond the array.
            columns = pl.ds(c * width + lax.min(i, 0), width)
            copy(array.at[b, pl.ds(row + i * height, height), head, columns], parts.at[i, c])

    lax.fori_loop(0, down, strip, None)


def _width(columns: int) -> int:
    return min(columns, 64)

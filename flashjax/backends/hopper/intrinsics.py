"""What the kernels need of the GPU and Pallas does not have, as inline Mosaic GPU code."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from flashjax.backends.hopper.config import WARPGROUP

ROWS = plgpu.Layout.WGMMA.reduce(1)
DYNAMIC = -(2**31)  # what MLIR puts in the place of an index that is a value
FIRST_BARRIER = 8  # of the 16 named ones of a block; Mosaic GPU has 0 and one for each warpgroup


def any_in_warp(rows: jax.Array | None = None, negative: jax.Array | None = None) -> jax.Array:
    """Say whether a warp holds a row other than 0, or anything negative; warps may differ in it.

    Args:
      rows: float32 ``[64]``, a number for each row of a warpgroup.
      negative: float32 ``[64, columns]`` in the layout of an accumulator.
    """
    tests = []
    if rows is not None:
        tests.append((rows, ROWS, arith.CmpFPredicate.UNE))
    if negative is not None:
        tests.append((negative, plgpu.Layout.WGMMA, arith.CmpFPredicate.OLT))
    arrays, layouts, predicates = zip(*tests, strict=True)

    def vote(_, *arrays):
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        found = arith.constant(ir.IntegerType.get_signless(1), 0)
        for array, predicate in zip(arrays, predicates, strict=True):
            for register in array.registers.flat:
                for i in range(ir.VectorType(register.type).shape[0]):
                    value = vector.extract(register, [], [i])
                    found = arith.ori(found, arith.cmpf(predicate, value, zero))
        found = nvvm.vote_sync(_int32(-1), found, nvvm.VoteSyncKind.any)
        return _uniform(arith.extui(_int32_type(), found))

    return _inline(vote, layouts, number=True)(*arrays) != 0


def counter() -> Any:
    """Return a number in global memory that all blocks of a kernel share; it starts at 0."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def take(counter: Any, mailbox: Any) -> jax.Array:
    """Return the counter and add 1 to it, once for a warpgroup.

    Args:
      counter: of `counter`.
      mailbox: int32 ``[1]`` in shared memory, through which the thread that asks tells the others.
    """

    def fetch_add(_, counter, mailbox):
        first = arith.constant(ir.IndexType.get(), 0)
        mosaic.warpgroup_barrier()  # all have read what the last call left there
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            number = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mosaic.utils.memref_ptr(counter),
                _int32(1),
                llvm.AtomicOrdering.monotonic,
                syncscope="device",
            )
            memref.store(number, mailbox, [first])
        mosaic.warpgroup_barrier()
        return _uniform(memref.load(mailbox, [first]))

    return _inline(fetch_add, (plgpu.RefType(), plgpu.RefType()), number=True)(counter, mailbox)


def gather_warps() -> None:
    """Wait until all warps of the warpgroup are here.

    A barrier of Pallas's is arrived at by one thread, whatever the others have yet to read.
    """

    def gather(_):
        mosaic.warpgroup_barrier()

    _inline(gather, ())()


def await_turn(warpgroup: jax.Array) -> None:
    """Wait until somebody has given the turn to this warpgroup."""

    def wait(_, warpgroup):
        nvvm.barrier(**_turn_of(warpgroup))

    _inline(wait, (plgpu.Layout.WG_SPLAT,))(warpgroup)


def give_turn(warpgroup: jax.Array) -> None:
    """Give the turn to a warpgroup."""

    def arrive(_, warpgroup):
        nvvm.barrier_arrive(**_turn_of(warpgroup))

    _inline(arrive, (plgpu.Layout.WG_SPLAT,))(warpgroup)


def positions(count: int, axis: int) -> jax.Array:
    """Return ``arange(count)`` along the rows (axis 0, of which there are 64) or columns (axis 1) of a tile.

    It is found anew wherever it is asked for, from the number of the thread. An iota would be found once,
    ahead of a loop, and kept: a register for each two numbers.

    Returns:
      int32 ``[count]`` in the layout of an accumulator's rows or columns.
    """

    def place(_):
        layout = mosaic.WGMMA_ROW_LAYOUT if axis == 0 else mosaic.WGMMA_COL_LAYOUT
        first = _own_place()[axis]
        numbers = [[0], [8]] if axis == 0 else [[i, i + 1] for i in range(0, count, 8)]
        registers = np.empty(layout.registers_shape((count,)), dtype=object)
        kind = ir.VectorType.get((len(numbers[0]),), _int32_type())
        for n, parts in enumerate(numbers):
            values = [arith.addi(first, _int32(x)) for x in parts]
            registers.flat[n] = vector.from_elements(kind, values)
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    result = plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=layout)
    return plgpu.inline_mgpu(return_type=result)(place)()


def add_tile(ref: Any, tile: jax.Array) -> None:
    """Add a tile to numbers in global memory, where others may be adding too, and do not wait for it.

    The numbers lie in the order of the threads that hold them, four of each at a time, so that a warp writes
    whole lines; `load_tile` knows the order.

    Args:
      ref: float32 ``[64 * columns]`` in global memory.
      tile: float32 ``[64, columns]`` in the layout of an accumulator.
    """

    def add(_, ref, tile):
        for pointer, pair in _quarters(ref, tile.registers.flat):
            numbers = [vector.extract(x, [], [i]) for x in pair for i in range(2)]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [pointer, *numbers],
                "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
                "l,f,f,f,f",
                has_side_effects=True,
            )

    _inline(add, (plgpu.RefType(), plgpu.Layout.WGMMA))(ref, tile)


def stage_tile(buffer: Any, tile: jax.Array) -> None:
    """Put a tile into shared memory in the order of `add_tile`, for `add_staged`.

    Args:
      buffer: float32 ``[64 * columns]`` in shared memory.
      tile: float32 ``[64, columns]`` in the layout of an accumulator.
    """

    def stage(_, buffer, tile):
        four = ir.VectorType.get((4,), ir.F32Type.get())
        for pointer, pair in _quarters(buffer, tile.registers.flat):
            numbers = [vector.extract(x, [], [i]) for x in pair for i in range(2)]
            llvm.store(vector.from_elements(four, numbers), pointer)

    _inline(stage, (plgpu.RefType(), plgpu.Layout.WGMMA))(buffer, tile)


def add_staged(ref: Any, buffer: Any) -> None:
    """Let the TMA add what `stage_tile` has put into shared memory, where others may be adding too.

    `plgpu.commit_smem` must come between the two. It is one of the copies that `plgpu.wait_smem_to_gmem`
    waits for.

    Args:
      ref, buffer: float32 ``[size]`` in global and in shared memory.
    """

    def add_staged(_, ref, buffer):
        size = 4 * ir.MemRefType(buffer.type).shape[0]
        to, source = mosaic.utils.memref_ptr(ref), mosaic.utils.memref_ptr(buffer)
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [to, source],
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};",
                "l,r",
                has_side_effects=True,
            )
            nvvm.cp_async_bulk_commit_group()

    _inline(add_staged, (plgpu.RefType(), plgpu.RefType()))(ref, buffer)


def zero_tile(ref: Any, size: int) -> None:
    """Zero what `add_tile` adds to: float32 ``[size]`` in global memory."""

    def zero(_, ref):
        vector_type = ir.VectorType.get((4,), ir.F32Type.get())
        zeros = arith.constant(vector_type, ir.DenseElementsAttr.get_splat(vector_type, _float32(0)))
        for pointer, _ in _quarters(ref, [None] * (2 * size // (4 * WARPGROUP))):
            llvm.store(zeros, pointer)

    _inline(zero, (plgpu.RefType(),))(ref)


def load_tile(ref: Any, columns: int) -> jax.Array:
    """Load what `add_tile` has added up: float32 ``[64, columns]`` in the layout of an accumulator."""

    def load(_, ref):
        f32 = ir.F32Type.get()
        four, two = (ir.VectorType.get((n,), f32) for n in (4, 2))
        layout = mosaic.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((64, columns)), dtype=object)
        for n, (pointer, _) in enumerate(_quarters(ref, [None] * registers.size)):
            x = llvm.load(four, pointer)
            for i in range(2):
                registers.flat[2 * n + i] = vector.extract_strided_slice(two, x, [2 * i], [2], [1])
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(load)(ref)


def drop(x: jax.Array, words: tuple[jax.Array, ...], threshold: int, turned: bool) -> jax.Array:
    """Zero what dropout drops of a tile.

    Args:
      x: float32 ``[64, columns]`` in the layout of an accumulator.
      words: those of `dropout.join`, for each key, and for each query two; uint32 in the layouts of rows and
        of columns. Tiles begin at multiples of 16.
      threshold: `dropout.threshold` of the rate; less than 0x7F80, infinity as a bfloat16.
      turned: whether rows are keys and columns queries.
    """

    def drop(_, x, column, row_a, row_b, least):
        return _accumulator(_dropped(x, column, row_a, row_b, least, turned), x.shape[1])

    drop.__name__ = "drop_turned" if turned else "drop"
    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA)
    types = (plgpu.Layout.WGMMA, *_word_layouts(turned), plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(drop)(x, *words, _least(threshold))


def _least(threshold: int) -> jax.Array:
    """Return the threshold in both halves of a word."""
    return jnp.int32(threshold << 16 | threshold)


def _word_layouts(turned: bool) -> tuple[Any, Any, Any]:
    rows, columns = ROWS, plgpu.Layout.WGMMA.reduce(0)
    return (rows, columns, columns) if turned else (columns, rows, rows)


def _dropped(x: Any, column: Any, row_a: Any, row_b: Any, least: Any, turned: bool) -> list[Any]:
    """Return the registers of ``x`` with zeros for what dropout drops.

    The joining round of `dropout`, and its decision for both keys that share a word: a thread holds both,
    eight columns apart, or eight rows. The halves of a word are compared as bfloat16.
    """
    least, f32 = least.registers.item(), ir.F32Type.get()
    number = lambda x, n, i: vector.extract(x.registers.flat[n], [], [i])
    along = lambda x, n, i: number(x, n, i)  # a number for each column: of group n, the i-th of two
    down = lambda x, n: number(x, n, 0)  # a number for each of the two rows
    registers = list(x.registers.flat)
    groups = len(registers) // 2
    values = {(n, i): vector.extract(pair, [], [i]) for n, pair in enumerate(registers) for i in (0, 1)}

    def join(column, a, b):
        x = arith.muli(column, a)
        return arith.muli(arith.xori(x, arith.shrui(x, _int32(15))), b)

    def decide(word, low, high):
        """Zero two numbers where the word says so."""
        result = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(f32, f32)>"),
            [values[low], values[high], word, least],
            "{ .reg .pred p, q; .reg .b32 x; abs.bf16x2 x, $4; setp.lt.bf16x2 p|q, x, $5; "
            "selp.f32 $0, 0f00000000, $2, p; selp.f32 $1, 0f00000000, $3, q; }",
            "=f,=f,f,f,r,r",
        )
        values[low], values[high] = (llvm.extractvalue(f32, result, [n]) for n in (0, 1))

    for i in (0, 1):
        if turned:
            for n in range(groups):
                word = join(down(column, 0), along(row_a, n, i), along(row_b, n, i))
                decide(word, (2 * n, i), (2 * n + 1, i))
        else:
            for n in range(0, groups, 2):
                for row in (0, 1):
                    word = join(along(column, n, i), down(row_a, row), down(row_b, row))
                    decide(word, (2 * n + row, i), (2 * (n + 1) + row, i))
    return [
        vector.from_elements(pair.type, [values[n, i] for i in (0, 1)]) for n, pair in enumerate(registers)
    ]


def load_numbers(ref: Any, row: jax.Array, column: jax.Array, count: int, turned: bool) -> jax.Array:
    """Load a tile of an array of numbers, of 32 bits or fewer each, that need not be aligned in any way.

    What lies beyond the end of the array are repetitions of its last row or column.

    Args:
      ref: ``[rows, columns]`` in global memory, or ``[columns, rows]`` if turned.
      row, column: where the tile begins, int32.
      count: columns of the tile; column is a multiple of it.
      turned: whether the array lies the other way round.

    Returns:
      float32 ``[64, count]`` in the layout of an accumulator.
    """

    def load(_, ref, row, column):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        kind = ir.MemRefType(ref.type)
        sizes, (strides, _) = list(kind.shape), kind.get_strides_and_offset()
        if turned:
            sizes, strides = sizes[::-1], strides[::-1]
        base = mosaic.utils.memref_ptr(ref)
        place = zip(_own_place(), (row, column), strict=True)
        own_row, own_column = (arith.addi(x, at.registers.item()) for x, at in place)
        paired = strides[1] == 1 and sizes[1] % 2 == 0 and strides[0] % 2 == 0
        pair_of = ir.VectorType.get((2,), kind.element_type)

        def pointer(*terms):
            """Return where ``(index, most, stride)`` lead to."""
            offset = None
            for index, most, stride in terms:
                if most is not None:
                    index = arith.minsi(index, _int32(most))
                term = arith.muli(arith.extsi(i64, index), arith.constant(i64, stride))
                offset = term if offset is None else arith.addi(offset, term)
            return llvm.getelementptr(base.type, base, [offset], [DYNAMIC], kind.element_type, None)

        rows = [(arith.addi(own_row, _int32(8 * down)), sizes[0] - 1, strides[0]) for down in (0, 1)]
        clip = lambda most: None if sizes[1] % count == 0 else most
        pairs = []
        for first in range(0, count, 8):
            columns = [arith.addi(own_column, _int32(first + i)) for i in (0, 1)]
            for at in rows:
                if paired:
                    x = llvm.load(pair_of, pointer(at, (columns[0], clip(sizes[1] - 2), 1)))
                else:
                    x = vector.from_elements(
                        pair_of,
                        [
                            llvm.load(kind.element_type, pointer(at, (c, clip(sizes[1] - 1), strides[1])))
                            for c in columns
                        ],
                    )
                pairs.append(x if kind.element_type == f32 else arith.extf(ir.VectorType.get((2,), f32), x))
        return _accumulator(pairs, count)

    load.__name__ = "numbers_turned" if turned else "numbers"
    return _tile_of(load, count)(ref, row, column)


def widen(x: jax.Array) -> jax.Array:
    """Return a tile in the layout of an accumulator as float32.

    A pair of bfloat16 takes two instructions; the compiler makes three of its own conversion.
    """

    def widen(_, x):
        f32, i32 = ir.F32Type.get(), _int32_type()
        pair_of, word = ir.VectorType.get((2,), f32), ir.VectorType.get((1,), i32)
        pairs = []
        for pair in x.registers.flat:
            bits = vector.extract(vector.bitcast(word, pair), [], [0])
            halves = arith.shli(bits, _int32(16)), arith.andi(bits, _int32(-(2**16)))
            pairs.append(vector.from_elements(pair_of, [arith.bitcast(f32, half) for half in halves]))
        return _accumulator(pairs, x.shape[1])

    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)(widen)(x)


def touch_numbers(ref: Any, row: jax.Array, column: jax.Array, rows: int, columns: int) -> None:
    """Bring part of an array of numbers into the L1 cache, and do not wait for it: others load it soon.

    Args:
      ref: ``[rows, columns]`` in global memory.
      row, column: where the part begins, int32; it may reach beyond the end.
      rows, columns: its size.
    """

    def touch(_, ref, row, column):
        i64 = ir.IntegerType.get_signless(64)
        kind = ir.MemRefType(ref.type)
        (height, width), ((pitch, _), _) = kind.shape, kind.get_strides_and_offset()
        per_line = 128 * 8 // kind.element_type.width
        across = -(-columns // per_line)
        base = mosaic.utils.memref_ptr(ref)
        thread = arith.remui(mosaic.utils.thread_idx(), _int32(WARPGROUP))
        for first in range(0, rows * across, WARPGROUP):
            line = arith.addi(thread, _int32(first))
            at = arith.addi(row.registers.item(), arith.divui(line, _int32(across)))
            to = arith.muli(arith.remui(line, _int32(across)), _int32(per_line))
            to = arith.addi(column.registers.item(), to)
            at, to = (arith.minsi(x, _int32(most - 1)) for x, most in ((at, height), (to, width)))
            offset = arith.muli(arith.extsi(i64, at), arith.constant(i64, pitch))
            offset = arith.addi(offset, arith.extsi(i64, to))
            pointer = llvm.getelementptr(base.type, base, [offset], [DYNAMIC], kind.element_type, None)
            read = "{ .reg .b16 x; ld.global.b16 x, [$0]; }"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer], read, "l", has_side_effects=True)

    splat = plgpu.Layout.WG_SPLAT
    _inline(touch, (plgpu.RefType(), splat, splat))(ref, row, column)


def load_diagonals(
    ref: Any, row: jax.Array, column: jax.Array, count: int, queries: int, turned: bool
) -> jax.Array:
    """Load numbers by relative position to the places of a tile of scores.

    Args:
      ref: ``[queries + keys - 1]`` in global memory, of 32 bits or fewer each.
      row, column: where the tile begins, int32.
      count: its columns.
      queries: T; that of query i and key j is at ``j - i + T - 1``.
      turned: whether the rows are keys and the columns queries.

    Returns:
      float32 ``[64, count]`` in the layout of an accumulator; anything beyond the lengths.
    """

    def load(_, ref, row, column, last):
        f32 = ir.F32Type.get()
        kind = ir.MemRefType(ref.type)
        base = mosaic.utils.memref_ptr(ref)
        place = zip(_own_place(), (row, column), strict=True)
        own_row, own_column = (arith.addi(x, at.registers.item()) for x, at in place)
        q, k = (own_column, own_row) if turned else (own_row, own_column)
        start = arith.addi(arith.subi(k, q), last.registers.item())
        # Eight rows down and eight columns on is the same diagonal.
        values = {}
        for step in range(-1, count // 8):
            for i in (0, 1):
                distance = 8 * step + i
                index = arith.addi(start, _int32(-distance if turned else distance))
                index = arith.minsi(arith.maxsi(index, _int32(0)), _int32(kind.shape[0] - 1))
                pointer = llvm.getelementptr(base.type, base, [index], [DYNAMIC], kind.element_type, None)
                x = llvm.load(kind.element_type, pointer)
                values[step, i] = x if kind.element_type == f32 else arith.extf(f32, x)
        pair_of = ir.VectorType.get((2,), f32)
        pairs = [
            vector.from_elements(pair_of, [values[n - down, i] for i in (0, 1)])
            for n in range(count // 8)
            for down in (0, 1)
        ]
        return _accumulator(pairs, count)

    load.__name__ = "diagonals_turned" if turned else "diagonals"
    return _tile_of(load, count, 3)(ref, row, column, jnp.int32(queries - 1))


def store_numbers(ref: Any, tile: jax.Array, row: jax.Array, column: jax.Array, turned: bool = False) -> None:
    """Store a tile of numbers, rounded to the dtype of the array, and nothing beyond its end.

    Args:
      ref: ``[rows, columns]`` in global memory, of 32 bits or fewer each, or ``[columns, rows]`` if turned.
      tile: float32 ``[64, count]`` in the layout of an accumulator.
      row, column: where it goes, int32.
      turned: whether the array lies the other way round.
    """

    def put(_, ref, tile, row, column):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        kind = ir.MemRefType(ref.type)
        sizes, (strides, _) = list(kind.shape), kind.get_strides_and_offset()
        if turned:
            sizes, strides = sizes[::-1], strides[::-1]
        base = mosaic.utils.memref_ptr(ref)
        place = zip(_own_place(), (row, column), strict=True)
        own_row, own_column = (arith.addi(x, at.registers.item()) for x, at in place)
        # Two at once where these lie in the array or beyond it together.
        wide = 2 if strides[1] == 1 and sizes[1] % 2 == 0 and strides[0] % 2 == 0 else 1
        size = wide * kind.element_type.width
        number, letter = ir.IntegerType.get_signless(size), "h" if size == 16 else "l" if size == 64 else "r"
        rows = []
        for down in (0, 1):
            at = arith.addi(own_row, _int32(8 * down))
            start = arith.muli(arith.extsi(i64, at), arith.constant(i64, strides[0]))
            rows.append(
                (at, llvm.getelementptr(base.type, base, [start], [DYNAMIC], kind.element_type, None))
            )
        for n, pair in enumerate(tile.registers.flat):
            at, start = rows[n % 2]
            for i in range(0, 2, wide):
                x = vector.extract_strided_slice(ir.VectorType.get((wide,), f32), pair, [i], [wide], [1])
                if kind.element_type != f32:
                    x = arith.truncf(ir.VectorType.get((wide,), kind.element_type), x)
                x = vector.extract(vector.bitcast(ir.VectorType.get((1,), number), x), [], [0])
                column = arith.addi(own_column, _int32(8 * (n // 2) + i))
                along = arith.muli(arith.extsi(i64, column), arith.constant(i64, strides[1]))
                to = llvm.getelementptr(base.type, start, [along], [DYNAMIC], kind.element_type, None)
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [to, at, column, x],
                    f"{{ .reg .pred p; setp.lt.s32 p, $1, {sizes[0]}; setp.lt.and.s32 p, $2, {sizes[1]}, p; "
                    f"@p st.global.b{size} [$0], $3; }}",
                    f"l,r,r,{letter}",
                    has_side_effects=True,
                )

    put.__name__ = "put_numbers_turned" if turned else "put_numbers"
    splat = plgpu.Layout.WG_SPLAT
    _inline(put, (plgpu.RefType(), plgpu.Layout.WGMMA, splat, splat))(ref, tile, row, column)


def sum_diagonals(ref: Any) -> jax.Array:
    """Sum a square tile in shared memory along its diagonals.

    Args:
      ref: float32 ``[64, 64]``.

    Returns:
      float32 ``[128]``: the n-th is the sum of what lies ``n - 63`` columns right of the main diagonal.
    """

    def diagonal_sums(_, ref):
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        thread = arith.remui(mosaic.utils.thread_idx(), _int32(WARPGROUP))
        zero = arith.constant(f32, _float32(0))
        total = zero
        for row in range(64):
            column = arith.addi(thread, _int32(row - 63))
            inside = arith.cmpi(arith.CmpIPredicate.ult, column, _int32(64))
            safe = arith.index_cast(index, arith.select(inside, column, _int32(0)))
            x = memref.load(ref, [arith.constant(index, row), safe])
            total = arith.addf(total, arith.select(inside, x, zero))
        layout = mosaic.WGStridedFragLayout((WARPGROUP,), 1)
        registers = np.empty((1,), dtype=object)
        registers[0] = vector.from_elements(ir.VectorType.get((1,), f32), [total])
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    layout = plgpu.Layout.WG_STRIDED((WARPGROUP,), 1)
    result = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(diagonal_sums)(ref)


def _tile_of(function: Callable, count: int, numbers: int = 2) -> Callable:
    """Return a call of ``function(context, ref, *numbers)``, which loads ``[64, count]``."""
    result = plgpu.ShapeDtypeStruct((64, count), jnp.float32, layout=plgpu.Layout.WGMMA)
    types = (plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * numbers)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(function)


def _accumulator(pairs: list[Any], columns: int, signed: bool | None = None) -> Any:
    """Make a tile of registers in the order of columns, then of the two rows of a thread."""
    layout = mosaic.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((64, columns)), dtype=object)
    registers.flat[:] = pairs
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _quarters(ref: Any, registers: Any) -> Any:
    """Pair off registers of two numbers each, with the address of the four in memory."""
    i32, f32 = _int32_type(), ir.F32Type.get()
    registers = list(registers)
    base = mosaic.utils.memref_ptr(ref)
    thread = arith.remui(mosaic.utils.thread_idx(), _int32(WARPGROUP))
    first = arith.muli(thread, arith.constant(i32, 4))
    base = llvm.getelementptr(base.type, base, [first], [DYNAMIC], f32, None)
    for n in range(len(registers) // 2):
        pointer = llvm.getelementptr(base.type, base, [], [n * 4 * WARPGROUP], f32, None)
        yield pointer, registers[2 * n : 2 * n + 2]


def store_tile(ref: Any, tile: jax.Array, row: jax.Array, column: jax.Array) -> None:
    """Store a tile, and nothing beyond the end of the array, without a detour through shared memory.

    For what is written once, and where addresses that are known ahead of a loop would take registers in it.
    The four threads that share a row exchange what they hold, so that each stores 16 bytes.

    Args:
      ref: bfloat16 or float16 ``[length, dim]`` in global memory.
      tile: ``[64, columns]`` in the layout of an accumulator and the dtype of ref.
      row, column: where it goes, int32; column is a multiple of 8.
    """

    def put(_, ref, tile, row, column):
        i32, i64, half = _int32_type(), ir.IntegerType.get_signless(64), tile.mlir_dtype
        kind = ir.MemRefType(ref.type)
        (length, dim), ((pitch, _), _) = kind.shape, kind.get_strides_and_offset()
        own_row, own_column = _own_place()
        lane = arith.divui(own_column, _int32(2))  # within the four
        word = ir.VectorType.get((1,), i32)
        words = [vector.extract(vector.bitcast(word, x), [], [0]) for x in tile.registers.flat]
        base = mosaic.utils.memref_ptr(ref)
        row = arith.addi(row.registers.item(), own_row)
        column = column.registers.item()
        for down in (0, 1):
            at = arith.addi(row, _int32(8 * down))
            offset = arith.muli(arith.extui(i64, at), arith.constant(i64, pitch))
            start = llvm.getelementptr(base.type, base, [offset], [DYNAMIC], half, None)
            own = words[down::2]
            wide = 4 if len(own) % 4 == 0 else 1
            for first in range(0, len(own), wide):
                place = arith.addi(column, _int32(8 * first))
                within = arith.muli(lane, _int32(8)) if wide == 4 else own_column
                place = arith.addi(place, within)
                pointer = llvm.getelementptr(base.type, start, [place], [DYNAMIC], half, None)
                parts = own[first : first + wide]
                parts = _transpose(lane, parts) if wide == 4 else parts
                store = "v4.b32 [$0], {$3, $4, $5, $6}" if wide == 4 else "b32 [$0], $3"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [pointer, at, place, *parts],
                    f"{{ .reg .pred p; setp.lt.s32 p, $1, {length}; setp.lt.and.s32 p, $2, {dim}, p; "
                    f"@p st.global.{store}; }}",
                    "l,r,r" + ",r" * wide,
                    has_side_effects=True,
                )

    splat = plgpu.Layout.WG_SPLAT
    _inline(put, (plgpu.RefType(), plgpu.Layout.WGMMA, splat, splat))(ref, tile, row, column)


def _transpose(lane: Any, words: list[Any]) -> list[Any]:
    """Turn the n-th of the words of four threads into the four words of the n-th thread."""
    for distance in (1, 2):
        bit = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _int32(distance)), _int32(0))
        words = list(words)
        for low in range(4):
            if low & distance:
                continue
            high = low | distance
            sent = arith.select(bit, words[low], words[high])
            got = mosaic.utils.shfl_bfly(sent, distance)
            words[low] = arith.select(bit, got, words[low])
            words[high] = arith.select(bit, words[high], got)
    return words


def _own_place() -> tuple[Any, Any]:
    """Return the first row and column of a tile that a thread holds, not to be known ahead of a loop."""
    read = "mov.u32 $0, %tid.x;"
    thread = llvm.inline_asm(_int32_type(), [], read, "=r", has_side_effects=True)
    lane = arith.remui(thread, _int32(32))
    warp = arith.divui(arith.remui(thread, _int32(WARPGROUP)), _int32(32))
    row = arith.addi(arith.muli(warp, _int32(16)), arith.divui(lane, _int32(4)))
    return row, arith.muli(arith.remui(lane, _int32(4)), _int32(2))


def _turn_of(warpgroup: Any) -> dict[str, Any]:
    """Return the named barrier at which one warpgroup waits and another arrives."""
    index = arith.addi(warpgroup.registers.item(), _int32(FIRST_BARRIER))
    return {"barrier_id": index, "number_of_threads": _int32(2 * WARPGROUP)}


def _inline(function: Callable, arguments: tuple, number: bool = False) -> Callable:
    """Return a call of ``function(context, *arguments)``, which emits code and may return a number."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT) if number else None
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)(function)


def _int32_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _int32(value: int) -> Any:
    return arith.constant(_int32_type(), value)


def _float32(value: float) -> Any:
    return ir.FloatAttr.get(ir.F32Type.get(), value)


def _uniform(x: Any) -> Any:
    return mosaic.FragmentedArray.splat(x, (), is_signed=True)

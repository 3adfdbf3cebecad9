"""What tiles are called: never wrong for any mask, and exact where skipping must pay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flashjax import (
    BlockSparse,
    Causal,
    CustomMask,
    Dense,
    Lengths,
    Operand,
    PrefixLM,
    Range,
    Segments,
    SlidingWindow,
    tiles,
)
from flashjax.masks import Sizes

# B, N, T, S and the tile sizes: length 1, primes, tiles that do not divide a length or exceed it.
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 1, 13, 8, 4),
    (2, 2, 13, 1, 4, 8),
    (2, 2, 13, 29, 8, 7),
    (1, 2, 17, 17, 5, 5),
    (2, 1, 31, 7, 4, 16),
    (2, 2, 24, 24, 8, 8),
    (1, 1, 11, 37, 64, 3),
]
COMPOSITIONS, DRAWS = 6, 6  # of each size, and of the arrays of each composition


def make_leaf(rng, values, batch, heads, t, s):
    """Draw one mask of any kind, with its numbers in the program or in arrays of one or all rows.

    Args:
      rng: draws what a program depends on: kinds, numbers in the program, shapes.
      values: draws the contents of arrays.
      batch, heads, t, s: B, N, T, S.
    """

    def number(low, high):
        if rng.random() < 0.5:
            return int(rng.integers(low, high))
        return values.integers(low, high, [(), (1,), (batch,)][rng.integers(3)]).astype(np.int32)

    def ids(n):
        x = values.integers(0, 4, (batch, n)).astype(np.int32)
        return np.sort(x, axis=1) if values.random() < 0.5 else x

    bools = lambda *shape: values.random(shape) < values.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    either = lambda *sizes: [int(rng.choice([1, n])) for n in sizes]
    align = "end" if rng.random() < 0.3 else "start"
    offset = 0 if align == "end" else number(-s, s + 1)
    kind = rng.integers(10)
    if kind == 0:
        return Causal(offset, align)
    if kind == 1:
        sides = [None if rng.random() < 0.2 else number(0, s + 1) for _ in range(2)]
        return SlidingWindow(*sides, offset=offset, align=align)
    if kind == 2:
        return Segments(ids(t), ids(s))
    if kind == 3:
        return PrefixLM(number(-1, s + 2))
    if kind == 4:
        return Lengths(*(None if rng.random() < 0.3 else number(-1, n + 2) for n in (t, s)))
    if kind == 5:
        return Dense(bools(*either(batch, heads, t, s)))
    if kind == 6:
        blocks = [int(n) for n in rng.integers(1, 10, 2)]
        return BlockSparse(bools(*either(batch, heads), -(-t // blocks[0]), -(-s // blocks[1])), blocks)
    if kind == 7:
        return CustomMask(parity, shift=Operand(values.integers(0, 2, batch).astype(np.int32), "b"))
    score = values.normal(size=(batch, s)).astype(np.float32)
    if kind == 8:
        return CustomMask(later, later_bounds, score=Operand(np.sort(score), "bk"))
    level = values.normal(size=(heads, t)).astype(np.float32)
    return CustomMask(above, above_bounds, score=Operand(score, "bk"), level=Operand(level, "hq"))


def parity(b, h, q, k, *, shift):
    return (q + k + shift) % 2 == 0


def later(b, h, q, k, *, score):
    return (score > 0) & (k >= q)


def later_bounds(b, h, q, k, *, score):
    return (score.hi <= 0) | (k.hi < q.lo), (score.lo > 0) & (k.lo >= q.hi)


def above(b, h, q, k, *, score, level):
    return score > level


def above_bounds(b, h, q, k, *, score, level):
    return score.hi <= level.lo, score.lo > level.hi


def compose(rng, values, depth, sizes):
    if depth == 0 or rng.random() < 0.2:
        return make_leaf(rng, values, *sizes)
    choice = rng.integers(5)
    if choice == 0:
        return ~compose(rng, values, depth - 1, sizes)
    left, right = (compose(rng, values, depth - 1, sizes) for _ in range(2))
    return left & right if choice < 3 else left | right


def classify_all(mask, blocks, batch, heads):
    """Return ``(seen, empty, full)``: the mask itself and what `tiles.dense` calls its tiles."""
    t, s = blocks.query_length, blocks.key_length
    seen = mask.dense(t, s, batch=batch, heads=heads)
    resolved = mask.resolve(Sizes(batch, heads, t, s))
    return seen, *tiles.dense(resolved, blocks, batch, heads)


def truth(seen, blocks):
    """Say of every tile whether all its positions are hidden and whether all are visible."""
    none = np.zeros((*seen.shape[:2], blocks.count_q, blocks.count_k), bool)
    every = none.copy()
    for i in range(blocks.count_q):
        rows = blocks.queries(np.int32(i))
        for j in range(blocks.count_k):
            columns = blocks.keys(np.int32(j))
            tile = seen[:, :, int(rows.lo) : int(rows.hi) + 1, int(columns.lo) : int(columns.hi) + 1]
            none[:, :, i, j], every[:, :, i, j] = ~tile.any((2, 3)), tile.all((2, 3))
    return none, every


@functools.partial(jax.jit, static_argnums=(1, 2, 3), compiler_options={"xla_backend_optimization_level": 0})
def classify_each(masks, blocks, batch, heads):
    return [classify_all(mask, blocks, batch, heads) for mask in masks]


def run(masks, blocks, batch, heads):
    """Classify the tiles of several masks of one size, with their arrays traced."""
    return jax.tree.map(np.asarray, classify_each(masks, blocks, batch, heads))


# ---- any mask --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_classify_is_right_for_random_compositions(sizes):
    batch, heads, t, s, block_q, block_k = sizes
    blocks = tiles.Blocks(t, s, block_q, block_k)
    named, possible = 0, 0
    for draw in range(DRAWS):
        rng, values = np.random.default_rng(sizes), np.random.default_rng([draw, *sizes])
        masks = [compose(rng, values, int(rng.integers(4)), sizes[:4]) for _ in range(COMPOSITIONS)]
        for mask, (seen, empty, full) in zip(masks, run(masks, blocks, batch, heads), strict=True):
            assert empty.shape == full.shape == (batch, heads, blocks.count_q, blocks.count_k)
            none, every = truth(seen, blocks)
            assert not (empty & ~none).any(), f"called empty but visible: {mask}"
            assert not (full & ~every).any(), f"called full but hidden: {mask}"
            named += (empty | full).sum()
            possible += (none | every).sum()
    # A classifier that never says anything would also be right.
    assert named > 0.5 * possible > 0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_cover_every_position(sizes):
    t, s, block_q, block_k = sizes[2:]
    blocks = tiles.Blocks(t, s, block_q, block_k)
    for count, span, length, block in (
        (blocks.count_q, blocks.queries, t, block_q),
        (blocks.count_k, blocks.keys, s, block_k),
    ):
        spans = [(int(r.lo), int(r.hi)) for r in map(span, np.arange(count, dtype=np.int32))]
        assert sorted({p for lo, hi in spans for p in range(lo, hi + 1)}) == list(range(length))
        # The tiles are of one size, the last ends with the axis, and none but it overlaps.
        assert {hi - lo + 1 for lo, hi in spans} == {min(block, length)}
        assert spans[-1][1] == length - 1
        assert [lo for lo, _ in spans[:-1]] == [i * block for i in range(count - 1)]


@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[3], SIZES[5]], ids=str)
def test_summarize_bounds_every_array_in_every_tile(sizes):
    batch, heads, t, s, block_q, block_k = sizes
    blocks = tiles.Blocks(t, s, block_q, block_k)
    rng = np.random.default_rng(0)
    entry = (3, 2)
    mask = CustomMask(
        above,
        score=Operand(rng.normal(size=(batch, s)).astype(np.float32), "bk"),
        level=Operand(rng.integers(-9, 9, (heads, t)).astype(np.int32), "hq"),
    )
    mask &= BlockSparse(rng.random((batch, 1, -(-t // entry[0]), -(-s // entry[1]))) < 0.5, entry)
    mask &= Dense(rng.random((heads, t, s)) < 0.5)
    resolved = mask.resolve(Sizes(batch, heads, t, s))
    summaries = jax.jit(lambda m: tiles.summarize(m, blocks))(resolved)
    for name, operand in resolved.operands().items():
        array = np.asarray(operand.array)
        steps = operand.block
        size = [blocks.count_q if array.shape[2] > 1 else 1, blocks.count_k if array.shape[3] > 1 else 1]
        assert summaries[name].lo.shape == summaries[name].hi.shape == (*array.shape[:2], *size)
        for i, j in np.ndindex(*size):
            part = array
            for axis, span, index in ((2, blocks.queries, i), (3, blocks.keys, j)):
                if array.shape[axis] > 1:
                    lo, hi = (int(x) for x in span(np.int32(index)))
                    part = np.take(part, np.unique(np.arange(lo, hi + 1) // steps[axis - 2]), axis)
            np.testing.assert_array_equal(summaries[name].lo[:, :, i, j], part.min((2, 3)))
            np.testing.assert_array_equal(summaries[name].hi[:, :, i, j], part.max((2, 3)))


def test_classify_takes_any_part_of_the_tiles():
    blocks = tiles.Blocks(13, 29, 4, 8)
    rng = np.random.default_rng(0)
    mask = (Causal(np.array([3, -5])) | Dense(rng.random((2, 2, 13, 29)) < 0.3)) & PrefixLM(9)
    mask = mask.resolve(Sizes(2, 2, 13, 29))
    empty, full = jax.jit(lambda m: tiles.dense(m, blocks, 2, 2))(mask)

    @jax.jit
    def row(b, h, i):
        cut = lambda x, axis, at: lax.dynamic_slice_in_dim(x, at, 1, axis) if x.shape[axis] > 1 else x
        own = jax.tree.map(lambda x: cut(cut(cut(x, 0, b), 1, h), 2, i), tiles.summarize(mask, blocks))
        return tiles.classify(mask, own, blocks, b, h, i, jnp.arange(blocks.count_k, dtype=jnp.int32))

    for b, h, i in np.ndindex(2, 2, blocks.count_q):
        got = row(b, h, i)
        np.testing.assert_array_equal(got[0].reshape(-1), empty[b, h, i])
        np.testing.assert_array_equal(got[1].reshape(-1), full[b, h, i])


# A mask of arrays, their names as operands, and the rule on numbers.
RANGES = {
    "causal": (Causal, ["offset"], lambda q, k, offset: k <= q + offset),
    "window": (
        lambda left, right, offset: SlidingWindow(left, right, offset=offset),
        ["left", "right", "offset"],
        lambda q, k, left, right, offset: (-left <= k - q - offset) & (k - q - offset <= right),
    ),
    "prefix": (PrefixLM, ["prefix_lengths"], lambda q, k, prefix: (k <= q) | (k < prefix)),
    "lengths": (
        Lengths,
        ["query_lengths", "key_lengths"],
        lambda q, k, queries, keys: (q < queries) & (k < keys),
    ),
    "not": (lambda x: ~Lengths(None, x), ["mask.key_lengths"], lambda q, k, keys: k >= keys),
}


@pytest.mark.parametrize(("make", "names", "rule"), RANGES.values(), ids=RANGES)
def test_tile_is_right_for_ranges_of_operands(make, names, rule):
    """A rectangle over several batch rows meets a range of offsets, sizes or lengths."""
    rng = np.random.default_rng(0)
    draws = 300

    def span(low, width):
        first = rng.integers(low, 12, draws, np.int32)
        return Range(first, first + rng.integers(0, width, draws, np.int32))

    q, k = span(0, 5), span(0, 5)
    operands = {name: span(0 if name in ("left", "right") else -6, 4) for name in names}
    ranges = (q, k, *operands.values())
    mask = make(*(np.zeros((), np.int32) for _ in names))
    tile = jax.jit(lambda q, k, operands: mask.tile(0, 0, q, k, **operands))
    empty, full = (np.asarray(x) for x in tile(q, k, operands))
    # Every combination of values that the ranges allow, all draws at once.
    for steps in np.ndindex(5, 5, *[4] * len(names)):
        at = [r.lo + step for r, step in zip(ranges, steps, strict=True)]
        inside = np.all([x <= r.hi for x, r in zip(at, ranges, strict=True)], axis=0)
        seen = rule(*at)
        assert not (empty & seen & inside).any()
        assert not (full & ~seen & inside).any()
    assert empty.sum() > 10
    assert full.sum() > 10


# ---- skipping --------------------------------------------------------------------------------------

IDS = np.repeat(np.arange(9, dtype=np.int32), [1, 7, 2, 11, 3, 3, 10, 1, 2])[None]
EXACT = [
    Causal(),
    Causal(5),
    Causal(np.array([-7, 40])),
    Causal(align="end"),
    ~Causal(),
    SlidingWindow(9),
    ~SlidingWindow(9),
    SlidingWindow(0, 4, offset=-3),
    SlidingWindow(None, 2),
    SlidingWindow(np.array([3, 12]), np.array([0, 5]), offset=np.array([11, -2])),
    Segments(IDS),
    Segments(np.concatenate([IDS, IDS // 2])),
    PrefixLM(0),
    PrefixLM(17),
    PrefixLM(np.array([8, 23])),
    Lengths(21, 17),
    ~Lengths(21, 17),
    Lengths(None, np.array([0, 33])),
    Lengths(np.array([5, 16]), 24),
    Dense(np.add.outer(np.arange(40), np.arange(40)) % 37 > 20),
]


@pytest.mark.parametrize(("block_q", "block_k"), [(8, 8), (5, 16)])
def test_classify_is_exact_for_single_masks(block_q, block_k):
    blocks = tiles.Blocks(40, 40, block_q, block_k)
    for mask, (seen, empty, full) in zip(EXACT, run(EXACT, blocks, 2, 1), strict=True):
        none, every = truth(seen, blocks)
        np.testing.assert_array_equal(empty, none, err_msg=repr(mask))
        np.testing.assert_array_equal(full, every, err_msg=repr(mask))


@pytest.mark.parametrize("block", [(8, 8), (4, 2), (16, 24), (7, 40)])
def test_classify_is_exact_for_block_sparse(block):
    rng = np.random.default_rng(0)
    given = rng.random((2, 2, 5, 5)) < 0.5
    blocks = tiles.Blocks(40, 40, *block)
    ((seen, empty, full),) = run([BlockSparse(given, 8)], blocks, 2, 2)
    none, every = truth(seen, blocks)
    np.testing.assert_array_equal(empty, none)
    np.testing.assert_array_equal(full, every)
    if block == (8, 8):
        np.testing.assert_array_equal(empty, ~given)
        np.testing.assert_array_equal(full, given)


def classify(mask, length, block_q, block_k, batch=1):
    """Return ``(empty, full)`` of the tiles of one head."""
    blocks = tiles.Blocks(length, length, block_q, block_k)
    function = lambda m: tiles.dense(m.resolve(Sizes(batch, 1, length, length)), blocks, batch, 1)
    return [np.asarray(x)[:, 0] for x in jax.jit(function)(mask)]


def test_classify_leaves_half_of_the_causal_tiles():
    n = 32
    empty, full = classify(Causal(), n * 64, 64, 64)
    assert empty.sum() == full.sum() == n * (n - 1) // 2
    np.testing.assert_array_equal(~empty & ~full, np.eye(n, dtype=bool)[None])


@pytest.mark.parametrize(
    "mask", [SlidingWindow(100), SlidingWindow(50, 50), Causal() & ~Causal(-101)], ids=range(3)
)
def test_classify_leaves_a_constant_number_of_tiles_per_row_of_a_window(mask):
    empty, _ = classify(mask, 4096, 64, 32)
    # 64 queries together see 164 keys, which touch at most 7 tiles of 32.
    assert (~empty).sum(-1).max() <= 7


def test_classify_skips_tiles_between_sorted_documents():
    documents, length = 16, 1024
    ids = np.repeat(np.arange(documents, dtype=np.int32), length // documents)[None]
    empty, full = classify(Segments(ids), length, 64, 64)
    np.testing.assert_array_equal(~empty, np.eye(documents, dtype=bool)[None])
    np.testing.assert_array_equal(full, ~empty)


def test_classify_skips_tiles_beyond_the_lengths():
    empty, _ = classify(Lengths(None, np.array([0, 1, 64, 65, 1024])), 1024, 64, 64, batch=5)
    assert (~empty).sum(-1)[:, 0].tolist() == [0, 1, 1, 2, 16]


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_classify_does_not_overflow_on_huge_values(value):
    masks = [
        Causal(value),
        Causal(np.array(value, np.int32)),
        SlidingWindow(3, 3, offset=value),
        SlidingWindow(np.array(2**31 - 1, np.int32), 0),
        SlidingWindow(2**31 - 1, 2**31 - 1),
        PrefixLM(value),
        PrefixLM(np.array(value, np.int32)),
        Lengths(value, np.array(value, np.int32)),
        Segments(np.resize(np.array([value, 0, value], np.int32), 40)),
    ]
    blocks = tiles.Blocks(40, 40, 8, 8)
    for mask, (seen, empty, full) in zip(masks, run(masks, blocks, 1, 1), strict=True):
        none, every = truth(seen, blocks)
        assert not (empty & ~none).any(), repr(mask)
        assert not (full & ~every).any(), repr(mask)


# ---- the walk and the tile size --------------------------------------------------------------------


def test_visible_first_puts_the_tiles_to_visit_first_in_rising_order():
    rng = np.random.default_rng(0)
    masks = [rng.random(13) < p for p in (0.0, 0.2, 0.5, 0.8, 1.0)]
    walk = jax.jit(tiles.visible_first)
    for empty in masks:
        order, count = walk(empty)
        assert order.dtype == count.dtype == jnp.int32
        assert order.tolist() == [*np.flatnonzero(~empty), *np.flatnonzero(empty)]
        assert count == (~empty).sum()


def test_visible_first_takes_a_single_tile():
    assert [x.tolist() for x in tiles.visible_first(jnp.array([True]))] == [[0], 0]
    assert [x.tolist() for x in tiles.visible_first(jnp.array([False]))] == [[0], 1]


LENGTHS = [1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 127, 128, 129, 509, 512, 1000, 1021, 4096, 8191]


@pytest.mark.parametrize("most", [8, 16, 24, 64, 128, 512, 1024])
def test_fit_is_the_most_even_tiling(most):
    for length in LENGTHS:
        size = tiles.fit(length, most)
        count = -(-length // size)
        assert 1 <= size <= min(most, length)
        assert size == length or size % 8 == 0
        # No fewer tiles would do, and they overlap by less than one step each.
        assert count == -(-length // most) or size - 8 < -(-length // -(-length // most))
        assert size - -(-length // -(-length // most)) < 8


@pytest.mark.parametrize(("length", "most"), [(10, 5), (126, 63), (170, 85), (3, 1), (100, 99)])
def test_fit_stays_within_a_limit_that_is_no_multiple(length, most):
    assert tiles.fit(length, most) <= most


def test_fit_takes_another_multiple():
    assert tiles.fit(100, 64, multiple=1) == 50
    assert tiles.fit(100, 64, multiple=16) == 64
    assert tiles.fit(513, 512) == 264

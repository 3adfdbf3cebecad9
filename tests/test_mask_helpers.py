"""Masks of packed documents and of blocks: against definitions in plain Python, and what tiles are called."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import (
    BlockPattern,
    BlockSparse,
    Causal,
    Segments,
    SlidingWindow,
    flash_attention,
    packed,
    tiles,
)
from flashjax.masks import Between, Sizes
from tests import budget
from tests.test_masks import check_each
from tests.test_memory import largest_array
from tests.test_tiles import run

# ---- packed documents ------------------------------------------------------------------------------

T = 12
ALIKE = {
    "one": [0, 12],
    "two": [0, 5, 12],
    "padding": [0, 3, 4, 9],
    "empty": [0, 0, 5, 5, 5, 9, 9],
    "only-padding": [0, 0],
    "singles": list(range(13)),
    "rows": [[0, 4, 12], [0, 0, 7]],
}
LENGTHS = (9, 13)
APART = {
    "two": ([0, 4, 9], [0, 9, 13]),
    "shorter": ([0, 5, 9], [0, 2, 7]),
    "empty": ([0, 1, 1, 4, 6], [0, 3, 5, 5, 9]),
    "never-together": ([0, 0, 9], [0, 13, 13]),
    "rows": ([[0, 4, 8], [0, 1, 7]], [[0, 7, 13], [0, 6, 6]]),
    "rows-of-queries": ([[0, 4, 8], [0, 1, 7]], [0, 5, 11]),
    "rows-of-keys": ([0, 3, 9], [[0, 7, 13], [0, 1, 10]]),
}
WINDOWS = [(None, None), (None, 0), (2, 0), (1, 2), (0, None), (np.array(3), jnp.array([0, 2]))]


def see(query_ends, key_ends, left, right, align="start"):
    """Return the rule of a packed mask: ``rule(b, h, q, k)`` on Python integers."""

    def rule(b, h, q, k):
        queries, keys = (x[b] if isinstance(x[0], list) else x for x in (query_ends, key_ends))
        low, high = (None if x is None else np.broadcast_to(x, 2)[b] for x in (left, right))
        for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, (queries, keys)), strict=True):
            if q0 <= q < q1 and k0 <= k < k1:
                shift = 0 if align == "start" else (k1 - k0) - (q1 - q0)
                distance = (k - k0) - (q - q0 + shift)
                return (low is None or distance >= -low) and (high is None or distance <= high)
        return False

    return rule


def alike(windows=WINDOWS, form=lambda ends: ends):
    """Return packed masks of T queries and keys, with what they mean."""
    return [
        (packed(form(ends), query_length=T, left=left, right=right), see(ends, ends, left, right))
        for ends in ALIKE.values()
        for left, right in windows
    ]


def apart(windows=WINDOWS, form=lambda ends: ends):
    """Return packed masks of unlike queries and keys, with what they mean."""
    make = functools.partial(packed, query_length=LENGTHS[0], key_length=LENGTHS[1])
    return [
        (make(*map(form, ends), left=left, right=right, align=align), see(*ends, left, right, align))
        for ends in APART.values()
        for left, right in windows
        for align in ("start", "end")
    ]


def test_packed_sees_its_document_in_its_window():
    check_each(alike(), T, T, batch=2)


def test_packed_counts_the_window_in_each_document():
    check_each(apart(), *LENGTHS, batch=2)


def test_from_cu_seqlens_is_segments():
    masks = [(Segments.from_cu_seqlens(ends, query_length=T), ends) for ends in ALIKE.values()]
    assert all(type(mask) is Segments for mask, _ in masks)
    check_each([(mask, see(ends, ends, None, None)) for mask, ends in masks], T, T, batch=2)
    given = Segments.from_cu_seqlens([0, 2, 2, 3], [0, 0, 3, 3], query_length=5, key_length=4)
    assert given == Segments(np.array([0, 0, 2, 3, 3], np.int32), np.array([1, 1, 1, 4], np.int32))


def test_from_cu_seqlens_takes_as_many_keys_as_queries():
    assert Segments.from_cu_seqlens([0, 2], [0, 1], query_length=3).dense(3).sum() == 2
    mask = Segments.from_cu_seqlens([0, 2], query_length=2, key_length=4)
    np.testing.assert_array_equal(mask.dense(2, 4)[0, 0], [[True, True, False, False]] * 2)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_cu_seqlens_may_have_any_integer_dtype(dtype):
    make = functools.partial(packed, query_length=6, right=0, align="end")
    assert make(np.array([0, 2, 5], dtype), np.array([0, 1, 4], dtype)) == make([0, 2, 5], [0, 1, 4])


@pytest.mark.parametrize("most", [2**31 - 1, 2**40, np.int32(2**31 - 1), np.array([2**31 - 1, 0], np.int32)])
def test_windows_may_be_huge(most):
    left = most if np.ndim(most) else 2**40  # in Python
    pairs = [
        (
            packed(*ends, query_length=9, key_length=13, left=most, right=most),
            see(ends[0], ends[-1], left, left),
        )
        for ends in ((APART["two"][0],), APART["two"])
    ]
    check_each(pairs, *LENGTHS, batch=2)


def test_packed_works_in_64_bit_mode():
    with jax.enable_x64(True):
        ends = np.array([0, 2, 5]), jnp.array([0, 1, 2**40])
        assert ends[1].dtype == jnp.int64
        mask = packed(*ends, query_length=5, key_length=7, left=jnp.array(1), right=0, align="end")
        check_each([(mask, see([0, 2, 5], [0, 1, 2**40], 1, 0, "end"))], 5, 7)
        pattern = BlockPattern(2, strided=3, fixed=2, global_blocks=1)
        check_each([(pattern, blocks_see(2, strided=3, fixed=2, global_blocks=1))], 9, 11)
        lists = BlockSparse.from_lists(np.array([[0, -1]]), 2, key_length=4)
        check_each([(lists, lambda b, h, q, k: k < 2)], 2, 4)


@pytest.mark.parametrize(
    ("mask", "sizes", "picture"),
    [
        (packed([0, 3, 4], query_length=5), (5,), "███··\n███··\n███··\n···█·\n·····"),
        (packed([0, 3, 4], query_length=5, right=0), (5,), "█····\n██···\n███··\n···█·\n·····"),
        (packed([0, 2, 5], query_length=5, left=1, right=1), (5,), "██···\n██···\n··██·\n··███\n···██"),
        (
            packed([0, 1, 3], [0, 2, 5], query_length=3, key_length=6, right=0),
            (3, 6),
            "█·····\n··█···\n··██··",
        ),
        (
            packed([0, 1, 3], [0, 2, 5], query_length=3, key_length=6, left=1, right=0, align="end"),
            (3, 6),
            "██····\n··██··\n···██·",
        ),
    ],
    ids=range(5),
)
def test_picture_of_packed_documents(mask, sizes, picture):
    assert mask.picture(*sizes) == picture


def test_packed_is_made_of_what_kernels_know_best():
    whole = Segments.from_cu_seqlens([0, 2, 5], query_length=6)
    make = functools.partial(packed, query_length=6)
    assert make([0, 2, 5]) == whole
    assert make([0, 2, 5], right=0) == whole & Causal()
    assert make([0, 2, 5], left=3, right=0, align="end") == whole & SlidingWindow(3)
    ends = jnp.array([0, 2, 5])
    assert make(ends, ends, right=jnp.array(0)) == whole & SlidingWindow(None, jnp.array(0))
    assert make([0, 2, 5], [0, 2, 5]) == whole
    runs = make([0, 2, 5], [0, 3, 4], right=0)
    assert isinstance(runs, Between)
    assert [x.tolist() for x in (runs.first[:5], runs.last)] == [[0, 0, 3, 3, 3], [0, 1, 3, 3, 3, -1]]


def test_shows_own_is_not_said_of_what_may_be_padding():
    for ends in ALIKE.values():
        for mask in (packed(ends, query_length=T), packed(ends, query_length=T, right=0)):
            assert not mask.resolve(Sizes(2, 1, T, T)).shows_own()


# ---- packed documents: tracing -----------------------------------------------------------------------


def test_cu_seqlens_are_data():
    traces = []

    @jax.jit
    def count(query_ends, key_ends, left):
        traces.append(left)
        make = functools.partial(packed, query_length=9, left=left, right=1)
        masks = [make(query_ends), make(query_ends, key_ends, key_length=13, align="end")]
        return [mask.dense(9, n, batch=2) for mask, n in zip(masks, LENGTHS, strict=True)]

    for queries, keys in (APART["two"], APART["shorter"], APART["never-together"]):
        for left in (0, 3):
            seen = count(jnp.array(queries), jnp.array(keys), left)
            rules = see(queries, queries, left, 1), see(queries, keys, left, 1, "end")
            for got, rule in zip(seen, rules, strict=True):
                wanted = np.array([rule(*index) for index in np.ndindex(*got.shape)]).reshape(got.shape)
                np.testing.assert_array_equal(got, wanted)
    assert len(traces) == 1


def test_values_outside_of_jit_do_not_change_the_program():
    make = lambda *ends: packed(*(np.array(x) for x in ends), query_length=9, key_length=13, right=0)
    masks = [make(*APART[name]) for name in ("two", "shorter", "never-together")]
    assert len({jax.tree.structure(mask) for mask in masks}) == 1
    full, padded = (packed(np.array(x), query_length=9, right=0) for x in ([0, 4, 9], [0, 4, 7]))
    assert jax.tree.structure(full) == jax.tree.structure(padded)


def test_packed_maps_over_rows():
    ends = jnp.array(ALIKE["rows"])
    got = jax.vmap(lambda x: packed(x, query_length=T, left=2, right=0).dense(T)[0])(ends)
    np.testing.assert_array_equal(got, packed(ends, query_length=T, left=2, right=0).dense(T))


def test_packed_takes_no_more_memory_than_its_arrays():
    length, documents = 2**16, 1000
    shape = jax.ShapeDtypeStruct((2, length, 1, 8), jnp.float32)
    ends = jax.ShapeDtypeStruct((2, documents + 1), jnp.int32)

    def loss(x, queries, keys):
        mask = packed(queries, keys, query_length=length, left=100, right=0, align="end")
        return jnp.sum(flash_attention(x, x, x, mask=mask, implementation="xla"))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(shape, ends, ends)
    assert largest_array(jaxpr.jaxpr) <= 2 * shape.size


# ---- packed documents: tiles -------------------------------------------------------------------------


def truth(seen, blocks):
    """Say of every tile whether all its positions are hidden and whether all are visible."""
    counts = (np.arange(n, dtype=np.int32) for n in (blocks.count_q, blocks.count_k))
    spans = (span(i) for span, i in zip((blocks.queries, blocks.keys), counts, strict=True))
    rows, columns = (np.asarray(x.lo)[:, None] + np.arange(int(x.hi[0] - x.lo[0]) + 1) for x in spans)
    cut = seen[:, :, rows[:, :, None, None], columns]
    return ~cut.any((3, 5)), cut.all((3, 5))


def in_one_form(ends):
    """Write the ends of documents as rows of one length, so that one program serves them all."""
    rows = np.broadcast_to(np.array(ends), (2, np.shape(ends)[-1]))
    return jnp.array(np.pad(rows, ((0, 0), (0, 14 - rows.shape[1])), mode="edge"))


@pytest.mark.parametrize("blocks", [(4, 4), (5, 3)], ids=str)
def test_tiles_of_packed_documents_are_called_right(blocks):
    windows = [WINDOWS[i] for i in (1, 3, 5)]
    for pairs, sizes in ((alike(windows, in_one_form), (T, T)), (apart(windows, in_one_form), LENGTHS)):
        cut = tiles.Blocks(*sizes, *blocks)
        named = possible = 0
        for mask, _ in pairs:
            ((seen, empty, full),) = run([mask], cut, 2, 1)
            none, every = truth(seen, cut)
            assert not (empty & ~none).any(), f"called empty but visible: {mask}"
            assert not (full & ~every).any(), f"called full but hidden: {mask}"
            named, possible = named + (empty | full).sum(), possible + (none | every).sum()
        assert named > 0.8 * possible


def test_tiles_of_other_documents_and_of_padding_are_called_empty():
    rng = np.random.default_rng(0)
    length = 200
    ends = [np.sort(rng.integers(0, 170, 12)) for _ in range(8)]
    ends = [np.concatenate([[0], x]) for x in ends] + [np.array([0, *[length] * 12])]
    blocks = tiles.Blocks(length, length, 16, 8)
    masks = [Segments.from_cu_seqlens(x, query_length=length) for x in ends]
    for x, (seen, empty, full) in zip(ends, run(masks, blocks, 1, 1), strict=True):
        none, every = truth(seen, blocks)
        real = [int(blocks.queries(np.int32(i)).hi) < x[-1] for i in range(blocks.count_q)]
        # Queries that are padding may be thought to see the tile in which the keys' padding begins.
        np.testing.assert_array_equal(empty[:, :, real], none[:, :, real])
        assert (none & ~empty).sum() <= blocks.count_q - sum(real)
        np.testing.assert_array_equal(full, every)


def test_tiles_within_one_document_are_exact():
    """Documents of 32 queries and 64 keys, cut into tiles that lie within one of each; then padding."""
    count = 5
    ends = np.arange(count + 1) * 32, np.arange(count + 1) * 64
    sizes = count * 32 + 30, count * 64 + 30
    make = functools.partial(packed, *ends, query_length=sizes[0], key_length=sizes[1])
    windows = [(None, 0), (20, 0), (9, 30), (70, None)]
    masks = [make(left=x, right=y, align=align) for x, y in windows for align in ("start", "end")]
    blocks = tiles.Blocks(*sizes, 16, 8)
    for mask, (seen, empty, full) in zip(masks, run(masks, blocks, 1, 1), strict=True):
        none, every = truth(seen, blocks)
        np.testing.assert_array_equal(empty, none, err_msg=repr(mask))
        np.testing.assert_array_equal(full, every, err_msg=repr(mask))


# ---- packed documents: attention ---------------------------------------------------------------------

# Two documents, in either order; one without queries; one of nothing; padding.
QUERY_ENDS = np.array([[0, 40, 40, 63, 63], [0, 23, 63, 63, 63]])
KEY_ENDS = np.array([[0, 55, 60, 75, 75], [0, 15, 70, 70, 90]])
CALLS = {
    "alike": ((QUERY_ENDS,), {"left": 30, "right": 5}),
    "end": ((QUERY_ENDS, KEY_ENDS), {"left": 30, "right": 0, "align": "end"}),
}


def make_arrays(query_length=80, key_length=100, heads=2, dim=8):
    rng = np.random.default_rng(0)
    shapes = [(2, n, heads, dim) for n in (query_length, key_length, key_length)]
    arrays = {n: rng.normal(size=x) for n, x in zip(("query", "key", "value"), shapes, strict=True)}
    cotangents = rng.normal(size=shapes[0]), rng.normal(size=shapes[0][:3])
    return jax.tree.map(lambda x: x.astype(np.float32), (arrays, cotangents))


@functools.partial(jax.jit, static_argnames="mask")
def attend_alone(arrays, cotangents, mask):
    attend = functools.partial(flash_attention, mask=mask, implementation="reference", return_residual=True)
    (out, lse), pull = jax.vjp(lambda a: attend(**a), arrays)
    dlse = jnp.where(jnp.isfinite(lse), cotangents[1], 0).astype(lse.dtype)
    (gradients,) = pull((cotangents[0], dlse))
    return {"out": out, "lse": lse, **{f"d{name}": x for name, x in gradients.items()}}


def one_by_one(arrays, cotangents, ends, mask):
    """Run each document by itself, and put the results where they belong."""
    results = {f"d{name}": np.zeros_like(x) for name, x in arrays.items()}
    results |= {"out": np.zeros_like(cotangents[0]), "lse": np.full_like(cotangents[1], -np.inf)}
    of_keys = ("key", "value", "dkey", "dvalue")
    for b, d in np.ndindex(2, QUERY_ENDS.shape[1] - 1):
        queries, keys = (slice(x[b, d], x[b, d + 1]) for x in (ends[0], ends[-1]))
        cut = lambda name, x: x[b : b + 1, keys if name in of_keys else queries]  # noqa: B023
        own = {name: cut(name, x) for name, x in arrays.items()}
        if 0 in (own["query"].shape[1], own["key"].shape[1]):
            continue
        alone = attend_alone(own, tuple(cut("out", x) for x in cotangents), mask)
        for name, x in alone.items():
            cut(name, results[name])[...] = x
    return results


@pytest.mark.parametrize("name", CALLS)
def test_packed_attention_is_that_of_each_document_by_itself(name):
    ends, options = CALLS[name]
    arrays, cotangents = make_arrays()
    mask = packed(*ends, query_length=80, key_length=100, **options)
    attend = functools.partial(flash_attention, implementation="small-tiles", return_residual=True)
    got = budget.run(lambda **a: attend(**a, mask=mask), arrays, cotangents)
    alone = SlidingWindow(**options)
    plain = one_by_one(arrays, cotangents, ends, alone)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents))
        exact = one_by_one(*wide, ends, alone)
    budget.check(got, plain, exact, dict.fromkeys(got, jnp.float32))


@pytest.mark.parametrize("name", CALLS)
def test_nan_in_padding_stays_there(name):
    ends, options = CALLS[name]
    arrays, cotangents = make_arrays()

    @jax.jit
    def results(arrays, cotangents, ends):
        mask = packed(*ends, query_length=80, key_length=100, **options)
        attend = functools.partial(flash_attention, mask=mask, implementation="small-tiles")
        out, pull = jax.vjp(lambda a: attend(**a), arrays)
        return out, *pull(cotangents[0])

    def fill(x, rows):
        padding = np.arange(x.shape[1]) >= rows[:, -1:]
        return np.where(padding.reshape(*padding.shape, 1, 1), np.float32(np.nan), x)

    of_keys = ("key", "value")
    poisoned = {n: fill(x, ends[-1] if n in of_keys else ends[0]) for n, x in arrays.items()}
    assert all(np.isnan(x).any() for x in poisoned.values())
    clean = results(arrays, cotangents, ends)
    got = results(poisoned, (fill(cotangents[0], ends[0]), cotangents[1]), ends)
    jax.tree.map(np.testing.assert_array_equal, got, clean)
    out, gradients = got
    for b in range(2):
        assert not np.any(out[b, ends[0][b, -1] :])
        for name, x in gradients.items():
            assert not np.any(x[b, ends[-1 if name in of_keys else 0][b, -1] :])


# ---- lists of blocks ---------------------------------------------------------------------------------


def lists_see(lists, queries, keys):
    return lambda b, h, q, k: k // keys in np.asarray(lists)[..., q // queries, :].reshape(-1)


def test_from_lists_sees_the_blocks_of_each_list():
    # Out of order, twice, none, all; T and S are no multiples of a block.
    lists = [[2, 0, -1], [1, 1, 1], [-1, -1, -1], [2, 1, 0]]
    mask = BlockSparse.from_lists(lists, (3, 4), key_length=10)
    check_each([(mask, lists_see(lists, 3, 4))], 11, 10)
    for given in (np.array(lists, np.int8), jnp.array(lists)):
        assert BlockSparse.from_lists(given, (3, 4), key_length=10) == mask


def test_from_lists_takes_lists_of_each_row_and_head():
    rng = np.random.default_rng(0)
    for leading in ((2, 1), (3,)):
        lists = rng.integers(-1, 5, (*leading, 4, 2))
        full = np.broadcast_to(lists, (2, 3, 4, 2))
        rule = lambda b, h, q, k, full=full: k // 2 in full[b, h, q // 2]
        mask = BlockSparse.from_lists(lists, 2, key_length=9)
        assert mask.blocks.shape == (*leading, 4, 5)
        check_each([(mask, rule)], 8, 9, batch=2, heads=3)


def test_from_lists_may_be_of_nothing():
    assert not BlockSparse.from_lists(np.zeros((4, 0), np.int32), 2, key_length=6).dense(8, 6).any()
    assert BlockSparse.from_lists(np.zeros((0, 3), np.int32), 2, key_length=6).blocks.shape == (0, 3)


def test_from_lists_in_jax_arrays_see_nothing_beyond_the_keys():
    lists = jnp.array([[3, 2**31 - 1], [-5, 2], [0, -(2**31)]])
    check_each([(BlockSparse.from_lists(lists, 2, key_length=6), lists_see(lists, 2, 2))], 6, 6)


def test_lists_are_data():
    traces = []

    @jax.jit
    def count(lists):
        traces.append(lists)
        return BlockSparse.from_lists(lists, 2, key_length=6).dense(4, 6)

    for lists in ([[0, 1], [2, -1]], [[-1, -1], [1, 0]]):
        given = BlockSparse.from_lists(lists, 2, key_length=6)
        np.testing.assert_array_equal(count(jnp.array(lists)), given.dense(4, 6))
    assert len(traces) == 1


def test_from_lists_makes_nothing_larger_than_its_table():
    make = lambda lists: BlockSparse.from_lists(lists, 64, key_length=2**16)
    jaxpr = jax.make_jaxpr(make)(jax.ShapeDtypeStruct((2, 2**10, 100), jnp.int32))
    assert largest_array(jaxpr.jaxpr) == 2 * 2**10 * 2**10


# ---- patterns of blocks ------------------------------------------------------------------------------

SINGLE = [  # one rule besides the own block
    {"block_size": 4},
    {"block_size": 4, "local": 1},
    {"block_size": 1, "local": 6},
    {"block_size": 5, "local": 2**40},
    {"block_size": 2**40, "local": 0},
]
PATTERNS = [
    *SINGLE,
    {"block_size": 4, "strided": 3},
    {"block_size": 1, "strided": 5},
    {"block_size": 8, "strided": 1},
    {"block_size": 2, "strided": 2**40},
    {"block_size": 4, "fixed": 3},
    {"block_size": 1, "fixed": 7},
    {"block_size": 8, "fixed": 1},
    {"block_size": 2, "fixed": 2**40},
    {"block_size": 4, "global_blocks": 2},
    {"block_size": 4, "global_blocks": 2**40},
    {"block_size": 3, "local": 1, "strided": 4, "fixed": 5, "global_blocks": 1},
    {"block_size": 1, "local": 2, "strided": 9, "global_blocks": 3},
    {"block_size": 4, "local": 1, "fixed": 4, "global_blocks": 1},
]


def blocks_see(block_size=128, local=0, strided=None, fixed=None, global_blocks=0):
    def rule(b, h, q, k):
        i, j = q // block_size, k // block_size
        seen = abs(i - j) <= local or i < global_blocks or j < global_blocks
        seen = seen or (strided is not None and (i - j) % strided == 0)
        return seen or (fixed is not None and j % fixed == fixed - 1)

    return rule


@pytest.mark.parametrize("sizes", [(25, 38), (38, 25), (1, 7)], ids=str)
def test_block_pattern_sees_by_its_rules(sizes):
    check_each([(BlockPattern(**given), blocks_see(**given)) for given in PATTERNS], *sizes)


def test_block_pattern_composes_to_what_papers_say():
    length, stride, size = 36, 4, 2
    block = lambda x: x // size
    masks = {
        # Child et al., 2019, section 4.2: both parts of "strided" and of "fixed"
        BlockPattern(size, local=stride - 1, strided=stride) & Causal(): lambda i, j: (
            i - j < stride or (i - j) % stride == 0
        ),
        (BlockPattern(size * stride) | BlockPattern(size, fixed=stride)) & Causal(): lambda i, j: (
            j // stride == i // stride or j % stride == stride - 1
        ),
    }
    pairs = [
        (mask, lambda b, h, q, k, rule=rule: k <= q and rule(block(q), block(k)))
        for mask, rule in masks.items()
    ]
    check_each(pairs, length, length)


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (BlockPattern(2), "██···\n██···\n··██·\n··██·\n····█"),
        (BlockPattern(1, local=1), "██···\n███··\n·███·\n··███\n···██"),
        (BlockPattern(1, strided=3), "█··█·\n·█··█\n··█··\n█··█·\n·█··█"),
        (BlockPattern(1, fixed=2) & Causal(), "█····\n·█···\n·██··\n·█·█·\n·█·██"),
        (BlockPattern(1, global_blocks=1), "█████\n██···\n█·█··\n█··█·\n█···█"),
    ],
    ids=range(5),
)
def test_picture_of_block_patterns(mask, picture):
    assert mask.picture(5) == picture


@pytest.mark.parametrize("blocks", [(4, 4), (6, 3), (5, 7)], ids=str)
def test_tiles_of_block_patterns_are_called_right(blocks):
    blocks = tiles.Blocks(24, 32, *blocks)
    masks = [BlockPattern(**given) for given in PATTERNS]
    for given, mask, (seen, empty, full) in zip(PATTERNS, masks, run(masks, blocks, 1, 1), strict=True):
        none, every = truth(seen, blocks)
        np.testing.assert_array_equal(empty, none, err_msg=repr(mask))
        assert not (full & ~every).any(), repr(mask)
        within = all(given["block_size"] % n == 0 for n in (blocks.block_q, blocks.block_k))
        if within or given in SINGLE:
            np.testing.assert_array_equal(full, every, err_msg=repr(mask))


def test_tiles_of_causal_block_patterns_are_exact_within_blocks():
    blocks = tiles.Blocks(48, 48, 4, 2)
    masks = [BlockPattern(4, local=1, strided=4, global_blocks=1) & Causal(), ~BlockPattern(8, fixed=2)]
    for mask, (seen, empty, full) in zip(masks, run(masks, blocks, 1, 1), strict=True):
        none, every = truth(seen, blocks)
        np.testing.assert_array_equal(empty, none, err_msg=repr(mask))
        np.testing.assert_array_equal(full, every, err_msg=repr(mask))


def test_tiles_of_a_block_pattern_are_few_per_row():
    count = 128
    mask = BlockPattern(64, local=1, strided=32, global_blocks=1) & Causal()
    blocks = tiles.Blocks(64 * count, 64 * count, 64, 64)
    call = lambda: tiles.dense(mask.resolve(Sizes(1, 1, *blocks[:2])), blocks, 1, 1)
    empty, full = (np.asarray(x)[0, 0] for x in jax.jit(call)())
    wanted = [{0, i - 1, i, *range(i % 32, i, 32)} - {-1} for i in range(count)]
    assert [set(np.flatnonzero(row)) for row in ~empty] == wanted
    np.testing.assert_array_equal(~full & ~empty, np.eye(count, dtype=bool))


def test_block_pattern_holds_no_array():
    mask = BlockPattern(np.int64(64), local=np.int32(1), strided=8)
    assert mask == BlockPattern(64, local=1, strided=8)
    assert hash(mask) == hash(BlockPattern(64, local=1, strided=8))
    assert mask != BlockPattern(64, local=1, fixed=8)
    assert jax.tree.leaves(mask) == []
    assert mask.operands() == {}
    assert mask.resolve(Sizes(1, 1, 7, 7)) == mask
    with pytest.raises(TypeError, match="positional"):
        BlockPattern(64, 1)


def test_block_pattern_shows_its_own_block():
    for given in PATTERNS:
        mask = BlockPattern(**given)
        assert np.asarray(mask.dense(25)[0, 0]).diagonal().all()
        assert mask.resolve(Sizes(1, 1, 25, 25)).shows_own()


def test_attention_under_a_block_pattern_is_that_under_an_array():
    mask = BlockPattern(8, local=1, strided=4, fixed=3, global_blocks=1) & Causal()
    arrays, _ = make_arrays(67, 67)
    attend = functools.partial(flash_attention, **arrays, implementation="small-tiles")
    np.testing.assert_allclose(attend(mask=mask), attend(mask=mask.dense(67)), rtol=1e-6, atol=1e-6)


# ---- errors ------------------------------------------------------------------------------------------

from_lists = functools.partial(BlockSparse.from_lists, block_size=4, key_length=10)
ERRORS = {
    "scalar": (lambda: packed(3, query_length=4), ValueError, r"shape \(\); it must be \[documents \+ 1\]"),
    "no-document": (lambda: packed([0], query_length=4), ValueError, "at least one document: its start"),
    "three-axes": (
        lambda: packed([0, 1], np.zeros((2, 2, 2), int), query_length=4),
        ValueError,
        r"key_cu_seqlens has shape \(2, 2, 2\); it must be .*\[B, documents \+ 1\]",
    ),
    "floats": (lambda: packed([0.0, 1.0], query_length=4), TypeError, "float32; it must hold integers"),
    "words": (
        lambda: packed("no", query_length=4),
        TypeError,
        "query_cu_seqlens is a str; it must be an array",
    ),
    "lengths": (
        lambda: packed([3, 5, 4], query_length=12),
        ValueError,
        r"query_cu_seqlens starts at 3; it must start at 0: .* pass np.cumsum\(\[0, \*lengths\]\)",
    ),
    "falls": (
        lambda: packed([0, 3], np.array([[0, 3], [0, 2], [0, -1]], np.int8), query_length=4),
        ValueError,
        "key_cu_seqlens falls from 0 to -1; each entry must be at least the one before: .*cumsum",
    ),
    "unsigned-falls": (
        lambda: packed(np.array([0, 3, 2], np.uint8), query_length=4),
        ValueError,
        "falls from 3 to 2",
    ),
    "beyond": (
        lambda: packed([0, 3, 7], query_length=6),
        ValueError,
        "query_cu_seqlens ends at 7, beyond the length 6; the documents must fit: cut them, or give the true",
    ),
    "beyond-keys": (
        lambda: packed([0, 3, 7], query_length=7, key_length=6),
        ValueError,
        "query_cu_seqlens ends at 7, beyond the length 6",
    ),
    "documents": (
        lambda: packed([0, 3, 7], [0, 7], query_length=7),
        ValueError,
        r"has shape \(3,\) and key_cu_seqlens \(2,\); they must hold the same documents .*Repeat an entry",
    ),
    "rows": (
        lambda: packed([[0, 3]] * 2, [[0, 3]] * 3, query_length=7),
        ValueError,
        r"has shape \(2, 2\) and key_cu_seqlens \(3, 2\); they must hold .* of the same rows",
    ),
    "length": (
        lambda: packed([0, 3], query_length=4.0),
        TypeError,
        "query_length is 4.0; it must be a Python int, known when the call is traced",
    ),
    "negative-length": (
        lambda: packed([0, 3], query_length=4, key_length=-1),
        ValueError,
        "key_length is -1; it must be at least 0",
    ),
    "align": (lambda: packed([0, 3], query_length=4, align="middle"), ValueError, "align is 'middle'"),
    "left": (lambda: packed([0, 3], query_length=4, left=-1), ValueError, "size on the left is -1"),
    "right": (lambda: packed([0, 3], [0, 3], query_length=4, right=0.5), TypeError, "on the right has dtype"),
    "one-list": (
        lambda: from_lists([0, 1]),
        ValueError,
        r"lists has shape \(2,\); it must be \[blocks of queries, most\], with up to two leading",
    ),
    "float-lists": (lambda: from_lists([[0.0]]), TypeError, "lists has dtype float32; it must hold integers"),
    "no-such-block": (
        lambda: from_lists([[0, -1], [3, 2]]),
        ValueError,
        "lists holds 3, and key_length makes 3 blocks; their numbers must be below 3, and -1 where",
    ),
    "lists-block": (
        lambda: from_lists([[0]], block_size=0),
        ValueError,
        "block_size is 0; it must be a positive",
    ),
    "lists-length": (lambda: from_lists([[0]], key_length=None), TypeError, "key_length is None; it must be"),
    "block-pair": (
        lambda: BlockPattern((4, 8)),
        TypeError,
        r"BlockPattern.block_size is \(4, 8\); it must be a Python int",
    ),
    "block-zero": (
        lambda: BlockPattern(0),
        ValueError,
        "BlockPattern.block_size is 0; it must be at least 1",
    ),
    "local": (
        lambda: BlockPattern(4, local=-1),
        ValueError,
        "BlockPattern.local is -1; it must be at least 0",
    ),
    "local-none": (lambda: BlockPattern(4, local=None), TypeError, "BlockPattern.local is None; it must be"),
    "strided": (
        lambda: BlockPattern(4, strided=0),
        ValueError,
        "BlockPattern.strided is 0; it must be at least 1",
    ),
    "fixed": (
        lambda: BlockPattern(4, fixed=True),
        TypeError,
        "BlockPattern.fixed is True; it must be a Python",
    ),
    "global": (
        lambda: BlockPattern(4, global_blocks=1.0),
        TypeError,
        "BlockPattern.global_blocks is 1.0; it must",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_lengths_must_be_known_when_traced():
    with pytest.raises(
        TypeError, match=r"query_length is .*; it must be a Python int, known when the call is traced"
    ):
        jax.jit(lambda n: packed([0, 3], query_length=n).query_ids)(4)


def test_a_mask_of_other_lengths_than_the_call_is_refused():
    with pytest.raises(
        ValueError, match=r"Segments.query_ids has shape \(6,\); it must broadcast to \[B, T\]"
    ):
        packed([0, 5], query_length=6, right=0).dense(7)
    with pytest.raises(ValueError, match=r"BlockSparse.blocks has shape .* must broadcast to"):
        from_lists([[0], [1]]).dense(20, 10)

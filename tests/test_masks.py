"""Masks against definitions in plain Python, their algebra, and their behaviour as values and pytrees."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import (
    BlockSparse,
    Causal,
    CustomMask,
    Dense,
    Lengths,
    Operand,
    PrefixLM,
    Segments,
    SlidingWindow,
)
from flashjax.masks import Range, Sizes, from_arguments

SHAPES = [(5, 11), (11, 5)]
LARGE = 2**31 - 1
SMALL = -(2**31)


def by_rule(rule, query_length, key_length, batch=1, heads=1):
    """Evaluate ``rule(b, h, q, k)`` on Python integers, one element at a time."""
    shape = (batch, heads, query_length, key_length)
    return np.array([rule(*index) for index in np.ndindex(*shape)], bool).reshape(shape)


def check_sees(mask, rule, query_length, key_length, **options):
    check_each([(mask, rule)], query_length, key_length, **options)


def check_each(pairs, query_length, key_length, **options):
    """Assert that each mask sees what its rule says, with its arrays traced: one compilation for all."""
    for (mask, rule), seen in zip(
        pairs, dense_each([mask for mask, _ in pairs], query_length, key_length, **options), strict=True
    ):
        wanted = by_rule(rule, query_length, key_length, *seen.shape[:2])
        np.testing.assert_array_equal(seen, wanted, strict=True, err_msg=repr(mask))


def dense_each(masks, query_length, key_length=None, **options):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def dense(masks):
        return [mask.dense(query_length, key_length, **options) for mask in masks]

    return [np.asarray(x) for x in dense(masks)]


def modular(b, h, q, k, *, shift, weight):
    return (q + k + shift * weight) % 3 == 0


def threshold(b, h, q, k, *, score):
    return score > 0


def threshold_bounds(b, h, q, k, *, score):
    return score.hi <= 0, score.lo > 0


def make_masks(query_length=7, key_length=7):
    """One mask of every kind, for two batch rows and two heads."""
    rng = np.random.default_rng(0)
    bools = lambda *shape: rng.random(shape) < 0.5
    ids = lambda *shape: rng.integers(0, 3, shape).astype(np.int32)
    sizes = (query_length, key_length)
    stock = [
        Causal(),
        Causal(2),
        Causal(jnp.array(-1)),
        Causal(np.array([1, -2])),
        Causal(align="end"),
        SlidingWindow(2),
        SlidingWindow(None, None),
        SlidingWindow(jnp.array(1), 2, offset=np.array([0, 1])),
        SlidingWindow(2, np.array([0, 3]), align="end"),
        Segments(ids(2, query_length), ids(key_length)),
        PrefixLM(3),
        PrefixLM(np.array([0, 4])),
        Lengths(),
        Lengths(5, 3),
        Lengths(None, np.array([2, 6])),
        Lengths(np.array([2, 6]), jnp.array(4)),
        Dense(bools(2, 1, *sizes)),
        Dense(bools(key_length)),
        BlockSparse(bools(2, 2, -(-query_length // 3), -(-key_length // 2)), (3, 2)),
        CustomMask(modular, shift=Operand(jnp.array([1, 2]), "b"), weight=Operand(ids(2, key_length), "hk")),
        CustomMask(
            threshold,
            threshold_bounds,
            score=Operand(rng.normal(size=(2, query_length)).astype(np.float32), "bq"),
        ),
    ]
    composed = [
        Causal() & Segments(ids(2, query_length), ids(2, key_length)),
        ~(stock[7] | stock[-2]) & stock[-3],
        bools(*sizes) | (Causal(jnp.array(1)) & ~Lengths(None, np.array([2, 6]))),
    ]
    return stock + composed


MASKS = make_masks()
NAMES = [f"{i}-{type(mask).__name__}" for i, mask in enumerate(MASKS)]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=NAMES)


# ---- meaning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_sees_keys_up_to_the_shifted_query(shape):
    pairs = []
    for offset in (0, 2, -3, 100, -100):
        rule = lambda b, h, q, k, offset=offset: k <= q + offset
        forms = (offset, np.int64(offset), jnp.array(offset), np.array([offset]))
        pairs += [(Causal(form), rule) for form in forms]
    check_each(pairs, *shape)


def test_causal_offset_is_the_same_traced_or_not():
    function = lambda offset: Causal(offset).dense(5, 11)
    np.testing.assert_array_equal(jax.jit(function)(-2), function(-2))
    np.testing.assert_array_equal(jax.jit(function)(jnp.array([3, -2])), function(np.array([3, -2])))


def test_causal_takes_one_offset_per_row():
    offsets = [0, 2, -3]
    check_sees(Causal(jnp.array(offsets)), lambda b, h, q, k: k <= q + offsets[b], 5, 11, heads=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_align_end_shows_every_key_to_the_last_query(shape):
    t, s = shape
    check_sees(Causal(align="end"), lambda b, h, q, k: k <= q + s - t, t, s)
    assert Causal(align="end").dense(t, s)[0, 0, -1].all()


@pytest.mark.parametrize("given", [("q",), ("k",), ("q", "k")])
@pytest.mark.parametrize("make", [Causal, lambda **x: SlidingWindow(1, 2, **x)], ids=["causal", "window"])
def test_align_end_counts_from_the_lengths_of_each_row(make, given):
    t, s = 5, 11
    q_len, k_len = [5, 1, 3], [9, 0, 3]
    lengths = {}
    if "q" in given:
        lengths["query_seq_lengths"] = np.array(q_len)
    if "k" in given:
        lengths["key_value_seq_lengths"] = jnp.array(k_len)
    offset = lambda b: (k_len[b] if "k" in given else s) - (q_len[b] if "q" in given else t)
    low = -1 if isinstance(make(), SlidingWindow) else -100
    high = 2 if isinstance(make(), SlidingWindow) else 0
    rule = lambda b, h, q, k: low <= k - q - offset(b) <= high
    check_sees(make(align="end"), rule, t, s, **lengths)


def test_align_end_takes_traced_lengths():
    function = jax.jit(lambda n: Causal(align="end").dense(3, 7, key_value_seq_lengths=n))
    lengths = [7, 2]
    wanted = by_rule(lambda b, h, q, k: k <= q + lengths[b] - 3, 3, 7, batch=2)
    np.testing.assert_array_equal(function(jnp.array(lengths)), wanted)


@pytest.mark.parametrize("left", [0, 1, 4, 100])
def test_sliding_window_alone_counts_itself_and_left_keys(left):
    counts = np.asarray(SlidingWindow(left).dense(11, 5))[0, 0].sum(1)
    assert counts[:5].tolist() == [min(i + 1, left + 1) for i in range(5)]


WINDOWS = [
    (0, 0, 0),
    (2, 0, 0),
    (1, 2, 0),
    (None, 1, 0),
    (2, None, 0),
    (None, None, 0),
    (1, 1, 4),
    (2, 0, -3),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_window_includes_both_ends(shape):
    pairs = []
    for left, right, offset in WINDOWS:
        low, high = (100 if x is None else x for x in (left, right))
        rule = lambda b, h, q, k, low=-low, high=high, offset=offset: low <= k - (q + offset) <= high
        arrays = (None if x is None else jnp.array(x) for x in (left, right))
        pairs.append((SlidingWindow(left, right, offset=offset), rule))
        pairs.append((SlidingWindow(*arrays, offset=np.array([offset])), rule))
    check_each(pairs, *shape)


def test_sliding_window_takes_one_size_per_row():
    left, right, offset = [0, 1, 3], [2, 0, 1], [0, -1, 5]
    mask = SlidingWindow(*(np.array(x) for x in (left, right)), offset=jnp.array(offset))
    rule = lambda b, h, q, k: -left[b] <= k - (q + offset[b]) <= right[b]
    check_sees(mask, rule, 5, 11)


def test_segments_compare_ids_in_any_order():
    ids = [[3, -1, 3, 0, 3], [0, 0, 7, -1, 7]]
    check_sees(Segments(ids), lambda b, h, q, k: ids[b][q] == ids[b][k], 5, 5, heads=2)


def test_segments_take_ids_of_keys_and_share_ids_between_rows():
    queries, keys = [[0, 2, 2, 5, 1], [1, 1, 0, 0, 9]], [5, 5, 2, 0, 0, 1, 2, 9, 9, 9, 5]
    rule = lambda b, h, q, k: queries[b][q] == keys[k]
    check_sees(Segments(np.array(queries), np.array(keys)), rule, 5, 11)
    check_sees(Segments(jnp.array(queries), jnp.array([keys])), rule, 5, 11)


@pytest.mark.parametrize(("left", "right"), [("uint8", "int32"), ("int32", "int8"), ("uint16", "int32")])
def test_segments_take_ids_of_two_dtypes(left, right):
    queries, keys = [0, 3, 3, 7, 0], [3, 3, 0, 0, 7, 1, 1]
    mask = Segments(np.array(queries, left), np.array(keys, right))
    check_sees(mask, lambda b, h, q, k: queries[q] == keys[k], 5, 7)


def test_segments_refuse_ids_that_no_dtype_holds_both_of():
    with pytest.raises(
        TypeError, match=r"query_ids has dtype uint32 and key_ids has int32.*cast them to one"
    ):
        Segments(np.array([0, 2**32 - 1], np.uint32), np.array([0, -1], np.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_lm_sees_the_prefix_and_the_past(shape):
    pairs = []
    for prefix in (0, 1, 4, 100, -2):
        rule = lambda b, h, q, k, prefix=prefix: k < prefix or k <= q
        pairs += [(PrefixLM(form), rule) for form in (prefix, jnp.array(prefix))]
    check_each(pairs, *shape)


def test_prefix_lm_takes_one_length_per_row():
    prefix = [0, 4, 11]
    check_sees(PrefixLM(np.array(prefix)), lambda b, h, q, k: k < prefix[b] or k <= q, 5, 11)


def test_lengths_hide_what_lies_beyond():
    pairs = []
    for lengths in ((None, None), (3, None), (None, 4), (3, 4), (0, 100), (-1, 4)):
        most = [100 if x is None else x for x in lengths]
        rule = lambda b, h, q, k, most=most: q < most[0] and k < most[1]
        arrays = (None if x is None else jnp.array(x) for x in lengths)
        pairs += [(Lengths(*lengths), rule), (Lengths(*arrays), rule)]
    check_each(pairs, 5, 11)


def test_lengths_differ_per_row():
    queries, keys = [0, 3, 5], [4, 0, 11]
    rule = lambda b, h, q, k: q < queries[b] and k < keys[b]
    check_sees(Lengths(np.array(queries), np.array(keys)), rule, 5, 11, heads=2)
    check_sees(Lengths(key_lengths=np.array(keys)), lambda b, h, q, k: k < keys[b], 5, 11)


def test_dense_broadcasts_like_an_array():
    rng = np.random.default_rng(0)
    shapes = [
        (),
        (1,),
        (11,),
        (5, 1),
        (5, 11),
        (2, 1, 11),
        (2, 5, 11),
        (3, 1, 1, 1),
        (3, 1, 5, 1),
        (3, 2, 5, 11),
    ]
    arrays = [rng.random(shape) < 0.5 for shape in shapes]
    for array, seen in zip(
        arrays, dense_each([Dense(x) for x in arrays], 5, 11, batch=3, heads=2), strict=True
    ):
        np.testing.assert_array_equal(seen, np.broadcast_to(array, (3, 2, 5, 11)))


@pytest.mark.parametrize("shape", [(6, 8), (5, 11)])
def test_block_sparse_repeats_each_block(shape):
    rng = np.random.default_rng(0)
    pairs = []
    for given in (2, (2, 3), [4, 1], 128):
        block = (given, given) if isinstance(given, int) else given
        tiles = [-(-n // m) for n, m in zip(shape, block, strict=True)]
        for leading in ((), (2, 2), (2, 1)):
            blocks = rng.random((*leading, *tiles)) < 0.5
            full = np.broadcast_to(blocks, (2, 2, *tiles))
            rule = lambda b, h, q, k, full=full, n=block: full[b, h, q // n[0], k // n[1]]
            pairs.append((BlockSparse(blocks, given), rule))
    check_each(pairs, *shape, batch=2, heads=2)


def test_block_sparse_broadcasts_an_axis_of_one_block():
    blocks = np.array([[True], [False], [True]])
    check_sees(BlockSparse(blocks, 2), lambda b, h, q, k: q // 2 != 1, 5, 11)


def test_custom_mask_reads_an_operand_of_every_tag():
    sizes = {"b": 3, "h": 2, "q": 5, "k": 11}
    rng = np.random.default_rng(0)
    parity = lambda b, h, q, k, x: (b + 2 * h + 3 * q + 5 * k + x) % 7 < 3
    tags = ["".join(x) for n in range(5) for x in itertools.combinations("bhqk", n)]
    pairs = []
    # Each axis of the operand is full, or the first or all but the first have size 1.
    for tag, ones in [(x, y) for x in tags for y in sorted({"", x[:1], x[1:]})]:
        array = rng.integers(0, 7, [1 if a in ones else sizes[a] for a in tag]).astype(np.int32)
        full = np.broadcast_to(
            array.reshape([1 if a not in tag or a in ones else sizes[a] for a in "bhqk"]), (3, 2, 5, 11)
        )
        rule = lambda b, h, q, k, full=full: (b + 2 * h + 3 * q + 5 * k + full[b, h, q, k]) % 7 < 3
        pairs.append((CustomMask(parity, x=Operand(array, tag)), rule))
    check_each(pairs, 5, 11, batch=3, heads=2)


def test_custom_mask_gives_each_operand_its_own_name():
    shift, weight = [1, 2], [[0, 1, 2, 1, 0], [2, 2, 1, 0, 0]]
    mask = CustomMask(modular, shift=Operand(np.array(shift), "b"), weight=Operand(jnp.array(weight), "hk"))
    check_sees(mask, lambda b, h, q, k: (q + k + shift[b] * weight[h][k]) % 3 == 0, 4, 5)


def test_custom_mask_gives_an_operand_by_blocks():
    per_block = [True, False, True]
    mask = CustomMask(lambda b, h, q, k, seen: seen, seen=Operand(np.array(per_block), "k", (1, 4)))
    check_sees(mask, lambda b, h, q, k: per_block[k // 4], 5, 11)


def test_custom_mask_indices_are_int32_and_broadcast():
    seen = []

    def note(b, h, q, k):
        seen.extend((b, h, q, k))
        return q >= k

    CustomMask(note).dense(5, 11, batch=3, heads=2)
    assert [x.shape for x in seen] == [(3, 1, 1, 1), (1, 2, 1, 1), (1, 1, 5, 1), (1, 1, 1, 11)]
    assert {x.dtype for x in seen} == {jnp.dtype("int32")}


@pytest.mark.parametrize("constant", [True, False])
def test_custom_mask_may_return_a_constant(constant):
    mask = CustomMask(lambda b, h, q, k: constant)
    rule = lambda *index: constant
    check_each([(mask, rule), (~mask, lambda *index: not constant), (mask & mask, rule)], 3, 3)


def test_from_arguments_combines_all_that_hides_something():
    window, q_len, k_len = (2, 3), [2, 5], [4, 11]
    extra = np.random.default_rng(0).random((5, 11)) < 0.7
    choices = {
        "is_causal": (False, True),
        "local_window_size": (None, window),
        "query_seq_lengths": (None, q_len),
        "key_value_seq_lengths": (None, k_len),
        "mask": (None, extra),
    }
    rules = {
        "is_causal": lambda b, h, q, k: k <= q,
        "local_window_size": lambda b, h, q, k: q - 2 <= k <= q + 3,
        "query_seq_lengths": lambda b, h, q, k: q < q_len[b],
        "key_value_seq_lengths": lambda b, h, q, k: k < k_len[b],
        "mask": lambda b, h, q, k: extra[q, k],
    }
    indices = [
        jnp.arange(n).reshape([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate((2, 1, 5, 11))
    ]
    for pick in itertools.product((0, 1), repeat=5):
        given = {name: values[i] for (name, values), i in zip(choices.items(), pick, strict=True)}
        mask = from_arguments(sizes=Sizes(2, 1, 5, 11), **given)
        if not any(pick):
            assert mask is None
            continue
        operands = {name: operand.array for name, operand in mask.operands().items()}
        got = np.broadcast_to(mask.element(*indices, **operands), (2, 1, 5, 11))
        active = [rules[name] for name, i in zip(choices, pick, strict=True) if i]
        wanted = by_rule(lambda *index, active=active: all(rule(*index) for rule in active), 5, 11, 2)
        np.testing.assert_array_equal(got, wanted, err_msg=str(given))


# ---- sizes -----------------------------------------------------------------------------------------


def test_dense_takes_batch_and_heads_from_arrays_or_arguments():
    per_row = Lengths(key_lengths=np.array([1, 2, 3]))
    per_head = CustomMask(lambda b, h, q, k, x: k < x, x=Operand(np.array([1, 2]), "h"))
    assert Causal().dense(2).shape == (1, 1, 2, 2)
    assert Causal().dense(2, 5).shape == (1, 1, 2, 5)
    assert Causal().dense(2, 5, batch=4, heads=3).shape == (4, 3, 2, 5)
    assert per_row.dense(2).shape == (3, 1, 2, 2)
    assert per_head.dense(2).shape == (1, 2, 2, 2)
    assert (per_row | ~per_head).dense(2).shape == (3, 2, 2, 2)
    assert Causal(align="end").dense(2, key_value_seq_lengths=np.array([1, 2])).shape == (2, 1, 2, 2)
    assert Dense(np.ones((4, 3, 1, 1), bool)).dense(2).shape == (4, 3, 2, 2)


def test_dense_of_nothing_has_the_right_shape():
    assert Causal().dense(0).shape == (1, 1, 0, 0)
    assert Causal(align="end").dense(3, 0).shape == (1, 1, 3, 0)
    assert Segments(np.zeros((2, 0), np.int32)).dense(0).shape == (2, 1, 0, 0)
    assert Causal().dense(2, batch=0).shape == (0, 1, 2, 2)
    assert Causal().dense(2, heads=0).shape == (1, 0, 2, 2)


@every_mask
def test_resolve_gives_every_array_four_dimensions(mask):
    resolved = mask.resolve(Sizes(2, 2, 7, 7))
    assert len(resolved.operands()) == len(jax.tree.leaves(resolved))
    for operand in resolved.operands().values():
        full = (2, 2, -(-7 // operand.block[0]), -(-7 // operand.block[1]))
        assert operand.array.ndim == 4
        assert all(n in (1, m) for n, m in zip(operand.array.shape, full, strict=True))


def test_resolve_makes_align_end_an_offset():
    resolved = Causal(align="end").resolve(Sizes(2, 1, 3, 7))
    assert resolved == Causal(4)
    lengths = Causal(align="end").resolve(Sizes(2, 1, 3, 7, key_lengths=np.array([7, 2])))
    assert lengths.align == "start"
    np.testing.assert_array_equal(lengths.offset, np.array([4, -1]).reshape(2, 1, 1, 1))
    assert lengths.offset.dtype == jnp.int32


HUGE = [
    (Causal(LARGE), lambda q, k: k <= q + LARGE),
    (Causal(SMALL), lambda q, k: k <= q + SMALL),
    (Causal(2**40), lambda q, k: True),
    (Causal(-(2**40)), lambda q, k: False),
    (Causal(np.array(LARGE, np.int32)), lambda q, k: True),
    (Causal(np.array([SMALL], np.int32)), lambda q, k: False),
    (Causal(np.array(2**32 - 1, np.uint32)), lambda q, k: True),
    (SlidingWindow(LARGE, LARGE), lambda q, k: True),
    (SlidingWindow(2**40, 0), lambda q, k: k <= q),
    (SlidingWindow(0, 2**40), lambda q, k: k >= q),
    (SlidingWindow(jnp.array(LARGE), 0), lambda q, k: k <= q),
    (SlidingWindow(0, np.array([LARGE])), lambda q, k: k >= q),
    (SlidingWindow(None, 0, offset=LARGE), lambda q, k: True),
    (SlidingWindow(1, 1, offset=SMALL), lambda q, k: False),
    (SlidingWindow(1, 1, offset=jnp.array(LARGE)), lambda q, k: False),
    (PrefixLM(LARGE), lambda q, k: True),
    (PrefixLM(SMALL), lambda q, k: k <= q),
    (PrefixLM(2**40), lambda q, k: True),
    (PrefixLM(np.array([LARGE], np.int32)), lambda q, k: True),
    (Lengths(LARGE, LARGE), lambda q, k: True),
    (Lengths(SMALL), lambda q, k: False),
    (Lengths(2**40, 2**40), lambda q, k: True),
    (Lengths(-(2**40)), lambda q, k: False),
    (Lengths(None, jnp.array(SMALL)), lambda q, k: False),
    (Segments(np.array([SMALL, LARGE, -1, 0, SMALL])), lambda q, k: q == k or {q, k} == {0, 4}),
]


@pytest.mark.parametrize(("mask", "rule"), HUGE, ids=[repr(mask) for mask, _ in HUGE])
def test_huge_values_do_not_overflow(mask, rule):
    check_sees(mask, lambda b, h, q, k: rule(q, k), 5, 5)


def test_align_end_with_huge_lengths_does_not_overflow():
    lengths = {"query_seq_lengths": np.array([0, LARGE], np.int32)}
    lengths["key_value_seq_lengths"] = np.array([LARGE, 0], np.int32)
    check_sees(Causal(align="end"), lambda b, h, q, k: b == 0, 3, 3, **lengths)


def test_masks_work_in_64_bit_mode():
    ids = [2**40, 2**40 + 2**32, 7, 2**40]
    indices = []
    with jax.enable_x64(True):
        pairs = [
            (Segments(np.array(ids)), lambda b, h, q, k: ids[q] == ids[k]),
            (Causal(jnp.array([1, -(2**40)])), lambda b, h, q, k: b == 0 and k <= q + 1),
            (SlidingWindow(jnp.array(2**40), jnp.array(0)), lambda b, h, q, k: k <= q),
            (Lengths(np.array(2), np.array([2**40])), lambda b, h, q, k: q < 2),
            (PrefixLM(np.array(2)), lambda b, h, q, k: k < 2 or k <= q),
            (BlockSparse([[True, False]] * 2, 2), lambda b, h, q, k: k < 2),
            (Causal(align="end"), lambda b, h, q, k: b == 1 or k <= q - 1),
            (CustomMask(lambda *x: indices.extend(x) or x[2] >= x[3]), lambda b, h, q, k: q >= k),
        ]
        assert pairs[0][0].query_ids.dtype == jnp.int64
        check_each(pairs, 4, 4, batch=2, key_value_seq_lengths=np.array([3, 2**40]))
    assert {x.dtype for x in indices} == {jnp.dtype("int32")}


# ---- algebra ---------------------------------------------------------------------------------------


def test_operators_combine_masks():
    first, second = Causal(1), SlidingWindow(2, 3)
    a, b = (np.asarray(x.dense(5, 11)) for x in (first, second))
    np.testing.assert_array_equal((first & second).dense(5, 11), a & b)
    np.testing.assert_array_equal((first | second).dense(5, 11), a | b)
    np.testing.assert_array_equal((~first).dense(5, 11), ~a)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("shape", [(11,), (5, 11), (2, 1, 1, 11)])
def test_operators_take_an_array_on_either_side(convert, shape):
    array = np.random.default_rng(0).random(shape) < 0.5
    a, b = np.asarray(Causal(2).dense(5, 11, batch=2)), np.broadcast_to(array, (2, 1, 5, 11))
    mask, given = Causal(2), convert(array)
    for got, wanted in (
        (mask & given, a & b),
        (given & mask, a & b),
        (mask | given, a | b),
        (given | mask, a | b),
        (~mask & given, ~a & b),
        (given | ~mask, ~a | b),
    ):
        np.testing.assert_array_equal(got.dense(5, 11, batch=2), wanted)
    assert (mask & given).right == (given & mask).left == (given | mask).left == Dense(given)


def test_operators_nest():
    rng = np.random.default_rng(0)
    dense = dense_each(MASKS, 7, batch=2, heads=2)
    masks, wanted = [], []
    for i, j, k, n in rng.integers(0, len(MASKS), (20, 4)):
        masks.append(~(MASKS[i] & ~MASKS[j]) & (MASKS[k] | ~(MASKS[n] | MASKS[i])))
        wanted.append(~(dense[i] & ~dense[j]) & (dense[k] | ~(dense[n] | dense[i])))
    np.testing.assert_array_equal(dense_each(masks, 7, batch=2, heads=2), wanted)


def test_operators_keep_equal_parts_apart():
    first = CustomMask(lambda b, h, q, k, x: k < x, x=Operand(np.array(2), ""))
    second = CustomMask(lambda b, h, q, k, x: k > x, x=Operand(np.array(4), ""))
    check_sees(first | second, lambda b, h, q, k: k < 2 or k > 4, 3, 7)
    check_sees((first | second) & ~(second | first), lambda b, h, q, k: False, 3, 7)


# ---- values and pytrees ----------------------------------------------------------------------------


@every_mask
def test_mask_is_a_pytree_that_rebuilds_itself(mask):
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert again == mask
    assert hash(again) == hash(mask)
    assert jax.tree.structure(again) == tree
    assert type(again) is type(mask)
    assert again.resolve(Sizes(2, 2, 7, 7)) == mask.resolve(Sizes(2, 2, 7, 7))


@every_mask
def test_mask_survives_tree_map_to_things_that_are_no_arrays(mask):
    axes = jax.tree.map(lambda x: "axis", mask)
    assert jax.tree.leaves(axes) == ["axis"] * len(jax.tree.leaves(mask))
    assert jax.tree.structure(axes) == jax.tree.structure(mask)
    shapes = jax.eval_shape(lambda x: x, mask)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(mask)]
    assert hash(shapes) == hash(jax.eval_shape(lambda x: x, mask))
    assert shapes == jax.eval_shape(lambda x: x, mask)
    assert jax.tree.leaves(jax.tree.map(lambda x: None, mask)) == []


def test_mask_leaves_are_its_arrays_under_their_names():
    mask = SlidingWindow(jnp.array(1), 2, offset=jnp.array(3)) & ~Lengths(None, jnp.array([4]))
    paths, _ = jax.tree_util.tree_flatten_with_path(mask)
    names = [(jax.tree_util.keystr(path), leaf.tolist()) for path, leaf in paths]
    assert names == [(".left.left", 1), (".left.offset", 3), (".right.mask.key_lengths", [4])]
    assert jax.tree.leaves(Causal(3) | PrefixLM(4) & SlidingWindow(None, 2)) == []


@every_mask
def test_operands_come_in_the_order_of_the_leaves(mask):
    for given in (mask, mask.resolve(Sizes(2, 2, 7, 7)), jax.tree.map(lambda x: x, mask)):
        leaves, operands = jax.tree.leaves(given), list(given.operands().values())
        assert len(leaves) == len(operands)
        assert all(x is operand.array for x, operand in zip(leaves, operands, strict=True))


def test_mask_is_a_jit_argument():
    closed_over = jax.jit(lambda: [mask.dense(7, batch=2, heads=2) for mask in MASKS])()
    np.testing.assert_array_equal(dense_each(MASKS, 7, batch=2, heads=2), closed_over)
    returned = jax.jit(lambda masks: masks)(MASKS)
    assert returned == MASKS
    assert [hash(x) for x in returned] == [hash(x) for x in MASKS]


def test_mask_values_do_not_retrace():
    traces = []

    @jax.jit
    def count(mask):
        traces.append(mask)
        return mask.dense(5)

    for offset in (0, 1, -7):
        count(Causal(jnp.array(offset)) & Segments(jnp.array([0, 1, 2, offset, 0])))
    assert len(traces) == 1
    for _ in range(3):
        count(SlidingWindow(2, 1))
        count(BlockSparse(np.ones((2, 2), bool), 4) | PrefixLM(1))
    assert len(traces) == 3
    count(SlidingWindow(2, 2))
    assert len(traces) == 4


def test_mask_maps_over_its_leaves():
    windows, offsets = [0, 2, 5], [1, 0, -2]
    mask = SlidingWindow(jnp.array(windows), offset=jnp.array(offsets)) | Lengths(None, 1)
    got = jax.vmap(lambda m: m.dense(5, 11))(mask)
    for i, (window, offset) in enumerate(zip(windows, offsets, strict=True)):
        rule = lambda b, h, q, k, w=window, o=offset: -w <= k - q - o <= 0 or k < 1
        np.testing.assert_array_equal(got[i], by_rule(rule, 5, 11))


def test_mask_maps_over_some_of_its_leaves():
    ids, lengths = [[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], 4
    mask = Segments(jnp.array(ids)) & Lengths(None, jnp.array(lengths))
    axes = jax.tree.map(lambda x: 0 if x.ndim == 2 else None, mask)
    got = jax.vmap(lambda m: m.dense(5), in_axes=(axes,))(mask)
    for i, row in enumerate(ids):
        rule = lambda b, h, q, k, row=row: row[q] == row[k] and k < lengths
        np.testing.assert_array_equal(got[i], by_rule(rule, 5, 5))


def test_mask_scans_over_stacked_layers():
    windows = [0, 3, 1]
    layers = [SlidingWindow(jnp.array(w)) & Dense(np.ones((1, 2, 1, 5), bool)) for w in windows]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    _, got = jax.lax.scan(lambda carry, m: (carry, m.dense(5)), None, stacked)
    for i, window in enumerate(windows):
        wanted = by_rule(lambda b, h, q, k, w=window: 0 <= q - k <= w, 5, 5, heads=2)
        np.testing.assert_array_equal(got[i], wanted)


def test_masks_compare_by_value():
    for left, right in zip(make_masks(), make_masks(), strict=True):
        assert left == right
        assert hash(left) == hash(right)
    for i, j in itertools.combinations(range(len(MASKS)), 2):
        assert MASKS[i] != MASKS[j]
    assert Segments(np.array([0, 1])) == Segments(jnp.array([0, 1]))
    assert Segments(np.array([0, 1])) != Segments(np.array([0, 2]))
    assert Segments(np.array([0, 1])) != Segments(np.array([0, 1], np.int8))
    assert Causal(1) != Causal(jnp.array(1))
    assert Causal(align="end") != Causal()
    assert BlockSparse([[True]], 2) != BlockSparse([[True]], 4)
    assert Causal() & Causal(1) != Causal(1) & Causal()
    assert Causal() & Causal() != Causal() | Causal()
    assert Causal() != 0
    assert Causal() is not None


def test_custom_masks_compare_by_the_identity_of_their_function():
    operands = lambda: {"shift": Operand(np.array([1]), "b"), "weight": Operand(np.array([2]), "h")}
    assert CustomMask(modular, **operands()) == CustomMask(modular, **operands())
    assert CustomMask(modular, **operands()) != CustomMask(lambda *x, **y: modular(*x, **y), **operands())
    assert CustomMask(threshold) != CustomMask(threshold, threshold_bounds)
    assert CustomMask(threshold, score=Operand(np.zeros(2), "q")) != CustomMask(
        threshold, score=Operand(np.zeros(2), "k")
    )


def test_equality_and_hash_take_tracers():
    seen = []

    @jax.jit
    def compare(offset, ids):
        one, two = Causal(offset) & Segments(ids), Causal(offset + 0) & Segments(ids)
        seen.extend((one == one, one == two, Causal(offset) == Causal(1)))
        seen.append(hash(one) == hash(two))
        return offset

    compare(1, jnp.arange(3))
    assert seen == [True, False, False, True]


def test_mask_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Causal().offset = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        del (Causal() & Causal()).left


def test_mask_fields_can_be_replaced():
    mask = dataclasses.replace(SlidingWindow(1), left=jnp.array(2))
    assert mask == SlidingWindow(jnp.array(2))
    assert len(jax.tree.leaves(mask)) == 1


# ---- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "sizes", "picture"),
    [
        (Causal(), (3,), "█··\n██·\n███"),
        (Causal(align="end"), (2, 4), "███·\n████"),
        (~SlidingWindow(0), (3,), "·██\n█·█\n██·"),
        (Lengths(1, 2) | SlidingWindow(0), (3, 4), "██··\n·█··\n··█·"),
        (Causal(), (1,), "█"),
        (Causal(), (0,), ""),
    ],
    ids=range(6),
)
def test_picture_draws_one_character_per_pair(mask, sizes, picture):
    assert mask.picture(*sizes) == picture


def test_picture_draws_blocks_of_a_large_mask():
    assert Causal().picture(6, width=3) == "▒··\n█▒·\n██▒"
    assert Causal().picture(7, width=3) == "▒··\n█▒·\n███"
    assert BlockSparse([[True, False], [False, True]], 100).picture(200, width=4) == "██··\n██··\n··██\n··██"
    assert SlidingWindow(1).picture(2, 8, width=4) == "▒···"
    lines = Causal().picture(300, 200).splitlines()
    assert len(lines) == 60
    assert {len(line) for line in lines} == {40}
    assert lines[10] == "█" * 10 + "▒" + "·" * 29
    assert lines[45] == "█" * 40


def test_picture_draws_the_row_and_head_that_is_asked_for():
    by_row = Lengths(None, np.array([1, 2]))
    by_head = CustomMask(lambda b, h, q, k, x: k >= x, x=Operand(np.array([0, 1]), "h"))
    assert by_row.picture(1, 3) == "█··"
    assert by_row.picture(1, 3, row=1) == "██·"
    assert (by_row & by_head).picture(1, 3, row=1, head=1) == "·█·"
    assert Causal(align="end").picture(2, 3, row=1, key_value_seq_lengths=np.array([3, 2])) == "█··\n██·"


# ---- what the kernels ask of a mask ------------------------------------------------------------------

SPANNED = [
    Causal(),
    Causal(offset=-5),
    Causal(offset=jnp.array([-30, 4])),
    Causal(align="end"),
    SlidingWindow(4),
    SlidingWindow(3, 7, offset=2),
    SlidingWindow(None, 2),
    SlidingWindow(jnp.array([2, 9]), None),
    PrefixLM(6),
    PrefixLM(jnp.array([0, 30])),
    Lengths(9, 20),
    Lengths(key_lengths=jnp.array([0, 17])),
    Lengths(query_lengths=jnp.array([3, 40])),
    Causal() & SlidingWindow(5, 5),
    Causal(offset=-9) | Lengths(key_lengths=3),
    SlidingWindow(2) | SlidingWindow(0, 4, offset=20),
]


@pytest.mark.parametrize("mask", SPANNED)
@pytest.mark.parametrize("run", [1, 7, 16])
@pytest.mark.parametrize("method", ["span", "seen_by"])
def test_span_bounds_what_sees_and_is_seen(mask, run, method):
    t, s = 32, 27
    seen = np.asarray(mask.dense(t, s, batch=2))[:, 0]
    if method == "seen_by":
        seen = seen.swapaxes(1, 2)
    resolved = mask.resolve(Sizes(2, 1, t, s))
    other = np.arange(seen.shape[2])
    for b in range(2):
        operands = {n: x.array[b % x.array.shape[0], 0, 0, 0] for n, x in resolved.operands().items()}
        for first in range(0, seen.shape[1] - run + 1, 5):
            span = getattr(resolved, method)(
                b, 0, Range(jnp.int32(first), jnp.int32(first + run - 1)), **operands
            )
            tile = seen[b, first : first + run]
            inside = lambda r: (other >= int(r.lo)) & (other <= int(r.hi))
            assert not tile[:, ~inside(span.seen)].any()
            assert tile[:, inside(span.whole)].all()


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(3, 3), Causal() & SlidingWindow(4), PrefixLM(3), Lengths(9, 9)], ids=str
)
def test_span_is_not_vacuous(mask):
    resolved = mask.resolve(Sizes(1, 1, 16, 16))
    span = resolved.span(0, 0, Range(jnp.int32(5), jnp.int32(6)))
    assert int(span.seen.hi) < 15
    assert int(span.whole.hi) >= max(0, int(span.whole.lo))
    span = resolved.seen_by(0, 0, Range(jnp.int32(5), jnp.int32(6)))
    assert int(span.seen.lo) > 0 or int(span.seen.hi) < 15
    assert min(15, int(span.whole.hi)) >= max(0, int(span.whole.lo))


@pytest.mark.parametrize(
    "mask",
    [Segments(np.arange(8) // 3), BlockSparse([[True]], 8), ~Causal(), Causal() & Segments([0] * 8)],
)
def test_span_is_unknown_where_there_is_no_closed_form(mask):
    resolved = mask.resolve(Sizes(1, 1, 8, 8))
    operands = {name: x.array for name, x in resolved.operands().items()}
    assert resolved.span(0, 0, Range(jnp.int32(0), jnp.int32(3)), **operands) is None
    assert resolved.seen_by(0, 0, Range(jnp.int32(0), jnp.int32(3)), **operands) is None


@pytest.mark.parametrize(
    "mask",
    [
        *SPANNED,
        Segments(np.arange(32) // 5),
        Segments(np.arange(32) // 5) & Causal(),
        Segments(np.arange(32) // 5, np.arange(32) // 7),
        SlidingWindow(3, offset=4),
        SlidingWindow(4, offset=4),
        SlidingWindow(9, 0, offset=-1),
        SlidingWindow(9, 1, offset=-1),
        ~Causal(offset=-1),
        Causal(offset=-1) | SlidingWindow(0),
    ],
)
def test_shows_own_is_said_only_where_it_is_true(mask):
    own = np.asarray(mask.dense(32, batch=2))[:, 0].diagonal(axis1=1, axis2=2)
    assert own.all() or not mask.resolve(Sizes(2, 1, 32, 32)).shows_own()


def test_shows_own_knows_the_masks_of_self_attention():
    ids = jnp.zeros(32, jnp.int32)
    for mask in (Causal(), SlidingWindow(8), PrefixLM(jnp.array(3)), Segments(ids), Segments(ids) & Causal()):
        assert mask.resolve(Sizes(1, 1, 32, 32)).shows_own()


def test_segments_compare_by_value_whether_or_not_keys_are_given():
    ids = np.arange(4) // 2
    assert Segments(ids) == Segments(ids, ids.copy())
    assert hash(Segments(ids)) == hash(Segments(ids, ids.copy()))

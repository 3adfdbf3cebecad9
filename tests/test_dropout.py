"""The dropout hash: its bits, its statistics, and that it depends on global indices alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import dropout

MASK = 0xFFFFFFFF


# ---- the hash again, in plain integers -------------------------------------------------------------


def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def words_of(data):
    first = second = 0
    for word in data:
        first = mix(first ^ word)
        second = mix((second + (word ^ 0x9E3779B9)) & MASK)
    return first, second


def row_words_of(words, b, h, q):
    first, second = words
    row_a = mix((q + mix((h + mix(b ^ first)) & MASK)) & MASK)
    return row_a | 1, mix(q ^ mix(h ^ mix((b + second) & MASK))) | 1


def column_word_of(words, k):
    first, second = words
    pair = k & ~8
    return mix((pair + mix((first + second) & MASK)) & MASK) | 1


def join_of(column, row_a, row_b):
    x = column * row_a & MASK
    return (x ^ (x >> 15)) * row_b & MASK


def bits_of(words, b, h, q, k):
    x = join_of(column_word_of(words, k), *row_words_of(words, b, h, q))
    return (x >> 16 if k & 8 else x) & 0x7FFF


# ---- helpers ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))
def keep_all(words, sizes, rate, starts=(0, 0, 0, 0)):
    """Return the keep mask of ``sizes = (B, N, T, S)`` from the given first indices on."""
    b, h, q, k = jnp.ix_(
        *(start + jnp.arange(n, dtype=jnp.int32) for start, n in zip(starts, sizes, strict=True))
    )
    return dropout.keep((words[0], words[1]), b, h, q, k, rate)


def signs(seed, sizes, **options):
    """Return the keep mask at rate 1/2 as +1 and -1."""
    keep = keep_all(dropout.key_words(jax.random.key(seed)), sizes, 0.5, **options)
    return np.where(keep, 1, -1).astype(np.float64)


def halves(x):
    """Split the last axis, key positions from a multiple of 16 on, into those of lower and upper halves."""
    x = x.reshape(*x.shape[:-1], -1, 2, 8)
    return (x[..., i, :].reshape(*x.shape[:-3], -1) for i in (0, 1))


def both_halves(x):
    """Return +-1 rows of lower halves, of upper halves and of their products, ``[3 rows, samples]``.

    In these, every row meets every other and itself, also a half of one the other half of the other.
    """
    low, high = halves(x.reshape(-1, x.shape[-1]))
    return np.concatenate([low, high, low * high])


def check_independent(masks, dropped):
    """Assert that boolean arrays, False with probability ``dropped``, are independent where they align."""
    pattern = sum(mask.astype(np.int64) << i for i, mask in enumerate(masks))
    counts = np.bincount(pattern.ravel(), minlength=2 ** len(masks))
    kept = np.array([n.bit_count() for n in range(len(counts))])
    wanted = pattern.size * (1 - dropped) ** kept * dropped ** (len(masks) - kept)
    freedom = len(counts) - 1
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


def check_uncorrelated(rows):
    """Assert that +-1 rows ``[rows, samples]`` have correlations as small as chance makes them."""
    count, samples = rows.shape
    z = (rows @ rows.T / np.sqrt(samples))[np.triu_indices(count, 1)]
    # Each z is standard normal: bound the largest by its tail, the mean square by its deviation.
    assert np.abs(z).max() < np.sqrt(2 * np.log(len(z))) + 2
    assert abs((z**2).mean() - 1) < 4 * np.sqrt(2 / len(z))
    # None of them leans to one side.
    assert np.abs(rows.sum(1)).max() < (np.sqrt(2 * np.log(count)) + 2) * np.sqrt(samples)


# ---- bits ------------------------------------------------------------------------------------------

# Key data, (batch, head, query, key), bits. A kernel on other hardware must give the same.
GOLDEN = [
    ((0, 0), (0, 0, 0, 0), 0x3D42),
    ((0, 0), (0, 0, 0, 1), 0x5158),
    ((0, 0), (0, 0, 0, 8), 0x188A),
    ((0, 0), (0, 0, 0, 9), 0x2F20),
    ((0, 0), (0, 0, 0, 16), 0x4683),
    ((0, 0), (0, 0, 1, 0), 0x7780),
    ((0, 0), (0, 1, 0, 0), 0x0A7C),
    ((0, 0), (1, 0, 0, 0), 0x3381),
    ((0, 42), (3, 7, 1000, 4095), 0x3E8E),
    ((0, 42), (3, 7, 1000, 4087), 0x57D7),
    ((0xDEADBEEF, 0x12345678), (255, 63, 1048575, 16777221), 0x5FBB),
    ((0xDEADBEEF, 0x12345678), (255, 63, 1048575, 16777229), 0x3375),
    ((0xFFFFFFFF, 0xFFFFFFFF), (2147483647, 2147483647, 2147483647, 2147483647), 0x2813),
    ((1, 2, 3, 4), (1, 2, 3, 4), 0x3C20),
]


@pytest.mark.parametrize(("data", "index", "bits"), GOLDEN)
def test_keep_golden_bits(data, index, bits):
    assert bits_of(words_of(data), *index) == bits
    words = dropout.key_words(jnp.array(data, jnp.uint32))
    index = [jnp.array(i, jnp.int32) for i in index]
    # Bits at or above the threshold keep the weight: these two rates pin every bit.
    assert dropout.keep((words[0], words[1]), *index, bits / 2**15)
    assert not dropout.keep((words[0], words[1]), *index, (bits + 1) / 2**15)


WORDS = [
    ((0, 0), (0x00000000, 0xA0117BE9)),
    ((0, 42), (0x172733C2, 0x9539AAD4)),
    ((0xDEADBEEF, 0x12345678), (0xB2B6CAB4, 0x45E6CCBC)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0x9945545D, 0xA186B5DC)),
    ((1, 2, 3, 4), (0x934ADDD8, 0xCF840973)),
]


@pytest.mark.parametrize(("data", "words"), WORDS)
def test_key_words_golden_values(data, words):
    assert words_of(data) == words
    got = dropout.key_words(jnp.array(data, jnp.uint32))
    assert got.dtype == jnp.uint32
    assert tuple(got.tolist()) == words


def test_keep_follows_the_integer_definition():
    data, sizes, starts = (123, 456), (2, 3, 5, 7), (1, 30, 1000, 2**31 - 8)
    bits = np.empty(sizes, np.int64)
    for index in np.ndindex(*sizes):
        bits[index] = bits_of(words_of(data), *(i + j for i, j in zip(index, starts, strict=True)))
    words = dropout.key_words(jnp.array(data, jnp.uint32))
    for rate in (0.1, 0.5, 0.9):
        np.testing.assert_array_equal(keep_all(words, sizes, rate, starts), bits >= round(rate * 2**15))


def test_parts_of_the_hash_follow_the_integer_definition():
    words = words_of((123, 456))
    traced = tuple(dropout.key_words(jnp.array((123, 456), jnp.uint32)))
    for b, h, q, k in [(0, 0, 0, 0), (1, 30, 1000, 8), (255, 63, 2**20 - 1, 2**24 + 7), (3, 2, 1, 2**31 - 1)]:
        index = [jnp.array(i, jnp.int32) for i in (b, h, q)]
        row_a, row_b = dropout.row_words(traced, *index)
        column = dropout.column_words(traced, jnp.array(k, jnp.int32))
        x = dropout.join(column, row_a, row_b)
        assert {y.dtype for y in (row_a, row_b, column, x)} == {jnp.dtype(jnp.uint32)}
        assert (int(row_a), int(row_b)) == row_words_of(words, b, h, q)
        assert int(column) == column_word_of(words, k) == column_word_of(words, k ^ 8)
        assert int(x) == join_of(int(column), int(row_a), int(row_b))


def test_decide_takes_the_half_of_the_key():
    x = jnp.array([0x0000FFFF, 0xFFFF0000, 0x12345678, 0x56781234], jnp.uint32)[:, None]
    k = jnp.array([0, 7, 8, 15, 16, 24, 2**31 - 9, 2**31 - 1], jnp.int32)
    bits = np.where(k & 8, x >> 16, x).astype(np.int64) & 0x7FFF
    for number in (0, 1, 0x1233, 0x1234, 0x1235, 0x5678, 0x5679, 0x7FFE, 0x7FFF):
        np.testing.assert_array_equal(dropout.decide(x, k, number / 2**15), bits >= number)


def test_halves_of_a_word_are_in_the_order_of_half_precision_numbers():
    # A kernel compares two halves at once, as bfloat16: up to 0.99 that is the order of their bits.
    bits = np.arange(2**15, dtype=np.uint16)
    for rate in (2**-15, 0.001, 0.1, 0.5, 0.99):
        least = np.uint16(dropout.threshold(rate))
        number, limit = (jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.bfloat16) for x in (bits, least))
        below = np.asarray(number, np.float32) < np.float32(limit)
        np.testing.assert_array_equal(below, bits < least)


def test_key_words_agree_for_typed_and_raw_keys():
    for seed in (0, 7, 2**31 - 1):
        typed, raw = jax.random.key(seed), jax.random.PRNGKey(seed)
        np.testing.assert_array_equal(dropout.key_words(typed), dropout.key_words(raw))
        assert words_of(raw.tolist()) == tuple(dropout.key_words(typed).tolist())


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_key_words_take_every_kind_of_key(implementation):
    keys = [jax.random.key(seed, impl=implementation) for seed in range(4)]
    words = [tuple(dropout.key_words(key).tolist()) for key in keys]
    assert words == [words_of(jax.random.key_data(key).tolist()) for key in keys]
    assert len({word for pair in words for word in pair}) == 8


def test_key_words_differ_between_keys_and_map():
    keys = jax.random.split(jax.random.key(0), 2000)
    words = np.asarray(jax.jit(jax.vmap(dropout.key_words))(keys))
    assert words.shape == (2000, 2)
    assert len(np.unique(words[:, 0])) > 1990
    assert len({tuple(x) for x in words.tolist()}) == 2000
    np.testing.assert_array_equal(words[5], dropout.key_words(keys[5]))


def test_key_words_use_every_word_of_the_key():
    base = [1, 2, 3, 4]
    seen = {words_of(base)}
    for i in range(4):
        changed = jnp.array([x + (i == j) for j, x in enumerate(base)], jnp.uint32)
        seen.add(tuple(dropout.key_words(changed).tolist()))
    assert len(seen) == 5
    assert len({x for x, _ in seen}) == 5


def test_threshold_is_the_rate_in_15_bits():
    assert dropout.threshold(0.0) == 0
    assert dropout.threshold(0.5) == 2**14
    assert dropout.threshold(0.25) == 2**13
    assert dropout.threshold(0.1) == 3277
    assert dropout.threshold(0.4 / 2**15) == 0
    assert dropout.threshold(0.6 / 2**15) == 1
    assert dropout.threshold(1 - 1 / 2**15) == 2**15 - 1
    assert dropout.threshold(float(np.nextafter(1, 0))) == 2**15 - 1


def test_keep_at_rate_zero_keeps_everything():
    assert keep_all(dropout.key_words(jax.random.key(0)), (1, 1, 64, 64), 0.0).all()


# ---- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_keep_drops_at_the_rate(rate):
    sizes = (2, 2, 256, 256)
    counted = dropout.threshold(rate) / 2**15
    assert abs(counted - rate) <= 2**-16
    rate = counted
    for seed in range(4):
        keep = np.asarray(keep_all(dropout.key_words(jax.random.key(seed)), sizes, rate))
        sigma = np.sqrt(rate * (1 - rate) / keep.size)
        assert abs((1 - keep.mean()) - rate) < 4 * sigma
        # Also within each row, head and key position, up to the largest of many deviations.
        for axes in ((3,), (2,), (2, 3), (0, 1, 3), (0, 1, 2)):
            dropped = (~keep).mean(axes)
            count = keep.size // dropped.size
            if count * min(rate, 1 - rate) > 20:
                largest = np.abs(dropped - rate).max() / np.sqrt(rate * (1 - rate) / count)
                assert largest < np.sqrt(2 * np.log(dropped.size)) + 2.5


@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (0, 0, 10**6, 10**7)], ids=["near", "far"])
@pytest.mark.parametrize("seed", [0, 1])
def test_keep_rows_and_columns_are_uncorrelated(seed, starts):
    x = signs(seed, (1, 1, 512, 512), starts=starts)[0, 0]
    check_uncorrelated(x)
    check_uncorrelated(x.T)


def test_keep_heads_batch_rows_and_keys_are_uncorrelated():
    x = signs(0, (16, 16, 48, 48))
    check_uncorrelated(x.reshape(256, -1))
    check_uncorrelated(x[0].reshape(16, -1))
    check_uncorrelated(x[:, 0].reshape(16, -1))
    check_uncorrelated(np.stack([signs(seed, (1, 1, 48, 48)).ravel() for seed in range(64)]))


def test_keep_of_split_keys_is_uncorrelated():
    words = jax.vmap(dropout.key_words)(jax.random.split(jax.random.key(0), 64))
    keep = jax.vmap(lambda w: keep_all(w, (1, 1, 48, 48), 0.5))(words)
    check_uncorrelated(np.where(keep, 1.0, -1.0).reshape(64, -1))


NEAR = (-17, -16, -15, -9, -8, -7, -3, -2, -1, 0, 1, 2, 3, 7, 8, 9, 15, 16, 17)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keep_neighbours_are_uncorrelated(seed):
    x = signs(seed, (2, 2, 256, 256))
    for shift in itertools.product((0, 1), (0, 1), (0, 1, 2, 3), NEAR):
        if shift == (0, 0, 0, 0):
            continue
        near = tuple(slice(max(0, s), n + min(0, s)) for s, n in zip(shift, x.shape, strict=True))
        far = tuple(slice(max(0, -s), n + min(0, -s)) for s, n in zip(shift, x.shape, strict=True))
        product = x[near] * x[far]
        assert abs(product.sum()) < 5 * np.sqrt(product.size), shift


@pytest.mark.parametrize("seed", [0, 1])
def test_keep_rectangles_are_uncorrelated(seed):
    """Rows and columns are hashed apart and joined in one round: four corners must not conspire."""
    x = signs(seed, (1, 1, 512, 512))[0, 0]
    for dq, dk in itertools.product((1, 2, 3, 7, 8, 9, 64, 255), repeat=2):
        product = x[dq:, dk:] * x[:-dq, dk:] * x[dq:, :-dk] * x[:-dq, :-dk]
        assert abs(product.sum()) < 5 * np.sqrt(product.size), (dq, dk)


def test_keep_rows_do_not_repeat_under_any_shift_of_the_keys():
    x = signs(0, (1, 1, 64, 1024))[0, 0]
    spectrum = np.fft.rfft(x, axis=1)
    rows, others = np.triu_indices(64, 1)
    correlation = np.fft.irfft(spectrum[rows] * spectrum[others].conj(), axis=1) / np.sqrt(1024)
    assert np.abs(correlation).max() < np.sqrt(2 * np.log(correlation.size)) + 2


@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (0, 0, 10**6, 10**7)], ids=["near", "far"])
@pytest.mark.parametrize("seed", [0, 1])
def test_keep_halves_of_a_word_are_uncorrelated(seed, starts):
    check_uncorrelated(both_halves(signs(seed, (1, 1, 512, 1024), starts=starts)))
    check_uncorrelated(both_halves(signs(seed, (16, 16, 1, 2048), starts=starts)))
    low, high = halves(signs(seed, (1, 1, 1024, 512), starts=starts)[0, 0])
    check_uncorrelated(np.concatenate([low.T, high.T, (low * high).T]))


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
def test_keep_halves_of_a_word_are_independent_with_those_nearby(rate):
    """At rates other than 1/2 too, where more than the top bit of each half decides."""
    dropped = dropout.threshold(rate) / 2**15
    low, high = halves(np.asarray(keep_all(dropout.key_words(jax.random.key(0)), (2, 2, 256, 1024), rate)))
    check_independent([low, high], dropped)
    for shift in itertools.product((0, 1), (0, 1), (0, 1, 2, 3), (-8, -7, -1, 0, 1, 7, 8)):
        if shift == (0, 0, 0, 0):
            continue
        near = tuple(slice(max(0, s), n + min(0, s)) for s, n in zip(shift, low.shape, strict=True))
        far = tuple(slice(max(0, -s), n + min(0, -s)) for s, n in zip(shift, low.shape, strict=True))
        check_independent([low[near], high[near], low[far], high[far]], dropped)


def test_keep_rows_do_not_repeat_halves_or_their_products_under_any_shift_of_the_keys():
    x = signs(0, (1, 1, 48, 2048))[0, 0]
    low = (np.arange(2048) & 8) == 0
    x = np.concatenate([x * low, x * ~low, x * np.roll(x, -8, axis=1) * low])  # each at its keys, 0 between
    spectrum, rest = np.fft.rfft(x, axis=1), np.fft.rfft(x != 0, axis=1)
    rows, others = np.triu_indices(len(x), 1)
    total, count = (np.fft.irfft(y[rows] * y[others].conj(), axis=1) for y in (spectrum, rest))
    correlation = total / np.sqrt(np.maximum(count, 1))
    assert np.abs(correlation).max() < np.sqrt(2 * np.log(correlation.size)) + 2


def test_keep_rows_that_share_one_of_their_words_are_uncorrelated():
    words = dropout.key_words(jax.random.key(1))
    rows = np.random.default_rng(0).integers(0, 2**31, (3, 2**18), np.uint64)
    row_words = row_words_of([int(x) for x in words], *rows)
    pairs = 0
    for word in row_words:  # equal by chance in about 8 pairs each
        order = np.argsort(word)
        for i in np.flatnonzero(np.diff(word[order]) == 0):
            starts = [(*rows[:, row].tolist(), 0) for row in order[i : i + 2]]
            one, two = (np.asarray(keep_all(words, (1, 1, 1, 4096), 0.5, start)) for start in starts)
            assert abs((one == two).mean() - 0.5) < 4 * 0.5 / np.sqrt(4096)
            check_uncorrelated(both_halves(np.where(np.stack([one, two]), 1.0, -1.0)))
            pairs += 1
    assert pairs > 4


# ---- global indices --------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(2, 2, 40, 24), (1, 1, 1, 24), (1, 2, 40, 1), (1, 1, 8, 8), (1, 1, 7, 11)])
def test_keep_does_not_depend_on_tiles(tile):
    sizes, rate = (2, 2, 40, 24), 0.3
    words = dropout.key_words(jax.random.key(3))
    whole = np.asarray(keep_all(words, sizes, rate))
    for start in itertools.product(*(range(0, n, m) for n, m in zip(sizes, tile, strict=True))):
        start = tuple(min(i, n - m) for i, n, m in zip(start, sizes, tile, strict=True))
        part = whole[tuple(slice(i, i + m) for i, m in zip(start, tile, strict=True))]
        np.testing.assert_array_equal(keep_all(words, tile, rate, jnp.array(start, jnp.int32)), part)


def test_keep_does_not_depend_on_the_layout_of_indices():
    words = tuple(dropout.key_words(jax.random.key(4)))
    keep = jax.jit(lambda *index: dropout.keep(words, *index, 0.4))
    b, h, q, k = np.ix_(*(np.arange(n, dtype=np.int32) for n in (2, 3, 16, 8)))
    wanted = np.asarray(keep(b, h, q, k))
    full = np.broadcast_arrays(b, h, q, k)
    np.testing.assert_array_equal(keep(*full), wanted)
    turned = [x.transpose(3, 1, 0, 2) for x in (b, h, q, k)]
    np.testing.assert_array_equal(keep(*turned), wanted.transpose(3, 1, 0, 2))
    flat = [x.ravel() for x in full]
    np.testing.assert_array_equal(keep(*flat), wanted.ravel())


def test_keep_takes_a_key_per_batch_row():
    keys = [jax.random.key(seed) for seed in (5, 6)]
    words = np.stack([dropout.key_words(key) for key in keys]).reshape(2, 2, 1, 1, 1)
    index = np.ix_(*(np.arange(n, dtype=np.int32) for n in (2, 1, 16, 8)))
    got = jax.jit(lambda words, *index: dropout.keep(words, *index, 0.5))((words[:, 0], words[:, 1]), *index)
    for row, key in enumerate(keys):
        alone = keep_all(dropout.key_words(key), (1, 1, 16, 8), 0.5, (row, 0, 0, 0))
        np.testing.assert_array_equal(got[row], alone[0])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_keep_is_the_same_in_64_bit_mode(dtype):
    sizes = (2, 2, 40, 24)
    wanted = np.asarray(keep_all(dropout.key_words(jax.random.key(3)), sizes, 0.3))
    with jax.enable_x64(True):
        words = dropout.key_words(jax.random.key(3))
        assert words.dtype == jnp.uint32
        index = np.ix_(*(np.arange(n, dtype=dtype) for n in sizes))
        got = jax.jit(lambda *index: dropout.keep((words[0], words[1]), *index, 0.3))(*index)
        np.testing.assert_array_equal(got, wanted)
        raw = dropout.key_words(jax.random.PRNGKey(3))
        np.testing.assert_array_equal(raw, words)


# ---- cost ------------------------------------------------------------------------------------------


def trace_keep(sizes):
    arrays = [jnp.zeros((), jnp.uint32)] * 2 + [
        jnp.zeros([n if i == axis else 1 for i in range(4)], jnp.int32) for axis, n in enumerate(sizes)
    ]
    return jax.make_jaxpr(lambda first, second, *index: dropout.keep((first, second), *index, 0.1))(*arrays)


def test_keep_is_uint32_arithmetic_and_bit_operations():
    jaxpr = trace_keep((2, 3, 16, 8))
    arithmetic = {"add", "mul", "xor", "or", "and", "not", "shift_left", "shift_right_logical"}
    shapes = {"convert_element_type", "broadcast_in_dim", "reshape"}
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert arithmetic <= set(names)
    assert set(names) <= arithmetic | shapes | {"ge"}
    assert names.count("ge") == 1
    for equation in jaxpr.eqns:
        if equation.primitive.name in arithmetic | {"ge"}:
            assert {str(x.aval.dtype) for x in equation.invars} == {"uint32"}
    # A kernel cannot close over arrays: every constant is a literal.
    assert not jaxpr.consts


def test_keep_does_two_multiplications_per_weight():
    sizes = (2, 3, 16, 8)
    dense = [x for x in trace_keep(sizes).eqns if x.outvars[0].aval.shape == sizes]
    names = [x.primitive.name for x in dense if x.primitive.name != "broadcast_in_dim"]
    assert names.count("mul") == 2
    assert len(names) <= 10


def test_join_does_two_multiplications_for_two_weights():
    words = [jnp.zeros(shape, jnp.uint32) for shape in ((1, 4), (16, 1), (16, 1))]
    names = [x.primitive.name for x in jax.make_jaxpr(dropout.join)(*words).eqns]
    names = [name for name in names if name != "broadcast_in_dim"]
    assert names.count("mul") == 2
    assert len(names) <= 8

"""The weights of chosen rows are the rows of the dense softmax, whatever hides a key or changes a logit."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flashjax import (
    Alibi,
    BlockPattern,
    Causal,
    CustomMask,
    Lengths,
    Operand,
    RelativePositionBias,
    ScoreFunction,
    Segments,
    SlidingWindow,
    attention_weights,
    flash_attention,
)
from tests import budget
from tests.cases import CASES, case

B, T, S, N, K, D = 2, 11, 13, 4, 2, 8


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, KEY, V = normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)
SINKS = jnp.array([0.5, -jnp.inf, 2.0, 0.0])

# ---- values ----------------------------------------------------------------------------------------


def bend(score, b, h, q, k, at, slope, by_distance):
    """Change a logit by all that a score function may read: its positions and operands of every kind."""
    turned = jnp.where((q + k + b) % 3 == 0, -score, score) * slope
    return turned + by_distance - jnp.where(k > at, 0.5, 0.0).astype(score.dtype)


def shifted(score, b, h, q, k):
    return score + jnp.sin((q - 2 * k + h).astype(score.dtype))


def _normal(*axes):
    """Make an option: an array of the sizes that are named, by attribute of the case."""

    def make(c, rng):
        sizes = {"r": c.query_length + c.key_length - 1, "buckets": 8}
        shape = [a if isinstance(a, int) else sizes.get(a) or getattr(c, a) for a in axes]
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return make


def _bend(c, rng):
    return ScoreFunction(
        bend,
        at=Operand(jnp.asarray(rng.integers(0, c.key_length, (c.batch, c.query_length)), jnp.int32), "bq"),
        slope=Operand(_normal("heads", "key_length")(c, rng), "hk"),
        by_distance=Operand(_normal("r")(c, rng), "r"),
    )


def in_block(b, h, q, k, table):
    return table


def _blocks(c, rng):
    table = rng.random((c.heads, -(-c.query_length // 9), -(-c.key_length // 7))) < 0.5
    return CustomMask(in_block, table=Operand(jnp.asarray(table), "hqk", (9, 7)))


_buckets = lambda c, rng: RelativePositionBias(_normal("buckets", "heads")(c, rng), max_distance=20)
_alibi = lambda c, rng: jnp.asarray(rng.random((c.batch, c.heads)), jnp.float32)
_sinks = {"sinks": lambda c, rng: jnp.asarray([0.5, -jnp.inf, 2.0, 0.0])}

# What tests/cases.py does not have.
MORE = [
    case("block-pattern", (60, 70), mask=lambda c, rng: BlockPattern(7, local=1, strided=4, global_blocks=1)),
    case("lengths-mask", (60, 70), mask=lambda c, rng: Lengths(jnp.array([60, 31]), jnp.array([0, 50]))),
    case("custom-blocks", (60, 70), mask=_blocks),
    case("relative", (50, 70), (4, 2), options={"position_bias": _normal("heads", "r"), "is_causal": True}),
    case("relative-rows", (70, 50), options={"position_bias": _normal("batch", 1, "r"), "softcap": 2.0}),
    case("relative-of-one", 40, options={"position_bias": _normal("heads", 1)}),
    case("buckets", (50, 70), (4, 2), options={"position_bias": _buckets}),
    case("alibi", (50, 70), (4, 2), options={"alibi_slopes": _alibi, "is_causal": True}),
    case(
        "alibi-end",
        (50, 70),
        options={
            "alibi_slopes": lambda c, rng: Alibi(_alibi(c, rng), align="end"),
            "key_value_seq_lengths": lambda c, rng: jnp.array([70, 33]),
        },
    ),
    case("score-fn", (50, 70), options={"score_fn": lambda c, rng: shifted, "softcap": 3.0}),
    case("score-fn-operands", (50, 70), (4, 2), options={"score_fn": _bend, "local_window_size": (20, 9)}),
    case("sinks", (50, 70), (4, 2), options={**_sinks, "softcap": 2.0, "is_causal": True}),
    case("sinks-and-empty-rows", (50, 70), (4, 2), options=_sinks, mask=lambda c, rng: Causal(offset=-9)),
    case(
        "everything",
        (50, 70),
        (4, 2),
        bias=(2, 1, 50, 70),
        mask=lambda c, rng: SlidingWindow(30, 12) & ~Segments(jnp.arange(50) // 9, jnp.arange(70) // 6),
        options={
            **_sinks,
            "position_bias": _buckets,
            "alibi_slopes": _alibi,
            "score_fn": _bend,
            "scale": -0.4,
            "softcap": 5.0,
            "key_value_seq_lengths": lambda c, rng: jnp.array([66, 40]),
        },
    ),
]

# Of tests/cases.py one of each kind: no dropout, and no two that differ only in a backend's tiles.
NAMES = [
    "one",
    "group-8",
    "bfloat16",
    "both-lengths-causal-end",
    "window",
    "dense-full-shape",
    "dense-keys",
    "offset-rows",
    "segments",
    "prefix",
    "blocks",
    "custom",
    "composed",
    "nothing-visible",
    "bias",
    "bias-keys",
    "bias-queries-heads",
    "bias-bfloat16",
]
VALUES = [c for c in CASES if c.name in NAMES] + MORE


def test_names_are_cases():
    assert set(NAMES) <= {c.name for c in CASES}


def _rows(c):
    """Choose rows in no order, one of them twice."""
    last = c.query_length - 1
    return [last, 0, last // 2, last, min(c.query_length - 1, 7)]


def _identity(arrays):
    """Return values by which attention shows its weights: ``P I = P``."""
    batch, length, heads, _ = arrays["key"].shape
    return np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], (batch, length, heads, length))


def _arguments(c):
    """Return a case's arrays that may be float64, what else it takes, and the chosen rows."""
    arrays, options = c.arguments()
    for name in ("position_bias", "alibi_slopes", "sinks"):
        if isinstance(options.get(name), jax.Array):
            arrays[name] = options.pop(name)
    return arrays, options, _rows(c)


@pytest.mark.parametrize("c", VALUES, ids=lambda c: c.name)
def test_weights_are_rows_of_the_dense_softmax(c):
    arrays, options, rows = _arguments(c)
    with jax.enable_x64(True):
        dense = functools.partial(flash_attention, implementation="reference", return_residual=True)
        wide = {n: np.asarray(x, np.float64) for n, x in (arrays | {"value": _identity(arrays)}).items()}
        truth, lse = (np.asarray(x) for x in jax.jit(lambda a: dense(**a, **options))(wide))
    del arrays["value"]
    lse = lse.astype(np.float32)
    got = jax.jit(lambda a, lse: attention_weights(**a, lse=lse, rows=rows, **options))(arrays, lse)
    assert got.shape == (c.batch, c.heads, len(rows), c.key_length)
    assert got.dtype == jnp.float32
    truth = truth.swapaxes(1, 2)[:, :, rows]
    np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-37)
    np.testing.assert_array_equal(np.asarray(got)[truth == 0], 0)


@pytest.mark.parametrize(
    "c",
    [c for c in VALUES if c.name in ("bfloat16", "composed", "everything")],
    ids=lambda c: c.name,
)
def test_weights_times_values_are_rows_of_out(c):
    arrays, options, rows = _arguments(c)

    @jax.jit
    def ours(value, arrays):
        call = functools.partial(flash_attention, implementation="small-tiles", return_residual=True)
        out, lse = call(**arrays, value=value, **options)
        return attention_weights(**arrays, lse=lse, rows=rows, **options), out

    value = arrays.pop("value")
    p, out = (np.asarray(x, np.float64) for x in ours(value, arrays))
    value = np.repeat(np.asarray(value, np.float64), c.heads // c.kv_heads, 2)
    tolerance = {"float32": 3e-6}.get(c.dtype, 2 * float(jnp.finfo(c.dtype).eps))
    mixed = np.einsum("bnrs,bsnd->brnd", p, value)
    np.testing.assert_allclose(mixed, out[:, rows], rtol=tolerance, atol=tolerance)


def test_weights_in_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x), jnp.float64) for x in (Q, KEY, V))
        _, lse = flash_attention(q, k, v, is_causal=True, return_residual=True)
        p = attention_weights(q, k, lse, np.arange(T), is_causal=True)
        assert p.dtype == jnp.float64
        np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-14)


def test_rows_sum_to_one_less_the_share_of_the_sink():
    _, lse = flash_attention(Q, KEY, V, sinks=SINKS, is_causal=True, return_residual=True)
    p = attention_weights(Q, KEY, lse, np.arange(T), sinks=SINKS, is_causal=True)
    share = jnp.exp(SINKS[None, :, None] - lse.swapaxes(1, 2))
    np.testing.assert_allclose(p.sum(-1), 1 - share, rtol=1e-5)
    assert (share[:, 1] == 0).all(), "a head without a sink"
    assert share.max() > 0.5


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no-sinks", "sinks"])
def test_a_row_that_sees_nothing_has_no_weights(sinks):
    options = {"sinks": sinks, "query_seq_lengths": jnp.array([T, 3])}
    _, lse = flash_attention(Q, KEY, V, **options, return_residual=True)
    p = attention_weights(Q, KEY, lse, [2, 3], **options)
    np.testing.assert_array_equal(p[1, :, 1], 0)
    assert (p[0] > 0).all()
    assert (p[1, :, 0] > 0).all()


def test_nan_that_nobody_sees_stays_out():
    options = {"query_seq_lengths": jnp.array([T, 4]), "key_value_seq_lengths": jnp.array([9, 5])}
    rows = jnp.array([10, 1])

    def weights(q, k):
        _, lse = flash_attention(q, k, V, softcap=2.0, **options, return_residual=True)
        return attention_weights(q, k, lse, rows, softcap=2.0, **options)

    @jax.jit
    def run(q, k):
        p, pull = jax.vjp(weights, q, k)
        return p, *pull(jnp.cos(p))

    q = Q.at[1, 4:].set(jnp.nan)
    k = KEY.at[0, 9:].set(jnp.nan).at[1, 5:].set(jnp.inf)
    for a, b in zip(run(Q, KEY), run(q, k), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_in_a_key_reaches_only_rows_that_see_it():
    k = KEY.at[0, 6].set(jnp.nan)
    lse = flash_attention(Q, KEY, V, is_causal=True, return_residual=True)[1]
    p = attention_weights(Q, k, lse, [5, 6], is_causal=True)
    assert np.isfinite(p[0, :, 0]).all()
    assert np.isnan(p[0, :, 1, 6]).all()
    assert np.isfinite(p[1]).all()


# ---- shapes ----------------------------------------------------------------------------------------


def test_weights_without_a_batch():
    out, lse = flash_attention(Q[0], KEY[0], V[0], is_causal=True, return_residual=True)
    p = attention_weights(Q[0], KEY[0], lse, [3], is_causal=True)
    assert p.shape == (N, 1, S)
    mixed = jnp.einsum("nrs,snd->rnd", p, jnp.repeat(V[0], N // K, 1))
    np.testing.assert_allclose(mixed, out[jnp.array([3])], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(0, T, S, N), (B, 0, S, N), (B, T, 0, N), (B, T, S, 0)], ids=str)
def test_empty_calls_have_empty_weights(sizes):
    batch, t, s, n = sizes
    q, k = jnp.zeros((batch, t, n, D)), jnp.zeros((batch, s, n, D))
    _, lse = flash_attention(q, k, k, sinks=0.0, is_causal=True, return_residual=True)
    for rows in ([], [0, 1] if t else []):
        p = attention_weights(q, k, lse, rows, sinks=0.0, is_causal=True)
        assert p.shape == (batch, n, len(rows), s)
        assert p.dtype == jnp.float32


def test_nothing_of_the_size_of_the_map_is_allocated():
    length = 2**14
    shape = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    bias = jax.ShapeDtypeStruct((2, 2 * length - 1), jnp.float32)

    def run(q, k, v, rows, bias):
        options = {"mask": SlidingWindow(99) | Segments(jnp.arange(length) // 7), "position_bias": bias}
        _, lse = flash_attention(q, k, v, **options, return_residual=True)
        return attention_weights(q, k, lse, rows, **options)

    memory = jax.jit(run).lower(shape, shape, shape, rows, bias).compile().memory_analysis()
    assert memory.output_size_in_bytes == 2 * 4 * length * 4
    assert memory.temp_size_in_bytes < length * length / 8


# ---- transformations -------------------------------------------------------------------------------

OPTIONS = {
    "bias": normal(3, 1, N, T, S),
    "position_bias": normal(4, N, T + S - 1),
    "sinks": SINKS,
    "mask": Causal(offset=2) | Segments(jnp.arange(T) // 4, jnp.arange(S) // 3),
}


def test_traced_rows_trace_once_and_are_clipped():
    traces = []

    def counting(score, b, h, q, k):
        traces.append(None)
        return score + (q - k).astype(score.dtype)

    options = OPTIONS | {"score_fn": counting}
    _, lse = flash_attention(Q, KEY, V, **options, return_residual=True)
    whole = attention_weights(Q, KEY, lse, np.arange(T), **options)
    weights = jax.jit(lambda rows: attention_weights(Q, KEY, lse, rows, **options))
    for call in (weights, lambda rows: attention_weights(Q, KEY, lse, rows, **options)):
        traces.clear()
        for rows in ([0, 5, 10], [3, 2, 3], [9, 1, 0]):
            got = call(jnp.array(rows))
            np.testing.assert_allclose(got, whole[:, :, jnp.array(rows)], rtol=1e-6)
        assert len(traces) <= 1
    got = weights(jnp.array([-4, T, 2**30]))
    np.testing.assert_allclose(got, whole[:, :, jnp.array([0, T - 1, T - 1])], rtol=1e-6)


def test_weights_under_vmap_and_scan():
    _, lse = flash_attention(Q, KEY, V, **OPTIONS, return_residual=True)
    call = lambda rows: attention_weights(Q, KEY, lse, rows, **OPTIONS)
    rows = jnp.array([[0, 4], [10, 2], [3, 3]])
    wanted = jnp.stack([call(x) for x in rows])
    _, scanned = jax.lax.scan(lambda _, x: (None, call(x)), None, rows)
    for got in (jax.vmap(call)(rows), scanned):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_weights_have_derivatives_in_both_modes():
    with jax.enable_x64(True):
        wide = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x), jnp.float64))
        q, k, bias, distance = wide((Q, KEY, OPTIONS["bias"], OPTIONS["position_bias"]))
        fixed = {"softcap": 2.0, "mask": OPTIONS["mask"]}
        _, lse = flash_attention(q, k, k, bias, position_bias=distance, **fixed, return_residual=True)

        @jax.jit
        def call(q, k, bias, distance, scale):
            options = fixed | {"position_bias": distance, "scale": scale}
            return attention_weights(q, k, lse, [8, 1], bias, **options)

        check_grads(call, (q, k, bias, distance, jnp.asarray(0.3)), order=1, atol=1e-6, rtol=1e-6)


def test_gradient_through_lse_is_that_of_the_dense_softmax():
    rows = jnp.array([7, 0, 7])
    weight = normal(5, B, N, 3, S)
    options = {"mask": OPTIONS["mask"], "softcap": 2.0}
    arrays = {"query": Q, "key": KEY} | {n: OPTIONS[n] for n in ("bias", "position_bias", "sinks")}

    def ours(arrays):
        _, lse = flash_attention(**arrays, value=V, **options, return_residual=True)
        return jnp.sum(weight * attention_weights(**arrays, lse=lse, rows=rows, **options))

    def dense(arrays):
        p, _ = budget.plain_attention(**arrays, value=_identity(arrays), **options)
        return jnp.sum(weight * p.swapaxes(1, 2)[:, :, rows])

    got, wanted = jax.jit(lambda a: (jax.grad(ours)(a), jax.grad(dense)(a)))(arrays)
    for name, x in wanted.items():
        x = jnp.where(jnp.isfinite(x), x, 0)  # of a head without a sink
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


# ---- errors ----------------------------------------------------------------------------------------

LSE = jnp.zeros((B, T, N))
ERRORS = [
    ("row beyond", {"rows": [0, T]}, ValueError, ["rows holds 11", "query has length 11", "less than 11"]),
    ("row -1", {"rows": [-1]}, ValueError, ["rows holds -1", "at least 0", "query.shape[-3] - 1, not -1"]),
    ("row of an array", {"rows": jnp.array([3, T])}, ValueError, ["rows holds 11"]),
    ("row of uint8", {"rows": np.array([255], np.uint8)}, ValueError, ["rows holds 255"]),
    ("one row", {"rows": 3}, ValueError, ["rows has shape ()", "[R]", "[0, 7]"]),
    ("rows per batch", {"rows": np.zeros((B, 1), int)}, ValueError, ["rows has shape (2, 1)", "[R]"]),
    ("float rows", {"rows": [0.0]}, TypeError, ["rows has dtype float32", "must hold integers"]),
    ("bool rows", {"rows": np.ones(T, bool)}, TypeError, ["rows has dtype bool", "must hold integers"]),
    ("no rows", {"rows": None}, TypeError, ["rows is a NoneType", "must be an array"]),
    ("lse layout", {"lse": LSE.swapaxes(1, 2)}, ValueError,
     ["lse has shape (2, 4, 11)", "[B, T, N] = (2, 11, 4)", "return_residual=True"]),
    ("lse without batch", {"lse": LSE[0]}, ValueError, ["lse has shape (11, 4)", "[B, T, N] = (2, 11, 4)"]),
    ("lse with batch", {"query": Q[0], "key": KEY[0]}, ValueError, ["(2, 11, 4)", "[T, N] = (11, 4)"]),
    ("lse dtype", {"lse": LSE.astype(jnp.bfloat16)}, TypeError,
     ["lse has dtype bfloat16", "must be float32 for a query of float32", "return_residual=True"]),
    ("lse and out", {"lse": (Q, LSE)}, TypeError, ["lse is a tuple", "must be an array"]),
    # those of flash_attention
    ("key dtype", {"key": KEY.astype(jnp.bfloat16)}, TypeError, ["query is float32, key is bfloat16"]),
    ("bias shape", {"bias": jnp.zeros((S, T))}, ValueError, ["bias has shape (13, 11)", "[B, N, T, S]"]),
    ("mask dtype", {"mask": jnp.zeros((T, S))}, TypeError, ["mask has dtype float32", "must be boolean"]),
    ("sinks", {"sinks": jnp.zeros(3)}, ValueError, ["sinks has shape (3,)", "[heads] = [4]"]),
    ("softcap", {"softcap": 0.0}, ValueError, ["softcap is 0.0", "positive"]),
    ("position bias", {"position_bias": jnp.zeros((N, T + S))}, ValueError, ["position_bias", "T + S - 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "parts"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_errors_name_the_argument_and_what_it_must_be(changes, error, parts):
    with pytest.raises(error, match=".*".join(map(re.escape, parts))) as caught:
        attention_weights(**({"query": Q, "key": KEY, "lse": LSE, "rows": [0]} | changes))
    assert type(caught.value) is error


def test_dropout_is_no_argument():
    with pytest.raises(TypeError, match="dropout_rate"):
        attention_weights(Q, KEY, LSE, [0], dropout_rate=0.1)

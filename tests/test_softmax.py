"""The online softmax against the softmax of the whole row, and the merge of partial results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import softmax

ROWS, KEYS, DIM = 5, 24, 3

step, finish, merge = (jax.jit(f) for f in (softmax.step, softmax.finish, softmax.merge))


def direct(s, v):
    """Return ``(out, lse)`` of the whole row in float64; rows without a finite logit give (0, -inf)."""
    s, v = np.asarray(s, np.float64), np.asarray(v, np.float64)
    top = s.max(-1, keepdims=True)
    top[np.isinf(top)] = 0
    p = np.exp(s - top)
    l = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(l))[..., 0]
    return np.where(l > 0, p / np.where(l > 0, l, 1), 0) @ v, lse


@functools.partial(jax.jit, static_argnums=(2, 3), compiler_options={"xla_backend_optimization_level": 0})
def online(s, v, sizes, slack=0.0):
    """Return ``(out, lse)`` by steps over blocks of keys of the given sizes."""
    rows = s.shape[:-1]
    m, l = jnp.full(rows, -jnp.inf, s.dtype), jnp.zeros(rows, s.dtype)
    acc, start = jnp.zeros((*rows, v.shape[-1]), s.dtype), 0
    for size in sizes:
        p, alpha, m, l = softmax.step(m, l, s[..., start : start + size], slack=slack)
        acc = alpha[..., None] * acc + jnp.matmul(p, v[start : start + size], precision="highest")
        start += size
    inverse, lse = softmax.finish(m, l)
    return acc * inverse[..., None], lse


def draw(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    s = rng.normal(size=(ROWS, KEYS)) * scale
    return s.astype(np.float32), rng.normal(size=(KEYS, DIM)).astype(np.float32)


SLACKS = [0.0, 2.0]
SPLITS = [(24,), (8, 8, 8), (1, 1, 1, 21), (5, 12, 7), (23, 1)]


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_step_over_blocks_equals_the_softmax_of_the_row(sizes, slack):
    for scale in (0.0, 1.0, 30.0):
        s, v = draw(1, scale)
        out, lse = online(s, v, sizes, slack)
        wanted_out, wanted_lse = direct(s, v)
        np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_step_passes_over_masked_logits(sizes, slack):
    s, v = draw(2)
    s[0] = -np.inf  # an empty row
    s[1, :12] = -np.inf  # blocks at the start, at the end and in the middle that show nothing
    s[2, 12:] = -np.inf
    s[3, 5:17] = -np.inf
    s[4, np.arange(KEYS) != 7] = -np.inf
    out, lse = online(s, v, sizes, slack)
    wanted_out, wanted_lse = direct(s, v)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    assert out[0].tolist() == [0] * DIM
    assert lse[0] == -np.inf
    np.testing.assert_array_equal(out[4], v[7])


@pytest.mark.parametrize("size", [1e30, -1e30, 6e4, -6e4, 3e38, -3e38])
@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("sizes", [(24,), (5, 12, 7)], ids=str)
def test_step_takes_huge_logits(size, sizes, slack):
    s, v = draw(3)
    s[0] = size
    s[1, 3] = size
    s[2, 3:9] = -size
    s[3, ::2] = size
    s[4] = -np.inf
    s[4, 20] = size
    out, lse = online(s, v, sizes, slack)
    wanted_out, wanted_lse = direct(s, v)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)
    np.testing.assert_array_equal(out[4], v[20])


def test_step_moves_the_maximum_only_beyond_the_slack():
    m, l = np.zeros(4, np.float32), np.ones(4, np.float32)
    s = np.array([[-9, 1.5], [-9, 2.5], [-np.inf, -np.inf], [-9, np.nan]], np.float32)
    p, alpha, new, _ = map(np.asarray, softmax.step(m, l, s, slack=2.0))
    np.testing.assert_array_equal(new[:3], [0, 2.5, 0])
    assert alpha[0] == alpha[2] == 1
    np.testing.assert_allclose(alpha[1], np.exp(-2.5), rtol=1e-6)
    np.testing.assert_allclose(p[:2, 1], [np.exp(1.5), 1], rtol=1e-6)
    assert np.isnan(p[3, 1])
    first = softmax.step(np.full(4, -np.inf, np.float32), 0 * l, s, slack=2.0)
    np.testing.assert_array_equal(np.asarray(first[2])[:3], [1.5, 2.5, -np.inf])


def test_step_follows_the_worked_example():
    m, l = np.array([-np.inf], np.float32), np.zeros(1, np.float32)
    p, alpha, m, l = map(np.asarray, step(m, l, np.array([[1, 2]], np.float32)))
    np.testing.assert_allclose(p, [[np.exp(-1), 1]], rtol=1e-6)
    assert alpha == 0
    assert f"{m[0]:.0f} {l[0]:.3f}" == "2 1.368"
    p, alpha, m, new = map(np.asarray, step(m, l, np.array([[3, 0]], np.float32)))
    scaled, block = alpha[0] * l[0], p.sum()
    assert f"{m[0]:.0f} {scaled:.3f} {block:.3f} {new[0]:.3f}" == "3 0.503 1.050 1.553"
    inverse, lse = finish(m, new)
    np.testing.assert_allclose(inverse, 1 / new, rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(np.exp([1, 2, 3, 0]).sum())], rtol=1e-6)


def test_step_keeps_shapes_and_dtypes():
    for dtype in (jnp.float32, jnp.bfloat16):
        state = jax.ShapeDtypeStruct((2, 3), dtype)
        s = jax.ShapeDtypeStruct((2, 3, 7), dtype)
        results = jax.eval_shape(softmax.step, state, state, s)
        assert [x.shape for x in results] == [(2, 3, 7), (2, 3), (2, 3), (2, 3)]
        assert {x.dtype for x in results} == {jnp.dtype(dtype)}


def test_finish_of_an_empty_row_is_zero_and_minus_infinity():
    inverse, lse = finish(np.array([-np.inf, 2], np.float32), np.array([0, 4], np.float32))
    np.testing.assert_allclose(inverse, [0, 0.25])
    np.testing.assert_allclose(lse, [-np.inf, 2 + np.log(4)], rtol=1e-6)


def test_finish_takes_a_sink_as_begin_does():
    rng = np.random.default_rng(0)
    s = rng.standard_normal((4, 7)).astype(np.float32)
    s[2] = -np.inf
    sink = np.array([0.5, 30, -1, -np.inf], np.float32)
    v = rng.standard_normal((7, 3)).astype(np.float32)
    found = []
    for first, last in ((sink, None), (None, sink)):
        m, l = softmax.begin((4,), first, s)
        p, _, m, l = softmax.step(m, l, s)
        inverse, lse = softmax.finish(m, l, last)
        found.append((p @ v * inverse[:, None], lse))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *found)
    np.testing.assert_allclose(found[0][1], np.logaddexp(np.logaddexp.reduce(s, -1), sink), rtol=1e-6)
    # In another unit, as a kernel counts.
    m, l = softmax.begin((4,), None, s)
    unit = np.float32(np.log2(np.e))
    _, _, m, l = softmax.step(m, l, s, unit=unit, exp=jnp.exp2)
    _, lse = softmax.finish(m, l, sink * unit, exp=jnp.exp2, log=jnp.log2)
    np.testing.assert_allclose(lse / unit, found[0][1], rtol=1e-6)


def test_pivot_of_nothing_is_zero():
    m = np.array([-np.inf, -3e38, 0, 5], np.float32)
    np.testing.assert_array_equal(softmax.pivot_of(m), np.where(np.isinf(m), 0, m))


def test_weights_are_the_softmax_and_zero_in_empty_rows():
    s, v = draw(4)
    s[0] = -np.inf
    s[1, 3] = -np.inf
    s[2] = 1e30
    _, lse = direct(s, v)
    p = np.asarray(jax.jit(softmax.weights)(s, lse.astype(np.float32)))
    np.testing.assert_array_equal(p[0], 0)
    assert p[1, 3] == 0
    np.testing.assert_allclose(p.sum(-1), [0, 1, KEYS, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(p[3:], np.exp(s[3:] - lse[3:, None]), rtol=1e-5)


# ---- merge -----------------------------------------------------------------------------------------


def parts(s, v, *ends):
    """Cut the keys at ``ends``; return the partial ``(out, lse)`` of each piece as float32."""
    pieces = itertools.pairwise((0, *ends, KEYS))
    return [[np.float32(x) for x in direct(s[:, a:b], v[a:b])] for a, b in pieces]


def test_merge_of_two_parts_equals_the_whole():
    s, v = draw(5)
    s[0] = -np.inf
    s[1, :9] = -np.inf
    s[2, 9:] = -np.inf
    first, second = parts(s, v, 9)
    wanted = direct(s, v)
    for pair in ((first, second), (second, first)):
        out, lse = merge(*pair[0], *pair[1])
        np.testing.assert_allclose(out, wanted[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)


def test_merge_of_three_parts_is_the_same_in_any_order():
    s, v = draw(6)
    s[0, 5:] = -np.inf
    s[1, :17] = -np.inf
    s[2] *= 1e4
    wanted = direct(s, v)
    for a, b, c in itertools.permutations(parts(s, v, 5, 17)):
        for out, lse in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))):
            np.testing.assert_allclose(out, wanted[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)


def test_merge_of_two_empty_parts_stays_empty():
    out, lse = merge(np.zeros((1, DIM), np.float32), np.full(1, -np.inf, np.float32), *empty_part())
    assert out.tolist() == [[0] * DIM]
    assert lse.tolist() == [-np.inf]


def empty_part():
    return np.zeros((1, DIM), np.float32), np.full(1, -np.inf, np.float32)


@pytest.mark.parametrize("value", [1e30, -1e30, 6e4, 0.0])
def test_merge_with_an_empty_part_changes_nothing(value):
    out, lse = np.arange(DIM, dtype=np.float32)[None], np.full(1, value, np.float32)
    for got in (merge(out, lse, *empty_part()), merge(*empty_part(), out, lse)):
        np.testing.assert_array_equal(got[0], out)
        np.testing.assert_array_equal(got[1], lse)


def test_merge_takes_huge_logits():
    one, two = np.ones((4, DIM), np.float32), np.full((4, DIM), 3, np.float32)
    lse1 = np.array([1e30, 1e30, -1e30, 6e4], np.float32)
    lse2 = np.array([1e30, -1e30, -1e30, 6e4], np.float32)
    out, lse = merge(one, lse1, two, lse2)
    np.testing.assert_allclose(out[:, 0], [2, 1, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(lse, [1e30, 1e30, -1e30, 6e4 + np.log(2)], rtol=1e-6)


def test_merge_keeps_dtypes():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        out, lse = jax.eval_shape(
            softmax.merge, *(jax.ShapeDtypeStruct(*x) for x in (((2, DIM), dtype), ((2,), jnp.float32)) * 2)
        )
        assert (out.shape, out.dtype) == ((2, DIM), dtype)
        assert (lse.shape, lse.dtype) == ((2,), jnp.float32)


def test_merge_gradient_is_that_of_the_formula():
    s, v = draw(7)
    (out1, lse1), (out2, lse2) = parts(s, v, 9)
    rng = np.random.default_rng(0)
    dout, dlse = (rng.normal(size=x.shape).astype(np.float32) for x in (out1, lse1))
    pull = jax.jit(lambda primals, cotangents: jax.vjp(softmax.merge, *primals)[1](cotangents))
    got = pull((out1, lse1, out2, lse2), (dout, dlse))
    # With w = exp(lse1 - L): d out/d out1 = w, d out/d lse1 = w (1 - w) (out1 - out2), d L/d lse1 = w.
    w = 1 / (1 + np.exp(np.float64(lse2) - lse1))
    slope = w * (1 - w) * (dout * (np.float64(out1) - out2)).sum(-1)
    wanted = (w[:, None] * dout, slope + w * dlse, (1 - w)[:, None] * dout, -slope + (1 - w) * dlse)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_merge_gradient_is_finite_where_parts_are_empty_or_huge():
    lse1 = np.array([-np.inf, -np.inf, 0.5, 1e30, -1e30, 6e4], np.float32)
    lse2 = np.array([-np.inf, 0.5, -np.inf, -1e30, -1e30, -np.inf], np.float32)
    out1, out2 = (np.outer(lse > -np.inf, np.full(DIM, x, np.float32)) for lse, x in ((lse1, 1), (lse2, 3)))

    def total(out1, lse1, out2, lse2):
        out, lse = softmax.merge(out1, lse1, out2, lse2)
        return jnp.sum(out) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(out1, lse1, out2, lse2)
    assert all(np.isfinite(x).all() for x in gradients)
    share = np.array([0, 0, 1, 1, 0.5, 1])
    other = np.array([0, 1, 0, 0, 0.5, 0])
    slope = share * other * DIM * (1 - 3)
    gradients = [np.asarray(x) for x in gradients]
    np.testing.assert_allclose(gradients[0][:, 0], share)
    np.testing.assert_allclose(gradients[1], share + slope, rtol=1e-6)
    np.testing.assert_allclose(gradients[2][:, 0], other)
    np.testing.assert_allclose(gradients[3], other - slope, rtol=1e-6)


def test_merge_gradient_passes_through_a_masked_part():
    """A part made empty by the mask must send zero, not NaN, to the logits before it."""

    def total(s):
        masked = jnp.where(jnp.arange(4) < 2, s, -jnp.inf)
        lse = []
        for half in (masked[:, :2], masked[:, 2:]):
            m = jnp.max(half, -1)
            lse.append(softmax.finish(m, jnp.sum(jnp.exp(half - softmax.pivot_of(m)[:, None]), -1))[1])
        out = jnp.ones((1, DIM))
        return jnp.sum(softmax.merge(out, lse[0], out, lse[1])[1])

    s = np.array([[0.3, -0.2, 1, 2]], np.float32)
    wanted = [1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5)), 0, 0]
    np.testing.assert_allclose(jax.jit(jax.grad(total))(s), [wanted], rtol=1e-5)

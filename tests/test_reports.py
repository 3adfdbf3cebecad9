"""Failures that users reported of attention libraries; each kind must be impossible here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import Causal, Lengths, Segments, SlidingWindow, flash_attention

NAN = jnp.float32(jnp.nan)


def inputs(
    batch=2, length=20, keys=None, heads=2, kv_heads=None, dim=8, value_dim=None, dtype="float32", seed=0
):
    keys, kv_heads, value_dim = keys or length, kv_heads or heads, value_dim or dim
    rngs = jax.random.split(jax.random.key(seed), 3)
    shapes = (batch, length, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim)
    return tuple(jax.random.normal(k, s).astype(dtype) for k, s in zip(rngs, shapes, strict=True))


def with_gradients(implementation="small-tiles", **options):
    """Return a jitted ``f(q, k, v, dout=None) -> (out, lse, dq, dk, dv)``; every output weighs by default."""

    @jax.jit
    def run(q, k, v, dout=None):
        call = functools.partial(
            flash_attention, **options, implementation=implementation, return_residual=True
        )
        (out, lse), pull = jax.vjp(call, q, k, v)
        if dout is None:
            dout = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
        return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), 1, 0).astype(lse.dtype)))

    return run


def close(got, wanted, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, wanted)


def equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# ---- dead slots ------------------------------------------------------------------------------------

T, S = 45, 50
LIVE_Q, LIVE_K = jnp.array([30, 0]), jnp.array([17, 41])
IDS = jnp.stack([jnp.where(jnp.arange(S) < n, 1, 2) for n in (17, 41)])
DEAD = {
    "key-lengths": {"key_value_seq_lengths": LIVE_K},
    "key-lengths-causal": {"key_value_seq_lengths": LIVE_K, "is_causal": True},
    "both-lengths": {"query_seq_lengths": LIVE_Q, "key_value_seq_lengths": LIVE_K},
    "segments": {"mask": Segments(jnp.ones((2, T), jnp.int32), IDS)},
    "boolean": {"mask": (IDS == 1)[:, None, None, :]},
    "bias-too": {"key_value_seq_lengths": LIVE_K, "bias": jnp.ones((1, 1, T, S)), "softcap": 3.0},
    "dropout": {"key_value_seq_lengths": LIVE_K, "dropout_rate": 0.4, "dropout_key": jax.random.key(1)},
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_slots_may_hold_anything(name):
    q, k, v = inputs(length=T, keys=S)
    dead = (jnp.arange(S) >= LIVE_K[:, None])[..., None, None]
    dead_q = (jnp.arange(T) >= LIVE_Q[:, None])[..., None, None] & (name == "both-lengths")
    fill = lambda x, where, value: jnp.where(where, jnp.float32(value), x)
    run = with_gradients(**DEAD[name])
    clean = run(fill(q, dead_q, 0), fill(k, dead, 0), fill(v, dead, 0))
    for bad in (np.nan, np.inf):
        poisoned = run(fill(q, dead_q, bad), fill(k, dead, bad), fill(v, dead, bad))
        equal(poisoned, clean)
        for gradient in poisoned[3:]:
            assert not np.asarray(jnp.where(dead, gradient, 0)).any()


def test_nan_in_the_cotangent_of_a_dead_row_stays_there():
    q, k, v = inputs()
    lengths = jnp.array([20, 9])
    dead = (jnp.arange(20) >= lengths[:, None])[..., None, None]
    dout = jnp.where(dead, NAN, 1.0) * jnp.ones_like(q)
    run = with_gradients(query_seq_lengths=lengths)
    equal(run(q, k, v, dout), run(q, k, v, jnp.where(dead, 0, dout)))


# ---- empty rows and empty arrays -------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "small-tiles", "reference"])
def test_rows_that_see_nothing_are_zero(implementation):
    q, k, v = inputs(length=40)
    rows = jnp.array([0, 7, 20, 39])
    mask = jnp.ones((2, 1, 40, 40), bool).at[1, :, rows].set(False)
    out, lse, dq, _dk, _dv = with_gradients(implementation, mask=mask)(q, k, v)
    assert not np.asarray(out[1, rows]).any()
    assert (np.asarray(lse[1, rows]) == -np.inf).all()
    assert not np.asarray(dq[1, rows]).any()
    free = np.setdiff1d(np.arange(40), rows)
    plain = flash_attention(q, k, v)
    close(out[0], plain[0])
    close(out[1, free], plain[1, free])


def test_nothing_visible_gives_zeros_and_zero_gradients():
    out, lse, *gradients = with_gradients(key_value_seq_lengths=jnp.array([0, 0]))(*inputs())
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
    assert not any(np.asarray(g).any() for g in gradients)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "keys", "heads"), [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)]
)
def test_empty_arrays_give_empty_results(batch, length, keys, heads, jit):
    q, k, v = (jnp.zeros((batch, n, heads, 4)) for n in (length, keys, keys))
    run = jax.value_and_grad(
        lambda q, k, v: flash_attention(q, k, v, is_causal=True).sum(), argnums=(0, 1, 2)
    )
    value, gradients = (jax.jit(run) if jit else run)(q, k, v)
    assert value == 0
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    out, lse = flash_attention(q, k, v, return_residual=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (np.asarray(lse) == -np.inf).all()
    assert not any(np.asarray(g).any() for g in gradients)


def test_zero_length_rows_in_a_ragged_batch_leave_the_others_alone():
    q, k, v = inputs(batch=4, heads=4, kv_heads=1, length=1, keys=30)
    lengths = jnp.array([0, 30, 0, 7])
    run = with_gradients(query_seq_lengths=jnp.array([0, 1, 1, 1]), key_value_seq_lengths=lengths)
    got = run(q, k, v)
    for row, n in ((1, 30), (3, 7)):
        one = slice(row, row + 1)
        out, lse = flash_attention(q[one], k[one, :n], v[one, :n], return_residual=True)
        close(got[0][one], out)
        close(got[1][one], lse)
    assert all(np.isfinite(np.asarray(g)).all() for g in got[2:])
    assert not np.asarray(got[0])[[0, 2]].any()


# ---- arguments that were ignored elsewhere ---------------------------------------------------------


def test_each_length_works_alone():
    q, k, v = inputs()
    out = flash_attention(q, k, v, query_seq_lengths=jnp.array([3, 20]))
    assert not np.asarray(out[0, 3:]).any()
    close(out[1], flash_attention(q, k, v)[1])
    out = flash_attention(q, k, v, key_value_seq_lengths=jnp.array([3, 20]))
    close(out[0], flash_attention(q[:1], k[:1, :3], v[:1, :3])[0])


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 0), (2, 4), (None, 0), (0, None), (30, 30)])
def test_window_shows_exactly_its_keys(left, right):
    # With v = I the output row is the row of weights.
    q, k, _ = inputs(batch=1, heads=1)
    v = jnp.eye(20)[None, :, None, :]
    weights = np.asarray(flash_attention(q, k, v, local_window_size=(left, right)))[0, :, 0]
    for i in range(20):
        low = 0 if left is None else max(0, i - left)
        high = 19 if right is None else min(19, i + right)
        assert (np.flatnonzero(weights[i]) == np.arange(low, high + 1)).all()


def test_segments_isolate_documents():
    q, k, v = inputs(batch=1, length=60)
    ids = jnp.repeat(jnp.arange(2), jnp.array([33, 27]), total_repeat_length=60)
    mask = Segments(ids) & Causal()
    run = with_gradients(mask=mask)
    first = run(q, k, v)
    other = [x.at[:, :33].add(1.0) for x in (q, k, v)]
    second = run(*other)
    equal([x[:, 33:] for x in first], [x[:, 33:] for x in second])
    only = jnp.zeros_like(q).at[:, 33:].set(1.0)
    _, pull = jax.vjp(lambda *x: flash_attention(*x, mask=mask), q, k, v)
    gradients = pull(only)
    assert not any(np.asarray(g[:, :33]).any() for g in gradients)
    assert all(np.asarray(g[:, 33:]).any() for g in gradients)


def test_packed_documents_equal_the_documents_alone():
    sizes = [5, 31, 1, 13]
    q, k, v = inputs(batch=1, length=64, heads=4, kv_heads=2)
    ids = jnp.repeat(jnp.arange(5), jnp.array([*sizes, 64 - sum(sizes)]), total_repeat_length=64)
    mask = Segments(ids) & SlidingWindow(7)
    got = with_gradients(mask=mask)(q, k, v, jnp.ones_like(q))
    alone = with_gradients(mask=SlidingWindow(7))
    start = 0
    for n in sizes:
        part = slice(start, start + n)
        wanted = alone(q[:, part], k[:, part], v[:, part], jnp.ones_like(q[:, part]))
        close([x[:, part] for x in got], list(wanted))
        start += n


# ---- alignment -------------------------------------------------------------------------------------


def test_causal_end_gives_the_last_rows_of_the_full_call():
    q, k, v = inputs(length=40)
    full = flash_attention(q, k, v, is_causal=True)
    for n in (1, 3, 40):
        close(flash_attention(q[:, -n:], k, v, mask=Causal(align="end")), full[:, -n:])


def test_causal_end_with_more_queries_than_keys_has_empty_rows():
    out, lse, *gradients = with_gradients(mask=Causal(align="end"))(*inputs(length=40, keys=11))
    assert not np.asarray(out[:, :29]).any()
    assert (np.asarray(lse[:, :29]) == -np.inf).all()
    assert np.isfinite(np.asarray(lse[:, 29:])).all()
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)
    assert not np.asarray(gradients[0][:, :29]).any()


def test_left_padded_rows_equal_the_unpadded_ones():
    q, k, v = inputs(length=24, heads=4, kv_heads=2)
    pad = 9
    real = jnp.arange(24) >= pad
    out = flash_attention(q, k, v, mask=real[None, None, None, :], is_causal=True)
    close(out[:, pad:], flash_attention(q[:, pad:], k[:, pad:], v[:, pad:], is_causal=True))
    assert np.isfinite(np.asarray(out)).all()


def test_chunked_prefill_equals_one_shot():
    q, k, v = inputs(length=50)
    full = flash_attention(q, k, v, is_causal=True)
    cache_k, cache_v = jnp.full_like(k, NAN), jnp.full_like(v, NAN)
    start = 0
    step = jax.jit(
        lambda q, k, v, offset: flash_attention(
            q, k, v, mask=Causal(offset) & Lengths(key_lengths=offset + q.shape[1])
        )
    )
    for n in (1, 16, 16, 17):
        part = slice(start, start + n)
        cache_k, cache_v = cache_k.at[:, part].set(k[:, part]), cache_v.at[:, part].set(v[:, part])
        close(step(q[:, part], cache_k, cache_v, jnp.array(start)), full[:, part])
        start += n


# ---- tiles, heads, dims ----------------------------------------------------------------------------


def test_results_do_not_depend_on_tile_sizes_and_repeat_bit_for_bit():
    q, k, v = inputs(length=77, keys=101, heads=4, kv_heads=2)
    options = {"mask": Causal(align="end"), "deterministic": True}
    run = with_gradients(**options)
    first = run(q, k, v)
    for _ in range(20):
        equal(run(q, k, v), first)
    close(first, with_gradients("xla", **options)(q, k, v))


@pytest.mark.parametrize("group", [1, 3, 5])
def test_query_heads_read_their_own_key_head(group):
    q, k, v = inputs(heads=2 * group, kv_heads=2)
    run = with_gradients()
    got = run(q, k, v)
    wide = run(q, jnp.repeat(k, group, 2), jnp.repeat(v, group, 2))
    close(got[:3], wide[:3])
    for a, b in zip(got[3:], wide[3:], strict=True):
        close(a, b.reshape(*b.shape[:2], 2, group, -1).sum(3))


def test_more_rows_and_heads_than_a_grid_axis_holds():
    q, k, v = inputs(batch=70_000, length=2, keys=3, heads=1, dim=2)
    got = jax.jit(flash_attention)(q, k, v)
    close(got[-3:], flash_attention(q[-3:], k[-3:], v[-3:]))
    q, k, v = (x.swapaxes(0, 2) for x in (q, k, v))
    got = jax.jit(flash_attention)(q, k, v)
    close(got[:, :, -3:], flash_attention(q[:, :, -3:], k[:, :, -3:], v[:, :, -3:]))


def test_views_equal_their_copies():
    base = jax.random.normal(jax.random.key(0), (2, 3, 4, 40, 8))

    @jax.jit
    def views(base):
        q, k = base[:, 0].swapaxes(1, 2), base[:, 1].swapaxes(1, 2)[:, ::2]
        v = jnp.broadcast_to(base[:, 2, :1].swapaxes(1, 2)[:, ::2], k.shape)
        return flash_attention(q, k, v, is_causal=True), (q, k, v)

    out, copies = views(base)
    close(out, flash_attention(*copies, is_causal=True))


# ---- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_huge_equal_inputs_are_finite(dtype):
    x = jnp.full((1, 5, 1, 64), 200.0, dtype)
    for got in with_gradients(is_causal=True)(x, x, x):
        assert np.isfinite(np.asarray(got, np.float32)).all()
    np.testing.assert_allclose(np.asarray(flash_attention(x, x, x), np.float32), 200.0)


def test_a_single_key_returns_its_value():
    q, k, v = inputs(length=5, keys=1)
    close(flash_attention(q * 1e3, k * 1e3, v), jnp.broadcast_to(v, q.shape), rtol=0, atol=0)


def test_shifted_logits_give_the_same_weights():
    q, k, v = inputs()
    for shift in (1e4, -1e4):
        bias = jnp.full((1, 1, 20, 20), shift)
        close(flash_attention(q, k, v, bias), flash_attention(q, k, v), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [float(jnp.finfo(jnp.float32).min), -np.inf])
def test_a_least_bias_equals_a_mask(value):
    q, k, v = inputs(length=30)
    hidden = jnp.arange(30) % 3 == 1
    bias = jnp.where(hidden, jnp.float32(value), 0)[None, None, None]
    got = with_gradients(bias=bias, is_causal=True)(q, k, v)
    close(got, with_gradients(mask=~hidden[None, None, None], is_causal=True)(q, k, v))


def test_softcap_saturates_and_comes_before_the_mask():
    q, k, v = inputs(batch=1, heads=1)
    _, lse = flash_attention(q * 1e20, k, v, softcap=5.0, is_causal=True, return_residual=True)
    count = jnp.log(jnp.arange(1, 21, dtype=jnp.float32))[None, :, None]
    assert (np.abs(np.asarray(lse - count)) <= 5.0 + 1e-4).all()
    huge = with_gradients(softcap=5.0, is_causal=True)(q * 1e20, k, v)
    assert all(np.isfinite(np.asarray(x)).all() for x in huge)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.7, None])
def test_scale_is_a_value_like_any_other(scale, traced):
    q, k, v = inputs()
    if traced and scale is not None:
        out = jax.jit(lambda s: flash_attention(q, k, v, scale=s))(scale)
    else:
        out = flash_attention(q, k, v, scale=scale)
    close(out, jax.nn.dot_product_attention(q, k, v, scale=scale))


def test_precision_highest_is_float32_exact_in_both_passes():
    arrays = inputs(length=40, dim=64)
    got = with_gradients(precision="highest")(*arrays)
    close(got, with_gradients("reference")(*arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16", "float32"])
def test_results_have_the_dtypes_of_the_inputs(q_dtype):
    q, k, v = inputs(dtype=q_dtype)
    bias = jnp.zeros((1, 2, 20, 20), jnp.float32)
    (out, lse), pull = jax.vjp(lambda *x: flash_attention(*x, return_residual=True), q, k, v, bias)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    assert not out.weak_type
    assert [g.dtype for g in pull((out, lse))] == [q.dtype, q.dtype, q.dtype, jnp.float32]


# ---- dropout ---------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_key_and_position():
    q, k, _ = inputs(batch=1, heads=3, length=40)
    v = jnp.broadcast_to(jnp.eye(40)[None, :, None], (1, 40, 3, 40))
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
    kept = {
        name: np.asarray(flash_attention(q, k, v, **options, implementation=name)) != 0
        for name in ("xla", "small-tiles", "reference")
    }
    np.testing.assert_array_equal(kept["xla"], kept["reference"])
    np.testing.assert_array_equal(kept["small-tiles"], kept["reference"])
    np.testing.assert_array_equal(
        np.asarray(flash_attention(q[:, :11], k, v, **options)) != 0, kept["xla"][:, :11]
    )
    assert abs(kept["xla"].mean() - 0.7) < 0.03


def test_dropout_leaves_lse_and_keeps_the_mean():
    q, k, v = inputs(length=200, dim=4)
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    _, lse = flash_attention(q, k, v, return_residual=True)
    _, dropped = flash_attention(q, k, v, **options, return_residual=True)
    close(dropped, lse)
    ones = flash_attention(q * 0, k, jnp.ones_like(v), **options)
    assert abs(float(ones.mean()) - 1) < 0.02


# ---- sharded masks ---------------------------------------------------------------------------------


def test_plain_jit_over_sharded_arrays_equals_one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    q, k, v = inputs(batch=4, heads=4)
    mask = jnp.tril(jnp.ones((1, 1, 20, 20), bool))
    run = jax.jit(
        jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(flash_attention(*x, mask=mask))), argnums=(0, 1, 2))
    )
    close(run(*(jax.device_put(x, spec) for x in (q, k, v))), run(q, k, v))

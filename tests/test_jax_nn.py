"""A call written for `jax.nn.dot_product_attention` runs unchanged and gives the same answer."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import flash_attention

B, T, S, N, K, D = 2, 19, 27, 4, 2, 8
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


Q, KEY, V = normal(B, T, N, D), normal(B, S, K, D), normal(B, S, K, D)
MASK = jnp.asarray(RNG.random((B, N, T, S)) < 0.7).at[..., 0].set(True)

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": normal(B, N, T, S)},
    "bias-1NTS": {"bias": normal(1, N, T, S)},
    "bias-B11S": {"bias": normal(B, 1, 1, S)},
    "mask": {"mask": MASK},
    "mask-B11S": {"mask": MASK[:, :1, :1]},
    "mask-1NT1": {"mask": MASK[:1, :, :, :1]},
    "mask-NTS": {"mask": MASK[0]},
    "mask-11TS-causal": {"mask": MASK[:1, :1], "is_causal": True},
    "mask-and-bias": {"mask": MASK, "bias": normal(1, 1, T, S)},
    "window-int": {"local_window_size": 6},
    "window-pair": {"local_window_size": (9, 2)},
    "window-causal": {"local_window_size": (4, 0), "is_causal": True},
    "key-lengths": {"key_value_seq_lengths": jnp.array([S, 5], jnp.int32)},
    "query-lengths": {"query_seq_lengths": jnp.array([T, 7], jnp.int32)},
    "both-lengths": {
        "query_seq_lengths": jnp.array([3, T], jnp.int32),
        "key_value_seq_lengths": jnp.array([11, 20], jnp.int32),
        "is_causal": True,
    },
}


def test_flash_attention_accepts_every_argument_of_jax_nn():
    ours = inspect.signature(flash_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert set(theirs) <= set(ours)
    assert list(ours)[:5] == list(theirs)[:5]
    assert all(
        ours[n].kind == p.kind and ours[n].default == p.default for n, p in theirs.items() if n != "args"
    )


@pytest.mark.parametrize("name", CALLS)
def test_flash_attention_equals_jax_nn(name):
    # Rows that see nothing differ by design: in these calls there are none, or jax.nn zeroes them too.
    options = CALLS[name]
    dout = jnp.cos(jnp.arange(Q.size, dtype=jnp.float32)).reshape(Q.shape)

    def both(attention):
        @jax.jit
        def run(q, k, v):
            out, pull = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
            return out, pull(dout)

        return run(Q, KEY, V)

    for got, wanted in zip(
        *(jax.tree.leaves(both(f)) for f in (flash_attention, jax.nn.dot_product_attention)), strict=True
    ):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"bias": normal(N, T, S)}, {"mask": MASK[0], "is_causal": True}])
def test_flash_attention_takes_three_dimensions(options):
    arguments = (Q[0], KEY[0], V[0])
    out, lse = flash_attention(*arguments, **options, return_residual=True)
    wanted, residual = jax.nn.dot_product_attention(*arguments, **options, return_residual=True)
    assert out.shape == (T, N, D)
    assert lse.shape == (T, N)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, residual, rtol=1e-4, atol=1e-5)


def test_flash_attention_lse_equals_jax_nn_and_stays_float32():
    half = [x.astype(jnp.bfloat16) for x in (Q, KEY, V)]
    _, lse = flash_attention(*half, return_residual=True)
    with jax.numpy_dtype_promotion("standard"):
        _, wanted = jax.nn.dot_product_attention(*half, return_residual=True)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, wanted.astype(jnp.float32), atol=0.02)


def test_flash_attention_takes_numpy_arrays():
    got = flash_attention(np.asarray(Q), np.asarray(KEY), np.asarray(V), mask=np.asarray(MASK))
    np.testing.assert_array_equal(got, flash_attention(Q, KEY, V, mask=MASK))

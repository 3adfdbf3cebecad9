"""Nothing quadratic is allocated, and nothing is traced twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from flashjax import BlockSparse, Causal, PrefixLM, Segments, SlidingWindow, backends, flash_attention

LONG = 2**17

CALLS = {
    "full": lambda: {},
    "causal": lambda: {"is_causal": True},
    "causal-end": lambda: {"mask": Causal(align="end")},
    "window": lambda: {"local_window_size": (1024, 0)},
    "segments": lambda: {"mask": Segments(jnp.zeros((1, LONG), jnp.int32))},
    "segments-window": lambda: {"mask": Segments(jnp.zeros(LONG, jnp.int32)) & SlidingWindow(1024)},
    "lengths": lambda: {"key_value_seq_lengths": jnp.array([LONG - 7]), "query_seq_lengths": jnp.array([9])},
    "prefix": lambda: {"mask": PrefixLM(jnp.array([100]))},
    "blocks": lambda: {"mask": BlockSparse(jnp.ones((64, 64), bool), LONG // 64)},
    "key-mask": lambda: {"mask": jnp.ones((1, 1, 1, LONG), bool)},
    "key-bias": lambda: {"bias": jnp.zeros((1, 1, 1, LONG))},
    "softcap": lambda: {"softcap": 30.0},
    "dropout": lambda: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    "ragged": lambda: {"is_causal": True, "cut": 13},
}


def largest_array(jaxpr) -> int:
    """Return the number of elements of the largest array anywhere in a jaxpr."""
    most = 0
    for equation in jaxpr.eqns:
        most = max([most, *(getattr(x.aval, "size", 0) for x in equation.outvars)])
        for inner in jaxprs_in_params(equation.params):
            most = max(most, largest_array(inner))
    return most


@pytest.mark.parametrize("name", CALLS)
def test_flash_attention_allocates_nothing_quadratic(name):
    options = CALLS[name]()
    length = LONG - options.pop("cut", 0)
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    bias = options.pop("bias", None)

    def loss(q, k, v, bias):
        out, lse = flash_attention(q, k, v, bias, **options, return_residual=True)
        return jnp.sum(out) + jnp.sum(lse)

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3) if bias is not None else (0, 1, 2)))(
        shape, shape, shape, bias
    )
    assert largest_array(jaxpr.jaxpr) <= 2 * LONG * 8


def test_largest_array_sees_the_score_matrix_of_jax_nn():
    shape = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.jit(jax.nn.dot_product_attention))(shape, shape, shape)
    assert largest_array(jaxpr.jaxpr) >= 1024 * 1024


@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_compiled_memory_is_linear(is_causal):
    def temp(length):
        shape = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
        run = jax.grad(lambda *x: flash_attention(*x, is_causal=is_causal).sum(), argnums=(0, 1, 2))
        return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    small, large = temp(4096), temp(16384)
    assert large <= 4.2 * small


def test_flash_attention_memory_is_a_twentieth_of_jax_nn():
    def temp(attention):
        shape = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)

        def run(q, k, v, dout):
            return jax.vjp(lambda *x: attention(*x, is_causal=True), q, k, v)[1](dout)

        compiled = jax.jit(run).lower(*[shape] * 4).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert 20 * temp(flash_attention) <= temp(jax.nn.dot_product_attention)


def test_flash_attention_runs_a_long_sequence():
    # One query in a thousand is checked: a window's exact answer needs only its own keys.
    length, window = 32768, 100
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, 1, 16))
    out = flash_attention(q, k, v, mask=SlidingWindow(window))
    for i in range(0, length, length // 32):
        low = max(0, i - window)
        wanted = jax.nn.dot_product_attention(q[:, i : i + 1], k[:, low : i + 1], v[:, low : i + 1])
        np.testing.assert_allclose(out[:, i : i + 1], wanted, rtol=1e-4, atol=1e-5)


# ---- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """Count how often a backend's forward and backward are traced."""
    counts = {"forward": 0, "backward": 0}
    real = next(x for x in backends.BACKENDS if x.name == "xla")

    def forward(*args):
        counts["forward"] += 1
        return real.forward(*args)

    def backward(*args):
        counts["backward"] += 1
        return real.backward(*args)

    counting = real._replace(forward=forward, backward=backward)
    monkeypatch.setattr(backends, "BACKENDS", tuple(counting if x is real else x for x in backends.BACKENDS))
    return counts


def test_flash_attention_values_do_not_retrace(traces):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 2, 8))

    def call(step):
        mask = Segments(jnp.arange(16) // (step + 2)) & Causal(offset=jnp.array(step))
        mask = mask & (jnp.arange(16) > step)
        return jax.grad(
            lambda q: flash_attention(
                q,
                k,
                v,
                mask=mask & SlidingWindow(5, 1),
                scale=0.1 * step,
                key_value_seq_lengths=jnp.array([step, 16]),
                dropout_rate=0.1,
                dropout_key=jax.random.key(step),
            ).sum()
        )(q)

    call(0)
    first = dict(traces)
    for step in range(1, 4):
        call(step)
    assert first["backward"] == 1
    assert traces == first


def test_flash_attention_static_options_retrace_once_each(traces):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
    for _ in range(2):
        for window in (3, 5):
            flash_attention(q, k, v, mask=SlidingWindow(window))
    assert traces["forward"] == 2

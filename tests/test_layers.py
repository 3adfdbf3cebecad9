"""The Flax adapters against the stock functions and layers of Flax."""

import functools
import inspect
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flashjax
from flashjax import UnsupportedError
from flashjax.layers import common
from flashjax.layers import linen as flash_linen
from flashjax.layers import nnx as flash_nnx

ADAPTERS = [
    pytest.param(flash_linen.attention_fn, id="linen"),
    pytest.param(flash_nnx.attention_fn, id="nnx"),
]
both = pytest.mark.parametrize("attention_fn", ADAPTERS)

LENGTH, HEADS, DIM, FEATURES = 6, 2, 4, 8


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(*batch, query_length=LENGTH, key_length=LENGTH, heads=HEADS, kv_heads=HEADS, dtype=jnp.float32):
    return (
        normal(1, *batch, query_length, heads, DIM, dtype=dtype),
        normal(2, *batch, key_length, kv_heads, DIM, dtype=dtype),
        normal(3, *batch, key_length, kv_heads, DIM, dtype=dtype),
    )


def some_mask(*shape, dtype=bool):
    """Return a boolean array in which every row sees its first key and some others."""
    mask = np.random.default_rng(4).random(shape) < 0.5
    mask[..., 0] = True
    return mask.astype(dtype)


def assert_close(got, want, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def assert_same_derivatives(f, g, *arguments):
    """Compare two functions in value and in the gradient of a loss by every argument."""
    weights = normal(9, *jax.eval_shape(f, *arguments).shape)
    argnums = tuple(range(len(arguments)))

    def derive(function, weights, arguments):
        def loss(*arguments):
            out = function(*arguments)
            return jnp.sum(out * weights), out

        return jax.value_and_grad(loss, argnums, has_aux=True)(*arguments)

    both = jax.jit(lambda *operands: (derive(f, *operands), derive(g, *operands)))
    got, want = both(weights, arguments)
    assert_close(got[0][1], want[0][1])
    assert_close(got[1], want[1], 1e-5)


# ---- the functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention_fn", "batch"),
    [
        (flash_linen.attention_fn, ()),
        (flash_nnx.attention_fn, (1, 2, 2)),
    ],
    ids=["linen-0", "nnx-3"],
)
def test_attention_fn_any_number_of_batch_dimensions_equals_stock(attention_fn, batch):
    mask = some_mask(*batch, HEADS, LENGTH, LENGTH)
    bias = normal(5, *batch, HEADS, LENGTH, LENGTH)
    assert_same_derivatives(
        lambda q, k, v, bias: attention_fn(q, k, v, bias, mask),
        lambda q, k, v, bias: nn.dot_product_attention(q, k, v, bias, mask),
        *qkv(*batch),
        bias,
    )


@pytest.mark.parametrize(
    "shape",
    [
        (LENGTH,),
        (HEADS, LENGTH, LENGTH),
        (2, 3, 1, 1, LENGTH),
        (1, 3, HEADS, LENGTH, LENGTH),
    ],
    ids=str,
)
def test_attention_fn_broadcasts_mask_and_bias_as_stock(shape):
    mask = some_mask(*shape)
    assert_same_derivatives(
        lambda q, k, v, bias: flash_linen.attention_fn(q, k, v, bias, mask),
        lambda q, k, v, bias: nn.dot_product_attention(q, k, v, bias, mask),
        *qkv(2, 3),
        normal(5, *shape),
    )


@pytest.mark.parametrize(
    ("shape", "flat"),
    [
        ((7,), (1, 1, 1, 7)),
        ((1, 1, 1, 1, 7), (1, 1, 1, 7)),
        ((5, 1), (1, 1, 5, 1)),
        ((2, 3, 1, 1, 7), (6, 1, 1, 7)),
        ((2, 1, 1, 5, 1), (6, 1, 5, 1)),
        ((2, 3, 4, 5, 7), (6, 4, 5, 7)),
    ],
    ids=str,
)
def test_flatten_operand_keeps_dimensions_of_size_one(shape, flat):
    assert common.flatten_operand("mask", jnp.ones(shape), (2, 3, 4, 5, 7)).shape == flat


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_attention_fn_takes_nonzero_of_a_mask_for_visible(attention_fn, dtype):
    q, k, v = qkv(2)
    mask = some_mask(2, 1, LENGTH, LENGTH)
    want = nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask))
    numbers = jnp.where(mask, 2, 0).astype(dtype)
    assert_close(attention_fn(q, k, v, mask=numbers), want)
    assert_close(attention_fn(q, k, v, mask=np.asarray(numbers)), want)


@both
def test_attention_fn_honours_a_mask_object(attention_fn):
    q, k, v = qkv(2, 3)
    ids = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]] * 3)  # one row for each of the 2 x 3
    mask = flashjax.Causal() & flashjax.Segments(ids)
    dense = np.tril(ids[:, :, None] == ids[:, None]).reshape(2, 3, 1, LENGTH, LENGTH)
    assert_close(attention_fn(q, k, v, mask=mask), nn.dot_product_attention(q, k, v, mask=dense))


@both
def test_attention_fn_gives_zero_to_a_row_that_sees_no_key(attention_fn):
    mask = some_mask(2, 1, LENGTH, LENGTH)
    mask[:, :, 2] = False
    out, pullback = jax.vjp(functools.partial(attention_fn, mask=mask), *qkv(2))
    grads = [np.asarray(x) for x in pullback(normal(0, *out.shape))]
    assert np.all(np.asarray(out)[:, 2] == 0)
    assert np.all(np.asarray(out)[:, 1] != 0)
    assert all(np.all(np.isfinite(x)) for x in grads)
    assert np.all(grads[0][:, 2] == 0)
    assert np.all(grads[0][:, 1] != 0)


@both
def test_attention_fn_casts_to_dtype(attention_fn):
    q, k, v = qkv(2)
    got = attention_fn(q, k, v, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert_close(got, attention_fn(*(x.astype(jnp.bfloat16) for x in (q, k, v))), 0)


@both
def test_attention_fn_promotes_mixed_dtypes(attention_fn):
    q, k, v = qkv(2)
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        got = attention_fn(q, k, v)
        whole = attention_fn(jnp.ones((2, 1, 1, 4), jnp.int32), *jnp.ones((2, 2, 3, 1, 4), jnp.int32))
    assert_close(got, attention_fn(q, k.astype(jnp.float32), v.astype(jnp.float32)), 0)
    assert whole.dtype == jnp.float32


def test_attention_fn_uses_a_given_promote_dtype():
    halves = lambda arrays, dtype: tuple(x.astype(jnp.float16) for x in arrays)
    assert flash_nnx.attention_fn(*qkv(2), promote_dtype=halves).dtype == jnp.float16


@both
def test_attention_fn_passes_precision_on(attention_fn):
    program = lambda **options: str(jax.make_jaxpr(functools.partial(attention_fn, **options))(*qkv(2)))
    assert "HIGHEST" in program(precision=jax.lax.Precision.HIGHEST)
    assert "HIGHEST" not in program()
    with pytest.raises(ValueError, match="precision is 'sharp'"):
        attention_fn(*qkv(2), precision="sharp")


@pytest.mark.parametrize("force", [False, True])
def test_attention_fn_always_has_a_float32_softmax(force):
    q, k, v = qkv(2, key_length=200, dtype=jnp.bfloat16)
    want = nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    got = flash_linen.attention_fn(q, k, v, force_fp32_for_softmax=force)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-3)


@both
def test_attention_fn_passes_its_own_options_on(attention_fn):
    q, k, v = qkv(2)
    options = {"scale": 0.3, "local_window_size": (2, 1), "softcap": 0.7}
    want = flashjax.flash_attention(q, k, v, implementation="reference", **options)
    got = functools.partial(attention_fn, implementation="xla", **options)(q, k, v)
    assert_close(got, want)
    for name in options:
        other = {n: x for n, x in options.items() if n != name}
        assert np.max(np.abs(attention_fn(q, k, v, implementation="reference", **other) - want)) > 1e-3
    with pytest.raises(ValueError, match="implementation is 'none'"):
        attention_fn(q, k, v, implementation="none")


@pytest.mark.parametrize(
    ("attention_fn", "stock"),
    [
        (flash_linen.attention_fn, nn.dot_product_attention),
        (flash_nnx.attention_fn, nnx.dot_product_attention),
    ],
    ids=["linen", "nnx"],
)
def test_attention_fn_names_every_keyword_of_stock(attention_fn, stock):
    wanted = set(inspect.signature(stock).parameters)
    assert wanted <= set(inspect.signature(attention_fn).parameters)
    bound = functools.partial(attention_fn, implementation="xla")
    assert wanted <= set(inspect.signature(bound).parameters)


# ---- dropout ---------------------------------------------------------------------------------------


def kept_weights(attention_fn, batch, length, **options):
    """Return ``[*batch, N, T, S]``: 1 where a weight survived dropout, 0 elsewhere."""
    q = np.zeros((*batch, length, HEADS, 4), np.float32)
    identity = (
        np.zeros((*batch, length, HEADS, length), np.float32) + np.eye(length, dtype=np.float32)[:, None]
    )
    out = attention_fn(q, q, identity, dropout_rng=jax.random.key(0), **options)
    weights = np.asarray(out) * length * (1 - options["dropout_rate"])
    np.testing.assert_allclose(weights, np.round(weights), atol=1e-5)
    assert set(np.unique(np.round(weights))) == {0, 1}
    return np.round(weights).swapaxes(-2, -3)


@both
def test_attention_fn_drops_at_the_given_rate(attention_fn):
    kept = kept_weights(attention_fn, (2, 2), 64, dropout_rate=0.3, broadcast_dropout=False)
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.size) ** 0.5


@both
def test_attention_fn_broadcast_dropout_shares_one_keep_mask(attention_fn):
    shared = kept_weights(attention_fn, (2, 2), 16, dropout_rate=0.5)  # the default, as in Flax
    assert np.all(shared == shared[:1, :1, :1])
    own = kept_weights(attention_fn, (2, 2), 16, dropout_rate=0.5, broadcast_dropout=False)
    own = own.reshape(8, -1)
    assert np.sum(np.all(own[:, None] == own[None], axis=-1)) == 8


@both
def test_attention_fn_dropout_follows_the_key(attention_fn):
    call = lambda seed: attention_fn(*qkv(2), dropout_rate=0.5, dropout_rng=jax.random.key(seed))
    assert_close(call(0), call(0), 0)
    assert np.any(call(0) != call(1))
    old_style = attention_fn(*qkv(2), dropout_rate=0.5, dropout_rng=jax.random.PRNGKey(0))
    assert_close(old_style, call(0), 0)


@both
@pytest.mark.parametrize("options", [{"deterministic": True, "dropout_rate": 0.5}, {"dropout_rate": 0.0}])
def test_attention_fn_drops_nothing_when_told(attention_fn, options):
    got = attention_fn(*qkv(2), dropout_rng=jax.random.key(0), **options)
    assert_close(got, attention_fn(*qkv(2)), 0)
    assert_close(attention_fn(*qkv(2), **options), got, 0)


@both
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_attention_fn_refuses_a_bad_rate(attention_fn, deterministic, rate):
    options = {"dropout_rate": rate, "dropout_rng": jax.random.key(0), "deterministic": deterministic}
    with pytest.raises(ValueError, match=f"dropout_rate is {rate}"):
        attention_fn(*qkv(2), **options)


@both
def test_attention_fn_refuses_dropout_without_a_key(attention_fn):
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.5 but dropout_key is None"):
        attention_fn(*qkv(2), dropout_rate=0.5)


# ---- errors ----------------------------------------------------------------------------------------


@both
def test_attention_fn_refuses_to_sow_weights(attention_fn):
    with pytest.raises(UnsupportedError, match=r"module is a object.*return_residual=True"):
        attention_fn(*qkv(2), module=object())


@pytest.mark.parametrize(
    "name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_attention_fn_refuses_other_products(name):
    with pytest.raises(UnsupportedError, match=f"{name} is .*flax.linen.dot_product_attention"):
        flash_linen.attention_fn(*qkv(2), **{name: jnp.einsum})


@both
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 1, LENGTH, 7), (3, 1, 1, 1), (1, 2, 1, 1, 1)])
def test_attention_fn_refuses_a_wrong_shape(attention_fn, name, shape):
    message = rf"{name} has shape \({shape[0]}, .*\[batch\.\.\., N, T, S\] = \(2, 2, 6, 6\)"
    with pytest.raises(ValueError, match=message):
        attention_fn(*qkv(2), **{name: jnp.ones(shape)})


@both
def test_attention_fn_refuses_a_mask_as_bias(attention_fn):
    with pytest.raises(TypeError, match=r"pass it as mask=Causal"):
        attention_fn(*qkv(2), bias=flashjax.Causal())


@both
def test_attention_fn_refuses_other_ranks_and_batches(attention_fn):
    q, k, v = qkv(2, 3)
    with pytest.raises(ValueError, match="the same number of batch dimensions"):
        attention_fn(q, k[0], v[0])
    with pytest.raises(ValueError, match=r"\[batch\.\.\., length, heads, head dim\]"):
        attention_fn(*(x[0, 0, 0] for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"query has shape \(2, 3, .*must be equal"):
        attention_fn(q, k.swapaxes(0, 1), v.swapaxes(0, 1))
    with pytest.raises(TypeError, match="key is a str"):
        attention_fn(q, "k", v)


@both
def test_attention_fn_refuses_flags_that_are_not_bools(attention_fn):
    for name in ("deterministic", "broadcast_dropout"):
        with pytest.raises(TypeError, match=f"{name} is None"):
            attention_fn(*qkv(2), **{name: None})


@both
def test_attention_fn_refuses_a_window_without_positions(attention_fn):
    with pytest.raises(UnsupportedError, match=r"with 1 queries and 6 keys.*Put it into mask"):
        attention_fn(*qkv(2, query_length=1), local_window_size=(3, 0))


# ---- causal ----------------------------------------------------------------------------------------


def test_attention_fn_is_causal_equals_stock():
    q, k, v = qkv(2, heads=4, kv_heads=2)  # grouped queries
    mask = some_mask(2, 1, 1, LENGTH)
    mask[..., 0] = True
    assert_same_derivatives(
        lambda q, k, v: flash_nnx.attention_fn(q, k, v, mask=mask, is_causal=True),
        lambda q, k, v: nnx.dot_product_attention(
            q, k, v, mask=jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & mask
        ),
        q,
        k,
        v,
    )


@pytest.mark.parametrize("filled", [1, 3, LENGTH])
def test_attention_fn_is_causal_hides_nothing_of_a_cache_from_one_query(filled):
    # Flax 0.12.8 calls like this while it decodes.
    q, k, v = qkv(2, query_length=1)
    occupied = jnp.broadcast_to(jnp.arange(LENGTH) < filled, (2, 1, 1, LENGTH)).astype(jnp.float32)
    got = flash_nnx.attention_fn(q, k, v, mask=occupied, is_causal=True)
    assert_close(got, nn.dot_product_attention(q, k[:, :filled], v[:, :filled]))


def test_attention_fn_is_causal_aligns_the_last_query_with_the_last_key():
    q, k, v = qkv(2)
    whole = flash_nnx.attention_fn(q, k, v, is_causal=True)
    for n in (1, 4):
        assert_close(flash_nnx.attention_fn(q[:, -n:], k, v, is_causal=True), whole[:, -n:])


# ---- linen layers ----------------------------------------------------------------------------------


def linen_layers(**options):
    layer = functools.partial(nn.MultiHeadDotProductAttention, num_heads=HEADS, **options)
    return layer(attention_fn=flash_linen.attention_fn), layer()


def causal_array(*batch):
    """Return what ``make_causal_mask`` of linen and of nnx give: float32."""
    return nn.make_causal_mask(np.zeros((*batch, LENGTH)))


@pytest.fixture(scope="module")
def linen_variables():
    x = normal(0, 2, LENGTH, FEATURES)
    return jax.jit(linen_layers()[1].init)(jax.random.key(1), x)


def test_linen_layer_keeps_parameters_loss_and_gradients(linen_variables):
    flash, stock = linen_layers()
    batch = (2, 2)
    x = normal(0, *batch, LENGTH, FEATURES)
    mask = causal_array(*batch) * some_mask(*batch, 1, 1, LENGTH, dtype=np.float32)
    assert_close(jax.jit(flash.init)(jax.random.key(1), x), linen_variables, 0)

    @jax.jit
    def losses(variables, x, mask):
        loss = lambda variables, layer: jnp.mean(jnp.square(layer.apply(variables, x, mask=mask) - 1))
        return [jax.value_and_grad(loss)(variables, layer) for layer in (flash, stock)]

    got, want = losses(linen_variables, x, mask)
    assert_close(got, want)


def test_linen_layer_takes_a_mask_object(linen_variables):
    flash, stock = linen_layers()
    x = normal(0, 2, LENGTH, FEATURES)
    want = jax.jit(stock.apply)(linen_variables, x, mask=causal_array(2))
    assert_close(jax.jit(flash.apply)(linen_variables, x, mask=flashjax.Causal()), want)
    assert_close(flash.apply(linen_variables, x, mask=flashjax.Causal()), want)


def test_linen_layer_cross_attention_in_half_precision_equals_stock():
    flash, stock = linen_layers(dtype=jnp.bfloat16, normalize_qk=True, force_fp32_for_softmax=True)
    x, y = normal(0, 2, 3, FEATURES), normal(1, 2, LENGTH, FEATURES)

    @jax.jit
    def run(x, y):
        variables = stock.init(jax.random.key(1), x, y)
        return flash.apply(variables, x, y), stock.apply(variables, x, y)

    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm needs it
        got, want = run(x, y)
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), np.float32(want), atol=0.02)


def test_linen_layer_accepts_a_partial(linen_variables):
    bind = lambda **options: nn.MultiHeadDotProductAttention(
        HEADS, attention_fn=functools.partial(flash_linen.attention_fn, **options)
    )
    x = normal(0, 2, LENGTH, FEATURES)
    got = bind(implementation="xla", local_window_size=(2, 0)).apply(linen_variables, x, mask=causal_array(2))
    window = np.tril(np.ones((LENGTH, LENGTH), bool)) & ~np.tril(np.ones((LENGTH, LENGTH), bool), -3)
    assert_close(got, jax.jit(linen_layers()[1].apply)(linen_variables, x, mask=window[None, None]))
    with pytest.raises(ValueError, match="implementation is 'none'"):
        bind(implementation="none").apply(linen_variables, x)


def test_linen_layer_uses_the_dropout_stream(linen_variables):
    flash, stock = linen_layers(dropout_rate=0.5)
    x = normal(0, 2, LENGTH, FEATURES)

    @jax.jit
    def train(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return flash.apply(linen_variables, x, deterministic=False, rngs=rngs)

    assert_close(train(0), train(0), 0)
    assert np.any(train(0) != train(1))
    evaluate = flash.apply(linen_variables, x, deterministic=True)
    assert_close(evaluate, stock.apply(linen_variables, x, deterministic=True))
    assert np.any(train(0) != evaluate)


def test_linen_layer_refuses_a_negative_dropout_rate(linen_variables):
    flash, _ = linen_layers(dropout_rate=-0.1)  # which Flax takes for no dropout
    with pytest.raises(ValueError, match=r"dropout_rate is -0\.1"):
        flash.apply(linen_variables, normal(0, 2, LENGTH, FEATURES), deterministic=False)


def test_linen_layer_refuses_weights_and_other_products(linen_variables):
    x = normal(0, 2, LENGTH, FEATURES)
    flash, _ = linen_layers()
    with pytest.raises(UnsupportedError, match="sow_weights"):
        flash.apply(linen_variables, x, sow_weights=True, mutable=["intermediates"])
    quantized, _ = linen_layers(
        qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(UnsupportedError, match="qk_attn_weights_einsum"):
        quantized.apply(linen_variables, x)


@pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
def test_linen_layer_decodes_to_the_causal_forward(batch, linen_variables):
    decoder, _ = linen_layers(decode=True)
    _, stock = linen_layers()
    x = normal(0, *batch, LENGTH, FEATURES)
    want = jax.jit(stock.apply)(linen_variables, x, mask=causal_array(*batch))
    variables = {**linen_variables, "cache": jax.jit(decoder.init)(jax.random.key(1), x)["cache"]}
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    for i in range(LENGTH):
        got, updated = step(variables, x[..., i : i + 1, :])
        variables = {**variables, **updated}
        assert_close(got, want[..., i : i + 1, :])


# ---- nnx layers ------------------------------------------------------------------------------------


def nnx_layer(attention_fn, **options):
    options = {"decode": False, **options}
    return nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=FEATURES, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options
    )


run_layer = nnx.jit(
    lambda layer, x, mask=None, is_causal=False: layer(x, mask=mask, is_causal=is_causal),
    static_argnames="is_causal",
)


def decode_all(layer, x, mask=None, is_causal=True, cache_dtype=jnp.float32):
    """Return what a layer gives when it is fed ``x`` token by token, without and with ``nnx.jit``."""
    layer.decode = True
    eager = lambda layer, x, mask, is_causal: layer(x, mask=mask, is_causal=is_causal)
    results = []
    for step in (eager, run_layer):
        layer.init_cache(x.shape, dtype=cache_dtype)
        tokens = [step(layer, x[..., i : i + 1, :], mask, is_causal=is_causal) for i in range(LENGTH)]
        results.append(np.concatenate(tokens, axis=-2))
    return results


def test_nnx_layer_keeps_parameters_loss_and_gradients():
    flash, stock = (nnx_layer(f) for f in (flash_nnx.attention_fn, nnx.dot_product_attention))
    assert_close(nnx.state(flash, nnx.Param), nnx.state(stock, nnx.Param), 0)
    x, mask = normal(0, 2, LENGTH, FEATURES), causal_array(2)

    @nnx.jit
    def losses(flash, stock, x, mask):
        loss = lambda layer: jnp.mean(jnp.square(layer(x, mask=mask) - 1))
        return [nnx.value_and_grad(loss)(layer) for layer in (flash, stock)]

    got, want = losses(flash, stock, x, mask)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want))
    by_flag = run_layer(flash, x, is_causal=True)
    assert_close(by_flag, run_layer(stock, x, mask))
    assert_close(run_layer(flash, x, flashjax.Causal()), by_flag, 0)


def test_nnx_layer_uses_its_dropout_stream():
    x = normal(0, 2, LENGTH, FEATURES)
    flash = nnx_layer(flash_nnx.attention_fn, dropout_rate=0.5, deterministic=False)
    train = lambda seed: flash(x, rngs=nnx.Rngs(dropout=seed))
    assert_close(train(0), train(0), 0)
    assert np.any(train(0) != train(1))
    assert np.any(flash(x) != flash(x))  # the layer's own stream moves on
    evaluate = flash(x, deterministic=True)
    assert_close(evaluate, nnx_layer(nnx.dot_product_attention)(x))
    assert np.any(train(0) != evaluate)


def test_nnx_layer_refuses_weights():
    flash = nnx_layer(flash_nnx.attention_fn)
    with pytest.raises(UnsupportedError, match="sow_weights"):
        flash(normal(0, 2, LENGTH, FEATURES), sow_weights=True)


def test_nnx_layer_trains_then_decodes_to_the_causal_forward():
    batch = (1, 2)
    bound = functools.partial(flash_nnx.attention_fn, implementation="xla")
    layer = nnx_layer(bound, num_kv_heads=1)
    x = normal(0, *batch, LENGTH, FEATURES)

    @nnx.jit
    def train(layer):
        gradient = nnx.grad(lambda layer: jnp.mean(jnp.square(layer(x, is_causal=True) - 1)))(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - g, nnx.state(layer, nnx.Param), gradient))

    train(layer)
    stock = nnx_layer(nnx.dot_product_attention, num_kv_heads=1)
    nnx.update(stock, nnx.state(layer, nnx.Param))
    want = run_layer(stock, x, jnp.broadcast_to(causal_array(*batch), (*batch, HEADS, LENGTH, LENGTH)))
    assert_close(run_layer(layer, x, is_causal=True), want)
    for is_causal in (True, False):
        for got in decode_all(layer, x, is_causal=is_causal):
            assert_close(got, want)


def test_nnx_layer_decodes_with_a_cache_of_another_dtype():
    # The projections give bfloat16, which the cache holds; attention computes in float32.
    def half(arrays, *, dtype=None):
        return tuple(x if x is None else x.astype(jnp.bfloat16) for x in arrays)

    layer = nnx_layer(flash_nnx.attention_fn, dtype=jnp.float32, qkv_promote_dtype=half)
    x = normal(0, 2, LENGTH, FEATURES)
    want = run_layer(layer, x, is_causal=True)
    for got in decode_all(layer, x, cache_dtype=jnp.bfloat16):
        assert_close(got, want)
    assert layer.cached_key.dtype == jnp.bfloat16


def test_nnx_layer_decodes_left_padded_rows_as_if_alone():
    layer, stock = (nnx_layer(f) for f in (flash_nnx.attention_fn, nnx.dot_product_attention))
    padding = [0, 2]
    x = normal(0, 2, LENGTH, FEATURES)
    mask = (np.arange(LENGTH) >= np.array(padding)[:, None])[:, None, None]
    prefill = run_layer(layer, x, mask, is_causal=True)
    assert np.all(np.isfinite(prefill))
    for row, start in enumerate(padding):
        alone = stock(x[row : row + 1, start:], is_causal=True)
        assert_close(prefill[row : row + 1, start:], alone)
    for got in decode_all(layer, x, mask):
        assert_close(got, prefill)


# ---- imports ---------------------------------------------------------------------------------------


def test_layers_import_without_flax():
    code = (
        "import sys, flashjax, flashjax.layers.linen, flashjax.layers.nnx\n"
        "assert not any(name.split('.')[0] == 'flax' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

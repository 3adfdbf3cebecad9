"""The Hopper kernels on a Hopper GPU: every case by the error budget, and what only hardware can show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import BlockSparse, CustomMask, Operand, Segments, explain, flash_attention
from flashjax.backends import hopper
from tests import budget
from tests.cases import HALVES, WIDE_CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_device() is not None, reason=str(hopper.missing_device())),
]

DONE = [case for case in HALVES if case.bias is None and "dropout_rate" not in case.options]


def _forward(arrays, call):
    out, lse = jax.jit(lambda arrays: call(**arrays))(arrays)
    return {"out": out, "lse": lse}


def _hopper(options):
    return lambda **arrays: flash_attention(
        **arrays, **options, implementation="hopper", return_residual=True
    )


def _check(case, got, arrays, options):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
    with jax.enable_x64(True):
        truth = _forward(
            wide,
            lambda **a: flash_attention(**a, **options, implementation="reference", return_residual=True),
        )
        truth = jax.tree.map(np.asarray, truth)
    plain = _forward(arrays, lambda **a: budget.plain_attention(**a, **options))
    budget.check(got, plain, truth, {"out": case.dtype, "lse": jnp.float32})


@pytest.mark.parametrize("case", [*DONE, *WIDE_CASES], ids=lambda c: c.name)
def test_hopper_stays_within_error_budget(case, monkeypatch):
    # As on a GPU of two processors, so that a block computes several query tiles.
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 2)
    arrays, options = case.arguments()
    _check(case, _forward(arrays, _hopper(options)), arrays, options)


@pytest.mark.parametrize(
    "name", ["group-3-bfloat16", "segments-causal-window-bfloat16", "window-d64", "d192-128"]
)
def test_hopper_gradients_stay_within_error_budget(name):
    case = next(c for c in (*DONE, *WIDE_CASES) if c.name == name)
    arrays, options = case.arguments()
    cotangents = case.cotangents()
    dtypes = {"out": case.dtype, "lse": jnp.float32, **{f"d{n}": x.dtype for n, x in arrays.items()}}
    got = budget.run(_hopper(options), arrays, cotangents)
    budget.check(
        got, budget.plain(arrays, options, cotangents), budget.oracle(arrays, options, cotangents), dtypes
    )


def _normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


POISONED = {
    "lengths": lambda dead: {"key_value_seq_lengths": jnp.argmax(dead, -1).astype(jnp.int32)},
    "keys": lambda dead: {"mask": ~dead[:, None, None, :]},
    "dense": lambda dead: {"mask": jnp.broadcast_to(~dead[:, None, None, :], (2, 1, 200, 520))},
    "blocks": lambda dead: {"mask": BlockSparse(~dead[:, None, None, ::8], (200, 8))},
    "custom": lambda dead: {
        "mask": CustomMask(lambda b, h, q, k, dead: ~dead, dead=Operand(dead[:, None], "bhk"))
    },
}


@pytest.mark.parametrize("kind", POISONED)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_hopper_keeps_poison_in_hidden_keys_out(kind, dim, poison):
    length = jnp.array([[136], [408]])
    dead = jnp.arange(520) >= length
    q, k, v = (_normal(2, n, 2, dim, seed=n) for n in (200, 520, 520))
    poisoned = [jnp.where(dead[:, :, None, None], poison, x) for x in (k, v)]
    call = jax.jit(lambda *a: flash_attention(*a, **POISONED[kind](dead), implementation="hopper"))
    np.testing.assert_array_equal(call(q, *poisoned), call(q, k, v))


def test_hopper_passes_visible_nan_on():
    q, k, v = (_normal(1, 200, 1, 64, seed=n) for n in range(3))
    out = flash_attention(q, k, v.at[0, 150].set(jnp.nan), is_causal=True, implementation="hopper")
    assert jnp.isnan(out[0, 150:]).all()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": Segments(jnp.arange(2048) // 300)}])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_repeats_bit_for_bit(options, dim):
    q, k, v = (_normal(4, 2048, 8, dim, seed=n) for n in range(3))
    call = jax.jit(lambda *a: flash_attention(*a, **options, implementation="hopper", return_residual=True))
    first = jax.tree.map(np.asarray, call(q, k, v))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, call(q, k, v)), first)


def test_hopper_is_chosen_and_explained():
    q = _normal(1, 64, 2, 64)
    assert explain(q, q, q, is_causal=True).startswith("backend: hopper")
    assert explain(q.astype(jnp.float32), *[q.astype(jnp.float32)] * 2).startswith("backend: xla")
    with jax.default_device(jax.devices("cpu")[0]):
        assert explain(q, q, q).startswith("backend: xla")


def test_hopper_works_under_transformations():
    q, k, v = (_normal(3, 2, 130, 2, 64, seed=n) for n in range(3))
    attend = functools.partial(flash_attention, is_causal=True, implementation="hopper")
    each = jnp.stack([attend(*x) for x in zip(q, k, v, strict=True)])
    np.testing.assert_array_equal(jax.jit(jax.vmap(attend))(q, k, v), each)
    shared = jax.vmap(attend, (0, None, None))(q, k[0], v[0])
    np.testing.assert_array_equal(shared[1], attend(q[1], k[0], v[0]))
    _, scanned = jax.lax.scan(lambda _, x: (None, attend(*x)), None, (q, k, v))
    np.testing.assert_array_equal(scanned, each)
    loss = lambda f: lambda x: f(x, k[0], v[0]).astype(jnp.float32).sum()
    np.testing.assert_array_equal(jax.grad(loss(jax.checkpoint(attend)))(q[0]), jax.grad(loss(attend))(q[0]))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(mapped(q[0], k[0], v[0]), each[0])


def test_hopper_reaches_every_row_of_large_arrays():
    # 76,800 rows times heads, and a query of more than 2^31 numbers.
    for shape, keys in (((300, 8, 256, 16), 8), ((2, 70_000, 128, 128), 128)):
        q = _normal(*shape)
        k, v = (_normal(shape[0], keys, 1, shape[3], seed=n) for n in (1, 2))
        out = jax.jit(functools.partial(flash_attention, implementation="hopper"))(q, k, v)
        rows = shape[1] % 128 or 8
        want = flash_attention(q[-1:, -rows:, -1:], k[-1:], v[-1:], implementation="reference")
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (out[-1:, -rows:, -1:], want)), atol=2e-2
        )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_hopper_needs_no_temporary_memory(options):
    x = jax.ShapeDtypeStruct((1, 65536, 8, 128), jnp.bfloat16)
    call = jax.jit(lambda *a: flash_attention(*a, **options, implementation="hopper"))
    assert call.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes <= 4 * 65536 * 8 + 4096

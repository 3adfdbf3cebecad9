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


def _hopper(options):
    return lambda **arrays: flash_attention(
        **arrays, **options, implementation="hopper", return_residual=True
    )


def _check(case, options):
    """Compare out, lse and the gradients of everything, that of lse included, with the oracle."""

    def draw(seed):
        arrays, more = case.arguments(seed)
        cotangents = case.cotangents(seed + 1)
        got = budget.run(_hopper(options | more), arrays, cotangents)
        return got, budget.plain(arrays, more, cotangents), budget.oracle(arrays, more, cotangents)

    budget.check_draws(draw, budget.dtypes(case.arguments()[0]))


@pytest.mark.parametrize("case", [*HALVES, *WIDE_CASES], ids=lambda c: c.name)
def test_hopper_stays_within_error_budget(case, monkeypatch):
    # As on a GPU of two processors, so that a block computes several tiles.
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 2)
    _check(case, {})


DETERMINISTIC = (
    "group-3-bfloat16",
    "lengths-float16",
    "query-lengths-bfloat16",
    "scale-bfloat16",
    "d64-full",
    "d256-full",
    "d192-128",
    "window-d64",
    "packed-d128",
    "scattered-d256",
    "softcap-d128",
)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_hopper_stays_within_error_budget_if_deterministic(name):
    _check(next(c for c in (*HALVES, *WIDE_CASES) if c.name == name), {"deterministic": True})


def _normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        "d64-odd",
        "steep-causal-d64",
        "scale-negative-d64",
        "softcap-d128",
        "sinks-d64",
        "alibi-d64",
        "packed-d128",
    ],
)
def test_hopper_returns_the_largest_logit(name):
    case = next(c for c in WIDE_CASES if c.name == name)
    arrays, options = case.arguments()
    call = jax.jit(lambda **a: _hopper(options)(**a, return_max_logit=True))
    out, lse, largest = call(**arrays)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arrays)
        wanted = flash_attention(**wide, **options, implementation="reference", return_max_logit=True)[1]
    np.testing.assert_allclose(largest, wanted, rtol=2e-6)
    cotangents = case.cotangents(1)
    plain, truth = (run(arrays, options, cotangents) for run in (budget.plain, budget.oracle))
    got = {"out": out, "lse": lse}
    budget.check(got, plain, {name: truth[name] for name in got}, budget.dtypes(arrays))


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


def _gradients(options, arrays, dout):
    _, pull = jax.vjp(lambda *a: flash_attention(*a, **options, implementation="hopper"), *arrays)
    return pull(dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", POISONED)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_gradients_keep_poison_in_hidden_keys_out(kind, dim, deterministic):
    dead = jnp.arange(520) >= jnp.array([[136], [408]])
    q, k, v, dout = (_normal(2, n, 2, dim, seed=m) for m, n in enumerate((200, 520, 520, 200)))
    poisoned = [jnp.where(dead[:, :, None, None], jnp.nan, x) for x in (k, v)]
    options = POISONED[kind](dead) | {"deterministic": deterministic}
    run = jax.jit(functools.partial(_gradients, options))
    want, got = run((q, k, v), dout), run((q, *poisoned), dout)
    for x, y in zip(want, got, strict=True):
        # Sums for dq are in no order where it is not deterministic.
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), rtol=2e-2, atol=2e-2)
    for x in got[1:]:
        assert not np.asarray(jnp.where(dead[:, :, None, None], x, 0)).any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_gradients_keep_poison_in_blind_queries_out(dim, deterministic):
    blind = jnp.arange(200) >= jnp.array([[1], [137]])
    q, k, v, dout = (_normal(2, n, 2, dim, seed=m) for m, n in enumerate((200, 520, 520, 200)))
    options = {"query_seq_lengths": jnp.array([1, 137]), "deterministic": deterministic}
    run = jax.jit(functools.partial(_gradients, options))
    mark = lambda x, value: jnp.where(blind[:, :, None, None], value, x)
    want = run((mark(q, 0), k, v), mark(dout, 0))
    got = run((mark(q, jnp.nan), k, v), mark(dout, jnp.nan))
    for x, y in zip(want, got, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), rtol=2e-2, atol=2e-2)
    assert not np.asarray(jnp.where(blind[:, :, None, None], got[0], 0)).any()


@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (192, 192), (65, 130), (1, 200)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_gradients_survive_a_very_negative_lse(lengths, dim):
    # A padded key has the logit 0, and exp(0 - lse) is infinite.
    t, s = lengths
    q = 20 * jnp.ones((1, t, 1, dim), jnp.bfloat16)
    k = -(_normal(1, s, 1, dim) ** 2) - 1
    v, dout = _normal(1, s, 1, dim, seed=1), _normal(1, t, 1, dim, seed=2)
    for options in ({}, {"is_causal": True}, {"mask": Segments(jnp.zeros(t, int), jnp.zeros(s, int))}):
        got = _gradients(options, (q, k, v), dout)
        assert all(jnp.isfinite(x).all() for x in got)
    _, lse = flash_attention(q, k, v, implementation="hopper", return_residual=True)
    assert (lse < -200).all()


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 2)])
def test_hopper_has_gradients_of_some_inputs(argnums):
    arrays = [_normal(1, 130, 2, 64, seed=n) for n in range(3)]
    loss = lambda *a: flash_attention(*a, is_causal=True, implementation="hopper").astype(jnp.float32).sum()
    every = jax.grad(loss, (0, 1, 2))(*arrays)
    some = jax.grad(loss, argnums)(*arrays)
    for n, x in zip(argnums, some, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, every[n])), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": Segments(jnp.arange(4096) // 300)}])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hopper_gradients_repeat_bit_for_bit_if_deterministic(options, dim):
    q, dout = (_normal(1, 4096, 8, dim, seed=n) for n in (0, 1))
    k, v = (_normal(1, 4096, 2, dim, seed=n) for n in (2, 3))
    run = jax.jit(functools.partial(_gradients, options | {"deterministic": True}))
    first = jax.tree.map(np.asarray, run((q, k, v), dout))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run((q, k, v), dout)), first)


def test_hopper_passes_visible_nan_on():
    q, k, v = (_normal(1, 200, 1, 64, seed=n) for n in range(3))
    v = v.at[0, 150].set(jnp.nan)
    out = flash_attention(q, k, v, is_causal=True, implementation="hopper")
    assert jnp.isnan(out[0, 150:]).all()
    dq, _, _ = _gradients({"is_causal": True}, (q, k, v), jnp.ones_like(q))
    assert jnp.isnan(dq[0, 150:]).all()


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
    same = functools.partial(attend, deterministic=True)
    np.testing.assert_array_equal(jax.grad(loss(jax.checkpoint(same)))(q[0]), jax.grad(loss(same))(q[0]))
    gradient = jax.grad(loss(same))
    np.testing.assert_array_equal(jax.vmap(gradient)(q), jnp.stack([gradient(x) for x in q]))
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
        dout = _normal(*shape, seed=3)
        dq, _, _ = jax.jit(functools.partial(_gradients, {}))((q, k, v), dout)
        one = lambda x, k=k, v=v: flash_attention(x, k[-1:], v[-1:], implementation="reference")
        (want,) = jax.vjp(one, q[-1:, -rows:, -1:])[1](dout[-1:, -rows:, -1:])
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (dq[-1:, -rows:, -1:], want)), atol=2e-2
        )


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_hopper_needs_no_temporary_memory(options):
    x = jax.ShapeDtypeStruct((1, 65536, 8, 128), jnp.bfloat16)
    call = jax.jit(lambda *a: flash_attention(*a, **options, implementation="hopper"))
    assert call.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes <= 4 * 65536 * 8 + 4096
    backward = jax.jit(functools.partial(_gradients, options))
    temporary = backward.lower((x, x, x), x).compile().memory_analysis().temp_size_in_bytes
    accumulator, saved = 4 * 65536 * 8 * 128, 2 * 65536 * 8 * 128  # dQ in float32; out
    assert temporary <= accumulator + saved + 5 * 4 * 65536 * 8

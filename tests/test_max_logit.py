"""The largest logit of each head: by its definition, on every backend, beside what else a call returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import Causal, SlidingWindow, flash_attention
from tests.cases import CASES, FEATURES, case

B, T, S, N, K, D = 2, 11, 13, 4, 2, 8
# One call of each kind: what hides keys, what changes logits, what joins the sum.
KINDS = [next(c for c in CASES if c.name.startswith(name)) for name in FEATURES if name != "plain"]
BLIND = case("blind", (50, 70), (4, 2), mask=lambda c, rng: Causal(offset=-9), options={"sinks": 3.0})


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, KEY, V = normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)
SINKS = jnp.array([0.5, -jnp.inf, 50.0, 0.0])


@pytest.mark.parametrize("implementation", ["reference", "small-tiles"])
def test_max_logit_is_the_largest_visible_logit(implementation):
    bias = normal(3, N, T, S)
    products = jnp.einsum("btnd,bsnd->bnts", Q, jnp.repeat(KEY, N // K, 2), precision="highest") * 0.7
    seen = np.tri(T, S, dtype=bool) & (np.arange(N) != 3)[:, None, None]
    wanted = jnp.where(seen, 2 * jnp.tanh(products / 2) + bias, -jnp.inf).max((0, 2, 3))
    out, max_logit = flash_attention(
        Q,
        KEY,
        V,
        bias,
        jnp.asarray(seen),
        sinks=SINKS,
        scale=0.7,
        softcap=2.0,
        implementation=implementation,
        return_max_logit=True,
    )
    assert (out.shape, max_logit.shape) == (Q.shape, (N,))
    np.testing.assert_allclose(max_logit, wanted, rtol=1e-6)
    assert max_logit[3] == -jnp.inf


@pytest.mark.parametrize("case", [*KINDS, BLIND], ids=lambda c: c.name)
def test_max_logit_changes_nothing_else(case):
    arrays, options = case.arguments()
    cotangents = case.cotangents()

    def run(implementation, more):
        def call(arrays):
            found = flash_attention(
                **arrays,
                **options,
                implementation=implementation,
                return_residual=True,
                return_max_logit=more,
            )
            return found[:2], found[2:]

        results, pull, max_logit = jax.vjp(call, arrays, has_aux=True)
        return max_logit, (results, pull(cotangents))

    (got,), results = jax.jit(run, static_argnums=(0, 1))("small-tiles", True)
    none, without = jax.jit(run, static_argnums=(0, 1))("small-tiles", False)
    (wanted,), _ = run("reference", True)
    assert none == ()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    if results[0][0].dtype == jnp.float32:
        jax.tree.map(close, results, without)


@pytest.mark.parametrize("again", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_max_logit_has_no_gradient(again):
    def loss(q, weight):
        out, lse, max_logit = flash_attention(Q * q, KEY, V, return_residual=True, return_max_logit=True)
        return jnp.sin(out).sum() + lse.sum() + weight * max_logit.sum(), max_logit

    gradient = jax.grad(again(loss), has_aux=True)
    (first, max_logit), (second, _) = gradient(1.0, 0.0), gradient(1.0, 5.0)
    assert first == second != 0
    assert max_logit.shape == (N,)


def test_max_logit_of_each_mapped_entry_and_of_shards():
    call = functools.partial(flash_attention, mask=SlidingWindow(3), return_max_logit=True)
    mapped = jax.jit(jax.vmap(lambda q: call(q[None], KEY[:1], V[:1])[1]))(Q)
    np.testing.assert_allclose(mapped, [call(q[None], KEY[:1], V[:1])[1] for q in Q], rtol=1e-6)
    _, alone = call(Q[0], KEY[0], V[0])
    np.testing.assert_allclose(alone, mapped[0], rtol=1e-6)
    mesh = jax.make_mesh((B,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:B])
    spec = jax.sharding.PartitionSpec("x")
    shards = jax.shard_map(
        lambda *a: jax.lax.pmax(call(*a)[1], "x"),
        mesh=mesh,
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
    )
    np.testing.assert_allclose(jax.jit(shards)(Q, KEY, V), call(Q, KEY, V)[1], rtol=1e-6)


def test_max_logit_of_nothing_is_minus_infinity():
    out, max_logit = flash_attention(Q, KEY[:, :0], V[:, :0], return_max_logit=True)
    assert (out == 0).all()
    np.testing.assert_array_equal(max_logit, np.full(N, -np.inf))


def test_max_logit_is_asked_for_by_a_bool():
    with pytest.raises(TypeError, match="return_max_logit"):
        flash_attention(Q, KEY, V, return_max_logit=1)

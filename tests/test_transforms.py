"""`flash_attention` under JAX's transformations: jit, vmap, scan, checkpoint, shard_map, pmap, grad."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from flashjax import Causal, CustomMask, Operand, Segments, SlidingWindow, flash_attention

B, T, S, N, K, D = 2, 19, 23, 4, 2, 8
NAMES = ("flash_attention_out", "flash_attention_lse")


def close(got, wanted, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **({"rtol": 1e-4, "atol": 2e-5} | tolerance)),
        got,
        wanted,
    )


def qkv(batch=B, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((batch, T, N, D), (batch, S, K, D), (batch, S, K, D))
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def where_row_is_odd(b, h, q, k, shift):
    return (b % 2 == 1) | (k <= q + shift)


# ---- vmap ------------------------------------------------------------------------------------------

Q, KEY, V = qkv()
OPERANDS = {
    "query": Q,
    "key": KEY,
    "value": V,
    "bias": jax.random.normal(jax.random.key(4), (1, N, T, S)),
    "scale": jnp.float32(0.3),
    "lengths": jnp.array([20, 9]),
    "ids": jnp.arange(S) // 7,
    "dropout_key": jax.random.key(3),
}
DIFFERENTIABLE = ("query", "key", "value", "bias", "scale")


def everything(query, key, value, bias, scale, lengths, ids, dropout_key):
    mask = Segments(ids[..., :T], ids) | CustomMask(where_row_is_odd, shift=Operand(lengths[:1] - 20, "b"))
    return flash_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        key_value_seq_lengths=lengths,
        dropout_rate=0.2,
        dropout_key=dropout_key,
        return_residual=True,
    )


def results(arguments):
    """Return out, lse and every gradient."""

    def loss(differentiable):
        out, lse = everything(**(arguments | differentiable))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    return jax.value_and_grad(loss, has_aux=True)({n: arguments[n] for n in DIFFERENTIABLE})


def two_of(name, x):
    if name == "dropout_key":
        return jax.random.split(x, 2)
    return jnp.stack([x, x - 4]) if x.dtype == jnp.int32 else jnp.stack([x, x * 0.5])


@pytest.mark.parametrize(
    "mapped",
    [("query",), ("key", "value"), ("bias", "lengths"), ("scale", "ids"), ("dropout_key",), tuple(OPERANDS)],
    ids="+".join,
)
def test_vmap_equals_a_loop(mapped):
    arguments = {n: two_of(n, x) if n in mapped else x for n, x in OPERANDS.items()}
    axes = {n: 0 if n in mapped else None for n in OPERANDS}
    got = jax.jit(jax.vmap(results, in_axes=(axes,)))(arguments)
    one = jax.jit(results)
    loop = [one({n: x[i] if n in mapped else x for n, x in arguments.items()}) for i in range(2)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *loop))


def test_vmap_nests_and_maps_any_axis():
    q = jnp.stack([Q, 2 * Q, 3 * Q], axis=2)
    keys = jnp.stack([KEY, -KEY])
    call = lambda q, k: flash_attention(q, k, V, is_causal=True)
    got = jax.vmap(jax.vmap(call, in_axes=(2, None), out_axes=1), in_axes=(None, 0))(q, keys)
    close(got[1, :, 2], call(3 * Q, -KEY))


def test_vmap_maps_the_arrays_of_a_mask():
    ids = jnp.stack([jnp.arange(S) // 5, jnp.arange(S) // 9])
    masks = Segments(ids[:, :T], ids) & SlidingWindow(jnp.array([3, 11]), 2)
    got = jax.vmap(lambda m: flash_attention(Q, KEY, V, mask=m))(masks)
    for i, window in enumerate((3, 11)):
        mask = Segments(ids[i, :T], ids[i]) & SlidingWindow(window, 2)
        close(got[i], flash_attention(Q, KEY, V, mask=mask))


def test_vmap_of_three_dimensional_calls_equals_the_batched_call():
    close(
        jax.vmap(functools.partial(flash_attention, is_causal=True))(Q, KEY, V),
        flash_attention(Q, KEY, V, is_causal=True),
    )


def test_vmap_does_not_copy_an_unmapped_bias():
    bias = jax.ShapeDtypeStruct((1, 1, 512, 512), jnp.float32)
    q = jax.ShapeDtypeStruct((16, 1, 512, 1, 8), jnp.float32)
    call = jax.vmap(lambda q, bias: flash_attention(q, q, q, bias), in_axes=(0, None))
    memory = jax.jit(call).lower(q, bias).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 512 * 512 * 4


# ---- scan and checkpoint ---------------------------------------------------------------------------


def layer(x, w, seed, window):
    key = jax.random.fold_in(jax.random.key(0), seed)
    mask = SlidingWindow(window)
    y = flash_attention(x * w, x, x, mask=mask, dropout_rate=0.1, dropout_key=key)
    return x + y


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "names", "full"])
def test_scan_over_layers_equals_the_unrolled_loop(dtype, remat):
    x = jax.random.normal(jax.random.key(0), (1, 40, 2, 8)).astype(dtype)
    weights = jax.random.normal(jax.random.key(1), (3, 8)).astype(dtype)
    seeds, windows = jnp.arange(3), jnp.array([4, 40, 11])
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    body = {"none": layer, "names": jax.checkpoint(layer, policy=policy), "full": jax.checkpoint(layer)}[
        remat
    ]

    def scanned(x, weights):
        step = lambda x, each: (body(x, *each), None)
        return jnp.sum(jax.lax.scan(step, x, (weights, seeds, windows))[0].astype(jnp.float32))

    def unrolled(x, weights):
        for i in range(3):
            x = layer(x, weights[i], seeds[i], windows[i])
        return jnp.sum(x.astype(jnp.float32))

    got = jax.jit(jax.grad(scanned, argnums=(0, 1)))(x, weights)
    wanted = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(x, weights)
    assert all(g.dtype == dtype for g in got)
    wide = lambda tree: jax.tree.map(lambda g: np.asarray(g, np.float32), tree)
    close(wide(got), wide(wanted), **({"rtol": 0.1, "atol": 0.1} if dtype == "bfloat16" else {}))


@pytest.mark.parametrize(("remat", "runs"), [("none", 1), ("names", 1), ("full", 2)])
def test_checkpoint_by_name_runs_the_forward_once(remat, runs):
    policies = {"names": jax.checkpoint_policies.save_only_these_names(*NAMES), "full": None}
    attention = lambda w: flash_attention(Q * w, KEY, V, is_causal=True)
    if remat != "none":
        attention = jax.checkpoint(attention, policy=policies[remat])
    step = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(attention(w))))
    # One call of the forward and one of the backward, or the forward once more.
    assert str(jax.make_jaxpr(step)(jnp.float32(1))).count("custom_vmap_call[") == runs + 1


# ---- many devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_equals_one_device(check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    q, k, v = qkv(batch=4)
    bias = jax.random.normal(jax.random.key(5), (1, 1, T, S))
    lengths = jnp.array([20, 3, 0, 23])
    split = PartitionSpec("data", None, "heads")

    def call(q, k, v, bias, lengths):
        return flash_attention(q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths)

    sharded = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(split, split, split, PartitionSpec(), PartitionSpec("data")),
        out_specs=split,
        check_vma=check_vma,
    )
    loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x, lengths)))
    got, wanted = (
        jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2, 3)))(q, k, v, bias) for f in (sharded, call)
    )
    close(got, wanted)


def test_shard_map_nests_in_scan_and_checkpoint():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.random.normal(jax.random.key(0), (2, 40, 2, 8))
    w = jnp.linspace(0.5, 1.5, 8)

    def model(x, w):
        step = lambda x, seed: (jax.checkpoint(layer)(x, w, seed, 9), None)
        return jax.lax.scan(step, x, jnp.arange(2))[0]

    spec = PartitionSpec("data")
    sharded = jax.shard_map(model, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    # Each shard counts its own rows from 0, so dropout repeats: compare with rows mapped one by one.
    rows = jax.vmap(lambda x, w: model(x[None], w)[0], in_axes=(0, None))
    got, wanted = (jax.jit(jax.grad(lambda w, f=f: jnp.sum(f(x, w) ** 2)))(w) for f in (sharded, rows))
    close(got, wanted)


def test_pmap_trains_like_one_device():
    devices = 4
    q, k, v = (x.reshape(devices, 1, *x.shape[1:]) for x in qkv(batch=devices))
    keys = jax.random.split(jax.random.key(9), devices)

    def loss(w, q, k, v, key):
        return jnp.mean(flash_attention(q * w, k, v, dropout_rate=0.2, dropout_key=key) ** 2)

    @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0, 0, 0, 0))
    def step(w, q, k, v, key):
        return jax.lax.pmean(jax.grad(loss)(w, q, k, v, key), "data"), flash_attention(
            jnp.ones_like(q), jnp.ones_like(k), v, dropout_rate=0.5, dropout_key=key
        )

    w = jnp.float32(0.7)
    gradient, dropped = step(w, q, k, v, keys)
    wanted = jnp.mean(jnp.stack([jax.grad(loss)(w, q[i], k[i], v[i], keys[i]) for i in range(devices)]))
    close(gradient, jnp.full(devices, wanted))
    same = flash_attention(
        jnp.ones_like(q[0]), jnp.ones_like(k[0]), v[1], dropout_rate=0.5, dropout_key=keys[0]
    )
    assert np.abs(np.asarray(dropped[1] - same)).max() > 0.01


# ---- derivatives -----------------------------------------------------------------------------------


def test_grad_of_integer_arguments_is_float0():
    def call(q, lengths, ids):
        return flash_attention(q, KEY, V, mask=Segments(ids[:T], ids), key_value_seq_lengths=lengths)

    _, pull = jax.vjp(call, Q, OPERANDS["lengths"], OPERANDS["ids"])
    dq, dlengths, dids = pull(jnp.ones((B, T, N, D)))
    assert dq.shape == Q.shape
    assert dlengths.dtype == jax.dtypes.float0
    assert dids.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "names", [("query",), ("value",), ("bias",), ("scale",), ("key", "scale")], ids="+".join
)
def test_grad_of_a_subset_equals_the_full_gradient(names):
    def loss(chosen):
        return jnp.sum(jnp.sin(everything(**(OPERANDS | chosen))[0]))

    full = jax.grad(loss)({n: OPERANDS[n] for n in DIFFERENTIABLE})
    part = jax.grad(loss)({n: OPERANDS[n] for n in names})
    close(part, {n: full[n] for n in names}, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: jax.jvp(f, (Q,), (Q,)), "custom_vjp"),
        (lambda f: jax.jacfwd(f)(Q), "custom_vjp"),
        (
            lambda f: jax.grad(lambda q: jax.grad(lambda q: f(q).sum())(q).sum())(Q),
            "jax.nn.dot_product_attention",
        ),
        (lambda f: jax.hessian(lambda q: f(q).sum())(Q[:1, :2]), "jax.nn.dot_product_attention"),
    ],
    ids=["jvp", "jacfwd", "grad-of-grad", "hessian"],
)
def test_derivatives_that_do_not_exist_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call(lambda q: flash_attention(q, KEY[: q.shape[0]], V[: q.shape[0]]))


def test_precision_context_reaches_a_backward_traced_outside_it():
    with jax.default_matmul_precision("highest"):
        _, pull = jax.vjp(lambda q: flash_attention(q, KEY, V), Q)
    text = str(jax.make_jaxpr(pull)(jnp.ones((B, T, N, D))))
    assert "HIGHEST" in text.upper()
    assert "precision=None" not in text


@pytest.mark.parametrize("x64", [True, False])
def test_flash_attention_does_not_depend_on_64_bit_mode(x64):
    arrays = tuple(np.asarray(x) for x in (Q, KEY, V))
    lengths = np.array([20, 9])
    with jax.enable_x64(x64):
        q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays)
        ids = jnp.asarray(np.arange(S) // 7)
        assert ids.dtype == (jnp.int64 if x64 else jnp.int32)

        def call(q):
            return flash_attention(
                q,
                k,
                v,
                mask=Segments(ids[:T], ids) | Causal(offset=jnp.asarray(lengths) - 15),
                key_value_seq_lengths=jnp.asarray(lengths),
                dropout_rate=0.3,
                dropout_key=jax.random.key(2),
                scale=0.2,
                softcap=3.0,
                return_residual=True,
            )

        (out, lse), pull = jax.vjp(call, q)
        (dq,) = pull((jnp.ones_like(out), jnp.zeros_like(lse)))
        assert (out.dtype, lse.dtype, dq.dtype) == (jnp.float32,) * 3
        got = [np.asarray(x) for x in (out, lse, dq)]
    wanted = _RESULTS.setdefault("first", got)
    close(got, wanted, rtol=1e-6, atol=1e-6)


_RESULTS: dict = {}


def test_flash_attention_in_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x), jnp.float64) for x in (Q, KEY, V))
        options = {"is_causal": True, "return_residual": True}
        got = flash_attention(q, k, v, **options, implementation="small-tiles")
        wanted = flash_attention(q, k, v, **options, implementation="reference")
        assert got[0].dtype == got[1].dtype == jnp.float64
        close(got, wanted, rtol=1e-13, atol=1e-13)

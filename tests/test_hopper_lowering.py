"""The Hopper kernels without a GPU: what lowers for CUDA and to what, and what is refused in which words."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flashjax import Causal, CustomMask, Operand, ScoreFunction, Segments, backends, explain, flash_attention
from flashjax.backends import hopper
from tests.anywhere import ANYWHERE, offer
from tests.cases import HALVES, WIDE_CASES

old_jax = jax.__version_info__ < hopper.NEEDS_JAX
needs_kernel = pytest.mark.skipif(old_jax, reason=f"the kernel needs jax 0.11, and this is {jax.__version__}")

# One case of each form of the kernel: a second or more goes into each. On a GPU all run.
SAME_FORM = re.compile(
    r"(t|s)(5|7|63|64|65|127|128|129|191|193|255|257|264|120)|d(24|40)-causal|d(80|96|160|248)-full|"
    r"steep-.*|scattered-d256|dense-d256|packed-d256|window-d256|float16-d128|gqa-8|mqa|"
    r"(bias-pair|alibi|sinks|dropout)-d(64|128|256)|bias-(keys|full-causal)-d(64|256)|position-bias-d(64|128)|"
    r"function-d(128|256)|dropout-causal-d(64|128)|bias-d32|bias-half-d64|buckets-d64"
)
WIDE = [case for case in WIDE_CASES if not SAME_FORM.fullmatch(case.name)]
NARROW = [
    "few-queries",
    "query-lengths",
    "both-lengths-causal-end",
    "dense-heads",
    "offset-rows",
    "window-end",
    "blocks",
    "custom",
    "nothing-visible",
    "scale-zero",
    "bias-queries-heads",
    "bias-half-in-float32",
    "bias-one-a-head",
    "alibi-rows-end",
    "function-weights",
    "sinks-blind-rows",
    "dropout-causal-bias",
    "bias-function-position-alibi-lengths-segments-group-dropout",
]
FORMS = [case for case in HALVES if case.name.rpartition("-")[0] in NARROW]
SCORED = [case for case in HALVES if (case.bias is not None or case.learned) and case not in FORMS]


@pytest.fixture(scope="module", autouse=True)
def hopper_anywhere(small_tiles):
    """Offer ``implementation="hopper-anywhere"``: the Hopper backend, whatever the device."""
    shipped = backends.BACKENDS
    offer()
    yield
    backends.BACKENDS = shipped


attend = functools.partial(flash_attention, implementation="hopper-anywhere")


def lower(function, *args, **options):
    return jax.jit(function, **options).trace(*args).lower(lowering_platforms=("cuda",))


def kernels(lowered) -> int:
    """Count the kernels in a program."""
    return len(re.findall(r"custom_call @mosaic_gpu\w*", lowered.as_text()))


def shapes(batch=1, length=128, heads=2, kv_heads=None, dim=64, keys=None, dtype="bfloat16"):
    kv_heads, keys = kv_heads or heads, keys or length
    return tuple(
        jax.ShapeDtypeStruct((batch, n, h, dim), dtype)
        for n, h in ((length, heads), (keys, kv_heads), (keys, kv_heads))
    )


# ---- what lowers -----------------------------------------------------------------------------------


# Forms of the backward kernel that no other test compiles or interprets, and how many arrays that scores read
# have a gradient: one kernel each.
GRADED = {
    "few-queries-bfloat16": 0,
    "offset-rows-float16": 0,
    "d64-256": 0,
    "d72-full": 0,
    "d248-full": 0,
    "packed-d64": 0,
    "many-tiles": 0,
    "sinks-d64": 0,
    "bias-keys-d256": 1,
    "mixed-d128": 2,
    "function-float16": 4,
}


@needs_kernel
@pytest.mark.parametrize(
    "case", [c for c in (*HALVES, *WIDE_CASES) if c.name in GRADED], ids=lambda c: c.name
)
def test_hopper_lowers_gradients(case):
    deterministic = case.head_dim == 72
    arrays, options = case.arguments()
    data = {n: x for n, x in options.items() if not isinstance(x, bool | int | float | tuple)}
    static = {n: x for n, x in options.items() if n not in data} | {"deterministic": deterministic}

    def call(arrays, data, cotangents):
        run = lambda a: attend(**a, **data, **static, return_residual=True)
        return jax.vjp(run, arrays)[1](cotangents)

    assert kernels(lower(call, arrays, data, case.cotangents())) == 4 + GRADED[case.name]


# Boolean masks of every form, of tiles that are all whole: no positions are compared then.
WHOLE = [(2, 1, 1, 128), (1, 1, 256, 1), (1, 2, 256, 128)]
WHOLE += [
    pytest.param(x, marks=pytest.mark.slow)
    for x in [(1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 256, 1), (1, 2, 1, 128)]
]


def under_a_mesh():
    axes = (jax.sharding.AxisType.Explicit,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axis_types=axes))


@needs_kernel
@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_hopper_lowers_masks_under_a_mesh(shape):
    def loss(q, k, v, mask):
        return attend(q, k, v, mask=mask).astype(jnp.float32).sum()

    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)
    with under_a_mesh():
        program = lower(jax.grad(loss, (0, 1, 2)), *shapes(batch=2, length=256, keys=128), mask)
    assert kernels(program) == 4


MESHED = [
    "function-weights-float16",
    pytest.param("bias-position-sinks-window-group-dropout-bfloat16", marks=pytest.mark.slow),
    pytest.param("position-function-scale-softcap-lengths-window-float16", marks=pytest.mark.slow),
]


@needs_kernel
@pytest.mark.parametrize("name", MESHED)
def test_hopper_lowers_mixtures_under_a_mesh(name):
    case = next(c for c in HALVES if c.name == name)
    arrays, options = case.arguments()
    cotangents = case.cotangents()

    def call(arrays, cotangents):
        return jax.vjp(lambda a: attend(**a, **options, return_residual=True), arrays)[1](cotangents)

    with under_a_mesh():
        program = lower(call, arrays, cotangents)
    assert kernels(program) > 4


@needs_kernel
def test_hopper_has_no_kernel_for_a_gradient_that_nobody_asks_for():
    def loss(q, k, v, bias, slopes):
        out = attend(q, k, v, bias, alibi_slopes=slopes, is_causal=True)
        return out.astype(jnp.float32).sum()

    bias, slopes = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 2, 128, 128), (2,)))
    for argnums, count in (((0, 1, 2), 4), ((4,), 5)):
        assert kernels(lower(jax.grad(loss, argnums), *shapes(), bias, slopes)) == count


@needs_kernel
def test_hopper_program_of_a_call_does_not_depend_on_what_it_does_not_use():
    unused = dict.fromkeys(("bias", "position_bias", "alibi_slopes", "score_fn", "sinks", "softcap"))
    unused |= {"dropout_rate": 0.0, "dropout_key": jax.random.key(0)}
    programs = []
    for options in ({}, unused):
        loss = lambda *x, options=options: attend(*x, is_causal=True, **options).astype(jnp.float32).sum()
        jax.clear_caches()
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(*shapes())
        programs.append(re.sub(r" at 0x\w+", "", str(jaxpr)))
    assert programs[0] == programs[1]
    assert "flash_attention_backward" in programs[0]


LOWERED = [
    pytest.param(case, marks=pytest.mark.slow if n % 4 else (), id=case.name)
    for n, case in enumerate([*FORMS, *WIDE])
]
LOWERED += [pytest.param(case, marks=pytest.mark.slow, id=case.name) for case in SCORED]


@needs_kernel
@pytest.mark.parametrize("case", LOWERED)
def test_hopper_lowers_what_it_does_not_refuse(case):
    arrays, options = case.arguments()
    static = {n: x for n, x in options.items() if isinstance(x, bool | int | float | tuple)}
    data = {n: x for n, x in options.items() if n not in static}
    call = lambda arrays, data: attend(**arrays, **data, **static, return_residual=True)
    assert kernels(lower(call, arrays, data)) == 1


@needs_kernel
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 72])
def test_hopper_is_one_kernel_on_the_arrays_as_they_are(options, dim):
    text = lower(
        functools.partial(attend, **options), *shapes(length=130, heads=4, kv_heads=2, dim=dim)
    ).as_text()
    operations = set(re.findall(r"= \"?(?:stablehlo|chlo)\.(\w+)", text))
    assert operations <= {"custom_call", "constant", "slice"}, operations  # the slice cuts lse to T
    assert len(re.findall(r"custom_call @", text)) == 1


@needs_kernel
def test_hopper_queue_is_one_number_beside_the_kernel():
    # More query tiles than a GPU has processors, which differ under a causal mask.
    args = shapes(batch=4, length=2048, heads=16, dim=128)
    lowered = lower(functools.partial(attend, is_causal=True), *args)
    assert kernels(lowered) == 1
    results = re.findall(r"stablehlo\.(\w+)[^\n]*-> \(?(tensor<[\w]+>)", lowered.as_text())
    results += re.findall(r"stablehlo\.(constant) [^\n]*: (tensor<[\w]+>)", lowered.as_text())
    rest = {(name, shape) for name, shape in results if name not in ("custom_call", "slice")}
    assert rest
    assert {shape for _, shape in rest} <= {"tensor<i32>", "tensor<1xi32>"}, rest


@needs_kernel
def test_hopper_grid_may_have_more_heads_than_a_grid_axis_holds():
    batch = 2**16 // 8 + 1
    assert kernels(lower(attend, *shapes(batch=batch, length=64, heads=8))) == 1


@needs_kernel
def test_hopper_arrays_may_have_more_than_2_to_the_31_elements():
    query = shapes(batch=3, length=2**17, heads=64, dim=128)
    assert np.prod(query[0].shape) > 2**31
    assert kernels(lower(functools.partial(attend, is_causal=True), *query)) == 1


# ---- transformations -------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_hopper_lowers_under_grad(wrap):
    loss = wrap(lambda q, k, v: attend(q, k, v, is_causal=True).astype(jnp.float32).sum())
    # Forward; what the backward pass starts from; the pass; its dq in the shape of q.
    assert kernels(lower(jax.grad(loss, argnums=(0, 1, 2)), *shapes())) == 4


@needs_kernel
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, 0, 0)], ids=str)
def test_hopper_folds_vmap_into_one_kernel(axes):
    args = [
        x if axis is None else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        for x, axis in zip(shapes(batch=2), axes, strict=True)
    ]
    assert kernels(lower(jax.vmap(functools.partial(attend, is_causal=True), axes), *args)) == 1


def row_is_odd(b, h, q, k, shift):
    return (b % 2 == 1) | (k <= q + shift)


@needs_kernel
def test_hopper_lowers_masks_that_count_rows_under_vmap():
    def call(q, k, v, shift):
        return attend(q, k, v, mask=CustomMask(row_is_odd, shift=Operand(shift, "b")) & Causal())

    q, k, v = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes(batch=2))
    shift = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    assert kernels(lower(jax.vmap(call), q, k, v, shift)) == 1
    assert (
        kernels(lower(jax.vmap(call, (0, 0, 0, None)), q, k, v, jax.ShapeDtypeStruct((2,), jnp.int32))) == 1
    )


@needs_kernel
def test_hopper_lowers_in_scan():
    def layers(q, k, v, ids):
        return jax.lax.scan(lambda x, _: (attend(x, k, v, mask=Segments(ids)), None), q, length=3)[0]

    assert kernels(lower(layers, *shapes(), jax.ShapeDtypeStruct((128,), jnp.int32))) == 1


@needs_kernel
@pytest.mark.parametrize(
    ("pass_", "check_vma"),
    [("forward", True), ("backward", True), ("backward", False), ("deterministic", True)],
)
def test_hopper_lowers_in_shard_map(pass_, check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = PartitionSpec("data", None, "model")
    run = functools.partial(attend, is_causal=True, deterministic=pass_ == "deterministic")
    if pass_ != "forward":
        run = jax.grad(lambda *a, run=run: run(*a).astype(jnp.float32).sum(), (0, 1, 2))
    call = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x in shapes(batch=2, heads=4, kv_heads=2)
    ]
    assert kernels(lower(call, *args)) == {"forward": 1, "backward": 4, "deterministic": 4}[pass_]


@needs_kernel
def test_hopper_exports_for_cuda():
    pytest.importorskip("flatbuffers", reason="jax.export writes through flatbuffers")
    exported = jax.export.export(jax.jit(functools.partial(attend, is_causal=True)), platforms=["cuda"])(
        *shapes()
    )
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert "mosaic_gpu" in again.mlir_module()


# ---- refusals --------------------------------------------------------------------------------------


def refusal(match, *, arrays=None, backend=ANYWHERE, **options):
    """Assert that a call is refused in words that match."""
    call = functools.partial(flash_attention, implementation=backend.name, **options)
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(call, *(arrays or shapes()))


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_refusal_names_the_dtype(dtype):
    with jax.enable_x64(True):
        refusal(f"multiplies float16 and bfloat16, and the call is in {dtype}", arrays=shapes(dtype=dtype))


@needs_kernel
@pytest.mark.parametrize("dim", [4, 13, 264])
def test_refusal_names_the_head_dim(dim):
    refusal(f"multiples of 8 up to 256, and the head dim is {dim}", arrays=shapes(dim=dim))


@needs_kernel
def test_refusal_names_the_value_dim():
    q, k, _ = shapes()
    refusal("up to 256, and the value dim is 12", arrays=(q, k, shapes(dim=12)[2]))


@needs_kernel
@pytest.mark.parametrize(
    "precision", [jax.lax.DotAlgorithmPreset.BF16_BF16_BF16, jax.lax.DotAlgorithmPreset.F16_F16_F16], ids=str
)
def test_refusal_names_the_precision(precision):
    refusal("multiplies exactly and adds in float32, and precision is", precision=precision)


@needs_kernel
@pytest.mark.parametrize(
    "precision", [None, "highest", jax.lax.Precision.HIGH, ("default", "highest")], ids=str
)
def test_every_precision_that_exact_products_satisfy_is_accepted(precision):
    jax.eval_shape(functools.partial(attend, precision=precision), *shapes())


@needs_kernel
def test_refusal_names_operands_that_the_kernel_does_not_read():
    far = lambda b, h, q, k, far: q - k < far
    dense = Operand(np.zeros((128, 128), np.int32), "qk")
    refusal(
        "operand 'far' has one int32 per query and key; .* only booleans", mask=CustomMask(far, far=dense)
    )
    with jax.enable_x64(True):
        wide = Operand(np.zeros(2, np.int64), "h")
        refusal(
            "operand 'far' has dtype int64; the kernel reads up to 32 bits", mask=CustomMask(far, far=wide)
        )
    narrow = Operand(np.zeros(2, np.int8), "h")
    refusal("operand 'right.far' has dtype int8, and a function", mask=Causal() & CustomMask(far, far=narrow))


@needs_kernel
def test_refusal_counts_the_vectors_of_a_mask():
    ids = Segments(np.zeros((1, 128), np.int32))
    jax.eval_shape(functools.partial(attend, mask=ids & ids & ids), *shapes())
    refusal("the call reads 8 vectors over queries or keys; the kernel holds 7", mask=ids & ids & ids & ids)


@needs_kernel
def test_refusal_names_operands_of_scores_that_the_kernel_does_not_read():
    def refuse(match, array, axes):
        function = ScoreFunction(where_alike, ids=Operand(array, axes))
        refusal(f"the operand 'ids' of the scores has {match}", score_fn=function)

    only = "per query and key; the kernel reads only booleans and, in scores, floating numbers"
    refuse(f"one int32 {only}", np.zeros((128, 128), np.int32), "qk")
    refuse(f"one uint32 {only}", np.zeros((1, 2, 255), np.uint32), "bhr")
    refuse("dtype int8, and a function in the kernel computes with 32 bits", np.zeros(128, np.int8), "k")
    with jax.enable_x64(True):
        refuse("dtype int64; the kernel reads up to 32 bits", np.zeros(128, np.int64), "q")


def where_alike(score, b, h, q, k, ids):
    return jnp.where(ids > 0, score, -score)


def sum_up(score, b, h, q, k, **vectors):
    return score + sum(vectors.values())


@needs_kernel
def test_refusal_counts_the_vectors_of_scores_and_dropout():
    def options(count):
        vectors = {f"x{n}": Operand(np.zeros(128, np.float32), "kq"[n % 2]) for n in range(count)}
        return {"score_fn": ScoreFunction(sum_up, **vectors)}

    jax.eval_shape(functools.partial(attend, **options(7)), *shapes())
    counted = "the call reads 8 vectors over queries or keys; the kernel holds 7"
    refusal(counted, **options(8))
    # Dropout has three of its own, and a bias over keys is one.
    dropped = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    jax.eval_shape(functools.partial(attend, **options(4), **dropped), *shapes())
    refusal(counted, **options(4), **dropped, bias=jnp.zeros((1, 1, 1, 128)))


TABLE = jnp.arange(128.0)
GATHERS = {
    "closed-over": lambda score, b, h, q, k: score + TABLE[jnp.abs(q - k)],
    "operand": lambda score, b, h, q, k, x: score + jnp.take(x, jnp.abs(q - k) % 2),
}


@needs_kernel
@pytest.mark.parametrize("name", GATHERS)
def test_refusal_names_a_score_function_that_looks_something_up(name):
    operands = {"x": Operand(TABLE[:2], "h")} if name == "operand" else {}
    function = ScoreFunction(GATHERS[name], **operands)
    refusal("score_fn .*gather.* reads arrays only as declared operands", score_fn=function)
    assert explain(*map(jnp.zeros_like, shapes()), score_fn=function).startswith("backend: xla")


@needs_kernel
def test_refusal_names_a_score_function_that_closes_over_an_array():
    rows = jnp.linspace(0, 1, 64)[:, None]
    refusal("score_fn closes over an array", score_fn=lambda score, b, h, q, k: score + rows)


@needs_kernel
def test_refusal_names_a_dropout_rate():
    refusal(
        "drops 0.99 of the weights at most, and dropout_rate is 0.995",
        dropout_rate=0.995,
        dropout_key=jax.random.key(0),
    )


SHIPPED = next(x for x in backends.BACKENDS if x.name == "hopper")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU")
@needs_kernel
def test_refusal_says_that_there_is_no_gpu():
    refusal("it needs an NVIDIA Hopper GPU, and the default device is cpu", backend=SHIPPED)


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 9, 0)])
def test_refusal_names_an_old_jax(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    refusal("it needs jax 0.11 or newer, and this is jax", backend=SHIPPED)


@needs_kernel
@pytest.mark.parametrize("capability", ["8.0", "10.0", "12.0"])
def test_refusal_names_another_compute_capability(monkeypatch, capability):
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA X")
    monkeypatch.setattr(hopper, "_default_device", lambda: device)
    refusal(f"needs compute capability 9.0 .*, and NVIDIA X has {capability}", backend=SHIPPED)
    device.compute_capability = "9.0"
    assert hopper.missing_device() is None

"""The Hopper kernels compiled for an H100 that is not there: registers, shared memory, temporary memory.

Needs jax's CUDA plugin, which holds the compiler, and no driver. The compiler prints its reports if it is
told so before jax is imported, so a process of its own compiles every call; run as a program, this file is
that process.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from flashjax.backends import hopper

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = 232_448  # bytes a block may have
B, T, N = 2, 8192, 16
PAIRS = {"pairs": (128, 4)}  # B and N of kinds of call that have others

pytestmark = [
    pytest.mark.skipif(
        jax.__version_info__ < hopper.NEEDS_JAX,
        reason=f"the kernel needs jax 0.11, and this is {jax.__version__}",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None
        or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
        reason="jax-cuda13-plugin, which compiles for CUDA, is not installed (extra: hopper-tests)",
    ),
]

DIMS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "192-128": (192, 128), "32": (32, 32)}

# Name: head dims, length, and what `_options` makes of it.
CALLS = {
    **{f"d{d}-{kind}": (d, T, kind) for d in DIMS for kind in ("full", "causal")},
    **{f"d128-{kind}": ("128", T, kind) for kind in ("window", "packed", "lengths", "dense", "blocks")},
    **{f"d{d}-softcap": (d, T, "softcap") for d in ("64", "128", "256")},
    "d128-scale": ("128", T, "scale"),
    **{f"d{d}-packed": (d, T, "packed") for d in ("64", "256")},
    **{f"d64-{kind}": ("64", T, kind) for kind in ("window", "lengths")},
    "d128-ragged": ("128", T - 3, "causal"),
    "d64-ragged": ("64", T - 3, "full"),
    **{f"d64-{kind}-short": ("64", 512, kind) for kind in ("causal", "packed")},
    "d128-full-short": ("128", 512, "full"),
    "d64-bias": ("64", 2048, "bias"),
    **{f"d128-{kind}": ("128", T, kind) for kind in ("function", "dropout", "max")},
    # the backward pass
    **{
        f"{d}-{kind}-backward": (d, T, kind)
        for d in ("64", "128", "256")
        for kind in ("full", "causal", "packed", "deterministic")
    },
    **{
        f"128-{kind}-backward": ("128", T, kind)
        for kind in ("window", "lengths", "dense", "grouped", "scale")
    },
    "192-128-causal-backward": ("192-128", T, "causal"),
    "32-causal-backward": ("32", T, "causal"),
    **{f"{d}-softcap-backward": (d, T, "softcap") for d in ("64", "256")},
    "128-ragged-backward": ("128", T - 3, "full"),
    "256-vectors-backward": ("256", T, "vectors"),
    # ... with the gradients of what the scores read
    "64-bias-backward": ("64", 2048, "bias"),
    **{f"128-{kind}-backward": ("128", T, kind) for kind in ("alibi", "dropout", "function")},
    "64-alibi-backward": ("64", T, "alibi"),
    "64-dropout-causal-backward": ("64", T, "dropout-causal"),
    "32-pairs-backward": ("32", 768, "pairs"),
}
# Further forms of these.
FURTHER = {
    **{f"d128-{kind}-short": ("128", 512, kind) for kind in ("causal", "packed")},
    "d64-full-short": ("64", 512, "full"),
    "d128-full-2048": ("128", 2048, "full"),
    **{f"d{d}-bias": (d, 2048, "bias") for d in ("128", "256")},
    "d32-pairs": ("32", 768, "pairs"),
    **{f"d{d}-alibi": (d, T, "alibi") for d in ("64", "128", "256")},
    **{f"d{d}-max": (d, T, "max") for d in ("64", "256")},
    **{f"d{d}-vectors-max": (d, T, "vectors-max") for d in ("64", "128", "256")},
    **{f"d128-{kind}": ("128", T, kind) for kind in ("bias-causal", "position", "sinks", "dropout-causal")},
    **{f"d64-{kind}": ("64", T, kind) for kind in ("function", "dropout", "dropout-causal")},
    **{f"{d}-bias-backward": (d, 2048, "bias") for d in ("128", "256")},
    **{f"128-{kind}-backward": ("128", T, kind) for kind in ("bias-causal", "position", "sinks")},
    **{f"64-{kind}-backward": ("64", T, kind) for kind in ("function", "dropout")},
    **{f"256-{kind}-backward": ("256", T, kind) for kind in ("dropout", "dropout-causal")},
}
CALLS |= FURTHER

# As many vectors as a mask may have, in dtypes and over axes that take the most of shared memory.
VECTORS = {
    "u": ("q", "int32"),
    "v": ("q", "int32"),
    "w": ("q", "int32"),
    "x": ("q", "float32"),
    "y": ("q", "uint32"),
    "i": ("k", "int32"),
    "j": ("k", "float32"),
}


def _reads_vectors(b, h, q, k, *, u, v, w, x, y, i, j):
    return (u + v + w >= i) & (x >= j) & (y > 0)


def _bend(score, b, h, q, k, strength, weight):
    """Change a logit as a user might, by a number of the head and one of the key."""
    return jax.numpy.where(k > q, score * strength, jax.numpy.tanh(score) * weight)


def _options(kind, length):
    """Return the arrays that a kind of call takes beside q, k and v, and ``f(*arrays)`` to its keywords."""
    from flashjax import BlockSparse, Causal, CustomMask, Operand, ScoreFunction, Segments

    def mask_of(*vectors):
        named = zip(VECTORS.items(), vectors, strict=True)
        return CustomMask(_reads_vectors, **{name: Operand(x, axis) for (name, (axis, _)), x in named})

    def bent(strength, weight):
        return ScoreFunction(_bend, strength=Operand(strength, "h"), weight=Operand(weight, "bk"))

    def dropped(key, **options):
        return {"dropout_rate": 0.1, "dropout_key": key, **options}

    vectors = [((length,), dtype) for _, dtype in VECTORS.values()]
    most = {"return_max_logit": True}
    blocks = -(-length // 128)
    heads = PAIRS.get(kind, (B, N))[1]
    pair, key = (1, heads, length, length), [((2,), "uint32")]
    return {
        "full": ([], dict),
        "causal": ([], lambda: {"is_causal": True}),
        "grouped": ([], lambda: {"is_causal": True}),
        "deterministic": ([], lambda: {"is_causal": True, "deterministic": True}),
        "window": ([], lambda: {"local_window_size": (1024, 0)}),
        "packed": ([((B, length), "int32")], lambda ids: {"mask": Segments(ids) & Causal()}),
        "lengths": ([((B,), "int32")], lambda n: {"key_value_seq_lengths": n}),
        "dense": ([((B, 1, length, length), "bool")], lambda seen: {"mask": seen}),
        "blocks": ([((1, 1, blocks, blocks), "bool")], lambda seen: {"mask": BlockSparse(seen, 128)}),
        "softcap": ([], lambda: {"softcap": 30.0, "is_causal": True}),
        "vectors": (vectors, lambda *vectors: {"mask": mask_of(*vectors)}),
        "vectors-max": (vectors, lambda *vectors: {"mask": mask_of(*vectors), **most}),
        "scale": ([((), "float32")], lambda scale: {"scale": scale, "is_causal": True}),
        "bias": ([(pair, "bfloat16")], lambda bias: {"bias": bias}),
        "pairs": ([(pair, "bfloat16")], lambda bias: {"bias": bias}),
        "bias-causal": ([(pair, "float32")], lambda bias: {"bias": bias, "is_causal": True}),
        "alibi": ([((heads,), "float32")], lambda slopes: {"alibi_slopes": slopes, "is_causal": True}),
        "position": ([((heads, 2 * length - 1), "float32")], lambda x: {"position_bias": x}),
        "function": (
            [((heads,), "float32"), ((B, length), "float32")],
            lambda *x: {"score_fn": bent(*x), "is_causal": True},
        ),
        "sinks": ([((heads,), "float32")], lambda sinks: {"sinks": sinks, "is_causal": True}),
        "max": ([((heads,), "float32")], lambda sinks: {"sinks": sinks, "is_causal": True, **most}),
        "dropout": (key, dropped),
        "dropout-causal": (key, lambda key: dropped(key, is_causal=True)),
    }[kind]


# Every third forward call, beside most of the backward pass, where ptxas is hardest to please.
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.slow if name in FURTHER or (n % 3 and not name.endswith("-backward")) else (),
    )
    for n, name in enumerate(CALLS)
]


# ---- the process that compiles ---------------------------------------------------------------------


def compile_calls(names):
    """Compile calls for an H100; the compiler prints what it says of each, and then comes a line of JSON."""
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from flashjax import flash_attention
    from tests.anywhere import offer

    offer()
    target = Path(__file__).with_name("h100.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    abstract = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    for name in names:
        dims, length, kind = CALLS[name]
        arrays, keywords = _options(kind, length)
        attend = functools.partial(flash_attention, implementation="hopper-anywhere", return_residual=True)
        call = jax.jit(lambda q, k, v, *rest, keywords=keywords: attend(q, k, v, **keywords(*rest)))  # noqa: B023
        d, dv = DIMS[dims]
        batch, n = PAIRS.get(kind, (B, N))
        heads = (n, n // 4, n // 4) if kind == "grouped" else (n,) * 3
        shapes = [(batch, length, n, x) for n, x in zip(heads, (d, d, dv), strict=True)]
        args = [abstract(x, "bfloat16") for x in shapes]
        args += [abstract(*x) for x in arrays]
        if name.endswith("-backward"):
            results, pull = jax.eval_shape(functools.partial(jax.vjp, call), *args)
            args = jax.tree.map(lambda x: abstract(x.shape, x.dtype), (pull, results))
            call = jax.jit(lambda pull, cotangents: pull(cotangents))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = call.lower(*args).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(json.dumps({"name": name, "temporary": temporary}), flush=True)


# ---- tests -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(request):
    """Return ``(what the compiler prints, bytes of temporary memory)`` of each call that is tested."""
    own = [x for x in request.session.items if getattr(x, "module", None) is request.module]
    names = sorted({x.callspec.params["name"] for x in own})
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_hopper_compile", *names],
        cwd=ROOT,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found, lines = {}, []
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            end = json.loads(line)
            found[end["name"]] = "\n".join(lines), end["temporary"]
            lines = []
        else:
            lines.append(line)
    return found


# Bytes that are spilled all the same. A loader that has to look at rows or to move pieces has too few
# registers where the others need all but 24 a thread; it is not in the way of the products. In calls with
# scores or dropout it is threads that compute that spill; 460 where the three sums for the gradient of a
# function's number by head are made, in a kernel of its own.
SPILLS = {
    "128-lengths-backward": 8,
    "128-dense-backward": 12,
    "128-ragged-backward": 44,
    "256-packed-backward": 4,
    "256-softcap-backward": 8,
    "256-vectors-backward": 56,
    "64-bias-backward": 8,
    "64-alibi-backward": 52,
    "64-dropout-backward": 16,
    "64-dropout-causal-backward": 20,
    "256-dropout-causal-backward": 8,
    "d256-alibi": 4,
    "d64-vectors-max": 8,
    "d128-bias-causal": 28,
    "d32-pairs": 20,
    "64-function-backward": 460,
    "128-function-backward": 460,
}


@pytest.mark.parametrize("name", NAMES)
def test_hopper_kernel_fits_its_registers(name, reports):
    text, _ = reports[name]
    spills = re.findall(r"(\d+) bytes spill stores", text)
    assert spills, text
    assert max(map(int, spills)) <= SPILLS.get(name, 0), text


@pytest.mark.parametrize("name", NAMES)
def test_hopper_kernel_overlaps_its_products(name, reports):
    text, _ = reports[name]
    assert f"flash_attention_{'backward' if name.endswith('-backward') else 'forward'}" in text
    # C7519 says that the compiler has put in a fence, which it must before any product.
    text = re.sub(r"\(C7519\)", "", text)
    # In brackets: the names of the compiler's files are random and may hold such a number.
    assert not re.search(r"\(C75\d\d\)|serializ|setmaxnreg", text, re.IGNORECASE), text


@pytest.mark.parametrize("name", NAMES)
def test_hopper_kernel_fits_into_shared_memory(name, reports):
    used = [int(x) for x in re.findall(r"smem_scratch_bytes=(\d+)", reports[name][0])]
    assert used
    assert max(used) <= SHARED_MEMORY


@pytest.mark.parametrize("name", NAMES)
def test_hopper_call_needs_little_temporary_memory(name, reports):
    dims, length, kind = CALLS[name]
    rows = 4 * (length + 192)  # bytes of one padded vector over the positions
    batch, heads = PAIRS.get(kind, (B, N))
    vector = batch * heads * rows
    allowed = vector + 2**16  # lse before it is cut to T
    if name.endswith("-backward"):
        d, dv = (-(-x // 32) * 32 for x in DIMS[dims])
        allowed += vector  # delta beside lse
        if kind != "deterministic":
            allowed += batch * heads * (length + 64) * 4 * d  # dQ in float32
        if kind in ("alibi", "function", "sinks"):
            allowed += 6 * vector  # sums along the queries, and what they are corrected by
        if kind == "position":
            allowed += 2 * heads * 2 * rows
    if kind == "pairs":
        allowed += batch * heads * (length + 64) * 4 * (d + dv)  # dK and dV likewise
        allowed += heads * (length + 128) ** 2 * 4  # sums of dS
    if kind.startswith("dropout"):
        allowed += 2 * vector + 2 * rows  # words of the queries and of the keys
    if kind.endswith("max"):
        allowed += vector  # the largest logit of each row
    if kind.startswith("vectors"):
        allowed += len(VECTORS) * 2 * rows  # padded, and their bounds by tile
    if kind == "packed":
        allowed += 4 * B * rows  # the ids of queries and keys, padded, and their bounds by tile
    if kind == "dense":
        allowed += B * length * length // 8 * 1.1  # one bit for each entry, and bounds by tile
    if kind == "blocks":
        allowed += length * length // 128 // 8 * 1.1
    assert reports[name][1] <= allowed


if __name__ == "__main__":
    compile_calls(sys.argv[1:])

"""Time the attention of flashjax and of other libraries on a GPU, in turn in one run.

    python -m benchmarks.run --suite dense --out dense.json
    python -m benchmarks.plot dense.json dense.svg

Suites: ``dense`` (16,384 tokens, hidden size 2048, bfloat16, four lengths, three head dims, full and causal),
``masks`` (window and packed documents, beside the full row of the same shape), ``features`` (grouped heads,
192/128, softcap, lengths), ``scores`` (a learned bias, dropout, ALiBi, sinks and a block-sparse mask, each
beside the row without it, and twelve packed documents). The ceiling is an 8192 x 8192 x 8192 matmul, timed
before and after the rows.

What is timed is the GPU. A sample starts when the GPU is idle, launches the compiled program until at least
``--sample-ms`` of work are queued, and ends when the last is done. Launches are asynchronous, so the host
hides behind the GPU as long as one program runs longer than a launch takes. Short calls would not: a program
therefore holds up to eight calls, each on inputs and mask arrays of its own so that XLA cannot merge them,
all results returned so that it drops none, and no CUDA graph, in which independent calls might overlap. The
program that is timed is the one whose results were checked. Input sets take turns where they would fit in
the L2 cache.

Nothing is timed that is wrong: before, the results of the first and last call are compared with float32
attention at the highest precision, for the first and last key/value head of the first and last row of the
batch (of every row, where they share something learned), and everything must be finite. A contender that
fails this has no speed in the record.

Passes: ``fwd``, ``bwd`` (from what the forward pass of the same library has saved, which is not timed) and
``fwd+bwd``. The gradients are those of query, key, value and, where the row has them, bias and sinks.

On an NVIDIA H200 with compiling, the forward pass of dense took 199 seconds, of masks 42 and of features 76.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import io
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flashjax
from benchmarks import plot, rivals
from benchmarks.rivals import BASELINE, CONTENDERS, OURS, TILE, Contender, Row, Unable
from flashjax import dropout

TOKENS, HIDDEN = 16384, 2048
DENSE = [
    Row(
        f"T{t} d{d} {'causal' if causal else 'full'}",
        batch=TOKENS // t,
        length=t,
        heads=HIDDEN // d,
        head_dim=d,
        causal=causal,
    )
    for d in (64, 128, 256)
    for causal in (False, True)
    for t in (512, 2048, 8192, 16384)
]
_long = functools.partial(Row, batch=1, length=16384, heads=16, head_dim=128)
_features = functools.partial(Row, batch=2, length=8192, heads=16, head_dim=128)
_pair = functools.partial(Row, batch=128, length=768, heads=4, head_dim=32)
_sinks = functools.partial(
    Row, batch=2, length=8192, heads=64, kv_heads=8, head_dim=64, causal=True, window=128
)
_sparse = functools.partial(Row, batch=1, length=65536, heads=4, head_dim=128, causal=True)
SUITES = {
    "dense": DENSE,
    "masks": [
        _long("mask: none"),
        _long("mask: causal", causal=True),
        _long("mask: window of 1024", causal=True, window=1024),
        _long("mask: documents of 1024", causal=True, documents=1024),
    ],
    "features": [
        _features("GQA 32/8 full", heads=32, kv_heads=8),
        _features("GQA 32/8 causal", heads=32, kv_heads=8, causal=True),
        _features("192/128 full", head_dim=192, value_dim=128),
        _features("192/128 causal", head_dim=192, value_dim=128, causal=True),
        _features("softcap 50 causal", softcap=50.0, causal=True),
        _features("lengths", batch=4, length=4096, lengths=True),
    ],
    "scores": [
        _pair("pair bias: none"),
        _pair("pair bias: bfloat16", bias="pair"),
        _pair("pair bias: float32", bias="pair32"),
        _features("no dropout, full"),
        _features("dropout 0.1, full", dropout=0.1),
        _features("no dropout, causal", causal=True),
        _features("dropout 0.1, causal", causal=True, dropout=0.1),
        _features("ALiBi, causal", causal=True, alibi=True),
        _sinks("window of 128"),
        _sinks("window of 128, sinks", sinks=True),
        _long("12 documents in 8192", length=8192, causal=True, document_count=12),
        _long("12 documents in 32768", length=32768, causal=True, document_count=12),
        _long("12 documents in 65536", length=65536, causal=True, document_count=12),
        _sparse("causal in 65536"),
        _sparse("1/8 of the blocks in 65536", blocks=1 / 8),
    ],
}

NORM_LIMIT = 1e-2  # of |error| / |result| over all that is compared, for bfloat16
# Of one query (or key), |error| over |result| or the rms of all |result|, the larger. Gradients get more: dQ
# of a query that sees few keys is what is left of terms that cancel, beside what the rounding of out has done
# to delta. That alone is 3 % for the second query of a causal call of 2048 keys, and grows with their number.
WORST_LIMIT = 5e-2
WORST_LIMIT_OF_GRADIENTS = 1e-1
PEAK = 1e15  # about what the fastest GPU does, FLOP/s: only decides how many calls a program holds
L2_BYTES = 64e6


class Pass(NamedTuple):
    """What is timed.

    Attributes:
      flops: ``flops(D, Dv)``: of the matmuls that must be done, per visible pair and head.
      function: ``function(attention)(arrays)``, with the arrays of a row by name, returns the results by
        name: ``out`` and, with a ``d`` before the name, gradients. It is applied to the reference as well.
      prepare: if given, ``prepare(attention)(arrays)`` is not timed and returns the arguments that
        ``function(attention)`` takes in place of the arrays.
      worst: limit of the error of one query or key.
    """

    flops: Callable[[int, int], int]
    function: Callable[[Callable], Callable[..., dict[str, jax.Array]]]
    prepare: Callable[[Callable], Callable[..., tuple]] | None = None
    worst: float = WORST_LIMIT

    def arguments(self, attention: Callable, arrays: dict[str, jax.Array]) -> tuple:
        """Return what ``function(attention)`` takes for one set of arrays."""
        return (arrays,) if self.prepare is None else self.prepare(attention)(arrays)


def learned(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return all but dout: what attention takes, and what has a gradient."""
    return {name: x for name, x in arrays.items() if name != "dout"}


def _pull(attention: Callable, arrays: dict[str, jax.Array]) -> tuple[jax.Array, Callable]:
    return jax.vjp(lambda x: attention(**x), learned(arrays))


def _gradients(attention: Callable) -> Callable[..., dict[str, jax.Array]]:
    return lambda pull, dout: {f"d{name}": x for name, x in pull(dout)[0].items()}


def _both(attention: Callable) -> Callable[..., dict[str, jax.Array]]:
    def run(arrays):
        out, pull = _pull(attention, arrays)
        return {"out": out, **_gradients(attention)(pull, arrays["dout"])}

    return run


PASSES = {
    "fwd": Pass(
        flops=lambda d, dv: 2 * (d + dv),
        function=lambda attention: lambda arrays: {"out": attention(**learned(arrays))},
    ),
    "bwd": Pass(
        flops=lambda d, dv: 6 * d + 4 * dv,
        function=_gradients,
        prepare=lambda attention: lambda arrays: (_pull(attention, arrays)[1], arrays["dout"]),
        worst=WORST_LIMIT_OF_GRADIENTS,
    ),
    "fwd+bwd": Pass(flops=lambda d, dv: 8 * d + 6 * dv, function=_both, worst=WORST_LIMIT_OF_GRADIENTS),
}


class Settings(NamedTuple):
    """How long to measure: samples of a contender and of a slow one, and the least seconds of a sample."""

    repeats: int = 9
    slow_repeats: int = 3
    sample_seconds: float = 0.02
    most_calls: int = 8
    most_sets: int = 16
    matmul: int = 8192


# ---- programs --------------------------------------------------------------------------------------


class Program:
    """A compiled program of some calls, and the groups of inputs that it is launched on in turn."""

    def __init__(self, lowered: jax.stages.Lowered, groups: list[tuple], calls: int):
        self.lowered, self.groups, self.calls = lowered, groups, calls
        self.compiled: jax.stages.Compiled | None = None
        self.launches = 1

    def compile(self) -> None:
        """Compile without CUDA graphs, so that the calls run one after the other."""
        self.compiled = self.lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 1_000_000})

    def launch(self, i: int = 0) -> Any:
        """Launch the program on the i-th group of inputs."""
        return self.compiled(*self.groups[i % len(self.groups)])

    def sample(self) -> float:
        """Return the seconds of one call, over ``launches`` launches."""
        start = time.perf_counter()
        for i in range(self.launches):
            result = self.launch(i)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / (self.launches * self.calls)

    def calibrate(self, seconds: float) -> None:
        """Warm up, then choose ``launches`` so that a sample takes at least ``seconds``."""
        for i in range(2):
            jax.block_until_ready(self.launch(i))
        while (took := self.sample() * self.launches * self.calls) < seconds:
            self.launches = math.ceil(self.launches * min(8.0, max(1.5, 1.1 * seconds / took)))


def make_inputs(row: Row, count: int, seed: int = 0) -> list[dict[str, jax.Array]]:
    """Draw ``count`` sets of a row's arrays from the standard normal distribution, on the device."""

    @jax.jit
    def draw(key):
        keys = jax.random.split(key, len(row.arrays))
        return {
            name: jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
            for key, (name, x) in zip(keys, row.arrays.items(), strict=True)
        }

    return [draw(key) for key in jax.random.split(jax.random.key(seed), count)]


def count_calls(row: Row, flops: float, settings: Settings) -> tuple[int, int]:
    """Choose how many calls a program holds and how many groups of inputs take turns."""
    calls = max(1, min(settings.most_calls, math.ceil(0.5e-3 * PEAK / flops)))
    size = 2 * sum(row.arrays[name].size for name in "qkv") * calls
    groups = max(1 if calls > 1 else 2, math.ceil(2 * L2_BYTES / size))
    return calls, max(1, min(groups, settings.most_sets // calls))


def make_program(
    contender: Contender, row: Row, what: Pass, sets: list[dict[str, jax.Array]], calls: int
) -> Program:
    """Lower a contender's program for a row.

    Raises:
      Unable: the contender cannot do the row.
    """
    call, shared = contender.make(row)
    # Copies, so that XLA cannot prepare a mask once for all calls.
    operands = [jax.tree.map(jnp.copy, shared) for _ in sets]
    attention = lambda operands: functools.partial(call, operands=operands)
    if what.prepare is None:
        arguments = [(arrays,) for arrays in sets]
    else:
        prepare = jax.jit(lambda operands, arrays: what.arguments(attention(operands), arrays))
        arguments = [prepare(*x) for x in zip(operands, sets, strict=True)]
    # Under a jit of its own one call is lowered once for all.
    one = jax.jit(lambda operands, arguments: what.function(attention(operands))(*arguments))
    program = jax.jit(lambda group: [one(*x) for x in group])
    together = list(zip(operands, arguments, strict=True))
    groups = [(together[i : i + calls],) for i in range(0, len(sets), calls)]
    return Program(program.lower(*groups[0]), groups, calls)


# ---- checks ----------------------------------------------------------------------------------------


def reference(
    q, k, v, bias=None, sinks=None, *, start, end, slopes=None, blocks=None, factor=None, softcap=None
):
    """Attention of the query heads of one key/value head in float32, linear in memory.

    Args:
      q: ``[B, T, G, D]``.
      k, v: ``[B, S, 1, D]`` and ``[B, S, 1, Dv]``.
      bias: ``[1, G, T, S]``, or None.
      sinks: ``[G]``, or None.
      start, end: ``[B, T]``: query i sees the keys ``start[i] <= j < end[i]``.
      slopes: of ALiBi, ``[G]``, or None.
      blocks: which blocks of keys each block of queries sees, of these keys; or None.
      factor: ``factor(b, i, keys)`` returns what dropout multiplies each weight by, ``[G, S]``; or None.
      softcap: as in `flash_attention`.
    """
    keys = jnp.arange(k.shape[1], dtype=jnp.int32)

    def row(arguments):
        b, q, k, v, start, end = arguments

        @jax.checkpoint
        def one(arguments):
            i, q, start, end, bias = arguments
            s = jnp.einsum("gd,sd->gs", q, k, precision="highest") * q.shape[-1] ** -0.5
            if softcap is not None:
                s = softcap * jnp.tanh(s / softcap)
            if bias is not None:
                s = s + bias
            if slopes is not None:
                s = s - slopes[:, None] * jnp.abs(keys - i).astype(s.dtype)
            visible = (keys >= start) & (keys < end)
            if blocks is not None:
                visible = visible & blocks[i // TILE, keys // TILE]
            s = jnp.where(visible, s, -jnp.inf)
            if sinks is not None:
                s = jnp.concatenate([s, sinks[:, None]], -1)
            p = jax.nn.softmax(s, -1)[:, : keys.size]
            if factor is not None:
                p = p * factor(b, i, keys)
            return jnp.einsum("gs,sd->gd", p, v, precision="highest")

        i = jnp.arange(q.shape[0], dtype=jnp.int32)
        each = (i, q, start, end, None if bias is None else bias[0].swapaxes(0, 1))
        return jax.lax.map(one, each, batch_size=min(256, q.shape[0]))

    b = jnp.arange(q.shape[0], dtype=jnp.int32)
    return jax.lax.map(row, (b, q, k[:, :, 0], v[:, :, 0], start, end))


def _part(row: Row, name: str, x: jax.Array, b, h) -> jax.Array:
    """Return the part of an array of a row, or of its gradient, that belongs to one key/value head of row b
    of the batch, or of all rows where they share something."""
    axis = {"bias": 1, "dbias": 1, "sinks": 0, "dsinks": 0, "slopes": 0}.get(name, 2)
    group = x.shape[axis] // row.kv_heads
    x = jax.lax.dynamic_slice_in_dim(x, h * group, group, axis)
    return (_rows(row, x, b) if axis == 2 else x).astype(jnp.float32)


def _rows(row: Row, x: jax.Array, b) -> jax.Array:
    """Return row b of the batch, or all rows where they share something."""
    return jax.lax.dynamic_slice_in_dim(x, b, row.batch if row.shares else 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _errors(what: Pass, row: Row, arrays: dict, results: dict, given: dict, b, h) -> tuple:
    """Return the relative error of one key/value head, and the largest one of a query or key (in the gradient
    of a bias, of a query's row of it).

    ``given`` are the arrays of the row that are not learned, by name.
    """
    options = {name: _rows(row, given[name], b) for name in ("start", "end")}
    options["blocks"] = given.get("blocks")
    if "slopes" in given:
        options["slopes"] = _part(row, "slopes", given["slopes"], b, h)
    if row.dropout:
        group = row.heads // row.kv_heads
        head = (h * group + jnp.arange(group, dtype=jnp.int32))[:, None]
        kept = lambda i, q, k: dropout.keep(tuple(given["words"]), b + i, head, q, k, row.dropout)
        options["factor"] = lambda *x: kept(*x).astype(jnp.float32) / (1 - row.dropout)
    attention = functools.partial(reference, softcap=row.softcap, **options)
    own = {name: _part(row, name, x, b, h) for name, x in arrays.items()}
    truth = what.function(attention)(*what.arguments(attention, own))
    norms, worst = [], []
    for name, wanted in truth.items():
        error = jnp.linalg.norm(_part(row, name, results[name], b, h) - wanted, axis=-1)
        size = jnp.linalg.norm(wanted, axis=-1)
        norms.append(jnp.linalg.norm(error) / jnp.linalg.norm(size))
        worst.append(jnp.max(error / jnp.maximum(size, jnp.sqrt(jnp.mean(size**2)))))
    return jnp.max(jnp.stack(norms)), jnp.max(jnp.stack(worst))


_finite = jax.jit(lambda tree: jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)])))


def check(
    row: Row, what: Pass, sets: list[dict[str, jax.Array]], results: list[dict[str, jax.Array]]
) -> dict[str, float]:
    """Compare a program's results with the reference; NaN where anything is not finite."""
    if not _finite(results):
        return {"norm": math.nan, "worst": math.nan}
    given = dict(zip(("start", "end"), row.key_ranges(), strict=True))
    if row.alibi:
        given["slopes"] = row.alibi_slopes()
    if row.blocks is not None:
        given["blocks"] = row.block_table()
    if row.dropout:
        given["words"] = dropout.key_words(jnp.asarray(row.dropout_key()))
    given = {name: jnp.asarray(x) for name, x in given.items()}
    # Rows that differ in these alone share a program.
    hiding = {"causal": False, "window": None, "documents": None, "document_count": None, "lengths": False}
    row = dataclasses.replace(row, name="", **hiding, alibi=False, blocks=None)
    errors = [
        _errors(what, row, sets[i], results[i], given, b, h)
        for i in sorted({0, len(results) - 1})
        for b in ([0] if row.shares else sorted({0, row.batch - 1}))
        for h in sorted({0, row.kv_heads - 1})
    ]
    norm, worst = np.max(np.asarray(errors, np.float32), axis=0)  # NaN stays NaN
    return {"norm": float(norm), "worst": float(worst)}


# ---- rows ------------------------------------------------------------------------------------------


def taken_backend(row: Row) -> str:
    """Return the name of the backend that `flash_attention` takes for a row."""
    call, operands = rivals.flashjax(row)
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in learned(row.arrays).items()}
    with contextlib.redirect_stdout(io.StringIO()):
        text = call(**arrays, operands=operands, function=flashjax.explain)
    return text.splitlines()[0].removeprefix("backend: ")


def _reason(error: Exception) -> str:
    """Say in one line what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def describe_row(row: Row, what: Pass) -> dict:
    """Return what the record says of a row before anything has run."""
    pairs = row.visible_pairs() * row.heads
    return {
        **row.fields(),
        "visible_pairs": pairs,
        "visited_pairs": row.visited_pairs() * row.heads,
        "flops": pairs * what.flops(row.head_dim, row.value_dim),
    }


def run_row(
    row: Row, pass_name: str, settings: Settings, contenders: dict[str, Contender] | None = None
) -> dict:
    """Compile, check and time one row; return its record."""
    what, contenders = PASSES[pass_name], contenders or CONTENDERS
    entries = {name: {} for name in contenders}
    record = {**describe_row(row, what), "contenders": entries}
    flops = record["flops"]
    calls, groups = count_calls(row, flops, settings)
    sets = make_inputs(row, calls * groups)
    programs = {}

    @contextlib.contextmanager
    def failing(name):
        try:
            yield
        except Unable as reason:
            entries[name] = {"skipped": str(reason)}
            programs.pop(name, None)
        except Exception as error:  # whatever a library raises, the others are still timed
            entries[name] = {"failed": _reason(error)}
            programs.pop(name, None)

    for name, contender in contenders.items():
        with failing(name):
            own = (sets[:1], 1) if contender.slow else (sets, calls)
            programs[name] = make_program(contender, row, what, *own)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = {name: pool.submit(program.compile) for name, program in programs.items()}
    for name, future in compiling.items():
        with failing(name):
            future.result()
            program = programs[name]
            results = program.launch()
            error = check(row, what, sets, results)
            del results
            temp = program.compiled.memory_analysis()
            shown = {kind: x if math.isfinite(x) else None for kind, x in error.items()}  # JSON has no NaN
            entries[name] = {"error": shown, "calls_per_program": program.calls}
            if temp is not None:
                entries[name]["temp_bytes"] = temp.temp_size_in_bytes
            if name == OURS:
                entries[name]["backend"] = taken_backend(row)
            if not (error["norm"] < NORM_LIMIT and error["worst"] < what.worst):
                entries[name]["failed"] = f"wrong: error {error['norm']:.1e}, worst {error['worst']:.1e}"
                del programs[name]
                continue
            program.calibrate(settings.sample_seconds)
    samples = time_in_turn(programs, contenders, settings)
    for name, seconds in samples.items():
        entries[name]["seconds"] = percentiles(seconds)
        entries[name]["samples"] = seconds
        entries[name]["tflops"] = flops / entries[name]["seconds"]["median"] / 1e12
    if BASELINE in samples:
        for name in samples:
            entries[name]["ratio"] = entries[name]["tflops"] / entries[BASELINE]["tflops"]
    return record


def time_in_turn(
    programs: dict[str, Program], contenders: dict[str, Contender], settings: Settings
) -> dict[str, list[float]]:
    """Take one sample of each program after the other, until all have theirs."""
    samples = {name: [] for name in programs}
    for i in range(settings.repeats):
        for name, program in programs.items():
            if i < settings.slow_repeats or not contenders[name].slow:
                samples[name].append(program.sample())
    return samples


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 20th and 80th percentile."""
    low, median, high = np.percentile(seconds, (20, 50, 80))
    return {"p20": float(low), "median": float(median), "p80": float(high)}


def compare(records: list[dict]) -> None:
    """Compare each row with the one beside it, where that was run as well: the rate of visited pairs over
    that of the same contender in the other row.

    ``of_full`` is the ratio to the row that hides nothing, ``of_plain`` that to the row without bias, ALiBi,
    sinks, dropout and blocks; both are alike in all other fields.
    """
    _compare(records, "of_full", ("causal", "window", "documents", "document_count", "lengths", "blocks"))
    _compare(records, "of_plain", ("bias", "alibi", "sinks", "dropout", "blocks"))


def _compare(records: list[dict], ratio: str, apart: tuple[str, ...]) -> None:
    shape = [field.name for field in dataclasses.fields(Row) if field.name not in ("name", *apart)]
    key = lambda record: tuple(record.get(name) for name in shape)
    differs = lambda record: any(record.get(name) for name in apart)
    others = {key(record): record for record in records if not differs(record)}
    for record in records:
        other = others.get(key(record))
        if not differs(record) or other is None:
            continue
        for name, entry in record["contenders"].items():
            seconds = [x.get("seconds") for x in (entry, other["contenders"].get(name, {}))]
            if None not in seconds:
                own, wanted = (x["median"] for x in seconds)
                entry[ratio] = record["visited_pairs"] / own / (other["visited_pairs"] / wanted)


def run_ceiling(settings: Settings) -> dict:
    """Time the matmul that no attention can beat."""
    n = settings.matmul
    keys = jax.random.split(jax.random.key(0), 4)
    x = [jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys]
    program = Program(jax.jit(jnp.dot).lower(x[0], x[1]), [(x[0], x[1]), (x[2], x[3])], 1)
    program.compile()
    program.calibrate(settings.sample_seconds)
    seconds = percentiles([program.sample() for _ in range(settings.repeats)])
    return {
        "name": f"{n} x {n} x {n} bfloat16 matmul",
        "seconds": seconds,
        "tflops": 2 * n**3 / seconds["median"] / 1e12,
    }


def run(
    rows: Iterable[Row],
    pass_name: str,
    settings: Settings,
    config: dict | None = None,
    contenders: dict[str, Contender] | None = None,
    save: Callable[[dict], None] = lambda record: None,
) -> dict:
    """Run rows and return the record of all; ``save`` is called with it after each row."""
    record = {
        "config": {**(config or {}), "pass": pass_name, "tile": rivals.TILE, **settings._asdict()},
        "ceiling": [run_ceiling(settings)],
        "rows": [],
    }
    for row in rows:
        record["rows"].append(run_row(row, pass_name, settings, contenders))
        compare(record["rows"])
        print(plot.line(record["rows"][-1]), flush=True)
        save(record)
    record["ceiling"].append(run_ceiling(settings))
    save(record)
    return record


# ---- the machine and the command -------------------------------------------------------------------


def _output(*command: str) -> str:
    """Return what a command prints, empty where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def describe(argv: list[str], commit: str | None = None) -> dict:
    """Return what is needed to repeat and to judge a run."""
    smi = _output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    driver, _, power = smi.partition("\n")[0].partition(", ")
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.run", *argv]),
        "commit": commit or head or None,
        "dirty": bool(_output("git", "status", "--porcelain")) if head and not commit else None,
        "device": jax.devices()[0].device_kind,
        "driver": driver or None,
        "power_limit": power or None,
        "versions": {
            "flashjax": flashjax.__version__,
            "jax": jax.__version__,
            "jaxlib": _version("jaxlib"),
            "cuda": _version("jax-cuda13-plugin", "jax-cuda12-plugin"),
            "cudnn": _version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
            "tokamax": _version("tokamax"),
        },
    }


def main(argv: list[str] | None = None) -> int:
    """Run the suites that were asked for; return 1 if flashjax failed in any row."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=[*SUITES, "all"], default="dense")
    parser.add_argument("--pass", dest="pass_name", choices=list(PASSES), default="fwd")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only the rows whose name it finds")
    parser.add_argument("--without", nargs="*", default=[], choices=list(CONTENDERS), help="leave out")
    parser.add_argument("--out", metavar="FILE", help="write the record here, after every row")
    parser.add_argument("--repeats", type=int, default=Settings().repeats, help="samples of a contender")
    parser.add_argument("--sample-ms", type=float, default=1e3 * Settings().sample_seconds)
    parser.add_argument("--quick", action="store_true", help="3 short samples, for development")
    parser.add_argument("--commit", help="of the checkout, where git cannot say")
    options = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU; on a CPU run `python -m benchmarks.portable`")
    settings = Settings(options.repeats, sample_seconds=options.sample_ms / 1e3)
    if options.quick:
        settings = Settings(repeats=3, slow_repeats=1, sample_seconds=0.01)
    suites = SUITES.values() if options.suite == "all" else [SUITES[options.suite]]
    rows = [row for suite in suites for row in suite if re.search(options.rows, row.name)]

    def save(record):
        if options.out:
            with open(options.out, "w") as file:
                json.dump(record, file, indent=1)

    start = time.perf_counter()
    contenders = {n: c for n, c in CONTENDERS.items() if n not in options.without}
    record = run(rows, options.pass_name, settings, describe(argv, options.commit), contenders, save)
    record["config"]["wall_seconds"] = time.perf_counter() - start
    save(record)
    print(plot.table(record))
    return int(any("failed" in row["contenders"][OURS] for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())

"""The Hopper kernels on CPU, in Mosaic GPU's interpreter: values, barriers, and races between warpgroups.

A mistake with barriers waits forever, so a process of its own runs the cases, and ends where one takes too
long; run as a program, this file is that process.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import BlockSparse, Causal, Operand, ScoreFunction, Segments, flash_attention
from flashjax.backends import hopper
from tests import budget
from tests.anywhere import offer
from tests.cases import CASES, WIDE_CASES, case, in_half

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds that one case may take

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < hopper.NEEDS_JAX,
    reason=f"the kernel needs jax 0.11, and this is {jax.__version__}",
)

KNOWN = {c.name: c for c in [*WIDE_CASES, *(in_half(c, "bfloat16") for c in CASES)]}


def small(name, length=None, keys=None, heads=1, **fields):
    """Return a known case with one batch row and head, and other lengths where given."""
    known = KNOWN[name]
    kv_heads = fields.pop("kv_heads", heads)
    length = length or known.query_length
    fields = {"batch": 1, "heads": heads, "kv_heads": kv_heads} | fields
    return dataclasses.replace(known, query_length=length, key_length=keys or known.key_length, **fields)


def same(name, length, **fields):
    """Return a small case with as many keys as queries."""
    return small(name, length, length, **fields)


def _two_documents(c, rng):
    return Segments(jnp.arange(c.query_length) // 100) & Causal()


def _far_apart(c, rng):
    ids = jnp.zeros(c.key_length, jnp.int32).at[jnp.array([5, 127, 128, 90_000, 131_072, 132_999])].set(1)
    return Segments(jnp.ones(c.query_length, jnp.int32), ids)


def _dead_keys(c, rng):
    return jnp.asarray(rng.random((c.query_length, c.key_length)) < 0.7) & (jnp.arange(c.key_length) % 5 > 0)


def _rows_of_blocks(rows, columns):
    def mask(c, rng):
        count = -(-c.query_length // rows), -(-c.key_length // columns)
        return BlockSparse(jnp.asarray(rng.random((1, 1, *count)) < 0.4), (rows, columns))

    return mask


def blocks(rows, columns):
    name = f"blocks-{rows}-{columns}"
    return case(
        name,
        (130, 300),
        heads=1,
        batch=1,
        head_dim=128,
        dtype="bfloat16",
        mask=_rows_of_blocks(rows, columns),
    )


INTERPRETED = [
    # head dims and lengths: tiles whole and in pieces
    small("d128-full", 128, 640, heads=2, kv_heads=1),
    same("d64-causal", 200),
    same("d256-causal", 130),
    small("d192-128", 200, 72),
    same("d24-causal", 70),
    same("d8-causal", 70),
    small("d64-odd", 67, 261, heads=3),
    small("t1"),
    small("s1", 66),
    small("s129", 66),
    small("causal-ends-early"),
    # one run of keys, of which warpgroups see different parts
    small("sees-little", 384),
    same("window-d64", 260, options={"local_window_size": (70, 10)}),
    small("lengths-d128", 66, 200, batch=2),
    small("both-lengths-causal-end-bfloat16", batch=2),
    small("prefix-d128", 140, 140, batch=2),
    # tiles that the loader finds
    case("documents", 300, heads=1, batch=1, head_dim=128, dtype="bfloat16", mask=_two_documents),
    small("packed-d256", 66, 66),
    small("custom-bfloat16", heads=4),
    small("composed-bfloat16"),
    small("nothing-visible-bfloat16"),
    small("mixed-dtypes", 70, 130),
    small("unsigned-ids", 70, 130),
    case("dead-keys", (70, 140), heads=1, batch=1, head_dim=64, dtype="bfloat16", mask=_dead_keys),
    blocks(64, 128),
    blocks(10, 12),
    case(
        "two-chunks-of-tiles", (64, 133_000), heads=1, batch=1, head_dim=64, dtype="bfloat16", mask=_far_apart
    ),
    # what happens to logits
    small("softcap-bfloat16"),
    small("scale-negative-d64", 66, 66),
    small("steep-d64", 66),
    same("steep-causal-d64", 390),
]

# Not run forward: keys to clear where the loader has one stage.
LENGTHS_256 = dataclasses.replace(
    small("lengths-d128", 66, 200, batch=2), name="lengths-d256", head_dim=256, value_dim=256
)


def scored(name, dim, rows=1, heads=(2, 1), lengths=(70, 130), **fields):
    """Return a case of several tiles with ragged ends."""
    return case(name, lengths, heads, batch=rows, head_dim=dim, dtype="bfloat16", **fields)


def _lowest(c, rng):
    """Return a bias of the least finite number where `LOWEST` queries and few keys are."""
    bias = rng.standard_normal((1, 1, c.query_length, c.key_length))
    bias[:, :, LOWEST] = bias[..., :30] = np.finfo(np.float32).min
    return jnp.asarray(bias, jnp.float32)


LOWEST = slice(20, 45)


def _bent(score, b, h, q, k, strength):
    return jnp.where((k + q) % 3 == 0, jnp.tanh(score) * strength, score)


def _function(c, rng):
    return ScoreFunction(_bent, strength=Operand(jnp.asarray(rng.standard_normal(c.heads), jnp.float32), "h"))


# Asked for the largest logit: in the unit of the logits, with a sink that joins last.
BIAS_SINKS = scored("bias-sinks", 64, bias=(1, 2, 1, 130), learned=KNOWN["sinks-d64"].learned)

# Run forward and backward, with the gradients of what the scores read.
SCORED = [
    scored("pair", 64, rows=2, bias=(1, 1, 70, 130), bias_dtype="bfloat16"),
    scored("staged", 128, lengths=(72, 192), bias=(1, 2, 72, 192)),
    scored(
        "shared-padding", 32, rows=4, lengths=(72, 160), bias=(1, 2, 72, 160), mask=KNOWN["padding-d64"].mask
    ),
    scored("shared", 32, rows=4, lengths=(136, 192), bias=(1, 2, 136, 192), bias_dtype="bfloat16"),
    scored("lowest", 64, heads=1, learned={"bias": _lowest}),
    scored("by-position", 64, learned=KNOWN["position-bias-d64"].learned),
    scored("slopes", 128, learned=KNOWN["alibi-d64"].learned, options={"is_causal": True}),
    scored("bent", 64, learned={"score_fn": _function}),
    scored("sinks", 64, learned=KNOWN["sinks-d64"].learned, mask=lambda c, rng: Causal(offset=-9)),
    scored("dropout-d128", 128, rows=2, options=KNOWN["dropout-d64"].options | {"is_causal": True}),
    scored("dropout-d256", 256, options=KNOWN["dropout-d64"].options),
    # A query that sees few keys: dP, restored, and delta nearly cancel.
    KNOWN["dropout-causal-bias-bfloat16"],
]
# Likewise as on a GPU with two processors, so that a block owns several tiles of the bias in turn.
FEW = ["shared", "shared-padding"]

# Names of cases that are also run by blocks that take one query tile after another: by number, from a queue.
STATIC = ["d64-odd", "documents", "sees-little"]
QUEUE = ["d64-odd", "documents", "sees-little", "custom-bfloat16"]
# Names of cases with NaN in the keys and values that no query sees.
POISONED = ["lengths-d128", "sees-little", "two-chunks-of-tiles", "dead-keys"]
# Names of cases that are asked for the largest logit of each head too.
MAXIMUM = ["sinks", "bias-sinks", "scale-negative-d64", "d64-odd"]
# Names of cases of which the gradients are computed: by one kernel, by one whose blocks take a key tile after
# another, with NaN where nothing depends on it, and by two kernels.
BACKWARD = [
    "d128-full",
    "d192-128",
    "causal-ends-early",
    "window-d64",
    "custom-bfloat16",
    "mixed-dtypes",
    "blocks-10-12",
    "softcap-bfloat16",
    "steep-d64",
]
BACKWARD_QUEUE = ["d64-odd", "documents", "d256-causal"]
BACKWARD_POISONED = ["both-lengths-causal-end-bfloat16", "sees-little", "dead-keys"]
DETERMINISTIC = ["d64-odd", "lengths-d256", "d256-causal"]

RUNS = [
    *((c.name, "whole") for c in SCORED if c.name not in FEW),
    *((name, "few") for name in FEW),
    *((name, "backward") for name in BACKWARD),
    *((name, "backward-queue") for name in BACKWARD_QUEUE),
    *((name, "backward-poisoned") for name in BACKWARD_POISONED),
    *((name, "deterministic") for name in DETERMINISTIC),
    *((c.name, "plain") for c in INTERPRETED if c.name not in (*STATIC, *QUEUE, *POISONED, *MAXIMUM)),
    *((name, "maximum") for name in MAXIMUM),
    *((name, "static") for name in STATIC),
    *((name, "queue") for name in QUEUE),
    *((name, "poisoned") for name in POISONED),
]


# ---- the process that interprets -------------------------------------------------------------------


def interpret(runs):
    """Run cases in the interpreter, and print a line of JSON for each: what was wrong, or an empty string."""
    from flashjax.backends.hopper import config, schedule

    cases = {c.name: c for c in (*INTERPRETED, LENGTHS_256, BIAS_SINKS, *SCORED)}
    offer()
    choose, items = config.choose, schedule.items
    for name, kind in runs:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        with contextlib.ExitStack() as stack:
            if kind in ("static", "queue", "backward-queue", "few"):
                # As on a GPU with two processors, so that a block has several query tiles.
                stack.callback(setattr, hopper, "multiprocessors", hopper.multiprocessors)
                hopper.multiprocessors = lambda: 2
            if kind in ("static", "queue", "backward-queue"):
                stack.callback(setattr, schedule, "items", items)
                schedule.items = _counting(items, counts := [])
                if kind != "backward-queue":
                    config.choose = lambda *args: choose(*args)._replace(schedule=kind)  # noqa: B023
                stack.callback(setattr, config, "choose", choose)
                jax.clear_caches()
                stack.callback(jax.clear_caches)
            try:
                if kind.startswith("backward") or kind in ("deterministic", "whole", "few"):
                    _check_gradients(cases[name], kind)
                else:
                    _check(cases[name], kind == "poisoned", kind == "maximum")
                queued = kind in ("static", "queue", "backward-queue")
                assert not queued or min(counts) > 2, "no block has two tiles"
                wrong = ""
            except Exception:
                wrong = traceback.format_exc()
        print(json.dumps({"run": [name, kind], "wrong": wrong}), flush=True)
    faulthandler.cancel_dump_traceback_later()


def _counting(items, counts):
    """Return ``items``, which also notes what it returns."""

    def count(work):
        counts.append(items(work))
        return counts[-1]

    return count


def _check(case, poisoned, maximum):
    from tests.mosaic_interpreter import interpreted

    arrays, options = case.arguments()
    call = functools.partial(flash_attention, **options, return_residual=True, return_max_logit=maximum)
    with interpreted():
        got = jax.block_until_ready(
            call(**_poison(arrays, call) if poisoned else arrays, implementation="hopper-anywhere")
        )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arrays)
        truth = jax.tree.map(np.asarray, call(**wide, implementation="reference"))
    plain = budget.plain_attention(**arrays, **options)
    if maximum:
        (*got, largest), (*truth, wanted) = got, truth
        np.testing.assert_allclose(largest, wanted, rtol=2e-6)
    results = (dict(zip(("out", "lse"), x, strict=True)) for x in (got, plain, truth))
    budget.check(*results, {"out": case.dtype, "lse": jnp.float32})


def _check_gradients(case, kind):
    from tests.mosaic_interpreter import interpreted

    arrays, options = case.arguments()
    cotangents = case.cotangents()
    if case.name == "lowest":
        # As the loss of a model that masks like this: lse cannot say how many such numbers there are.
        cotangents = tuple(x.at[:, LOWEST].set(0) for x in cotangents)
    attend = functools.partial(flash_attention, **options, return_residual=True)
    # Mostly the forward pass is checked by itself: this one is plain JAX.
    whole = kind in ("whole", "few")
    backend = "hopper-anywhere" if whole else "hopper-backward"
    call = lambda **a: attend(**a, implementation=backend, deterministic=kind == "deterministic")
    given = arrays
    if kind == "backward-poisoned":
        given = _poison(arrays, attend)
        cotangents = _poison_queries(given, cotangents, attend)
    with interpreted():
        got = jax.block_until_ready(budget.run(call, given, cotangents))
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x), cotangents)
    truth = budget.oracle(arrays, options, clean)
    plain = budget.plain(arrays, options, clean)
    names = [n for n in truth if n.startswith("d") or whole]
    results = ({n: x[n] for n in names} for x in (got, plain, truth))
    budget.check(*results, budget.dtypes(arrays))


def _poison_queries(arrays, cotangents, call):
    """Put NaN into the queries that see no key, and into what is asked of them."""
    _, lse = call(**arrays, implementation="reference")
    blind = lse == -jnp.inf
    fill = lambda x: jnp.where(blind[..., None], jnp.asarray(jnp.nan, x.dtype), x)
    arrays["query"] = fill(arrays["query"])
    return fill(cotangents[0]), cotangents[1]


def _poison(arrays, call):
    """Put NaN into the keys and values on which nothing depends."""
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    weight = lambda v: call(query, key, v, implementation="reference")[0].astype(jnp.float32).sum()
    positive = jnp.ones_like(value)
    seen = (jax.grad(weight)(positive) != 0).any(-1, keepdims=True)
    assert not seen.all()
    fill = lambda x: jnp.where(seen, x, jnp.asarray(jnp.nan, x.dtype))
    return arrays | {"key": fill(key), "value": fill(value)}


# ---- tests -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(request):
    """Return what was wrong with each run that is tested, and what the process printed if it ended early."""
    own = [x for x in request.session.items if getattr(x, "module", None) is request.module]
    runs = [x.callspec.params["run"] for x in own]
    halves = [_start(part) for part in (runs[::2], runs[1::2]) if part]
    found, complaints = {}, ""
    for process in halves:
        out, err = process.communicate()
        lines = [json.loads(x) for x in out.splitlines() if x.startswith('{"run"')]
        found |= {tuple(x["run"]): x["wrong"] for x in lines}
        complaints += err[-4000:]
    return {run: found.get(run, f"no result: {complaints}") for run in runs}


def _start(runs):
    """Start a process that interprets some runs: two of them make use of two cores."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.test_hopper_interpret", json.dumps(runs)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLOW = [
    *((name, "whole") for name in ("lowest", "slopes", "dropout-d256")),
    ("shared-padding", "few"),
    ("lengths-d256", "deterministic"),
    ("sees-little", "static"),
    ("custom-bfloat16", "queue"),
    ("documents", "backward-queue"),
    *(
        (name, "plain")
        for name in ("t1", "s1", "s129", "d24-causal", "unsigned-ids", "mixed-dtypes", "steep-d64")
    ),
    *(
        (name, "backward")
        for name in ("custom-bfloat16", "blocks-10-12", "causal-ends-early", "mixed-dtypes")
    ),
]


@pytest.mark.parametrize(
    "run", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else (), id="-".join(x)) for x in RUNS]
)
def test_hopper_is_right_in_the_interpreter(run, outcomes):
    assert not outcomes[run], outcomes[run]


if __name__ == "__main__":
    interpret(json.loads(sys.argv[1]))

"""The Hopper kernels on a Hopper GPU: every case by the error budget, and what only hardware can show."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import flash_attention
from flashjax.backends import hopper
from tests import budget
from tests.cases import CASES, WIDE_CASES, in_half

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper.missing_device() is not None, reason=str(hopper.missing_device())),
]

HALVES = [
    in_half(case, dtype)
    for case, dtype in zip(CASES, itertools.cycle(("bfloat16", "float16")), strict=False)
    if case.bias is None and "dropout_rate" not in case.options
]


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


@pytest.mark.parametrize("case", [*HALVES, *WIDE_CASES], ids=lambda c: c.name)
def test_hopper_stays_within_error_budget(case):
    arrays, options = case.arguments()
    _check(case, _forward(arrays, _hopper(options)), arrays, options)

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


@pytest.mark.parametrize("case", [*HALVES, *WIDE_CASES], ids=lambda c: c.name)
def test_hopper_stays_within_error_budget(case):
    arrays, options = case.arguments()
    cotangents = case.cotangents()
    call = lambda **a: flash_attention(**a, **options, implementation="hopper", return_residual=True)
    with jax.numpy_dtype_promotion("strict"):
        got = budget.run(call, arrays, cotangents)
    dtypes = {"out": case.dtype, "lse": jnp.float32, **{f"d{n}": x.dtype for n, x in arrays.items()}}
    results = got, budget.plain(arrays, options, cotangents), budget.oracle(arrays, options, cotangents)
    for result in results:
        result.pop("dscale", None)  # one number has one error, by luck; the backward pass is another's
    budget.check(*results, dtypes)

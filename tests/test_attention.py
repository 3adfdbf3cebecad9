"""Values: every case by the error budget, on every backend that is tested without a GPU."""

import jax.numpy as jnp
import pytest

from flashjax import flash_attention
from tests import budget
from tests.cases import CASES


def _dtypes(arrays):
    return {
        "out": arrays["query"].dtype,
        "lse": jnp.float32,
        **{f"d{name}": x.dtype for name, x in arrays.items()},
    }


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_flash_attention_stays_within_error_budget(case):
    arrays, options = case.arguments()
    cotangents = case.cotangents()
    call = lambda **a: flash_attention(**a, **options, implementation="small-tiles", return_residual=True)
    got = budget.run(call, arrays, cotangents)
    plain = budget.plain(arrays, options, cotangents)
    truth = budget.oracle(arrays, options, cotangents)
    budget.check(got, plain, truth, _dtypes(arrays))

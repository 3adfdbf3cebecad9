"""Values: every case by the error budget, on every backend that is tested without a GPU."""

import jax.numpy as jnp
import numpy as np
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


def _results(case, seed):
    """Return what the backend, the plain maths and the oracle make of one draw of a case."""
    arrays, options = case.arguments(seed)
    cotangents = case.cotangents(seed + 1)
    call = lambda **a: flash_attention(**a, **options, implementation="small-tiles", return_residual=True)
    got = budget.run(call, arrays, cotangents)
    return got, budget.plain(arrays, options, cotangents), budget.oracle(arrays, options, cotangents)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_flash_attention_stays_within_error_budget(case):
    arrays, _ = case.arguments()
    results = _results(case, 0)
    if "scale" in arrays:
        # One number has one error, large or small by luck: the largest of several draws says more.
        draws = [results, *(_results(case, seed) for seed in (1, 2))]
        for i, result in enumerate(results):
            result["dscale"] = np.stack([np.asarray(draw[i]["dscale"]) for draw in draws])
    budget.check(*results, _dtypes(arrays))

"""The oracle, checked against numerical derivatives and against a textbook that JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flashjax import Causal, Segments, flash_attention
from tests import budget
from tests.cases import CASES

NAMES = ["both-lengths-causal-end", "composed", "bias-keys", "dropout-causal-bias", "scale-negative"]


def test_reference_gradients_match_numerical_ones():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        arrays = {
            "query": jnp.asarray(rng.standard_normal((2, 4, 4, 3))),
            "key": jnp.asarray(rng.standard_normal((2, 5, 2, 3))),
            "value": jnp.asarray(rng.standard_normal((2, 5, 2, 2))),
            "bias": jnp.asarray(rng.standard_normal((2, 1, 4, 5))),
            "scale": jnp.asarray(0.6),
        }
        mask = Causal(offset=1) | Segments(jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 1, 0, 2]))

        @jax.jit
        def call(arrays):
            return flash_attention(
                **arrays,
                mask=mask,
                softcap=1.5,
                dropout_rate=0.2,
                dropout_key=jax.random.key(1),
                implementation="reference",
                return_residual=True,
            )

        check_grads(call, (arrays,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda c: c.name)
def test_reference_equals_textbook(case):
    arrays, options = case.arguments()
    cotangents = case.cotangents()
    truth = budget.oracle(arrays, options, cotangents)
    textbook = budget.run(lambda **a: budget.plain_attention(**a, **options), arrays, cotangents)
    for name, wanted in truth.items():
        np.testing.assert_allclose(textbook[name], wanted, rtol=2e-4, atol=2e-5, err_msg=name)


def test_reference_names_are_cases():
    assert set(NAMES) <= {c.name for c in CASES}

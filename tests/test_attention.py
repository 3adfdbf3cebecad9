"""Values: every case by the error budget, on every backend that is tested without a GPU."""

import itertools

import pytest

from flashjax import flash_attention
from tests import budget
from tests.cases import CASES, FEATURES, MIXED, MIXTURES

MORE = [pytest.param(case, marks=pytest.mark.slow, id=case.name) for case in MIXED[2:]]


@pytest.mark.parametrize("case", [*CASES, *MIXED[:2], *MORE], ids=lambda c: c.name)
def test_flash_attention_stays_within_error_budget(case):
    def draw(seed):
        arrays, options = case.arguments(seed)
        cotangents = case.cotangents(seed + 1)
        call = lambda **a: flash_attention(**a, **options, implementation="small-tiles", return_residual=True)
        got = budget.run(call, arrays, cotangents)
        return got, budget.plain(arrays, options, cotangents), budget.oracle(arrays, options, cotangents)

    budget.check_draws(draw, budget.dtypes(case.arguments()[0]))


def test_mixtures_hold_every_pair_of_features():
    mixed = [set(names.split()) for names in MIXTURES]
    missing = [pair for pair in itertools.combinations(FEATURES, 2) if not any(set(pair) <= m for m in mixed)]
    assert not missing

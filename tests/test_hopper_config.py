"""The configs of the Hopper kernel, and what decides on them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flashjax import Causal, PrefixLM, Segments, SlidingWindow, masks
from flashjax.backends import hopper
from flashjax.backends.hopper import config as configs
from flashjax.problem import Problem, abstract

if jax.__version_info__ < hopper.NEEDS_JAX:
    pytest.skip(f"the kernel needs jax 0.11, and this is {jax.__version__}", allow_module_level=True)

from flashjax.backends.hopper import forward, hidden, walk


def _problem(mask=None, length=4096, dim=128, value_dim=None):
    if mask is not None:
        mask = abstract(mask.resolve(masks.Sizes(2, 4, length, length)))
    problem = Problem(2, length, length, 4, 4, dim, value_dim or dim, jnp.dtype("bfloat16"), mask=mask)
    return dataclasses.replace(problem, batch_period=2)


def _configs():
    ids = jnp.zeros((2, 1), jnp.int32)
    for dims in ((16, 16), (64, 64), (72, 72), (128, 128), (192, 128), (64, 256), (256, 256)):
        for length in (1, 512, 1000, 1024, 2048, 4096, 16384):
            for mask in (None, Causal(), SlidingWindow(100), Segments(jnp.broadcast_to(ids, (2, length)))):
                yield forward._traits(p := _problem(mask, length, *dims)), p


def test_choose_gives_no_more_registers_than_a_block_is_launched_with():
    # setmaxnreg waits for ever where there are no more; a launch gives each thread a multiple of 8.
    for traits, problem in _configs():
        config = configs.choose(problem, traits)
        warpgroups = config.warpgroups + 1
        launched = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
        compute, load = config.registers
        assert config.warpgroups * compute + load <= launched
        assert compute % 8 == load % 8 == 0


def test_choose_makes_no_scanning_kernel_persistent():
    # The number of tiles has one place in shared memory, which the next query tile would overwrite.
    seen = {(traits.scans, configs.choose(problem, traits).persistent) for traits, problem in _configs()}
    assert seen == {(False, False), (False, True), (True, False)}


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (None, 4096),
        (SlidingWindow(99), 163),
        (SlidingWindow(99) & Causal(), 163),
        (Causal(), None),
        (PrefixLM(7), None),
        (SlidingWindow(jnp.array([3, 4])), None),
        (Segments(jnp.zeros(4096, jnp.int32)), None),
    ],
)
def test_steady_keys_counts_what_every_query_tile_sees(mask, keys):
    assert walk.steady_keys(_problem(mask)) == keys


def test_scans_only_where_there_is_no_closed_form():
    ids = Segments(jnp.zeros(4096, jnp.int32))
    for mask, scans in (
        (None, False),
        (Causal(), False),
        (ids, True),
        (ids & Causal(), True),
        (~Causal(), True),
    ):
        assert walk.scans(_problem(mask)) is scans


def test_hidden_is_possible_only_where_a_key_may_be_seen_by_none():
    ids = Segments(jnp.zeros(4096, jnp.int32))
    for mask, possible in (
        (None, False),
        (Causal(), False),
        (ids & Causal(), False),
        (Causal(offset=-1), True),
        (masks.Lengths(key_lengths=jnp.array([3, 4])), True),
        (masks.Dense(jnp.ones((4096, 4096), bool)), True),
    ):
        assert hidden.possible(_problem(mask)) is possible

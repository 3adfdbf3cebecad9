"""The configs of the Hopper kernel, and what decides on them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flashjax import Causal, Segments, SlidingWindow, masks, scores
from flashjax.backends import hopper
from flashjax.backends.hopper import config as configs
from flashjax.operands import Sizes
from flashjax.problem import Problem, abstract

if jax.__version_info__ < hopper.NEEDS_JAX:
    pytest.skip(f"the kernel needs jax 0.11, and this is {jax.__version__}", allow_module_level=True)

from flashjax.backends.hopper import backward, backward_pairs, forward, hidden, recompute, walk


def _problem(mask=None, length=4096, dim=128, value_dim=None):
    if mask is not None:
        mask = abstract(mask.resolve(Sizes(2, 4, length, length)))
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


def _backward_configs():
    for _, problem in _configs():
        for dtype, softcap in (("bfloat16", None), ("float16", None), ("bfloat16", 20.0)):
            problem = dataclasses.replace(problem, dtype=jnp.dtype(dtype), softcap=softcap)
            by_key, by_query = (recompute.traits(problem, x) for x in (True, False))
            yield problem, configs.choose_backward(problem, by_key), configs.choose_queries(problem, by_query)


def test_choose_backward_gives_no_more_registers_than_a_block_is_launched_with():
    for _, config, queries in _backward_configs():
        for compute, load in (config.registers, queries.registers):
            assert 2 * compute + load <= 65536 // (128 * 3) // 8 * 8 * 3
            assert compute % 8 == load % 8 == 0


def test_pairs_gives_no_more_registers_than_a_block_is_launched_with():
    registers = backward_pairs.REGISTERS
    assert 2 * registers["compute"] + registers["add"] + registers["load"] <= 65536 // 128
    assert all(x % 8 == 0 for x in registers.values())


@pytest.mark.parametrize(
    ("shape", "dtype", "block_k"),
    [
        ((1, 4, 256, 256), "bfloat16", 128),
        ((1, 4, 256, 256), "float32", 64),
        ((1, 4, 250, 250), "bfloat16", 64),
        ((2, 1, 1, 256), "bfloat16", 64),
    ],
)
def test_choose_takes_wide_key_tiles_where_a_bias_of_halves_is_staged(shape, dtype, block_k):
    length = shape[3]
    bias = scores.from_arguments(
        jnp.zeros(shape, dtype), None, None, None, Sizes(2, 4, length, length, None, None)
    )
    problem = dataclasses.replace(_problem(None, length, 32), scores=abstract(bias))
    assert configs.choose(problem, forward._traits(problem)).block_k == block_k


def test_choose_backward_rounds_no_product_that_may_overflow():
    for problem, config, _ in _backward_configs():
        assert config.roles or config.narrow == ("product" if problem.dtype == jnp.bfloat16 else "weights")


def test_choose_backward_gives_a_warpgroup_64_rows():
    for problem, config, _ in _backward_configs():
        widest = max(problem.head_dim, problem.value_dim)
        assert config.block_k == (64 if config.roles else 128)
        assert config.roles is (widest > 128 or problem.softcap is not None)
        assert config.block_q == (128 if widest <= 64 and not config.roles else 64)


def test_choose_lets_blocks_fit_into_shared_memory():
    # Tiles only: barriers, lse and what masks need per key come on top. The compile tests see all of it.
    for traits, problem in _configs():
        plan = forward.Plan(problem, traits, configs.choose(problem, traits), {})
        sizes = {name: 2 * x.count * x.pitch * x.columns for name, x in plan.shapes.items()}
        tiles = sum(sizes.values()) if plan.own_output else sum(sizes.values()) - sizes["o"]
        assert tiles + 2048 <= 232_448


def test_choose_backward_lets_blocks_fit_into_shared_memory():
    # Likewise; P and dS are tiles too.
    for problem, config, _ in _backward_configs():
        plan = backward.Plan(problem, recompute.traits(problem, by_key=True), config, {}, adds=True)
        tiles = sum(2 * x.count * x.pitch * x.columns for x in plan.shapes.values())
        exchanged = 2 + (plan.p_slots if config.roles else 0)
        assert tiles + exchanged * 2 * config.block_q * config.block_k + 2048 <= 232_448


def test_choose_hands_out_uneven_work_from_a_queue():
    for traits, problem in _configs():
        config = configs.choose(problem, traits)
        if config.schedule == "static":
            assert problem.mask is None or problem.key_length <= 1024
        if traits.scans and max(problem.head_dim, problem.value_dim) <= 128:
            assert config.schedule == "queue"


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

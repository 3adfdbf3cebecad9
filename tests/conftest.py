"""Settings of every test: CPU with eight devices unless told otherwise, strict dtype promotion."""

import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests compile much and run little. LLVM need not optimise what runs once on a few numbers, and XLA's
# older emitters compile three times as fast where it still has them. XLA_FLAGS in the environment wins.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

import jax
import pytest

from flashjax import backends
from flashjax.backends import hopper, xla

jax.config.update("jax_numpy_dtype_promotion", "strict")

# What cannot be imported where jax lacks what the Hopper kernel is written in.
collect_ignore = [] if jax.__version_info__ >= hopper.NEEDS_JAX else ["mosaic_interpreter.py"]

SMALL = xla.Config(rows=32, keys=24, logits=2**11)
SMALL_TILES = backends.Backend(
    "small-tiles",
    lambda problem: None,
    functools.partial(xla.forward, config=SMALL),
    functools.partial(xla.backward, config=SMALL),
    automatic=False,
)


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Offer ``implementation="small-tiles"``: the portable backend, cut so small that short sequences have
    many tiles and chunks."""
    shipped = backends.BACKENDS
    backends.BACKENDS = (*shipped, SMALL_TILES)
    yield
    backends.BACKENDS = shipped

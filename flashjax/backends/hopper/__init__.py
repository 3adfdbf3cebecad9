"""NVIDIA Hopper: Pallas Mosaic GPU kernels for sm_90.

What the kernels cannot do is said here, before anything runs and without importing them: jax before 0.11
does not have what they are written in.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.problem import Gradients, Inputs, Problem, Results, Wanted

NEEDS_JAX = (0, 11)
MOST_DROPPED = 0.99  # a larger threshold of `dropout` is no number in bfloat16, as which it is compared


def unsupported(problem: Problem) -> str | None:
    """Return why the kernels do not do a call in this process, or None."""
    return missing_device() or refusal(problem)


def missing_device() -> str | None:
    """Say what this process lacks: a jax that is new enough, a Hopper GPU."""
    if jax.__version_info__ < NEEDS_JAX:
        return f"it needs jax 0.11 or newer, and this is jax {jax.__version__}"
    device = _default_device()
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA Hopper GPU, and the default device is {device.platform}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return f"it needs compute capability 9.0 (H100, H200), and {device.device_kind} has {capability}"
    return None


def refusal(problem: Problem) -> str | None:
    """Say what about a call the kernels do not do, whatever the device, or None."""
    if problem.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it multiplies float16 and bfloat16, and the call is in {problem.dtype}"
    for name, dim in (("head dim", problem.head_dim), ("value dim", problem.value_dim)):
        if dim % 8 or not 8 <= dim <= 256:
            return f"it needs head dims in multiples of 8 up to 256, and the {name} is {dim}"
    if problem.dropout_rate > MOST_DROPPED:
        return f"it drops {MOST_DROPPED} of the weights at most, and dropout_rate is {problem.dropout_rate}"
    if not _exact_products(problem.precision):
        return f"it multiplies exactly and adds in float32, and precision is {problem.precision!r}"
    from flashjax.backends.hopper import packing

    return packing.refusal(problem)


def run_forward(problem: Problem, inputs: Inputs) -> Results:
    """Compute the results of a call in one kernel; see `hopper.forward`."""
    from flashjax.backends.hopper import forward

    return forward.forward(problem, inputs)


def run_backward(
    problem: Problem,
    inputs: Inputs,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Wanted,
) -> Gradients:
    """Compute the gradients of a call: one kernel goes over the tiles, two if deterministic; see
    `hopper.backward`."""
    from flashjax.backends.hopper import backward

    return backward.backward(problem, inputs, out, lse, dout, dlse, wanted)


def without_mesh(function: Callable) -> Callable:
    """Trace a function as if no mesh were set: the body of a kernel knows of no other devices.

    Where a mesh has explicit axes, JAX would put shardings into it, which Mosaic GPU does not lower.
    """

    @functools.wraps(function)
    def alone(*args):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*args)

    return alone


def multiprocessors() -> int:
    """Return how many multiprocessors the GPU has; those of an H100 SXM or H200 where none is here to ask."""
    device = _default_device()
    return device.core_count if device.platform in ("gpu", "cuda") else 132


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.devices(device)[0]
    return device if device is not None else jax.devices()[0]


def _exact_products(precision: Any) -> bool:
    """Whether products of half-precision numbers that are exact in float32 satisfy a precision."""
    if isinstance(precision, tuple):
        return all(_exact_products(x) for x in precision)
    if precision is None or isinstance(precision, jax.lax.Precision):
        return True
    return str(precision) in ("default", "high", "highest", "float32", "tensorfloat32", "bfloat16", "fastest")

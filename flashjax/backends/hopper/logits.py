"""From products to logits in a kernel: the scale and the softcap, with the kernel's own tanh.

What `scores.Scores` do comes after it, in `reading`: they depend on the place.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashjax import scores
from flashjax.backends.hopper import intrinsics
from flashjax.problem import Problem

LOG2E = math.log2(math.e)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
NEAR = 0.625  # up to where the polynomial of tanh holds


def folds(problem: Problem) -> bool:
    """Whether products become logits by a constant factor, which other arithmetic can take in."""
    return plain(problem) and problem.scores is None


def plain(problem: Problem) -> bool:
    """Whether products become what the scores change by a constant factor."""
    return not problem.scaled and problem.softcap is None


def adds(problem: Problem) -> bool:
    """Whether logits are a constant times the products, plus what depends on the place alone."""
    return plain(problem) and problem.scores is not None and problem.scores.additive


def factor(problem: Problem, scales: Any, b: Any) -> Any:
    """Return the scale of batch row ``b()``."""
    return scales[lax.rem(b(), jnp.int32(scales.shape[0]))] if problem.scaled else problem.default_scale


def logits(problem: Problem, scales: Any, b: Any, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Turn the products of batch row ``b()`` into ``(logits, slope)``, as `scores.logits` does.

    Args:
      problem: of the call; `folds` is false.
      scales: float32 ``[b]`` in global memory, None where no scale was given.
      b: ``b()`` is the batch row.
      s: products of a tile.
    """
    return scores.logits(s, factor(problem, scales, b), problem.softcap, tanh=tanh)


def tanh(x: jax.Array) -> jax.Array:
    """Compute tanh to 2e-7 of itself; the hardware's own is good to 5e-4, times the softcap.

    Where all numbers of a warp are small, as they are under a softcap that seldom bites, no exponential and
    no division is due.

    Source: the polynomial near 0 is that of tanhf in Moshier's Cephes library.
    """

    def near(x):
        z = x * x
        y = jnp.full_like(x, TANH[0])
        for c in TANH[1:]:
            y = y * z + c
        return y * z * x + x

    def everywhere(x):
        far = 1 - 2 * (1 / (1 + jnp.exp2(x * (2 * LOG2E))))
        return jnp.where(jnp.abs(x) < NEAR, near(x), far)

    return lax.cond(intrinsics.any_in_warp(negative=NEAR - jnp.abs(x)), everywhere, near, x)

"""What happens to a logit between the product q·k and the mask, and the way back.

Forward, in this order: ``s = scale * qk``, ``s = softcap * tanh(s / softcap)``, ``s = s + bias``.
The bias is last, so its gradient is the gradient of the logit itself.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def logits(
    qk: jax.Array,
    scale: jax.Array | float,
    softcap: float | None,
    bias: jax.Array | None,
    *,
    tanh: Callable = jnp.tanh,
) -> tuple[jax.Array, jax.Array | None]:
    """Turn raw products into logits.

    Args:
      qk: products of queries and keys, float32 or wider, any shape.
      scale: multiplies the products; a number or an array that broadcasts to ``qk``.
      softcap: bounds the scaled products to ``(-softcap, softcap)``; None leaves them alone.
      bias: added last, broadcasts to ``qk``; None adds nothing.
      tanh: the hyperbolic tangent; a kernel brings one that its hardware does well.

    Returns:
      ``(s, slope)``: the logits, and d(capped)/d(scaled) in the same shape, None without a softcap.
    """
    if softcap is None:
        s, slope = qk * scale, None
    else:
        t = tanh(qk * (scale / softcap))
        s, slope = softcap * t, 1 - t * t
    if bias is not None:
        s = s + bias.astype(s.dtype)
    return s, slope


def through_softcap(ds: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Take the gradient of the logits back to the scaled products."""
    return ds if slope is None else ds * slope

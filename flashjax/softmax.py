"""The online softmax: one step, its end, and the merge of two partial results.

A row of attention weights is ``p_j = exp(s_j) / sum_i exp(s_i)``. Seen block by block, three numbers
a row are enough to keep the answer exact:

    m    the largest logit so far,
    l    the sum of ``exp(s_j - m)`` so far,
    acc  the sum of ``exp(s_j - m) * v_j`` so far.

A new block of logits ``s`` may raise the maximum to ``m'``. What was summed against ``m`` is then too
large by ``exp(m' - m)``, so it is scaled by ``alpha = exp(m - m')`` before the block is added:

    l'   = alpha * l   + sum_j exp(s_j - m')
    acc' = alpha * acc + sum_j exp(s_j - m') * v_j

At the end ``acc / l`` is the softmax-weighted mean and ``m + log(l)`` the log-sum-exp.

A masked logit is ``-inf``. A row that has seen only masked logits has ``m = -inf``, and ``-inf - -inf``
is not a number; the pivot that is subtracted is therefore 0 in that case, which makes every weight
``exp(-inf) = 0`` as it should be.

Everything here is plain arithmetic on values: the same lines run under ``jax.jit`` and inside a kernel.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3; Dao et
al., "FlashAttention" (2022), section 3.1; Dao, "FlashAttention-2" (2023), section 3.1; the slack:
FlashAttention-4 (2025).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """Repeat a value per row along what ``like`` has in further axes."""
    return lax.broadcast_in_dim(x, like.shape, tuple(range(x.ndim)))


def pivot_of(m: jax.Array) -> jax.Array:
    """Return what to subtract before the exponential: ``m``, or 0 where nothing was visible."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def begin(rows: tuple[int, ...], sink: jax.Array | None, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the state ``(m, l)`` before the first block.

    Args:
      rows: shape of the state.
      sink: a logit that joins the sum and has no value, broadcasts to ``rows``; None for none.
      like: an array of the dtype of the logits.

    Returns:
      ``(-inf, 0)`` in every row, or ``(sink, 1)``: as if a key with that logit had been seen.
    """
    full = lambda value: lax.full_like(like, value, shape=rows)
    return (full(-jnp.inf), full(0)) if sink is None else (jnp.broadcast_to(sink, rows), full(1))


def step(
    m: jax.Array,
    l: jax.Array,
    s: jax.Array,
    *,
    unit: float = 1.0,
    exp: Callable = jnp.exp,
    total: Callable = lambda p: jnp.sum(p, axis=-1),
    slack: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Take one block of logits into the running maximum and sum.

    Args:
      m: running maximum ``[..., rows]``, ``-inf`` before the first block.
      l: running sum of exponentials relative to ``m``, ``[..., rows]``, 0 before the first block.
      s: logits of the block ``[..., rows, keys]``; masked ones are ``-inf``.
      unit: what ``s`` is multiplied by, positive; ``m`` counts in the product. A kernel has ``s`` unscaled
        and folds the scale and ``log2(e)`` in here.
      exp: the exponential: ``jnp.exp2`` where ``unit`` holds ``log2(e)``.
      total: sums ``p`` over its keys. Where it leaves several partial sums, ``l`` has as many in a last axis.
      slack: leave ``m`` where it is while no logit is larger by more than this, in the same unit. ``m`` is
        then a lower bound of the maximum, as good for everything that follows, weights go up to
        ``exp(slack)``, and ``alpha`` is exactly 1 nearly always: a caller may skip what it scales.

    Returns:
      ``(p, alpha, m_new, l_new)``: the block's weights relative to ``m_new`` in the shape of ``s``, the
      factor ``[..., rows]`` by which everything accumulated so far must be scaled, and the new state.

    Example:
      >>> import jax.numpy as jnp
      >>> m, l = jnp.full((1,), -jnp.inf), jnp.zeros((1,))
      >>> p, alpha, m, l = step(m, l, jnp.array([[1.0, 2.0]]))
      >>> print(f"{float(m[0]):.0f} {float(l[0]):.3f}")
      2 1.368
    """
    largest = jnp.max(s, axis=-1) * unit
    m_new = jnp.where(largest > m + slack, largest, m) if slack else jnp.maximum(m, largest)
    pivot = pivot_of(m_new)
    alpha = exp(m - pivot)
    p = exp(s * unit - spread(pivot, s))
    return p, alpha, m_new, spread(alpha, l) * l + total(p)


def finish(
    m: jax.Array,
    l: jax.Array,
    sink: jax.Array | None = None,
    *,
    exp: Callable = jnp.exp,
    log: Callable = jnp.log,
) -> tuple[jax.Array, jax.Array]:
    """Turn the running state into what ``acc`` must be multiplied by, and lse.

    Args:
      m, l: the state.
      sink: as in `begin`, if it joins only now, because ``m`` had to be the largest logit of a key.
      exp, log: in the unit of ``m``.

    Returns:
      ``(1 / l, m + log(l))``, of l and m with the sink; an empty row gives ``(0, -inf)``.
    """
    alpha = None
    if sink is not None:
        top = jnp.maximum(m, sink)
        pivot = pivot_of(top)
        alpha = exp(m - pivot)
        m, l = top, alpha * l + exp(sink - pivot)
    seen = l > 0
    l = jnp.where(seen, l, jnp.ones_like(l))
    inverse = jnp.where(seen, 1 / l, jnp.zeros_like(l))
    lse = jnp.where(seen, m + log(l), jnp.full_like(m, -jnp.inf))
    return (inverse if alpha is None else inverse * alpha), lse


def weights(s: jax.Array, lse: jax.Array) -> jax.Array:
    """Recompute ``softmax(s)`` from logits ``[..., rows, keys]`` and their saved lse ``[..., rows]``."""
    return jnp.exp(s - pivot_of(lse)[..., None])


def merge(out1: jax.Array, lse1: jax.Array, out2: jax.Array, lse2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combine attention over two disjoint sets of keys.

    ``L = log(exp(lse1) + exp(lse2))`` and ``out = out1 * exp(lse1 - L) + out2 * exp(lse2 - L)``. Two
    empty parts stay empty: ``(0, -inf)``.

    Args:
      out1, out2: partial outputs ``[..., value_dim]``, any one floating dtype.
      lse1, lse2: their natural log-sum-exp ``[...]``, float32 (or float64).

    Returns:
      ``(out, lse)`` in the shapes and dtypes of ``out1`` and ``lse1``. Differentiable in all four.

    Source: Dao et al., "FlashAttention" (2022), section 3.1, the softmax of a concatenation.
    """
    pivot = lax.stop_gradient(pivot_of(jnp.maximum(lse1, lse2)))
    w1, w2 = jnp.exp(lse1 - pivot), jnp.exp(lse2 - pivot)
    inverse, lse = finish(pivot, w1 + w2)
    mixed = (w1 * inverse)[..., None] * out1.astype(lse.dtype)
    mixed += (w2 * inverse)[..., None] * out2.astype(lse.dtype)
    return mixed.astype(out1.dtype), lse

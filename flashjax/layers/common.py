"""What the Flax adapters share: any number of batch dimensions, masks that are 0 or 1, Flax's dropout.

Flax calls ``attention_fn`` on arrays ``[batch..., length, heads, dim]``. The batch dimensions become one,
rows counted in row-major order, and are given back to the result.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from flashjax import api
from flashjax import problem as problems
from flashjax.masks import Causal, Mask


def promote(arrays: tuple[Any, ...], dtype: Any = None) -> tuple[jax.Array, ...]:
    """Cast query, key and value to ``dtype``, or where None to the type that all of them promote to.

    The rule of Flax's ``promote_dtype``: integers become at least float32.
    """
    names = ("query", "key", "value")
    arrays = tuple(problems.check_array(name, x) for name, x in zip(names, arrays, strict=True))
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    return tuple(x.astype(dtype) for x in arrays)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any,
    mask: Any,
    *,
    is_causal: Any,
    broadcast_dropout: Any,
    dropout_rng: Any,
    dropout_rate: Any,
    deterministic: Any,
    precision: Any,
    scale: Any,
    local_window_size: Any,
    softcap: Any,
    implementation: str | None,
) -> jax.Array:
    """Compute attention on ``[batch..., length, heads, dim]``.

    Args:
      query, key, value: as `promote` returns them.
      is_causal: hide later keys, the last query at the last key.
      others: as in the adapters' ``attention_fn``.

    Returns:
      ``[batch..., T, N, Dv]`` in the dtype of query.
    """
    problems.check_layer_qkv(query, key, value)
    batch = query.shape[:-3]
    query_length, heads, key_length = query.shape[-3], query.shape[-2], key.shape[-3]
    problems.check_layer_window(local_window_size, query_length, key_length)
    rate = problems.check_layer_dropout(dropout_rate, deterministic, broadcast_dropout)
    full = (*batch, heads, query_length, key_length)
    if mask is not None and not isinstance(mask, Mask):
        mask = flatten_operand("mask", problems.check_array("mask", mask).astype(bool), full)
    if bias is not None and not isinstance(bias, Mask):
        bias = flatten_operand("bias", problems.check_array("bias", bias), full)
    if problems.check_flag("is_causal", is_causal):
        causal = Causal(align="end")
        mask = causal if mask is None else causal & mask
    rows = math.prod(batch)
    query, key, value = (x.reshape(rows, *x.shape[-3:]) for x in (query, key, value))
    out = api.attend(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=False,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        local_window_size=local_window_size,
        softcap=softcap,
        dropout_rate=rate,
        dropout_key=dropout_rng if rate > 0 else None,
        broadcast_dropout=broadcast_dropout and rate > 0,
        precision=precision,
        deterministic=False,
        implementation=implementation,
    )
    return out.reshape(*batch, *out.shape[1:])


def flatten_operand(name: str, x: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """Make a mask or bias ``[b, n, t, s]``, each size 1 or full, of one that broadcasts to ``full``.

    Heads, queries and keys are never spread. The batch dimensions are spread only if some are 1 and
    some are not, since then no single dimension stands for them.

    Args:
      name: of the argument, for the error.
      x: broadcastable to ``full``.
      full: ``(*batch, N, T, S)``.

    Raises:
      ValueError: it does not broadcast.
    """
    problems.check_layer_operand(name, x.shape, full)
    x = x.reshape((1,) * (len(full) - x.ndim) + x.shape)
    own, batch, rest = x.shape[:-3], full[:-3], x.shape[-3:]
    if math.prod(own) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)

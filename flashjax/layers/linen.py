"""Attention for Flax Linen layers."""

from typing import Any

import jax

from flashjax import problem as problems
from flashjax.layers import common


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    scale: Any = None,
    local_window_size: Any = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Compute attention as ``attention_fn`` of `flax.linen.MultiHeadDotProductAttention`.

    .. math::
        \mathrm{out} = \mathrm{softmax}(\mathrm{softcap}(\mathrm{scale}\, Q K^T) + \mathrm{bias}) V

    over the keys that the mask shows: `flax.linen.dot_product_attention` in memory linear in the lengths.
    The layer's parameters do not change, so neither do checkpoints. Letters: T queries, S keys, N query
    heads, K key/value heads, D and Dv head dims. There may be any number of batch dimensions, or none.

    Args:
      query: ``[batch..., T, N, D]``.
      key: ``[batch..., S, K, D]``; N must be a multiple of K.
      value: ``[batch..., S, K, Dv]``.
      bias: added to the logits after softcap; broadcastable to ``[batch..., N, T, S]``, any floating dtype.
      mask: array broadcastable to ``[batch..., N, T, S]``, of any dtype: what is not zero may be attended
        to. Or a `flashjax.Mask`, whose batch rows are all rows of the batch dimensions in row-major order.
      broadcast_dropout: drop the same (query, key) pairs in all batch rows and heads. Default True, as in
        Flax.
      dropout_rng: a JAX random key, needed where dropout is active.
      dropout_rate: probability in [0, 1) of dropping an attention weight. Default 0.
      deterministic: turn dropout off. Default False.
      dtype: query, key and value are cast to it; None is the type they promote to.
      precision: of the matrix products, as in `flashjax.flash_attention`.
      module: must be None. Flax passes itself here where ``sow_weights=True``.
      force_fp32_for_softmax: has no effect; the softmax of half-precision inputs is always in float32.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
      scale, local_window_size, softcap, implementation: as in `flashjax.flash_attention`. Flax does not
        pass them; bind them with `functools.partial`. ``local_window_size`` needs T = S.

    Returns:
      ``[batch..., T, N, Dv]`` in ``dtype``.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it, what it is and what it must be.
      UnsupportedError: attention weights or other matrix products are asked for; a window is given with
        T and S unequal; the named ``implementation`` does not do this call.

    Notes:
      Differences from Flax: a query that sees no key gives 0 instead of the mean of all values. Dropout
      has the same distribution but other random bits. A dropout rate outside [0, 1), or NaN, is an error
      at evaluation too.
      For causal attention pass ``mask=flashjax.Causal()`` to the layer: an array of `nn.make_causal_mask`
      means the same but takes T·S. A layer with ``decode=True`` needs no causal mask, and there Flax
      joins ``mask`` with its own, so that it must be an array.
      An array whose batch dimensions are partly 1 is spread over the batch; heads, T and S are not.

    Example:
      >>> import flashjax, jax
      >>> from flax import linen as nn
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
      >>> x = jax.random.normal(jax.random.key(0), (2, 10, 32))
      >>> variables = layer.init(jax.random.key(1), x)
      >>> layer.apply(variables, x, mask=flashjax.Causal()).shape
      (2, 10, 32)

    Source: the signature and meaning of ``flax.linen.dot_product_attention``, Flax 0.12.
    """
    problems.check_module(module)
    problems.check_no_einsum("einsum_dot_general", einsum_dot_general)
    problems.check_no_einsum("qk_attn_weights_einsum", qk_attn_weights_einsum)
    problems.check_no_einsum("attn_weights_value_einsum", attn_weights_value_einsum)
    query, key, value = common.promote((query, key, value), dtype)
    return common.attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=False,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        scale=scale,
        local_window_size=local_window_size,
        softcap=softcap,
        implementation=implementation,
    )

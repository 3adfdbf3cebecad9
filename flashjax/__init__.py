"""Exact attention for JAX in linear memory.

`flash_attention` takes the arguments of `jax.nn.dot_product_attention`; masks compose with ``&``, ``|`` and
``~``; `flashjax.layers` brings both to Flax.
"""

from flashjax.api import explain, flash_attention
from flashjax.masks import (
    BlockPattern,
    BlockSparse,
    Causal,
    CustomMask,
    Dense,
    Lengths,
    Mask,
    PrefixLM,
    Range,
    Segments,
    SlidingWindow,
    packed,
)
from flashjax.operands import Operand
from flashjax.problem import UnsupportedError
from flashjax.scores import Alibi, RelativePositionBias, ScoreFunction
from flashjax.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "BlockPattern",
    "BlockSparse",
    "Causal",
    "CustomMask",
    "Dense",
    "Lengths",
    "Mask",
    "Operand",
    "PrefixLM",
    "Range",
    "RelativePositionBias",
    "ScoreFunction",
    "Segments",
    "SlidingWindow",
    "UnsupportedError",
    "attention_weights",
    "explain",
    "flash_attention",
    "packed",
]

"""Exact attention for JAX in linear memory.

`flash_attention` takes the arguments of `jax.nn.dot_product_attention`; masks compose with ``&``, ``|`` and
``~``; `flashjax.layers` brings both to Flax.
"""

from flashjax.api import explain, flash_attention
from flashjax.masks import (
    BlockSparse,
    Causal,
    CustomMask,
    Dense,
    Lengths,
    Mask,
    Operand,
    PrefixLM,
    Range,
    Segments,
    SlidingWindow,
)
from flashjax.problem import UnsupportedError

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "Causal",
    "CustomMask",
    "Dense",
    "Lengths",
    "Mask",
    "Operand",
    "PrefixLM",
    "Range",
    "Segments",
    "SlidingWindow",
    "UnsupportedError",
    "explain",
    "flash_attention",
]

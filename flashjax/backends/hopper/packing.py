"""What a mask reads, in the form in which the kernel reads it.

A resolved operand has the dimensions [b, h, q, k], each of size 1 or full. What a tile of 64 queries by
``block_k`` keys needs of it depends on which of q and k are full:

    neither   "scalar"  one number a row and head, read from global memory
    q         "rows"    a vector of 64, read once for a query tile and held in registers
    k         "cols"    a vector of block_k, brought into shared memory by the loader beside the tile of K
    both      "bits"    boolean only: 32 keys are packed into a word, and a tile is block_k / 32 vectors

`pack` makes the arrays, in XLA; nothing it makes is larger than an eighth of what it reads, or than a
vector per row and head.
`reading.Reader` reads them in the kernel.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flashjax.masks import CustomMask, Mask, Operand

WORD = 32


class Kind(NamedTuple):
    """How one operand is stored.

    Attributes:
      form: "scalar", "rows", "cols" or "bits".
      dtype: of the stored numbers.
      boolean: whether its numbers stand for booleans.
      entry: of "bits", how many queries share one row of words.
    """

    form: str
    dtype: Any
    boolean: bool
    entry: int = 1


def form_of(operand: Operand) -> str:
    _, _, q, k = operand.array.shape
    return {(False, False): "scalar", (True, False): "rows", (False, True): "cols", (True, True): "bits"}[
        q > 1, k > 1
    ]


def refusal(mask: Mask) -> str | None:
    """Say why the kernel cannot read what a mask reads, or None."""
    is_custom = lambda part: isinstance(part, CustomMask)
    custom = any(map(is_custom, jax.tree.leaves(mask, is_leaf=is_custom)))
    for name, operand in mask.operands().items():
        dtype = operand.array.dtype
        if dtype == jnp.bool_:
            continue
        what = f"the mask's operand {name!r}"
        if dtype.itemsize > 4:
            return f"{what} has dtype {dtype}; the kernel reads up to 32 bits"
        if dtype.itemsize < 4 and custom:
            # The kernel computes with 32 bits, a function of the user's might overflow or round with fewer.
            return f"{what} has dtype {dtype}, and a CustomMask in the kernel computes with 32 bits"
        if form_of(operand) == "bits":
            return f"{what} has one {dtype} per query and key; the kernel reads only booleans of that kind"
    return None


def kinds(mask: Mask | None) -> dict[str, Kind]:
    """Describe the operands of a mask, by name."""
    if mask is None:
        return {}
    return {
        name: Kind(
            form_of(operand), stored(operand.array.dtype), operand.array.dtype == jnp.bool_, operand.block[0]
        )
        for name, operand in mask.operands().items()
    }


def pack(operand: Operand, queries: int, keys: int, query_length: int, key_length: int) -> jax.Array:
    """Bring an operand into its stored form.

    Args:
      operand: resolved, with entries that may stand for several queries and keys.
      queries, keys: the lengths rounded up to whole tiles.
      query_length, key_length: T and S.

    Returns:
      ``[b, h]``, ``[b, h, queries]``, ``[b, h, keys]``, or for "bits" uint32
      ``[b, h, keys / 32, queries]`` (entries in place of queries where they stand for several).
    """
    form = form_of(operand)
    x = operand.array
    if form == "bits":
        return _words(operand, queries, keys, key_length)
    x = x.astype(stored(x.dtype))
    if form == "scalar":
        return x[:, :, 0, 0]
    axis, length, padded = (2, query_length, queries) if form == "rows" else (3, key_length, keys)
    entry = operand.block[axis - 2]
    if entry > 1:
        x = jnp.take(x, jnp.arange(length, dtype=jnp.int32) // entry, axis=axis)
    x = x[:, :, :, 0] if form == "rows" else x[:, :, 0, :]
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded - length)))


def stored(dtype: Any) -> Any:
    """Return the dtype of 32 bits that stands for another; booleans become 0 and 1."""
    if dtype == jnp.uint32:
        return jnp.uint32
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _words(operand: Operand, queries: int, keys: int, key_length: int) -> jax.Array:
    x, (entry_q, entry_k) = operand.array, operand.block
    if entry_k > 1:
        x = jnp.take(x, jnp.arange(key_length, dtype=jnp.int32) // entry_k, axis=3)
    missing = (queries - x.shape[2] if entry_q == 1 else 0, keys - key_length)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))
    x = x.reshape(*x.shape[:3], keys // WORD, WORD).astype(jnp.uint32)
    words = jnp.sum(x << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return words.swapaxes(2, 3)

"""The keep mask of attention dropout: a pure function of the key and four global indices.

Nothing is drawn and nothing is stored. Each weight's 32 random bits are a hash of (key, batch, head,
query position, key position), so the forward pass, its recomputation, the backward pass, any backend,
any tile size and any sharding agree on them bit for bit.

The hash is cheap where it is dense. A row (batch, head, query) and a column (key position) get strong
words of their own, and one round of two multiplications joins them:

    x = column ^ row_a;  x *= C1;  x ^= (x >> 15) ^ row_b;  x *= C2;  x ^= x >> 16

The row enters twice with independent words. With one word alone, two rows whose words happen to differ
by the difference of two column words would share part of their pattern. The second enters by xor: added, it
would only shift the product that follows, and rows that share their first word would still look alike.

Only uint32 add, xor, shift and multiply: a kernel evaluates it for its own tile.

Source: the mixing constants are those of Wellons, "Prospecting for hash functions" (2018).
"""

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B9


def _u32(x: int | jax.Array) -> np.uint32 | jax.Array:
    """Convert indices, or make a constant that a kernel can hold (a literal, not an array)."""
    return np.uint32(x) if isinstance(x, int) else x.astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Scramble 32 bits so that every input bit reaches every output bit."""
    x = (x ^ (x >> _u32(16))) * _u32(0x7FEB352D)
    x = (x ^ (x >> _u32(15))) * _u32(0x846CA68B)
    return x ^ (x >> _u32(16))


def key_words(key: jax.Array) -> jax.Array:
    """Reduce a JAX random key, typed or raw ``[words]`` uint32, to two words ``[2]`` uint32."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    first = second = jnp.zeros((), jnp.uint32)
    for word in data:
        first = _mix(first ^ word)
        second = _mix(second + (word ^ _u32(_GOLDEN)))
    return jnp.stack([first, second])


def threshold(rate: float) -> int:
    """Return the 32-bit number below which a weight's bits mean that it is dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep(
    words: tuple[jax.Array, jax.Array],
    b: jax.Array,
    h: jax.Array,
    q: jax.Array,
    k: jax.Array,
    rate: float,
) -> jax.Array:
    """Say which attention weights survive dropout.

    Args:
      words: the two uint32 words of the key (see `key_words`), each broadcastable to the result.
      b, h, q, k: batch row, query head, query position and key position, global, int32, broadcastable
        to one another. Give ``q`` a size of 1 along the key axis and ``k`` one along the query axis:
        only the joining round is then done per weight.
      rate: probability of being dropped, in [0, 1).

    Returns:
      A boolean array of the broadcast shape, True where the weight is kept.
    """
    first, second = words
    row_a = _mix(_u32(q) + _mix(_u32(h) + _mix(_u32(b) ^ first)))
    row_b = _mix(_u32(q) ^ _mix(_u32(h) ^ _mix(_u32(b) + second)))
    column = _mix(_u32(k) + _mix(first + second))
    x = (column ^ row_a) * _u32(0x7FEB352D)
    x = x ^ (x >> _u32(15)) ^ row_b
    x = x * _u32(0x846CA68B)
    return (x ^ (x >> _u32(16))) >= _u32(threshold(rate))

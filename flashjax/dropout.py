"""The keep mask of attention dropout: a pure function of the key and four global indices.

Nothing is drawn and nothing is stored. Each weight's 15 random bits are a hash of (key, batch, head,
query position, key position), so the forward pass, its recomputation, the backward pass, any backend,
any tile size and any sharding agree on them bit for bit. With 15 bits, the rate counts to the nearest
multiple of 2**-15.

The hash is cheap where it is dense. A row (batch, head, query) and a column (key position) get strong
words of their own, and one round of two multiplications joins them:

    x = column * row_a;  x ^= x >> 15;  x *= row_b

All three words are odd, so that no multiplication loses a bit. The row enters twice with independent words:
rows that happen to share one of them do not look alike, as they would if the second were added or joined by
xor.

A word decides for two keys, ``k`` and ``k ^ 8``, which share their column: its lower half for the key
whose position has bit 3 clear, its upper half for the other, each without its highest bit. So a kernel in
which a thread holds both (as in the accumulators of a GPU's matrix products) does the round once for two
weights, and compares both halves at once: as two half-precision numbers, which without their sign are in
the order of their bits.

Only uint32 arithmetic and bit operations: a kernel evaluates it for its own tile.

Source: the mixing constants are those of Wellons, "Prospecting for hash functions" (2018).
"""

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = 0x9E3779B9
_PAIR = 8  # the bit by which the positions of two keys that share a word differ


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
    """Return the 15-bit number below which a weight's bits mean that it is dropped."""
    return min(round(rate * 2**15), 2**15 - 1)


def row_words(
    words: tuple[jax.Array, jax.Array], b: jax.Array, h: jax.Array, q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the two odd uint32 words of rows (batch row, query head, query position)."""
    first, second = words
    row_a = _mix(_u32(q) + _mix(_u32(h) + _mix(_u32(b) ^ first)))
    row_b = _mix(_u32(q) ^ _mix(_u32(h) ^ _mix(_u32(b) + second)))
    return row_a | _u32(1), row_b | _u32(1)


def column_words(words: tuple[jax.Array, jax.Array], k: jax.Array) -> jax.Array:
    """Return the odd uint32 word of key positions: ``k`` and ``k ^ 8`` have the same."""
    first, second = words
    return _mix((_u32(k) & ~_u32(_PAIR)) + _mix(first + second)) | _u32(1)


def join(column: jax.Array, row_a: jax.Array, row_b: jax.Array) -> jax.Array:
    """Join the words of a row and a column to the uint32 word that decides for two weights."""
    x = column * row_a
    return (x ^ (x >> _u32(15))) * row_b


def decide(x: jax.Array, k: jax.Array, rate: float) -> jax.Array:
    """Say whether the weight of key position ``k`` survives, given its word: one half of the word decides."""
    # Bring its half to the top. What stands below cannot change a comparison with a multiple of 2**17.
    lower = (~_u32(k) & _u32(_PAIR)) << _u32(1)
    return (x << (lower + _u32(1))) >= _u32(threshold(rate) << 17)


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
      rate: probability of being dropped, in [0, 1). It counts to the nearest multiple of 2**-15, and no
        rate drops everything: the largest counts as 1 - 2**-15.

    Returns:
      A boolean array of the broadcast shape, True where the weight is kept.
    """
    return decide(join(column_words(words, k), *row_words(words, b, h, q)), k, rate)

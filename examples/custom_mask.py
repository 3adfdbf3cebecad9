"""Compose masks, and write one: dilated windows with global tokens, inside documents.

Run it with ``python examples/custom_mask.py``.
"""

import jax
import jax.numpy as jnp

from flashjax import Causal, CustomMask, Lengths, Operand, Range, Segments, SlidingWindow, flash_attention

# ---- stock masks compose with & (both), | (either) and ~ (not) -------------------------------------

documents = jnp.repeat(jnp.arange(3, dtype=jnp.int32), jnp.array([6, 10, 8]), total_repeat_length=24)[None]
print("three documents in a row, each token sees its own document's past:")
print((Causal() & Segments(documents)).picture(24))
print("the last 4 tokens, and the first 8 tokens among themselves:")
print((SlidingWindow(3) | Lengths(8, 8)).picture(24))

# ---- a mask of one's own ---------------------------------------------------------------------------
# Query i sees REACH keys at i, i - d, i - 2 d, ..., where each head has its own dilation d, and every
# global token of its past. The function gets indices that broadcast (b row, h head, q query, k key) and
# the operands it declares; it may read no other array.

REACH = 4


def dilated_or_global(b, h, q, k, *, dilation, is_global):
    distance = q - k
    on_grid = (distance < REACH * dilation) & (distance % dilation == 0)
    return (distance >= 0) & (on_grid | is_global)


def bounds(b, h, q: Range, k: Range, *, dilation: Range, is_global: Range):
    """Say of a rectangle of queries q.lo..q.hi and keys k.lo..k.hi: surely empty? surely full?

    Empty rectangles are never computed, and full ones never ask the function. False is always right;
    a wrong True hides keys or shows them, so compare once with ``mask.dense``, as below.
    """
    future = k.lo > q.hi
    out_of_reach = q.lo - k.hi >= REACH * dilation.hi
    empty = future | (out_of_reach & ~is_global.hi)
    full = (k.hi <= q.lo) & is_global.lo
    return empty, full


def make_mask(dilations: list[int], global_positions: list[int], length: int) -> CustomMask:
    return CustomMask(
        dilated_or_global,
        bounds,
        dilation=Operand(jnp.array(dilations, jnp.int32), "h"),  # one value a head
        is_global=Operand(jnp.zeros((1, length), bool).at[:, jnp.array(global_positions)].set(True), "bk"),
    )


for head, name in enumerate(("dilation 1", "dilation 3")):
    print(f"{name}, tokens 0 and 9 global, inside documents:")
    print((make_mask([1, 3], [0, 9], 24) & Segments(documents)).picture(24, head=head))

# ---- the check: the same numbers as jax.nn with the mask written out -------------------------------

LENGTH, HEADS, DIM = 2000, 2, 32  # several tiles, so that the bounds matter
document = jnp.searchsorted(jnp.array([300, 1450]), jnp.arange(LENGTH), side="right")[None].astype(jnp.int32)
mask = make_mask([1, 7], [0, 301, 302, 1999], LENGTH) & Segments(document)
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, HEADS, DIM))


def loss(attention, mask, query, key, value):
    out = attention(query, key, value, mask=mask)
    return jnp.sum(out**2), out


step = jax.jit(jax.grad(loss, argnums=(2, 3, 4), has_aux=True), static_argnums=0)
ours = step(flash_attention, mask, query, key, value)
theirs = step(jax.nn.dot_product_attention, mask.dense(LENGTH), query, key, value)
for name, a, b in zip(("dq", "dk", "dv", "out"), jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    difference = jnp.abs(a - b).max() / jnp.abs(b).max()
    print(f"{name}: largest difference from jax.nn with the dense mask, relative: {difference:.0e}")
    assert difference < 1e-5, name
print(f"visible pairs: {mask.dense(LENGTH).mean():.2%} of {LENGTH} x {LENGTH}")

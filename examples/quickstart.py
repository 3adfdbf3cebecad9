"""The first call: attention, its gradient, the same numbers as ``jax.nn``, and the memory it does not need.

Run it with ``python examples/quickstart.py``.
"""

import jax
import jax.numpy as jnp

from flashjax import SlidingWindow, flash_attention

# Layout [batch, length, heads, head dim], as in jax.nn; 8 query heads share 2 key/value heads.
keys = jax.random.split(jax.random.key(0), 3)
query = jax.random.normal(keys[0], (1, 500, 8, 64))
key, value = (jax.random.normal(k, (1, 500, 2, 64)) for k in keys[1:])

out = flash_attention(query, key, value, is_causal=True)
expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
print(f"output {out.shape}, largest difference from jax.nn {jnp.abs(out - expected).max():.0e}")


def loss(attention, query, key, value):
    return jnp.sum(attention(query, key, value, is_causal=True) ** 2)


gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
ours = gradient(flash_attention, query, key, value)
theirs = gradient(jax.nn.dot_product_attention, query, key, value)
for name, a, b in zip(("query", "key", "value"), ours, theirs, strict=True):
    print(f"gradient of {name} {a.shape}, largest difference {jnp.abs(a - b).max():.0e}")

# A mask is a small object, never an array of length x length. Here each query sees the last 100 keys.
print(f"sliding window {flash_attention(query, key, value, mask=SlidingWindow(99)).shape}")

# What a training step needs beside its inputs and results, in MiB; compiled, not run.
for length in (4096, 16384):
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    for attention in (flash_attention, jax.nn.dot_product_attention):
        memory = gradient.lower(attention, x, x, x).compile().memory_analysis()
        print(f"{length:5d} tokens, {attention.__name__:21s} {memory.temp_size_in_bytes / 2**20:6.0f} MiB")

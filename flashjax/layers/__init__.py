"""Adapters to Flax: ``flashjax.layers.linen`` and ``flashjax.layers.nnx``, each with an ``attention_fn``."""

"""The calls that tests, benchmarks and tuning share: one list, every feature, adversarial sizes."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import (
    Alibi,
    BlockSparse,
    Causal,
    CustomMask,
    Operand,
    PrefixLM,
    RelativePositionBias,
    ScoreFunction,
    Segments,
    SlidingWindow,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `flash_attention`.

    Attributes:
      name: unique, for test ids and benchmark rows.
      batch, query_length, key_length, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, D, Dv.
      dtype: of query, key and value.
      bias: shape of the bias, None without one.
      mask: ``mask(case, rng)`` returns a mask, None without one.
      learned: further arguments that have a gradient, arrays or pytrees of them: functions ``(case, rng) ->
        value``.
      options: further arguments, or functions ``(case, rng) -> value`` of them.
    """

    name: str
    batch: int = 2
    query_length: int = 64
    key_length: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    bias: tuple[int, ...] | None = None
    bias_dtype: str = "float32"
    mask: Callable[..., Any] | None = None
    learned: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return ``(arrays, options)``: what has a gradient, and the rest of the keywords."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        arrays = {
            "query": normal(self.batch, self.query_length, self.heads, self.head_dim).astype(self.dtype),
            "key": normal(self.batch, self.key_length, self.kv_heads, self.head_dim).astype(self.dtype),
            "value": normal(self.batch, self.key_length, self.kv_heads, self.value_dim).astype(self.dtype),
        }
        if self.bias is not None:
            arrays["bias"] = normal(*self.bias).astype(self.bias_dtype)
        options = {k: v(self, rng) if callable(v) else v for k, v in self.options.items()}
        if "scale" in options:
            arrays["scale"] = jnp.float32(options.pop("scale"))
        arrays |= {name: make(self, rng) for name, make in self.learned.items()}
        if self.mask is not None:
            options["mask"] = self.mask(self, rng)
        return arrays, options

    def cotangents(self, seed: int = 1) -> tuple[jax.Array, jax.Array]:
        """Return cotangents of out and lse."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        shape = (self.batch, self.query_length, self.heads)
        dout = jnp.asarray(rng.standard_normal((*shape, self.value_dim)), self.dtype)
        return dout, jnp.asarray(rng.standard_normal(shape), jnp.float32)


def case(name: str, lengths: int | tuple[int, int] = 64, heads: int | tuple[int, int] = 2, **fields) -> Case:
    """Make a case from ``T`` or ``(T, S)`` and ``N`` or ``(N, K)``."""
    t, s = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    n, k = heads if isinstance(heads, tuple) else (heads, heads)
    fields.setdefault("value_dim", fields.get("head_dim", 16))
    return Case(name, query_length=t, key_length=s, heads=n, kv_heads=k, **fields)


def documents(length: int, rng: np.random.Generator, mean: int = 20) -> jnp.ndarray:
    """Return rising segment ids ``[length]`` of documents of random sizes."""
    return jnp.asarray(np.cumsum(rng.random(length) < 1 / mean), jnp.int32)


def _lengths(axis: str, low: int = 0) -> Callable:
    return lambda c, rng: jnp.asarray(rng.integers(low, getattr(c, axis) + 1, c.batch), jnp.int32)


def _segments(c: Case, rng: np.random.Generator) -> Segments:
    most = max(c.query_length, c.key_length)
    ids = jnp.stack([documents(most, rng) for _ in range(c.batch)])
    return Segments(ids[:, : c.query_length], ids[:, : c.key_length])


def _random_mask(*shape: int) -> Callable:
    return lambda c, rng: jnp.asarray(rng.random(shape) < 0.7)


def _blocks(c: Case, rng: np.random.Generator) -> BlockSparse:
    count = -(-c.query_length // 10), -(-c.key_length // 12)
    return BlockSparse(jnp.asarray(rng.random((1, c.heads, *count)) < 0.4), (10, 12))


def strided(b, h, q, k, stride):
    """Let a query see every ``stride``-th key before it, and head 0 every key of odd rows."""
    return ((q - k) % stride == 0) & (k <= q) | ((h == 0) & (b % 2 == 1))


def _custom(c: Case, rng: np.random.Generator) -> CustomMask:
    return CustomMask(strided, stride=Operand(jnp.asarray(rng.integers(2, 5, c.heads)), "h"))


def _floats(*axes: str) -> Callable:
    """Make an array of numbers by the names of its axes."""
    return lambda c, rng: jnp.asarray(rng.standard_normal([getattr(c, a) for a in axes]), jnp.float32)


def _slopes(c: Case, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(0.5 ** (1 + np.arange(c.heads)), jnp.float32)


def _by_position(c: Case, rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.standard_normal((c.heads, c.query_length + c.key_length - 1)), jnp.float32)


def _buckets(c: Case, rng: np.random.Generator, **options: Any) -> RelativePositionBias:
    table = jnp.asarray(rng.standard_normal((16, c.heads)), jnp.float32)
    return RelativePositionBias(table, max_distance=40, **options)


def bent(score, b, h, q, k, strength, place, near, row):
    """Bend a logit by its head, its key, its row and its relative position."""
    curved = jnp.tanh(score * 0.5) * strength + place
    return jnp.where(k > q, curved, score + row * near)


def _bent(c: Case, rng: np.random.Generator) -> ScoreFunction:
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return ScoreFunction(
        bent,
        strength=Operand(normal(c.heads), "h"),
        place=Operand(normal(c.batch, c.key_length), "bk"),
        near=Operand(normal(c.query_length + c.key_length - 1), "r"),
        row=Operand(normal(c.heads, c.query_length), "hq"),
    )


def tilted(score, b, h, q, k, weight):
    """Add a learned weight to logits of odd distance."""
    return score + jnp.where((q - k) % 2 == 1, weight, 0.0)


def _tilted(c: Case, rng: np.random.Generator) -> ScoreFunction:
    weight = jnp.asarray(rng.standard_normal((c.heads, c.query_length, c.key_length)), jnp.float32)
    return ScoreFunction(tilted, weight=Operand(weight, "hqk"))


_KEY = {"dropout_key": lambda c, rng: jax.random.key(int(rng.integers(100)))}

CASES = [
    # lengths: one, few, around a tile, primes, much longer on one side
    case("one", 1),
    case("three-causal", 3, options={"is_causal": True}),
    case("tile", 24, options={"is_causal": True}),
    case("tile-minus-one", 23, options={"is_causal": True}),
    case("tile-plus-one", 33),
    case("prime", 97, options={"is_causal": True}),
    case("one-query", (1, 131)),
    case("one-key", (67, 1)),
    case("few-queries", (3, 200), mask=lambda c, rng: Causal(align="end")),
    case("few-keys-causal-end", (150, 5), mask=lambda c, rng: Causal(align="end")),
    case("full-tiles-of-512", 1024, batch=1, heads=1, options={"is_causal": True}),
    case("around-512", (513, 1031), batch=1, heads=1, options={"is_causal": True}),
    # heads and head dims
    case("group-3", 50, heads=(6, 2), options={"is_causal": True}),
    case("group-8", (40, 70), heads=(8, 1)),
    case("many-heads", 17, heads=(12, 12), batch=3),
    case("odd-dims", 40, head_dim=13, value_dim=7, heads=(3, 1)),
    case("192-128", 40, head_dim=192, value_dim=128, options={"is_causal": True}),
    case("dim-1", 30, head_dim=1, value_dim=1),
    # dtypes
    case("bfloat16", 100, dtype="bfloat16", heads=(4, 2), options={"is_causal": True}),
    case("bfloat16-full", (70, 130), dtype="bfloat16", head_dim=64),
    case("float16", (100, 60), dtype="float16", options={"is_causal": True}),
    # arguments that hide
    case("lengths", (60, 90), options={"key_value_seq_lengths": _lengths("key_length")}, batch=4),
    case("query-lengths", 60, options={"query_seq_lengths": _lengths("query_length")}, batch=4),
    case(
        "both-lengths-causal-end",
        (60, 90),
        batch=4,
        mask=lambda c, rng: Causal(align="end"),
        options={
            "query_seq_lengths": _lengths("query_length"),
            "key_value_seq_lengths": _lengths("key_length"),
        },
    ),
    case("window", 130, options={"local_window_size": (20, 5)}),
    case("window-causal", 130, options={"local_window_size": 9, "is_causal": True}),
    case("window-wide", (40, 130), options={"local_window_size": (300, 300)}),
    # masks
    case("dense-full-shape", (50, 60), mask=_random_mask(2, 2, 50, 60)),
    case("dense-keys", (50, 60), mask=_random_mask(2, 1, 1, 60), heads=(4, 2)),
    case("dense-heads", (50, 60), mask=_random_mask(4, 50, 60), heads=(4, 2)),
    case("offset", (60, 90), mask=lambda c, rng: Causal(offset=17)),
    case("offset-rows", (60, 90), mask=lambda c, rng: Causal(offset=jnp.array([-20, 40]))),
    case("window-end", (60, 90), mask=lambda c, rng: SlidingWindow(11, 3, align="end")),
    case("segments", 130, mask=_segments, heads=(4, 2)),
    case("segments-causal-window", 130, mask=lambda c, rng: _segments(c, rng) & SlidingWindow(15)),
    case("segments-bfloat16", 130, dtype="bfloat16", mask=lambda c, rng: _segments(c, rng) & Causal()),
    case("prefix", 90, mask=lambda c, rng: PrefixLM(jnp.array([0, 50]))),
    case("blocks", (95, 130), mask=_blocks),
    case("custom", 60, mask=_custom, heads=(4, 4), batch=3),
    case("composed", 100, mask=lambda c, rng: ~(_segments(c, rng) | SlidingWindow(5, 5)) & Causal()),
    case("nothing-visible", 40, mask=lambda c, rng: ~SlidingWindow(None, None)),
    # between the product and the mask
    case("softcap", (60, 40), options={"softcap": 2.0, "is_causal": True}),
    case("bias", (50, 70), bias=(2, 4, 50, 70), heads=(4, 2)),
    case("bias-pair", (50, 70), bias=(1, 4, 50, 70), heads=(4, 2), batch=3),
    case("bias-keys", (50, 70), bias=(2, 1, 1, 70), options={"softcap": 3.0}),
    case("bias-queries-heads", (50, 70), bias=(4, 50, 1), heads=(4, 2), options={"is_causal": True}),
    case("bias-bfloat16", 50, bias=(1, 2, 50, 50), dtype="bfloat16", bias_dtype="float32"),
    case("bias-half-in-float32", 50, bias=(2, 1, 50, 50), bias_dtype="bfloat16", mask=_segments),
    case("scale", 50, options={"scale": 0.7, "is_causal": True}),
    case("scale-negative", 50, heads=(4, 2), options={"scale": -0.4, "softcap": 1.5}),
    case("scale-zero", 50, options={"scale": 0.0, "is_causal": True}),
    case("position-bias", (50, 70), heads=(4, 2), learned={"position_bias": _by_position}),
    case("buckets", (50, 90), learned={"position_bias": _buckets}),
    case(
        "buckets-causal",
        90,
        learned={"position_bias": lambda c, rng: _buckets(c, rng, bidirectional=False)},
        options={"is_causal": True},
    ),
    case("alibi", 60, heads=(4, 2), learned={"alibi_slopes": _slopes}, options={"is_causal": True}),
    case(
        "alibi-rows-end",
        (30, 70),
        learned={"alibi_slopes": lambda c, rng: Alibi(jnp.ones((c.batch, c.heads)) / 8, align="end")},
        options={"key_value_seq_lengths": _lengths("key_length", 1)},
    ),
    case("function", (50, 70), heads=(4, 2), learned={"score_fn": _bent}),
    case("function-weights", 50, learned={"score_fn": _tilted}, mask=_segments),
    case("sinks", 60, heads=(4, 2), learned={"sinks": _floats("heads")}, options={"is_causal": True}),
    case("sinks-blind-rows", 60, learned={"sinks": _floats("heads")}, mask=lambda c, rng: Causal(offset=-9)),
    case("off-by-one", (40, 60), learned={"sinks": _floats()}, options={"local_window_size": (9, 3)}),
    case("bias-one-a-row", (50, 70), bias=(2, 1, 50, 1), learned={"sinks": _floats("heads")}),
    case("bias-one-a-head", (50, 70), bias=(1, 2, 1, 1)),
    # dropout
    case("dropout", (50, 70), heads=(4, 2), options={"dropout_rate": 0.3, **_KEY}),
    case(
        "dropout-causal-bias",
        70,
        bias=(1, 2, 70, 70),
        options={"dropout_rate": 0.5, "is_causal": True, **_KEY},
    ),
    case("dropout-bfloat16", 70, dtype="bfloat16", mask=_segments, options={"dropout_rate": 0.1, **_KEY}),
]


# Arguments that change a logit or a weight, each in combination with each other: a case has half of them.
FEATURES = {
    "bias": {"bias": True},
    "position": {"learned": {"position_bias": _by_position}},
    "alibi": {"learned": {"alibi_slopes": _slopes}},
    "function": {"learned": {"score_fn": _bent}},
    "sinks": {"learned": {"sinks": _floats("heads")}},
    "dropout": {"options": {"dropout_rate": 0.25, **_KEY}},
    "softcap": {"options": {"softcap": 5.0}},
    "scale": {"options": {"scale": 0.3}},
    "window": {"options": {"local_window_size": (30, 5)}},
    "lengths": {"options": {"key_value_seq_lengths": _lengths("key_length")}},
    "segments": {"mask": _segments},
    "group": {"heads": (4, 2)},
}
# Every two features are together in some row.
MIXTURES = [
    "bias position sinks window group dropout",
    "alibi function dropout softcap segments group",
    "bias alibi scale lengths segments sinks",
    "position function scale softcap lengths window",
    "bias function sinks softcap lengths group",
    "position alibi dropout scale window group",
    "bias softcap dropout window scale segments",
    "position segments lengths sinks softcap dropout",
    "alibi sinks softcap window lengths function",
    "function scale sinks dropout segments window group",
    "bias function position alibi lengths segments group dropout",
    "position softcap alibi lengths bias group scale",
]


def mixture(names: str, lengths: tuple[int, int], **fields: Any) -> Case:
    """Make a case that has several features."""
    parts = [FEATURES[name] for name in names.split()]
    merged = {"learned": {}, "options": {}, **fields}
    for part in parts:
        for key, value in part.items():
            merged[key] = merged[key] | value if isinstance(value, dict) else value
    made = case("-".join(names.split()), lengths, **merged)
    if made.bias:
        shape = (1, made.heads, made.query_length, made.key_length)
        made = dataclasses.replace(made, bias=shape)
    return made


MIXED = [mixture(names, (60, 80)) for names in MIXTURES]


def _multiple_of_8(dim: int) -> int:
    return -(-dim // 8) * 8


def in_half(case: Case, dtype: str) -> Case:
    """Return a case in half precision, with head dims that 16 bytes divide."""
    return dataclasses.replace(
        case,
        name=f"{case.name}-{dtype}",
        dtype=dtype if case.dtype == "float32" else case.dtype,
        head_dim=_multiple_of_8(case.head_dim),
        value_dim=_multiple_of_8(case.value_dim),
    )


# Every case in half precision, the two dtypes in turn.
HALVES = [
    in_half(case, dtype)
    for case, dtype in zip([*CASES, *MIXED], itertools.cycle(("bfloat16", "float16")), strict=False)
]


def wide(name: str, lengths: int | tuple[int, int], dim: int | tuple[int, int], **fields) -> Case:
    """Make a case in bfloat16 from lengths and head dims."""
    d, dv = dim if isinstance(dim, tuple) else (dim, dim)
    fields = {"dtype": "bfloat16", "heads": (4, 2)} | fields
    return case(name, lengths, head_dim=d, value_dim=dv, **fields)


def _packed(c: Case, rng: np.random.Generator) -> Segments:
    ids = jnp.stack([documents(c.query_length, rng, mean=150) for _ in range(c.batch)])
    return Segments(ids)


def _scattered(c: Case, rng: np.random.Generator) -> BlockSparse:
    count = -(-c.query_length // 64), -(-c.key_length // 128)
    return BlockSparse(jnp.asarray(rng.random((c.batch, 1, *count)) < 0.3), (64, 128))


def _padded_keys(c: Case, rng: np.random.Generator) -> jax.Array:
    return jnp.arange(c.key_length) < jnp.asarray(rng.integers(1, c.key_length, (c.batch, 1, 1, 1)))


def nearer(b, h, q, k, at, reach, alike):
    """Let a query see keys that lie within its head's reach of its place, and those marked alike."""
    return (abs(at - reach) < 0.5) | alike


def _mixed_dtypes(c: Case, rng: np.random.Generator) -> CustomMask:
    return CustomMask(
        nearer,
        at=Operand(jnp.asarray(rng.random((c.batch, c.key_length)), jnp.float32), "bk"),
        reach=Operand(jnp.asarray(rng.random((c.heads, c.query_length)), jnp.float32), "hq"),
        alike=Operand(jnp.asarray(rng.random(c.key_length) < 0.1), "k"),
    )


def _unsigned(c: Case, rng: np.random.Generator) -> Segments:
    ids = jnp.asarray(rng.integers(2**32 - 3, 2**32, c.key_length), jnp.uint32)
    return Segments(ids[: c.query_length], ids)


_BOTH_LENGTHS = {
    "query_seq_lengths": _lengths("query_length"),
    "key_value_seq_lengths": _lengths("key_length"),
}
# Shapes of a tensor-core kernel: several tiles of 64 to 192 queries by 64 to 128 keys, every head dim.
WIDE_CASES = [
    *(wide(f"d{d}-causal", 320, d, options={"is_causal": True}) for d in (8, 24, 32, 40, 64, 128, 256)),
    *(wide(f"d{d}-full", (256, 384), d) for d in (64, 72, 80, 96, 128, 160, 192, 248, 256)),
    *(
        wide(f"d{d}-{dv}", 200, (d, dv), options={"is_causal": True})
        for d, dv in ((192, 128), (64, 256), (128, 72))
    ),
    *(wide(f"t{t}", t, 64, options={"is_causal": True}) for t in (1, 7, 63, 64, 65, 127, 129, 191, 193, 257)),
    *(wide(f"s{s}", (130, s), 128) for s in (1, 5, 120, 127, 128, 129, 255, 264)),
    wide("causal-ends-early", (129, 400), 64, options={"is_causal": True}),
    wide("d256-odd", (131, 197), 256, mask=lambda c, rng: Causal(align="end")),
    wide("d64-odd", (193, 515), 64, mask=lambda c, rng: Causal(align="end")),
    wide("float16-d128", 300, 128, dtype="float16", options={"is_causal": True}),
    wide("gqa-8", (264, 256), 128, heads=(16, 2), options={"is_causal": True}),
    wide("mqa", 264, 64, heads=(5, 1), options={"is_causal": True}),
    wide("window-d128", 1000, 128, batch=1, options={"local_window_size": (200, 0)}),
    wide("window-d64", 1000, 64, batch=1, options={"local_window_size": (130, 50)}),
    wide("window-d256", 600, 256, batch=1, options={"local_window_size": (100, 0)}),
    wide("sees-little", (512, 300), 128, mask=lambda c, rng: Causal(offset=-290)),
    wide("packed-d128", 1024, 128, mask=lambda c, rng: _packed(c, rng) & Causal()),
    wide("packed-d64", 1000, 64, mask=lambda c, rng: _packed(c, rng) & Causal()),
    wide("packed-d256", 520, 256, mask=_packed),
    wide("lengths-d128", (256, 520), 128, batch=4, options={"key_value_seq_lengths": _lengths("key_length")}),
    wide("prefix-d128", 520, 128, mask=lambda c, rng: PrefixLM(jnp.array([0, 300]))),
    wide("scattered-d128", (640, 1024), 128, mask=_scattered),
    wide("scattered-d256", (640, 1024), 256, mask=_scattered),
    wide("dense-d128", (300, 520), 128, mask=_random_mask(2, 4, 300, 520)),
    wide("dense-d256", (130, 200), 256, mask=_random_mask(2, 4, 130, 200)),
    wide("padding-d64", (300, 520), 64, batch=3, mask=_padded_keys),
    wide("composed-d128", 700, 128, mask=lambda c, rng: ~(_packed(c, rng) & SlidingWindow(70)) & Causal()),
    wide("mixed-dtypes", (130, 200), 64, mask=_mixed_dtypes),
    wide("unsigned-ids", (130, 200), 64, mask=_unsigned),
    wide("softcap-d128", 300, 128, options={"softcap": 20.0, "is_causal": True}),
    wide("scale-negative-d64", 300, 64, options={"scale": -0.1, "is_causal": True}),
    # what the scores read, and dropout, over several tiles
    *(
        wide(f"{name}-d{d}", (200, 330), d, **fields)
        for d in (64, 128, 256)
        for name, fields in (
            ("bias-pair", {"bias": (1, 4, 200, 330)}),
            ("bias-full-causal", {"bias": (2, 4, 200, 330), "options": {"is_causal": True}}),
            ("bias-keys", {"bias": (2, 1, 1, 330)}),
            ("position-bias", {"learned": {"position_bias": _by_position}}),
            ("alibi", {"learned": {"alibi_slopes": _slopes}, "options": {"is_causal": True}}),
            ("function", {"learned": {"score_fn": _bent}, "mask": _segments}),
            ("sinks", {"learned": {"sinks": _floats("heads")}, "options": {"local_window_size": (70, 0)}}),
            ("dropout", {"options": {"dropout_rate": 0.2, **_KEY}}),
            ("dropout-causal", {"options": {"dropout_rate": 0.1, "is_causal": True, **_KEY}}),
        )
    ),
    wide("bias-half-d64", (130, 77), 64, bias=(1, 4, 130, 77), bias_dtype="float16", mask=_segments),
    wide("bias-d32", (256, 256), 32, batch=6, bias=(1, 4, 256, 256), bias_dtype="bfloat16"),
    # what the TMA can bring, and what batch rows share
    *(
        wide(f"bias-staged-d{d}", (264, 384), d, bias=(2, 4, 264, 384), bias_dtype=dtype, options=options)
        for d, dtype, options in (
            (32, "float32", {}),
            (64, "bfloat16", {"is_causal": True}),
            (128, "float32", {"is_causal": True}),
            (256, "float16", {}),
        )
    ),
    *(
        wide(f"bias-shared-d{d}", (264, 320), d, batch=8, bias=shape, bias_dtype=dtype, **fields)
        for d, shape, dtype, fields in (
            (24, (1, 1, 264, 320), "float32", {"options": {"is_causal": True}}),
            (32, (1, 4, 264, 320), "bfloat16", {"learned": {"sinks": _floats("heads")}}),
            (64, (1, 4, 264, 320), "float16", {"heads": 4, "options": {"local_window_size": (100, None)}}),
        )
    ),
    wide("bias-shared-lengths", (264, 320), 32, batch=4, bias=(1, 4, 264, 320), options=_BOTH_LENGTHS),
    wide("bias-shared-padding", (264, 320), 32, batch=4, bias=(1, 4, 264, 320), mask=_padded_keys),
    wide("buckets-d64", (300, 200), 64, learned={"position_bias": _buckets}),
    wide(
        "mixed-d128",
        (200, 330),
        128,
        bias=(1, 4, 1, 330),
        learned={"alibi_slopes": _slopes, "sinks": _floats("heads")},
    ),
    # Logits so far apart that a row's maximum grows by more than 2^8 from one tile to a later one.
    *(wide(f"steep-d{d}", (200, 520), d, options={"scale": 2.0}) for d in (64, 128, 256)),
    wide("steep-causal-d64", 520, 64, options={"scale": 2.0, "is_causal": True}),
    wide("many-tiles", (64, 20000), 64, batch=1, heads=1, mask=lambda c, rng: Causal(align="end")),
    wide(
        "many-scanned-tiles",
        (64, 140000),
        64,
        batch=1,
        heads=1,
        mask=lambda c, rng: Segments(jnp.ones(64, int), jnp.asarray(rng.random(140000) < 0.001, int)),
    ),
]

"""The facts of one attention call, and every check of the caller's input.

`Problem` is what is known when a call is traced: sizes, dtypes, the shape of the mask, options. It is
frozen and hashable, so it can be the static argument of a jitted function. `Inputs` is what is known
only when the call runs: the arrays. `make` turns a user's arguments into the two, or raises.

Errors say what, what was given, what is needed and what to do. Caller's mistakes are ValueError or
TypeError; `UnsupportedError` is for calls that mean something but that a backend does not do.
"""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")


class UnsupportedError(NotImplementedError):
    """Raised when a call is legal but the backend that was named does not do it."""


class Inputs(NamedTuple):
    """The arrays of one call, in the form that every backend receives them.

    Attributes:
      query: ``[B, T, N, D]``.
      key: ``[B, S, K, D]``, dtype of query.
      value: ``[B, S, K, Dv]``, dtype of query.
      scores: resolved `Scores`, whose arrays all have four dimensions; or None.
      mask: a resolved `Mask`, likewise; or None.
      scale: ``[b, 1, 1, 1]`` in the dtype of the logits; None means ``1 / sqrt(D)``.
      sinks: ``[b, N, 1, 1]``, likewise; None adds nothing to the sum of exponentials.
      dropout_words: two uint32 words ``[b, 2]``; or None.

    A leading size ``b`` divides the batch: row ``r`` of the batch reads row ``r % b``.
    """

    query: Any
    key: Any
    value: Any
    scores: Any = None
    mask: Any = None
    scale: Any = None
    sinks: Any = None
    dropout_words: Any = None

    @property
    def operand_names(self) -> list[str]:
        """Names of what the scores read, in the order of their leaves."""
        return [] if self.scores is None else list(self.scores.operands())


class Gradients(NamedTuple):
    """Gradients of one call, in the shapes and dtypes of the inputs of the same names.

    ``scores`` holds those of operands that are wanted, by name.
    """

    query: Any
    key: Any
    value: Any
    scores: dict[str, Any]
    scale: Any = None
    sinks: Any = None


class Results(NamedTuple):
    """What a forward pass returns: ``out [B, T, N, Dv]``, ``lse [B, N, T]``, and ``top [B, N, T]``, the
    largest visible logit of each row without its sink, None unless `Problem.max_logit`."""

    out: Any
    lse: Any
    top: Any = None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which of the optional gradients a backward pass must compute.

    Attributes:
      scores: names of operands of `Inputs.scores`.
      scale, sinks: whether that of the scale, of the sinks.
    """

    scores: tuple[str, ...] = ()
    scale: bool = False
    sinks: bool = False

    def as_shape(self, inputs: Inputs) -> tuple[int, ...]:
        """Say this by the shape of an array without elements.

        A residual of `jax.custom_vjp` can carry it. A static value cannot: where JAX finds a traced forward
        pass in its cache, it takes the static part of whichever was traced last, for other gradients perhaps.
        """
        flags = self.scale, self.sinks, *(name in self.scores for name in inputs.operand_names)
        return 0, *map(int, flags)

    @classmethod
    def from_shape(cls, shape: tuple[int, ...], inputs: Inputs) -> "Wanted":
        """Undo `as_shape`."""
        _, scale, sinks, *flags = shape
        names = zip(inputs.operand_names, flags, strict=True)
        return cls(tuple(name for name, flag in names if flag), bool(scale), bool(sinks))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known about a call when it is traced.

    Attributes:
      batch, query_length, key_length, heads, kv_heads, head_dim, value_dim: B, T, S, N, K, D, Dv.
      dtype: the common dtype of query, key and value.
      mask: the resolved mask with shapes in place of its arrays, None without a mask.
      scores: the resolved scores likewise, None without any.
      scaled: whether a scale was given; otherwise it is ``1 / sqrt(D)``.
      softcap: bound on the scaled products, None without one.
      sinks: whether each head has a sink.
      dropout_rate: in [0, 1).
      broadcast_dropout: whether all rows and heads share one keep mask.
      precision: what `jax.lax.dot_general` takes under that name.
      deterministic: whether the backward pass must repeat bit for bit.
      max_logit: whether the forward pass must return the largest logit of each row.
      batch_period: row ``r`` counts as batch index ``r % batch_period``. It differs from ``batch``
        under `jax.vmap` alone, where the mapped axis is folded into the batch.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any
    mask: Any = None
    scores: Any = None
    scaled: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    precision: Any = None
    deterministic: bool = False
    max_logit: bool = False
    batch_period: int = 1

    @property
    def group(self) -> int:
        """Query heads per key/value head, G."""
        return self.heads // self.kv_heads

    @property
    def accumulator(self) -> Any:
        """The dtype of logits, sums and lse: float32, or float64 for float64 inputs."""
        return accumulator_of(self.dtype)

    @property
    def default_scale(self) -> float:
        """``1 / sqrt(D)`` with the true head dim."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def bends(self) -> bool:
        """Whether logits have a slope of their own by the scaled products."""
        return self.softcap is not None or not (self.scores is None or self.scores.additive)

    def with_batch(self, batch: int, mask: Any, scores: Any) -> "Problem":
        """Return the same call on a larger batch, with the shapes of its mask and scores."""
        return dataclasses.replace(self, batch=batch, mask=mask, scores=scores)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no rows, no queries or no keys."""
        return 0 in (self.batch, self.query_length, self.key_length, self.heads)


def accumulator_of(dtype: Any) -> Any:
    """Return the dtype of logits, sums and lse for inputs of a dtype."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def abstract(tree: Any) -> Any:
    """Put shapes and dtypes in place of the arrays of a pytree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def is_number(x: Any) -> bool:
    """Whether x is a real number that is known at trace time; arrays of no dimension count."""
    if isinstance(x, bool | np.bool_) or is_traced(x):
        return False
    return isinstance(x, numbers.Real) or (isinstance(x, np.ndarray | jax.Array) and x.ndim == 0)


def named(value: Any) -> str:
    """Name a value's type with its article."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


# ---- single values ---------------------------------------------------------------------------------


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{name} is {value!r}; it must be a Python bool, known when the call is traced. "
            "A condition on array values belongs in mask"
        )
    return bool(value)


def check_softcap(value: Any) -> float | None:
    if value is None:
        return None
    if not is_number(value):
        raise TypeError(f"softcap is {value!r}; it must be a Python number, known at trace time")
    value = float(value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"softcap is {value}; it must be positive and finite. None turns it off")
    return value


def check_dropout_rate(rate: Any) -> float:
    if not is_number(rate):
        raise TypeError(
            f"dropout_rate is {rate!r}; it must be a Python number, known when the call is traced"
        )
    rate = float(rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate is {rate}; it must be at least 0 and less than 1")
    return rate


def check_dropout(rate: Any, key: Any) -> float:
    rate = check_dropout_rate(rate)
    if rate > 0 and key is None:
        raise ValueError(
            f"dropout_rate is {rate} but dropout_key is None; pass a key, for instance "
            "dropout_key=jax.random.key(0), or dropout_rate=0.0 at evaluation"
        )
    return rate


def check_dropout_key(key: Any) -> jax.Array:
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(f"dropout_key is {named(key)}; it must be a JAX random key such as jax.random.key(0)")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = key.dtype == jnp.uint32 and key.shape in ((2,), (4,))
    if not (raw or (typed and key.ndim == 0)):
        raise ValueError(
            f"dropout_key has shape {key.shape} and dtype {key.dtype}; it must be one key: "
            "jax.random.key(seed), or the uint32 vector of jax.random.PRNGKey(seed)"
        )
    return jnp.asarray(key)


def check_scale(scale: Any) -> jax.Array:
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        scale = float(scale)
    value = check_array("scale", scale)
    if value.ndim or not (
        jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    ):
        raise ValueError(
            f"scale has shape {value.shape} and dtype {value.dtype}; it must be a real scalar. "
            "Multiply query for a scale per head"
        )
    return value


def check_precision(precision: Any) -> Any:
    """Return the precision of the matrix products: the one given, or JAX's configured default."""
    if precision is None:
        # Read now, so that the backward pass agrees even if it is traced outside the context manager.
        return jax.config.jax_default_matmul_precision
    probe = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        hash(precision)
        jax.eval_shape(lambda a: jax.lax.dot(a, a, precision=precision), probe)
    except Exception as error:
        raise ValueError(
            f"precision is {precision!r}; it must be None or what jax.lax.dot_general accepts, for "
            f"instance 'highest' or jax.lax.Precision.HIGHEST ({error})"
        ) from error
    return precision


def check_window(side: str, size: Any) -> Any:
    """Check one side of a window: None, an integer that is not negative, or an integer array."""
    if size is None:
        return None
    if isinstance(size, numbers.Integral) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(
                f"window size on the {side} is {size}; it must not be negative. None is unlimited, and "
                "a model's sliding_window=W, which counts the token itself, is W - 1 here"
            )
        return int(size)
    name = f"window size on the {side}"
    if isinstance(size, np.ndarray) and (size < 0).any():
        raise ValueError(f"{name} is {size}; it must not be negative")
    return check_integers(name, size)


def check_offset(name: str, offset: Any) -> Any:
    """Check a position offset: an integer, or an integer array of one value or one per row."""
    if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
        return int(offset)
    return check_integers(name, offset)


def check_align(align: Any) -> str:
    if align not in ("start", "end"):
        raise ValueError(
            f"align is {align!r}; it must be 'start' (query 0 stands at key 0) or 'end' (the last "
            "query stands at the last key)"
        )
    return align


def check_local_window(window: Any) -> tuple[Any, Any]:
    """Read ``local_window_size``: one size for both sides, or a pair (left, right)."""
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(
                f"local_window_size has {len(window)} entries; it must be an int or (left, right)"
            )
        return tuple(window)
    if isinstance(window, np.ndarray | jax.Array) and window.ndim > 0:
        raise ValueError(
            f"local_window_size has shape {window.shape}; it must be an int or (left, right). "
            "For sizes per row use mask=SlidingWindow(left, right)"
        )
    return window, window


# ---- arrays ----------------------------------------------------------------------------------------


def check_array(name: str, x: Any, convert: Any = jnp.asarray) -> Any:
    """Convert to an array, of JAX unless told otherwise, or say which argument cannot be."""
    try:
        return convert(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {named(x)}; it must be an array") from error


def check_fits(name: str, x: np.ndarray) -> None:
    """Check that integers from outside JAX fit its widest dtype, into which they would wrap in silence."""
    widest = jnp.iinfo(jax.dtypes.canonicalize_dtype(x.dtype if x.dtype.kind == "u" else np.int64))
    if x.size and (x.dtype.kind in "iu" or all(isinstance(n, int) for n in x.flat)):
        for value in (x.min(), x.max()):
            if not widest.min <= value <= widest.max:
                advice = "use smaller integers"
                if widest.bits == 32:
                    advice += ", or 64-bit mode (jax_enable_x64)"
                raise ValueError(f"{name} holds {value}, which {widest.dtype} cannot hold; {advice}")


def check_integers(name: str, x: Any) -> Any:
    """Check an integer array. Abstract shapes pass as they are."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not isinstance(x, jax.Array):
        check_fits(name, check_array(name, x, np.asarray))
    x = check_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}; it must hold integers: use .astype(int32)")
    return x


def check_mask_array(name: str, x: Any) -> Any:
    """Check a boolean mask array of at most four dimensions."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    x = check_array(name, x)
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"{name} has dtype {x.dtype}; it must be boolean, True where a query may see a key. "
            "Use .astype(bool), or pass an additive mask as bias"
        )
    if x.ndim > 4:
        raise ValueError(f"{name} has shape {x.shape}; it must have at most 4 dimensions [B, N, T, S]")
    return x


def check_block_size(size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(
        isinstance(n, numbers.Integral) and not isinstance(n, bool) and n > 0 for n in pair
    ):
        raise ValueError(
            f"block_size is {size!r}; it must be a positive int or a pair (queries, keys) of them"
        )
    return int(pair[0]), int(pair[1])


def check_count(name: str, value: Any, least: int) -> int:
    """Check a number that is part of the program: a Python int of at least ``least``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a Python int, known when the call is traced")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return int(value)


def check_cu_seqlens(name: str, x: Any, length: int) -> jax.Array:
    """Check cumulative lengths of documents that lie along an axis of ``length``.

    Their values are looked at where that means to wait for no device: outside of JAX arrays.
    """
    values = None if isinstance(x, jax.Array) else check_array(name, x, np.asarray)
    x = check_integers(name, x)
    if x.ndim not in (1, 2) or x.shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {x.shape}; it must be [documents + 1] or [B, documents + 1], of at least one "
            "document: its start, 0, and its end"
        )
    if values is None:
        return x
    values = values.reshape(-1, values.shape[-1])
    first, last = values[values[:, 0] != 0, 0], values[values[:, -1] > length, -1]
    row, at = np.nonzero(values[:, 1:] < values[:, :-1])
    advice = "for lengths of documents pass np.cumsum([0, *lengths])"
    if first.size:
        raise ValueError(f"{name} starts at {first[0]}; it must start at 0: {advice}")
    if row.size:
        fall = f"{values[row[0], at[0]]} to {values[row[0], at[0] + 1]}"
        raise ValueError(f"{name} falls from {fall}; each entry must be at least the one before: {advice}")
    if last.size:
        raise ValueError(
            f"{name} ends at {last[0]}, beyond the length {length}; the documents must fit: cut them, or "
            "give the true query_length and key_length"
        )
    return x


def check_same_documents(queries: jax.Array, keys: jax.Array) -> None:
    """Check that queries and keys have as many documents, in as many rows."""
    rows = {x.shape[0] for x in (queries, keys) if x.ndim == 2} - {1}
    if queries.shape[-1] != keys.shape[-1] or len(rows) > 1:
        raise ValueError(
            f"query_cu_seqlens has shape {queries.shape} and key_cu_seqlens {keys.shape}; they must hold the "
            "same documents of the same rows. Repeat an entry where a document has no queries or no keys"
        )


def check_block_lists(lists: Any, count: int) -> jax.Array:
    """Check lists of numbers of key blocks, below ``count`` where they are in no JAX array."""
    values = None if isinstance(lists, jax.Array) else check_array("lists", lists, np.asarray)
    lists = check_integers("lists", lists)
    if not 2 <= lists.ndim <= 4:
        raise ValueError(
            f"lists has shape {lists.shape}; it must be [blocks of queries, most], with up to two leading "
            "dimensions that broadcast to [B, N]"
        )
    if values is not None and (values >= count).any():
        raise ValueError(
            f"lists holds {values.max()}, and key_length makes {count} blocks; their numbers must be "
            f"below {count}, and -1 where a list ends early"
        )
    return lists


def check_align_with_offset(align: str, offset: Any) -> None:
    if align == "end" and not (isinstance(offset, int) and offset == 0):
        raise ValueError(
            f"align='end' sets the offset from the lengths, but offset is {offset!r}; give one of them"
        )


def check_same_ids(query_ids: Any, key_ids: Any) -> None:
    """Check that two kinds of ids can be compared without loss."""
    common = np.promote_types(query_ids.dtype, key_ids.dtype)
    if common != jax.dtypes.canonicalize_dtype(common) or common.kind not in "iu":
        raise TypeError(
            f"Segments.query_ids has dtype {query_ids.dtype} and key_ids has {key_ids.dtype}, and no integer "
            "dtype in use holds both; cast them to one dtype"
        )


def check_function(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{name} of a CustomMask is {named(value)}; it must be a function of (b, h, q, k)")
    return value


def check_seen(seen: Any) -> jax.Array:
    """Check what the function of a CustomMask returned."""
    if isinstance(seen, bool | np.bool_):
        return jnp.full((1, 1, 1, 1), seen)
    if getattr(seen, "dtype", None) != jnp.bool_:
        given = getattr(seen, "dtype", None) or named(seen)
        raise TypeError(f"the function of a CustomMask returned {given}; it must return boolean arrays")
    return seen


def check_operand(name: str, operand: Any, relative: bool) -> tuple[jax.Array, str, tuple[int, int]]:
    """Check a declared operand of a function: its name, its array and the axes that its tag names.

    ``relative`` says whether it may be indexed by the relative position, which goes with no block size.
    """
    if name in "bhqk":
        raise ValueError(f"an operand is named {name!r}, which is an index of the function; rename it")
    if not isinstance(operand, tuple) or len(operand) not in (2, 3):
        raise TypeError(
            f"operand {name} is {named(operand)}; it must be Operand(array, axes), for instance "
            'Operand(ids, "bk")'
        )
    array = check_array(f"operand {name}", operand[0])
    axes, block = operand[1], (operand[2] if len(operand) == 3 else (1, 1))
    tags = ("bhqk", "bhr") if relative else ("bhqk",)
    if not any(isinstance(axes, str) and "".join(a for a in t if a in axes) == axes for t in tags):
        more = ", or 'r' in the place of q and k for the relative position" if relative else ""
        raise ValueError(
            f"operand {name} has axes {axes!r}; it must name its dimensions by letters of 'bhqk' in "
            f"this order (batch, head, query, key), for instance 'bk'{more}"
        )
    if relative and tuple(block) != (1, 1):
        raise ValueError(f"operand {name} has block {block!r}; only an operand of a mask may have one")
    if array.ndim != len(axes):
        raise ValueError(
            f"operand {name} has {array.ndim} dimensions and axes {axes!r} name {len(axes)}; they must match"
        )
    return array, axes, check_block_size(block)


def check_operand_shape(
    name: str,
    shape: tuple[int, ...],
    full: tuple[int, ...],
    axes: str,
    block: tuple[int, int] = (1, 1),
) -> None:
    """Check that an operand broadcasts to the sizes of its axes."""
    if len(shape) > len(full) or any(n not in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)):
        letters = {"b": "B", "h": "N", "q": "T", "k": "S", "r": "T + S - 1"}
        note = ""
        if block != (1, 1):
            letters |= {"q": "T / block_size", "k": "S / block_size"}
            note = f", with block_size {block}, rounded up"
        wanted = ", ".join(letters[a] for a in axes)
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must broadcast to [{wanted}] = {tuple(full)}{note}"
        )


def reject_truth_value(mask: Any) -> None:
    raise TypeError(
        f"{named(mask)} mask has no truth value; combine masks with &, | and ~ instead of and, or and not"
    )


def check_mask_operand(value: Any) -> None:
    raise TypeError(
        f"a mask cannot be combined with {named(value)}; the other side must be a Mask or a boolean array"
    )


def check_lengths(name: str, lengths: Any, batch: int) -> jax.Array | None:
    """Check sequence lengths: integers, one per row of the batch, or one for all."""
    if lengths is None:
        return None
    lengths = check_integers(name, lengths)
    if lengths.ndim > 1 or (lengths.ndim == 1 and lengths.shape[0] not in (1, batch)):
        raise ValueError(
            f"{name} has shape {lengths.shape}; it must hold one length per batch row: ({batch},)"
        )
    return lengths


def check_qkv(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check query, key and value and give each its batch dimension."""
    names = ("query", "key", "value")
    arrays = [check_array(name, x) for name, x in zip(names, (query, key, value), strict=True)]
    for name, x, layout in zip(names, arrays, ("T, N, D", "S, K, D", "S, K, Dv"), strict=True):
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} has shape {x.shape}; it must be [B, {layout}] or [{layout}]: "
                "batch, length, heads, head dim"
            )
        if str(x.dtype) not in FLOATS:
            raise TypeError(
                f"{name} has dtype {x.dtype}; it must be one of {', '.join(FLOATS)}: "
                f"use {name}.astype(jnp.bfloat16) or another of them"
            )
    if len({x.dtype for x in arrays}) > 1:
        given = ", ".join(f"{n} is {x.dtype}" for n, x in zip(names, arrays, strict=True))
        raise TypeError(
            f"{given}; the three must have one dtype: cast, for instance, "
            "key.astype(query.dtype) and value.astype(query.dtype)"
        )
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError(
            f"batch sizes differ: query has shape {q.shape}, key {k.shape}, value {v.shape}; "
            "the first dimensions must be equal"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"key has shape {k.shape} and value {v.shape}; "
            "their lengths and head counts (dimensions 1 and 2) must be equal"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"query has shape {q.shape} and key {k.shape}; their head dims (last) must be equal")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"head dim is 0: query has shape {q.shape}, value {v.shape}; need at least 1")
    heads, kv_heads = q.shape[2], k.shape[2]
    if (kv_heads == 0 and heads > 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"query has {heads} heads and key has {kv_heads}; query heads must be a multiple of key heads"
        )
    return q, k, v


def check_bias(bias: Any) -> jax.Array | None:
    """Check the bias, but for its shape."""
    if bias is None:
        return None
    if hasattr(bias, "element"):
        raise TypeError(f"bias is {named(bias)} mask; pass it as mask={type(bias).__name__}(...)")
    bias = check_array("bias", bias)
    if bias.dtype == jnp.bool_:
        raise TypeError("bias is boolean; pass a boolean array as mask (True where a query may see)")
    if str(bias.dtype) not in FLOATS:
        raise TypeError(
            f"bias has dtype {bias.dtype}; it is added to the logits and must be one of "
            f"{', '.join(FLOATS)}: use bias.astype(jnp.float32), or mask=bias.astype(bool) for a mask"
        )
    return bias


def check_floats(name: str, x: Any, use: str, ndims: tuple[int, ...], layout: str) -> jax.Array:
    """Check a floating array and the number of its dimensions. Abstract shapes pass as they are."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    x = check_array(name, x)
    if str(x.dtype) not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; {use} and must be one of {', '.join(FLOATS)}")
    if x.ndim not in ndims:
        raise ValueError(f"{name} has shape {x.shape}; it must be {layout}")
    return x


def check_bucket_table(table: Any, bidirectional: Any) -> jax.Array:
    """Check the table of a relative position bias."""
    table = check_floats(
        "RelativePositionBias.table", table, "it is added to the logits", (2,), "[buckets, heads]"
    )
    least = 4 if bidirectional else 2
    if table.shape[0] < least:
        raise ValueError(
            f"RelativePositionBias.table has {table.shape[0]} buckets; it needs at least {least}"
            + (" where both directions have their own" if bidirectional else "")
        )
    return table


def check_bucket_heads(table: Any, heads: int) -> None:
    """Check that a table of buckets is for so many heads."""
    if table.shape[1] != heads:
        raise ValueError(
            f"RelativePositionBias.table has shape {tuple(table.shape)} and query has {heads} heads; the "
            "table must be [buckets, heads]"
        )


def check_static_int(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be an int, known when the call is traced")
    return int(value)


def check_max_distance(value: Any) -> int:
    value = check_static_int("max_distance", value)
    if value < 1:
        raise ValueError(f"max_distance is {value}; it must be positive")
    return value


def check_slopes(slopes: Any) -> jax.Array:
    return check_floats(
        "alibi_slopes", slopes, "they multiply distances", (1, 2), "[heads] or [batch, heads]"
    )


def check_position_bias(x: Any) -> jax.Array:
    """Check a bias by relative position that is no `RelativePositionBias`."""
    layout = "[T + S - 1], [N, T + S - 1] or [B, N, T + S - 1], or a RelativePositionBias"
    return check_floats("position_bias", x, "it is added to the logits", (1, 2, 3), layout)


def check_score_function(value: Any) -> Any:
    if not callable(value):
        raise TypeError(
            f"score_fn is {named(value)}; it must be a function of (score, b, h, q, k) or a ScoreFunction"
        )
    return value


def check_score(new: Any, old: Any) -> Any:
    """Check what a score function returned for the logits ``old``."""
    dtype = getattr(new, "dtype", None)
    if dtype is None or dtype != old.dtype:
        raise TypeError(
            f"score_fn returned {dtype or named(new)}; it must return logits in the dtype of its first "
            f"argument, {old.dtype}: cast inside with .astype(score.dtype)"
        )
    return new


def check_sinks(sinks: Any, heads: int) -> jax.Array:
    """Check the sinks and give them the shape ``[1, N, 1, 1]``."""
    if isinstance(sinks, numbers.Real) and not isinstance(sinks, bool):
        sinks = float(sinks)
    sinks = check_floats("sinks", sinks, "they are logits", (0, 1), f"a scalar or [heads] = [{heads}]")
    if sinks.ndim and sinks.shape[0] not in (1, heads):
        raise ValueError(f"sinks has shape {sinks.shape}; it must be a scalar or [heads] = [{heads}]")
    return jnp.broadcast_to(sinks, (heads,)).reshape(1, heads, 1, 1)


def check_mask_type(mask: Any) -> None:
    raise TypeError(f"mask is {named(mask)}; it must be a boolean array or a flashjax Mask")


# ---- the call --------------------------------------------------------------------------------------


def make(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scores: Any,
    mask: Any,
    *,
    scale: Any,
    softcap: Any,
    sinks: Any,
    dropout_rate: Any,
    dropout_key: Any,
    broadcast_dropout: bool,
    precision: Any,
    deterministic: Any,
    return_max_logit: Any,
) -> tuple[Problem, Inputs]:
    """Check a call and split it into what is static and what is not.

    Args:
      query, key, value: arrays that `check_qkv` has passed.
      scores: resolved `Scores` or None (see `scores.from_arguments`).
      mask: a resolved `Mask` or None (see `masks.from_arguments`).
      scale, softcap, sinks, dropout_rate, dropout_key, precision, deterministic, return_max_logit: as the
        user gave them.
      broadcast_dropout: whether all rows and heads share one keep mask.

    Returns:
      ``(problem, inputs)``.

    Raises:
      ValueError, TypeError: an argument is wrong; the message says which and what to do.
    """
    from flashjax import dropout

    (batch, length, heads, head_dim), (_, key_length, kv_heads, value_dim) = (
        query.shape,
        value.shape,
    )
    rate = check_dropout(dropout_rate, dropout_key)
    words = None
    if rate > 0:
        words = dropout.key_words(check_dropout_key(dropout_key))[None]
    accumulator = accumulator_of(query.dtype)
    if scale is not None:
        scale = check_scale(scale).astype(accumulator).reshape(1, 1, 1, 1)
    if sinks is not None:
        sinks = check_sinks(sinks, heads).astype(accumulator)
    problem = Problem(
        batch=batch,
        query_length=length,
        key_length=key_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=query.dtype,
        mask=abstract(mask),
        scores=abstract(scores),
        scaled=scale is not None,
        softcap=check_softcap(softcap),
        sinks=sinks is not None,
        dropout_rate=rate,
        broadcast_dropout=broadcast_dropout,
        precision=check_precision(precision),
        deterministic=check_flag("deterministic", deterministic),
        max_logit=check_flag("return_max_logit", return_max_logit),
        batch_period=batch,
    )
    return problem, Inputs(query, key, value, scores, mask, scale, sinks, words)


# ---- Flax adapters ---------------------------------------------------------------------------------


def check_layer_qkv(query: Any, key: Any, value: Any) -> None:
    """Check that query, key and value are ``[batch..., length, heads, dim]`` with the same batch."""
    shapes = f"query has shape {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
        raise ValueError(
            f"{shapes}; each must be [batch..., length, heads, head dim], with the same number of "
            "batch dimensions, which may be none"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"{shapes}; the batch dimensions, all but the last three, must be equal")


def check_layer_operand(name: str, shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Check that a mask or bias broadcasts to ``[batch..., N, T, S]``."""
    if len(shape) > len(full) or any(n not in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must broadcast to [batch..., N, T, S] = {tuple(full)}"
        )


def check_layer_dropout(rate: Any, deterministic: Any, broadcast: Any) -> float:
    """Return the dropout rate in force, 0 where ``deterministic``; check it also where it is not used.

    Flax takes a rate that is negative or NaN for "no dropout" and calls with ``deterministic=True``.
    """
    check_flag("broadcast_dropout", broadcast)
    no_dropout = check_flag("deterministic", deterministic)
    rate = check_dropout_rate(rate)
    return 0.0 if no_dropout else rate


def check_layer_window(window: Any, query_length: int, key_length: int) -> None:
    """Refuse a window where it is not known at which keys the queries stand."""
    if window is not None and query_length != key_length:
        raise UnsupportedError(
            f"local_window_size is {window!r} with {query_length} queries and {key_length} keys; a Flax "
            "layer does not say at which keys the queries stand, so a window needs equal lengths. Put it "
            "into mask instead: a boolean array while decoding, or "
            "flashjax.SlidingWindow(left, right, offset=...)"
        )


def check_module(module: Any) -> None:
    """Refuse to sow attention weights."""
    if module is not None:
        raise UnsupportedError(
            f"module is a {type(module).__name__}, which asks to sow the attention weights "
            "(sow_weights=True), but they are never stored. Use Flax's own dot_product_attention as "
            "attention_fn of that layer, or compute the rows of interest by flashjax.attention_weights with "
            "lse from flashjax.flash_attention(..., return_residual=True)"
        )


def check_no_einsum(name: str, value: Any) -> None:
    """Refuse a replacement of the matrix products."""
    if value is not None:
        raise UnsupportedError(
            f"{name} is {value!r}; the matrix products are part of the kernel and cannot be replaced. "
            "Leave it None, or use flax.linen.dot_product_attention as attention_fn of that layer"
        )

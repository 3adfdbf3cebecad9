"""The rows of the GPU benchmark, and how each library is called for one.

A contender takes a row and returns ``(call, operands)``: ``call(q, k, v, operands)`` is the attention, and
``operands`` are the arrays besides query, key and value that it needs, made outside of the timing. Where the
library cannot do the row it raises `Unable` with the reason.
"""

import dataclasses
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.plot import BASELINE
from flashjax import Segments, SlidingWindow, flash_attention, masks, tiles
from flashjax.operands import Sizes

SCORES_LIMIT = 8e9  # bytes of float32 scores up to which attention that stores them takes part
TILE = 128  # side of the tiles that `Row.visited_pairs` counts


class Unable(Exception):
    """A library cannot do a row; the message says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One attention call: S = T, bfloat16 unless told otherwise.

    Attributes:
      name: unique.
      batch, length, heads, kv_heads, head_dim, value_dim: B, T, N, K, D, Dv; K and Dv default to N and D.
      causal: whether query i sees no key after i.
      window: number of keys up to its own that a query sees; None is no limit. Needs ``causal``.
      documents: mean length of the packed documents, None without them.
      lengths: whether the rows of the batch have key lengths, drawn between T/4 and T.
      softcap: as in `flash_attention`.
    """

    name: str
    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int = 0
    value_dim: int = 0
    causal: bool = False
    window: int | None = None
    documents: int | None = None
    lengths: bool = False
    softcap: float | None = None
    dtype: str = "bfloat16"

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and dout."""
        b, t = self.batch, self.length
        return {
            "q": (b, t, self.heads, self.head_dim),
            "k": (b, t, self.kv_heads, self.head_dim),
            "v": (b, t, self.kv_heads, self.value_dim),
            "dout": (b, t, self.heads, self.value_dim),
        }

    def document_ids(self) -> np.ndarray:
        """Return the document of each position, int32 ``[T]``."""
        starts = np.random.default_rng(0).random(self.length) < 1 / self.documents
        return np.cumsum(starts, dtype=np.int32)

    def key_lengths(self) -> np.ndarray:
        """Return the number of keys of each row of the batch, int32 ``[B]``."""
        rng = np.random.default_rng(0)
        return rng.integers(self.length // 4, self.length + 1, self.batch).astype(np.int32)

    def key_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(start, end)``, int32 ``[B, T]``: query i sees the keys ``start <= j < end``."""
        i = np.arange(self.length, dtype=np.int32)
        start, end = np.zeros_like(i), np.full_like(i, self.length)
        if self.causal:
            end = i + 1
        if self.window is not None:
            start = np.maximum(0, i - (self.window - 1))
        if self.documents is not None:
            ids = self.document_ids()
            start = np.maximum(start, np.searchsorted(ids, ids, side="left"))
            end = np.minimum(end, np.searchsorted(ids, ids, side="right"))
        start, end = (np.tile(x.astype(np.int32), (self.batch, 1)) for x in (start, end))
        if self.lengths:
            end = np.minimum(end, self.key_lengths()[:, None])
        return start, end

    def visible_pairs(self) -> int:
        """Count the query-key pairs that are visible, of all rows of the batch and one head."""
        start, end = self.key_ranges()
        return int(np.maximum(end.astype(np.int64) - start, 0).sum())

    def visited_pairs(self, block: int = TILE) -> int:
        """Count the pairs in tiles that the mask does not leave empty, likewise for one head."""
        t, ids = self.length, None if self.documents is None else Segments(self.document_ids())
        mask = masks.from_arguments(
            ids,
            Sizes(self.batch, 1, t, t),
            is_causal=self.causal,
            query_seq_lengths=None,
            key_value_seq_lengths=self.key_lengths() if self.lengths else None,
            local_window_size=None if self.window is None else (self.window - 1, 0),
        )
        if mask is None:
            return self.batch * t * t
        blocks = tiles.Blocks(t, t, min(block, t), min(block, t))
        empty, _ = tiles.dense(mask, blocks, self.batch, 1)
        return int(jnp.sum(~empty)) * blocks.block_q * blocks.block_k


def flashjax(row: Row) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Call `flash_attention`, which chooses its backend."""
    operands = {}
    if row.documents is not None:
        operands["ids"] = jnp.asarray(row.document_ids())
    if row.lengths:
        operands["lengths"] = jnp.asarray(row.key_lengths())

    def call(q, k, v, operands, function=flash_attention):
        mask = None
        if row.window is not None:
            mask = SlidingWindow(row.window - 1)
        if row.documents is not None:
            segments = Segments(operands["ids"])
            mask = segments if mask is None else segments & mask
        return function(
            q,
            k,
            v,
            mask=mask,
            is_causal=row.causal and row.window is None,  # the window ends at the diagonal by itself
            key_value_seq_lengths=operands.get("lengths"),
            softcap=row.softcap,
        )

    return call, operands


def _jax_nn(row: Row, implementation: str) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    if row.softcap is not None:
        raise Unable("jax.nn has no softcap")
    if row.value_dim != row.head_dim:
        raise Unable("jax.nn needs a value dim equal to the head dim")
    operands = {}
    if row.lengths:
        operands["key_value_seq_lengths"] = jnp.asarray(row.key_lengths())
    if row.documents is not None:  # all that jax.nn takes is the dense mask
        ids = jnp.asarray(row.document_ids())
        operands["mask"] = (ids[:, None] == ids)[None, None]
    window = None if row.window is None else (row.window - 1, 0)

    def call(q, k, v, operands):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=row.causal,
            local_window_size=window,
            implementation=implementation,
            **operands,
        )

    return call, operands


def cudnn(row: Row) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Call cuDNN through `jax.nn.dot_product_attention`."""
    return _jax_nn(row, "cudnn")


def jax_nn_xla(row: Row) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Call the attention of `jax.nn` that stores all scores."""
    size = 4 * row.batch * row.heads * row.length**2
    if size > SCORES_LIMIT:
        raise Unable(f"the scores alone are {size / 1e9:.0f} GB")
    return _jax_nn(row, "xla")


def import_tokamax() -> Any:
    """Import tokamax; stand in for xprof, which it imports for its own benchmarks alone."""
    if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
        names = ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool")
        for name in names:
            module = sys.modules.setdefault(name, types.ModuleType(name))
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    try:
        import tokamax
    except ImportError as error:
        raise Unable(f"tokamax cannot be imported: {error}") from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # a long warning for every row that it has not tuned
    return tokamax


def tokamax(row: Row, implementation: str = "mosaic") -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Call tokamax's Mosaic GPU kernel with the configuration that tokamax itself chooses: a tuned one for
    the GPUs and shapes that it ships one for, else that of its heuristics."""
    library = import_tokamax()
    if row.documents is not None:
        return _tokamax_documents(row)
    operands = {}
    if row.lengths:
        operands["key_value_seq_lengths"] = jnp.asarray(row.key_lengths())
    window = None if row.window is None else (row.window - 1, 0)

    def call(q, k, v, operands):
        return library.dot_product_attention(
            q,
            k,
            v,
            is_causal=row.causal and row.window is None,
            local_window_size=window,
            logits_soft_cap=row.softcap,
            implementation=implementation,
            **operands,
        )

    return call, operands


def _tokamax_documents(row: Row) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Give the kernel the first key of each query: the public function takes dense masks alone."""
    from tokamax._src.ops.attention import api, base

    start, end = row.key_ranges()
    operands = {"k_start": jnp.asarray(start[:, None])}
    if not row.causal or row.window is not None:
        operands["k_end"] = jnp.asarray(end[:, None])
    causal = "k_end" not in operands

    def call(q, k, v, operands):
        mask = base.Mask(is_causal=causal, **operands)
        return api.IMPLEMENTATIONS["mosaic_gpu"](q, k, v, mask=mask, logits_soft_cap=row.softcap)

    return call, operands


class Contender(NamedTuple):
    """A library in the benchmark.

    Attributes:
      make: ``make(row) -> (call, operands)``.
      slow: whether it stores all scores: it is then timed less often and one call at a time.
    """

    make: Callable[[Row], tuple[Callable[..., jax.Array], dict[str, Any]]]
    slow: bool = False


OURS = "flashjax"
CONTENDERS = {
    OURS: Contender(flashjax),
    BASELINE: Contender(cudnn),
    "tokamax": Contender(tokamax),
    "jax.nn XLA": Contender(jax_nn_xla, slow=True),
}

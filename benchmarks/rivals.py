"""The rows of the GPU benchmark, and how each library is called for one.

A contender takes a row and returns ``(call, operands)``: ``call(q, k, v, operands)`` is the attention, and
``operands`` are the arrays that it needs besides those that are learned, made outside of the timing. A row's
``bias`` and ``sinks`` are learned as query, key and value are: ``call`` takes them by name. Where the library
cannot do the row it raises `Unable` with the reason.
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
from flashjax import BlockSparse, Segments, SlidingWindow, flash_attention, masks, tiles
from flashjax.operands import Sizes

SCORES_LIMIT = 8e9  # bytes of float32 scores up to which attention that stores them takes part
MASK_LIMIT = 4.3e9  # bytes of booleans up to which a mask is given as one per query and key
TILE = 128  # side of the tiles that `Row.visited_pairs` counts, and of the blocks of a block-sparse mask
BIAS_DTYPES = {"pair": "bfloat16", "pair32": "float32"}
# Fields that a record leaves out of the rows where they are not set: older records do not have them.
LATER = ("document_count", "bias", "alibi", "sinks", "dropout", "blocks")


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
      document_count: number of the packed documents, in the place of ``documents``.
      bias: "pair" adds a learned bfloat16 array ``[1, N, T, S]``, "pair32" a float32 one; None adds nothing.
      alibi: whether there is ALiBi, with the slopes of its authors, which are not learned.
      sinks: whether each head has a learned sink.
      dropout: rate.
      blocks: how many of the blocks of 128 queries by 128 keys on and under the diagonal are seen, as a
        fraction; those on the diagonal always are. None is no block-sparse mask.
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
    document_count: int | None = None
    bias: str | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    blocks: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    def fields(self) -> dict[str, Any]:
        """Return the fields as a record has them."""
        return {n: x for n, x in dataclasses.asdict(self).items() if n not in LATER or x}

    @property
    def packed(self) -> bool:
        """Whether there are documents."""
        return self.documents is not None or self.document_count is not None

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of q, k, v, dout and of what else is learned."""
        b, t = self.batch, self.length
        shapes = {
            "q": (b, t, self.heads, self.head_dim),
            "k": (b, t, self.kv_heads, self.head_dim),
            "v": (b, t, self.kv_heads, self.value_dim),
            "dout": (b, t, self.heads, self.value_dim),
        }
        arrays = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        if self.bias is not None:
            arrays["bias"] = jax.ShapeDtypeStruct((1, self.heads, t, t), BIAS_DTYPES[self.bias])
        if self.sinks:
            arrays["sinks"] = jax.ShapeDtypeStruct((self.heads,), "float32")
        return arrays

    @property
    def shares(self) -> bool:
        """Whether the rows of the batch share something that is learned."""
        return self.bias is not None or self.sinks

    def document_ids(self) -> np.ndarray:
        """Return the document of each position, int32 ``[T]``."""
        rng = np.random.default_rng(0)
        if self.document_count is None:
            starts = rng.random(self.length) < 1 / self.documents
        else:
            starts = np.zeros(self.length, bool)
            starts[1 + rng.choice(self.length - 1, self.document_count - 1, replace=False)] = True
        return np.cumsum(starts, dtype=np.int32)

    def alibi_slopes(self) -> np.ndarray:
        """Return the slope of each head, float32 ``[N]``: 2^(-8/N), 2^(-16/N) and so on to 2^-8."""
        return np.exp2(-8 * np.arange(1, self.heads + 1) / self.heads).astype(np.float32)

    def block_table(self) -> np.ndarray:
        """Return which blocks of keys each block of queries sees, boolean."""
        count = -(-self.length // TILE)
        drawn = np.random.default_rng(0).random((count, count)) < self.blocks
        return np.tril(drawn) | np.eye(count, dtype=bool)

    def dropout_key(self) -> np.ndarray:
        """Return the key that says which weights drop, uint32 ``[2]``."""
        return np.array([0, 1], np.uint32)

    def key_lengths(self) -> np.ndarray:
        """Return the number of keys of each row of the batch, int32 ``[B]``."""
        rng = np.random.default_rng(0)
        return rng.integers(self.length // 4, self.length + 1, self.batch).astype(np.int32)

    def key_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(start, end)``, int32 ``[B, T]``: query i sees the keys ``start <= j < end``, of these
        with ``blocks`` those in its blocks."""
        i = np.arange(self.length, dtype=np.int32)
        start, end = np.zeros_like(i), np.full_like(i, self.length)
        if self.causal:
            end = i + 1
        if self.window is not None:
            start = np.maximum(0, i - (self.window - 1))
        if self.packed:
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
        end = np.maximum(start, end)
        if self.blocks is None:
            return int((end.astype(np.int64) - start).sum())
        table = self.block_table()
        before = np.pad(TILE * np.cumsum(table, 1), ((0, 0), (1, 0)))  # seen keys before each block
        table = np.pad(table, ((0, 0), (0, 1)))
        own = np.arange(self.length) // TILE
        seen_before = lambda j: before[own, j // TILE] + table[own, j // TILE] * (j % TILE)
        return int((seen_before(end) - seen_before(start)).sum())

    def visited_pairs(self, block: int = TILE) -> int:
        """Count the pairs in tiles that the mask does not leave empty, likewise for one head."""
        t = self.length
        mask = masks.from_arguments(
            _both(
                Segments(self.document_ids()) if self.packed else None,
                None if self.blocks is None else BlockSparse(self.block_table(), TILE),
            ),
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


def _both(left: masks.Mask | None, right: masks.Mask | None) -> masks.Mask | None:
    """Return a mask that shows what both show; None shows everything."""
    if left is None or right is None:
        return right if left is None else left
    return left & right


def flashjax(row: Row) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """Call `flash_attention`, which chooses its backend."""
    operands = {}
    if row.packed:
        operands["ids"] = jnp.asarray(row.document_ids())
    if row.lengths:
        operands["lengths"] = jnp.asarray(row.key_lengths())
    if row.alibi:
        operands["slopes"] = jnp.asarray(row.alibi_slopes())
    if row.dropout:
        operands["key"] = jnp.asarray(row.dropout_key())
    if row.blocks is not None:
        operands["blocks"] = jnp.asarray(row.block_table())

    def call(q, k, v, operands, bias=None, sinks=None, function=flash_attention):
        mask = Segments(operands["ids"]) if row.packed else None
        if row.window is not None:
            mask = _both(mask, SlidingWindow(row.window - 1))
        if row.blocks is not None:
            mask = _both(mask, BlockSparse(operands["blocks"], TILE))
        return function(
            q,
            k,
            v,
            bias,
            mask,
            alibi_slopes=operands.get("slopes"),
            sinks=sinks,
            is_causal=row.causal and row.window is None,  # the window ends at the diagonal by itself
            key_value_seq_lengths=operands.get("lengths"),
            softcap=row.softcap,
            dropout_rate=row.dropout,
            dropout_key=operands.get("key"),
        )

    return call, operands


def _refuse(library: str, row: Row, *features: str) -> None:
    """Raise `Unable` where a row has a feature that a library lacks. (ALiBi written out as a bias of every
    query and key would be another row.)"""
    named = {"alibi": "ALiBi", "blocks": "block-sparse masks"}
    for name in features:
        if getattr(row, name):
            raise Unable(f"{library} has no {named.get(name, name)}")


def _dense_mask(row: Row) -> jax.Array:
    """Return whether each query sees each key, ``[1, 1, T, S]``, as far as documents and blocks decide.

    Raises:
      Unable: the mask would be too large.
    """
    if row.length**2 > MASK_LIMIT:
        raise Unable(f"the mask alone is {row.length**2 / 1e9:.0f} GB")
    mask = True
    if row.packed:
        ids = jnp.asarray(row.document_ids())
        mask = ids[:, None] == ids
    if row.blocks is not None:
        table = jnp.asarray(row.block_table())[:, None, :, None]
        count = table.shape[0]
        table = jnp.broadcast_to(table, (count, TILE, count, TILE)).reshape(2 * [count * TILE])
        mask = mask & table[: row.length, : row.length]
    return mask[None, None]


def _jax_nn(row: Row, implementation: str) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    _refuse("jax.nn", row, "softcap", "alibi", "sinks", "dropout")
    if row.value_dim != row.head_dim:
        raise Unable("jax.nn needs a value dim equal to the head dim")
    operands = {}
    if row.lengths:
        operands["key_value_seq_lengths"] = jnp.asarray(row.key_lengths())
    if row.packed or row.blocks is not None:  # all that jax.nn takes is the dense mask
        operands["mask"] = _dense_mask(row)
    window = None if row.window is None else (row.window - 1, 0)

    def call(q, k, v, operands, bias=None):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
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
    _refuse("tokamax", row, "alibi", "sinks", "dropout", "blocks")
    library = import_tokamax()
    if row.packed:
        return _tokamax_documents(row)
    operands = {}
    if row.lengths:
        operands["key_value_seq_lengths"] = jnp.asarray(row.key_lengths())
    window = None if row.window is None else (row.window - 1, 0)

    def call(q, k, v, operands, bias=None):
        return library.dot_product_attention(
            q,
            k,
            v,
            bias,
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

    def call(q, k, v, operands, bias=None):
        mask = base.Mask(is_causal=causal, **operands)
        return api.IMPLEMENTATIONS["mosaic_gpu"](q, k, v, bias=bias, mask=mask, logits_soft_cap=row.softcap)

    return call, operands


class Contender(NamedTuple):
    """A library in the benchmark.

    Attributes:
      make: ``make(row) -> (call, operands)``.
      slow: whether it stores all scores: it is then timed less often, one call at a time on one set of
        inputs, which the scores drive out of the L2 cache.
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

"""What a mask, the scores and dropout read, in the form in which the kernel reads it.

The rows of a kernel's tile are queries and its columns keys, or the other way round where the kernel is
``by_key``. A resolved operand has the dimensions [b, h, q, k], each of size 1 or full. What a tile of 64
rows needs of it depends on which of them are full:

    neither   "scalar"    one number a batch row and head, read from global memory
    rows      "rows"      a vector of 64, held in registers
    columns   "cols"      a vector, brought into shared memory by the loader beside what it streams
    both      "bits"      of booleans: 32 columns are packed into a word, and a tile is vectors of words
              "tile"      of numbers: as it is, read from global memory
              "staged"    likewise, brought into shared memory by the loader, if the TMA can
    relative  "diagonal"  one number a relative position, as it is, read from global memory

`pack` makes the arrays, in XLA; nothing it makes is larger than an eighth of what it reads, or than a
vector per row and head.
`reading.Reader` reads them in the kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from flashjax import dropout
from flashjax.backends import hopper
from flashjax.backends.hopper import transfers
from flashjax.masks import CustomMask
from flashjax.operands import Operand, indices
from flashjax.problem import Inputs, Problem

WORD = 32
SCORES = "scores:"  # before the names of what the scores read
# What a score function may compute with: all that is elementwise and that the kernel does to float32.
KNOWN = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp convert_element_type copy div eq exp exp2 ge gt integer_pow jit
    le log logistic lt max min mul ne neg not one_minus_square or pjit rem reshape rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sqrt square squeeze stop_gradient sub tanh xor
    """.split()  # noqa: SIM905 - a list of so many words reads better like this
)
ROW_A, ROW_B, COLUMN = WORDS = "dropout:row_a", "dropout:row_b", "dropout:column"
MOST_VECTORS = 7  # that fit into shared memory beside the tiles of the largest heads, whatever their dtypes


class Kind(NamedTuple):
    """How one operand is stored.

    Attributes:
      form: "scalar", "rows", "cols", "bits", "tile", "staged" or "diagonal".
      dtype: of the stored numbers.
      boolean: whether its numbers stand for booleans.
      heads: whether they differ by head.
      entry: of "bits", how many rows share one row of words.
    """

    form: str
    dtype: Any
    boolean: bool
    heads: bool
    entry: int


def form_of(operand: Operand, by_key: bool = False) -> str:
    _, _, *sizes = operand.array.shape
    if operand.relative:
        return "diagonal" if sizes[1] > 1 else "scalar"
    rows, columns = reversed(sizes) if by_key else sizes
    both = "bits" if operand.array.dtype == jnp.bool_ else "tile"
    return {(False, False): "scalar", (True, False): "rows", (False, True): "cols", (True, True): both}[
        rows > 1, columns > 1
    ]


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot read what the mask and the scores of a call read, or None."""
    is_custom = lambda part: isinstance(part, CustomMask)
    custom = any(map(is_custom, jax.tree.leaves(problem.mask, is_leaf=is_custom)))
    named = operands(problem)
    for name, operand in named.items():
        dtype = operand.array.dtype
        scored = name.startswith(SCORES)
        if dtype == jnp.bool_ or (scored and jnp.issubdtype(dtype, jnp.floating)):
            continue
        what = f"the mask's operand {name!r}"
        if scored:
            what = f"the operand {name.removeprefix(SCORES).removeprefix('function.')!r} of the scores"
        if dtype.itemsize > 4:
            return f"{what} has dtype {dtype}; the kernel reads up to 32 bits"
        if dtype.itemsize < 4 and (custom or scored):
            # The kernel computes with 32 bits, a function of the user's might overflow or round with fewer.
            return f"{what} has dtype {dtype}, and a function in the kernel computes with 32 bits"
        if form_of(operand) in ("tile", "diagonal"):
            kinds = "booleans and, in scores, floating numbers"
            return f"{what} has one {dtype} per query and key; the kernel reads only {kinds} of that kind"
    if problem.bends and problem.scores is not None:
        closed = _traced_function(problem)
        unknown = sorted(_names(closed.jaxpr) - KNOWN)
        if unknown:
            return (
                f"score_fn computes {', '.join(unknown)}; the kernel has elementwise arithmetic, "
                "comparisons, exp, log, tanh and the like, and reads arrays only as declared operands"
            )
        if any(jnp.ndim(x) for x in closed.consts):
            return "score_fn closes over an array; the kernel reads arrays only as declared operands"
    vectors = [n for n, x in named.items() if form_of(x) in ("rows", "cols")]
    if len(vectors) > MOST_VECTORS:
        return f"the call reads {len(vectors)} vectors over queries or keys; the kernel holds {MOST_VECTORS}"
    return None


def _traced_function(problem: Problem) -> Any:
    """Return a closed jaxpr of the function of the scores on a tile, and of its derivatives."""
    operands = problem.scores.operands()
    tile = lambda dtype: jax.ShapeDtypeStruct((64, 64), dtype)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    arrays = {n: tile(stored(x.array.dtype)) for n, x in operands.items()}

    def both(s, position, arrays):
        numbers = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        apply = lambda s, numbers: problem.scores.apply(s, position, arrays | numbers)
        new, pull = jax.vjp(apply, s, numbers)
        return apply(s, numbers), new, pull(jnp.ones_like(new))

    place = (index, index, tile(jnp.int32), tile(jnp.int32))
    return hopper.without_mesh(jax.make_jaxpr(both))(tile(jnp.float32), place, arrays)


def _names(jaxpr: Any) -> set[str]:
    """Return the names of all primitives in a jaxpr."""
    found = set()
    for equation in jaxpr.eqns:
        inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
        found |= set().union(*(_names(getattr(x, "jaxpr", x)) for x in inner)) or {equation.primitive.name}
    return found


def operands(problem: Problem, inputs: Inputs | None = None) -> dict[str, Operand]:
    """Return all that the kernels read beside the tiles, by name: of a call's inputs, or else abstract."""
    source = problem if inputs is None else inputs
    found = {} if source.mask is None else dict(source.mask.operands())
    if source.scores is not None:
        found |= {SCORES + name: x for name, x in source.scores.operands().items()}
    if problem.dropout_rate > 0:
        words = functools.partial(_dropout_words, problem)
        arrays = jax.eval_shape(words, _WORDS) if inputs is None else words(inputs.dropout_words)
        found |= {name: Operand(x, "bhqk") for name, x in zip(WORDS, arrays, strict=True)}
    return found


_WORDS = jax.ShapeDtypeStruct((1, 2), jnp.uint32)


def _dropout_words(problem: Problem, words: jax.Array) -> tuple[jax.Array, ...]:
    """Return what `dropout.join` takes: two words for each query of each head, and one for each key."""
    both = tuple(words[:, n].reshape(-1, 1, 1, 1) for n in (0, 1))
    b, h, q, k = indices(problem.batch, problem.heads, problem.query_length, problem.key_length)
    b = b % problem.batch_period
    if problem.broadcast_dropout:
        b, h = b[:1] * 0, h[:, :1] * 0
    copies = max(b.shape[0] // words.shape[0], 1)
    rows = dropout.row_words(tuple(jnp.tile(x, (copies, 1, 1, 1)) for x in both), b, h, q)
    return *rows, dropout.column_words(both, k)


def kinds(problem: Problem, by_key: bool = False, staged: bool = False) -> dict[str, Kind]:
    """Describe the operands of a call, by name; ``staged`` if the kernel has shared memory for such."""

    def kind(operand):
        form, dtype = form_of(operand, by_key), operand.array.dtype
        if staged and form == "tile" and _lies_well(operand.array):
            form = "staged"
        as_it_is = form in ("tile", "staged", "diagonal") and dtype.itemsize <= 4
        return Kind(
            form,
            dtype if as_it_is else stored(dtype),
            dtype == jnp.bool_,
            operand.array.shape[1] > 1,
            operand.block[by_key],
        )

    return {name: kind(operand) for name, operand in operands(problem).items()}


def _lies_well(array: Any) -> bool:
    """Whether the TMA can bring tiles of ``[b, h, T, S]`` as `stage` takes them."""
    _, _, length, keys = array.shape
    return array.dtype.itemsize <= 4 and length % transfers.PIECE == 0 and keys % _width(array.dtype) == 0


def _width(dtype: Any) -> int:
    return 128 // dtype.itemsize


def stage(kind: Kind, stages: int, queries: int, keys: int) -> Any:
    """Return the scratch type of a "staged" operand: tiles of queries by keys, swizzled."""
    tiled = plgpu.TilingTransform((transfers.PIECE, _width(kind.dtype))), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((stages, queries, keys), kind.dtype, transforms=tiled)


def pack_all(problem: Problem, inputs: Inputs, view: Any) -> dict[str, jax.Array]:
    """Bring the operands of a call into their stored forms, by name; view is the kernel's `walk.View`."""
    return {name: pack(x, view) for name, x in operands(problem, inputs).items()}


def pack(operand: Operand, view: Any) -> jax.Array:
    """Bring an operand into its stored form.

    Args:
      operand: resolved, with entries that may stand for several queries and keys.
      view: the kernel's `walk.View`.

    Returns:
      ``[b, h]``, ``[b, h, rows]``, ``[b, h, columns]``, or for "bits" uint32 ``[b, h, columns / 32, rows]``
      (entries in place of rows where they stand for several); rows and columns in whole tiles. For "tile"
      ``[b, h, T, S]`` and for "diagonal" ``[b, h, T + S - 1]``.
    """
    form = form_of(operand, view.by_key)
    x = operand.array
    rows, columns = view.count_rows * view.block_rows, view.count_columns * view.block_columns
    if form == "bits":
        return _words(operand, view, rows, columns)
    if form in ("tile", "diagonal"):
        x = x if x.dtype.itemsize <= 4 else x.astype(jnp.float32)
        return x if form == "tile" else x[:, :, 0]
    x = x.astype(stored(x.dtype))
    if form == "scalar":
        return x[:, :, 0, 0]
    axis = 2 if x.shape[2] > 1 else 3
    length, padded = (view.rows, rows) if form == "rows" else (view.columns, columns)
    entry = operand.block[axis - 2]
    if entry > 1:
        x = jnp.take(x, jnp.arange(length, dtype=jnp.int32) // entry, axis=axis)
    x = x[:, :, :, 0] if axis == 2 else x[:, :, 0, :]
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded - length)))


def stored(dtype: Any) -> Any:
    """Return the dtype of 32 bits that stands for another; booleans become 0 and 1."""
    if dtype == jnp.uint32:
        return jnp.uint32
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _words(operand: Operand, view: Any, rows: int, columns: int) -> jax.Array:
    x = operand.array
    row_axis, column_axis = (3, 2) if view.by_key else (2, 3)
    entry = operand.block[column_axis - 2]
    if entry > 1:
        x = jnp.take(x, jnp.arange(view.columns, dtype=jnp.int32) // entry, axis=column_axis)
    missing = [(0, 0)] * 4
    missing[column_axis] = (0, columns - view.columns)
    if operand.block[row_axis - 2] == 1:
        missing[row_axis] = (0, rows - x.shape[row_axis])
    x = jnp.pad(x, missing)
    if view.by_key:
        x = x.reshape(*x.shape[:2], columns // WORD, WORD, x.shape[3])
        # A sum over bits that lie apart: XLA would transpose the whole array for a reduction.
        return sum(
            (x[:, :, :, i].astype(jnp.uint32) << i for i in range(1, WORD)), x[:, :, :, 0].astype(jnp.uint32)
        )
    x = x.reshape(*x.shape[:3], columns // WORD, WORD).astype(jnp.uint32)
    words = jnp.sum(x << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return words.swapaxes(2, 3)

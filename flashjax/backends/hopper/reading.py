"""Reading a mask's operands in the kernel, and evaluating the mask on a tile.

`packing` says in which form each operand is stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.extend as jex
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import intrinsics
from flashjax.backends.hopper.config import ROWS
from flashjax.backends.hopper.packing import WORD, Kind
from flashjax.masks import Mask

WGMMA = plgpu.Layout.WGMMA


class Reader(NamedTuple):
    """Reads the packed operands of one tile in the kernel.

    Attributes:
      kinds: by operand name.
      refs: by operand name, global memory.
      b, h: batch row and query head.
      start: first of the warpgroup's 64 rows (queries, or keys where the kernel is by key).
    """

    kinds: dict[str, Kind]
    refs: dict[str, Any]
    b: Any
    h: Any
    start: Any

    def at(self, name: str) -> Any:
        """Return an operand at this batch row and head."""
        ref = self.refs[name]
        b, h = ref.shape[:2]
        return ref.at[lax.rem(self.b, jnp.int32(b)), self.h if h > 1 else 0]

    def scalars(self) -> dict[str, Any]:
        """Read what depends on neither row nor column."""
        return {n: self._number(n, self.at(n)[...]) for n, k in self.kinds.items() if k.form == "scalar"}

    def rows(self, known: Any = ()) -> dict[str, jax.Array]:
        """Read what depends on the row alone, and is not known: vectors of 64."""
        return {
            n: plgpu.load(self.at(n).at[pl.ds(self.start, ROWS)], layout=WGMMA.reduce(1), optimized=False)
            for n, k in self.kinds.items()
            if k.form == "rows" and n not in known
        }

    def tile(
        self, rows: dict[str, jax.Array], cols: dict[str, Any], slot: Any, first: Any, columns: jax.Array
    ) -> dict[str, Any]:
        """Return every operand for the tile that begins at column ``first``: numbers, or arrays like it.

        Args:
          rows: what `rows` returned.
          cols: the buffers of "cols" operands, in shared memory.
          slot: which stage of them holds the tile.
          first: position of the first column.
          columns: positions of the columns ``[64, columns]``.
        """
        values = self.scalars()
        for name, kind in self.kinds.items():
            if kind.form == "rows":
                x = lax.broadcast_in_dim(rows[name], columns.shape, [0])
            elif kind.form == "cols":
                x = plgpu.load(cols[name].at[slot], layout=WGMMA.reduce(0), optimized=False)
                x = lax.broadcast_in_dim(x, columns.shape, [1])
            elif kind.form == "bits":
                words = self._tile_of_words(name, kind, first, columns.shape)
                x = (words >> lax.rem(columns, jnp.int32(WORD)).astype(jnp.uint32)) & jnp.uint32(1)
            else:
                continue
            values[name] = x != 0 if kind.boolean else x
        return values

    def line(self, cols: dict[str, Any], slot: Any, start: int, k0: Any, q: Any) -> dict[str, Any]:
        """Return every operand for query ``q`` and the 64 keys from ``k0`` on: numbers, or vectors of 64.

        Of a kernel whose rows are queries.

        Args:
          cols: the buffers of "cols" operands, in shared memory.
          slot: which stage of them holds the tile.
          start: the first key's place in the tile.
          k0: its position.
          q: the query.
        """
        layout = WGMMA.reduce(1)
        values = self.scalars()
        for name, kind in self.kinds.items():
            if kind.form == "rows":
                x = self.at(name)[q]
            elif kind.form == "cols":
                x = plgpu.load(cols[name].at[slot, pl.ds(start, ROWS)], layout=layout, optimized=False)
            elif kind.form == "bits":
                x = self._bits_of_query(name, kind, k0, q)
            else:
                continue
            values[name] = x != 0 if kind.boolean else x
        return values

    def _bits_of_query(self, name: str, kind: Kind, k0: Any, q: Any) -> jax.Array:
        ref = self.at(name)
        row = lax.div(q, jnp.int32(kind.entry))  # a query below T: its entry is there
        first = lax.div(k0, jnp.int32(WORD))
        lane = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
        low, high = (lax.broadcast_in_dim(ref[first + i, row], (ROWS,), []) for i in range(2))
        word = jnp.where(lane < WORD, low, high)
        return (word >> lax.rem(lane, jnp.int32(WORD)).astype(jnp.uint32)) & jnp.uint32(1)

    def _tile_of_words(self, name: str, kind: Kind, column: Any, shape: tuple[int, int]) -> jax.Array:
        first = lax.div(column, jnp.int32(WORD))
        columns = [
            plgpu.layout_cast(self._word(name, kind, first + i), WGMMA) for i in range(shape[1] // WORD)
        ]
        return lax.concatenate(columns, 1) if len(columns) > 1 else columns[0]

    def _word(self, name: str, kind: Kind, word: Any) -> jax.Array:
        """Return one word of each of the 64 rows, ``[64, 32]``."""
        ref, shape = self.at(name).at[word], (ROWS, WORD)
        if kind.entry == 1:
            value = plgpu.load(ref.at[pl.ds(self.start, ROWS)], layout=WGMMA.reduce(1), optimized=False)
            return lax.broadcast_in_dim(value, shape, [0])
        # Rows of blocks: the few that these rows meet, each a scalar, laid out by comparison.
        first = lax.div(self.start, jnp.int32(kind.entry))
        last = ref.shape[-1] - 1
        if kind.entry % ROWS == 0:
            return lax.broadcast_in_dim(ref[jnp.minimum(first, last)], shape, [])
        count = -(-(ROWS - 1) // kind.entry) + 1
        row = self.start + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
        value = lax.broadcast_in_dim(ref[jnp.minimum(first, last)], (ROWS,), [])
        for i in range(1, count):
            here = lax.broadcast_in_dim(ref[jnp.minimum(first + i, last)], (ROWS,), [])
            value = jnp.where(row >= (first + i) * kind.entry, here, value)
        return lax.broadcast_in_dim(value, shape, [0])

    def _number(self, name: str, x: Any) -> Any:
        return x != 0 if self.kinds[name].boolean else x


class Rows(NamedTuple):
    """The 64 rows of one warpgroup: where they are, and what the mask reads of them."""

    reader: Reader
    values: dict[str, jax.Array]


def seen(plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, count: int) -> jax.Array:
    """Say of each of 64 rows and ``count`` columns from ``first`` on whether the query sees the key."""
    problem, shape = plan.problem, (ROWS, count)
    column = _positions(plan, shape[1], 1)
    columns = lax.broadcast_in_dim(column + first, shape, [1])
    if problem.mask is None and not plan.view.by_key:
        return columns < problem.key_length
    row = _positions(plan, shape[0], 0)
    lines = lax.broadcast_in_dim(row + rows.reader.start, shape, [0])
    q, k = (columns, lines) if plan.view.by_key else (lines, columns)
    if problem.mask is None:
        return k < problem.key_length
    operands = rows.reader.tile(rows.values, cols, slot, first, columns)
    b = lax.rem(rows.reader.b, jnp.int32(problem.batch_period))
    result = visible(problem.mask, (b, rows.reader.h, q, k), operands, WGMMA)
    return result & (k < problem.key_length) if plan.ragged else result


def _positions(plan: Any, count: int, axis: int) -> jax.Array:
    if plan.view.by_key:
        return intrinsics.positions(count, axis)
    # Behind a barrier: the loop would otherwise keep these positions in registers, two for each logit.
    layout = WGMMA.reduce(1 - axis)
    return lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout))


def visible(mask: Mask, position: tuple[Any, ...], operands: dict[str, Any], layout: Any) -> jax.Array:
    """Evaluate a mask at ``(b, h, q, k)``: b and h scalars, q and k arrays of one shape and layout."""
    q = position[2]
    seen = without_not(lambda position, operands: mask.element(*position, **operands))(position, operands)
    if seen.ndim > q.ndim:
        seen = jnp.squeeze(seen, tuple(range(seen.ndim - q.ndim)))
    if seen.shape != q.shape:
        seen = jnp.broadcast_to(seen, q.shape)
    return plgpu.layout_cast(seen, layout)


def without_not(function: Callable) -> Callable:
    """Make a function that compares with True where ``function`` negates booleans.

    Mosaic GPU lowers ``not`` through a conversion to bool, which it does not have for vectors
    (jax 0.11.2, 0.12.0).
    """

    def run(*args):
        flat, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*flat)
        results = _evaluate(closed.jaxpr, closed.consts, flat)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _evaluate(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, jex.core.Literal) else values[x]
    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        inner = equation.params.get("jaxpr")
        if equation.primitive is lax.not_p and equation.invars[0].aval.dtype == jnp.bool_:
            outputs = [inputs[0] != jnp.full_like(inputs[0], True)]
        elif isinstance(inner, jex.core.ClosedJaxpr) and equation.primitive.name in ("jit", "pjit"):
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]

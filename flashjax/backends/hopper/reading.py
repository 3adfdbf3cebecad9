"""Reading operands in the kernel, and evaluating the mask and the scores on a tile.

`packing` says in which form each operand is stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax.backends.hopper import intrinsics, logits, packing
from flashjax.backends.hopper.config import ROWS
from flashjax.backends.hopper.packing import SCORES, WORD, Kind
from flashjax.masks import Mask

WGMMA = plgpu.Layout.WGMMA


class Reader(NamedTuple):
    """Reads the packed operands of one tile in the kernel.

    Attributes:
      kinds: by operand name.
      refs: by operand name, global memory.
      b, h: batch row and query head.
      start: first of the warpgroup's 64 rows (queries, or keys where the kernel is by key).
      offset: its place among the rows of the block.
    """

    kinds: dict[str, Kind]
    refs: dict[str, Any]
    b: Any
    h: Any
    start: Any
    offset: Any = 0

    def at(self, name: str) -> Any:
        """Return an operand at this batch row and head."""
        ref = self.refs[name]
        b, h = ref.shape[:2]
        return ref.at[lax.rem(self.b, jnp.int32(b)), self.h if h > 1 else 0]

    def scalars(self, names: Any) -> dict[str, Any]:
        """Read those among ``names`` that depend on neither row nor column."""
        return {n: self._number(n, self.at(n)[...]) for n in names if self.kinds[n].form == "scalar"}

    def rows(self, known: Any = ()) -> dict[str, jax.Array]:
        """Read what depends on the row alone, and is not known: vectors of 64."""
        return {
            n: plgpu.load(self.at(n).at[pl.ds(self.start, ROWS)], layout=WGMMA.reduce(1), optimized=False)
            for n, k in self.kinds.items()
            if k.form == "rows" and n not in known
        }

    def source(self, name: str, rows: Any, columns: Any) -> Any:
        """Return what the loader copies of a "cols" or "staged" operand for a tile.

        ``rows`` and ``columns`` are slices; the latter of positions that the vector has been padded to.
        """
        return (
            self.at(name).at[columns] if self.kinds[name].form == "cols" else self.at(name).at[rows, columns]
        )

    def touch(self, q0: Any, k0: Any, queries: int, keys: int, known: Any = ()) -> None:
        """Bring what depends on both query and key, and is not known, closer: ahead of those who load it."""
        for name, kind in self.kinds.items():
            if kind.form == "tile" and name not in known:
                intrinsics.touch_numbers(self.at(name), q0, k0, queries, keys)

    def numbers(self, name: str, first: Any, count: int, turned: bool) -> jax.Array:
        """Load a tile of a "tile" operand that begins at column ``first``; turned if rows are keys."""
        return intrinsics.load_numbers(self.at(name), self.start, first, count, turned)

    def tile(
        self,
        names: Any,
        view: Any,
        rows: dict[str, jax.Array],
        cols: dict[str, Any],
        slot: Any,
        first: Any,
        columns: jax.Array,
    ) -> dict[str, Any]:
        """Return operands for the tile that begins at column ``first``: numbers, or arrays like it.

        Args:
          names: of the operands.
          view: the kernel's `walk.View`.
          rows: what `rows` returned, and tiles that were loaded before, by name.
          cols: the buffers of "cols" and "staged" operands, in shared memory.
          slot: which stage of them holds the tile.
          first: position of the first column.
          columns: positions of the columns ``[64, columns]``.
        """
        values = self.scalars(names)
        for name in names:
            kind = self.kinds[name]
            if kind.form == "rows":
                x = lax.broadcast_in_dim(rows[name], columns.shape, [0])
            elif kind.form == "cols":
                x = plgpu.load(cols[name].at[slot], layout=WGMMA.reduce(0), optimized=False)
                x = lax.broadcast_in_dim(x, columns.shape, [1])
            elif kind.form == "bits":
                words = self._tile_of_words(name, kind, first, columns.shape)
                x = (words >> lax.rem(columns, jnp.int32(WORD)).astype(jnp.uint32)) & jnp.uint32(1)
            elif kind.form == "tile":
                load = self.numbers
                x = rows[name] if name in rows else load(name, first, columns.shape[1], view.by_key)
            elif kind.form == "staged":
                ref, own = cols[name], pl.ds(self.offset, ROWS)
                tile = ref.at[slot if ref.shape[0] > 1 else 0]
                x = plgpu.load(tile.at[:, own].T if view.by_key else tile.at[own], layout=WGMMA)
                x = intrinsics.widen(x)
            elif kind.form == "diagonal":
                queries = view.columns if view.by_key else view.rows
                x = intrinsics.load_diagonals(
                    self.at(name), self.start, first, columns.shape[1], queries, view.by_key
                )
            else:
                continue
            values[name] = x != 0 if kind.boolean else x
        return values

    def line(
        self, names: Any, cols: dict[str, Any], slot: Any, start: int, k0: Any, q: Any
    ) -> dict[str, Any]:
        """Return operands for query ``q`` and the 64 keys from ``k0`` on: numbers, or vectors of 64.

        Of a kernel whose rows are queries.

        Args:
          names: of the operands.
          cols: the buffers of "cols" operands, in shared memory.
          slot: which stage of them holds the tile.
          start: the first key's place in the tile.
          k0: its position.
          q: the query.
        """
        layout = WGMMA.reduce(1)
        values = self.scalars(names)
        for name in names:
            kind = self.kinds[name]
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
    problem = plan.problem
    columns = _columns(plan, first, count)
    if problem.mask is None and not plan.view.by_key:
        return columns < problem.key_length
    position = _position(plan, rows, columns)
    k = position[3]
    if problem.mask is None:
        return k < problem.key_length
    operands = rows.reader.tile(problem.mask.operands(), plan.view, rows.values, cols, slot, first, columns)
    result = visible(problem.mask, position, operands, WGMMA)
    return result & (k < problem.key_length) if plan.ragged else result


def changed(plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, s: jax.Array) -> jax.Array:
    """Return the logits that the scores make of ``s``, 64 rows by columns from ``first`` on."""
    scores, (position, operands) = plan.problem.scores, _of_scores(plan, rows, cols, slot, first, s.shape[1])
    apply = lowered(lambda s, position, operands: scores.apply(s, position, operands))
    return _like(apply(s, position, operands), s)


def changed_with_slope(
    plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, s: jax.Array, slope: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return what `changed` does, and its slope by ``s`` times the one before it; None stands for 1."""
    if plan.problem.scores.additive:
        return changed(plan, rows, cols, slot, first, s), slope
    scores, (position, operands) = plan.problem.scores, _of_scores(plan, rows, cols, slot, first, s.shape[1])

    def apply(s, position, operands):
        new, pull = jax.vjp(lambda s: scores.apply(s, position, operands), s)
        return new, pull(jnp.ones_like(new))[0]

    new, own = (_like(x, s) for x in lowered(apply)(s, position, operands))
    return new, own if slope is None else slope * own


def added(plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, count: int) -> jax.Array:
    """Return what the scores add to logits, likewise; they do nothing else."""
    scores, (position, operands) = plan.problem.scores, _of_scores(plan, rows, cols, slot, first, count)
    add = lowered(lambda position, operands: scores.added(position, operands, jnp.float32))
    return _like(add(position, operands), position[2])


def dropout_words(
    plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the words that `intrinsics.drop` takes for a tile."""
    kinds, scalars = plan.kinds, rows.reader.scalars(packing.WORDS)

    def word(name):
        if kinds[name].form == "rows":
            return rows.values[name]
        if kinds[name].form == "cols":
            return plgpu.load(cols[name].at[slot], layout=WGMMA.reduce(0), optimized=False)
        # One query, or one key, for which a vector has but one number.
        by_row = (name == packing.COLUMN) == plan.view.by_key
        size, layout = (ROWS, WGMMA.reduce(1)) if by_row else (count, WGMMA.reduce(0))
        return plgpu.layout_cast(lax.broadcast_in_dim(scalars[name], (size,), []), layout)

    return word(packing.COLUMN), word(packing.ROW_A), word(packing.ROW_B)


def pull_operand(
    plan: Any, rows: Rows, cols: dict[str, Any], slot: Any, first: Any, name: str, s: Any, ds: jax.Array
) -> jax.Array:
    """Take the gradient of logits, ``ds``, to one operand of the scores, place by place.

    ``s`` are what the scores change, None where they only add.
    """
    scores, (position, operands) = plan.problem.scores, _of_scores(plan, rows, cols, slot, first, ds.shape[1])

    def pull(s, ds, position, operands):
        def apply(x):
            own = operands | {name: x}
            new = scores.added(position, own, jnp.float32) if s is None else scores.apply(s, position, own)
            return new if new.shape == ds.shape else jnp.broadcast_to(new, ds.shape)

        return jax.vjp(apply, operands[name])[1](ds)[0]

    operands[name] = _like(operands[name], ds)
    return _like(lowered(pull)(s, ds, position, operands), ds)


def _of_scores(plan: Any, rows: Rows, cols: Any, slot: Any, first: Any, count: int) -> tuple[Any, Any]:
    """Return ``(position, operands)`` of a tile for the scores."""
    columns = _columns(plan, first, count)
    names = [SCORES + name for name in plan.problem.scores.operands()]
    operands = rows.reader.tile(names, plan.view, rows.values, cols, slot, first, columns)
    return _position(plan, rows, columns), {n.removeprefix(SCORES): x for n, x in operands.items()}


def _columns(plan: Any, first: Any, count: int) -> jax.Array:
    """Return the positions of a tile's columns, ``[64, count]``."""
    return lax.broadcast_in_dim(_positions(plan, count, 1) + first, (ROWS, count), [1])


def _position(plan: Any, rows: Rows, columns: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Return b, h, q and k of a tile; the former two are numbers."""
    lines = lax.broadcast_in_dim(_positions(plan, ROWS, 0) + rows.reader.start, columns.shape, [0])
    b = lax.rem(rows.reader.b, jnp.int32(plan.problem.batch_period))
    return b, rows.reader.h, *((columns, lines) if plan.view.by_key else (lines, columns))


def _positions(plan: Any, count: int, axis: int) -> jax.Array:
    if plan.view.by_key:
        return intrinsics.positions(count, axis)
    # Behind a barrier: the loop would otherwise keep these positions in registers, two for each logit.
    layout = WGMMA.reduce(1 - axis)
    return lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout))


def visible(mask: Mask, position: tuple[Any, ...], operands: dict[str, Any], layout: Any) -> jax.Array:
    """Evaluate a mask at ``(b, h, q, k)``: b and h scalars, q and k arrays of one shape and layout."""
    q = position[2]
    seen = lowered(lambda position, operands: mask.element(*position, **operands))(position, operands)
    return _like(seen, q, layout)


def _like(x: Any, like: jax.Array, layout: Any = WGMMA) -> jax.Array:
    """Give a value the shape of another, and a layout."""
    x = jnp.asarray(x)
    if x.ndim > like.ndim:
        x = jnp.squeeze(x, tuple(range(x.ndim - like.ndim)))
    if x.ndim == 0:
        x = lax.broadcast_in_dim(x, like.shape, [])
    elif x.shape != like.shape:
        x = jnp.broadcast_to(x, like.shape)
    return plgpu.layout_cast(x, layout)


def lowered(function: Callable) -> Callable:
    """Make a function that does the same by what Mosaic GPU lowers (jax 0.11.2, 0.12.0).

    It lowers ``not`` through a conversion to bool, which it does not have for vectors: here it is a
    comparison with True. It does not have the addition that derivatives are summed by, nor the reshapes to
    the same shape that they leave under a mesh. Its tanh is the hardware's, good to 5e-4: here it is another.
    """

    def run(*args):
        flat, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*flat)
        results = _evaluate(closed.jaxpr, closed.consts, flat)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


_CALLS = "jit", "pjit", "custom_jvp_call"


def _evaluate(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda x: x.val if isinstance(x, jex.core.Literal) else values[x]
    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive is lax.not_p and equation.invars[0].aval.dtype == jnp.bool_:
            outputs = [inputs[0] != np.bool_(True)]
        elif equation.primitive is jex.core.primitives.add_jaxvals_p:
            outputs = [inputs[0] + inputs[1]]
        elif equation.primitive is lax.reshape_p and equation.outvars[0].aval.shape == inputs[0].shape:
            outputs = inputs
        elif equation.primitive is lax.tanh_p:
            outputs = [logits.tanh(*inputs)]
        elif isinstance(inner, jex.core.ClosedJaxpr) and equation.primitive.name in _CALLS:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]

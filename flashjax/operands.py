"""Functions of four global indices, and the arrays that they read: what masks and scores have in common.

Such a function is plain jnp on broadcastable arrays, so that the same lines run in a kernel on one tile and
in the oracle on everything. Its indices are batch row, query head, query position and key position. What
it reads besides them are its declared operands, arrays tagged with the axes they are indexed by: ``"b"``,
``"h"``, ``"q"``, ``"k"``, or ``"r"`` for the relative position ``k - q``. From the tag alone follows which
part of the array a tile needs.

`Indexed.resolve` fixes such a function to the sizes of one call: arrays get four dimensions ``[b, h, q, k]``
(each size 1 or full), or ``[b, h, 1, r]``. Only what is resolved reaches a backend.

An int field (an offset, a window size) is part of the program; an array in its place is data, so that
changing it costs no new trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flashjax import problem as checks

LIMIT = 2**30  # positions and offsets are clipped to +-2^30, so that their sums stay in int32


class Operand(NamedTuple):
    """An array that a mask or a score function reads, and the axes it is indexed by.

    Attributes:
      array: one dimension per letter of ``axes``, each of size 1 or of the full axis.
      axes: letters of ``"bhqk"`` in this order, for instance ``"bk"`` for one value per row and key. In a
        score function also ``"r"`` in the place of q and k: one value per relative position, ``T + S - 1`` of
        them, that of query i and key j at ``j - i + T - 1``.
      block: how many queries and how many keys share one entry; in a mask only.
    """

    array: Any
    axes: str
    block: tuple[int, int] = (1, 1)

    @property
    def relative(self) -> bool:
        """Whether it is indexed by the relative position."""
        return self.axes.endswith("r")


class Sizes(NamedTuple):
    """What is resolved against: B, N, T, S and the lengths, where given."""

    batch: int
    heads: int
    query_length: int
    key_length: int
    query_lengths: Any = None
    key_lengths: Any = None


# ---- pytree and value semantics --------------------------------------------------------------------


def _is_static(value: Any) -> bool:
    """Whether a field is part of the program; everything else is data."""
    if isinstance(value, Indexed):
        return False
    if isinstance(value, tuple):
        return all(isinstance(x, int | str) for x in value)
    return value is None or isinstance(value, int | str) or callable(value)


def _flatten(x: Indexed) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    names = [f.name for f in dataclasses.fields(x)]
    static = tuple((n, getattr(x, n)) for n in names if n not in x._dynamic)
    return tuple(getattr(x, n) for n in x._dynamic), (x._dynamic, static)


def _flatten_with_keys(x: Indexed) -> tuple[Any, Any]:
    children, aux = _flatten(x)
    keys = (jax.tree_util.GetAttrKey(name) for name in x._dynamic)
    return tuple(zip(keys, children, strict=True)), aux


def _unflattener(cls: type) -> Callable:
    def unflatten(aux: tuple[Any, ...], children: tuple[Any, ...]) -> Indexed:
        # No checks: JAX rebuilds pytrees around axis numbers, shapes and other things than arrays.
        dynamic, static = aux
        new = object.__new__(cls)
        new._set(_dynamic=dynamic, **dict(static), **dict(zip(dynamic, children, strict=True)))
        return new

    return unflatten


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    arrays = (jax.Array, np.ndarray)
    if isinstance(a, arrays) and isinstance(b, arrays):
        if checks.is_traced(a) or checks.is_traced(b):
            return False
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, arrays) or isinstance(b, arrays):
        return False
    return bool(a == b)


def _hashable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_hashable(x) for x in value)
    if isinstance(value, jax.Array | np.ndarray):
        return value.shape, str(value.dtype)
    return value


# ---- the bases -----------------------------------------------------------------------------------


class Indexed:
    """Base of all masks and scores: a frozen pytree that compares and hashes by value."""

    _axes: dict[str, str] = {}  # noqa: RUF012 - constant, overridden per class
    _dynamic: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        # One frozen value class each; equality and hash are the base's, which know about arrays.
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflattener(cls), _flatten)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _freeze(self, **values: Any) -> None:
        """Store checked fields and note which of them are data."""
        self._set(**values)
        names = [f.name for f in dataclasses.fields(self)]
        self._set(_dynamic=tuple(n for n in names if not _is_static(getattr(self, n))))

    def operands(self) -> dict[str, Operand]:
        """Return the arrays that this reads, by name, in the order of its pytree leaves."""
        return {name: Operand(getattr(self, name), self._axes[name]) for name in self._dynamic}

    def resolve(self, sizes: Sizes) -> Any:
        """Fix this to the sizes of a call; check and reshape its arrays to four dimensions."""
        values = {}
        for name, axes in self._axes.items():
            # Lengths, offsets and window sizes are positions.
            if axes == "b" and isinstance(getattr(self, name), int):
                values[name] = max(-LIMIT, min(LIMIT, getattr(self, name)))
        for name, operand in self.operands().items():
            values[name] = expand(self._label(name), operand, sizes)
            if operand.axes == "b":
                values[name] = as_position(values[name])
        return self._replace(**values)

    def _label(self, name: str) -> str:
        """Name an array in an error."""
        return f"{type(self).__name__}.{name}"

    def _replace(self, **values: Any) -> Any:
        new = object.__new__(type(self))
        new._set(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        new._freeze(**values)
        return new

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(x, y) for x, y in zip(self._compared(), other._compared(), strict=True))

    def __hash__(self) -> int:
        return hash((type(self), tuple(_hashable(v) for v in self._compared())))

    def _compared(self) -> list[Any]:
        return [getattr(self, f.name) for f in dataclasses.fields(self) if f.compare]


class Composite:
    """Mixed into what is made of parts, which are its fields: their operands, under names with a prefix."""

    def parts(self) -> dict[str, Any]:
        """Return the parts by name."""
        return {name: getattr(self, name) for name in self._dynamic}

    def operands(self) -> dict[str, Operand]:
        return {
            f"{prefix}.{name}": operand
            for prefix, part in self.parts().items()
            for name, operand in part.operands().items()
        }

    def own(self, prefix: str, operands: dict[str, Any]) -> dict[str, Any]:
        """Return a part's own among the operands, under the part's own names."""
        return {n.split(".", 1)[1]: x for n, x in operands.items() if n.startswith(f"{prefix}.")}

    def resolve(self, sizes: Sizes) -> Any:
        return self._replace(**{name: part.resolve(sizes) for name, part in self.parts().items()})


class Aligned:
    """Mixed into what counts from a shifted query position ``q + offset``.

    Fields: ``offset`` and ``align``, which is ``"start"`` or ``"end"``.
    """

    def resolve(self, sizes: Sizes) -> Any:
        if self.align == "end":
            keys = sizes.key_length if sizes.key_lengths is None else sizes.key_lengths
            queries = sizes.query_length if sizes.query_lengths is None else sizes.query_lengths
            if not isinstance(keys, int) or not isinstance(queries, int):
                keys, queries = (as_position(jnp.asarray(x)) for x in (keys, queries))
            self = self._replace(offset=keys - queries, align="start")
        return super().resolve(sizes)


class Declared:
    """Mixed into what is made of a user's function and the operands that are declared with it.

    Fields: ``names``, ``axes``, ``blocks`` and ``arrays`` of the operands.
    """

    def _declare(self, operands: dict[str, Operand], relative: bool = False, **fields: Any) -> None:
        checked = [checks.check_operand(name, operand, relative) for name, operand in operands.items()]
        columns = {n: tuple(x[i] for x in checked) for i, n in enumerate(("arrays", "axes", "blocks"))}
        self._set(names=tuple(operands), **columns, **fields, _dynamic=("arrays",))

    def operands(self) -> dict[str, Operand]:
        parts = zip(self.names, self.arrays, self.axes, self.blocks, strict=True)
        return {name: Operand(*rest) for name, *rest in parts}

    def resolve(self, sizes: Sizes) -> Any:
        operands = self.operands()
        arrays = tuple(expand(f"operand {n}", o, sizes) for n, o in operands.items())
        axes = tuple("bhr" if o.relative else "bhqk" for o in operands.values())
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        new = object.__new__(type(self))
        new._set(**fields | {"arrays": arrays, "axes": axes}, _dynamic=("arrays",))
        return new


# ---- arrays --------------------------------------------------------------------------------------


def indices(*sizes: int) -> list[jax.Array]:
    """Return one int32 index array per axis, each broadcastable to ``sizes``: as `numpy.ix_` would."""
    count = len(sizes)
    return [
        jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(count)])
        for axis, n in enumerate(sizes)
    ]


def whole(operand: Operand, q: jax.Array, k: jax.Array) -> jax.Array:
    """Give a resolved operand one entry per query and key position, ready to broadcast."""
    array = operand.array
    if operand.relative:
        return diagonals(array, q.size, k.size)
    for axis, position, block in ((2, q, operand.block[0]), (3, k, operand.block[1])):
        if block > 1 and array.shape[axis] > 1:
            array = jnp.take(array, position.reshape(-1) // block, axis=axis)
    return array


def diagonals(x: jax.Array, queries: int, keys: int) -> jax.Array:
    """Spread values by relative position, ``[..., 1, queries + keys - 1]``, to ``[..., queries, keys]``."""
    q, k = indices(queries, keys)
    return x[..., 0, :][..., k - q + (queries - 1)]


def expand(name: str, operand: Operand, sizes: Sizes) -> jax.Array:
    """Check an operand against the call and give it the four dimensions [b, h, q, k] or [b, h, 1, r]."""
    array, axes, block = operand
    tiled = (-(-sizes.query_length // block[0]), -(-sizes.key_length // block[1]))
    full = dict(zip("bhqk", (sizes.batch, sizes.heads, *tiled), strict=True))
    full["r"] = max(sizes.query_length + sizes.key_length - 1, 0)
    checks.check_operand_shape(name, array.shape, tuple(full[a] for a in axes), axes, block)
    given = dict(zip(axes[::-1], array.shape[::-1], strict=False))
    return array.reshape([given.get(a, 1) for a in ("bh1r" if operand.relative else "bhqk")])


def as_position(x: jax.Array) -> jax.Array:
    """Convert to int32, clipped so that the sum of two positions does not overflow."""
    info = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(info.min, -LIMIT), min(info.max, LIMIT)).astype(jnp.int32)

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

from flashjax.backends.hopper.config import ROWS
from flashjax.backends.hopper.packing import WORD, Kind
from flashjax.masks import Mask

WGMMA = plgpu.Layout.WGMMA


class Reader(NamedTuple):
    """Reads the packed operands of one query tile in the kernel.

    Attributes:
      kinds: by operand name.
      refs: by operand name, global memory.
      b, h: batch row and query head.
      q0: first query of the warpgroup's tile.
    """

    kinds: dict[str, Kind]
    refs: dict[str, Any]
    b: Any
    h: Any
    q0: Any

    def at(self, name: str) -> Any:
        """Return an operand at this batch row and head."""
        ref = self.refs[name]
        b, h = ref.shape[:2]
        return ref.at[lax.rem(self.b, jnp.int32(b)), self.h if h > 1 else 0]

    def scalars(self) -> dict[str, Any]:
        """Read what depends on neither query nor key."""
        return {n: self._number(n, self.at(n)[...]) for n, k in self.kinds.items() if k.form == "scalar"}

    def rows(self) -> dict[str, jax.Array]:
        """Read what depends on the query alone: vectors of 64."""
        return {
            n: plgpu.load(self.at(n).at[pl.ds(self.q0, ROWS)], layout=WGMMA.reduce(1), optimized=False)
            for n, k in self.kinds.items()
            if k.form == "rows"
        }

    def tile(
        self, rows: dict[str, jax.Array], cols: dict[str, Any], slot: Any, k0: Any, k: jax.Array
    ) -> dict[str, Any]:
        """Return every operand for the tile that begins at key ``k0``: numbers, or arrays like ``k``.

        Args:
          rows: what `rows` returned.
          cols: the buffers of "cols" operands, in shared memory.
          slot: which stage of them holds the tile.
          k0: first key.
          k: key positions ``[64, keys]``.
        """
        values = self.scalars()
        for name, kind in self.kinds.items():
            if kind.form == "rows":
                x = lax.broadcast_in_dim(rows[name], k.shape, [0])
            elif kind.form == "cols":
                x = plgpu.load(cols[name].at[slot], layout=WGMMA.reduce(0), optimized=False)
                x = lax.broadcast_in_dim(x, k.shape, [1])
            elif kind.form == "bits":
                words = self._tile_of_words(name, kind, k0, k.shape)
                x = (words >> lax.rem(k, jnp.int32(WORD)).astype(jnp.uint32)) & jnp.uint32(1)
            else:
                continue
            values[name] = x != 0 if kind.boolean else x
        return values

    def _tile_of_words(self, name: str, kind: Kind, k0: Any, shape: tuple[int, int]) -> jax.Array:
        first = lax.div(k0, jnp.int32(WORD))
        columns = [
            lax.broadcast_in_dim(self._word(name, kind, first + i), (ROWS, WORD), [0])
            for i in range(shape[1] // WORD)
        ]
        return lax.concatenate(columns, 1) if len(columns) > 1 else columns[0]

    def _word(self, name: str, kind: Kind, word: Any) -> jax.Array:
        ref = self.at(name).at[word]
        if kind.entry == 1:
            return plgpu.load(ref.at[pl.ds(self.q0, ROWS)], layout=WGMMA.reduce(1), optimized=False)
        # Rows of blocks: the few that this tile meets, each a scalar, laid out by comparison.
        first = lax.div(self.q0, jnp.int32(kind.entry))
        count = 1 if kind.entry % ROWS == 0 else (ROWS - 2) // kind.entry + 2
        last = ref.shape[-1] - 1
        q = self.q0 + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
        value = lax.broadcast_in_dim(ref[jnp.minimum(first, last)], (ROWS,), [])
        for i in range(1, count):
            here = lax.broadcast_in_dim(ref[jnp.minimum(first + i, last)], (ROWS,), [])
            value = jnp.where(q >= (first + i) * kind.entry, here, value)
        return value

    def _number(self, name: str, x: Any) -> Any:
        return x != 0 if self.kinds[name].boolean else x


def visible(mask: Mask, b: Any, h: Any, q: jax.Array, k: jax.Array, operands: dict[str, Any]) -> jax.Array:
    """Evaluate a mask on positions q and k, arrays of one shape; b and h are scalars."""
    seen = without_not(lambda *args: mask.element(*args[:4], **args[4]))(b, h, q, k, operands)
    if jnp.size(seen) == 1:
        seen = jnp.reshape(seen, ())
    return jnp.broadcast_to(seen, q.shape)


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

"""What the kernels of the backward pass share: the probabilities of a tile anew, and what goes with them.

    P = exp(S - lse)        dP = dO Vᵀ        dS = P ∘ (dP - (delta - dlse))        delta = rowsum(dO ∘ O)

Where logits are a constant times the products, the accumulator of S starts at ``-lse / scale``, and that of
dP at ``dlse - delta`` always: neither then takes a register beside the products.

`backward_start` computes these. A query beyond T, and one that sees no key, has ``lse = inf``, so that its
probabilities are 0 whatever the mask says.

Source: Dao et al., "FlashAttention" (2022), appendix B.2, algorithm 4; Dao, "FlashAttention-2" (2023),
algorithm 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper import hidden, logits, reading, transfers, walk
from flashjax.backends.hopper.logits import LOG2E
from flashjax.problem import Problem

# Of the barriers ``taken``, the one at which the compute warpgroups wait for one another. Before it are those
# of two tiles of dS, and, by roles, of two of P.
MET = 4
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def traits(problem: Problem, by_key: bool) -> configs.BackwardTraits:
    """Return what decides on the config of a kernel that is by key, or by query."""
    return configs.BackwardTraits(
        scans=walk.scans(problem, by_key),
        clears_keys=hidden.possible(problem),
        clears_queries=hidden.dead_queries_possible(problem),
        pieces=transfers.in_pieces(problem),
    )


class Place(NamedTuple):
    """A tile as the loader hands it on: what the others need of it, found where they need it.

    Attributes:
      plan: of the kernel.
      number: of the query tile among those of all heads.
      first: whether it is the first of an item.
      partial: whether the mask must be evaluated.
    """

    plan: Any
    number: Any
    first: Any
    partial: Any

    @property
    def q0(self) -> Any:
        """First query."""
        return lax.rem(self.number, jnp.int32(self.plan.view.count_columns)) * self.plan.config.block_q

    @property
    def head(self) -> tuple[Any, Any]:
        """Batch row and query head."""
        head = lax.div(self.number, jnp.int32(self.plan.view.count_columns))
        heads = jnp.int32(self.plan.problem.heads)
        return lax.div(head, heads), lax.rem(head, heads)


def write_place(plan: Any, shared: Any, n: Any, b: Any, h: Any, first: Any, tile: Any) -> None:
    """Hand the n-th tile that a block visits on; it can be read until the tile after the next is released."""
    number = (b * plan.problem.heads + h) * plan.view.count_columns + tile.index
    shared.tile[_slot(shared, n)] = 4 * number + jnp.where(first, 2, 0) + jnp.where(tile.partial, 1, 0)


def read_place(plan: Any, shared: Any, n: Any) -> Place:
    """Return the n-th tile that a block visits, as it was handed on."""
    number = shared.tile[_slot(shared, n)]
    bit = lambda i: (number & i) != 0
    return Place(plan, lax.shift_right_logical(number, jnp.int32(2)), bit(2), bit(1))


def _slot(shared: Any, n: Any) -> Any:
    return lax.rem(n, jnp.int32(shared.tile.shape[0]))


def along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """Load a number for each column, and repeat it down the rows."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=COLUMNS), shape, [1])


def weights(
    plan: Any, scales: Any, b: Callable, s: jax.Array, lse: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the probabilities of a tile, before the mask, and the slope of the softcap.

    Args:
      plan, scales: of the kernel, and of the call.
      b: ``b()`` is the batch row.
      s: what the accumulator of the products holds; it started at `starts` where `logits.folds`.
      lse: ``lse()`` is lse in base 2 like ``s``, where it did not.
    """
    problem = plan.problem
    if logits.folds(problem):
        return jnp.exp2(s * (problem.default_scale * LOG2E)), None
    s, slope = logits.logits(problem, scales, b, s)
    return jnp.exp2(s * LOG2E - lse()), slope


def hide(plan: Any, cols: Any, slot: Any, partial: Any, column: Any, rows: Any, p: jax.Array) -> jax.Array:
    """Zero the probabilities of a tile that the mask hides.

    Args:
      plan, cols, slot: of the kernel, the mask's vectors over columns, and the stage that holds the tile's.
      partial: whether the mask must be evaluated.
      column: ``column()`` is the position of the first column.
      rows: ``rows()`` are the tile's `reading.Rows`.
      p: probabilities ``[64, columns]``.
    """
    if not plan.masked:
        return p

    def hidden(p):
        return jnp.where(reading.seen(plan, rows(), cols, slot, column(), p.shape[1]), p, 0.0)

    return lax.cond(partial, hidden, lambda p: p, p)

"""What the kernels of the backward pass share: the probabilities of a tile anew, and what goes with them.

    P = exp(S - lse)        dP = dO Vᵀ        dS = P ∘ (dP - (delta - dlse))        delta = rowsum(dO ∘ O)

With dropout dP is zero where it drops, and 1 / (1 - rate) times as large elsewhere.

Where logits are a constant times the products, the accumulator of S starts at ``-lse / scale``, or, with what
scores add, at ``(added - lse) / scale``; and that of dP at ``dlse - delta`` always: none of these then takes
a register beside the products.

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

from flashjax import dropout
from flashjax.backends.hopper import config as configs
from flashjax.backends.hopper import hidden, intrinsics, logits, reading, transfers, walk
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


def missing(
    changes: jax.Array, begin: jax.Array, dlse: jax.Array | None, weight: jax.Array | float
) -> jax.Array:
    """Return what the rounding of O in delta takes from each query's dS, per unit of weight.

    dS of a query sums to ``(1 - weight) dlse + weight delta``, where ``weight`` is the sink's: 0 without one.

    Args:
      changes: the sum that a kernel made of dS, ``[B, N, T]``.
      begin: what dP started at: ``dlse - delta``, likewise.
      dlse: cotangent of lse, likewise; None means 0.
      weight: likewise, or 0.
    """
    dlse = jnp.zeros_like(changes) if dlse is None else dlse
    return (1 - weight) * dlse + weight * (dlse - begin) - changes


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


class Tile(NamedTuple):
    """Where a tile of scores is, and what the mask and the scores read there.

    Attributes:
      plan: of the kernel.
      cols, slot: the vectors over columns, and the stage that holds the tile's.
      column: ``column()`` is the position of the first column.
      rows: ``rows()`` are the tile's `reading.Rows`.
    """

    plan: Any
    cols: Any
    slot: Any
    column: Callable[[], Any]
    rows: Callable[[], reading.Rows]

    def ask(self, function: Callable, *args: Any) -> Any:
        """Call a function of `reading` that takes such a place before its other arguments."""
        return function(self.plan, self.rows(), self.cols, self.slot, self.column(), *args)


def begin(acc: Any, tile: Tile, lse: Callable[[], jax.Array]) -> None:
    """Let the accumulator of S start at what takes no register there; ``lse()`` is `starts`, like it."""
    problem = tile.plan.problem
    if logits.folds(problem):
        acc[...] = lse()
    elif logits.adds(problem):
        # The difference first: a bias may be as large as a float can be, and lse with it.
        acc[...] = (tile.ask(reading.added, acc.shape[1]) - lse()) * (1 / problem.default_scale)


def begin_slopes(acc: Any, plan: Any, delta: Callable[[], jax.Array]) -> None:
    """Let the accumulator of dP start at ``delta()``, where nothing comes between the two."""
    acc[...] = delta() if plan.problem.dropout_rate == 0 else jnp.zeros(acc.shape, jnp.float32)


def slopes(tile: Tile, dp: jax.Array, delta: Callable[[], jax.Array]) -> jax.Array:
    """Return ``1 - rate`` times ``dP - (delta - dlse)``, of what the accumulator holds that `begin_slopes`
    began."""
    rate = tile.plan.problem.dropout_rate
    return dp if rate == 0 else dropped(tile, dp) + delta() * (1 - rate)


def restore(problem: Problem, x: jax.Array) -> jax.Array:
    """Divide by ``1 - rate``."""
    return x if problem.dropout_rate == 0 else x * (1 / (1 - problem.dropout_rate))


def dropped(tile: Tile, x: jax.Array) -> jax.Array:
    """Zero what dropout drops of a tile."""
    rate = tile.plan.problem.dropout_rate
    if rate == 0:
        return x
    words = tile.ask(reading.dropout_words, x.shape[1])
    return intrinsics.drop(x, words, dropout.threshold(rate), tile.plan.view.by_key)


def weights(
    scales: Any, s: jax.Array, tile: Tile, lse: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Return the probabilities of a tile, before the mask, and the slope of its logits, None for 1.

    Args:
      scales: of the call.
      s: what the accumulator of the products holds; see `begin`.
      tile: where it is.
      lse: ``lse()`` is what it did not start at.
    """
    problem = tile.plan.problem
    if logits.folds(problem) or logits.adds(problem):
        return jnp.exp2(s * (problem.default_scale * LOG2E)), None
    s, slope = logits.logits(problem, scales, lambda: tile.rows().reader.b, s)
    if problem.scores is None:
        return jnp.exp2(s * LOG2E - lse()), slope
    s, slope = tile.ask(reading.changed_with_slope, s, slope)
    return jnp.exp2((s - lse()) * LOG2E), slope


def by_operand(scales: Any, tile: Tile, name: str, s: jax.Array, ds: jax.Array) -> jax.Array:
    """Take the gradient of the logits to an operand of the scores, place by place.

    Args:
      scales, tile: as in `weights`.
      name: of the operand.
      s: what the accumulator of the products holds.
      ds: gradient of the logits.
    """
    problem = tile.plan.problem
    if problem.scores.additive:
        return tile.ask(reading.pull_operand, name, None, ds)
    s, _ = logits.logits(problem, scales, lambda: tile.rows().reader.b, s)
    return tile.ask(reading.pull_operand, name, s, ds)


def hide(tile: Tile, partial: Any, p: jax.Array) -> jax.Array:
    """Zero the probabilities of a tile that the mask hides, which is asked where ``partial``."""
    if not tile.plan.masked:
        return p

    def hidden(p):
        return jnp.where(tile.ask(reading.seen, p.shape[1]), p, 0.0)

    return lax.cond(partial, hidden, lambda p: p, p)

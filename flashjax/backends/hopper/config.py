"""Speed knobs of the Hopper kernels."""

from typing import NamedTuple

import jax.numpy as jnp

from flashjax.masks import Causal
from flashjax.problem import Problem

WARPGROUP = 128  # threads
ROWS = 64  # queries of one warpgroup: the height of a wgmma


class Config(NamedTuple):
    """How the forward kernel is cut. Nothing here changes a result beyond rounding.

    Attributes:
      block_k: keys of a tile.
      warpgroups: compute warpgroups of a block, 64 queries each.
      stages: tiles of K and of V in flight.
      registers: of a thread that computes, and of one that loads.
      wait_early: wait for the next tile of K before the wait for P·V, which keeps the compiler from
        moving that wait above the exponentials.
      schedule: how blocks share the query tiles: "blocks", "static" or "queue" (see `schedule`).
      sums_first: add up the row sums before the wait for P·V. The compiler puts them after it otherwise, or
        between the exponentials, as it finds best.
      ordered: let warpgroups issue their products in turn.
      staged: let the loader bring a bias by query and key into shared memory, where it lies well; stages are
        at most as many then.
    """

    block_k: int = 128
    warpgroups: int = 2
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    wait_early: bool = True
    schedule: str = "blocks"
    sums_first: bool = True
    ordered: bool = True
    staged: bool = True

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.warpgroups


def padded(dim: int) -> int:
    """Round a head dim up to what one swizzled row holds: 16, 32, or a multiple of 64."""
    return 16 if dim <= 16 else 32 if dim <= 32 else -(-dim // 64) * 64


class BackwardConfig(NamedTuple):
    """How the backward kernel is cut. Nothing here changes a result beyond rounding.

    Attributes:
      block_q: queries of a tile.
      block_k: keys of a block.
      roles: whether its warpgroups share out the work on a tile, or the keys (see `backward`).
      stages: tiles of Q and dO in flight.
      registers: of a thread that computes, and of one that loads.
      schedule: how blocks share the key tiles: "blocks", "static" or "queue" (see `schedule`).
      ordered: let warpgroups issue their first products in turn, a warpgroup when the one before has issued
        these ("early"), or has finished its softmax ("late"); or not ("").
      narrow: what is rounded to the dtype of the inputs before P and dP - delta are multiplied, which takes
        fewer registers: "weights" (P), "product" (both, and the product), or nothing ("").
      staged: as in `Config`, if there is room beside all stages, by keys for one tile.
    """

    block_q: int = 64
    block_k: int = 128
    roles: bool = False
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    schedule: str = "queue"
    ordered: str = ""
    narrow: str = ""
    staged: bool = True

    @property
    def warpgroups(self) -> int:
        """Compute warpgroups of a block."""
        return 2

    @property
    def ahead(self) -> bool:
        """Whether, by roles, the next tile's product is begun before this one's dV and dK."""
        return self.stages > 2  # with two, its loads would be waited for


class QueriesConfig(NamedTuple):
    """How the kernel that computes dQ alone is cut; fields as in `Config`."""

    block_k: int = 128
    warpgroups: int = 2
    stages: int = 2
    registers: tuple[int, int] = (240, 24)

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.warpgroups

    @property
    def schedule(self) -> str:
        """How blocks share the query tiles: one each."""
        return "blocks"


class ScoresConfig(NamedTuple):
    """How the kernel that computes the gradient of an operand of the scores is cut; fields as in `Config`."""

    warpgroups: int = 2
    stages: int = 2
    registers: tuple[int, int] = (216, 72)
    block_k: int = ROWS  # columns of a tile: as many as a warpgroup has rows

    @property
    def block_q(self) -> int:
        """Rows of a block."""
        return ROWS * self.warpgroups


class BackwardTraits(NamedTuple):
    """What of a call, beside its sizes, decides on a config of the backward pass.

    Attributes:
      scans: the loader looks for the visible tiles (see `walk`).
      clears_keys: K and V may hold what no query sees (see `hidden`).
      clears_queries: the loader looks for queries that see nothing.
      pieces: tiles move in pieces (see `transfers`).
    """

    scans: bool
    clears_keys: bool
    clears_queries: bool
    pieces: bool


class Traits(NamedTuple):
    """What of a call, beside its sizes, decides on a config.

    Attributes:
      scans: the loader looks for the visible tiles (see `walk`).
      looks: it looks through V for what is not finite (see `hidden`).
      pieces: tiles move in pieces (see `transfers`).
      adds_halves: all that comes between is added, of 16 bits, and can be staged (see `packing`).
    """

    scans: bool
    looks: bool
    pieces: bool
    adds_halves: bool

    @property
    def busy(self) -> bool:
        """Whether the loader does more than load whole tiles."""
        return self.looks or self.pieces


def choose(problem: Problem, traits: Traits) -> Config:
    """Return the config of a call.

    Each choice is the fastest of those that were measured and do not spill: `backends/README.md` has them
    all, and says which were not timed.
    """
    config = _fastest(problem, traits)
    if traits.busy:
        # A loader that does more than load spills with the registers of one that does not.
        config = config._replace(registers=BUSY_LOADER.get(config.registers, config.registers))
    return config


def choose_queries(problem: Problem, traits: BackwardTraits) -> QueriesConfig:
    """Return the config of the kernel that computes dQ alone; see `choose`."""
    widest = max(padded(problem.head_dim), padded(problem.value_dim))
    if widest > 128:
        return QueriesConfig(block_k=64, stages=1)
    # What needs more registers, of the threads that compute or of the loader, spills with tiles of 128 keys.
    if problem.bends or problem.scaled or (widest > 64 and (any(traits) or problem.scores is not None)):
        return QueriesConfig(block_k=64, registers=(224, 56))
    return QueriesConfig()


def choose_scores(problem: Problem, form: str) -> ScoresConfig:
    """Return the config of the kernel that computes the gradient of an operand of the scores."""
    columns = padded(problem.head_dim) + padded(problem.value_dim)
    if columns > 256:  # as much as shared memory holds
        return ScoresConfig(warpgroups=1, stages=1)
    return ScoresConfig(warpgroups=1) if form == "diagonal" and columns > 128 else ScoresConfig()


def choose_backward(problem: Problem, traits: BackwardTraits) -> BackwardConfig:
    """Return the config of the backward pass of a call; see `choose`."""
    widest = max(padded(problem.head_dim), padded(problem.value_dim))
    # By keys, slopes spill, and so does what is added beside a mask where all registers are taken.
    crowded = widest > 64 and problem.scores is not None
    if widest > 128 or problem.bends or crowded:
        columns = columns_by_roles(problem)
        # Tiles with more columns than the array move in pieces.
        pieces = traits.pieces or columns != (problem.head_dim, problem.value_dim)
        registers = (224, 56) if pieces else (240, 24)
        stages = 3 if sum(columns) <= 320 else 2  # as many as shared memory holds
        return BackwardConfig(block_k=64, roles=True, stages=stages, registers=registers)
    # In float16 dP would overflow where the cotangent is scaled up.
    narrow = "product" if problem.dtype == jnp.bfloat16 else "weights"
    drops = problem.dropout_rate > 0
    if widest > 64:  # needs all registers that a thread may have
        schedule = "queue" if traits.scans or drops or problem.key_length <= 4096 else "blocks"
        return BackwardConfig(narrow=narrow, ordered="late", schedule=schedule)
    busy = traits.scans or traits.clears_queries or traits.pieces
    if drops:  # with twice as many queries it spills
        return BackwardConfig(narrow=narrow, ordered="early")
    return BackwardConfig(block_q=128, narrow=narrow, registers=(232, 40) if busy else (240, 24))


def columns_by_roles(problem: Problem) -> tuple[int, int]:
    """Return the columns of q and k, and of v, in shared memory: by roles each warpgroup has 64 at least."""
    d, dv = padded(problem.head_dim), padded(problem.value_dim)
    return max(d, 128), max(dv, 128)


# Registers of a thread that computes and of one that loads: all that a block has, cut otherwise. Three
# compute warpgroups have none to give: with 152 their products are serialized.
BUSY_LOADER = {(240, 24): (224, 56)}


def _fastest(problem: Problem, traits: Traits) -> Config:
    d, dv = padded(problem.head_dim), padded(problem.value_dim)
    keys, plain = problem.key_length, problem.mask is None
    more = problem.scores is not None or problem.dropout_rate > 0  # than a plain call has registers for
    # The loads of a query tile must run under the end of the one before where it visits few key tiles; and
    # blocks must not share the query tiles by number where these differ.
    schedule = "queue" if traits.scans or (keys > 1024 and not plain) else "static"
    if max(d, dv) <= 128 and problem.bends:  # others spill
        return Config(ordered=False) if problem.scores is None else Config(block_k=64, ordered=False)
    if max(d, dv) <= 64:
        large = Config(warpgroups=3, registers=(160, 32))
        if max(d, dv) <= 32 and traits.adds_halves and not traits.scans:
            return large._replace(stages=2, schedule=schedule)
        if traits.scans or more:  # key tiles of 128 spill
            return large._replace(block_k=64, stages=4, schedule=schedule, sums_first=False)
        if keys <= 1024 or (keys <= 2048 and not plain):
            small = Config(block_k=64, warpgroups=4, stages=4, registers=(112, 32))
            return small._replace(schedule=schedule, sums_first=False)
        if not plain:
            return large._replace(stages=3, schedule=schedule, sums_first=False)
        return large._replace(stages=3, ordered=False) if keys > 4096 else large._replace(schedule=schedule)
    if max(d, dv) <= 128:
        if plain and keys >= 4096 and not traits.busy and not more:
            return Config(block_k=192)  # needs all registers that a thread may have
        ordered = plain or traits.scans or isinstance(problem.mask, Causal)
        return Config(schedule=schedule, ordered=ordered, sums_first=problem.dropout_rate == 0)
    if dv <= 128 and d <= 192:
        return Config()
    return Config(block_k=64, wait_early=not plain)

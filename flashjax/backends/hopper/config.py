"""Speed knobs of the Hopper kernels."""

from typing import NamedTuple

from flashjax.masks import Causal
from flashjax.problem import Problem

ROWS = 64  # queries of one warpgroup: the height of a wgmma


class Config(NamedTuple):
    """How the forward kernel is cut. Nothing here changes a result beyond rounding.

    Attributes:
      block_k: keys of a tile.
      warpgroups: compute warpgroups of a block, 64 queries each.
      stages: tiles of K and of V in flight.
      registers: of a thread that computes, and of one that loads.
      auto_barriers: whether the compiler puts a warpgroup barrier at each hazard that it suspects.
      wait_early: wait for the next tile of K before the wait for P·V, which keeps the compiler from
        moving that wait above the exponentials.
      persistent: let each block take query tiles until none is left, so that the next one's loads
        run under the end of this one.
    """

    block_k: int = 128
    warpgroups: int = 2
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    auto_barriers: bool = False
    wait_early: bool = True
    persistent: bool = False

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return ROWS * self.warpgroups


def padded(dim: int) -> int:
    """Round a head dim up to what one swizzled row holds: 16, 32, or a multiple of 64."""
    return 16 if dim <= 16 else 32 if dim <= 32 else -(-dim // 64) * 64


class Traits(NamedTuple):
    """What of a call, beside its sizes, decides on a config.

    Attributes:
      scans: the loader looks for the visible tiles (see `walk`).
      looks: it looks through V for what is not finite (see `hidden`).
      pieces: tiles move in pieces (see `transfers`).
      steady_keys: how many keys every query tile sees, None where they differ.
    """

    scans: bool
    looks: bool
    pieces: bool
    steady_keys: int | None

    @property
    def busy(self) -> bool:
        """Whether the loader does more than load whole tiles."""
        return self.looks or self.pieces


def choose(problem: Problem, traits: Traits) -> Config:
    """Return the config of a call.

    Each choice is the fastest of those that were measured: `backends/README.md` has them all.
    """
    config = _fastest(problem, traits)
    if traits.busy:
        # A loader that does more than load spills with the registers of one that does not.
        config = config._replace(registers=BUSY_LOADER.get(config.registers, config.registers))
    return config


# Registers of a thread that computes and of one that loads: all that a block has, cut otherwise. Three
# compute warpgroups have none to give: with 152 their products are serialized.
BUSY_LOADER = {(240, 24): (224, 56)}


def _fastest(problem: Problem, traits: Traits) -> Config:
    d, dv = padded(problem.head_dim), padded(problem.value_dim)
    keys, plain = problem.key_length, problem.mask is None
    # Where a query tile visits few key tiles, the loads of the next must run under its end. Blocks share
    # the query tiles evenly then, which is right where they are alike, or where there are very many.
    steady = traits.steady_keys is not None and traits.steady_keys <= 2048
    few = not traits.scans and (keys <= 1024 or steady)
    if max(d, dv) <= 64:
        if few and keys <= 1024 and plain:
            return Config(stages=3, persistent=True)
        if few and keys <= 1024:
            return Config(block_k=64, warpgroups=4, stages=4, registers=(112, 32), persistent=True)
        return Config(warpgroups=3, registers=(160, 32), persistent=few)
    if dv <= 128 and d <= 192:
        if few and d <= 128:
            return Config(persistent=True, auto_barriers=plain and keys > 1024)
        # Key tiles of 192 need all registers that a thread may have.
        roomy = d <= 128 and not traits.busy
        long = roomy and keys >= 4096 and (plain or isinstance(problem.mask, Causal))
        return Config(block_k=192 if long else 128)
    return Config(block_k=64, auto_barriers=True, wait_early=not plain)

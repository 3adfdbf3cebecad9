"""Speed knobs of the Hopper kernels, and what they cost in shared memory."""

from typing import NamedTuple

from flashjax.problem import Problem

SHARED_MEMORY = 232_448  # bytes a block may have on sm_90
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


def shared_memory(problem: Problem, config: Config) -> int:
    """Count the bytes of the large buffers: Q, O where it has its own, and the stages of K and V."""
    d, dv = padded(problem.head_dim), padded(problem.value_dim)
    numbers = config.block_q * d + config.stages * config.block_k * (d + dv)
    if own_output(problem, config):
        numbers += config.block_q * dv
    return 2 * numbers


def own_output(problem: Problem, config: Config) -> bool:
    """Whether O has a buffer of its own, rather than Q's."""
    return config.persistent or problem.value_dim != problem.head_dim


def choose(problem: Problem) -> Config:
    """Return the config of a call."""
    wide = max(padded(problem.head_dim), padded(problem.value_dim))
    if wide <= 64:
        return Config(warpgroups=3, registers=(160, 32))
    if wide <= 128:
        return Config()
    return Config(block_k=64, auto_barriers=True, wait_early=False)

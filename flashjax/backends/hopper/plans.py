"""What a kernel knows when it is traced: one answer to what `schedule` and `walk` ask of every kernel."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from flashjax.backends import hopper
from flashjax.backends.hopper import packing, schedule, walk
from flashjax.problem import Problem

SHARED_MEMORY = 232_448  # bytes that a block may have
BESIDE = 3072  # of these: barriers, and what a loader that looks at tiles needs to reduce over warps
ROUNDED = 1024  # to whose multiples the size of a buffer is rounded up


def fits(scratch: Any) -> bool:
    """Whether buffers fit into the shared memory of a block."""
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(scratch)]
    return sum(-(-size // ROUNDED) * ROUNDED for size in sizes) <= SHARED_MEMORY - BESIDE


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel whose blocks own query tiles and walk along the keys; others say what differs.

    Attributes:
      problem: of the call.
      traits: what decides on the config beside it, among that ``scans``.
      config: how the kernel is cut.
      kinds: how the mask's operands are stored, by name.
    """

    problem: Problem
    traits: Any
    config: Any
    kinds: dict[str, packing.Kind]

    @property
    def view(self) -> walk.View:
        problem, config = self.problem, self.config
        lengths = problem.query_length, problem.key_length
        return walk.View(False, *lengths, config.block_q, config.block_k)

    @property
    def work(self) -> schedule.Work:
        problem = self.problem
        return schedule.Work(problem.batch, problem.heads, self.view.count_rows, heads_first=True)

    @property
    def group(self) -> int:
        """Heads that a block walks along."""
        return 1

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        items = schedule.items(self.work)
        return items if self.config.schedule == "blocks" else min(items, hopper.multiprocessors())

    @property
    def queue(self) -> bool:
        """Whether blocks take items from a counter."""
        return self.config.schedule == "queue" and self.blocks < schedule.items(self.work)

    @property
    def takes_late(self) -> bool:
        """Whether a block takes the next item when it has loaded for this one."""
        return False

    @property
    def keeps_order(self) -> bool:
        """Whether the work reads what comes next again."""
        return False

    @property
    def tells_count(self) -> bool:
        """Whether the loader counts the tiles for all."""
        return self.traits.scans

    @property
    def orders(self) -> bool:
        """Whether the loader tells the others what comes next."""
        return self.tells_count or self.queue

    @property
    def ragged(self) -> bool:
        """Whether the last key tile reaches beyond S."""
        return self.problem.key_length % self.config.block_k != 0

    @property
    def masked(self) -> bool:
        """Whether any tile may need the mask."""
        return self.problem.mask is not None or self.ragged

"""Which block computes which query tile, and when.

Query tiles are numbered so that heads count fastest: neighbours read the same K and V from L2. Within a
batch row the last query tile comes first, so that causal work goes from heavy to light. Three ways to
share them out:

    blocks  a block for each. The hardware starts the next one when a block ends.
    static  a block for each multiprocessor, which takes every n-th of n blocks. The loads of a query tile
            run under the end of the one before.
    queue   likewise, but each loader takes the next number from a counter that all blocks share, so that
            work that differs is shared evenly too. Costs one small buffer that XLA sets to 0. It takes it
            before the item at hand, which hides the wait, or ``takes_late``, after it: items that are few and
            large are then shared more evenly.

Where only the loader knows what comes next, it tells the others through shared memory: the number of the
query tile (queue), the count of key tiles (where the loader scans for them, see `walk`). Where a
plan ``keeps_order``, the work itself says when it needs that no more.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import intrinsics


class Work(NamedTuple):
    """What a kernel shares out: ``tiles`` tiles of each of ``heads`` heads of each of ``batch`` rows.

    Attributes:
      batch, heads, tiles: how many of each.
      heads_first: whether heads count fastest and the last tile comes first, or tiles count fastest in
        rising order.
    """

    batch: int
    heads: int
    tiles: int
    heads_first: bool


class Item(NamedTuple):
    """One tile of one head: what a block works on at a time."""

    b: Any
    h: Any
    i: Any


def items(work: Work) -> int:
    """Return the number of items."""
    return work.batch * work.heads * work.tiles


def item_of(work: Work, n: Any) -> Item:
    """Return the n-th item."""
    if work.heads_first:
        tile, h = lax.div(n, jnp.int32(work.heads)), lax.rem(n, jnp.int32(work.heads))
        b, i = lax.div(tile, jnp.int32(work.tiles)), lax.rem(tile, jnp.int32(work.tiles))
        return Item(b, h, work.tiles - 1 - i)
    head, i = lax.div(n, jnp.int32(work.tiles)), lax.rem(n, jnp.int32(work.tiles))
    return Item(lax.div(head, jnp.int32(work.heads)), lax.rem(head, jnp.int32(work.heads)), i)


def lead(plan: Any, shared: Any, barriers: Any, counter: Any, work: Any) -> None:
    """Go through the query tiles of this block as its loader.

    Args:
      plan, shared, barriers: of the kernel.
      counter: of `intrinsics.counter`, for a queue.
      work: ``work(item, base, publish) -> base``; base counts key tiles, and ``publish(count)`` must be
        called once, before the first of them, with their number, or None where all can work it out.
    """

    def tell(n, count):
        if shared.order is None:
            return
        plgpu.barrier_wait(barriers.order_empty)
        shared.order[0] = n
        shared.order[1] = jnp.int32(0) if count is None else count
        plgpu.barrier_arrive(barriers.order_full)

    def one(n, base):
        return work(item_of(plan.work, n), base, lambda count: tell(n, count))

    if not plan.queue:
        _by_number(plan, one)
        return
    block = lax.axis_index("block")

    def turn(state):
        n, base = state
        take = lambda: intrinsics.take(counter, shared.mailbox) + plan.blocks
        if plan.takes_late:
            base = one(n, base)
            return take(), base
        after = take()
        return after, one(n, base)

    n, _ = lax.while_loop(lambda state: state[0] < items(plan.work), turn, (block, jnp.int32(0)))
    tell(n, None)


def follow(plan: Any, shared: Any, barriers: Any, work: Any) -> None:
    """Go through the same query tiles to compute them; ``work(item, base, count) -> base``."""

    def order():
        if shared.order is None:
            return None, None
        plgpu.barrier_wait(barriers.order_full)
        n, count = shared.order[0], shared.order[1]
        if not plan.keeps_order:
            intrinsics.gather_warps()
            plgpu.barrier_arrive(barriers.order_empty)
        return n, count

    if not plan.queue:
        _by_number(plan, lambda n, base: work(item_of(plan.work, n), base, order()[1]))
        return

    def turn(state):
        n, count, base = state
        base = work(item_of(plan.work, n), base, count)
        return *order(), base

    lax.while_loop(lambda state: state[0] < items(plan.work), turn, (*order(), jnp.int32(0)))


def _by_number(plan: Any, one: Any) -> None:
    """Go through every n-th query tile of n blocks, or through the one of a block."""
    block = lax.axis_index("block")
    if plan.blocks == items(plan.work):
        one(block, jnp.int32(0))
    else:
        count = lax.div(items(plan.work) - 1 - block, jnp.int32(plan.blocks)) + 1
        lax.fori_loop(0, count, lambda n, base: one(block + n * plan.blocks, base), jnp.int32(0))

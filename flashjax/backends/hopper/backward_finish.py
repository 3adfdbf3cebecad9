"""The last step of the fast backward pass: what was added up for dQ, in the shape and dtype of q.

Likewise dK and dV, where they were added up too.

One warpgroup a block turns 64 rows of a head: it loads them as the threads of the backward kernel held them
(`intrinsics.load_tile`), scales and rounds, and stores them by the TMA. Shared memory, in bytes, with the
padded head dim D: 128 * D.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends import hopper
from flashjax.backends.hopper import intrinsics, logits, schedule, transfers
from flashjax.backends.hopper.config import ROWS
from flashjax.problem import Problem


def shape_of(plan: Any) -> tuple[int, ...]:
    """Return the shape of the sums of a backward kernel.

    ``[query tiles of all rows and heads, 64 queries of a tile, columns of a part, 64 * columns of a part]``.
    """
    tiles = plan.problem.batch * plan.problem.heads * plan.view.count_columns
    return tiles, plan.config.block_q // ROWS, plan.parts, ROWS * plan.part


def rows_at(batch: int, heads: int, total: Any, item: schedule.Item) -> Any:
    """Return where the sums of the ``item.i``-th 64 rows of a head are, in a kernel."""
    count = total.shape[0] // (batch * heads)
    split = jnp.int32(total.shape[1])
    number = (item.b * heads + item.h) * count + lax.div(item.i, split)
    return total.at[number, lax.rem(item.i, split)]


def finish(
    problem: Problem, total: jax.Array, shape: tuple[int, int, int, int], scale: Any, scales: bool = True
) -> jax.Array:
    """Turn sums into a gradient.

    Args:
      problem: of the call.
      total: the gradient without the scale and, with dropout, times ``1 - rate``; float32 as `shape_of` says
        of dQ.
      shape: of the gradient, ``[B, length, heads, dim]``.
      scale: float32 ``[b]``, None for the default.
      scales: whether the scale is a factor of it.
    """
    _, _, parts, size = total.shape
    batch, length, heads, dim = shape
    width = size // ROWS
    work = schedule.Work(batch, heads, -(-length // ROWS), heads_first=True)
    tile = transfers.shape(1, ROWS, length, dim, parts * width)

    def body(arrays, result, buffer):
        total, scale = arrays
        item = schedule.item_of(work, lax.axis_index("block"))
        (buffer,) = transfers.names(buffer, tile)
        rows = rows_at(batch, heads, total, item)
        factor = (logits.factor(problem, scale, lambda: item.b) if scales else 1) / (1 - problem.dropout_rate)
        for part in range(parts):
            x = intrinsics.load_tile(rows.at[part], width) * factor
            buffer.tile(0).at[:, pl.ds(part * width, width)][...] = x.astype(problem.dtype)
        plgpu.commit_smem()
        transfers.store(buffer, 0, result, item.b, item.i * ROWS, item.h)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        hopper.without_mesh(body),
        out_type=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch_types=[transfers.buffer(problem.dtype, tile)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        grid=(schedule.items(work),),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_finish",
    )
    return kernel((total, scale))

"""The last step of the fast backward pass: what was added up for dQ, in the shape and dtype of q.

One warpgroup a block turns 64 rows of a head: it loads them as the threads of the backward kernel held them
(`intrinsics.load_tile`), scales and rounds, and stores them by the TMA. Shared memory, in bytes, with the
padded head dim D: 128 * D for dQ, 256 for the sums, where they are wanted also 128 * D for Q.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends.hopper import intrinsics, logits, schedule, transfers
from flashjax.backends.hopper.config import ROWS
from flashjax.problem import Problem


class Shared(NamedTuple):
    """Buffers in shared memory."""

    dq: Any
    q: Any
    sums: Any


def shape_of(plan: Any) -> tuple[int, ...]:
    """Return the shape of the sums of a backward kernel.

    ``[query tiles of all rows and heads, 64 queries of a tile, columns of a part, 64 * columns of a part]``.
    """
    tiles = plan.problem.batch * plan.problem.heads * plan.view.count_columns
    return tiles, plan.config.block_q // ROWS, plan.columns[0] // plan.part, ROWS * plan.part


def dq(
    problem: Problem, total: jax.Array, query: jax.Array, scale: jax.Array | None, sums: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Compute ``(dq [B, T, N, D], rowsum(total ∘ Q) [B, N, T] or None)``.

    Args:
      problem: of the call.
      total: dQ without its scale, float32 `shape_of`.
      query: ``[B, T, N, D]``.
      scale: float32 ``[b]``, None for the default.
      sums: whether the second result is wanted.
    """
    _, split, parts, size = total.shape
    width = size // ROWS
    count = total.shape[0] // (problem.batch * problem.heads)
    tiles = -(-problem.query_length // ROWS)
    work = schedule.Work(problem.batch, problem.heads, tiles, heads_first=True)
    shape = transfers.shape(1, ROWS, problem.query_length, problem.head_dim, parts * width)
    buffer = transfers.buffer(problem.dtype, shape)
    shared = Shared(buffer, buffer if sums else None, plgpu.SMEM((ROWS,), jnp.float32) if sums else None)
    barrier = plgpu.Barrier(num_arrivals=shape.copies) if sums else None

    def body(arrays, *rest):
        total, query, scale = arrays
        *results, shared, barrier = rest
        item = schedule.item_of(work, lax.axis_index("block"))
        name = lambda ref: None if ref is None else transfers.names(ref, shape)[0]
        shared = shared._replace(dq=name(shared.dq), q=name(shared.q))
        q0 = item.i * ROWS
        if sums:
            transfers.fetch(query, item.b, q0, item.h, shared.q, 0, barrier)
            plgpu.barrier_wait(barrier)
        factor = logits.factor(problem, scale, lambda: item.b)
        rows = []
        for part in range(parts):
            columns = pl.ds(part * width, width)
            number = (item.b * problem.heads + item.h) * count + lax.div(item.i, jnp.int32(split))
            x = intrinsics.load_tile(total.at[number, lax.rem(item.i, jnp.int32(split)), part], width)
            if sums:
                q = plgpu.load(shared.q.tile(0).at[:, columns], layout=plgpu.Layout.WGMMA)
                rows.append(jnp.sum(x * q.astype(jnp.float32), axis=1))
            shared.dq.tile(0).at[:, columns][...] = (x * factor).astype(problem.dtype)
        if sums:
            shared.sums[...] = sum(rows[1:], rows[0])
        plgpu.commit_smem()
        transfers.store(shared.dq, 0, results[0], item.b, q0, item.h)
        if sums:
            plgpu.copy_smem_to_gmem(shared.sums, results[1].at[item.b, item.h, pl.ds(q0, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    out = [jax.ShapeDtypeStruct(query.shape, problem.dtype)]
    out += [jax.ShapeDtypeStruct((problem.batch, problem.heads, tiles * ROWS), jnp.float32)] * sums
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[shared, barrier],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        grid=(schedule.items(work),),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_finish",
    )
    results = kernel((total, query if sums else None, scale))
    return results[0], results[1][:, :, : problem.query_length] if sums else None

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

WIDTH = 64  # columns that are added at a time


class Shared(NamedTuple):
    """Buffers in shared memory."""

    dq: Any
    q: Any
    sums: Any


def shape_of(problem: Problem, length: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the sums: ``[B, N, tiles of 64 queries, parts of a head, 64 * columns of a part]``."""
    width = min(columns, WIDTH)
    return problem.batch, problem.heads, length // ROWS, columns // width, ROWS * width


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
    *_, parts, size = total.shape
    width = size // ROWS
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
        factor = logits.factor(problem, scale, item.b)
        rows = []
        for part in range(parts):
            columns = pl.ds(part * width, width)
            x = intrinsics.load_tile(total.at[item.b, item.h, item.i, part], width)
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

"""The first step of the backward pass: what S and dP start from (`recompute`), and zeros for dQ.

One warpgroup a block takes 64 rows of a head, and reads O and dO once. What the backward kernel adds dQ to
starts at 0: the zeros are written meanwhile. Shared memory, in bytes, with the padded value dim Dv: 256 * Dv
for O and dO, 512 for the results.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from flashjax.backends import hopper
from flashjax.backends.hopper import backward_finish, intrinsics, logits, schedule, transfers
from flashjax.backends.hopper.config import ROWS
from flashjax.backends.hopper.logits import LOG2E
from flashjax.problem import Problem

WGMMA = plgpu.Layout.WGMMA


class Shared(NamedTuple):
    """Buffers in shared memory."""

    o: Any
    do: Any
    results: Any


def starts(
    problem: Problem,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    length: int,
    total: tuple[int, ...] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Compute ``(lse, begin, zeros)``, float32.

    Args:
      problem: of the call.
      out, dout: ``[B, T, N, Dv]``.
      lse, dlse: ``[B, N, T]``; dlse None means 0.
      length: T rounded up to whole tiles of a kernel.
      total: `backward_finish.shape_of` the kernel that adds up dQ, None where there is none.

    Returns:
      ``[B, N, length]`` twice: ``-lse / scale`` where `logits.folds`, ``lse`` where there are scores, else
      ``lse * log2(e)``, with lse inf for queries that see nothing and beyond T; and ``dlse - delta``, 0 for
      these. Then zeros in the shape ``total``, or None.
    """
    beyond = ((0, 0), (0, 0), (0, length - problem.query_length))
    lse = jnp.pad(lse, beyond, constant_values=-jnp.inf)
    dlse = None if dlse is None else jnp.pad(dlse, beyond)
    shape = transfers.shape(1, ROWS, problem.query_length, problem.value_dim)
    buffer = transfers.buffer(problem.dtype, shape)
    work = schedule.Work(problem.batch, problem.heads, length // ROWS, heads_first=True)
    width = min(shape.columns, 64)
    # Tiles of 64 queries of a head that dQ has: another kernel may have larger ones.
    zeroed = 0 if total is None else total[0] // (problem.batch * problem.heads) * total[1]

    def body(arrays, *rest):
        out, lse, dout, dlse = arrays
        *results, shared, barrier = rest
        item = schedule.item_of(work, lax.axis_index("block"))
        shared = shared._replace(
            o=transfers.names(shared.o, shape)[0], do=transfers.names(shared.do, shape)[0]
        )
        q0 = item.i * ROWS
        for array, ref in ((out, shared.o), (dout, shared.do)):
            transfers.fetch(array, item.b, q0, item.h, ref, 0, barrier)

        def zero():
            sums = backward_finish.rows_at(problem.batch, problem.heads, results[2], item)
            for part in range(total[2]):
                intrinsics.zero_tile(sums.at[part], total[3])

        if zeroed == work.tiles:
            zero()
        elif zeroed:
            pl.when(item.i < zeroed)(zero)
        rows = lambda ref: plgpu.load(
            ref.at[item.b, item.h, pl.ds(q0, ROWS)], layout=WGMMA.reduce(1), optimized=False
        )
        own = rows(lse)
        begin = None if dlse is None else rows(dlse)
        plgpu.barrier_wait(barrier)
        products = []
        for first in range(0, shape.columns, width):
            load = lambda ref, first=first: plgpu.load(
                ref.tile(0).at[:, pl.ds(first, width)], layout=WGMMA
            ).astype(jnp.float32)
            products.append(load(shared.o) * load(shared.do))
        delta = jnp.sum(sum(products[1:], products[0]), axis=1)
        begin = -delta if begin is None else begin - delta
        dead = own == -jnp.inf
        begin = jnp.where(dead, jnp.zeros_like(begin), begin)
        own = jnp.where(dead, jnp.full_like(own, jnp.inf), own)
        if problem.scores is None:
            own = own * (-1 / problem.default_scale if logits.folds(problem) else LOG2E)
        for n, x in enumerate((own, begin)):
            shared.results.at[n][...] = x
        plgpu.commit_smem()
        for n in range(2):
            plgpu.copy_smem_to_gmem(shared.results.at[n], results[n].at[item.b, item.h, pl.ds(q0, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    vector = jax.ShapeDtypeStruct((problem.batch, problem.heads, length), jnp.float32)
    zeros = [] if total is None else [jax.ShapeDtypeStruct(total, jnp.float32)]
    kernel = plgpu.kernel(
        hopper.without_mesh(body),
        out_type=[vector, vector, *zeros],
        scratch_types=[
            Shared(buffer, buffer, plgpu.SMEM((2, ROWS), jnp.float32)),
            plgpu.Barrier(num_arrivals=2 * shape.copies),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        grid=(schedule.items(work),),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="flash_attention_backward_start",
    )
    results = kernel((out, lse, dout, dlse))
    return results[0], results[1], None if total is None else results[2]

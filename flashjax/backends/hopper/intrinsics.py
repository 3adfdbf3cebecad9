"""What the kernels need of the GPU and Pallas does not have, as inline Mosaic GPU code."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

from flashjax.backends.hopper.config import WARPGROUP

ROWS = plgpu.Layout.WGMMA.reduce(1)
FIRST_BARRIER = 8  # of the 16 named ones of a block; Mosaic GPU has 0 and one for each warpgroup


def any_in_warp(rows: jax.Array | None = None, negative: jax.Array | None = None) -> jax.Array:
    """Say whether a warp holds a row other than 0, or anything negative; warps may differ in it.

    Args:
      rows: float32 ``[64]``, a number for each row of a warpgroup.
      negative: float32 ``[64, columns]`` in the layout of an accumulator.
    """
    tests = []
    if rows is not None:
        tests.append((rows, ROWS, arith.CmpFPredicate.UNE))
    if negative is not None:
        tests.append((negative, plgpu.Layout.WGMMA, arith.CmpFPredicate.OLT))
    arrays, layouts, predicates = zip(*tests, strict=True)

    def vote(_, *arrays):
        zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        found = arith.constant(ir.IntegerType.get_signless(1), 0)
        for array, predicate in zip(arrays, predicates, strict=True):
            for register in array.registers.flat:
                for i in range(ir.VectorType(register.type).shape[0]):
                    value = vector.extract(register, [], [i])
                    found = arith.ori(found, arith.cmpf(predicate, value, zero))
        found = nvvm.vote_sync(_int32(-1), found, nvvm.VoteSyncKind.any)
        return _uniform(arith.extui(_int32_type(), found))

    return _inline(vote, layouts, number=True)(*arrays) != 0


def counter() -> Any:
    """Return a number in global memory that all blocks of a kernel share; it starts at 0."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR)


def take(counter: Any, mailbox: Any) -> jax.Array:
    """Return the counter and add 1 to it, once for a warpgroup.

    Args:
      counter: of `counter`.
      mailbox: int32 ``[1]`` in shared memory, through which the thread that asks tells the others.
    """

    def fetch_add(_, counter, mailbox):
        first = arith.constant(ir.IndexType.get(), 0)
        mosaic.warpgroup_barrier()  # all have read what the last call left there
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            number = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mosaic.utils.memref_ptr(counter),
                _int32(1),
                llvm.AtomicOrdering.monotonic,
                syncscope="device",
            )
            memref.store(number, mailbox, [first])
        mosaic.warpgroup_barrier()
        return _uniform(memref.load(mailbox, [first]))

    return _inline(fetch_add, (plgpu.RefType(), plgpu.RefType()), number=True)(counter, mailbox)


def await_turn(warpgroup: jax.Array) -> None:
    """Wait until somebody has given the turn to this warpgroup."""

    def wait(_, warpgroup):
        nvvm.barrier(**_turn_of(warpgroup))

    _inline(wait, (plgpu.Layout.WG_SPLAT,))(warpgroup)


def give_turn(warpgroup: jax.Array) -> None:
    """Give the turn to a warpgroup."""

    def arrive(_, warpgroup):
        nvvm.barrier_arrive(**_turn_of(warpgroup))

    _inline(arrive, (plgpu.Layout.WG_SPLAT,))(warpgroup)


def _turn_of(warpgroup: Any) -> dict[str, Any]:
    """Return the named barrier at which one warpgroup waits and another arrives."""
    index = arith.addi(warpgroup.registers.item(), _int32(FIRST_BARRIER))
    return {"barrier_id": index, "number_of_threads": _int32(2 * WARPGROUP)}


def _inline(function: Callable, arguments: tuple, number: bool = False) -> Callable:
    """Return a call of ``function(context, *arguments)``, which emits code and may return a number."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT) if number else None
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)(function)


def _int32_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _int32(value: int) -> Any:
    return arith.constant(_int32_type(), value)


def _uniform(x: Any) -> Any:
    return mosaic.FragmentedArray.splat(x, (), is_signed=True)

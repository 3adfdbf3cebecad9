"""Mosaic GPU's interpreter on CPU, with what the Hopper kernels need and jax 0.11 and 0.12 do not interpret.

Test-only, on jax's private API. What is added:

- accumulators that start at a value: ``acc[...] = x`` and ``pl.run_state(...)(plgpu.ACC.init(x))``;
- wgmma with a left operand in registers;
- asynchrony of wgmma: its operands count as read when it is issued and again where it is awaited, so that
  a buffer handed back between the two is a race;
- views of one buffer in a `plgpu.RefUnion` of which one cuts the other in pieces (but not races between
  views: jax takes all tiles of a union for one);
- the kernels' own inline code (`flashjax.backends.hopper.intrinsics`): the vote; the counter, of which there
  is one in all that is interpreted; positions; tiles added to, loaded from and stored to global memory, where
  sums commute and so do not race. That warpgroups take turns decides on speed alone, and that warps of one
  warpgroup run apart is not interpreted at all: both are left out;
- ends of kernels at which nobody has waited for the last arrivals (jax 0.12 allows that already).
"""

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic_gpu import core, primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, params, shared_memory
from jax._src.state import discharge, indexing

from flashjax import dropout

Interpreter = jaxpr_interpret.JaxprInterpreter

_stock_interpret = Interpreter.interpret
_stock_resolve = jaxpr_interpret.resolve_ref
_stock_get = gpu_callbacks._get
_stock_deallocate = shared_memory.Barrier.deallocate


@contextlib.contextmanager
def interpreted(**options: Any) -> Iterator[None]:
    """Run a Mosaic GPU kernel that is traced inside in the interpreter; raise where it found a race."""
    global _numbers
    _numbers = itertools.count()
    changes = [
        (Interpreter, "interpret", _interpret),
        (jaxpr_interpret, "resolve_ref", _resolve),
        (gpu_callbacks, "_get", _get),
        (gpu_callbacks, "call_tag_ref_union", lambda token, *_: token),
    ]
    if not hasattr(shared_memory, "BarrierReallocationChecker"):
        changes.append((shared_memory.Barrier, "deallocate", _deallocate))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        with params.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **options)):
            yield
        assert gpu_callbacks._races is None or not gpu_callbacks.get_races().races_found, "races"
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        gpu_callbacks.reset_gpu_interpret_mode_state()


# ---- accumulators and wgmma ------------------------------------------------------------------------


def _interpret(self: Any, jaxpr: Any, token: Any, *args: Any) -> tuple[Any, list[Any]]:
    """Interpret a jaxpr: the equations of `_OWN` here, and each run of others as jax does."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    read = lambda x: x.val if hasattr(x, "val") else values[x]
    # What is in flight outside of a scope may be awaited inside; a loop or a branch is a trace of its own.
    trace = jax_core.trace_ctx.trace
    scopes = self.__dict__.setdefault("scopes", [])
    outermost = not scopes or scopes[-1][0] is not trace
    if outermost:
        scopes.append((trace, []))
    flight = scopes[-1][1]
    others = []

    def flush(token):
        if not others:
            return token
        made = {v for e in others for v in e.outvars}
        used = dict.fromkeys(v for e in others for v in e.invars if not hasattr(v, "val") and v not in made)
        results = [v for e in others for v in e.outvars if type(v).__name__ != "DropVar"]
        part = types.SimpleNamespace(constvars=[], invars=list(used), outvars=results, eqns=list(others))
        others.clear()
        token, outputs = _stock_interpret(self, part, token, *(values[v] for v in used))
        values.update(zip(results, outputs, strict=True))
        return token

    for equation in jaxpr.eqns:
        rule = _OWN.get(equation.primitive)
        if rule is None:
            others.append(equation)
            continue
        token = flush(token)
        token, outputs = rule(self, equation, token, [read(x) for x in equation.invars], flight)
        values.update(zip(equation.outvars, outputs, strict=True))
    token = flush(token)
    if outermost:
        token = _land(self, token, flight, 0)
        scopes.pop()
    return token, [read(x) for x in jaxpr.outvars]


def _store_accumulator(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    assert not flight, "an accumulator is stored to while a wgmma is in flight"
    acc, value = inputs
    token = jax.experimental.io_callback(
        _put_on_host, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, acc, value
    )
    return token, [value]


def _put_on_host(token, thread, acc, value):
    memory = gpu_callbacks._get_shared_memory()
    acc = gpu_callbacks.HostAllocationKey.from_array(acc)
    memory.store_buffer_content(acc, memory.access(acc, ()), np.array(value), thread)
    return token


def _load_accumulator(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    if equation.params["wait_n"] is not None:
        token = _land(self, token, flight, equation.params["wait_n"])
    assert all(acc is not inputs[0] for acc, _ in flight), (
        "an accumulator is read before its wgmma is awaited"
    )
    token, value = self._interpret_wgmma_accumulator_deref_p(equation, token, lambda: inputs)
    return token, [value]


def _wait(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    return _land(self, token, flight, equation.params["n"]), []


def _multiply(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    leaves = inputs[3:]
    operands = []
    for name, x, var in zip(("acc", "a", "b"), inputs, equation.invars, strict=False):
        tree = equation.params[f"{name}_transforms_tree"]
        count = 0 if tree is None else tree.num_leaves
        transforms = () if tree is None else jax.tree.unflatten(tree, leaves[:count])
        leaves = leaves[count:]
        operands.append(jaxpr_interpret.resolve_ref(var.aval, x, transforms))
    in_registers = not hasattr(equation.invars[1].aval, "inner_aval")

    def call(function, token):
        return jax.experimental.io_callback(
            functools.partial(function, in_registers, equation.source_info),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token,
            self.mesh_location,
            self.thread,
            operands,
        )

    flight.append((inputs[0], functools.partial(call, _read_on_host)))
    return call(_multiply_on_host, token), []


def _multiply_on_host(in_registers, source_info, token, mesh_location, thread, operands):
    a, b = _read(in_registers, source_info, token, mesh_location, thread, operands)
    memory = gpu_callbacks._get_shared_memory()
    acc = gpu_callbacks.HostAllocationKey.from_array(operands[0][0])
    everything = memory.access(acc, ())
    # Registers have one owner: nothing about them can race.
    before, _, _ = memory.get_buffer_content(acc, everything, thread)
    product = np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))
    memory.store_buffer_content(acc, everything, before + product, thread)
    return token


def _read_on_host(in_registers, source_info, token, mesh_location, thread, operands):
    _read(in_registers, source_info, token, mesh_location, thread, operands)
    return token


def _read(in_registers, source_info, token, mesh_location, thread, operands):
    get = lambda ref, transforms: _get(
        token, mesh_location, thread, ref, transforms, source_info=source_info
    )[1]
    _, (a, a_transforms), (b, b_transforms) = operands
    return a if in_registers else get(a, a_transforms), get(b, b_transforms)


def _land(self: Any, token: Any, flight: list, most: int) -> Any:
    """Await all wgmmas but the last ``most``: what they read counts as read until now."""
    while len(flight) > most:
        _, read_again = flight.pop(0)
        token = read_again(token)
    return token


def _run_state(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    jaxpr = equation.params["jaxpr"]
    assert all(equation.params["is_initialized"])
    refs, owned = [], []
    for value, var in zip(inputs, equation.invars, strict=True):
        mine = not hasattr(var.aval, "inner_aval")
        if mine:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                compute_unit=self.thread,
                memory_space_id=shared_memory.get_memory_space_idx(core.MemorySpace.REGS),
                initial_ref_count=1,
            )
            token, value = gpu_callbacks.call_allocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_request_as_array=request,
                value=value,
                source_info=equation.source_info,
            )
        refs.append(value)
        owned.append(mine)
    inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    token, _ = self.interpret(inner, token, *consts, *refs)
    token = _land(self, token, flight, 0)  # the accumulators' values are asked for
    outputs = []
    for ref, mine, var in zip(refs, owned, equation.outvars, strict=True):
        value = ref
        if mine:
            token, value = gpu_callbacks.call_get(
                token=token,
                result_shape_and_dtype=var.aval,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=ref,
                transforms=(),
                source_info=equation.source_info,
            )
            token = gpu_callbacks.call_deallocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=ref,
                source_info=equation.source_info,
            )
        outputs.append(value)
    return token, outputs


# ---- inline code -----------------------------------------------------------------------------------


def _inline(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    name = equation.params["mgpu_fn"].__name__
    if name == "vote":
        tests = [jnp.any(x != 0) if x.ndim == 1 else jnp.any(x < 0) for x in inputs]
        return token, [functools.reduce(jnp.logical_or, tests).astype(jnp.int32)]
    if name == "fetch_add":
        result = gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct((), jnp.int32)
        take = lambda token: (token, np.int32(next(_numbers)))
        token, number = jax.experimental.io_callback(take, result, token)
        return token, [number]
    if name == "place":
        return token, [jnp.arange(equation.outvars[0].aval.shape[0], dtype=jnp.int32)]
    if name == "widen":
        return token, [inputs[0].astype(jnp.float32)]
    if name in ("drop", "drop_turned"):
        x, *words = inputs
        return token, [jnp.where(_keeps(x.shape[1], *words, name == "drop_turned"), x, 0.0)]
    if name == "add_staged":
        return _add_staged(self, equation, token, inputs), []
    if name in _ON_HOST:
        return _inline_on_host(self, equation, token, inputs, _ON_HOST[name])
    assert name in ("wait", "arrive", "gather", "touch"), name
    return token, []


def _inline_on_host(self: Any, equation: Any, token: Any, inputs: Any, function: Any) -> Any:
    """Call ``function(memory, place, *arrays)``, where place is what the first argument refers to."""
    count = equation.params["pytree_args"].num_leaves
    (ref, *arrays), leaves = inputs[:count], inputs[count:]
    transforms = equation.params["pytree_ref_transforms"].unflatten(leaves)[0]
    ref, transforms = jaxpr_interpret.resolve_ref(equation.invars[0].aval, ref, transforms)

    def call(token, thread, ref, transforms, *arrays):
        memory = gpu_callbacks._get_shared_memory()
        place = _place(memory, thread, ref, transforms)
        result = function(memory, place, *map(np.asarray, arrays))
        return token if result is None else (token, result)

    results = gpu_callbacks.TOKEN_SHAPE_DTYPE
    if equation.outvars:
        x = equation.outvars[0].aval
        results = results, jax.ShapeDtypeStruct(x.shape, x.dtype)
        function = functools.partial(function, shape=x.shape)
    outputs = jax.experimental.io_callback(call, results, token, self.thread, ref, transforms, *arrays)
    return (outputs[0], [outputs[1]]) if equation.outvars else (outputs, [])


def _add_staged(self: Any, equation: Any, token: Any, inputs: Any) -> Any:
    """Add one reference to another at once, where the GPU would sometime before it is waited for."""
    (ref, buffer), leaves = inputs[:2], inputs[2:]
    transforms = equation.params["pytree_ref_transforms"].unflatten(leaves)
    places = [
        jaxpr_interpret.resolve_ref(variable.aval, x, t)
        for variable, x, t in zip(equation.invars[:2], (ref, buffer), transforms, strict=True)
    ]

    def call(token, thread, *places):
        memory = gpu_callbacks._get_shared_memory()
        to, source = (_place(memory, thread, *place) for place in places)
        _add(memory, to, memory.get_buffer_content(*source)[0])
        return token

    return jax.experimental.io_callback(call, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, *places)


def _place(memory: Any, thread: Any, ref: Any, transforms: Any) -> Any:
    key = gpu_callbacks.HostAllocationKey.from_array(ref)
    transforms = gpu_callbacks._remove_noop_transforms(transforms)
    return key, memory.access(key, jax.tree.map(int, transforms)), thread


def _stage(memory, place, tile):
    memory.store_buffer_content(*place[:2], tile.reshape(-1), place[2])


def _add(memory, place, tile):
    with _sums:
        before, _, _ = memory.get_buffer_content(*place)
        memory.store_buffer_content(*place[:2], before + tile.reshape(-1), place[2])


def _load(memory, place, shape):
    return memory.get_buffer_content(*place)[0].reshape(shape)


def _zero(memory, place):
    key, access, thread = place
    memory.store_buffer_content(key, access, np.zeros(access.shape, np.float32), thread)


def _put(memory, place, tile, row, column):
    key, access, thread = place
    with _sums:
        whole = np.array(memory.get_buffer_content(*place)[0])
        target = whole[int(row) :, int(column) :][: tile.shape[0], : tile.shape[1]]
        target[...] = tile[: target.shape[0], : target.shape[1]]
        memory.store_buffer_content(key, access, whole, thread)


def _content(memory, place):
    with _sums:
        return np.array(memory.get_buffer_content(*place)[0])


def _numbers_at(memory, place, row, column, shape, turned=False):
    array = np.asarray(_content(memory, place), np.float32)
    array = array.T if turned else array
    rows, columns = (
        np.minimum(start + np.arange(count), size - 1)
        for start, count, size in zip((int(row), int(column)), shape, array.shape, strict=True)
    )
    return array[np.ix_(rows, columns)]


def _diagonals_at(memory, place, row, column, last, shape, turned=False):
    array = np.asarray(_content(memory, place), np.float32)
    rows, columns = int(row) + np.arange(shape[0])[:, None], int(column) + np.arange(shape[1])
    distance = rows - columns if turned else columns - rows
    return array[np.clip(distance + int(last), 0, len(array) - 1)]


def _put_numbers(memory, place, tile, row, column, turned=False):
    tile, at = (tile.T, (column, row)) if turned else (tile, (row, column))
    _put(memory, place, tile.astype(_content(memory, place).dtype), *at)


def _diagonal_sums(memory, place, shape):
    tile = _content(memory, place)
    return np.array([np.trace(tile, n - 63) for n in range(shape[0])], np.float32)


def _keeps(count, column, row_a, row_b, least, turned):
    """Say what dropout keeps of 64 rows and ``count`` columns, by the definition of `dropout`."""
    if turned:
        column, row_a, row_b = column[:, None], row_a[None, :], row_b[None, :]
        upper = (jnp.arange(64) & 8)[:, None] != 0
    else:
        column, row_a, row_b = column[None, :], row_a[:, None], row_b[:, None]
        upper = (jnp.arange(count) & 8)[None, :] != 0
    word = dropout.join(column, row_a, row_b)
    half = jnp.where(upper, word >> 16, word) & 0x7FFF
    return half >= (least.astype(jnp.uint32) >> 16)


_sums = threading.Lock()
_ON_HOST = {
    "add": _add,
    "stage": _stage,
    "load": _load,
    "zero": _zero,
    "put": _put,
    "numbers": _numbers_at,
    "numbers_turned": functools.partial(_numbers_at, turned=True),
    "diagonals": _diagonals_at,
    "diagonals_turned": functools.partial(_diagonals_at, turned=True),
    "put_numbers": _put_numbers,
    "put_numbers_turned": functools.partial(_put_numbers, turned=True),
    "diagonal_sums": _diagonal_sums,
}


def _counter(self: Any, equation: Any, token: Any, inputs: Any, flight: list) -> Any:
    return token, [jnp.int32(0)]


_numbers = itertools.count()


_OWN = {
    primitives.inline_mgpu_p: _inline,
    pallas_primitives.get_global_p: _counter,
    discharge.run_state_p: _run_state,
    primitives.wgmma_accumulator_store_p: _store_accumulator,
    primitives.wgmma_accumulator_deref_p: _load_accumulator,
    primitives.wgmma_wait_p: _wait,
    primitives.wgmma_ref_p: _multiply,
}


# ---- reads -----------------------------------------------------------------------------------------


def _get(token: Any, mesh_location: Any, thread: Any, *args: Any, **options: Any) -> Any:
    """Read, so that a barrier is enough between this and a TMA that overwrites; jax wants a fence too.

    wgmma reads through the proxy that the TMA writes through, and loads into registers are complete where
    a thread arrives at a barrier. After a store to shared memory the fence is still asked for.
    """
    result = _stock_get(token, mesh_location, thread, *args, **options)
    if thread is not None:
        gpu_callbacks._get_shared_memory().commit_smem(thread)
    return result


# ---- views of one buffer ---------------------------------------------------------------------------


def _resolve(aval: Any, keys: Any, transforms: Any) -> tuple[Any, Any]:
    """Send an access through a view in pieces to the view before it, which is of the same bytes.

    That one is ``[n, rows, columns]``, and pieces are ``[n, down, across, height, width]``, of which an
    access names one, or its first rows. Other views of a union are buffers of their own: nothing is written
    through one and read through the other.
    """
    if not isinstance(aval, core.AbstractRefUnion):
        return keys, transforms
    extract, *rest = transforms
    members = jaxpr_interpret.union_members(aval)
    slot = [x.transforms[0] for x in members].index(extract)
    shape = jaxpr_interpret._member_inner_aval(members[slot]).shape
    rest = [t for t in rest if not isinstance(t, shared_memory.LAYOUT_TRANSFORMS)]
    if len(shape) == 3:
        return keys[slot], tuple(rest)
    n, i, c, y, x = _window(shape, rest)
    *_, height, width = shape
    assert x == (0, width), x
    piece = (n, indexing.Slice(i * height + y[0], y[1], 1), indexing.Slice(c * width, width, 1))
    whole = jaxpr_interpret._member_inner_aval(members[slot - 1]).shape
    return keys[slot - 1], (indexing.NDIndexer(piece, whole, ()),)


def _window(shape: Any, indexers: Any) -> list[Any]:
    """Compose indexers to one index, or one pair of start and size, for each dimension."""
    window = [(0, size) for size in shape]
    left = list(range(len(shape)))
    for indexer in indexers:
        for dim, index in zip(tuple(left), indexer.indices, strict=True):
            if isinstance(index, indexing.Slice):
                window[dim] = window[dim][0] + index.start, index.size
            else:
                window[dim] = index
                left.remove(dim)
    return window


def _deallocate(self: Any) -> None:
    with self.cv:
        if self.ref_count == 1:
            self.last_observed_phase_by_thread.clear()
    _stock_deallocate(self)

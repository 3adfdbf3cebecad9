"""The backends: what each can do, which one a call takes, and how `jax.vmap` reaches them.

A backend is two functions on arrays. ``forward(problem, inputs)`` returns `Results` and
``backward(problem, inputs, out, lse, dout, dlse, wanted)`` returns the gradients. Any forward pairs with
any backward: all that passes between them is ``out`` and ``lse``.

Under `jax.vmap` the mapped axis is folded into the batch, so that a backend sees one larger call and
never a batched loop bound. What is not mapped is not copied where it need not be: an array of ``b`` rows
serves every row ``r`` of the batch as row ``r % b``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from flashjax import reference
from flashjax.backends import hopper, xla
from flashjax.problem import Gradients, Inputs, Problem, Results, UnsupportedError, Wanted, abstract


class Backend(NamedTuple):
    """One way to compute attention.

    Attributes:
      name: what `flash_attention` takes as ``implementation``.
      unsupported: ``unsupported(problem)`` returns why it does not do a call, or None if it does.
      forward: ``forward(problem, inputs) -> Results``.
      backward: ``backward(problem, inputs, out, lse, dout, dlse, wanted) -> Gradients``; ``dlse`` is None
        where the cotangent of lse is known to be zero.
      automatic: whether a call may take it without naming it.
    """

    name: str
    unsupported: Callable[[Problem], str | None]
    forward: Callable[..., Results]
    backward: Callable[..., Gradients]
    automatic: bool = True


# In the order in which a call that names no implementation tries them.
BACKENDS = (
    Backend("hopper", hopper.unsupported, hopper.run_forward, hopper.run_backward),
    Backend("xla", lambda problem: None, xla.forward, xla.backward),
    Backend("reference", lambda problem: None, reference.forward, reference.backward, False),
)


def select(problem: Problem, implementation: str | None) -> Backend:
    """Return the backend of a call.

    Raises:
      ValueError: no backend has the name ``implementation``.
      UnsupportedError: the named backend does not do this call.
    """
    if implementation is None:
        return next(x for x in BACKENDS if x.automatic and x.unsupported(problem) is None)
    for backend in BACKENDS:
        if backend.name == implementation:
            reason = backend.unsupported(problem)
            if reason is not None:
                raise UnsupportedError(
                    f"implementation={implementation!r} does not do this call: {reason}. "
                    "implementation=None takes a backend that does"
                )
            return backend
    names = ", ".join(repr(x.name) for x in BACKENDS)
    raise ValueError(f"implementation is {implementation!r}; it must be None or one of {names}")


def describe(problem: Problem, implementation: str | None) -> str:
    """Say in words which backend a call takes and what the others say to it."""
    chosen = select(problem, implementation)
    lines = [f"backend: {chosen.name}"]
    for backend in BACKENDS:
        if backend is chosen:
            continue
        reason = backend.unsupported(problem)
        if reason is None and backend.automatic:
            reason = "could do this call, but comes later in the order of choice"
        elif reason is None:
            reason = f"could do this call, but only if asked: implementation={backend.name!r}"
        lines.append(f"  {backend.name}: {reason}")
    return "\n".join(lines)


# ---- vmap ------------------------------------------------------------------------------------------


def run_forward(backend: Backend, problem: Problem, inputs: Inputs) -> Results:
    """Run a backend's forward pass; `jax.vmap` folds the mapped axis into the batch."""
    leaves, tree = jax.tree.flatten(inputs)

    @custom_vmap
    def run(*leaves):
        return backend.forward(problem, jax.tree.unflatten(tree, leaves))

    @run.def_vmap
    def _(size, mapped, *leaves):
        folded = _fold_inputs(problem, size, tree, leaves, mapped, Wanted())
        results = run_forward(backend, _fold_problem(problem, size, folded), folded)
        return jax.tree.map(lambda x: _unfold(x, size), results), jax.tree.map(lambda _: True, results)

    return run(*leaves)


def run_backward(
    backend: Backend,
    problem: Problem,
    inputs: Inputs,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Wanted,
) -> Gradients:
    """Run a backend's backward pass; `jax.vmap` folds the mapped axis into the batch."""
    saved = (out, lse, dout, dlse)
    leaves, tree = jax.tree.flatten((inputs, saved))

    @custom_vmap
    def run(*leaves):
        inputs, saved = jax.tree.unflatten(tree, leaves)
        return backend.backward(problem, inputs, *saved, wanted)

    @run.def_vmap
    def _(size, mapped, *leaves):
        (arrays, saved), (input_map, saved_map) = (jax.tree.unflatten(tree, x) for x in (leaves, mapped))
        tree_in = jax.tree.structure(inputs)
        folded = _fold_inputs(
            problem, size, tree_in, jax.tree.leaves(arrays), jax.tree.leaves(input_map), wanted
        )
        saved = [
            None if x is None else _fold(x, size, m, problem.batch)
            for x, m in zip(saved, saved_map, strict=True)
        ]
        results = run_backward(backend, _fold_problem(problem, size, folded), folded, *saved, wanted)
        gradients = jax.tree.map(lambda x: _unfold(x, size), results)
        # An optional array was spread over the whole batch; sum over the rows that shared an entry.
        narrow = lambda x, own: x.reshape(size, -1, *own.shape).sum(1).astype(own.dtype)
        for name in ("scale", "sinks"):
            x, own = getattr(gradients, name), getattr(inputs, name)
            if x is not None:
                gradients = gradients._replace(**{name: narrow(x, own)})
        if gradients.scores:
            own = inputs.scores.operands()
            gradients = gradients._replace(
                scores={n: narrow(x, own[n].array) for n, x in gradients.scores.items()}
            )
        return gradients, jax.tree.map(lambda _: True, gradients)

    return run(*leaves)


def _fold_problem(problem: Problem, size: int, folded: Inputs) -> Problem:
    return problem.with_batch(problem.batch * size, abstract(folded.mask), abstract(folded.scores))


def _fold_inputs(problem: Problem, size: int, tree: Any, leaves: Any, mapped: Any, wanted: Wanted) -> Inputs:
    inputs = jax.tree.unflatten(tree, leaves)
    flags = jax.tree.unflatten(tree, mapped)
    fold = lambda x, m: _fold(x, size, m, problem.batch)
    share = lambda x, m: _fold(x, size, m, problem.batch) if m else x
    # A gradient is wanted of each mapped entry on its own, and is summed before it is rounded.
    widen = lambda x, m: fold(x.astype(problem.accumulator), m)
    spread = {"query": fold, "key": fold, "value": fold}
    spread |= {name: widen for name in ("scale", "sinks") if getattr(wanted, name)}
    folded = {
        name: jax.tree.map(spread.get(name, share), getattr(inputs, name), getattr(flags, name))
        for name in Inputs._fields
    }
    if inputs.scores is not None:
        leaves, tree = jax.tree.flatten(inputs.scores)
        parts = zip(inputs.scores.operands(), leaves, jax.tree.leaves(flags.scores), strict=True)
        leaves = [(widen if name in wanted.scores else share)(x, m) for name, x, m in parts]
        folded["scores"] = jax.tree.unflatten(tree, leaves)
    return Inputs(**folded)


def _fold(x: jax.Array, size: int, mapped: bool, batch: int) -> jax.Array:
    """Make ``[size, b, ...]`` (or an unmapped ``[b, ...]``) into ``[size * batch, ...]``."""
    if not mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.tile(x, (1, batch // x.shape[1], *[1] * (x.ndim - 2)))
    return x.reshape(size * batch, *x.shape[2:])


def _unfold(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])

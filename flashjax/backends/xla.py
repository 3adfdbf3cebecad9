"""The portable backend: tiled attention in plain JAX, forward and backward, on any device.

Work partition. Batch rows and key/value heads are cut into chunks; the chunks run one after the other.
Within a chunk the forward pass walks query tiles, and for each the key tiles that the mask does not hide,
with the online softmax. The backward pass walks key tiles, and for each the query tiles that see them:
it recomputes the probabilities from lse and makes five products, so that dK and dV stay in the loop's
state and dQ is added to in place. The query heads that share a key head are rows of one tile. No pass
differentiates through its loops.

Memory. Beyond the results: one chunk of q, k, v in float32 (on CPU), its gradients, and a few tiles.
Linear in T and S, and nothing is padded: a last tile that would stick out is moved back until it fits.
The positions it then shares with the tile before count there, and are hidden where a sum would take
them twice.

Time. Proportional to the visible tiles, plus one vector of T/block or S/block flags a tile row. Results
repeat bit for bit.

Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flashjax import dropout, scores, softmax, tiles
from flashjax.operands import Operand, diagonals
from flashjax.problem import Gradients, Inputs, Problem, Results, Wanted


class Config(NamedTuple):
    """Speed knobs: the largest tile, and how many logits a step of the loop should hold."""

    rows: int  # query rows of a tile, all heads of a group together
    keys: int
    logits: int


# Two x86-64 cores, jax 0.10.2, 2026-11-30, B1 T4096 N8 D64 float32, forward + gradient in a sketch
# of these loops without masks, seconds causal /
# full: 512x512 0.84 / 1.45, 256x256 1.06 / 2.41, 1024x512 1.04 / 1.34, 256x1024 1.12 / 1.63. An
# accelerator wants many heads a step instead; that row is a choice, not a measurement.
CONFIGS = {"cpu": Config(512, 512, 2**18), "accelerator": Config(512, 512, 2**24)}


class Plan(NamedTuple):
    """How a call is cut: chunks of ``rows`` batch rows by ``heads`` key/value heads, tiles within."""

    problem: Problem
    blocks: tiles.Blocks
    rows: int
    heads: int
    operand_dtype: Any  # of the factors of each product

    @property
    def chunks(self) -> int:
        return (self.problem.batch // self.rows) * (self.problem.kv_heads // self.heads)

    @property
    def always_full(self) -> bool:
        """Whether no tile of any chunk needs a mask."""
        return self.problem.mask is None and not self.ragged_q and not self.ragged_k

    @property
    def ragged_q(self) -> bool:
        return self.blocks.query_length % self.blocks.block_q != 0

    @property
    def ragged_k(self) -> bool:
        return self.blocks.key_length % self.blocks.block_k != 0


def make_plan(problem: Problem, inputs: Inputs, config: Config | None = None) -> Plan:
    """Choose tiles and chunks; both follow from the sizes alone."""
    on_cpu = jax.default_backend() == "cpu"
    config = config or CONFIGS["cpu" if on_cpu else "accelerator"]
    group = problem.group
    block_q = tiles.fit(problem.query_length, max(8, config.rows // group))
    block_k = tiles.fit(problem.key_length, config.keys)
    pairs = max(1, config.logits // (group * block_q * block_k))
    heads = _divisor(problem.kv_heads, pairs)
    rows = 1
    if heads == problem.kv_heads:
        # An array of b rows serves row r % b, so a chunk must not straddle a multiple of b.
        arrays = jax.tree.leaves(inputs[3:])
        common = math.gcd(problem.batch, *(x.shape[0] for x in arrays if x.shape[0] > 1))
        rows = _divisor(common, pairs // heads)
    return Plan(
        problem,
        tiles.Blocks(problem.query_length, problem.key_length, block_q, block_k),
        rows,
        heads,
        # CPUs have no half-precision products: XLA would widen each tile again and again.
        problem.accumulator if on_cpu else problem.dtype,
    )


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most ``most``."""
    return max(d for d in range(1, min(n, max(most, 1)) + 1) if n % d == 0)


class Chunk(NamedTuple):
    """One chunk of a call: where it starts, and the mask's bounds on its tiles."""

    plan: Plan
    inputs: Inputs
    row: jax.Array  # first batch row
    head: jax.Array  # first key/value head
    summaries: dict[str, tiles.Range]

    # ---- cutting arrays ----

    def rows_of(self, x: jax.Array, heads: int, dtype: Any) -> jax.Array:
        """Cut ``[B, L, H, d]`` to the chunk's ``[rows, heads of the chunk, L, d]``."""
        plan = self.plan
        share = heads // plan.problem.kv_heads
        start = (self.row, 0, self.head * share, 0)
        size = (plan.rows, x.shape[1], plan.heads * share, x.shape[3])
        return _slice(x, start, size).swapaxes(1, 2).astype(dtype)

    def grouped(self, x: jax.Array) -> jax.Array:
        """Reshape ``[rows, heads * G, ...]`` to ``[rows, heads, G, ...]``."""
        return x.reshape(self.plan.rows, self.plan.heads, -1, *x.shape[2:])

    def window(self, shape: tuple[int, ...], q0: Any, k0: Any) -> tuple[list[Any], list[int]]:
        """Return start and size of the part of a ``[b, h, q, k]`` operand that one tile needs."""
        plan = self.plan
        group = plan.problem.group
        starts = [self.row % shape[0], self.head * group, q0, k0]
        sizes = [plan.rows, plan.heads * group, plan.blocks.block_q, plan.blocks.block_k]
        for axis, n in enumerate(shape):
            if n == 1:
                starts[axis], sizes[axis] = 0, 1
        return starts, sizes

    def cut(self, x: jax.Array, q0: Any, k0: Any, block: tuple[int, int] = (1, 1)) -> jax.Array:
        """Cut an operand ``[b, h, q, k]`` to one tile, ``[rows, heads, G, q, k]`` or 1 for each."""
        starts, sizes = self.window(x.shape, q0, k0)
        for axis, entry in ((2, block[0]), (3, block[1])):
            if entry > 1 and x.shape[axis] > 1:
                index = (starts[axis] + jnp.arange(sizes[axis], dtype=jnp.int32)) // entry
                x = jnp.take(x, index, axis=axis)
                starts[axis] = 0
        return self.split_heads(_slice(x, starts, sizes))

    def split_heads(self, x: jax.Array) -> jax.Array:
        heads = (1, 1) if x.shape[1] == 1 else (self.plan.heads, self.plan.problem.group)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    # ---- indices ----

    def positions(self, q0: Any, k0: Any) -> tuple[jax.Array, ...]:
        """Return global b, h, q, k of a tile, each with the five dimensions [b, h, G, q, k]."""
        plan, problem = self.plan, self.plan.problem
        b = (self.row + jnp.arange(plan.rows, dtype=jnp.int32)) % problem.batch_period
        h = self.head * problem.group + jnp.arange(plan.heads * problem.group, dtype=jnp.int32)
        q = q0 + jnp.arange(plan.blocks.block_q, dtype=jnp.int32)
        k = k0 + jnp.arange(plan.blocks.block_k, dtype=jnp.int32)
        return (
            b.reshape(-1, 1, 1, 1, 1),
            h.reshape(1, plan.heads, problem.group, 1, 1),
            q.reshape(1, 1, 1, -1, 1),
            k.reshape(1, 1, 1, 1, -1),
        )

    def visible(self, i: Any, j: Any, sums_over_q: bool) -> jax.Array:
        """Evaluate the mask on tile (i, j), and hide what an earlier tile already counted."""
        plan = self.plan
        q0, k0 = plan.blocks.queries(i).lo, plan.blocks.keys(j).lo
        b, h, q, k = self.positions(q0, k0)
        seen = jnp.ones((1, 1, 1, plan.blocks.block_q, plan.blocks.block_k), bool)
        mask = self.inputs.mask
        if mask is not None:
            operands = {
                name: self.cut(operand.array, q0, k0, operand.block)
                for name, operand in mask.operands().items()
            }
            seen = seen & mask.element(b, h, q, k, **operands)
        if plan.ragged_k:
            seen = seen & (k >= j * plan.blocks.block_k)
        if plan.ragged_q and sums_over_q:
            seen = seen & (q >= i * plan.blocks.block_q)
        return seen

    def keep(self, i: Any, j: Any) -> jax.Array | None:
        """Return the dropout keep mask of tile (i, j), None without dropout."""
        plan = self.plan
        if plan.problem.dropout_rate == 0:
            return None
        b, h, q, k = self.positions(plan.blocks.queries(i).lo, plan.blocks.keys(j).lo)
        if plan.problem.broadcast_dropout:
            b, h = b[:1] * 0, h[:, :1, :1] * 0
        words = self.inputs.dropout_words
        size = min(plan.rows, words.shape[0])
        words = lax.dynamic_slice_in_dim(words, self.row % words.shape[0], size)
        first, second = (words[:, n].reshape(-1, 1, 1, 1, 1) for n in (0, 1))
        return dropout.keep((first, second), b, h, q, k, plan.problem.dropout_rate)

    # ---- walking tiles ----

    def walk(self, i: Any, j: Any, sums_over_q: bool) -> tuple[jax.Array, Any, jax.Array]:
        """Order the tiles of one row (j a vector) or column (i a vector) for a visit.

        Returns:
          ``(order, count, full)``: tile indices, how many of them to visit, and by tile index whether
          the tile is visible throughout.
        """
        plan, mask = self.plan, self.inputs.mask
        line = jnp.shape(i + j)
        full, empty = jnp.ones(line, bool), jnp.zeros(line, bool)
        if mask is not None:
            b, h, _, _ = self.positions(0, 0)
            i4, j4 = jnp.reshape(i, (1, 1, -1, 1)), jnp.reshape(j, (1, 1, 1, -1))
            # The range of every operand in the tiles of the line, by the same cut as a tile's values.
            ranges = {
                name: tiles.Range(*(self._line(x, i4, j4) for x in bounds))
                for name, bounds in self.summaries.items()
            }
            empty, full = tiles.classify(
                mask, ranges, plan.blocks, b.reshape(-1, 1, 1, 1), h.reshape(1, -1, 1, 1), i4, j4
            )
            empty, full = (jnp.all(x, axis=(0, 1)).reshape(line) for x in (empty, full))
        if plan.ragged_k:
            full = full & (j != plan.blocks.count_k - 1)
        if plan.ragged_q and sums_over_q:
            full = full & (i != plan.blocks.count_q - 1)
        return *tiles.visible_first(empty), full

    def _line(self, x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        starts, sizes = self.window(x.shape, 0, 0)
        for axis, index in ((2, i), (3, j)):
            if x.shape[axis] > 1:
                starts[axis] = 0 if index.size == x.shape[axis] else index.reshape(())
                sizes[axis] = index.size
        return _slice(x, starts, sizes)

    def add_to(self, total: jax.Array, part: jax.Array, q0: Any, k0: Any) -> jax.Array:
        """Add one tile ``[rows, heads, G, q, k]`` to an array ``[b, h, q, k]`` that was broadcast."""
        axes = {0: (0,), 1: (1, 2), 2: (3,), 3: (4,)}
        spread = tuple(a for n, group in axes.items() if total.shape[n] == 1 for a in group)
        starts, sizes = self.window(total.shape, q0, k0)
        part = jnp.sum(part, axis=spread, keepdims=True).reshape(
            [1 if total.shape[n] == 1 else sizes[n] for n in range(4)]
        )
        old = _slice(total, starts, sizes)
        return _update(total, old + part.astype(total.dtype), starts)

    def logits(self, qk: jax.Array, i: Any, j: Any) -> tuple[jax.Array, Callable]:
        """Turn products of tile (i, j) into logits, before the mask.

        Returns:
          ``(s, pull)``: ``pull(ds)`` returns the gradients of the scaled products and of each part of an
          operand of the scores, by name (see `operand_window`).
        """
        problem, inputs = self.plan.problem, self.inputs
        q0, k0 = self.plan.blocks.queries(i).lo, self.plan.blocks.keys(j).lo
        scale = problem.default_scale
        if problem.scaled:
            scale = self.cut(inputs.scale, q0, k0)
        s, slope = scores.logits(qk, scale, problem.softcap)
        if inputs.scores is None:
            return s, lambda ds: (scores.through_softcap(ds, slope), {})
        operands = inputs.scores.operands()
        position = self.positions(q0, k0)

        def change(s, parts):
            spread = {n: self.spread(x, operands[n]) for n, x in parts.items()}
            return inputs.scores.apply(s, position, spread)

        parts = {n: _slice(x.array, *self.operand_window(x, q0, k0)) for n, x in operands.items()}
        # Cast here and not within: a gradient is rounded to an operand's dtype once, when it is complete.
        parts = scores.in_dtype(parts, s.dtype)
        s, back = jax.vjp(change, s, parts)

        def pull(ds):
            ds, gradients = back(ds)
            return scores.through_softcap(ds, slope), gradients

        return s, pull

    def operand_window(self, operand: Operand, q0: Any, k0: Any) -> tuple[list[Any], list[int]]:
        """Return start and size of the part of an operand of the scores that one tile needs."""
        starts, sizes = self.window(operand.array.shape, q0, k0)
        if operand.relative and operand.array.shape[3] > 1:
            blocks = self.plan.blocks
            starts[3] = k0 - q0 + (blocks.query_length - blocks.block_q)
            sizes[3] = blocks.block_q + blocks.block_k - 1
        return starts, sizes

    def spread(self, part: jax.Array, operand: Operand) -> jax.Array:
        """Make such a part ``[rows, heads, G, q, k]``, or 1 for each."""
        if operand.relative and operand.array.shape[3] > 1:
            part = diagonals(part, self.plan.blocks.block_q, self.plan.blocks.block_k)
        return self.split_heads(part)

    def sinks(self) -> jax.Array | None:
        """Return the sinks of the chunk's heads, ``[rows, heads, G, 1]``."""
        return self.cut(self.inputs.sinks, 0, 0)[..., 0] if self.plan.problem.sinks else None


def _each_chunk(plan: Plan, inputs: Inputs, body: Callable, carry: Any) -> Any:
    """Run ``body(chunk, carry) -> carry`` on every chunk."""
    summaries = {} if inputs.mask is None else tiles.summarize(inputs.mask, plan.blocks)
    across = plan.problem.kv_heads // plan.heads

    def step(n, carry):
        row = (n // across) * plan.rows
        return body(Chunk(plan, inputs, row, (n % across) * plan.heads, summaries), carry)

    return _loop(plan.chunks, step, carry)


def _loop(count: int | jax.Array, step: Callable, carry: Any) -> Any:
    """Run ``step(n, carry)`` for n = 0..count-1, n in int32 also in 64-bit mode."""
    return lax.fori_loop(0, count, lambda n, carry: step(n.astype(jnp.int32), carry), carry)


def _starts(starts: Any) -> list[Any]:
    return [np.int32(x) if isinstance(x, int) else x for x in starts]


def _slice(x: jax.Array, starts: Any, sizes: Any) -> jax.Array:
    """Slice at int32 positions, also in 64-bit mode."""
    return lax.dynamic_slice(x, _starts(starts), sizes)


def _update(x: jax.Array, part: jax.Array, starts: Any) -> jax.Array:
    return lax.dynamic_update_slice(x, part, _starts(starts))


def _product(problem: Problem, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=problem.precision, preferred_element_type=problem.accumulator)


def _rows(x: jax.Array) -> jax.Array:
    """Make the heads of a group rows of one tile: ``[b, h, G, q, ...]`` to ``[b, h, G * q, ...]``."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def _without_dead(seen: jax.Array, x: jax.Array, keys: bool) -> jax.Array:
    """Zero rows of a tile that take no part in it, which may hold NaN: 0 * NaN must not be summed."""
    axes = (2, 3) if keys else (4,)
    alive = jnp.any(seen, axis=axes)
    alive = jnp.broadcast_to(alive, x.shape[:-1])
    return jnp.where(alive[..., None], x, 0)


def forward(problem: Problem, inputs: Inputs, config: Config | None = None) -> Results:
    """Compute the results of a call; see the module's docstring."""
    plan = make_plan(problem, inputs, config)
    blocks, group = plan.blocks, problem.group
    zeros = lambda shape, dtype, value=0: lax.full_like(inputs.query, value, dtype, shape)
    tile_rows = (plan.rows, plan.heads, group, blocks.block_q)

    def chunk_body(chunk: Chunk, carry):
        q_all = chunk.grouped(chunk.rows_of(inputs.query, problem.heads, plan.operand_dtype))
        k_all = chunk.rows_of(inputs.key, problem.kv_heads, plan.operand_dtype)
        v_all = chunk.rows_of(inputs.value, problem.kv_heads, plan.operand_dtype)

        def query_tile(i, carry):
            q0 = blocks.queries(i).lo
            q = _rows(lax.dynamic_slice_in_dim(q_all, q0, blocks.block_q, 3))

            def key_tile(j, state, masked):
                m, l, acc = state
                k0 = blocks.keys(j).lo
                k = lax.dynamic_slice_in_dim(k_all, k0, blocks.block_k, 2)
                v = lax.dynamic_slice_in_dim(v_all, k0, blocks.block_k, 2)
                qk = _product(problem, "bhqd,bhkd->bhqk", q, k)
                s, _ = chunk.logits(qk.reshape(*tile_rows, blocks.block_k), i, j)
                if masked:
                    seen = chunk.visible(i, j, sums_over_q=False)
                    s = jnp.where(seen, s, -jnp.inf)
                    v = _without_dead(seen, v, keys=True)
                p, alpha, m, l = softmax.step(m, l, s)
                keep = chunk.keep(i, j)
                if keep is not None:
                    p = jnp.where(keep, p, 0)
                pv = _product(problem, "bhqk,bhkd->bhqd", _rows(p).astype(v.dtype), v)
                return m, l, acc * _rows(alpha)[..., None] + pv

            # Last where the largest logit of a key is asked for.
            first, last = (None, chunk.sinks()) if problem.max_logit else (chunk.sinks(), None)
            state = (
                *softmax.begin(tile_rows, first, zeros((), problem.accumulator)),
                zeros((*q.shape[:3], problem.value_dim), problem.accumulator),
            )
            if plan.always_full:
                step = lambda n, state: key_tile(n, state, masked=False)
                m, l, acc = _loop(blocks.count_k, step, state)
            else:
                order, count, full = chunk.walk(
                    i, jnp.arange(blocks.count_k, dtype=jnp.int32), sums_over_q=False
                )
                step = _either(full, order, key_tile)
                m, l, acc = _loop(count, step, state)
            inverse, lse = softmax.finish(m, l, last)
            inverse = inverse / (1 - problem.dropout_rate)
            out = acc.reshape(*tile_rows, -1) * inverse[..., None]
            results = Results(out.astype(problem.dtype), lse, m if problem.max_logit else None)
            return jax.tree.map(
                lambda x, tile: lax.dynamic_update_slice_in_dim(x, tile, q0, 3), carry, results
            )

        heads = (plan.rows, plan.heads, group, problem.query_length)
        out, *by_row = _loop(blocks.count_q, query_tile, empty((*heads, problem.value_dim), heads))
        rows = (plan.rows, plan.heads * group, problem.query_length)
        put = lambda whole, x: _update(whole, x.reshape(rows), (chunk.row, chunk.head * group, 0))
        return Results(
            _put(chunk, carry.out, out.reshape(*rows, -1), group), *jax.tree.map(put, list(carry[1:]), by_row)
        )

    def empty(shape, rows):
        top = zeros(rows, problem.accumulator) if problem.max_logit else None
        return Results(zeros(shape, problem.dtype), zeros(rows, problem.accumulator), top)

    carry = empty(
        (problem.batch, problem.query_length, problem.heads, problem.value_dim),
        (problem.batch, problem.heads, problem.query_length),
    )
    return _each_chunk(plan, inputs, chunk_body, carry)


def backward(
    problem: Problem,
    inputs: Inputs,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    wanted: Wanted,
    config: Config | None = None,
) -> Gradients:
    """Compute the gradients of a call; see the module's docstring."""
    plan = make_plan(problem, inputs, config)
    blocks, group, wide = plan.blocks, problem.group, problem.accumulator
    zeros = lambda shape, dtype: lax.full_like(inputs.query, 0, dtype, shape)
    tile_rows = (plan.rows, plan.heads, group, blocks.block_q)
    kept_weight = 1 / (1 - problem.dropout_rate)

    def chunk_body(chunk: Chunk, carry):
        q_all, do_all = (
            chunk.grouped(chunk.rows_of(x, problem.heads, plan.operand_dtype)) for x in (inputs.query, dout)
        )
        k_all, v_all = (
            chunk.rows_of(x, problem.kv_heads, plan.operand_dtype) for x in (inputs.key, inputs.value)
        )
        o_all = chunk.grouped(chunk.rows_of(out, problem.heads, wide))
        delta_all = jnp.sum(do_all.astype(wide) * o_all, axis=-1)
        head = lambda x: chunk.grouped(
            _slice(
                x,
                (chunk.row, chunk.head * group, 0),
                (plan.rows, plan.heads * group, problem.query_length),
            )
        )
        lse_all = head(lse)
        if dlse is not None:
            delta_all = delta_all - head(dlse)

        def tile(i, j, k, v, masked):
            """Return this tile's share of dq, dk, dv and of the gradients of what the scores read."""
            q0 = blocks.queries(i).lo
            part = lambda x: lax.dynamic_slice_in_dim(x, q0, blocks.block_q, 3)
            q, do, row_lse, delta = (part(x) for x in (q_all, do_all, lse_all, delta_all))
            seen = None
            if masked:
                seen = chunk.visible(i, j, sums_over_q=True)
                q, do = (_without_dead(seen, x, keys=False) for x in (q, do))
                k = _without_dead(seen, k, keys=True)
            q, do = _rows(q), _rows(do)
            qk = _product(problem, "bhqd,bhkd->bhqk", q, k).reshape(*tile_rows, -1)
            s, pull = chunk.logits(qk, i, j)
            if masked:
                s = jnp.where(seen, s, -jnp.inf)
            p = softmax.weights(s, row_lse)
            dp = _product(problem, "bhqd,bhkd->bhqk", do, v).reshape(p.shape)
            keep = chunk.keep(i, j)
            p_kept = p
            if keep is not None:
                p_kept = jnp.where(keep, p, 0) * kept_weight
                dp = jnp.where(keep, dp, 0) * kept_weight
            ds = p * (dp - delta[..., None])
            if masked:
                ds = jnp.where(seen, ds, 0)
            p_kept = _rows(p_kept).astype(q.dtype)
            dqk, dscores = pull(ds)
            dqk = _rows(dqk).astype(q.dtype)
            return (
                _product(problem, "bhqk,bhkd->bhqd", dqk, k).reshape(*tile_rows, -1),
                _product(problem, "bhqk,bhqd->bhkd", dqk, q),
                _product(problem, "bhqk,bhqd->bhkd", p_kept, do),
                {name: dscores[name] for name in wanted.scores},
            )

        def key_tile(j, carry):
            dq_all, dk_all, dv_all, dscores = carry
            k0 = blocks.keys(j).lo
            k = lax.dynamic_slice_in_dim(k_all, k0, blocks.block_k, 2)
            v = lax.dynamic_slice_in_dim(v_all, k0, blocks.block_k, 2)

            def add(i, state, parts):
                dq_all, dk, dv, dscores = state
                dq_part, dk_part, dv_part, more = parts
                q0 = blocks.queries(i).lo
                dq_all = _add_slice(dq_all, dq_part, q0, 3)
                for name, x in more.items():
                    starts, sizes = chunk.operand_window(inputs.scores.operands()[name], q0, k0)
                    old = _slice(dscores[name], starts, sizes)
                    dscores = dscores | {name: _update(dscores[name], old + x.astype(wide), starts)}
                return dq_all, dk + dk_part, dv + dv_part, dscores

            state = (dq_all, zeros(k.shape, wide), zeros(v.shape, wide), dscores)
            if plan.always_full:
                step = lambda i, state: add(i, state, tile(i, j, k, v, masked=False))
                state = _loop(blocks.count_q, step, state)
            else:
                order, count, full = chunk.walk(
                    jnp.arange(blocks.count_q, dtype=jnp.int32), j, sums_over_q=True
                )
                # The branches return only their own tile: a branch that carried dQ would copy it.
                parts = _either(full, order, lambda i, _, masked: tile(i, j, k, v, masked))
                step = lambda n, state: add(order[n], state, parts(n, None))
                state = _loop(count, step, state)
            dq_all, dk, dv, dscores = state
            return dq_all, _add_slice(dk_all, dk, k0, 2), _add_slice(dv_all, dv, k0, 2), dscores

        dqs, dks, dvs, dscores, dscale, dsinks = carry
        state = (
            zeros(q_all.shape, wide),
            zeros(k_all.shape, wide),
            zeros(v_all.shape, wide),
            dscores,
        )
        dq, dk, dv, dscores = _loop(blocks.count_k, key_tile, state)
        if wanted.sinks:
            starts, sizes = chunk.window(dsinks.shape, 0, 0)
            own = _slice(inputs.sinks, starts, sizes)
            flat = lambda x: x.reshape(plan.rows, -1, problem.query_length)
            more = scores.sink_gradient(own, flat(lse_all), flat(delta_all))
            dsinks = _update(dsinks, _slice(dsinks, starts, sizes) + more, starts)
        if wanted.scale:
            alive = jnp.where(lse_all == -jnp.inf, 0, jnp.einsum("bhgqd,bhgqd->bhgq", dq, q_all))
            dscale = chunk.add_to(dscale, jnp.sum(alive, (1, 2, 3)).reshape(-1, 1, 1, 1, 1), 0, 0)
        scale = problem.default_scale
        if problem.scaled:
            scale = chunk.cut(inputs.scale, 0, 0)
        dq = (dq * scale).reshape(plan.rows, -1, *dq.shape[3:])
        dk = dk * (scale[:, :, 0] if problem.scaled else scale)
        return (
            _put(chunk, dqs, dq, group),
            _put(chunk, dks, dk, 1),
            _put(chunk, dvs, dv, 1),
            dscores,
            dscale,
            dsinks,
        )

    carry = (
        *(zeros(x.shape, problem.dtype) for x in inputs[:3]),
        {n: zeros(inputs.scores.operands()[n].array.shape, wide) for n in wanted.scores},
        zeros(inputs.scale.shape, wide) if wanted.scale else None,
        zeros(inputs.sinks.shape, wide) if wanted.sinks else None,
    )
    dq, dk, dv, dscores, dscale, dsinks = _each_chunk(plan, inputs, chunk_body, carry)
    dscores = {n: x.astype(inputs.scores.operands()[n].array.dtype) for n, x in dscores.items()}
    return Gradients(dq, dk, dv, dscores, dscale, dsinks)


def _either(full: jax.Array, order: jax.Array, tile: Callable) -> Callable:
    """Make a loop step that visits tile ``order[n]``, with the mask only where it is not full."""

    def step(n, state):
        index = order[n]
        return lax.cond(
            full[index],
            lambda index, state: tile(index, state, masked=False),
            lambda index, state: tile(index, state, masked=True),
            index,
            state,
        )

    return step


def _add_slice(total: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    old = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, axis)


def _put(chunk: Chunk, whole: jax.Array, part: jax.Array, share: int) -> jax.Array:
    """Write a chunk's ``[rows, heads, L, d]`` into ``[B, L, H, d]``, ``share`` heads a key head."""
    part = part.swapaxes(1, 2).astype(whole.dtype)
    return _update(whole, part, (chunk.row, 0, chunk.head * share, 0))

"""The public functions, and the one place where forward and backward are linked.

One call flows ``flash_attention`` -> ``problem.make`` (every error) -> ``backends.select`` -> the custom
derivative -> ``backend.forward``; its gradient enters at ``backend.backward`` with the same problem.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from flashjax import backends, masks, scores
from flashjax import problem as problems
from flashjax.operands import Sizes
from flashjax.problem import Inputs, Problem, Results, Wanted

RESIDUAL_NAMES = ("flash_attention_out", "flash_attention_lse")


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    position_bias: Any = None,
    alibi_slopes: Any = None,
    score_fn: Any = None,
    sinks: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: str | None = None,
    return_residual: bool = False,
    return_max_logit: bool = False,
) -> Any:
    r"""Compute exact attention in memory linear in the sequence lengths.

    .. math::
        \mathrm{out} = \mathrm{softmax}(\mathrm{softcap}(\mathrm{scale}\, Q K^T) + \mathrm{bias}) V

    where bias is the sum of all that is added, ``score_fn`` comes after it, and only the keys that the mask
    shows take part. Letters: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, D head
    dim of query and key, Dv of value.

    Args:
      query: ``[B, T, N, D]`` or ``[T, N, D]``; float16, bfloat16, float32 or float64.
      key: ``[B, S, K, D]`` or ``[S, K, D]``, dtype of query. N must be a multiple of K; query head h reads
        key/value head ``h // G`` (grouped-query attention; K = 1 is multi-query attention).
      value: ``[B, S, K, Dv]`` or ``[S, K, Dv]``, dtype of query. Dv may differ from D.
      bias: added to the logits after softcap; broadcastable to ``[B, N, T, S]``, any floating dtype. Its
        gradient has its own shape: sums over what it was broadcast along are never stored apart.
      mask: boolean array broadcastable to ``[B, N, T, S]``, True where a query may attend, or a `Mask`.
      position_bias: added likewise, by relative position in linear memory: a `RelativePositionBias`, or an
        array ``[N, T + S - 1]`` (or without N, or ``[B, N, T + S - 1]``), where query i and key j meet at
        ``j - i + T - 1``.
      alibi_slopes: ``[N]`` or ``[B, N]``: adds ``-slope * abs(i - j)``; an `Alibi` aligns positions.
      score_fn: changes each logit after that, and before the mask: ``function(score, b, h, q, k)``, or a
        `ScoreFunction` with operands of its own.
      sinks: a logit per head ``[N]``, or a scalar for all, that joins the sum of exponentials and has no
        value; 0.0 is "softmax off by one". A head without one has -inf.
      scale: multiplies the logits; a real scalar, which may be traced. None is ``1 / sqrt(D)``; 0.0 is a
        value like any other.
      is_causal: let query i see keys 0..i, also where T and S differ. ``mask=Causal(align="end")`` aligns
        the last query with the last key instead.
      query_seq_lengths: int ``[B]``: queries from there on see nothing.
      key_value_seq_lengths: int ``[B]``: keys from there on are seen by none and may hold NaN.
      local_window_size: ``(left, right)``, or one int for both: query i sees keys ``i - left`` to
        ``i + right``, both included; None in a place is no limit.
      softcap: bound the scaled products to ``softcap * tanh(x / softcap)``; None does not.
      dropout_rate: probability in [0, 1) of dropping an attention weight; the others are scaled by
        ``1 / (1 - rate)``.
      dropout_key: a JAX random key, needed where ``dropout_rate > 0``. Which weights drop is a function of
        the key, row, head, query and key position alone.
      precision: of the matrix products, as for `jax.lax.dot_general`. None follows
        ``jax.default_matmul_precision``. float16 and bfloat16 always accumulate in float32.
      deterministic: ask for a backward pass that repeats bit for bit. The portable backend's always does;
        the Hopper backend's otherwise adds up the gradient of query in the order in which blocks come to
        it, and takes 1.1 to 1.3 times as long if asked.
      implementation: name of a backend; None takes the first that can. See `explain`.
      return_residual: also return the log-sum-exp.
      return_max_logit: also return the largest logit of each head, as QK-clip needs it.

    Returns:
      ``out``, ``[B, T, N, Dv]`` or ``[T, N, Dv]``, dtype of query. With ``return_residual``,
      ``(out, lse)``: ``lse`` is the natural log-sum-exp of each row's visible logits and of the sink,
      ``[B, T, N]`` or ``[T, N]``, float32 (float64 for float64 inputs), before dropout. A row that sees no
      key has ``out = 0``, ``lse = -inf`` (or the sink) and zero gradient.
      With ``return_max_logit`` a last ``max_logit`` joins them, ``[N]``, dtype of lse: the largest logit over
      batch rows, queries and the keys that they see, after softcap, bias and ``score_fn``; -inf where none
      is seen. A sink does not count. No gradient flows through it. Under ``shard_map`` it is the maximum of a
      shard.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it, what it is and what it must be.
      UnsupportedError: the backend named by ``implementation`` does not do this call.

    Notes:
      Memory is linear and time proportional to the visible tiles, forward and backward. Every floating
      argument gets a gradient, through ``out`` and through ``lse``. First derivatives in reverse mode only:
      ``jax.jvp`` and ``jax.jacfwd`` raise JAX's TypeError for functions with a custom derivative, a
      gradient of a gradient one of our own; ``jax.nn.dot_product_attention`` has both.
      Under ``jax.checkpoint`` the results carry the names ``"flash_attention_out"`` and
      ``"flash_attention_lse"``: with ``jax.checkpoint_policies.save_only_these_names`` of both, the
      forward pass is not run again.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1000, 4, 64))
      >>> out, lse = flash_attention(q, k, v, is_causal=True, return_residual=True)
      >>> out.shape, lse.shape
      ((2, 1000, 4, 64), (2, 1000, 4))

    Source: Dao et al., "FlashAttention" (2022), section 3.1 and appendix B; Dao, "FlashAttention-2"
    (2023), algorithms 1 and 2.
    """
    return attend(
        query,
        key,
        value,
        bias,
        mask,
        position_bias=position_bias,
        alibi_slopes=alibi_slopes,
        score_fn=score_fn,
        sinks=sinks,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
        deterministic=deterministic,
        implementation=implementation,
        return_residual=return_residual,
        return_max_logit=return_max_logit,
    )


def explain(*args: Any, **kwargs: Any) -> str:
    """Print which backend a call of `flash_attention` takes, and why the others would not.

    Args:
      *args, **kwargs: those of the call. Nothing is computed.

    Returns:
      The printed text.

    Raises:
      ValueError, TypeError, UnsupportedError: as the call itself would.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.zeros((1, 8, 2, 16))
      >>> _ = explain(x, x, x, implementation="xla")  # doctest: +ELLIPSIS
      backend: xla
        hopper: ...
        reference: could do this call, but only if asked: implementation='reference'
    """
    call = inspect.signature(flash_attention).bind(*args, **kwargs)
    call.apply_defaults()
    options = dict(call.arguments)
    implementation = options.pop("implementation")
    options.pop("return_residual")
    problem, _ = _prepare(**options, broadcast_dropout=False)
    text = backends.describe(problem, implementation)
    print(text)
    return text


def attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    implementation: str | None = None,
    return_residual: bool = False,
    return_max_logit: bool = False,
    broadcast_dropout: bool = False,
    **options: Any,
) -> Any:
    """Run `flash_attention`, with ``broadcast_dropout`` (one keep mask for all rows and heads) on top."""
    problems.check_flag("return_residual", return_residual)
    options.update(broadcast_dropout=broadcast_dropout, return_max_logit=return_max_logit)
    problem, inputs = _prepare(query, key, value, bias, mask, **options)
    backend = backends.select(problem, implementation)
    if problem.empty:
        shape = (problem.batch, problem.query_length, problem.heads, problem.value_dim)
        out = jnp.zeros(shape, problem.dtype)
        lse = jnp.full(shape[:3], -jnp.inf, problem.accumulator)
        if problem.sinks:
            lse = jnp.broadcast_to(inputs.sinks[:, None, :, 0, 0], shape[:3])
        max_logit = jnp.full(problem.heads, -jnp.inf, problem.accumulator)
    else:
        out, lse, top = _attention_jit(backend, problem, _vary_alike(inputs))
        lse = lse.swapaxes(1, 2)
        max_logit = None if top is None else lax.stop_gradient(top).max(axis=(0, 2))
    if jnp.ndim(query) == 3:
        out, lse = out[0], lse[0]
    more = [lse] * return_residual + [max_logit] * return_max_logit
    return (out, *more) if more else out


def _prepare(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    position_bias: Any = None,
    alibi_slopes: Any = None,
    score_fn: Any = None,
    sinks: Any = None,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    **options: Any,
) -> tuple[Problem, Inputs]:
    """Check a call and split it; all the arguments that hide something become one mask, and all that change a
    logit become one value too."""
    query, key, value = problems.check_qkv(query, key, value)
    batch, length, heads, _ = query.shape
    sizes = Sizes(batch, heads, length, key.shape[1])
    whole_mask = masks.from_arguments(
        mask,
        sizes,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
    )
    sizes = sizes._replace(query_lengths=query_seq_lengths, key_lengths=key_value_seq_lengths)
    changes = scores.from_arguments(bias, position_bias, alibi_slopes, score_fn, sizes)
    return problems.make(query, key, value, changes, whole_mask, sinks=sinks, **options)


def _vary_alike(inputs: Inputs) -> Inputs:
    """Under ``shard_map``, mark every array as varying over the mesh axes that any of them varies over.

    Done outside the custom derivative, so that JAX sums the gradients of replicated arrays.
    """
    return _vary_like(inputs, inputs)


def _vary_like(results: Any, inputs: Any) -> Any:
    """Under ``shard_map``, mark results as varying over the mesh axes that any input varies over: what comes
    out of a kernel is marked as varying over none."""
    varying = lambda x: getattr(jax.typeof(x).manual_axis_type, "varying", frozenset())
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(inputs)))

    def cast(x):
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(backend: backends.Backend, problem: Problem, inputs: Inputs) -> Results:
    return _vary_like(backends.run_forward(backend, problem, inputs), inputs)


def _first_order_only(run: Any) -> Any:
    """Wrap a pass so that differentiating it (a derivative of a derivative) raises a sentence."""
    wrapped = jax.custom_jvp(run)

    @wrapped.defjvp
    def _(primals, tangents):
        raise TypeError(
            "flash_attention has first derivatives in reverse mode only; for a gradient of a gradient or a "
            "Hessian use jax.nn.dot_product_attention in its place"
        )

    return wrapped


def _attention_fwd(backend: backends.Backend, problem: Problem, primals: Inputs) -> Any:
    inputs = jax.tree.map(lambda x: x.value, primals)
    perturbed = lambda x: x is not None and x.perturbed
    wanted = Wanted(
        scores=tuple(
            name
            for name, x in zip(inputs.operand_names, jax.tree.leaves(primals.scores), strict=True)
            if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
        ),
        scale=perturbed(primals.scale),
        sinks=perturbed(primals.sinks),
    )
    run = _first_order_only(functools.partial(backends.run_forward, backend, problem))
    out, lse, top = _vary_like(run(inputs), inputs)
    out = checkpoint_name(out, RESIDUAL_NAMES[0])
    lse = checkpoint_name(lse, RESIDUAL_NAMES[1])
    return Results(out, lse, top), (inputs, out, lse, jnp.zeros(wanted.as_shape(inputs)))


def _attention_bwd(backend: backends.Backend, problem: Problem, saved: Any, cotangents: Any) -> Any:
    inputs, out, lse, flags = saved
    wanted = Wanted.from_shape(flags.shape, inputs)
    dout, dlse, _ = cotangents
    zero = jax.custom_derivatives.SymbolicZero
    if type(dout) is zero:
        dout = jnp.zeros_like(out)
    if type(dlse) is zero:
        dlse = None
    run = _first_order_only(lambda *x: backends.run_backward(backend, problem, *x, wanted))
    gradients = _vary_like(run(inputs, out, lse, dout, dlse), inputs)
    changes = inputs.scores if inputs.scores is None else inputs.scores.with_gradients(gradients.scores)
    return (Inputs(**gradients._replace(scores=changes)._asdict()),)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
_attention_jit = jax.jit(_attention, static_argnums=(0, 1))

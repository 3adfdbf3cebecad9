"""What happens to a logit between the product q·k and the mask, and the way back.

Forward, in this order: ``s = scale * qk``, ``s = softcap * tanh(s / softcap)``, then what is added (a bias, a
bias by relative position, ALiBi), then a function of the user's. A sink is no logit of a key: it joins the
sum of exponentials alone.

Like a mask, each of these is a function of four global indices with declared operands (see `operands`), and
elementwise: its derivative by the logit is one number a logit, that by an operand is summed over what shares
an entry.

Source: ALiBi: Press et al., "Train Short, Test Long" (2022), section 3; relative position bias by buckets:
Raffel et al., "Exploring the Limits of Transfer Learning" (2020), section 2.1; sinks: Xiao et al., "Efficient
Streaming Language Models with Attention Sinks" (2024), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flashjax import problem as checks
from flashjax.operands import Aligned, Composite, Declared, Indexed, Sizes


class Bias(Indexed):
    """Add an array, which broadcasts to ``[B, N, T, S]``."""

    array: Any
    _axes = {"array": "bhqk"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(array=self.array)

    def _label(self, name: str) -> str:
        return "bias"

    def added(self, b: Any, h: Any, q: Any, k: Any, *, array: Any) -> Any:
        """Return what is added to the logit of query q and key k."""
        return array


class Relative(Indexed):
    """Add an array by relative position, ``[B, N, T + S - 1]``: the resolved form of a position bias."""

    array: Any
    _axes = {"array": "bhr"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(array=self.array)

    def _label(self, name: str) -> str:
        return "position_bias"

    def added(self, b: Any, h: Any, q: Any, k: Any, *, array: Any) -> Any:
        """Return what is added to the logit of query q and key k."""
        return array


class RelativePositionBias(Indexed):
    """Bias by bucket of the relative position, as in T5: few numbers a head, learned.

    Distances up to half of a direction's buckets have one each; larger ones share buckets that grow
    logarithmically up to ``max_distance``, and all beyond share the last.

    Args:
      table: ``[buckets, N]``, any floating dtype: what is added in each bucket, by head.
      bidirectional: whether keys after the query have half of the buckets; otherwise they share that of
        distance 0, as in a causal decoder.
      max_distance: positive int.
      offset: int; key j stands at ``j - offset`` for the query at i. ``S - T`` aligns the last query with the
        last key.

    Raises:
      TypeError: the table is not floating.
      ValueError: it does not have two dimensions, or too few buckets; ``max_distance`` is not positive.

    Notes:
      Takes memory ``N * (T + S)``, forward and backward; the gradient of the table is exact.

    Example:
      >>> import jax.numpy as jnp
      >>> bias = RelativePositionBias(jnp.zeros((32, 8)))
      >>> bias.buckets(jnp.array([-200, -3, 0, 3, 200])).tolist()
      [15, 3, 0, 19, 31]

    Source: Raffel et al. (2020), section 2.1.
    """

    table: Any
    bidirectional: bool = True
    max_distance: int = 128
    offset: int = 0

    def __post_init__(self) -> None:
        self._freeze(
            table=checks.check_bucket_table(self.table, self.bidirectional),
            bidirectional=checks.check_flag("bidirectional", self.bidirectional),
            max_distance=checks.check_max_distance(self.max_distance),
            offset=checks.check_static_int("RelativePositionBias.offset", self.offset),
        )

    def buckets(self, distance: jax.Array) -> jax.Array:
        """Return the bucket of each relative position ``key - query``, int32."""
        count = self.table.shape[0]
        first = jnp.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first = jnp.where(distance > 0, count, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        exact = count // 2
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / max(exact, 1)
        growth = math.log(max(self.max_distance / max(exact, 1), 1 + 1e-6))
        far = exact + (jnp.log(ratio) / growth * (count - exact)).astype(jnp.int32)
        return first + jnp.where(distance < exact, distance, jnp.minimum(far, count - 1))

    def by_position(self, sizes: Sizes) -> Relative:
        """Return what is added by relative position, ``[N, T + S - 1]``."""
        count = max(sizes.query_length + sizes.key_length - 1, 0)
        distance = jnp.arange(count, dtype=jnp.int32) - (sizes.query_length - 1 + self.offset)
        # Wide before it is spread: its gradient sums over all positions of a bucket.
        table = self.table.astype(checks.accumulator_of(self.table.dtype))
        return Relative(table[self.buckets(distance)].T)


class Alibi(Aligned, Indexed):
    """Subtract a slope times the distance of query and key.

    Args:
      slopes: ``[N]`` or ``[B, N]``, any floating dtype.
      offset: how far queries are shifted against keys, as in `Causal`: an int, or an integer array, a scalar
        or one value per batch row ``[B]``.
      align: ``"start"`` uses ``offset``; ``"end"`` sets it to ``S - T``, as in `Causal`.

    Raises:
      TypeError: the slopes are not floating, or the offset is not integral.
      ValueError: ``align`` is unknown, or ``"end"`` together with an offset.

    Source: Press et al. (2022), section 3.
    """

    slopes: Any
    offset: Any = 0
    align: str = "start"
    _axes = {"slopes": "bh", "offset": "b"}  # noqa: RUF012

    def __post_init__(self) -> None:
        self._freeze(
            slopes=checks.check_slopes(self.slopes),
            offset=checks.check_offset("Alibi.offset", self.offset),
            align=checks.check_align(self.align),
        )
        checks.check_align_with_offset(self.align, self.offset)

    def _label(self, name: str) -> str:
        return "alibi_slopes" if name == "slopes" else super()._label(name)

    def added(self, b: Any, h: Any, q: Any, k: Any, *, slopes: Any, offset: Any = None) -> Any:
        """Return what is added to the logit of query q and key k."""
        at = q + (self.offset if offset is None else offset)
        # Converted before they are subtracted: a kernel does that once a row and once a column.
        return -slopes * jnp.abs(k.astype(slopes.dtype) - at.astype(slopes.dtype))


class ScoreFunction(Declared, Indexed):
    """Change each logit by a function of its own.

    Args:
      function: ``function(score, b, h, q, k, **operands) -> score``, elementwise jnp: the logit, int32
        arrays of batch row, query head, query position and key position, and the operands, all of which
        broadcast to one another. It comes after softcap and every bias, and before the mask. Arrays that it
        reads must be declared as operands; it must not close over any.
      **operands: `Operand` arrays by name. Floating ones reach the function in the dtype of the logit, and
        have gradients.

    Raises:
      TypeError: ``function`` is not callable; an operand is no `Operand`.
      ValueError: an operand's axes are not letters of ``"bhqk"`` (or ``"bhr"``) in order, or do not fit its
        array.

    Notes:
      Score functions compare by the identity of their function: define it once, outside the training step.

    Example:
      >>> import jax.numpy as jnp
      >>> from flashjax import Operand, ScoreFunction
      >>> def tilt(score, b, h, q, k, strength):
      ...     return score + strength * (k - q).astype(score.dtype)
      >>> score_fn = ScoreFunction(tilt, strength=Operand(jnp.ones(8), "h"))
    """

    function: Callable
    names: tuple[str, ...]
    axes: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...]
    arrays: tuple[Any, ...]

    def __init__(self, function: Callable, /, **operands: Any):
        self._declare(operands, relative=True, function=checks.check_score_function(function))

    def apply(self, s: Any, b: Any, h: Any, q: Any, k: Any, **operands: Any) -> Any:
        """Return the logit that takes the place of s."""
        return checks.check_score(self.function(s, b, h, q, k, **operands), s)


class Scores(Composite, Indexed):
    """All that happens to the logits of a call after softcap; None stands for what it does not ask for."""

    bias: Bias | None = None
    position: Relative | None = None
    alibi: Alibi | None = None
    function: ScoreFunction | None = None

    def __post_init__(self) -> None:
        self._freeze()

    @property
    def additive(self) -> bool:
        """Whether it only adds to a logit."""
        return self.function is None

    def added(self, position: tuple[Any, ...], operands: dict[str, Any], dtype: Any) -> Any:
        """Return the sum of what is added at ``(b, h, q, k)`` to logits of a dtype, None for nothing."""
        total = None
        for name, part in self.parts().items():
            if name != "function":
                x = part.added(*position, **self.own(name, in_dtype(operands, dtype)))
                total = x if total is None else total + x
        return total

    def apply(self, s: jax.Array, position: tuple[Any, ...], operands: dict[str, Any]) -> jax.Array:
        """Return the logits that take the place of ``s`` at ``(b, h, q, k)``; all broadcast."""
        added = self.added(position, operands, s.dtype)
        if added is not None:
            s = s + added
        if self.function is None:
            return s
        own = self.own("function", in_dtype(operands, s.dtype))
        return jnp.broadcast_to(self.function.apply(s, *position, **own), s.shape)

    def with_gradients(self, gradients: dict[str, Any]) -> Scores:
        """Return the pytree of the operands with gradients in their place, None where there is none."""
        leaves = [gradients.get(name) for name in self.operands()]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)


def in_dtype(operands: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Cast the floating operands to the dtype of the logits."""
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return {name: cast(x) for name, x in operands.items()}


def from_arguments(
    bias: Any, position_bias: Any, alibi_slopes: Any, score_fn: Any, sizes: Sizes
) -> Scores | None:
    """Make one resolved value of all the arguments that change a logit; None changes nothing."""
    parts = {}
    bias = checks.check_bias(bias)
    if bias is not None:
        parts["bias"] = Bias(bias)
    if position_bias is not None:
        if not isinstance(position_bias, RelativePositionBias):
            position_bias = Relative(checks.check_position_bias(position_bias))
        else:
            checks.check_bucket_heads(position_bias.table, sizes.heads)
            position_bias = position_bias.by_position(sizes)
        parts["position"] = position_bias
    if alibi_slopes is not None:
        parts["alibi"] = alibi_slopes if isinstance(alibi_slopes, Alibi) else Alibi(alibi_slopes)
    if score_fn is not None:
        parts["function"] = score_fn if isinstance(score_fn, ScoreFunction) else ScoreFunction(score_fn)
    return Scores(**parts).resolve(sizes) if parts else None


def logits(
    qk: jax.Array, scale: jax.Array | float, softcap: float | None, *, tanh: Callable = jnp.tanh
) -> tuple[jax.Array, jax.Array | None]:
    """Turn raw products into logits, as far as `Scores` does not.

    Args:
      qk: products of queries and keys, float32 or wider, any shape.
      scale: multiplies the products; a number or an array that broadcasts to ``qk``.
      softcap: bounds the scaled products to ``(-softcap, softcap)``; None leaves them alone.
      tanh: the hyperbolic tangent; a kernel brings one that its hardware does well.

    Returns:
      ``(s, slope)``: the logits, and d(capped)/d(scaled) in the same shape, None without a softcap.
    """
    if softcap is None:
        return qk * scale, None
    t = tanh(qk * (scale / softcap))
    return softcap * t, 1 - t * t


def through_softcap(ds: jax.Array, slope: jax.Array | None) -> jax.Array:
    """Take the gradient of the logits back to the scaled products."""
    return ds if slope is None else ds * slope


def sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Return the gradient of the sinks ``[b, N, 1, 1]``: minus the sum of their weights times delta.

    Args:
      sinks: ``[b, N, 1, 1]``, in the dtype of lse; row r of the batch has sink ``r % b``.
      lse: ``[B, N, T]``, the sink included.
      delta: ``rowsum(dO * O) - dlse``, ``[B, N, T]``.

    Notes:
      A sink is a key with the value 0: its dS is ``P * (0 - delta)``.
    """
    own = jnp.tile(sinks[..., 0], (lse.shape[0] // sinks.shape[0], 1, 1))
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(own - jnp.where(lse == -jnp.inf, 0, lse)))
    gradient = -jnp.sum(p * delta, axis=-1)
    return gradient.reshape(-1, *sinks.shape[:2]).sum(0)[..., None, None]

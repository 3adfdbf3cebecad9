"""What changes a logit, against plain definitions: values, gradients, transformations, refusals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flashjax import (
    Alibi,
    Causal,
    CustomMask,
    Operand,
    RelativePositionBias,
    ScoreFunction,
    Segments,
    backends,
    flash_attention,
)

B, T, S, N, K, D = 2, 37, 50, 4, 2, 8
R = T + S - 1


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def slow(*values):
    """Mark values of parameters: forms of which others are tested always."""
    return pytest.param(*values, marks=pytest.mark.slow)


Q, KEY, V = normal(0, B, T, N, D), normal(1, B, S, K, D), normal(2, B, S, K, D)
SLOPES = jnp.array([0.5, 0.25, 0.125, -0.3])
SINKS = jnp.array([0.5, -3.0, 2.0, 0.0])
DISTANCE = np.arange(S, dtype=np.int32) - np.arange(T, dtype=np.int32)[:, None]  # of key j from query i
PLACE = DISTANCE + T - 1  # where the two meet in an array by relative position


def attend(q, k, v, **options):
    call = functools.partial(flash_attention, implementation="small-tiles", return_residual=True)
    return call(q, k, v, **options)


def dense(q, k, v, added=0.0, change=lambda s: s, seen=True, sinks=None, softcap=None):
    """Attention by its definition; ``added``, ``seen`` and what ``change`` returns are ``[B, N, T, S]``."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") / np.sqrt(q.shape[3]).astype(q.dtype)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(seen, change(s + added), -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks.reshape(-1, 1, 1), (*s.shape[:3], 1))], -1)
    p = jax.nn.softmax(s, -1)[..., : k.shape[1]]
    out = jnp.einsum("bnts,bsnd->btnd", p, v, precision="highest")
    return out, jax.nn.logsumexp(s, -1).swapaxes(1, 2)


def close(got, wanted, **tolerance):
    tolerance = {"rtol": 1e-4, "atol": 3e-5} | tolerance
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, wanted)


@functools.partial(jax.jit, static_argnums=0)
def results(function, *arrays):
    """Return ``out, lse = function(*arrays)`` and the gradients of all arrays through both."""
    (out, lse), pull = jax.vjp(function, *arrays)
    dout, dlse = jnp.cos(jnp.arange(out.size)), jnp.sin(jnp.arange(lse.size))
    return (
        out,
        lse,
        pull((dout.reshape(out.shape).astype(out.dtype), dlse.reshape(lse.shape).astype(lse.dtype))),
    )


def check_defined(ours, theirs, *arrays):
    """Assert that keywords ``ours(*arrays)`` of a call mean what ``theirs(*arrays)`` do to `dense`."""
    got = results(lambda q, k, v, *x: attend(q, k, v, **ours(*x)), Q, KEY, V, *arrays)
    close(got, results(lambda q, k, v, *x: dense(q, k, v, **theirs(*x)), Q, KEY, V, *arrays))


# ---- by relative position --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(R,), (N, R), slow((B, N, R)), (B, 1, R), (N, 1)], ids=str)
def test_position_bias_is_added_where_query_and_key_meet(shape):
    spread = lambda x: x[..., PLACE] if x.shape[-1] > 1 else x[..., None]
    check_defined(lambda x: {"position_bias": x}, lambda x: {"added": spread(x)}, normal(3, *shape))


def t5_bucket(distance, buckets, bidirectional, max_distance):
    """Return the bucket of ``key - query`` by the formula of Raffel et al., in integers: nothing rounds."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = buckets * (distance > 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # exact + log(distance / exact) / log(max_distance / exact) * (buckets - exact), rounded down
    rest = buckets - exact
    reached = lambda n: distance**rest * exact**n >= max_distance**n * exact**rest
    return first + exact + max(n for n in range(rest) if reached(n))


BUCKETS = [(32, True, 128), (32, False, 128), (16, True, 40), (12, False, 100), (6, True, 50), (32, True, 20)]


@pytest.mark.parametrize(("buckets", "bidirectional", "max_distance"), BUCKETS)
def test_buckets_are_those_of_t5(buckets, bidirectional, max_distance):
    bias = RelativePositionBias(jnp.zeros((buckets, 1)), bidirectional, max_distance)
    distance = np.arange(-400, 401)
    wanted = [t5_bucket(int(x), buckets, bidirectional, max_distance) for x in distance]
    np.testing.assert_array_equal(bias.buckets(jnp.asarray(distance)), wanted)
    assert set(wanted) == set(range(buckets)) - ({buckets // 2} if bidirectional else set())


@pytest.mark.parametrize(
    ("bidirectional", "offset"),
    [(True, 0), (True, -9), (False, S - T), slow(True, S - T), slow(False, 0), slow(False, -9)],
)
def test_bucket_bias_is_an_entry_of_its_table(bidirectional, offset):
    make = functools.partial(
        RelativePositionBias, bidirectional=bidirectional, max_distance=30, offset=offset
    )
    named = np.vectorize(lambda x: t5_bucket(int(x), 16, bidirectional, 30))(DISTANCE - offset)
    added = lambda table: jnp.moveaxis(table[named], -1, 0)
    check_defined(
        lambda table: {"position_bias": make(table)}, lambda x: {"added": added(x)}, normal(4, 16, N)
    )


# ---- ALiBi -----------------------------------------------------------------------------------------

ROWS = jnp.array([3, -40])
LENGTHS = jnp.array([S, 21])
ALIBI = {
    "slopes": (lambda x: {"alibi_slopes": x}, 0),
    "rows": (lambda x: {"alibi_slopes": jnp.stack([x, 2 * x])}, 0),
    "offset": (lambda x: {"alibi_slopes": Alibi(x, 5)}, 5),
    "offset-array": (lambda x: {"alibi_slopes": Alibi(x, offset=jnp.array(-7))}, -7),
    "offset-rows": (lambda x: {"alibi_slopes": Alibi(x, offset=ROWS)}, ROWS[:, None, None, None]),
    "end": (lambda x: {"alibi_slopes": Alibi(x, align="end")}, S - T),
    "end-of-each-row": (
        lambda x: {"alibi_slopes": Alibi(x, align="end"), "key_value_seq_lengths": LENGTHS},
        (LENGTHS - T)[:, None, None, None],
    ),
}


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_subtracts_slopes_times_distances(name):
    ours, offset = ALIBI[name]
    distance = np.abs(np.asarray(DISTANCE - offset, np.float32))
    if name == "rows":
        distance = np.stack([distance, 2 * distance])[:, None]
    seen = True
    if name == "end-of-each-row":
        seen = np.arange(S) < np.asarray(LENGTHS)[:, None, None, None]
    check_defined(ours, lambda x: {"added": -x[:, None, None] * distance, "seen": seen}, SLOPES)


# ---- functions -------------------------------------------------------------------------------------


def bend(score, b, h, q, k, strength, place, near, row, pair, at):
    """Change a logit by operands of every kind and by its position."""
    curved = jnp.tanh(score * strength + place) * near + row * pair
    return jnp.where((k + q + b + h) % 3 == at, curved, score * pair)


def plainly_bent(s, strength, place, near, row, pair):
    b, h, q, k = np.ix_(*map(np.arange, (B, N, T, S)))
    curved = (
        jnp.tanh(s * strength[:, None, None] + place[:, None, None]) * near[PLACE] + row[..., None] * pair
    )
    return jnp.where((k + q + b + h) % 3 == (np.arange(T) % 3)[:, None], curved, s * pair)


BENT = normal(5, N), normal(6, B, S), normal(7, R), normal(8, N, T), normal(9, T, S)


def bent(strength, place, near, row, pair):
    return ScoreFunction(
        bend,
        strength=Operand(strength, "h"),
        place=Operand(place, "bk"),
        near=Operand(near, "r"),
        row=Operand(row, "hq"),
        pair=Operand(pair, "qk"),
        at=Operand(jnp.arange(T) % 3, "q"),
    )


def test_score_function_reads_operands_of_every_tag():
    check_defined(
        lambda *x: {"score_fn": bent(*x)}, lambda *x: {"change": lambda s: plainly_bent(s, *x)}, *BENT
    )


def test_score_function_may_be_bare():
    tilt = lambda score, b, h, q, k: score + ((k - q) * (h + b)).astype(score.dtype) / 16
    b, h = np.ix_(range(B), range(N))
    weight = ((h + b) / np.float32(16))[..., None, None]
    check_defined(lambda: {"score_fn": tilt}, lambda: {"added": DISTANCE * weight})


def test_score_function_may_be_a_constant():
    flat = lambda score, b, h, q, k: jnp.zeros((), score.dtype)
    check_defined(lambda: {"score_fn": flat}, lambda: {"change": lambda s: 0 * s})


def test_score_function_sees_int32_positions_and_the_dtype_of_the_logits():
    seen = []

    def note(score, b, h, q, k, half, whole):
        seen.append([x.dtype for x in (score, b, h, q, k, half, whole)])
        jnp.broadcast_shapes(*(x.shape for x in (score, b, h, q, k, half, whole)))
        return score + half

    operands = {"half": Operand(jnp.ones(N, jnp.bfloat16), "h"), "whole": Operand(np.ones(N, np.int8), "h")}
    half = (x.astype(jnp.bfloat16) for x in (Q, KEY, V))
    attend(*half, score_fn=ScoreFunction(note, **operands))
    assert seen
    assert all(x == [jnp.float32, *[jnp.int32] * 4, jnp.float32, jnp.int8] for x in seen)


# ---- sinks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: x[0], lambda x: x[:1]], ids=["heads", "scalar", "one"]
)
def test_sink_is_a_key_without_a_value(make):
    seen = np.asarray((DISTANCE <= 3) & (DISTANCE % 5 > 0))  # query 0 sees few, and every query some
    check_defined(lambda x: {"sinks": x, "mask": seen}, lambda x: {"sinks": x, "seen": seen}, make(SINKS))


@pytest.mark.parametrize("zero", [0.0, 0, jnp.zeros(N)], ids=["float", "int", "array"])
def test_sink_of_0_is_a_key_of_zeros(zero):
    seen = np.asarray(DISTANCE <= 3)
    one = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))
    ours = lambda q, k, v: attend(q, k, v, mask=seen, sinks=zero)
    theirs = lambda q, k, v: attend(
        q, one(k), one(v), mask=np.pad(seen, ((0, 0), (0, 1)), constant_values=True)
    )
    close(results(ours, Q, KEY, V), results(theirs, Q, KEY, V))


def test_sink_of_minus_infinity_is_none():
    sinks = jnp.full(N, -jnp.inf)
    got = results(lambda *x: attend(*x, is_causal=True, sinks=sinks), Q, KEY, V)
    close(got, results(lambda *x: attend(*x, is_causal=True), Q, KEY, V), rtol=1e-6, atol=1e-6)
    (gradient,) = jax.vjp(lambda x: attend(Q, KEY, V, sinks=x)[0], sinks)[1](jnp.ones((B, T, N, D)))
    np.testing.assert_array_equal(gradient, 0)


def test_row_that_sees_no_key_has_the_lse_of_its_sink():
    call = lambda q, k, v, sinks: attend(q, k, v, mask=Causal(offset=-5), sinks=sinks)
    out, lse, (dq, _, _, dsinks) = results(call, Q, KEY, V, SINKS)
    np.testing.assert_array_equal(out[:, :5], 0)
    np.testing.assert_array_equal(dq[:, :5], 0)
    np.testing.assert_array_equal(lse[:, :5], np.broadcast_to(SINKS, (B, 5, N)))
    assert np.isfinite(dsinks).all()
    # In those rows its weight is 1, and it counts through lse alone.
    (alone,) = jax.vjp(lambda x: call(Q, KEY, V, x)[1][:, :5], SINKS)[1](jnp.ones((B, 5, N)))
    np.testing.assert_allclose(alone, 5 * B)


@pytest.mark.parametrize("sizes", [(B, T, 0), (B, 0, S), (0, T, S)], ids=str)
def test_empty_calls_take_what_changes_a_logit(sizes):
    batch, t, s = sizes
    q, k = jnp.zeros((batch, t, N, D)), jnp.zeros((batch, s, K, D))
    options = {
        "position_bias": RelativePositionBias(jnp.zeros((8, N))),
        "alibi_slopes": SLOPES,
        "score_fn": ScoreFunction(lambda score, b, h, q, k, x: score + x, x=Operand(jnp.ones(N), "h")),
        "sinks": SINKS,
    }
    out, lse, gradients = results(
        lambda q, k, sinks: attend(q, k, k, **options | {"sinks": sinks}), q, k, SINKS
    )
    assert out.shape == (batch, t, N, D)
    np.testing.assert_array_equal(lse, np.broadcast_to(SINKS, (batch, t, N)))
    assert [x.shape for x in gradients] == [q.shape, k.shape, (N,)]


# ---- all at once -----------------------------------------------------------------------------------

TABLE = normal(10, 12, N)
ARRAYS = {
    "bias": normal(11, 1, N, T, S),
    "table": TABLE,
    "slopes": SLOPES,
    "strength": BENT[0],
    "near": BENT[2],
    "sinks": SINKS,
}


def scaled(score, b, h, q, k, strength, near):
    return jnp.where(q % 4 == 1, jnp.sin(score) * strength, score + near)


def options_of(bias, table, slopes, strength, near, sinks):
    """Return the keywords of a call that reads every kind of array."""
    return {
        "bias": bias,
        "position_bias": RelativePositionBias(table, max_distance=30),
        "alibi_slopes": slopes,
        "score_fn": ScoreFunction(scaled, strength=Operand(strength, "h"), near=Operand(near, "r")),
        "sinks": sinks,
        "softcap": 4.0,
        "mask": Causal(offset=3) | Segments(np.arange(T) // 9, np.arange(S) // 7),
    }


def all_at_once(q, k, v, arrays):
    return attend(q, k, v, **options_of(**arrays))


def test_order_is_softcap_then_what_is_added_then_the_function_then_the_mask():
    named = np.vectorize(lambda x: t5_bucket(int(x), 12, True, 30))(DISTANCE)
    seen = np.asarray((DISTANCE <= 3) | (np.arange(T)[:, None] // 9 == np.arange(S) // 7))

    def plain(q, k, v, a):
        added = a["bias"] + jnp.moveaxis(a["table"][named], -1, 0)
        added = added - a["slopes"][:, None, None] * np.abs(DISTANCE).astype(np.float32)
        odd = np.arange(T)[:, None] % 4 == 1
        change = lambda s: jnp.where(odd, jnp.sin(s) * a["strength"][:, None, None], s + a["near"][PLACE])
        return dense(q, k, v, added, change, seen, a["sinks"], softcap=4.0)

    close(results(all_at_once, Q, KEY, V, ARRAYS), results(plain, Q, KEY, V, ARRAYS))


def test_reference_gives_the_same():
    call = functools.partial(flash_attention, implementation="reference", return_residual=True)
    theirs = lambda q, k, v, arrays: call(q, k, v, **options_of(**arrays))
    close(results(theirs, Q, KEY, V, ARRAYS), results(all_at_once, Q, KEY, V, ARRAYS))


@pytest.mark.parametrize("names", [("table",), ("near", "sinks")], ids="+".join)
def test_gradient_of_some_arrays_is_that_of_all(names):
    some = lambda chosen: all_at_once(Q, KEY, V, ARRAYS | chosen)
    *_, (part,) = results(some, {n: ARRAYS[n] for n in names})
    *_, full = results(all_at_once, Q, KEY, V, ARRAYS)
    close(part, {n: full[3][n] for n in names}, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_heads_of_a_group_and_rows_have_entries_of_their_own():
    def touched(name, x, at):
        """Say which numbers of lse an entry changes."""
        one = jax.jit(lambda x: attend(Q, KEY, V, **{name: x})[1])
        return [set(n) for n in np.nonzero(np.asarray(one(x) != one(x.at[at].add(1))))]

    for h in (0, 3):
        rows, _, heads = touched("sinks", SINKS, h)
        assert (rows, heads) == (set(range(B)), {h})
    rows, _, heads = touched("alibi_slopes", jnp.stack([SLOPES, SLOPES]), (1, 2))
    assert (rows, heads) == ({1}, {2})
    _, queries, heads = touched("position_bias", jnp.zeros((N, R)), (3, 0))
    assert (queries, heads) == ({T - 1}, {3}), "the last query and key 0"


# ---- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_gradients_of_half_precision_arrays_are_rounded_once(dtype):
    given = jax.tree.map(lambda x: x.astype(dtype), ARRAYS)
    *_, (dq, _, _, got) = results(all_at_once, Q, KEY, V, given)
    assert dq.dtype == jnp.float32
    *_, (_, _, _, wanted) = results(
        all_at_once, Q, KEY, V, jax.tree.map(lambda x: x.astype(jnp.float32), given)
    )
    rounding = float(jnp.finfo(dtype).eps)
    for name, x in given.items():
        assert (got[name].shape, got[name].dtype) == (x.shape, x.dtype)
        atol = 1e-5 * float(jnp.abs(wanted[name]).max())  # of the same sums in float32
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32), wanted[name], rtol=rounding, atol=atol, err_msg=name
        )


def test_operands_that_are_integers_have_no_gradient():
    def call(at, offset):
        score_fn = ScoreFunction(lambda s, b, h, q, k, at: jnp.where(k > at, s, -s), at=Operand(at, "q"))
        return attend(Q, KEY, V, score_fn=score_fn, alibi_slopes=Alibi(SLOPES, offset))[0]

    _, pull = jax.vjp(call, jnp.arange(T), jnp.array(3))
    for x in pull(jnp.ones((B, T, N, D))):
        assert x.dtype == jax.dtypes.float0


def shifted(score, b, h, q, k, at):
    return score + ((k - at.astype(k.dtype)) % 5).astype(score.dtype)


@pytest.mark.parametrize("dtype", ["float32", slow("float64")])
def test_scores_do_not_depend_on_64_bit_mode(dtype):
    def both(dtype):
        q, k, v, arrays = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), dtype), (Q, KEY, V, ARRAYS))
        score_fn = ScoreFunction(shifted, at=Operand(jnp.arange(T), "q"))
        positions = lambda *x: attend(*x, score_fn=score_fn, alibi_slopes=Alibi(SLOPES, jnp.array(3)))
        return jax.tree.map(np.asarray, (results(all_at_once, q, k, v, arrays), results(positions, q, k, v)))

    wanted = both("float32")
    with jax.enable_x64(True):
        assert jnp.arange(T).dtype == jnp.int64
        got = both(dtype)
    assert {str(x.dtype) for x in jax.tree.leaves(got)} == {dtype}
    close(got, wanted)


def test_scores_in_float64_are_exact():
    with jax.enable_x64(True):
        q, k, v, slopes, near, sinks = (
            jnp.asarray(np.asarray(x), jnp.float64) for x in (Q, KEY, V, SLOPES, BENT[2], SINKS)
        )
        ours = lambda q, k, v, slopes, near, sinks: attend(
            q, k, v, alibi_slopes=slopes, position_bias=near, sinks=sinks
        )
        theirs = lambda q, k, v, slopes, near, sinks: dense(
            q, k, v, near[PLACE] - slopes[:, None, None] * np.abs(DISTANCE).astype(float), sinks=sinks
        )
        arrays = q, k, v, slopes, near, sinks
        close(results(ours, *arrays), results(theirs, *arrays), rtol=1e-11, atol=1e-11)


# ---- transformations -------------------------------------------------------------------------------


def two_of(x):
    return jnp.stack([x, x * 0.5 - 0.25])


MAPPED = [("slopes", "strength"), ("table", "near", "sinks"), tuple(ARRAYS)]


@pytest.mark.slow
@pytest.mark.parametrize("mapped", MAPPED, ids="+".join)
def test_vmap_equals_a_loop(mapped):
    arrays = {n: two_of(x) if n in mapped else x for n, x in ARRAYS.items()}
    run = lambda arrays: results(all_at_once, Q, KEY, V, arrays)
    got = jax.jit(jax.vmap(run, ({n: 0 if n in mapped else None for n in ARRAYS},)))(arrays)
    loop = [run({n: x[i] if n in mapped else x for n, x in arrays.items()}) for i in range(2)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *loop))


def by_place(score, b, h, q, k, place):
    """Change a logit by its key and, in odd rows, by its distance."""
    return score * place + jnp.where(b % 2 == 1, 0.1 * (k - q).astype(score.dtype), 0.0)


@pytest.mark.slow
def test_vmap_keeps_rows_apart_from_what_is_mapped():
    slopes, offset, place = normal(12, 3, B, N), jnp.array([[0, 5], [-9, 2], [13, 0]]), normal(13, 3, B, S)

    def call(slopes, offset, place):
        def function(slopes, place):
            score_fn = ScoreFunction(by_place, place=Operand(place, "bk"))
            return attend(Q, KEY, V, alibi_slopes=Alibi(slopes, offset), score_fn=score_fn)

        return results(function, slopes, place)

    got = jax.jit(jax.vmap(call))(slopes, offset, place)
    loop = [call(*x) for x in zip(slopes, offset, place, strict=True)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *loop))


@pytest.mark.slow
def test_scores_are_jit_arguments_and_map_over_their_leaves():
    parts = (
        RelativePositionBias(two_of(TABLE)[0], max_distance=30),
        Alibi(SLOPES, jnp.array(2)),
        ScoreFunction(scaled, strength=Operand(BENT[0], "h"), near=Operand(BENT[2], "r")),
    )
    call = lambda position, alibi, function: attend(
        Q, KEY, V, position_bias=position, alibi_slopes=alibi, score_fn=function
    )
    wanted = call(*parts)
    close(jax.jit(call)(*parts), wanted, rtol=1e-6, atol=1e-6)
    twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), parts)
    mapped = jax.vmap(call)(*twice)
    close(jax.tree.map(lambda x: x[0], mapped), wanted)
    close(jax.tree.map(lambda x: x[1], mapped), call(*jax.tree.map(lambda x: 2 * x, parts)))
    _, scanned = jax.lax.scan(lambda _, x: (None, call(*x)), None, twice)
    close(scanned, mapped)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("flash_attention_out", "flash_attention_lse")], ids=["full", "names"])
def test_checkpoint_changes_no_gradient(names):
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    again = jax.checkpoint(all_at_once, policy=policy)
    close(results(again, Q, KEY, V, ARRAYS), results(all_at_once, Q, KEY, V, ARRAYS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["bias", "sinks", "scale"])
def test_checkpoint_does_not_mix_up_what_is_differentiated(name):
    # JAX keeps what it traced for other sets of arrays.
    def gradients(function, *arrays):
        out, pull = jax.vjp(function, *arrays)
        return pull(jnp.cos(out))

    own = {"bias": ARRAYS["bias"], "sinks": jnp.ones(N), "scale": jnp.float32(0.3)}[name]
    call = lambda q, own: flash_attention(q, KEY, V, **{name: own}, implementation="reference")
    wanted = jax.jit(functools.partial(gradients, call))(Q, own)
    jax.jit(functools.partial(gradients, lambda q: call(q, own)))(Q)
    got = gradients(jax.checkpoint(call), Q, own)
    close(got, wanted, rtol=1e-5, atol=1e-5)


# ---- values ----------------------------------------------------------------------------------------


def test_scores_compare_by_value():
    tables = normal(14, 8, N), normal(14, 8, N) + 1
    slopes = jnp.array(SLOPES), SLOPES + 1
    make = {
        "table": [RelativePositionBias(x) for x in tables],
        "bidirectional": [RelativePositionBias(tables[0], False)] * 2,
        "distance": [RelativePositionBias(tables[0], max_distance=64)] * 2,
        "offset": [RelativePositionBias(tables[0], offset=1)] * 2,
        "slopes": [Alibi(x) for x in slopes],
        "alibi-offset": [Alibi(slopes[0], 1)] * 2,
        "alibi-end": [Alibi(slopes[0], align="end")] * 2,
        "function": [ScoreFunction(scaled, strength=Operand(x, "h")) for x in slopes],
        "other-function": [ScoreFunction(shifted, strength=Operand(slopes[0], "h"))] * 2,
        "other-name": [ScoreFunction(scaled, power=Operand(slopes[0], "h"))] * 2,
        "other-axes": [ScoreFunction(scaled, strength=Operand(slopes[0], "r"))] * 2,
    }
    first = {name: pair[0] for name, pair in make.items()}
    for name, x in first.items():
        assert {other: x == y for other, y in first.items()} == {other: other == name for other in first}
        again = jax.tree.map(jnp.array, x)
        assert (again, hash(again)) == (x, hash(x))
    for name in ("table", "slopes", "function"):
        assert make[name][0] != make[name][1]
    assert Alibi(SLOPES, 1) != Alibi(SLOPES, jnp.array(1)), "an int is part of the program"


@pytest.fixture
def traces(monkeypatch):
    """Count how often the portable backend's passes are traced."""
    counts = {"forward": 0, "backward": 0}
    real = next(x for x in backends.BACKENDS if x.name == "xla")

    def counting(name):
        def run(*args):
            counts[name] += 1
            return getattr(real, name)(*args)

        return run

    fake = real._replace(name="counting", forward=counting("forward"), backward=counting("backward"))
    monkeypatch.setattr(backends, "BACKENDS", (fake, *backends.BACKENDS))
    return counts


def test_other_arrays_do_not_retrace(traces):
    def call(step):
        arrays = jax.tree.map(lambda x: x + step, ARRAYS)
        options = options_of(**arrays) | {"alibi_slopes": Alibi(arrays["slopes"], jnp.array(step))}
        return jax.grad(lambda q: flash_attention(q, KEY, V, **options, implementation="counting").sum())(Q)

    call(0)
    first = dict(traces)
    assert first["backward"] == 1
    for step in (1, 2):
        call(step)
    assert traces == first


def test_what_is_part_of_the_program_retraces_once_each(traces):
    call = functools.partial(flash_attention, Q, KEY, V, implementation="counting")
    for _ in range(2):
        call(alibi_slopes=SLOPES)
        call(alibi_slopes=Alibi(SLOPES, 1))
        call(score_fn=ScoreFunction(shifted, at=Operand(jnp.arange(T), "q")))
        call(sinks=SINKS)
        # Buckets are looked up before the call: it sees a bias by relative position alone.
        call(position_bias=RelativePositionBias(TABLE))
        call(position_bias=RelativePositionBias(TABLE, offset=1))
    assert traces["forward"] == 5


# ---- errors ----------------------------------------------------------------------------------------

TABLES = "RelativePositionBias.table"
FLOATS = "float16, bfloat16, float32, float64"


def keep(score, b, h, q, k, **operands):
    return score


def function(**operands):
    return lambda: call(score_fn=ScoreFunction(keep, **operands))


def returns(value):
    return lambda: call(score_fn=lambda score, b, h, q, k: value(score))


def call(**options):
    return jax.eval_shape(lambda *x: flash_attention(*x, **options), Q, KEY, V)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ERRORS = {
    # relative position bias
    "table-dtype": (lambda: RelativePositionBias(zeros(8, N, dtype=np.int32)), TypeError,
                    [f"{TABLES} has dtype int32", "added to the logits", FLOATS]),
    "table-str": (lambda: RelativePositionBias("t5"), TypeError, [f"{TABLES} is a str", "must be an array"]),
    "table-rank": (lambda: RelativePositionBias(zeros(8)), ValueError,
                   [f"{TABLES} has shape (8,)", "must be [buckets, heads]"]),
    "table-few": (lambda: RelativePositionBias(zeros(3, N)), ValueError,
                  [f"{TABLES} has 3 buckets", "at least 4 where both directions have their own"]),
    "table-one": (lambda: RelativePositionBias(zeros(1, N), bidirectional=False), ValueError,
                  [f"{TABLES} has 1 buckets", "at least 2"]),
    "table-heads": (lambda: call(position_bias=RelativePositionBias(zeros(8, 3))), ValueError,
                    [f"{TABLES} has shape (8, 3) and query has 4 heads", "[buckets, heads]"]),
    "table-turned": (lambda: call(position_bias=RelativePositionBias(zeros(N, 8))), ValueError,
                     [f"{TABLES} has shape (4, 8) and query has 4 heads"]),
    "bidirectional": (lambda: RelativePositionBias(zeros(8, N), bidirectional=1), TypeError,
                      ["bidirectional is 1", "Python bool"]),
    "distance-float": (lambda: RelativePositionBias(zeros(8, N), max_distance=128.0), TypeError,
                       ["max_distance is 128.0", "must be an int, known when the call is traced"]),
    "distance-bool": (lambda: RelativePositionBias(zeros(8, N), max_distance=True), TypeError,
                      ["max_distance is True", "must be an int"]),
    "distance-traced": (lambda: jax.jit(lambda n: RelativePositionBias(zeros(8, N), max_distance=n).table)(3),
                        TypeError, ["max_distance is ", "Tracer", "must be an int"]),
    "distance-zero": (lambda: RelativePositionBias(zeros(8, N), max_distance=0), ValueError,
                      ["max_distance is 0", "must be positive"]),
    "table-offset": (lambda: RelativePositionBias(zeros(8, N), offset=np.array([0, 1])), TypeError,
                     ["RelativePositionBias.offset is array([0, 1])", "must be an int"]),
    "position-dtype": (lambda: call(position_bias=zeros(R, dtype=np.int32)), TypeError,
                       ["position_bias has dtype int32", "added to the logits", FLOATS]),
    "position-str": (lambda: call(position_bias="t5"), TypeError, ["position_bias is a str"]),
    "position-rank": (lambda: call(position_bias=zeros(B, N, 1, R)), ValueError,
                      ["position_bias has shape (2, 4, 1, 86)", "[N, T + S - 1]", "a RelativePositionBias"]),
    "position-scalar": (lambda: call(position_bias=0.5), ValueError, ["position_bias has shape ()"]),
    "position-length": (lambda: call(position_bias=zeros(N, R + 1)), ValueError,
                        ["position_bias has shape (4, 87)", "[B, N, T + S - 1] = (2, 4, 86)"]),
    "position-heads": (lambda: call(position_bias=zeros(3, R)), ValueError,
                       ["position_bias has shape (3, 86)", "[B, N, T + S - 1] = (2, 4, 86)"]),
    "position-alibi": (lambda: call(position_bias=Alibi(SLOPES)), TypeError, ["position_bias is an Alibi"]),
    # ALiBi
    "slopes-dtype": (lambda: call(alibi_slopes=zeros(N, dtype=np.int32)), TypeError,
                     ["alibi_slopes has dtype int32", "multiply distances", FLOATS]),
    "slopes-bool": (lambda: call(alibi_slopes=True), TypeError, ["alibi_slopes has dtype bool"]),
    "slopes-str": (lambda: Alibi("geometric"), TypeError, ["alibi_slopes is a str", "must be an array"]),
    "slopes-scalar": (lambda: Alibi(0.5), ValueError,
                      ["alibi_slopes has shape ()", "must be [heads] or [batch, heads]"]),
    "slopes-rank": (lambda: Alibi(zeros(1, B, N)), ValueError,
                    ["alibi_slopes has shape (1, 2, 4)", "must be [heads] or [batch, heads]"]),
    "slopes-heads": (lambda: call(alibi_slopes=zeros(3)), ValueError,
                     ["alibi_slopes has shape (3,)", "must broadcast to [B, N] = (2, 4)"]),
    "slopes-rows": (lambda: call(alibi_slopes=zeros(3, N)), ValueError,
                    ["alibi_slopes has shape (3, 4)", "must broadcast to [B, N] = (2, 4)"]),
    "alibi-offset": (lambda: Alibi(SLOPES, 0.5), TypeError, ["Alibi.offset has dtype float32"]),
    "alibi-offsets": (lambda: call(alibi_slopes=Alibi(SLOPES, np.array([0, 1, 2]))), ValueError,
                      ["Alibi.offset has shape (3,)", "must broadcast to [B] = (2,)"]),
    "alibi-align": (lambda: Alibi(SLOPES, align="bottom"), ValueError, ["align is 'bottom'", "or 'end'"]),
    "alibi-align-and-offset": (lambda: Alibi(SLOPES, 1, align="end"), ValueError,
                               ["align='end' sets the offset", "offset is 1", "give one of them"]),
    # functions
    "function": (lambda: call(score_fn=0.5), TypeError,
                 ["score_fn is a float", "a function of (score, b, h, q, k) or a ScoreFunction"]),
    "function-str": (lambda: ScoreFunction("tanh"), TypeError, ["score_fn is a str"]),
    "function-mask": (lambda: call(score_fn=Causal()), TypeError, ["score_fn is a Causal"]),
    "score-none": (returns(lambda score: None), TypeError,
                   ["score_fn returned a NoneType", "in the dtype of its first argument, float32"]),
    "score-number": (returns(lambda score: 0.5), TypeError, ["score_fn returned a float"]),
    "score-half": (returns(lambda score: score.astype(jnp.bfloat16)), TypeError,
                   ["score_fn returned bfloat16", "float32: cast inside with .astype(score.dtype)"]),
    "score-bool": (returns(lambda score: score > 0), TypeError, ["score_fn returned bool"]),
    # operands
    "operand-length": (function(x=Operand(zeros(R - 1), "r")), ValueError,
                       ["operand x has shape (85,)", "must broadcast to [T + S - 1] = (86,)"]),
    "operand-heads": (function(x=Operand(zeros(3, R), "hr")), ValueError,
                      ["operand x has shape (3, 86)", "[N, T + S - 1] = (4, 86)"]),
    "operand-order": (function(x=Operand(zeros(R, B), "rb")), ValueError,
                      ["operand x has axes 'rb'", "'bhqk'", "or 'r' in the place of q and k"]),
    "operand-key-and-r": (function(x=Operand(zeros(R, S), "rk")), ValueError, ["operand x has axes 'rk'"]),
    "operand-twice": (function(x=Operand(zeros(R, R), "rr")), ValueError, ["operand x has axes 'rr'"]),
    "operand-rank": (function(x=Operand(zeros(N, R), "r")), ValueError,
                     ["operand x has 2 dimensions", "axes 'r' name 1"]),
    "operand-block": (function(x=Operand(zeros(N, 5, 5), "hqk", (8, 10))), ValueError,
                      ["operand x has block (8, 10)", "only an operand of a mask"]),
    "operand-array": (function(x=zeros(N)), TypeError, ["operand x is a ndarray", "Operand(array, axes)"]),
    "operand-named-as-an-index": (function(h=Operand(zeros(N), "h")), ValueError,
                                  ["operand is named 'h'", "rename it"]),
    "mask-operand-r": (lambda: CustomMask(lambda b, h, q, k, x: x > 0, x=Operand(zeros(R), "r")), ValueError,
                       ["operand x has axes 'r'", "letters of 'bhqk'"]),
    # sinks
    "sinks-dtype": (lambda: call(sinks=zeros(N, dtype=np.int32)), TypeError,
                    ["sinks has dtype int32", "they are logits", FLOATS]),
    "sinks-bool": (lambda: call(sinks=True), TypeError, ["sinks has dtype bool"]),
    "sinks-str": (lambda: call(sinks="off by one"), TypeError, ["sinks is a str", "must be an array"]),
    "sinks-heads": (lambda: call(sinks=zeros(3)), ValueError,
                    ["sinks has shape (3,)", "a scalar or [heads] = [4]"]),
    "sinks-rank": (lambda: call(sinks=zeros(B, N)), ValueError,
                   ["sinks has shape (2, 4)", "a scalar or [heads] = [4]"]),
    "bias-alibi": (lambda: call(bias=Alibi(SLOPES)), TypeError, ["bias is an Alibi", "must be an array"]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "parts"), ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_said(make, error, parts):
    with pytest.raises(error, match=".*".join(map(re.escape, parts))) as caught:
        make()
    assert type(caught.value) is error


def test_operands_by_relative_position_are_not_for_masks():
    with pytest.raises(ValueError, match=r"'bk'$"):
        CustomMask(lambda b, h, q, k, x: x > 0, x=Operand(zeros(R), "r"))

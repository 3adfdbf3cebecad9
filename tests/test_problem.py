"""Every mistake in a call raises the right error, which names the argument and says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import (
    BlockSparse,
    Causal,
    CustomMask,
    Lengths,
    Operand,
    PrefixLM,
    Segments,
    SlidingWindow,
    UnsupportedError,
    backends,
    flash_attention,
)

FLOATS = "float16, bfloat16, float32, float64"


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(**changes):
    """Trace a call that is right but for the changes: B, T, S, N, K, D, Dv = 2, 4, 6, 4, 2, 8, 8."""
    arrays = {"query": zeros(2, 4, 4, 8), "key": zeros(2, 6, 2, 8), "value": zeros(2, 6, 2, 8)}
    arrays |= {name: changes.pop(name) for name in tuple(arrays) if name in changes}
    abstract = {n: x for n, x in arrays.items() if isinstance(x, jax.ShapeDtypeStruct)}
    concrete = {n: x for n, x in arrays.items() if n not in abstract}
    return jax.eval_shape(lambda a: flash_attention(**a, **concrete, **changes), abstract)


def check_message(error, parts, function, *args, **kwargs):
    """Assert that the call raises exactly this type, with all the parts in its message."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)


def parity(b, h, q, k, **operands):
    return (q + k) % 2 == 0


def always(b, h, q, k, **operands):
    return jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)


# What is wrong, the arguments, the error, parts of its message.
CALLS = [
    # query, key and value
    ("query rank 5", {"query": zeros(1, 2, 4, 4, 8)}, ValueError,
     ["query has shape (1, 2, 4, 4, 8)", "must be [B, T, N, D] or [T, N, D]"]),
    ("query rank 2", {"query": zeros(4, 8)}, ValueError,
     ["query has shape (4, 8)", "must be [B, T, N, D] or [T, N, D]"]),
    ("key rank 2", {"key": zeros(6, 8)}, ValueError,
     ["key has shape (6, 8)", "must be [B, S, K, D] or [S, K, D]"]),
    ("value rank 5", {"value": zeros(1, 2, 6, 2, 8)}, ValueError,
     ["value has shape (1, 2, 6, 2, 8)", "must be [B, S, K, Dv] or [S, K, Dv]"]),
    ("key None", {"key": None}, TypeError, ["key is a NoneType", "must be an array"]),
    ("value dict", {"value": {"x": 1}}, TypeError, ["value is a dict", "must be an array"]),
    ("query ragged", {"query": [[1.0], [1.0, 2.0]]}, TypeError, ["query is a list", "must be an array"]),
    ("query mask", {"query": Causal()}, TypeError, ["query is a Causal", "must be an array"]),
    ("query int", {"query": zeros(2, 4, 4, 8, dtype=jnp.int32)}, TypeError,
     ["query has dtype int32", FLOATS, "use query.astype(jnp.bfloat16)"]),
    ("key int", {"key": zeros(2, 6, 2, 8, dtype=jnp.int8)}, TypeError,
     ["key has dtype int8", FLOATS, "use key.astype(jnp.bfloat16)"]),
    ("value bool", {"value": zeros(2, 6, 2, 8, dtype=bool)}, TypeError,
     ["value has dtype bool", FLOATS, "use value.astype(jnp.bfloat16)"]),
    ("query complex", {"query": zeros(2, 4, 4, 8, dtype=jnp.complex64)}, TypeError,
     ["query has dtype complex64", FLOATS]),
    ("query float8", {"query": zeros(2, 4, 4, 8, dtype=jnp.float8_e4m3fn)}, TypeError,
     ["query has dtype float8_e4m3fn", FLOATS]),
    ("mixed dtypes", {"key": zeros(2, 6, 2, 8, dtype=jnp.bfloat16)}, TypeError,
     ["query is float32, key is bfloat16, value is float32", "must have one dtype",
      "key.astype(query.dtype)"]),
    ("key batch", {"key": zeros(3, 6, 2, 8), "value": zeros(3, 6, 2, 8)}, ValueError,
     ["query has shape (2, 4, 4, 8), key (3, 6, 2, 8), value (3, 6, 2, 8)",
      "first dimensions must be equal"]),
    ("value batch", {"value": zeros(1, 6, 2, 8)}, ValueError,
     ["value (1, 6, 2, 8)", "first dimensions must be equal"]),
    ("value length", {"value": zeros(2, 5, 2, 8)}, ValueError,
     ["key has shape (2, 6, 2, 8) and value (2, 5, 2, 8)", "lengths and head counts"]),
    ("value heads", {"value": zeros(2, 6, 1, 8)}, ValueError,
     ["key has shape (2, 6, 2, 8) and value (2, 6, 1, 8)", "lengths and head counts"]),
    ("head dims", {"query": zeros(2, 4, 4, 16)}, ValueError,
     ["query has shape (2, 4, 4, 16) and key (2, 6, 2, 8)", "head dims (last) must be equal"]),
    ("no head dim", {"query": zeros(2, 4, 4, 0), "key": zeros(2, 6, 2, 0)}, ValueError,
     ["head dim is 0", "query has shape (2, 4, 4, 0)", "need at least 1"]),
    ("no value dim", {"value": zeros(2, 6, 2, 0)}, ValueError,
     ["head dim is 0", "value (2, 6, 2, 0)", "need at least 1"]),
    ("head counts", {"query": zeros(2, 4, 12, 8), "key": zeros(2, 6, 5, 8), "value": zeros(2, 6, 5, 8)},
     ValueError, ["query has 12 heads and key has 5; query heads must be a multiple of key heads"]),
    ("fewer query heads", {"query": zeros(2, 4, 1, 8)}, ValueError,
     ["query has 1 heads and key has 2; query heads must be a multiple of key heads"]),
    ("no key heads", {"key": zeros(2, 6, 0, 8), "value": zeros(2, 6, 0, 8)}, ValueError,
     ["query has 4 heads and key has 0"]),
    # bias
    ("bias shape", {"bias": np.zeros((6, 4), np.float32)}, ValueError,
     ["bias has shape (6, 4)", "must broadcast to [B, N, T, S] = (2, 4, 4, 6)"]),
    ("bias batch", {"bias": np.zeros((3, 1, 1, 6), np.float32)}, ValueError,
     ["bias has shape (3, 1, 1, 6)", "[B, N, T, S] = (2, 4, 4, 6)"]),
    ("bias rank", {"bias": np.zeros((1, 1, 1, 4, 6), np.float32)}, ValueError,
     ["bias has shape (1, 1, 1, 4, 6)", "[B, N, T, S] = (2, 4, 4, 6)"]),
    ("bias bool", {"bias": np.ones((4, 6), bool)}, TypeError, ["bias is boolean", "as mask"]),
    ("bias int", {"bias": np.ones((4, 6), np.int32)}, TypeError,
     ["bias has dtype int32", FLOATS, "bias.astype(jnp.float32)", "mask=bias.astype(bool)"]),
    ("bias complex", {"bias": np.ones((4, 6), np.complex64)}, TypeError,
     ["bias has dtype complex64", FLOATS]),
    ("bias str", {"bias": "alibi"}, TypeError, ["bias is a str", "must be an array"]),
    ("bias mask", {"bias": Causal()}, TypeError, ["bias is a Causal mask", "pass it as mask=Causal(...)"]),
    # mask
    ("mask shape", {"mask": np.ones((3, 3), bool)}, ValueError,
     ["mask has shape (3, 3)", "must broadcast to [B, N, T, S] = (2, 4, 4, 6)"]),
    ("mask heads", {"mask": np.ones((2, 3, 1, 6), bool)}, ValueError,
     ["mask has shape (2, 3, 1, 6)", "must broadcast to [B, N, T, S] = (2, 4, 4, 6)"]),
    ("mask shape in a composition", {"mask": Causal() & np.ones((4, 4), bool)}, ValueError,
     ["mask has shape (4, 4)", "must broadcast to [B, N, T, S] = (2, 4, 4, 6)"]),
    ("mask rank", {"mask": np.ones((1, 1, 1, 4, 6), bool)}, ValueError,
     ["mask has shape (1, 1, 1, 4, 6)", "at most 4 dimensions [B, N, T, S]"]),
    ("mask float", {"mask": np.ones((4, 6), np.float32)}, TypeError,
     ["mask has dtype float32", "must be boolean", ".astype(bool)", "as bias"]),
    ("mask list of int", {"mask": [[1, 0, 0, 0, 0, 0]] * 4}, TypeError,
     ["mask has dtype int32", "must be boolean"]),
    ("mask str", {"mask": "causal"}, TypeError, ["mask is a str", "boolean array or a flashjax Mask"]),
    ("mask bool", {"mask": True}, TypeError, ["mask is a bool", "boolean array or a flashjax Mask"]),
    ("mask class", {"mask": Causal}, TypeError, ["mask is a type", "boolean array or a flashjax Mask"]),
    # scale
    ("scale per head", {"scale": np.ones(4, np.float32)}, ValueError,
     ["scale has shape (4,)", "must be a real scalar", "Multiply query"]),
    ("scale of size 1", {"scale": np.ones(1, np.float32)}, ValueError, ["scale has shape (1,)"]),
    ("scale complex", {"scale": 1j}, ValueError, ["scale has shape () and dtype complex64", "real scalar"]),
    ("scale bool", {"scale": True}, ValueError, ["scale has shape () and dtype bool", "real scalar"]),
    ("scale str", {"scale": "auto"}, TypeError, ["scale is a str"]),
    # softcap
    ("softcap negative", {"softcap": -2.0}, ValueError,
     ["softcap is -2.0", "positive and finite", "None turns it off"]),
    ("softcap zero", {"softcap": 0}, ValueError, ["softcap is 0.0", "None turns it off"]),
    ("softcap inf", {"softcap": float("inf")}, ValueError, ["softcap is inf", "None turns it off"]),
    ("softcap NaN", {"softcap": float("nan")}, ValueError, ["softcap is nan", "positive and finite"]),
    ("softcap str", {"softcap": "30"}, TypeError, ["softcap is '30'", "Python number"]),
    ("softcap bool", {"softcap": True}, TypeError, ["softcap is True", "Python number"]),
    ("softcap array", {"softcap": np.full(2, 30.0)}, TypeError, ["softcap is array([30., 30.])"]),
    # dropout
    ("dropout rate 1", {"dropout_rate": 1.0}, ValueError,
     ["dropout_rate is 1.0", "at least 0 and less than 1"]),
    ("dropout rate percent", {"dropout_rate": 10}, ValueError,
     ["dropout_rate is 10.0", "at least 0 and less than 1"]),
    ("dropout rate negative", {"dropout_rate": -0.1}, ValueError,
     ["dropout_rate is -0.1", "at least 0 and less than 1"]),
    ("dropout rate NaN", {"dropout_rate": float("nan")}, ValueError,
     ["dropout_rate is nan", "at least 0 and less than 1"]),
    ("dropout rate None", {"dropout_rate": None}, TypeError, ["dropout_rate is None", "Python number"]),
    ("dropout rate str", {"dropout_rate": "0.1"}, TypeError, ["dropout_rate is '0.1'", "Python number"]),
    ("dropout rate array", {"dropout_rate": np.full(2, 0.5), "dropout_key": np.zeros(2, np.uint32)},
     TypeError, ["dropout_rate is array([0.5, 0.5])"]),
    ("no dropout key", {"dropout_rate": 0.1}, ValueError,
     ["dropout_rate is 0.1 but dropout_key is None", "dropout_key=jax.random.key(0)",
      "dropout_rate=0.0"]),
    ("dropout key int", {"dropout_rate": 0.1, "dropout_key": 0}, TypeError,
     ["dropout_key is an int", "jax.random.key(0)"]),
    ("dropout key list", {"dropout_rate": 0.1, "dropout_key": [0, 1]}, TypeError, ["dropout_key is a list"]),
    ("dropout key float", {"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.float32)}, ValueError,
     ["dropout_key has shape (2,) and dtype float32", "must be one key"]),
    ("dropout keys raw", {"dropout_rate": 0.1, "dropout_key": np.zeros((3, 2), np.uint32)}, ValueError,
     ["dropout_key has shape (3, 2) and dtype uint32", "must be one key", "jax.random.PRNGKey(seed)"]),
    ("dropout key empty", {"dropout_rate": 0.1, "dropout_key": np.zeros(0, np.uint32)}, ValueError,
     ["dropout_key has shape (0,)"]),
    # flags, precision, implementation
    ("is_causal None", {"is_causal": None}, TypeError, ["is_causal is None", "Python bool"]),
    ("is_causal int", {"is_causal": 1}, TypeError, ["is_causal is 1", "Python bool"]),
    ("is_causal array", {"is_causal": np.array([True])}, TypeError, ["is_causal is array([ True])"]),
    ("deterministic", {"deterministic": None}, TypeError, ["deterministic is None", "Python bool"]),
    ("return_residual", {"return_residual": "lse"}, TypeError, ["return_residual is 'lse'", "Python bool"]),
    ("precision name", {"precision": "quadruple"}, ValueError,
     ["precision is 'quadruple'", "must be None or what jax.lax.dot_general accepts", "'highest'"]),
    ("precision int", {"precision": 3}, ValueError, ["precision is 3", "jax.lax.Precision.HIGHEST"]),
    ("precision list", {"precision": ["highest"]}, ValueError,
     ["precision is ['highest']", "jax.lax.Precision.HIGHEST"]),
    ("implementation", {"implementation": "cudnn"}, ValueError,
     ["implementation is 'cudnn'", "must be None or one of", "'xla'"]),
    ("implementation type", {"implementation": 3}, ValueError, ["implementation is 3", "'xla'"]),
    # lengths
    ("query lengths float", {"query_seq_lengths": [1.0, 2.0]}, TypeError,
     ["query_seq_lengths has dtype float32", "must hold integers"]),
    ("key lengths bool", {"key_value_seq_lengths": [True, False]}, TypeError,
     ["key_value_seq_lengths has dtype bool", "must hold integers"]),
    ("query lengths str", {"query_seq_lengths": "abc"}, TypeError, ["query_seq_lengths is a str"]),
    ("query lengths count", {"query_seq_lengths": [1, 2, 3]}, ValueError,
     ["query_seq_lengths has shape (3,)", "one length per batch row: (2,)"]),
    ("key lengths rank", {"key_value_seq_lengths": [[1, 2]]}, ValueError,
     ["key_value_seq_lengths has shape (1, 2)", "one length per batch row: (2,)"]),
    # window
    ("window negative", {"local_window_size": -1}, ValueError,
     ["window size on the left is -1", "must not be negative", "None is unlimited", "is W - 1 here"]),
    ("window right negative", {"local_window_size": (1, -2)}, ValueError,
     ["window size on the right is -2", "must not be negative"]),
    ("window of three", {"local_window_size": (1, 1, 1)}, ValueError,
     ["local_window_size has 3 entries", "an int or (left, right)"]),
    ("window float", {"local_window_size": 1.5}, TypeError,
     ["window size on the left has dtype float32", "must hold integers"]),
    ("window bool", {"local_window_size": True}, TypeError, ["window size on the left has dtype bool"]),
    ("window str", {"local_window_size": "abc"}, TypeError, ["window size on the left is a str"]),
    ("window array", {"local_window_size": np.array([1, 2])}, ValueError,
     ["local_window_size", "(2,)", "an int or (left, right)"]),
    # masks that do not fit the call
    ("offset per row", {"mask": Causal(np.array([0, 1, 2]))}, ValueError,
     ["Causal.offset has shape (3,)", "must broadcast to [B] = (2,)"]),
    ("window per row", {"mask": SlidingWindow(np.array([0, 1, 2]))}, ValueError,
     ["SlidingWindow.left has shape (3,)", "must broadcast to [B] = (2,)"]),
    ("prefix per row", {"mask": PrefixLM(np.array([0, 1, 2]))}, ValueError,
     ["PrefixLM.prefix_lengths has shape (3,)", "must broadcast to [B] = (2,)"]),
    ("lengths rank", {"mask": Lengths(key_lengths=np.array([[0, 1]]))}, ValueError,
     ["Lengths.key_lengths has shape (1, 2)", "must broadcast to [B] = (2,)"]),
    ("ids for queries only", {"mask": Segments(np.zeros(4, np.int32))}, ValueError,
     ["Segments.key_ids has shape (4,)", "must broadcast to [B, S] = (2, 6)"]),
    ("ids rank", {"mask": Segments(np.zeros((1, 2, 4), np.int32), np.zeros(6, np.int32))}, ValueError,
     ["Segments.query_ids has shape (1, 2, 4)", "must broadcast to [B, T] = (2, 4)"]),
    ("blocks", {"mask": BlockSparse(np.ones((3, 3), bool), 2)}, ValueError,
     ["BlockSparse.blocks has shape (3, 3)", "(2, 4, 2, 3)", "block_size"]),
    ("operand", {"mask": CustomMask(parity, shift=Operand(jnp.zeros((3,)), "b"))}, ValueError,
     ["operand shift has shape (3,)", "must broadcast to [B] = (2,)"]),
    ("result not boolean", {"mask": CustomMask(lambda b, h, q, k: q - k)}, TypeError,
     ["int32", "boolean"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "parts"), [x[1:] for x in CALLS], ids=[x[0] for x in CALLS])
def test_flash_attention_refuses(changes, error, parts):
    check_message(error, parts, call, **changes)


# The same for what a mask can tell when it is made.
MAKERS = [
    ("offset float", lambda: Causal(1.5), TypeError, ["Causal.offset has dtype float32", "hold integers"]),
    ("offset bool", lambda: Causal(True), TypeError, ["Causal.offset has dtype bool", "hold integers"]),
    ("offset None", lambda: Causal(None), TypeError, ["Causal.offset is a NoneType", "must be an array"]),
    ("window offset", lambda: SlidingWindow(1, offset=0.5), TypeError,
     ["SlidingWindow.offset has dtype float32"]),
    ("align", lambda: Causal(align="bottom"), ValueError,
     ["align is 'bottom'", "must be 'start'", "or 'end'"]),
    ("window align", lambda: SlidingWindow(1, align=None), ValueError,
     ["align is None", "must be 'start'", "or 'end'"]),
    ("align and offset", lambda: Causal(1, align="end"), ValueError,
     ["align='end' sets the offset from the lengths, but offset is 1", "give one of them"]),
    ("align and offsets", lambda: SlidingWindow(1, offset=np.array([0, 1]), align="end"), ValueError,
     ["align='end' sets the offset", "Array([0, 1]", "give one of them"]),
    ("left negative", lambda: SlidingWindow(-1), ValueError, ["window size on the left is -1"]),
    ("right negative", lambda: SlidingWindow(None, -3), ValueError, ["window size on the right is -3"]),
    ("left negative scalar", lambda: SlidingWindow(np.int64(-1)), ValueError,
     ["window size on the left is -1"]),
    ("left negative array", lambda: SlidingWindow(np.array(-1)), ValueError, ["window size on the left"]),
    ("left float", lambda: SlidingWindow(1.0), TypeError, ["window size on the left has dtype float32"]),
    ("ids float", lambda: Segments([0.0, 1.0]), TypeError, ["Segments.query_ids has dtype float32"]),
    ("key ids float", lambda: Segments([0, 1], [0.0, 1.0]), TypeError,
     ["Segments.key_ids has dtype float32"]),
    ("prefix float", lambda: PrefixLM(2.5), TypeError, ["PrefixLM.prefix_lengths has dtype float32"]),
    ("lengths float", lambda: Lengths(2.5), TypeError, ["Lengths.query_lengths has dtype float32"]),
    ("key lengths str", lambda: Lengths(key_lengths="abc"), TypeError, ["Lengths.key_lengths is a str"]),
    ("blocks float", lambda: BlockSparse(np.ones((2, 2)), 4), TypeError,
     ["BlockSparse.blocks has dtype float", "must be boolean"]),
    ("blocks rank", lambda: BlockSparse(np.ones((1, 1, 1, 2, 2), bool), 4), ValueError,
     ["BlockSparse.blocks has shape (1, 1, 1, 2, 2)", "at most 4 dimensions"]),
    *(
        (f"block size {size!r}", lambda size=size: BlockSparse([[True]], size), ValueError,
         [f"block_size is {size!r}", "positive int or a pair (queries, keys)"])
        for size in (0, -1, 1.5, True, "4", None, (2, 2, 2), (4,), (4, 0), (4, 2.0))
    ),
    ("dense int", lambda: flashjax.Dense([[1, 0]]), TypeError, ["mask has dtype int32", "must be boolean"]),
    ("operand axes order", lambda: CustomMask(parity, x=Operand(np.zeros((2, 2)), "kq")), ValueError,
     ["operand x has axes 'kq'", "letters of 'bhqk'", "in this order"]),
    ("operand axes letters", lambda: CustomMask(parity, x=Operand(np.zeros(2), "t")), ValueError,
     ["operand x has axes 't'", "letters of 'bhqk'"]),
    ("operand axes twice", lambda: CustomMask(parity, x=Operand(np.zeros((2, 2)), "qq")), ValueError,
     ["operand x has axes 'qq'", "letters of 'bhqk'"]),
    ("operand axes None", lambda: CustomMask(parity, x=Operand(np.zeros(2), None)), ValueError,
     ["operand x has axes None", "letters of 'bhqk'"]),
    ("operand rank", lambda: CustomMask(parity, x=Operand(np.zeros((2, 2)), "k")), ValueError,
     ["operand x has 2 dimensions", "axes 'k' name 1"]),
    ("operand no array", lambda: CustomMask(parity, x=Operand("abc", "b")), TypeError,
     ["operand x is a str", "must be an array"]),
    ("operand bare number", lambda: CustomMask(parity, x=3), TypeError,
     ["operand x is an int", "Operand"]),
    ("operand bare array", lambda: CustomMask(parity, x=np.arange(3)), TypeError,
     ["operand x is a ndarray", "Operand"]),
    ("operand named as an index", lambda: CustomMask(parity, q=Operand(np.zeros(1), "b")), ValueError,
     ["operand", "'q'"]),
    ("function not callable", lambda: CustomMask("causal"), TypeError, ["function", "str"]),
    ("bounds not callable", lambda: CustomMask(parity, 3), TypeError, ["bounds", "int"]),
    ("mask & number", lambda: Causal() & 3, TypeError,
     ["a mask cannot be combined with an int", "a Mask or a boolean array"]),
    ("number | mask", lambda: 3 | Causal(), TypeError, ["a mask cannot be combined with an int"]),
    ("mask & None", lambda: Causal() & None, TypeError, ["cannot be combined with a NoneType"]),
    ("mask & list", lambda: Causal() & [[True]], TypeError, ["cannot be combined with a list"]),
    ("mask & class", lambda: Causal() & SlidingWindow, TypeError, ["cannot be combined with a type"]),
    ("mask & int array", lambda: Causal() & np.ones((2, 2), np.int32), TypeError,
     ["mask has dtype int32", "must be boolean"]),
    ("float array | mask", lambda: np.ones((2, 2)) | Causal(), TypeError, ["mask has dtype float"]),
    ("mask and mask", lambda: Causal() and SlidingWindow(1), TypeError,
     ["a Causal mask has no truth value", "&, | and ~"]),
    ("not mask", lambda: not SlidingWindow(1), TypeError, ["a SlidingWindow mask has no truth value"]),
    ("if mask", lambda: 1 if Causal() & Causal() else 2, TypeError, ["an And mask has no truth value"]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "parts"), [x[1:] for x in MAKERS], ids=[x[0] for x in MAKERS])
def test_mask_refuses(make, error, parts):
    check_message(error, parts, make)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("is_causal", True, "Python bool"),
        ("deterministic", True, "Python bool"),
        ("return_residual", True, "Python bool"),
        ("softcap", 30.0, "Python number"),
        ("dropout_rate", 0.1, "Python number"),
        ("precision", 1, "must be None or what"),
    ],
)
def test_flash_attention_refuses_traced(name, value, part):
    trace = jax.jit(lambda x: call(**{name: x}))
    check_message(
        ValueError if name == "precision" else TypeError, [f"{name} is ", "Tracer", part], trace, value
    )


INTEGERS = {
    "key_value_seq_lengths": lambda x: call(key_value_seq_lengths=x),
    "query_seq_lengths": lambda x: call(query_seq_lengths=x),
    "Causal.offset": Causal,
    "window size on the left": SlidingWindow,
    "PrefixLM.prefix_lengths": PrefixLM,
    "Lengths.key_lengths": lambda x: Lengths(key_lengths=x),
    "Segments.query_ids": Segments,
}


# Integers that int32 cannot hold must not wrap around: 2**32 would become 0.
@pytest.mark.parametrize("given", [[2**32, 1], np.array([2**32, 1])], ids=["list", "numpy"])
@pytest.mark.parametrize(("name", "use"), INTEGERS.items(), ids=INTEGERS)
def test_integers_that_do_not_fit_are_refused(name, use, given):
    check_message(ValueError, [name, "int32"], use, given)


@pytest.mark.parametrize(
    "changes",
    [
        {"query": zeros(4, 4, 8), "key": zeros(6, 2, 8), "value": zeros(6, 2, 8)},
        {"query": zeros(0, 4, 4, 8), "key": zeros(0, 6, 2, 8), "value": zeros(0, 6, 2, 8)},
        {"key": zeros(2, 0, 2, 8), "value": zeros(2, 0, 2, 8)},
        {"value": zeros(2, 6, 2, 3)},
        {"softcap": np.float32(30), "scale": 0, "precision": "highest"},
        {"scale": 2**40},
        {"dropout_rate": 0.0},
        {"dropout_rate": np.float32(0.5), "dropout_key": np.zeros(2, np.uint32)},
        {"is_causal": np.True_, "deterministic": True},
        {"query_seq_lengths": 3, "key_value_seq_lengths": np.array([3, 4], np.uint8)},
        {"local_window_size": (None, 0)},
        {"local_window_size": [np.int64(3), 2**40]},
        {"mask": [[True, False, True, True, True, True]]},
        {"bias": [0.0] * 6, "mask": np.ones((2, 1, 1, 6), bool)},
        {"precision": ("highest", "default")},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_flash_attention_accepts(changes):
    query, value = changes.get("query", zeros(2, 4, 4, 8)), changes.get("value", zeros(2, 6, 2, 8))
    assert call(**changes).shape == (*query.shape[:-1], value.shape[-1])


def test_flash_attention_message_is_the_same_inside_and_outside_jit():
    query, key = jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 6, 3, 8))
    messages = []
    for function in (flash_attention, jax.jit(flash_attention), jax.grad(flash_attention)):
        with pytest.raises(ValueError, match="query has 4 heads and key has 3") as caught:
            function(query, key, key)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1


@pytest.fixture
def picky(monkeypatch):
    """Put a backend that refuses every call before the others."""
    backend = backends.Backend("picky", lambda problem: f"head dim is {problem.head_dim}, not 64", None, None)
    monkeypatch.setattr(backends, "BACKENDS", (backend, *backends.BACKENDS))


@pytest.mark.usefixtures("picky")
def test_select_refuses_the_named_backend_with_its_reason():
    parts = [
        "implementation='picky' does not do this call: head dim is 8, not 64",
        "implementation=None takes a backend that does",
    ]
    check_message(UnsupportedError, parts, call, implementation="picky")


@pytest.mark.usefixtures("picky")
def test_select_passes_over_a_backend_that_cannot():
    assert call().shape == (2, 4, 4, 8)


@pytest.mark.usefixtures("picky")
def test_explain_gives_the_reason_of_every_other_backend(capsys):
    query, key = jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 6, 2, 8))
    text = flashjax.explain(query, key, key, implementation="xla")
    assert text.splitlines()[:2] == ["backend: xla", "  picky: head dim is 8, not 64"]
    assert re.search("reference: could do this call, but only if asked", text)
    assert capsys.readouterr().out == text + "\n"


def test_explain_refuses_what_the_call_refuses():
    query, key = jnp.zeros((2, 4, 4, 8)), jnp.zeros((2, 6, 3, 8))
    parts = ["query has 4 heads and key has 3"]
    check_message(ValueError, parts, flashjax.explain, query, key, key)
    check_message(
        ValueError,
        ["implementation is 'cudnn'"],
        flashjax.explain,
        query,
        query,
        query,
        implementation="cudnn",
    )


def test_unsupported_error_is_a_not_implemented_error():
    assert issubclass(UnsupportedError, NotImplementedError)
    assert not issubclass(UnsupportedError, ValueError)

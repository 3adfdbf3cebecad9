"""Each example runs and prints what it claims."""

import copy
import importlib.util
import re
import runpy
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = ["--seq-len=48", "--batch-size=4", "--steps=16", "--layers=1", "--dim=32", "--learning-rate=0.01"]


@pytest.fixture
def run(capsys):
    """Run an example as a script and return what it prints."""

    def run(name):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def train_gpt():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(pattern, text):
    found = re.findall(pattern, text)
    assert found, f"{pattern} is not in:\n{text}"
    return [float(x) for x in found]


def test_quickstart_agrees_with_jax_and_needs_linear_memory(run):
    printed = run("quickstart.py")
    differences = numbers(r"largest difference from jax.nn (\S+)", printed)
    differences += numbers(r"gradient of .* largest difference (\S+)", printed)
    assert len(differences) == 4
    assert max(differences) < 1e-3
    assert "sliding window (1, 500, 8, 64)" in printed
    flash = numbers(r"tokens, flash_attention +(\d+) MiB", printed)
    standard = numbers(r"tokens, dot_product_attention +(\d+) MiB", printed)
    assert flash[1] < 5 * flash[0], "four times the tokens take about four times the memory"
    assert standard[1] > 12 * standard[0], "and sixteen times without flash attention"
    assert flash[1] < standard[1] / 100


def test_online_softmax_prints_every_step(run):
    printed = run("online_softmax.py")
    assert numbers(r"\n  l .* = (\S+)", printed) == [1.368, 1.553]
    assert numbers(r"old l .* = (\S+)", printed) == [0.0, 0.503]
    assert numbers(r"new .* = (\S+)", printed) == [1.368, 1.050]
    assert numbers(r"alpha  exp.* = (\S+)", printed) == [0.0, 0.368]
    assert numbers(r"\n  m .* -> (\S+)", printed) == [2, 3]
    assert numbers(r"textbook: .* = (\S+),", printed) == [1.553]
    assert numbers(r"textbook: .* output (\S+)", printed) == numbers(r"end: output .* = (\S+),", printed)


def test_custom_mask_draws_and_agrees_with_the_dense_mask(run):
    printed = run("custom_mask.py")
    pictures = re.findall(r":\n((?:[█·]{24}\n){24})", printed)
    assert len(pictures) == 4
    last_rows = [picture.splitlines()[-1] for picture in pictures]
    assert last_rows == [
        "················████████",
        "····················████",
        "····················████",
        "·················█··█··█",
    ]
    assert pictures[2].splitlines()[15] == "·········█··████········", "token 9 is global"
    differences = numbers(r"(?:dq|dk|dv|out): .* relative: (\S+)", printed)
    assert len(differences) == 4
    assert max(differences) < 1e-5


def test_train_gpt_learns_and_does_not_depend_on_the_attention(train_gpt, capsys):
    losses = {}
    for attention in ("flash", "standard"):
        with jax.numpy_dtype_promotion("standard"):  # optax.adamw does not run under "strict"
            losses[attention] = train_gpt.main([*TINY, "--sample=5", f"--attention={attention}"])
        printed = capsys.readouterr().out
        assert f"{attention} attention" in printed
        assert len(numbers(r"step +\d+/16  loss \S+ +(\d+) tokens/s", printed)) == 2, "the first and the last"
        assert numbers(r"validation loss (\S+)", printed)[0] < 5
        assert len(printed.encode().split(b"the model writes:\n")[1]) >= 5
    assert len(losses["flash"]) == 16
    np.testing.assert_allclose(losses["flash"][0], np.log(256), atol=0.1)  # it starts knowing nothing
    assert losses["flash"][-1] < losses["flash"][0] - 1
    np.testing.assert_allclose(losses["flash"], losses["standard"], rtol=1e-4)


def test_train_gpt_keeps_the_last_modules_for_validation(train_gpt):
    train, valid = (text.tobytes() for text in train_gpt.load_text())
    assert len(train) > 1_000_000
    assert Path(weakref.__file__).read_bytes() in valid
    assert Path(copy.__file__).read_bytes() in train
    assert b"".join(text.tobytes() for text in train_gpt.load_text(1000)) == train[:1000]


def test_train_gpt_batches_are_text_and_the_next_byte(train_gpt):
    text = np.arange(100, dtype=np.uint8)
    batch = train_gpt.batch_at(text, np.array([3, 50]), 4)
    np.testing.assert_array_equal(batch, [[3, 4, 5, 6, 7], [50, 51, 52, 53, 54]])


def test_train_gpt_progress_is_a_bar_on_a_terminal(train_gpt, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for step in (2, 3, 4):
        train_gpt.report(step, 4, 1.5, 1000.0)
    printed = capsys.readouterr().out
    assert printed.count("\r") == 3
    assert printed.count("\n") == 1
    assert printed.endswith(f"[{'#' * 30}] step    4/4  loss 1.500    1000 tokens/s\n")

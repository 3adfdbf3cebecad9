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


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_gpt():
    return load("train_gpt")


@pytest.fixture(scope="module")
def attention_map():
    return load("attention_map")


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


def test_attention_map_draws_what_the_heads_look_for(attention_map, capsys):
    text = attention_map.TEXT
    attention_map.main([])
    printed = capsys.readouterr().out
    lines = re.findall(r"^ ?(\d+) (\S) ([·░▒▓█]{44})  (\S+) at +(\d+) (\S)$", printed, re.MULTILINE)
    induction, window = lines[:15], lines[15:]
    assert [int(line[0]) for line in induction] == [int(line[0]) for line in window] == list(range(29, 44))
    for row, letter, shades, largest, at, found in lines:
        assert letter == text[int(row)].replace(" ", "␣")
        assert found == text[int(at)].replace(" ", "␣")
        assert shades[int(at)] == "·░▒▓█"[sum(float(largest) >= step for step in (0.05, 0.3, 0.6, 0.9))]
    for row, _, shades, _, _, _ in induction:
        pair = text[int(row) - 1 : int(row) + 1]
        places = [i for i in range(2, int(row) + 1) if text[i - 2 : i] == pair] or [0]
        assert [i for i, shade in enumerate(shades) if shade != "·"] == places
    for row, letter, shades, _, _, _ in window:
        places = [i for i in range(int(row) - 16, int(row)) if text[i].replace(" ", "␣") == letter] or [0]
        assert [i for i, shade in enumerate(shades) if shade != "·"] == places
    assert numbers(r"differ by at most (\S+)", printed)[0] < 1e-5
    assert "4 rows of 131072 tokens, 8 heads: 16 MiB, where the whole map is 512 GiB" in printed


def test_attention_map_takes_a_text_and_says_what_a_picture_needs(attention_map, capsys, monkeypatch):
    attention_map.main(["--text", "a rose is a rose", "--rows", "3"])
    assert "\n 15 e ······█·········  0.98 at  6 ␣\n" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for wrong, message in (["--png", "map.png"], "pip install matplotlib"), (["--rows", "45"], "its length"):
        with pytest.raises(SystemExit):
            attention_map.main(wrong)
        assert message in capsys.readouterr().err


def test_attention_map_writes_a_picture(attention_map, tmp_path):
    pytest.importorskip("matplotlib")
    attention_map.main(["--text", "a rose is a rose", "--png", str(tmp_path / "map.png")])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


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

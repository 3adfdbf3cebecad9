"""What the README shows is true: its Python blocks run, and its files exist."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashjax
from benchmarks import plot

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block):
    names = dict(vars(flashjax))
    if not block.startswith(">>>"):
        exec(block, names)
        return
    test = doctest.DocTestParser().get_doctest(block, names, "README", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_readme_names_files_that_exist():
    named = re.findall(r"`((?:flashjax|tests|examples|benchmarks)/[\w./]*)`", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_names_every_public_mask():
    public = {n: getattr(flashjax, n) for n in flashjax.__all__}
    named = [n for n, x in public.items() if isinstance(x, type) and issubclass(x, flashjax.Mask)]
    assert [n for n in named if n != "Mask" and f"`{n}" not in README] == []


def test_import_flashjax_does_not_import_flax():
    absent = ("flax", "optax", "jax.experimental.pallas")
    code = f"import flashjax, sys; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda p: p.stem)
def test_readme_shows_the_figures_of_the_record(path):
    lines = plot.table(json.loads(path.read_text())).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert rows
    assert [row for row in rows if row not in README] == []

"""The GPU benchmark on a CPU: its rows, its counts, its record, and that nothing wrong gets a speed."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import plot, rivals, run
from benchmarks.rivals import CONTENDERS, OURS, Contender, Row, Unable

ROWS = [row for suite in run.SUITES.values() for row in suite]
TINY = run.Settings(repeats=3, slow_repeats=2, sample_seconds=1e-4, most_calls=2, most_sets=4, matmul=16)
SMALL = Row("small", batch=2, length=50, heads=4, head_dim=16)
RESULTS = sorted((Path(__file__).parent.parent / "benchmarks/results").glob("*.json"))
HIDING = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "documents": {"causal": True, "documents": 12},
    "documents-full": {"documents": 12},
    "lengths": {"lengths": True},
    "documents-window": {"causal": True, "window": 9, "documents": 12},
    "five-documents": {"causal": True, "document_count": 5},
}
SCORES = {
    "bias": {"bias": "pair32"},
    "alibi": {"causal": True, "alibi": True},
    "sinks": {"causal": True, "window": 9, "sinks": True},
    "dropout": {"dropout": 0.25},
    "blocks": {"causal": True, "blocks": 0.3, "length": 600},
}
EVERYTHING = {
    "bias": "pair32",
    "alibi": True,
    "sinks": True,
    "dropout": 0.25,
    "blocks": 0.3,
    "causal": True,
    "document_count": 3,
    "length": 300,
}
CPU = {OURS: CONTENDERS[OURS], "jax.nn XLA": CONTENDERS["jax.nn XLA"]}


def wrong(row):
    """Give the right answer, but for the last query."""
    call, operands = rivals.flashjax(row)
    return lambda **x: call(**x).at[:, -1].multiply(1.5), operands


def unable(row):
    raise Unable("it is closed")


def broken(row):
    raise RuntimeError("no such kernel\nand more")


def error_of(row, make, of=None):
    """Return the check of a contender's result for a row; of what it does for another row, if told."""
    call, operands = make(of or row)
    sets = run.make_inputs(row, 1)
    arrays = {name: sets[0][name] for name in run.learned((of or row).arrays)}
    return run.check(row, run.PASSES["fwd"], sets, [{"out": call(**arrays, operands=operands)}])


@pytest.fixture(scope="module")
def record():
    rows = [
        dataclasses.replace(SMALL, length=64),
        dataclasses.replace(SMALL, name="small causal", length=64, kv_heads=2, causal=True),
        dataclasses.replace(SMALL, name="small window", length=64, causal=True, window=9),
    ]
    others = {"wrong": Contender(wrong), "unable": Contender(unable), "broken": Contender(broken)}
    saved = []
    with jax.numpy_dtype_promotion("standard"):  # jax.nn promotes bfloat16
        whole = run.run(
            rows,
            "fwd",
            TINY,
            run.describe(["--suite", "dense"], commit="abc"),
            CPU | others,
            save=lambda record: saved.append(json.dumps(record)),
        )
    assert len(saved) == len(rows) + 1
    assert json.loads(saved[-1]) == json.loads(json.dumps(whole))
    return json.loads(saved[-1])


def test_suites_rows():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len(run.SUITES["dense"]) == 24
    for row in run.SUITES["dense"]:
        assert row.batch * row.length == 16384
        assert row.heads * row.head_dim == 2048
    for row in ROWS:
        assert row.heads % row.kv_heads == 0
        assert row.causal or row.window is None
        assert row.dtype == "bfloat16"
        assert row.bias in (None, *rivals.BIAS_DTYPES)


@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING)
def test_pairs_brute_force(hiding):
    row = dataclasses.replace(SMALL, **hiding)
    i = np.arange(row.length)
    visible = np.ones((row.batch, row.length, row.length), bool)
    if row.causal:
        visible &= i[:, None] >= i
    if row.window:
        visible &= i[:, None] - i < row.window
    if row.packed:
        ids = row.document_ids()
        assert len(set(ids)) == row.document_count or row.documents
        assert len(set(ids)) > 1
        visible &= ids[:, None] == ids
    if row.lengths:
        visible &= i < row.key_lengths()[:, None, None]
    assert row.visible_pairs() == visible.sum()
    start, end = row.key_ranges()
    np.testing.assert_array_equal(visible, (i >= start[..., None]) & (i < end[..., None]))
    tiles = visible.reshape(row.batch, 5, 10, 5, 10).any((2, 4))
    least, visited = tiles.sum() * 100, row.visited_pairs(block=10)
    # Masks judge tiles one by one, so that `&` of several may keep a tile that is empty.
    assert visited == least if len(hiding) < 3 else least <= visited <= 1.5 * least


@pytest.mark.parametrize("length", [512, 600])
@pytest.mark.parametrize("hiding", [{}, {"causal": True}, {"causal": True, "window": 200}, {"lengths": True}])
def test_pairs_of_blocks_brute_force(hiding, length):
    row = dataclasses.replace(SMALL, length=length, blocks=0.3, **hiding)
    table, i = row.block_table(), np.arange(length)
    assert table.diagonal().all()
    assert not np.triu(table, 1).any()
    assert 0 < np.tril(table, -1).sum() < table.size / 2
    start, end = row.key_ranges()
    visible = (i >= start[..., None]) & (i < end[..., None]) & table[i[:, None] // 128, i // 128]
    assert row.visible_pairs() == visible.sum()
    if length == 512:
        tiles = visible.reshape(row.batch, 4, 128, 4, 128).any((2, 4))
        assert row.visited_pairs() == tiles.sum() * 128**2


def test_large_rows_pairs():
    rows = {row.name: row for row in run.SUITES["scores"]}
    sparse, causal = rows["1/8 of the blocks in 65536"], rows["causal in 65536"]
    assert 0.12 < sparse.visible_pairs() / causal.visible_pairs() < 0.13
    ids = rows["12 documents in 65536"].document_ids()
    lengths = np.bincount(ids)
    assert len(lengths) == 12
    assert lengths.sum() == 65536
    assert lengths.min() > 0
    assert rows["12 documents in 65536"].visible_pairs() == (lengths * (lengths + 1) // 2).sum()


def test_visible_pairs_causal():
    row = Row("x", batch=3, length=1000, heads=2, head_dim=8, causal=True)
    assert row.visible_pairs() == 3 * 1000 * 1001 // 2


@pytest.mark.parametrize(
    ("name", "hiding"),
    [
        *((OURS, x) for x in (*HIDING, *SCORES)),
        *(("jax.nn XLA", x) for x in ("window", "documents", "five-documents", "lengths", "bias", "blocks")),
    ],
)
def test_contenders_right(name, hiding):
    row = dataclasses.replace(SMALL, kv_heads=2, dtype="float32", **(HIDING | SCORES)[hiding])
    error = error_of(row, CPU[name].make)
    assert error["norm"] < 1e-5
    assert error["worst"] < 1e-4


@pytest.mark.parametrize("name", SCORES)
def test_check_sees_what_is_left_out(name):
    row = dataclasses.replace(SMALL, dtype="float32", **SCORES[name])
    unset = {"bias": None, "alibi": False, "sinks": False, "dropout": 0.0, "blocks": None}
    without = dataclasses.replace(row, **{name: unset[name]})
    assert error_of(row, rivals.flashjax, of=without)["norm"] > 10 * run.NORM_LIMIT


@pytest.mark.parametrize("change", [{"softcap": 2.0, "causal": True}, {"value_dim": 8}])
def test_jax_nn_unable(change):
    row = dataclasses.replace(SMALL, dtype="float32", **change)
    assert error_of(row, rivals.flashjax)["norm"] < 1e-5
    with pytest.raises(Unable, match=r"jax\.nn (has no softcap|needs a value dim)"):
        rivals.cudnn(row)


@pytest.mark.parametrize("make", [rivals.cudnn, rivals.tokamax, rivals.jax_nn_xla])
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dropout": 0.1}, "dropout"), ({"alibi": True}, "ALiBi"), ({"sinks": True}, "sinks")],
)
def test_rivals_unable(make, change, reason):
    with pytest.raises(Unable, match=rf"(jax\.nn|tokamax) has no {reason}"):
        make(dataclasses.replace(SMALL, **change))


def test_tokamax_unable():
    with pytest.raises(Unable, match="tokamax has no block-sparse masks"):
        rivals.tokamax(dataclasses.replace(SMALL, blocks=0.5))


def test_mask_limit():
    row = Row("x", batch=1, length=70000, heads=1, head_dim=64)
    for change in ({"document_count": 12}, {"blocks": 0.5}):
        with pytest.raises(Unable, match="the mask alone is 5 GB"):
            rivals.cudnn(dataclasses.replace(row, **change))


def test_xla_scores_limit():
    with pytest.raises(Unable, match="the scores alone are 34 GB"):
        rivals.jax_nn_xla(Row("x", batch=1, length=16384, heads=32, head_dim=64))


@pytest.mark.parametrize("name", list(run.PASSES))
@pytest.mark.parametrize("change", [{"causal": True}, EVERYTHING], ids=["causal", "everything"])
def test_passes_right_and_checked(name, change):
    row = dataclasses.replace(SMALL, kv_heads=2, dtype="float32", **change)
    what = run.PASSES[name]
    call, operands = rivals.flashjax(row)
    sets = run.make_inputs(row, 1)
    attention = lambda **x: call(**x, operands=operands)
    results = what.function(attention)(*what.arguments(attention, sets[0]))
    gradients = {f"d{x}" for x in row.arrays if x != "dout"}
    assert set(results) == {"fwd": {"out"}, "bwd": gradients}.get(name, {"out", *gradients})
    assert run.check(row, what, sets, [results])["worst"] < 1e-4
    for changed in results:
        last = (-1,) * min(3, results[changed].ndim)
        spoilt = results | {changed: results[changed].at[last].multiply(5)}
        assert run.check(row, what, sets, [spoilt])["worst"] > 1e-2


def test_passes_flops():
    forward, backward, both = (run.PASSES[x].flops(192, 128) for x in ("fwd", "bwd", "fwd+bwd"))
    assert (forward, backward) == (2 * (192 + 128), 2 * (3 * 192 + 2 * 128))
    assert both == forward + backward


def test_backward_record():
    with jax.numpy_dtype_promotion("standard"):
        entries = run.run_row(SMALL, "bwd", TINY, CPU)["contenders"]
    for name in CPU:
        assert entries[name]["error"]["norm"] < run.NORM_LIMIT
        assert entries[name]["tflops"] > 0


def test_scores_record():
    plain = dataclasses.replace(SMALL, kv_heads=1, length=256, causal=True)
    rows = [
        plain,
        dataclasses.replace(plain, name="all", **EVERYTHING | {"length": 256, "document_count": None}),
        dataclasses.replace(plain, name="bias", bias="pair"),
    ]
    with jax.numpy_dtype_promotion("standard"):
        record = run.run(rows, "fwd+bwd", TINY, contenders=CPU)
    plain, combined, bias = (row["contenders"] for row in record["rows"])
    assert not set(rivals.LATER) & set(record["rows"][0])
    assert record["rows"][1]["blocks"] == 0.3
    assert "document_count" not in record["rows"][1]
    assert combined["jax.nn XLA"] == {"skipped": "jax.nn has no ALiBi"}
    assert "of_plain" not in plain[OURS]
    for row, entry in zip(record["rows"][1:], (combined[OURS], bias[OURS]), strict=True):
        assert entry["error"]["norm"] < run.NORM_LIMIT
        pairs = row["visited_pairs"] / record["rows"][0]["visited_pairs"]
        times = entry["seconds"]["median"] / plain[OURS]["seconds"]["median"]
        assert entry["of_plain"] == pytest.approx(pairs / times)
    assert bias["jax.nn XLA"]["error"]["norm"] < run.NORM_LIMIT
    lines = plot.table(record).splitlines()
    assert lines[0].endswith("| jax.nn XLA | visited, of the row without |")
    assert lines[2].endswith("| - |")
    assert lines[3].endswith(f"| - | {combined[OURS]['of_plain']:.2f} |")


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_recorded_rows_are_those_of_today(path):
    record = json.loads(path.read_text())
    rows = {row.name: row for row in ROWS}
    what = run.PASSES[record["config"]["pass"]]
    for recorded in record["rows"]:
        today = run.describe_row(rows[recorded["name"]], what)
        assert list(today.items()) == [(n, x) for n, x in recorded.items() if n != "contenders"]
    again = json.loads(path.read_text())
    for recorded in again["rows"]:
        for entry in recorded["contenders"].values():
            entry.pop("of_full", None)
    run.compare(again["rows"])
    assert again == record


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_recorded_command_selects_the_recorded_rows(path):
    record = json.loads(path.read_text())
    command = shlex.split(record["config"]["command"])
    options = dict(itertools.pairwise(command))
    suite = options["--suite"]
    rows = ROWS if suite == "all" else run.SUITES[suite]
    names = [row.name for row in rows if re.search(options.get("--rows", ""), row.name)]
    recorded = [row["name"] for row in record["rows"]]
    assert recorded == names[: len(recorded)]
    assert len(names) - len(recorded) <= 1  # one record ends where its time was up


def test_check_not_finite():
    sets = run.make_inputs(SMALL, 1)
    out = jnp.full(SMALL.arrays["q"].shape, jnp.nan, jnp.bfloat16)
    error = run.check(SMALL, run.PASSES["fwd"], sets, [{"out": out}])
    assert np.isnan(error["norm"])


def test_run_record(record):
    config = record["config"]
    fields = {"date", "command", "commit", "dirty", "device", "driver", "versions", "pass", "repeats", "tile"}
    assert fields <= set(config)
    assert config["command"] == "python -m benchmarks.run --suite dense"
    assert (config["commit"], config["dirty"]) == ("abc", None)  # git would speak of another commit
    assert [x["name"] for x in record["ceiling"]] == ["16 x 16 x 16 bfloat16 matmul"] * 2
    for row in record["rows"]:
        for name in CPU:
            entry = row["contenders"][name]
            assert entry["error"]["norm"] < run.NORM_LIMIT
            assert entry["temp_bytes"] >= 0
            assert 0 < entry["seconds"]["p20"] <= entry["seconds"]["median"] <= entry["seconds"]["p80"]
            tflops = row["flops"] / entry["seconds"]["median"] / 1e12
            assert entry["tflops"] == pytest.approx(tflops)
        assert row["contenders"][OURS]["backend"] == "xla"
        assert len(row["contenders"][OURS]["samples"]) == 3
        assert len(row["contenders"]["jax.nn XLA"]["samples"]) == 2
    full, causal, window = record["rows"]
    assert full["visible_pairs"] == full["visited_pairs"] == 2 * 4 * 64**2
    assert full["flops"] == 4 * 16 * full["visible_pairs"]
    assert causal["visible_pairs"] == 2 * 4 * 64 * 65 // 2
    assert "of_full" not in causal["contenders"][OURS]  # grouped heads: no full row of that shape
    assert window["contenders"][OURS]["of_full"] > 0


def test_run_wrong_has_no_speed(record):
    for row in record["rows"]:
        for name, kind, reason in (
            ("wrong", "failed", "wrong: error"),
            ("unable", "skipped", "it is closed"),
            ("broken", "failed", "RuntimeError: no such kernel"),
        ):
            entry = row["contenders"][name]
            assert entry[kind].startswith(reason)
            assert not {"seconds", "samples", "tflops", "ratio"} & set(entry)
            assert re.search(rf"{name} (failed|-) \[{re.escape(reason)}", plot.line(row))


def test_ratio_to_baseline():
    contenders = {OURS: CONTENDERS[OURS], rivals.BASELINE: CONTENDERS[OURS]}
    entries = run.run_row(SMALL, "fwd", TINY, contenders)["contenders"]
    assert entries[rivals.BASELINE]["ratio"] == 1
    assert entries[OURS]["ratio"] == entries[OURS]["tflops"] / entries[rivals.BASELINE]["tflops"]


@pytest.mark.parametrize(
    ("flops", "most"), [(1e9, (8, 1)), (2e11, (3, 1)), (1e13, (1, 2))], ids=["short", "middle", "long"]
)
def test_count_calls(flops, most):
    assert run.count_calls(run.DENSE[0], flops, run.Settings()) == most


def test_count_calls_l2():
    calls, groups = run.count_calls(SMALL, 1e6, run.Settings())
    assert (calls, groups) == (8, 2)


def test_table(record, tmp_path, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    plot.main([str(path), "--table"])
    lines = capsys.readouterr().out.splitlines()
    columns = ["TFLOP/s, fwd", OURS, "jax.nn XLA", "wrong", "unable", "broken", "visited, of full"]
    assert lines[0] == "| " + " | ".join(columns) + " |"
    assert all(line.count("|") == len(columns) + 1 for line in lines[:5])
    assert re.search(r"\| failed \| - \| failed \|", lines[2])
    assert "commit abc" in lines[-1]


def test_plot(record, tmp_path):
    pytest.importorskip("matplotlib")
    path, svg = tmp_path / "record.json", tmp_path / "out.svg"
    path.write_text(json.dumps(record))
    plot.main([str(path), str(svg)])
    text = svg.read_text()
    assert len(text) < 100_000
    assert "commit abc" in text
    assert OURS in text


def test_main_needs_gpu(capsys):
    with pytest.raises(SystemExit):
        run.main(["--suite", "dense"])
    assert "there is no GPU" in capsys.readouterr().err

"""Draw or print the record of `benchmarks.run`; everything comes from its JSON file.

python -m benchmarks.plot RESULT.json OUT.svg
python -m benchmarks.plot RESULT.json --table
"""

import argparse
import json

BASELINE = "cuDNN"
STYLES = {
    "flashjax": {"color": "#c1272d", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "cuDNN": {"color": "#4a7d1f", "marker": "s"},
    "tokamax": {"color": "#1f5fa8", "marker": "^"},
    "jax.nn XLA": {"color": "#808080", "marker": "x"},
}

# Fields of a row that keep it out of the plot; older records do not have all of them.
MASKS = ("window", "documents", "document_count", "lengths", "blocks")
SCORES = ("softcap", "bias", "alibi", "sinks", "dropout")


def cell(name: str, entry: dict) -> str:
    """Say in a table's cell how a contender did: TFLOP/s and, in brackets, the ratio to cuDNN."""
    if "failed" in entry:
        return "failed"
    if "tflops" not in entry:
        return "-"
    text = f"{entry['tflops']:.0f}" if entry["tflops"] >= 10 else f"{entry['tflops']:.2g}"
    return text + (f" ({entry['ratio']:.2f})" if "ratio" in entry and name != BASELINE else "")


def line(row: dict) -> str:
    """Return one line about a row, with the reason where a contender has no speed."""
    parts = []
    for name, entry in row["contenders"].items():
        reason = entry.get("failed") or entry.get("skipped")
        parts.append(f"{name} {cell(name, entry)}" + (f" [{reason}]" if reason else ""))
    return f"{row['name']}: " + "; ".join(parts)


def table(record: dict) -> str:
    """Return a markdown table of all rows and contenders, and what it was measured with."""
    rows = record["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    ratios = {"of_full": "visited, of full", "of_plain": "visited, of the row without"}
    shown = [x for x in ratios if any(x in row["contenders"].get(names[0], {}) for row in rows)]
    head = [f"TFLOP/s, {record['config']['pass']}", *names, *(ratios[x] for x in shown)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        entries = row["contenders"]
        cells = [row["name"], *(cell(name, entries.get(name, {})) for name in names)]
        ours = [entries[names[0]].get(x) for x in shown]
        cells += ["-" if x is None else f"{x:.2f}" for x in ours]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"In brackets: ratio to cuDNN in the same run. {caption(record)}"])


def caption(record: dict) -> str:
    """Return device, versions, date, commit and the ceiling in one line."""
    config = record["config"]
    versions = (f"{name} {x}" for name, x in config.get("versions", {}).items() if x)
    commit = f"commit {config.get('commit')}" + (" with changes" if config.get("dirty") else "")
    ceiling = " and ".join(f"{x['tflops']:.0f}" for x in record["ceiling"])
    parts = [config.get("device"), *versions, config.get("date"), commit, f"matmul {ceiling} TFLOP/s"]
    return ", ".join(str(x) for x in parts if x) + "."


def draw(record: dict, path: str) -> None:
    """Draw TFLOP/s over T of the plain rows: one panel per head dim, full and causal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = [
        row
        for row in record["rows"]
        if row["heads"] == row["kv_heads"]
        and row["head_dim"] == row["value_dim"]
        and not any(row.get(name) for name in (*MASKS, *SCORES))
    ]
    dims = sorted({row["head_dim"] for row in plain})
    lengths = sorted({row["length"] for row in plain})
    kinds = sorted({row["causal"] for row in plain})
    if not plain:
        raise SystemExit("the record has no row without a mask: nothing to draw")
    style = {"svg.fonttype": "none", "svg.hashsalt": "flashjax", "font.size": 9}
    with matplotlib.rc_context(style):
        size = (3.4 * len(dims) + 0.4, 2.6 * len(kinds) + 0.9)
        figure, axes = pyplot.subplots(
            len(kinds), len(dims), figsize=size, sharex=True, sharey=True, squeeze=False
        )
        for panels, causal in zip(axes, kinds, strict=True):
            for axis, dim in zip(panels, dims, strict=True):
                shown = [row for row in plain if row["head_dim"] == dim and row["causal"] == causal]
                _panel(axis, shown, lengths, record["ceiling"][0]["tflops"])
                axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=9)
            panels[0].set_ylabel("TFLOP/s of visible pairs")
        for axis in axes[-1]:
            axis.set_xlabel("T")
        handles = {}
        for axis in figure.axes:
            handles |= {label: x for x, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=len(handles), frameon=False)
        figure.text(0.01, 0.01, caption(record), fontsize=6)
        figure.tight_layout(rect=(0, 0.03, 1, 0.95))
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _panel(axis, rows: list[dict], lengths: list[int], ceiling: float) -> None:
    for name in dict.fromkeys(name for row in rows for name in row["contenders"]):
        points = {}
        for row in rows:
            if "tflops" in row["contenders"].get(name, {}):
                points.setdefault(lengths.index(row["length"]), row["contenders"][name]["tflops"])
        if points:
            x, y = zip(*sorted(points.items()), strict=True)
            axis.plot(x, y, label=name, markersize=4, **STYLES.get(name, {}))
    axis.axhline(ceiling, color="black", linewidth=0.8, linestyle=":", label="matmul")
    axis.set_xticks(range(len(lengths)), [f"{t:,}" for t in lengths])
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", linewidth=0.4, alpha=0.5)


def main(argv: list[str] | None = None) -> None:
    """Print the table or write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", help="JSON file of benchmarks.run")
    parser.add_argument("svg", nargs="?", help="file to draw to")
    parser.add_argument("--table", action="store_true", help="print the table for the README")
    options = parser.parse_args(argv)
    with open(options.record) as file:
        record = json.load(file)
    if options.table:
        print(table(record))
    if options.svg:
        draw(record, options.svg)
    if not (options.table or options.svg):
        parser.error("name an SVG file to draw to, or ask for the --table")


if __name__ == "__main__":
    main()

"""Time the portable backend against `jax.nn.dot_product_attention` on this machine: forward + gradient.

    python -m benchmarks.portable --json portable.json

Both run in turn in one process, on the same inputs, after their results were compared: a row whose results
differ has no time. Each row is one JSON record with everything needed to repeat it.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from flashjax import flash_attention

ROWS = [
    {"batch": 1, "length": 4096, "heads": 8, "head_dim": 64, "is_causal": True},
    {"batch": 1, "length": 4096, "heads": 8, "head_dim": 64, "is_causal": False},
    {"batch": 4, "length": 1024, "heads": 8, "head_dim": 64, "is_causal": True},
    {"batch": 16, "length": 256, "heads": 8, "head_dim": 64, "is_causal": True},
    {"batch": 1, "length": 4096, "heads": 8, "head_dim": 64, "is_causal": True, "dtype": "bfloat16"},
    {"batch": 1, "length": 65536, "heads": 1, "head_dim": 64, "is_causal": True, "rival": False},
]


def forward_and_gradient(attention, is_causal):
    """Return a function ``(q, k, v, dout) -> (out, (dq, dk, dv))``."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: attention(*x, is_causal=is_causal), q, k, v)
        return out, pull(dout)

    return run


def measure(compiled: dict, arguments: tuple, repeats: int) -> dict[str, list[float]]:
    """Time compiled functions in turn; return seconds by name."""
    seconds = {name: [] for name in compiled}
    for _ in range(repeats):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds[name].append(time.perf_counter() - start)
    return seconds


def run_row(row: dict, repeats: int) -> dict:
    """Check and time one row; return its record."""
    shape = (row["batch"], row["length"], row["heads"], row["head_dim"])
    dtype = row.get("dtype", "float32")
    keys = jax.random.split(jax.random.key(0), 4)
    arguments = tuple(jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)
    functions = {"flashjax": flash_attention}
    if row.get("rival", True):
        functions["jax.nn"] = jax.nn.dot_product_attention
    compiled = {
        name: jax.jit(forward_and_gradient(f, row["is_causal"])).lower(*arguments).compile()
        for name, f in functions.items()
    }
    results = {
        name: [x.astype(jnp.float32) for x in jax.tree.leaves(f(*arguments))] for name, f in compiled.items()
    }
    record = {
        **row,
        "dtype": dtype,
        "temp_bytes": {n: c.memory_analysis().temp_size_in_bytes for n, c in compiled.items()},
    }
    if "jax.nn" in results:
        pairs = zip(results["flashjax"], results["jax.nn"], strict=True)
        record["error"] = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)
        if not record["error"] < (1e-5 if dtype == "float32" else 2e-2):
            return record | {"failed": "results differ"}
    seconds = measure(compiled, arguments, repeats)
    record["seconds"] = {
        name: {"median": statistics.median(x), "least": min(x), "most": max(x)} for name, x in seconds.items()
    }
    return record


def main(argv: list[str] | None = None) -> list[dict]:
    """Run all rows, print a table, and write the records where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the records to this file")
    options = parser.parse_args(argv)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": " ".join(["python -m benchmarks.portable", *(argv or sys.argv[1:])]),
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {platform.processor()}",
        "cores": os.cpu_count(),
    }
    print(json.dumps(common))
    records = []
    for row in ROWS:
        record = common | run_row(row, options.repeats)
        records.append(record)
        label = f"B{row['batch']} T{row['length']} N{row['heads']} D{row['head_dim']} {record['dtype']}"
        label += " causal" if row["is_causal"] else " full"
        if "failed" in record:
            print(f"{label}: {record['failed']}, error {record['error']:.1e}", flush=True)
            continue
        cells = [
            f"{name} {x['median']:.3f} s, {record['temp_bytes'][name] / 1e6:.0f} MB"
            for name, x in record["seconds"].items()
        ]
        if len(cells) > 1:
            seconds, temp = record["seconds"], record["temp_bytes"]
            cells.append(f"{seconds['jax.nn']['median'] / seconds['flashjax']['median']:.1f} times as fast")
            cells.append(f"1/{temp['jax.nn'] / temp['flashjax']:.0f} of the memory")
        print(f"{label}: " + "; ".join(cells), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)
    return records


if __name__ == "__main__":
    main()

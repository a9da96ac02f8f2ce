"""Compute an experiment's cells one after the other, the first rows first, for a limited time.

    python experiments/in_time.py t-vits --size published --device cuda --seconds 400 \\
        --data-dir DATA --out DIR [--column "cifar10, 24 epochs: ours"] [--seeds 2] [--row learned]

The same cells, folder and tables as `symmerge experiment`, which continues with --resume. Here they
are computed in this process in the order of the table, no cell begins after --seconds, a cell that
fails is passed over, and results.json is rewritten after each. `--row` names rows by how they
begin. Several of these may run side by side with other columns and folders. Needs neither
matplotlib nor a terminal.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--size", default="published")
    parser.add_argument("--column", action="append", default=[])
    parser.add_argument(
        "--row", action="append", default=[], help="rows to compute, by their beginning"
    )
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--device", default=None)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    from symmerge.lab.experiments.catalog import EXPERIMENTS
    from symmerge.lab.experiments.plan import claim, digests, make_size
    from symmerge.lab.experiments.results import RESULTS, make_record, printed_rows
    from symmerge.lab.experiments.runner import finished, missing
    from symmerge.lab.experiments.store import Store, compute
    from symmerge.lab.experiments.tables import cells_of, with_columns

    asked, began = arguments(), time.monotonic()
    experiment = EXPERIMENTS[asked.name]
    size = make_size(asked.size, seeds=asked.seeds, device=asked.device, data=asked.data_dir)
    tables = with_columns(experiment.tables(size), asked.column)
    entries = [entry for table in tables for entry in table.entries]
    wanted = [entry for entry in entries if entry.row.startswith(tuple(asked.row) or "")]
    cells = list(dict.fromkeys(cell for entry in wanted for cell in entry.cells))
    store = Store(asked.out.absolute())
    store.cells.mkdir(parents=True, exist_ok=True)
    claim(asked.out, asked.name, size, digests(tables, size, store))
    for cell in missing(cells, store):
        if time.monotonic() - began > asked.seconds:
            print("time is over")
            break
        start = time.monotonic()
        try:
            usage = compute(cell, store, lambda line: None)
        except Exception:
            print(f"FAILED {cell.label}\n{traceback.format_exc()}", flush=True)
            continue
        if usage:
            store.record(usage)
        print(f"{time.monotonic() - start:6.1f} s  {cell.label}", flush=True)
        outcome = finished(cells_of(tables), store)
        make_record(asked.name, experiment, size, tables, outcome).write(asked.out / RESULTS)
    record = make_record(asked.name, experiment, size, tables, finished(cells_of(tables), store))
    for table in record.tables:
        print(f"\n{table.title}")
        for row in printed_rows(table):
            print("; ".join(f"{name} {value}".strip() for name, value in row.items()))


if __name__ == "__main__":
    main()

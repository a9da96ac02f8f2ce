"""Small steps and experiments of them, for tests of engines and of the verb.

As a script: the command line with these experiments.
"""

import os
import signal
import time
from pathlib import Path

from symmerge.checkpoints.files import read_json
from symmerge.errors import DataError
from symmerge.lab.experiments.cells import Cell, Cost
from symmerge.lab.experiments.engines import attempt
from symmerge.lab.experiments.tables import Experiment, ResultTable, TableEntry

VERSION = 1
LOG = "SYMMERGE_TEST_LOG"
PAUSE = "SYMMERGE_TEST_PAUSE"


def note(settings, what):
    """Append a line to the log; returns how often it occurs now."""
    line = f"{what} {settings['name']}"
    if file := settings.get("log", os.environ.get(LOG)):
        with open(file, "a") as log:
            log.write(line + "\n")
        return Path(file).read_text().splitlines().count(line)
    return 1


def add(settings, needs, folder, say):
    note(settings, "begin")
    time.sleep(float(os.environ.get(PAUSE, 0)))
    (folder / "name.txt").write_text(settings["name"])
    found = {
        "value": settings["value"]
        + sum(read_json(need / "result.json")["value"] for need in needs) / 3
    }
    note(settings, "end")
    return found


def flaky(settings, needs, folder, say):
    if note(settings, "begin") <= settings["fails"]:
        raise RuntimeError("not this time")
    return {"value": 1.0}


def refuse(settings, needs, folder, say):
    note(settings, "begin")
    raise DataError("there is no such data: make some")


def dies(settings, needs, folder, say):
    (folder / "half.txt").write_text("half a file")
    if note(settings, "begin") <= settings["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": 2.0}


def held_back(settings, needs, folder, say):
    """Which signals its process blocks."""
    return {
        "value": 0.0,
        "held": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def patient(settings, needs, folder, say):
    """The first time, says its process id and waits."""
    if note(settings, "begin") == 1:
        say(f"process {os.getpid()}")
        time.sleep(600)
    return {"value": 3.0}


def meets(settings, needs, folder, say):
    """Ends when another one runs at the same time."""
    here = Path(settings["place"])
    (here / settings["name"]).touch()
    until = time.monotonic() + 60
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < until, "alone"
        time.sleep(0.02)
    import torch

    held = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "interrupts held back": held,
    }


def cell(step, name, *needs, beside=None, **settings):
    return Cell(
        f"experiment_steps:{step}",
        {"name": name, **settings},
        tuple(needs),
        beside or {},
        f"{step} {name}",
        Cost(30.0, 1.5),
    )


def grid(size, step="add"):
    """A model per seed, lines between them, one table.

    At the published size models have a recipe, so that its data is needed.
    """
    by = {"recipe": "shakespeare-gpt2"} if size.name == "published" and step == "add" else {}
    models = [cell("add", f"model {seed}", value=seed / 7, **by) for seed in range(size.seeds)]
    lines = [
        cell("add", f"line {a}{b}", models[a], models[b], value=0.1)
        for a in range(size.seeds)
        for b in range(a)
    ]
    last = cell(step, "last", *lines, value=1.0, fails=9)
    return (
        ResultTable(
            "Sums",
            (
                TableEntry("lines", "text", tuple(lines), "value", 0.5),
                TableEntry("last", "text", (last,), "value"),
                TableEntry("models", "all", tuple(models), "value"),
            ),
        ),
    )


SUMS = Experiment("sums of sums", "no paper", grid)
SHAKY = Experiment("one that fails", "no paper", lambda size: grid(size, "flaky"))
EXPERIMENTS = {"sums": SUMS, "shaky": SHAKY}


class Here:
    """An engine without processes."""

    workers = heavy = 2

    def open(self, store, say):
        self.store, self.say, self.cells = store, say, []

    def start(self, cell):
        self.cells.append(cell)

    def wait(self):
        cell = self.cells.pop()
        return [attempt(cell, self.store, lambda line: self.say(cell, line))]

    def close(self):
        self.cells.clear()


if __name__ == "__main__":
    from symmerge.cli import main
    from symmerge.lab.experiments import catalog

    catalog.EXPERIMENTS = EXPERIMENTS
    main()

"""Cells are computed once: keys, store, retries, failures, dying workers, interrupts, Ray."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import active_children

import experiment_steps
import pytest
from experiment_steps import SUMS, Here, cell, grid

from symmerge.errors import MismatchError
from symmerge.lab.experiments.cells import Cost
from symmerge.lab.experiments.cluster import RayEngine
from symmerge.lab.experiments.engines import LocalEngine
from symmerge.lab.experiments.plan import default_workers
from symmerge.lab.experiments.results import printed_rows, write_results
from symmerge.lab.experiments.runner import missing, run
from symmerge.lab.experiments.store import Store, compute
from symmerge.lab.experiments.tables import SIZES, ResultTable, cells_of

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
SMALL = SIZES["small"]


@pytest.fixture
def log(tmp_path, monkeypatch):
    file = tmp_path / "log"
    monkeypatch.setenv(experiment_steps.LOG, str(file))

    def lines(what="begin"):
        return (
            sorted(
                line.partition(" ")[2]
                for line in file.read_text().splitlines()
                if line.startswith(what)
            )
            if file.exists()
            else []
        )

    return lines


def results_of(folder, engine):
    """The bytes of results.json after a whole run."""
    tables = grid(SMALL)
    outcome = run(cells_of(tables), Store(folder), engine)
    assert not outcome.failed and outcome.computed == 7
    write_results(folder, "sums", SUMS, SMALL, tables, outcome)
    return (folder / "results.json").read_bytes()


def leftovers(store):
    return [path.name for path in store.cells.iterdir() if path.name.startswith(".")]


def test_a_key_is_what_a_result_depends_on(monkeypatch):
    def made(name="a", **changes):
        return replace(cell("add", name, value=1), **changes)

    need = cell("add", "b", value=2)
    known = {
        made().key,
        made("other").key,
        made(needs=(need,)).key,
        made(needs=(cell("add", "b", value=3),)).key,
        made(step="experiment_steps:dies").key,
    }
    assert len(known) == 5
    assert made(label="called so").key == made(beside={"log": "elsewhere"}).key == made().key
    monkeypatch.setattr(experiment_steps, "VERSION", 2)
    assert made().key not in known


def test_a_cell_is_computed_once_and_appears_whole(tmp_path, log):
    store, sums = Store(tmp_path / "out"), grid(SMALL)[0].entries[0].cells[0]
    with store.locked():
        for one in (*sums.needs, sums):
            assert compute(one, store, print).key == one.key
        assert compute(sums, store, print) is None and log() == ["line 10", "model 0", "model 1"]
    assert store.result(sums) == {"value": pytest.approx(0.1 + 1 / 21)}
    assert {file.name for file in store.folder(sums).glob("[!.]*")} == {
        "result.json",
        "cell.json",
        "name.txt",
    }
    described = json.loads((store.folder(sums) / "cell.json").read_text())
    assert (
        described["needs"] == [need.key for need in sums.needs]
        and described["settings"]["name"] == "line 10"
    )


def test_what_killed_runs_left_is_cleared_and_not_believed(tmp_path, log):
    store, one = Store(tmp_path / "out"), cell("add", "one", value=1)
    left = store.cells / f".{one.key}.0123.partial"
    left.mkdir(parents=True)
    (left / "result.json").write_text('{"value": 99}')
    assert not store.done(one)
    assert run([one], store, Here()).results == {one.key: {"value": 1.0}} and not leftovers(store)
    left.with_name(".another.4567.partial").mkdir()
    assert run([one], store, Here()).computed == 0 and not leftovers(store)


def test_finished_cells_are_not_computed_and_neither_is_what_only_they_need(tmp_path, log):
    store, cells = Store(tmp_path / "out"), cells_of(grid(SMALL))
    first = run(cells, store, Here())
    assert (first.computed, first.reused, len(first.results)) == (7, 0, 7) and len(log()) == 7
    again = run(cells, store, Here())
    assert (again.computed, again.reused, again.results) == (0, 7, first.results) and len(
        log()
    ) == 7
    lines = [one for one in cells if one.needs]
    for gone in (
        *(need for need in lines[0].needs),
        lines[-1],
    ):  # models may be deleted to save space
        shutil.rmtree(store.folder(gone), ignore_errors=True)
    assert [one.label for one in missing(lines, store)] == ["add last"]
    assert run(lines, store, Here()).computed == 1 and log()[:2] == ["last", "last"]


def test_what_fails_is_tried_again_then_reported_with_what_needs_it(tmp_path, log):
    store, told = Store(tmp_path / "out"), []
    twice, never, wrong = (
        cell("flaky", "twice", fails=2),
        cell("flaky", "never", fails=99),
        cell("refuse", "wrong"),
    )
    after = cell("add", "after", never, value=1)
    later, fine = cell("add", "later", after, value=1), cell("add", "fine", twice, value=1)
    found = run(
        [later, fine, wrong],
        store,
        Here(),
        report=lambda *event: told.append((event[0].label, event[1])),
    )
    assert found.results.keys() == {twice.key, fine.key} and found.computed == 2
    assert found.failed == {
        never.key: "RuntimeError: not this time",
        after.key: "not computed, because it needs 'flaky never', which failed",
        later.key: "not computed, because it needs 'add after', which failed",
        wrong.key: "there is no such data: make some",
    }
    assert log() == [
        "fine",
        *["never"] * 3,
        *["twice"] * 3,
        "wrong",
    ]  # the same input gives the same refusal: once is enough
    assert (
        told.count(("flaky never", "again")) == 2
        and told.count(("flaky never", "failed")) == 1
        and ("add later", "failed") in told
    )
    assert "not this time" in (store.root / "failures.log").read_text() and not leftovers(store)
    assert (
        len(run([never], Store(tmp_path / "more"), Here(), attempts=5).failed) == 1
        and log().count("never") == 8
    )


def test_what_overflowed_has_no_mean(tmp_path):
    entry = replace(
        grid(SMALL)[0].entries[0],
        cells=(a := cell("add", "a", value=1.0), b := cell("add", "b", value=float("inf"))),
    )
    tables = (ResultTable("One", (entry,)),)
    record = write_results(
        tmp_path, "sums", SUMS, SMALL, tables, run([a, b], Store(tmp_path), Here())
    )
    entry = record.tables[0].entries[0]
    assert entry.to_json()["values"] == [1.0, None] and entry.mean is None
    assert [*printed_rows(record.tables[0])] == [
        {"": "lines", "text": "not finite (published 0.5)"}
    ]


def test_an_interrupt_keeps_what_is_finished(tmp_path, log):
    store, cells, ended = Store(tmp_path / "out"), cells_of(grid(SMALL)), []

    def interrupt(one, state, detail):
        ended.extend([one.label] * (state == "computed"))
        if len(ended) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cells, store, Here(), report=interrupt)
    assert sum(map(store.done, cells)) == 3 and not leftovers(store)
    assert run(cells, store, Here()).computed == 4 and len(log()) == 7


def test_one_run_at_a_time(tmp_path):
    store = Store(tmp_path / "out")
    with store.locked(), pytest.raises(MismatchError, match="another run is using"):
        run([], store, Here())
    assert run([], store, Here()).computed == 0


def test_one_worker_and_two_give_the_same_bytes(tmp_path):
    one, two = (
        results_of(tmp_path / "one", LocalEngine()),
        results_of(tmp_path / "two", LocalEngine(2)),
    )
    assert (
        one == two == results_of(tmp_path / "here", Here())
        and json.loads(one)["tables"][0]["entries"][0]["mean"]
    )
    times = [
        json.loads(line) for line in (tmp_path / "one" / "times.jsonl").read_text().splitlines()
    ]
    assert (
        len(times) == 7
        and len({row["process"] for row in times}) == 1
        and times[0]["process"] != os.getpid()
    )  # it lives on from cell to cell
    assert all(row["peak_gigabytes"] > 0.01 and row["seconds"] >= 0 for row in times)


def killing(told):
    """A report that kills the worker that says who it is."""

    def report(one, state, detail):
        told.append((one.label, state, detail))
        if state == "said":
            os.kill(int(re.fullmatch(r"process (\d+)", detail)[1]), signal.SIGKILL)

    return report


def test_workers_that_die_lose_nothing_and_two_work_at_once(tmp_path, log):
    store, told, place = Store(tmp_path / "out"), [], tmp_path / "place"
    place.mkdir()
    waits, always = cell("patient", "waits"), cell("dies", "always", dies=99)
    pair = [cell("meets", name, beside={"place": str(place)}) for name in "ab"]
    found = run(
        [*pair, waits, always, cell("add", "after", waits, value=1)],
        store,
        LocalEngine(2),
        attempts=2,
        report=killing(told),
    )
    assert (
        found.failed
        == {always.key: "the worker died (SIGKILL: perhaps there was too little memory)"}
        and log().count("always") == 2
    )
    assert (
        found.results[waits.key] == {"value": 3.0}
        and found.computed == 4
        and log().count("waits") == 2
    )
    assert found.results[pair[0].key] == {"threads": 1, "omp": "1", "interrupts held back": True}
    assert not leftovers(store) and not (store.folder(always)).exists()


def test_without_ray_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MismatchError, match=re.escape("pip install 'symmerge[ray]'")):
        run([cell("add", "a", value=1)], Store(tmp_path), RayEngine())


@needs_ray
def test_ray_gives_the_same_bytes(tmp_path):
    assert results_of(tmp_path / "ray", RayEngine(workers=2)) == results_of(
        tmp_path / "here", Here()
    )


@needs_ray
def test_ray_workers_that_die_lose_nothing(tmp_path):
    log, store, place = tmp_path / "log", Store(tmp_path / "out"), tmp_path / "place"
    place.mkdir()
    beside = {"log": str(log)}
    once, always = (
        cell("dies", "once", dies=1, beside=beside),
        cell("dies", "always", dies=99, beside=beside),
    )
    pair = [cell("meets", name, beside={"place": str(place)}) for name in "ab"]
    after = [cell("add", name, once, value=1, beside=beside) for name in "xyz"]
    found = run([*pair, once, always, *after], store, RayEngine(workers=2))
    assert (
        found.failed.keys() == {always.key}
        and "the worker died" in found.failed[always.key]
        and found.computed == 6
    )
    lines = log.read_text().splitlines()
    assert (
        lines.count("begin once") == 2
        and lines.count("begin always") == 3
        and lines.count("begin x") == 1
    )
    assert found.results[pair[0].key].items() >= {
        "threads": 1,
        "omp": "1",
    }.items() and not leftovers(store)


@needs_ray
def test_ray_refuses_a_folder_that_nodes_do_not_see(tmp_path):
    engine = RayEngine(workers=1)
    with pytest.raises(MismatchError, match="choose a folder that all nodes share"):
        engine.open(Store(tmp_path / "nowhere"), print)


@needs_ray
def test_a_ray_node_that_is_lost_loses_nothing(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    log, told = tmp_path / "log", []
    for name, value in {
        experiment_steps.LOG: str(log),
        experiment_steps.PAUSE: "3",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }.items():
        monkeypatch.setenv(name, value)
    log.touch()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    cells = cells_of(grid(replace(SMALL, seeds=2)))

    def unplug():
        while len(log.read_text().splitlines()) < 2:  # both nodes are at work
            time.sleep(0.02)
        cluster.remove_node(other, allow_graceful=False)

    thread = threading.Thread(target=unplug)
    try:
        thread.start()
        found = run(
            cells,
            Store(tmp_path / "out"),
            RayEngine(cluster.address, workers=2),
            report=lambda *event: told.append(event[1]),
        )
        thread.join()
    finally:
        cluster.shutdown()
    assert told.count("again") == 1 and not found.failed and found.computed == 4
    monkeypatch.setenv(experiment_steps.PAUSE, "0")
    assert found.results == run(cells, Store(tmp_path / "here"), Here()).results


@needs_ray
def test_ray_says_what_is_not_there(tmp_path):
    for engine, said in (
        (RayEngine("127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
        (RayEngine(gpus=1.0), "no node of the Ray cluster has a GPU"),
    ):
        with pytest.raises(MismatchError, match=said):
            run([cell("add", "a", value=1)], Store(tmp_path), engine)


def test_no_worker_hears_ctrl_c(tmp_path):
    """Also the first worker, which multiprocessing starts together with a helper that unblocks
    signals. In a process that has not started any yet."""
    code = f"""
from pathlib import Path

from experiment_steps import cell
from symmerge.lab.experiments.engines import LocalEngine
from symmerge.lab.experiments.runner import run
from symmerge.lab.experiments.store import Store

if __name__ == "__main__":
    cells = [cell("held_back", "a"), cell("held_back", "b")]
    outcome = run(cells, Store(Path({str(tmp_path / "out")!r})), LocalEngine(2))
    print([result["held"] for result in outcome.results.values()])
"""
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert said.stdout.strip() == str([[signal.SIGINT.value]] * 2), said.stdout + said.stderr


def test_a_second_ctrl_c_leaves_no_worker(tmp_path, monkeypatch, log):
    """Not deferred, the second one would come between two workers, and Python would wait for
    the others at its end."""
    close = LocalEngine.close

    def disturbed(engine):
        os.kill(os.getpid(), signal.SIGINT)
        close(engine)

    def interrupt(one, state, detail):
        if state == "said":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LocalEngine, "close", disturbed)
    with pytest.raises(KeyboardInterrupt):
        run(
            [cell("patient", name) for name in "ab"],
            Store(tmp_path / "out"),
            LocalEngine(2),
            report=interrupt,
        )
    assert not active_children() and not leftovers(Store(tmp_path / "out"))


def test_workers_go_on_with_what_they_know(tmp_path):
    """Two rounds of two kinds on two workers, in reverse order: each kind keeps its worker."""
    engine, processes, store = LocalEngine(2), {}, Store(tmp_path)
    with store.locked(), closing(engine):
        engine.open(store, lambda one, line: None)
        for kinds in ("xy", "yx"):
            for kind in kinds:
                engine.start(cell("add", f"{kind} of {kinds}", value=1, recipe=kind))
            ended = []
            while len(ended) < 2:
                ended += engine.wait()
            for one in ended:
                processes.setdefault(one.cell.settings["recipe"], set()).add(one.usage.process)
    assert [len(found) for found in processes.values()] == [1, 1] and processes["x"] != processes[
        "y"
    ]


def test_as_many_workers_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 20_000_000}[name]
    )  # 20 GB, of which half
    light, heavy, huge = (
        replace(cell("add", "one"), cost=Cost(1.0, size)) for size in (1.0, 4.0, 40.0)
    )
    assert [default_workers(cells, "cpu") for cells in ([light], [light, heavy], [huge])] == [
        8,
        2,
        1,
    ]
    assert [default_workers(cells, "cuda:1") for cells in ([light], [heavy], [])] == [8, 2, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert default_workers([light], "cuda") == 9 and default_workers([light], "cpu") == 10


def test_of_heavy_cells_few_at_once(tmp_path):
    """The light ones behind them do not wait for room."""
    cells = [replace(cell("add", name, value=1), cost=Cost(heavy=name < "d")) for name in "abcdef"]
    together = []

    class Watched(Here):
        workers, heavy = 4, 1

        def wait(self):
            together.append("".join(one.settings["name"] for one in self.cells))
            return super().wait()

    assert run(cells, Store(tmp_path), Watched()).computed == 6
    assert (
        together[0] == "adef"
        and all(sum(name < "d" for name in names) <= 1 for names in together)
        and len(together) == 6
    )


def test_the_longest_that_can_be_computed_is_first(log, tmp_path):
    """Equally long ones in order; and nothing before what it needs, however long it is."""

    def lasting(seconds, name, *needs):
        return replace(cell("add", name, *needs, value=1.0), cost=Cost(seconds))

    short, started = lasting(1.0, "short"), []
    cells = [short, lasting(5.0, "long"), lasting(5.0, "as long"), lasting(99.0, "after", short)]
    run(
        cells,
        Store(tmp_path / "store"),
        Here(),
        report=lambda one, state, _: started.append(one.label) if state == "started" else None,
    )
    assert started == ["add long", "add as long", "add short", "add after"]

"""Experiments on external models: cells depend on content, not on paths; what is refused."""

import json
import shutil
from dataclasses import replace

import huggingface_hub
import pytest
from experiment_steps import Here
from fixtures import checkpoint, run

from symmerge.checkpoints.hub import USER_OFFLINE
from symmerge.cli import experiment as verb_module
from symmerge.cli.options import experiments
from symmerge.errors import MismatchError
from symmerge.evaluation.data.embedded import python_docs
from symmerge.lab.experiments.catalog import EXPERIMENTS
from symmerge.lab.experiments.cells import with_needs
from symmerge.lab.experiments.external import DataSource, gather_external
from symmerge.lab.experiments.plan import check_train_data, make_size
from symmerge.lab.experiments.runner import run as compute
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import SIZES, cells_of, values_of

TAKERS = [
    name for name, found in EXPERIMENTS.items() if found.accepts and not found.accepts.further
]
WIDER = {"n_embd": 72, "n_head": 6, "n_inner": 192}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Small models of several kinds, one wider; a text to learn from and another to test on."""
    folder = tmp_path_factory.mktemp("home")
    for kind, count in {"bert": 3, "gpt2": 3, "vit": 2}.items():
        for seed in range(count):
            checkpoint(folder / f"{kind}-{seed}", kind, seed=seed)
    checkpoint(folder / "wide", "gpt2", seed=9, **WIDER)
    for name, part in {"books.txt": "train", "valid.txt": "test"}.items():
        (folder / name).write_text(python_docs(part)[:40_000])
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch, home):
    monkeypatch.setattr(experiments, "LocalEngine", lambda workers, heavy: Here())
    monkeypatch.chdir(home)


def verb(
    name, *models, out="out", train="books.txt", test="valid.txt", size="smoke", more=(), expect=0
):
    data = [*(["--train-data", train] if train else []), *(["--test-data", test] if test else [])]
    return run(
        "experiment",
        name,
        "--models",
        *models,
        *data,
        "--out",
        out,
        "--size",
        size,
        *more,
        expect=expect,
    )


def size_of(name, *models, train="books.txt", test="valid.txt", size="smoke"):
    return make_size(
        size, external=gather_external(name, EXPERIMENTS[name].accepts, models, test, train)
    )


def keys(name, *models, **data):
    return {
        cell.label: cell.key
        for cell in with_needs(cells_of(EXPERIMENTS[name].tables(size_of(name, *models, **data))))
    }


def elsewhere(home, folder):
    """The same files in another place, models under other names."""
    moved = folder / "elsewhere"
    moved.mkdir()
    for file in ("books.txt", "valid.txt"):
        shutil.copy(home / file, moved)
    return moved, [
        str(shutil.copytree(home / f"bert-{seed}", moved / f"model-{seed}")) for seed in (0, 1)
    ]


def test_the_same_files_elsewhere_give_the_same_bytes(home, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    said = verb("v-stream", "bert-0", "bert-1", out=out)
    assert (
        "BertForMaskedLM, valid.txt" in said.stdout
        and "8 cells computed, 0 reused" in said.stdout
        and "(published 4.95)" in said.stdout
    )
    found = json.loads((out / "results.json").read_text())
    assert (
        found["size"] == {"name": "smoke", "seeds": 2, "points": 3, "device": "cpu"}
        and not found["failed"]
    )
    assert (
        found["external"]["task"] == "mlm"
        and found["external"]["test"]["name"] == "valid.txt"
        and str(home) not in (out / "results.json").read_text()
    )
    assert "models given" in (out / "page.html").read_text() and {
        file.readlink() for file in out.glob("cells/*/model")
    } == {home / "bert-0", home / "bert-1"}

    moved, models = elsewhere(home, tmp_path)
    places = {"train": moved / "books.txt", "test": moved / "valid.txt"}
    verb("v-stream", *models, out=other, **places)
    assert (out / "results.json").read_bytes() == (other / "results.json").read_bytes()

    # Moved after a run: what is finished counts, and what is not finds its models in the new place.
    shutil.rmtree(out / "cells" / found["tables"][0]["entries"][0]["cells"][0])
    for link in out.glob("cells/*/model"):
        link.unlink()
        link.symlink_to(tmp_path / "gone")
    said = verb("v-stream", *models, out=out, **places, more=["--resume"]).stdout
    assert (
        "1 cells computed, 7 reused" in said
        and (out / "results.json").read_bytes() == (other / "results.json").read_bytes()
    )
    assert (
        "8 cells\t\t0 to do"
        in verb("v-stream", *models, out=out, **places, more=["--dry-run"]).stdout
    )

    for others, data in (
        (["bert-0", "bert-2"], {}),
        (["bert-0", "bert-1"], {"train": "python-docs:train"}),
    ):
        assert (
            "of other models or other data"
            in verb("v-stream", *others, out=out, **data, more=["--resume"], expect=2).stderr
        )
    assert (
        "of other models or other data"
        in run(
            "experiment", "v-stream", "--out", out, "--size", "smoke", "--resume", expect=2
        ).stderr
    )


def test_keys_are_contents(home, tmp_path):
    moved, models = elsewhere(home, tmp_path)
    before = keys("t-methods", "bert-0", "bert-1")
    assert set(before.values()) == set(
        keys(
            "t-methods", *models, train=str(moved / "books.txt"), test=str(moved / "valid.txt")
        ).values()
    )
    content = (moved / "model-1" / "model.safetensors").read_bytes()
    (moved / "model-1" / "model.safetensors").write_bytes(
        content[:-1] + bytes([content[-1] ^ 1])
    )  # one bit of one weight
    assert (
        len(set(before.values()) & set(keys("t-methods", *models).values())) == 1
    )  # the other model
    (moved / "books.txt").write_text("other words " * 4000)
    learned = {
        label
        for label, key in keys(
            "t-methods", "bert-0", "bert-1", train=str(moved / "books.txt")
        ).items()
        if before[label] != key
    }
    assert {label.partition(":")[0].partition(",")[0] for label in learned} == {
        "activations",
        "learned-permutations",
        "learned",
    }
    measured = {
        label
        for label, key in keys("t-methods", "bert-0", "bert-1", test="python-docs").items()
        if before[label] != key
    }
    assert measured == {label for label in before if ":" in label}  # every line


def test_data_is_bytes_and_how_they_are_read(tmp_path):
    for name, text in {
        "a.txt": "1",
        "b.txt": "1",
        "c.tsv": "1",
        "d.txt": "2",
        "x/1/e.png": "1",
        "y/1/e.png": "1",
        "z/2/e.png": "1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    a, b, c, d, x, y, z = (
        DataSource.at(str(tmp_path / name)).content
        for name in ("a.txt", "b.txt", "c.tsv", "d.txt", "x", "y", "z")
    )
    assert (
        a == b
        and x == y
        and len({a, c, d, x, z}) == 5
        and DataSource.at("python-docs") == DataSource("python-docs", "python-docs")
    )


@pytest.mark.parametrize("name", TAKERS)
def test_every_experiment_that_takes_models_has_one_column_of_them(name):
    models = {
        "t-widths": ["gpt2-0", "gpt2-1", "wide"],
        "t-many": ["gpt2-0", "gpt2-1", "gpt2-2"],
    }.get(name, ["bert-0", "bert-1"])
    external = size_of(name, *models).external
    for size in SIZES:
        asked = make_size(size, external=external)
        tables = EXPERIMENTS[name].tables(asked)
        check_train_data(name, tables)
        cells = with_needs(cells_of(tables))
        assert {cell.step.partition(":")[2] for cell in cells} <= {"external", "line", "together"}
        steps = [cell for cell in cells if cell.step.endswith(":external")]
        assert {cell.settings["content"] for cell in steps} == {
            model.content for model in asked.external.models
        }
        if name not in (
            "v-amount",
            "v-features",
        ):  # their columns are amounts, and before and after
            assert {entry.column for table in tables for entry in table.entries} == {
                asked.external.column
            }


def test_each_row_of_what_learning_needs_is_another_cell():
    size = size_of("t-learning", "bert-0", "bert-1", size="small")
    classifiers = replace(
        size, external=replace(size.external, task="text")
    )  # nobody writes for them
    rows, fewer = (
        {
            entry.row: entry.cells[0].key
            for entry in EXPERIMENTS["t-learning"].tables(asked)[0].entries
        }
        for asked in (size, classifiers)
    )
    assert len(set(rows.values())) == len(rows) == 10 and rows.keys() - fewer.keys() == {
        "no data at all"
    }
    drawn = replace(
        size, external=replace(size.external, task="image", train=DataSource.at("self"))
    )
    assert rows.keys() - {
        entry.row for entry in EXPERIMENTS["t-learning"].tables(drawn)[0].entries
    } == {"labels instead of the parents' answers"}


METHODS = {"t-widths": ("none", "symmerge"), "t-many": ("none",), "v-features": ("correlation",)}


def test_widths_and_many_and_features(tmp_path):
    """Unequal pairs, all models at once, and a row for every layer."""
    asked = {
        "t-widths": size_of("t-widths", "gpt2-0", "gpt2-1", "wide"),
        "t-many": size_of("t-many", "gpt2-0", "gpt2-1", "gpt2-2"),
        "v-features": size_of("v-features", "bert-0", "bert-1"),
    }
    tables = {name: EXPERIMENTS[name].tables(size) for name, size in asked.items()}
    chosen = {
        name: [cell for cell in cells_of(found) if cell.settings["method"] in METHODS[name]]
        for name, found in tables.items()
    }
    assert [len(cell.needs) for cell in chosen["t-widths"]] == [2] * 4 and all(
        cell.needs[1].label.startswith("wide") for cell in chosen["t-widths"]
    )
    outcome = compute(
        [cell for cells in chosen.values() for cell in cells], Store(tmp_path), Here(), attempts=1
    )
    assert outcome.failed == {}
    for name, found in tables.items():
        values = [
            values_of(entry, outcome.results)
            for entry in found[0].entries
            if entry.cells[0].key in outcome.results
        ]
        assert values and all(map(all, values)), name
    assert {entry.row for entry in tables["v-features"][0].entries} == {
        f"layer {layer}, {kind}" for layer in (0, 1) for kind in ("vo", "ff")
    }


def test_pictures_too(tmp_path):
    said = verb(
        "t-iterations",
        "vit-0",
        "vit-1",
        out=tmp_path / "out",
        train=None,
        test=str(_pictures(tmp_path / "shown.npz")),
    )
    assert "ViTForImageClassification, shown.npz" in said.stdout and "0 reused" in said.stdout


def _pictures(file):
    import numpy as np

    rng = np.random.default_rng(0)
    np.savez(file, x=rng.integers(0, 255, (40, 8, 8, 3), dtype=np.uint8), y=rng.integers(0, 3, 40))
    return file


def test_a_model_that_changes_meanwhile_is_noticed(home, tmp_path, monkeypatch):
    _, models = elsewhere(home, tmp_path)

    def shift(cells, store):
        (tmp_path / "elsewhere" / "model-0" / "config.json").write_text(
            (home / "bert-2" / "config.json").read_text() + " "
        )

    monkeypatch.setattr(verb_module, "relink", shift)
    said = verb("v-stream", *models, out=tmp_path / "out", expect=1)
    assert "not what it was when the experiment began" in said.stdout


def test_names_on_the_hub(home, monkeypatch):
    asked = []

    def give(name, **options):
        asked.append(name)
        return str(home / f"bert-{len(asked) % 3}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.setenv(USER_OFFLINE, "")
    found = size_of("v-heads", "google/one", "owner/two").external
    assert asked == ["google/one", "owner/two"] and [
        model.label.partition(" ")[0] for model in found.models
    ] == ["one", "two"]
    asked.clear()
    with pytest.raises(
        MismatchError,
        match="google/multiberts-seed_1 and google/multiberts-seed_4 are the same checkpoint",
    ):  # this hub has three
        size_of("v-heads", "multiberts")
    assert asked == [f"google/multiberts-seed_{seed}" for seed in range(1, 6)]


@pytest.mark.parametrize(
    ("name", "size", "kind", "asked"),
    [
        ("pythia-seeds", "70m", "neox", "EleutherAI/pythia-70m-seed{}"),
        ("multiberts", "base", "bert-pretraining", "google/multiberts-seed_{}"),
    ],
)
def test_models_by_name_are_one_command(name, size, kind, asked, tmp_path, monkeypatch):
    """Stand-ins of the same classes and files; a user with a connection types the same."""
    names = []

    def give(repository, **options):
        names.append(repository)
        place = tmp_path / repository.replace("/", "--")
        return str(place if place.exists() else checkpoint(place, kind, seed=len(names)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.setenv(USER_OFFLINE, "")
    command = ("experiment", name, "--size", size, "--seeds", 2, "--test-data", "valid.txt")
    planned = run(*command, "--out", tmp_path / "plan", "--dry-run").stdout
    assert names == [asked.format(seed) for seed in (1, 2)]
    assert "learned" in planned if name == "pythia-seeds" else "residual-first" in planned
    assert not (tmp_path / "plan").exists()
    # At the published size learning takes minutes: here as few steps as at the smoke size.
    monkeypatch.setitem(SIZES, "published", SIZES["smoke"])
    monkeypatch.setattr("symmerge.lab.experiments.named.LEARNING", {"small": {}, "published": {}})
    rows = ("vanilla", "ours, learned") if name == "pythia-seeds" else ("heads permuted",)
    experiment = EXPERIMENTS[name]
    only = replace(experiment, tables=lambda at: rows_of(experiment.tables(at), rows))
    monkeypatch.setattr(verb_module.catalog, "EXPERIMENTS", {name: only})
    shown = run(*command, "--out", tmp_path / "out").stdout
    assert "missing" not in shown and all(row in shown for row in rows)
    refused = run(*command[:4], "--seeds", 99, "--out", tmp_path / "many", expect=2).stderr
    assert "--seeds 99: there are only" in refused


def rows_of(tables, rows):
    return tuple(
        replace(table, entries=entries)
        for table in tables
        if (entries := tuple(one for one in table.entries if one.row.startswith(rows)))
    )


REFUSED = {
    "trains itself": (
        ("f-orders", "bert-0", "bert-1"),
        {},
        "f-orders must train its own models: leave out --models, or choose t-methods",
    ),
    "one": (("v-heads", "bert-0"), {}, "--models bert-0: v-heads needs 2 models or more, 1 given"),
    "two of three": (("t-many", "bert-0", "bert-1"), {}, "t-many needs 3 models or more, 2 given"),
    "twice": (
        ("v-heads", "bert-0", "bert-1", "./bert-0"),
        {},
        "bert-0 and ./bert-0 are the same checkpoint",
    ),
    "other kinds": (("v-heads", "bert-0", "gpt2-1"), {}, "models of different architectures"),
    "other widths": (("t-methods", "gpt2-0", "wide"), {}, "they differ in: "),
    "no widths": (
        ("t-widths", "gpt2-0", "gpt2-1"),
        {},
        "all of --models are equally wide: add one of another width",
    ),
    "unlike widths": (("t-widths", "bert-0", "wide"), {}, "cannot be widened to"),
    "nothing to measure on": (
        ("v-heads", "bert-0", "bert-1"),
        {"test": None},
        "v-heads with --models needs something to measure on: add --test-data",
    ),
    "own text": (("v-heads", "bert-0", "bert-1"), {"test": "self"}, "--test-data self"),
    "nothing to learn from": (
        ("v-heads", "bert-0", "bert-1"),
        {"train": None},
        "v-heads: the methods correlation-ff, correlation-monotonic",
    ),
    "the same": (
        ("v-heads", "bert-0", "bert-1"),
        {"train": "./valid.txt"},
        "--train-data ./valid.txt is also measured on",
    ),
    "no such data": (
        ("v-heads", "bert-0", "bert-1"),
        {"test": "nothing.txt"},
        "nothing.txt does not exist",
    ),
    "no such data to learn from": (
        ("v-heads", "bert-0", "bert-1"),
        {"train": "nothing.txt"},
        "nothing.txt does not exist",
    ),
    "wrong data": (("t-methods", "vit-0", "vit-1"), {}, "valid.txt holds no images"),
    "no such folder": (
        ("v-heads", "bert-0", "bert-9"),
        {},
        "bert-9 is not a folder: give a checkpoint folder, or a name on the hub",
    ),
    "offline": (
        ("v-heads", "bert-0", "owner/model"),
        {},
        "hf download owner/model --local-dir DIR",
    ),
    "seeds": (
        ("v-heads", "bert-0", "bert-1"),
        {"more": ["--seeds", 3]},
        "--seeds is for models that are trained, and --models exist already",
    ),
    "data sets": (
        ("v-heads", "bert-0", "bert-1"),
        {"more": ["--data-dir", "."]},
        "--data-dir is for models that are trained",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    words, options, expected = REFUSED[case]
    said = verb(*words, out=tmp_path / "out", **options, expect=2)
    assert (
        expected in said.stderr and said.stderr.count("\n") <= 1 and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize(
    "option", [("--test-data", "valid.txt"), ("--train-data", "valid.txt"), ("bert-0",)]
)
def test_options_of_given_models_need_some(option, tmp_path):
    assert (
        f"{option[0]} goes with --models: add --models A B"
        in run("experiment", "v-heads", *option, "--out", tmp_path / "out", expect=2).stderr
    )


def test_larger_models_take_longer():
    asked = size_of("v-heads", "bert-0", "bert-1", size="published")
    large = replace(
        asked,
        external=replace(
            asked.external,
            models=tuple(replace(model, parameters=110_000_000) for model in asked.external.models),
        ),
    )
    usual, more = (cells_of(EXPERIMENTS["v-heads"].tables(size))[0].cost for size in (asked, large))
    assert more.seconds == 11 * usual.seconds and more.gigabytes >= usual.gigabytes == 6.0

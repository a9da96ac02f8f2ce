"""Every experiment at its smoke size: no cell fails, functions stay the same, tables are full."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from experiment_steps import Here
from fixtures import run as run_verb

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.experiment_results import ExperimentFile
from symmerge.lab.experiments import components
from symmerge.lab.experiments.catalog import EXPERIMENTS
from symmerge.lab.experiments.cells import with_needs
from symmerge.lab.experiments.generalized import LABELS, NO_DATA
from symmerge.lab.experiments.plan import check_data, check_folder, check_same_data, claim, digests
from symmerge.lab.experiments.results import write_results
from symmerge.lab.experiments.runner import run
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import SIZES, cells_of, values_of
from symmerge.lab.training.recipes import training_recipe

SMOKE = SIZES["smoke"]
NON_SYMMETRIC = ("soft", "correlation-ignore-heads", "residual-separate")  # no symmetries


# The grids repeat themselves: of these, one column, one component or two rows are computed.
DIGITS = dict.fromkeys(
    ("t-samplers", "t-iterations", "t-soft", "t-spaces", "t-widths", "t-many"),
    lambda entry: entry.column == "digits",
)
ONE_COMPONENT = dict.fromkeys(
    ("f-retrain-masked", "f-retrain-images"), lambda entry: entry.row.startswith("(ii)")
)
# Rows that do what another row does, with another number.
REPEATED = {
    *(
        f"{method}, {sweeps} sweeps"
        for method in ("permutations", "orthogonal")
        for sweeps in (2, 5)
    ),
    *("0.5", "U(0, 1)", "N(0.5, 0.1)", "learned, wide"),  # samplers: test_samplers.py
    *("heads", "ff", "residual + heads", "32 inputs"),
}
COMPUTED = {
    **DIGITS,
    **ONE_COMPONENT,
    "t-vits": lambda entry: "dropout" in entry.column and entry.row.startswith("vanilla"),
    "pythia-seeds": lambda entry: entry.row == "vanilla",
    "f-retrain-classifiers": lambda entry: (
        entry.row.startswith("(ii)") and entry.column.startswith("rotary")
    ),
    "t-learning": lambda entry: entry.column == "digits" or entry.row in (LABELS, NO_DATA),
    "f-retrain": lambda entry: entry.column == "absolute: GPT-2" or entry.row.startswith("(i) "),
    "f-metrics": lambda entry: entry.column == "absolute: GPT-2",
    "v-amount": lambda entry: entry.column == "8 samples",
    "f-orders": lambda entry: entry.column == "rotary: Llama",
}


@pytest.fixture(scope="module")
def declared():
    return {name: experiment.tables(SMOKE) for name, experiment in EXPERIMENTS.items()}


@pytest.fixture(scope="module")
def tables(declared):
    """What is computed here."""
    return {name: tuple(map(partial(computed, name), shown)) for name, shown in declared.items()}


def computed(name, table):
    chosen = COMPUTED.get(name, lambda entry: True)
    entries = [entry for entry in table.entries if chosen(entry) and entry.row not in REPEATED]
    return replace(table, entries=tuple(entries))


def test_what_is_left_out_is_there(declared):
    rows = {entry.row for shown in declared.values() for table in shown for entry in table.entries}
    assert rows >= REPEATED


@pytest.fixture(scope="module")
def outcome(tables, tmp_path_factory):
    """All experiments in one store: what they share is computed once."""
    cells = [cell for shown in tables.values() for cell in cells_of(shown)]
    store = Store(tmp_path_factory.mktemp("experiments"))
    # In this process, which has imported everything. Workers: test_experiment_engine.py
    outcome = run(cells, store, Here(), attempts=2)
    assert outcome.failed == {}
    return outcome


def test_every_table_is_full(tables, outcome):
    for name, shown in tables.items():
        for entry in (entry for table in shown for entry in table.entries):
            values = values_of(entry, outcome.results)
            assert len(values) == len(entry.cells) and all(map(math.isfinite, values)), (
                name,
                entry.row,
                entry.column,
            )


def test_methods_keep_both_ends(tables, outcome):
    """The lines of a pair have the same ends by all methods: none changed a function."""
    ends, midpoints = {}, {}
    for cell in {
        cell for shown in tables.values() for cell in cells_of(shown) if cell.step.endswith(":line")
    }:
        result = outcome.results[cell.key]
        losses = result["losses"]
        circuits = result.get("circuits", result)["losses"]
        assert math.isclose(circuits[0], losses[0], rel_tol=1e-4), cell.label
        assert math.isclose(circuits[-1], losses[-1], rel_tol=1e-4), cell.label
        if cell.settings["method"] not in NON_SYMMETRIC:
            ends.setdefault(cell.needs, []).append((losses[0], losses[-1]))
            midpoints.setdefault(cell.needs, set()).add(round(losses[1], 4))
            assert outcome.results[cell.key].get("changed", 0.0) < 1e-4, cell.label
    for pair, found in ends.items():
        assert all(
            math.isclose(one, first, rel_tol=1e-4)
            for many in found
            for one, first in zip(many, found[0], strict=True)
        ), [need.label for need in pair]
    assert max(map(len, midpoints.values())) > 5  # methods do differ between the ends
    forms = [result for result in outcome.results.values() if "circuits" in result]
    assert any(abs(one["circuits"]["losses"][1] - one["losses"][1]) > 1e-4 for one in forms)


def test_what_experiments_share_is_one_cell(declared):
    every = [cell for shown in declared.values() for cell in with_needs(cells_of(shown))]
    often = Counter(cell.label for cell in every)
    assert often["gpt2-docs, seed 0"] > 5 and often["bert-docs, seed 0"] > 3
    assert len({cell for cell in every if cell.label == "gpt2-docs, seed 0"}) == 1


def test_pages_have_the_numbers(tables, outcome, tmp_path):
    for name in ("t-methods", "f-groups"):
        folder = tmp_path / name
        folder.mkdir()
        record = write_results(folder, name, EXPERIMENTS[name], SMOKE, tables[name], outcome)
        assert ExperimentFile.read(folder / "results.json") == record and not record.failed
        page = (folder / "page.html").read_text("utf-8")
        assert tables[name][0].title in page and re.search(
            f"<h1>{re.escape(EXPERIMENTS[name].about)}</h1>", page, re.IGNORECASE
        )
        curves = record.tables[0].entries[0].curves
        assert len(curves[0]) == SMOKE.points if name == "t-methods" else not curves


def test_rotary_positions_leave_less_freedom(tables, outcome):
    freedom = {
        (entry.row, entry.column): values_of(entry, outcome.results)[0]
        for entry in tables["f-groups"][0].entries
    }
    inside = "of these inside attention"
    # 12 layers of 12 heads of size 64: two general linear groups, or one and 32 complex numbers
    assert freedom["BERT-base, absolute", inside] == 12 * 12 * 2 * 64 * 64
    assert (
        freedom["RoFormer-base, rotary", inside]
        == freedom["Llama, 12 heads, rotary", inside]
        == 12 * 12 * (64 * 64 + 64)
    )
    assert (
        freedom["DINOv3 ViT-base, rotary", inside]
        == freedom["RoFormer-base, rotary", inside]
        < freedom["ViT-base, absolute", inside]
    )
    assert freedom["Llama, 12 heads in 4 groups, rotary", inside] == 12 * 4 * (64 * 64 + 64)


def test_sizes_are_other_cells_and_data_is_no_part_of_them(tmp_path):
    cells = {
        size.name: set(with_needs(cells_of(EXPERIMENTS["t-methods"].tables(size))))
        for size in SIZES.values()
    }
    assert not cells["smoke"] & cells["small"] and not cells["small"] & cells["published"]
    elsewhere = set(
        with_needs(
            cells_of(EXPERIMENTS["t-methods"].tables(replace(SIZES["published"], data=tmp_path)))
        )
    )
    assert elsewhere == cells["published"]


def test_an_unknown_experiment_lists_those_there_are():
    said = run_verb("experiment", "t-nothing", expect=2)
    assert re.search(r"t-methods.*arXiv 2506.22712, Table 1", said.stdout) and all(
        name in said.stdout for name in EXPERIMENTS
    )


def columns(size):
    (table,) = EXPERIMENTS["t-methods"].tables(size)
    return list(dict.fromkeys(entry.column for entry in table.entries)), table.differs


def test_columns_are_there_with_their_data(tmp_path, monkeypatch):
    monkeypatch.delenv("SYMMERGE_DATA", raising=False)
    size, always = replace(SIZES["published"], data=tmp_path), ["cifar10", "shakespeare", "books"]
    found, differs = columns(size)
    assert (
        found == always
        and "Left out: cifar100" in differs
        and "put tiny-imagenet.npz (or the folder tiny-imagenet-200) into" in differs
    )
    (tmp_path / "cifar100.npz").touch()
    found, differs = columns(size)
    assert (
        found == ["cifar10", "cifar100", "shakespeare", "books"]
        and "cifar100" not in differs
        and "Left out: tiny-imagenet" in differs
    )
    (tmp_path / "tiny-imagenet-200").mkdir()
    found, differs = columns(size)
    assert (
        found == ["cifar10", "cifar100", "tiny-imagenet", "shakespeare", "books"]
        and "Left out" not in differs
    )
    (table,) = EXPERIMENTS["t-methods"].tables(size)
    assert {entry.published for entry in table.entries if entry.column == "tiny-imagenet"} == {
        2.84,
        1.86,
        0.47,
        0.29,
        0.0,
        None,
    }
    assert columns(replace(SIZES["small"], data=tmp_path))[0] == ["digits", "documentation"]
    (varied,) = EXPERIMENTS["t-samplers"].tables(size)
    assert {entry.column for entry in varied.entries} == {"cifar10", "shakespeare"}


def test_what_is_needed_follows_from_the_cells(tmp_path, monkeypatch):
    monkeypatch.delenv("SYMMERGE_DATA", raising=False)
    size, store = replace(SIZES["published"], data=tmp_path), Store(tmp_path / "out")
    for name, missing in (
        ("t-methods", "cifar10.npz"),
        ("v-tasks", "books_train.txt.xz"),
        ("f-retrain-images", "cifar10.npz"),
    ):
        with pytest.raises(
            DataError,
            match=rf"{name} at size published needs the data of [\w-]+: .*{missing} is missing",
        ):
            check_data(name, EXPERIMENTS[name].tables(size), size, store)
    for name in EXPERIMENTS:
        check_data(name, EXPERIMENTS[name].tables(SMOKE), SMOKE, store)
    check_data("f-groups", EXPERIMENTS["f-groups"].tables(size), size, store)
    (tmp_path / "cifar-10-batches-py").mkdir()
    check_data("f-retrain-images", EXPERIMENTS["f-retrain-images"].tables(size), size, store)


def test_one_folder_has_one_data_set(tmp_path):
    """Another file of the same name is refused, and so is another Python's documentation."""
    out, size = tmp_path / "out", replace(SIZES["published"], data=tmp_path)
    store, tables = Store(out), EXPERIMENTS["f-retrain-images"].tables(size)
    (tmp_path / "cifar10.npz").write_bytes(b"pictures")
    found = digests(tables, size, store)
    assert list(found) == ["cifar10.npz"]
    check_same_data(out, found)
    claim(out, "f-retrain-images", size, found)
    check_folder(out, "f-retrain-images", size, resume=True)
    check_same_data(out, digests(tables, size, store))
    claim(
        out, "f-retrain-images", size, {"more.txt": "0"}
    )  # another column's: what is known stays known
    (tmp_path / "cifar10.npz").write_bytes(b"others")
    with pytest.raises(
        MismatchError,
        match=r"was started with other data \(cifar10.npz changed since\): restore it",
    ):
        check_same_data(out, digests(tables, size, store))
    said = run_verb(
        "experiment",
        "f-retrain-images",
        "--size",
        "published",
        "--data-dir",
        tmp_path,
        "--out",
        out,
        "--resume",
        expect=2,
    )
    assert "cifar10.npz changed since" in said.stderr

    small = EXPERIMENTS["t-methods"].tables(SMOKE)
    (docs,) = digests(small, SMOKE, store).items()
    claim(out, "t-methods", SMOKE, {docs[0]: "another Python's"})
    with pytest.raises(MismatchError, match="Python's documentation changed since"):
        check_same_data(out, dict([docs]))


def test_words_about_a_recipe_are_no_part_of_a_cell(monkeypatch):
    def key():
        return components.model(SMOKE, "vit-digits", 0).key

    before, recipe = key(), training_recipe("vit-digits")
    monkeypatch.setattr(
        components,
        "training_recipe",
        lambda name: replace(recipe, about="other words", duration="a while"),
    )
    assert key() == before
    monkeypatch.setattr(
        components,
        "training_recipe",
        lambda name: replace(recipe, schedule=replace(recipe.schedule, lr=1.0)),
    )
    assert key() != before

"""Several models at once: places, barriers, files, and `barrier --together`."""

import csv
import json
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest
import torch
from fixtures import Counted, checkpoint, run

import symmerge as sm
from symmerge.aligning import comparison
from symmerge.errors import MismatchError
from symmerge.evaluation.results import SimplexFile
from symmerge.evaluation.simplices import (
    SimplexMethod,
    measure_methods,
    measure_simplex,
    simplex_places,
    write_simplex,
)
from symmerge.lab.small_models import small_model
from symmerge.matching.recipes import RECIPES
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.orbit import random_member
from symmerge.verification.modules import full_module

SMALL = {"points": 3, "steps": 2}
FAST = "weights-only"
UNIVERSE = UniverseFile(
    recipe="by hand",
    models=("c", "b", "a"),
    reference=0,
    spreads=(0.5,),
    moved=(),
    left_out={},
    interrupted=False,
    settings={},
    cycle_error=0.0,
)


def strangers(count=3, name="gpt2"):
    return [sm.load(small_model(name, seed=seed)) for seed in range(count)]


def self_generated(model, samples=6):
    """What the model writes itself: nobody is better there, so whatever lies elsewhere is worse."""
    return sm.make_task("clm", "self", [model], samples=samples)


def numbers(task, model):
    return task.evaluate(full_module(model, torch.float32))


def triangle(simplex):
    return simplex.to_record(SimplexMethod("none", "plain", ())).triangle.points


@pytest.fixture(scope="module")
def four():
    models = strangers(4)
    task = self_generated(models[0])
    return models, task, measure_simplex(models, task)


# every place is the model it says


def test_corners_are_the_models_themselves(four):
    models, task, found = four
    own = [numbers(task, model) for model in models]
    assert found.ends == own and len({end["loss"] for end in own}) == 4
    at = {point.weights: point.metrics for point in triangle(found)}
    assert [at[corner]["loss"] for corner in ((1, 0, 0), (0, 1, 0), (0, 0, 1))] == [
        end["loss"] for end in own[:3]
    ]
    apart = sum(
        (models[0].weights[name] - models[1].weights[name]).square().sum().item()
        for name in models[0].weights
    )
    assert found.corners[1] == (pytest.approx(apart**0.5, rel=1e-4), 0)


def test_lines_are_the_curves_of_their_pairs(four):
    models, task, found = four
    for a, b in combinations(range(4), 2):
        alone = sm.barrier(models[a], models[b], task, 5)
        assert [point["loss"] for point in found.line(a, b).points] == pytest.approx(
            [point["loss"] for point in alone.points], abs=1e-5
        )
        assert (
            found.barriers[a][b]
            == found.barriers[b][a]
            == pytest.approx(alone.barrier_mean, abs=1e-5)
        )
    assert [found.barriers[a][a] for a in range(4)] == [0] * 4
    assert (
        len({found.barriers[a][b] for a, b in combinations(range(4), 2)}) == 6
    )  # the control: every pair has its own


def test_means_are_the_merges_of_the_first(four):
    models, task, found = four
    for count in (2, 3, 4):
        assert found.mean(count) == pytest.approx(numbers(task, sm.mean(models[:count])), rel=1e-5)
        assert found.barrier(count) == pytest.approx(
            found.mean(count)["loss"]
            - fmean(numbers(task, model)["loss"] for model in models[:count]),
            abs=1e-5,
        )
        assert found.mean(count)["loss"] != pytest.approx(
            numbers(task, sm.mean(models[-count:]))["loss"] if count < 4 else 0, rel=1e-4
        )  # the control
    centre = next(point for point in triangle(found) if point.weights == pytest.approx([1 / 3] * 3))
    assert centre.metrics["loss"] == found.mean(3)["loss"]


# what must be flat is flat, and what must not is not


def test_copies_of_one_model_are_flat(four):
    models, task, _ = four
    found = measure_simplex([models[0]] * 3, task)
    own = numbers(task, models[0])["loss"]
    assert [point["loss"] for point in found.at.values()] == pytest.approx(
        [own] * len(found.at), abs=1e-5
    )
    assert max(map(max, found.barriers)) <= 1e-5 and abs(found.barrier(3)) <= 1e-5
    assert found.ensemble["loss"] == pytest.approx(own, abs=1e-5)


def test_planted_copies_are_terrible_as_they_are_and_flat_after_alignment():
    """Three members of one orbit are one function: only alignment is between them."""
    base = sm.load(small_model("gpt2"))
    models = [random_member(base, seed=seed)[1] for seed in range(3)]
    task = self_generated(base)
    found = sm.align_many(models, RECIPES[FAST])
    record = measure_methods(
        models,
        [
            SimplexMethod("none", "plain", models),
            SimplexMethod("weights", "aligned", found.models, found.to_file()),
        ],
        task,
        **SMALL,
    )
    plain, aligned = record.methods
    ends = [end["loss"] for method in (plain, aligned) for end in method.ends]
    assert ends == pytest.approx([numbers(task, base)["loss"]] * 6, abs=1e-4)
    assert min(plain.barriers[a][b] for a, b in combinations(range(3), 2)) > 0.2
    assert min(mean.barrier for mean in plain.means) > 0.2
    assert max(map(max, aligned.barriers)) <= 1e-4
    assert max(abs(mean.barrier) for mean in aligned.means) <= 1e-4
    assert aligned.universe.spreads[-1] <= 1e-4 and aligned.universe.cycle_error <= 1e-4
    assert plain.universe is None


# one pass, each place once


def test_the_data_are_read_once_and_no_place_twice(four):
    models, task, found = four
    batches, ticks = Counted(task.batches), []
    measure_simplex(models, replace(task, batches=batches), **SMALL, progress=ticks.append)
    every = simplex_places(4, **SMALL)
    assert batches.fetched == len(batches) and len(ticks) == len(batches) * len(every)
    assert len(set(every)) == len(every) and all(sum(place) == pytest.approx(1) for place in every)
    assert (
        len(found.at) == len(simplex_places(4)) == 91 + 1 + 3 * 3 + 1
    )  # the triangle holds its edges and its middle; the fourth, its lines, all four merged


# files


def test_what_the_files_hold(tmp_path):
    models = strangers()
    task = self_generated(models[0])
    methods = [
        SimplexMethod("none", "plain average", models),
        SimplexMethod("turned", "turned", models[::-1], UNIVERSE),
    ]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_simplex(measure_methods(models, methods, task, **SMALL), tmp_path / folder)
    assert all(
        (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
        for file in ("simplex.json", "simplex.csv")
    )
    found = json.loads((tmp_path / "one" / "simplex.json").read_text())
    assert (
        found["schema"] == "symmerge.simplex/1"
        and len(found["models"]) == 3
        and found["task"]["name"] == "clm"
        and "torch" in found["versions"]
    )
    plain, turned = found["methods"]
    assert set(plain) == {
        "name",
        "label",
        "ends",
        "lines",
        "barriers",
        "means",
        "triangle",
        "ensemble",
        "universe",
    }
    assert (
        SimplexFile.read(tmp_path / "one" / "simplex.json").methods[1].universe == UNIVERSE
        and turned["ends"] == plain["ends"][::-1] != plain["ends"]
    )
    rows = list(csv.DictReader((tmp_path / "one" / "simplex.csv").open()))
    assert len(rows) == 2 * (3 + 3 * 3 + 2 + 6 + 1)
    merged = next(
        row
        for row in rows
        if row["method"] == "none" and row["part"] == "mean" and row["share 2"] != "0.0"
    )
    assert float(merged["loss"]) == plain["means"][-1]["loss"] and float(merged["share 0"]) == 1 / 3
    alone = next(row for row in rows if row["method"] == "turned" and row["part"] == "end")
    assert (alone["share 0"], alone["share 1"], float(alone["loss"])) == (
        "1.0",
        "0.0",
        plain["ends"][2]["loss"],
    )


# bad input


def test_too_few_models_and_models_that_differ():
    models = strangers(2)
    task = self_generated(models[0], samples=2)
    with pytest.raises(MismatchError, match="2 models: a triangle has three corners"):
        measure_simplex(models, task)
    with pytest.raises(MismatchError, match="joined by a line"):
        measure_simplex([*models, sm.load(small_model("gpt2", n_inner=64))], task)
    with pytest.raises(MismatchError, match="points 1"):
        simplex_places(3, points=1)
    with pytest.raises(MismatchError, match="aligned brought 2 of 3 models together"):
        measure_methods(strangers(), [SimplexMethod("aligned", "aligned", models)], task)


# the verb


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("together")
    (root / "text.txt").write_text(
        "The loss between three models, and what alignment leaves of it. " * 60
    )
    for seed in range(3):
        checkpoint(root / f"seed-{seed}", "gpt2", seed=seed)
    return root


def barrier(folder, out, *more, models=3, expect=0):
    given = [folder / f"seed-{seed}" for seed in range(models)]
    return run(
        "barrier",
        *given,
        "--together",
        "--task",
        "clm",
        "--data",
        folder / "text.txt",
        "--samples",
        4,
        "--out",
        out,
        *more,
        expect=expect,
    )


@pytest.fixture(scope="module")
def measured(folder):
    said = barrier(folder, folder / "out", "--method", f"none,{FAST}").stdout
    return json.loads((folder / "out" / "simplex.json").read_text()), said.splitlines()


def test_the_verb_measures_what_the_library_does(folder, measured):
    record, _ = measured
    models = [sm.load(folder / f"seed-{seed}") for seed in range(3)]
    task = sm.make_task("clm", str(folder / "text.txt"), models, samples=4)
    aligned = sm.align_many(models, RECIPES[FAST])
    for method, wanted in zip(record["methods"], (models, aligned.models), strict=True):
        assert method["barriers"] == measure_simplex(wanted, task).barriers
    plain, found = record["methods"]
    assert [method["label"] for method in record["methods"]] == [
        "plain average",
        f"weight matching, {FAST}",
    ]
    assert (
        found["universe"]["spreads"] == list(aligned.universe.spreads)
        and found["universe"]["recipe"] == RECIPES[FAST].about
    )
    assert plain["barriers"] != found["barriers"]  # the control
    assert [model["where"].rpartition("/")[2] for model in record["models"]] == [
        "seed-0",
        "seed-1",
        "seed-2",
    ]
    assert all(len(between["points"]) == 5 for between in plain["lines"])


def test_what_is_printed_and_drawn(folder, measured):
    record, said = measured
    assert said[0].startswith("# Barriers: clm on ") and "5 points, 3 models together" in said[0]
    assert said[1].split("\t") == ["method", "mean barrier of a pair", "barrier of all 3 merged"]
    for line, method in zip(said[2:], record["methods"], strict=True):
        pairs = [method["barriers"][a][b] for a, b in combinations(range(3), 2)]
        assert line.split("\t") == [
            method["label"],
            f"{fmean(pairs):.3g}",
            f"{method['means'][-1]['barrier']:.3g}",
        ]
    names = {file.name for file in (folder / "out").glob("[!.]*")}
    figures = {
        f"{kind}-{name}.svg" for kind in ("triangle", "barriers") for name in ("none", FAST)
    } | {"together.svg"}
    assert names == {"simplex.json", "simplex.csv", *figures}
    assert all(
        "prefers-color-scheme: dark" in (folder / "out" / name).read_text() for name in figures
    )


def test_the_page_of_what_the_verb_wrote(folder, measured):
    record, _ = measured
    run("report", folder / "out", "--out", folder / "page.html")
    text = (folder / "page.html").read_text()
    assert (
        f"{record['methods'][1]['barriers'][0][1]:.2f}" in text
        and f"{record['methods'][0]['means'][-1]['loss']:#.4g}" in text
    )
    assert (
        all(f"s1-many-{kind}{at}-" in text for kind in ("triangle", "barriers") for at in (0, 1))
        and "s1-many-count-" in text
    )


def test_json_is_what_was_written(folder, measured, tmp_path):
    printed = barrier(folder, tmp_path / "out", "--method", "none", "--points", 3, "--json").stdout
    assert (
        json.loads(printed)
        == json.loads((tmp_path / "out" / "simplex.json").read_text())
        != measured[0]
    )
    assert len(json.loads(printed)["methods"][0]["lines"][0]["points"]) == 3


@pytest.mark.parametrize(
    ("models", "more", "told"),
    [
        (2, (), "--together needs three or more models, not 2"),
        (3, ("--method", "none,soft"), "soft only aligns pairs"),
        (3, ("--method", "soft-hardened"), "soft-hardened only aligns pairs"),
        (3, ("--points", 1), "points 1: a curve needs at least two"),
        (3, ("--method", "magic"), "no recipe called 'magic'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(
    folder, tmp_path, monkeypatch, models, more, told
):
    monkeypatch.setattr(comparison, "align_many", lambda *_, **__: pytest.fail("it began to work"))
    result = barrier(folder, tmp_path / "out", *more, models=models, expect=2)
    assert (
        told in result.stderr and result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
    )


@pytest.mark.parametrize(
    ("interrupted", "code", "told"),
    [(False, 2, "seed-2: gone wrong; measure without these"), (True, 130, "nothing was written")],
)
def test_who_cannot_be_brought_along_is_named(
    folder, tmp_path, monkeypatch, interrupted, code, told
):
    """Of fewer models the numbers would be others: nothing is compared that cannot be."""
    real = comparison.align_many

    def failing(models, *more, **options):
        found = real(models[:2], *more, **options)
        return replace(
            found,
            universe=replace(
                found.universe, left_out={2: "seed-2: gone wrong"}, interrupted=interrupted
            ),
        )

    monkeypatch.setattr(comparison, "align_many", failing)
    result = barrier(folder, tmp_path / "out", "--method", FAST, expect=code)
    assert told in " ".join(result.stderr.split()) and list(tmp_path.iterdir()) == []

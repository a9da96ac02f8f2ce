"""The demonstration, end to end with tiny models: what it writes, what it keeps, what it leaves."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from transformers import pipeline
from typer.testing import CliRunner

from symmerge.cli import app
from symmerge.cli import demo as verb
from symmerge.errors import CheckpointError
from symmerge.lab import demonstration as module
from symmerge.lab.demonstration import RECOMMENDED, demo
from symmerge.lab.training.recipes import DEMO, SKILLS
from symmerge.matching.recipes import RECIPES, with_options
from symmerge.merging.verdict_results import MergeVerdict

SIZES = {
    "vit-digits": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    "gpt2-docs": {"n_embd": 16, "n_head": 2, "n_inner": 24, "n_positions": 64},
}
TINY = {
    name: replace(
        recipe,
        config={**recipe.config, **SIZES[name]},
        schedule=replace(recipe.schedule, steps=3, batch_size=4, warmup=1),
    )
    for name, recipe in DEMO.items()
}
METHODS = {name: RECIPES[name] for name in ("permutations", "orthogonal")}
SMALL_SKILLS = {
    name: replace(
        recipe, config={**recipe.config, **SIZES["gpt2-docs"]}, schedule=TINY["gpt2-docs"].schedule
    )
    for name, recipe in SKILLS.items()
}
ONE = {"vit-digits": TINY["vit-digits"]}


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def out(tmp_path_factory, told):
    @contextmanager
    def bar(what, steps):
        ticks = []
        yield ticks.append
        told.append((what, steps, len(ticks)))

    place = tmp_path_factory.mktemp("demo") / "out"
    options = {"recipes": TINY, "methods": METHODS, "skills": SMALL_SKILLS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GENERALIST", "fast")
        return place, demo(place, **options, points=3, bar=bar)


def test_the_table_has_every_method_for_every_pair(out):
    _, outcome = out
    assert [row["models"] for row in outcome.rows] == [
        name for name in DEMO for _ in ("none", *METHODS)
    ]
    assert [row["method"].removesuffix(" (best)") for row in outcome.rows] == [
        "plain average",
        *METHODS,
    ] * len(DEMO)
    assert len({tuple(row) for row in outcome.rows}) == 1, "one table has one set of columns"
    for name in DEMO:
        mine = [row for row in outcome.rows if row["models"] == name]
        best = [row for row in mine if row["method"].endswith("(best)")]
        assert len(best) == 1 and best[0]["barrier"] == min(row["barrier"] for row in mine[1:])


def test_the_bars_reach_their_ends(out, told):
    assert len(told) == 4 * len(DEMO) + 2 and all(steps == ticks for _, steps, ticks in told), told


def test_page_and_results_are_there(out):
    place, outcome = out
    page = outcome.page.read_text("utf-8")
    assert all(name in page for name in DEMO) and outcome.page == place / "page.html"
    for name in DEMO:
        assert {"curve.json", "curve.csv", "curve.svg", "structure.json", "averaged", "merged"} <= {
            item.name for item in (place / name).glob("[!.]*")
        }
        record = json.loads((place / name / "curve.json").read_text())
        assert [method["name"] for method in record["methods"]] == ["none", *METHODS] and len(
            record["methods"][0]["points"]
        ) == 3


def test_merged_checkpoints_run_in_a_stock_pipeline(out):
    place, outcome = out
    assert [*outcome.merged] == [
        *(place / name / "merged" for name in DEMO),
        place / "skills",
    ]
    text = pipeline("text-generation", model=str(place / "gpt2-docs/merged"))(
        "The for statement", max_new_tokens=4, do_sample=False
    )
    assert text[0]["generated_text"].startswith("The for statement")


def test_the_verb(out, tmp_path, monkeypatch):
    """On models that exist, so nothing is trained: the same table, as JSON and as text."""
    place, outcome = out
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("it trained again"))
    monkeypatch.setattr(
        verb, "run_demo", partial(demo, recipes=ONE, skills={}, methods=METHODS, points=3)
    )
    assert json.loads(
        CliRunner().invoke(app, ["demo", "--out", str(place), "--json"]).stdout
    ) == list(outcome.rows[: 1 + len(METHODS)])
    (tmp_path / "file").write_text("mine")
    refused = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file")])
    assert (
        refused.exit_code == 2
        and refused.stderr.startswith("error: cannot write to ")
        and refused.stderr.count("\n") == 1
    )
    monkeypatch.setattr(verb, "run_demo", lambda *_, **__: outcome)
    said = CliRunner().invoke(app, ["demo", "--out", str(place)]).stdout.splitlines()
    assert said[1].split("\t") == list(outcome.rows[0])
    assert f"page: {place / 'page.html'}" in said
    for folder, verdict in outcome.merged.items():
        assert f"merged into a stock checkpoint: {folder}" in said and verdict.sentences[0] in said


def test_the_verdict_is_that_of_the_saved_model(out):
    place, outcome = out
    assert RECOMMENDED[0] == "learned"  # not among these methods, so the first is taken
    for name in DEMO:
        verdict = MergeVerdict.read(place / name / "merged" / "verdict.json")
        assert verdict == outcome.merged[place / name / "merged"]
        rows = {row["method"].split()[0]: row for row in outcome.rows if row["models"] == name}
        assert verdict.of("merge")[0].loss == rows["permutations"]["merged loss"]
        assert verdict.of("merge")[0].loss != rows["orthogonal"]["merged loss"]
        assert verdict.of("average")[0].loss == rows["plain"]["merged loss"]


def test_the_merge_of_skills_is_measured_on_each(out):
    place, outcome = out
    verdict = MergeVerdict.read(place / "skills" / "verdict.json")
    assert verdict == outcome.merged[place / "skills"]
    assert [skill.name for skill in verdict.skills] == ["python-docs", "python-code"]
    assert [row.name for row in verdict.of("parent")] == [
        "A: gpt2-docs-seed-0",
        "B: gpt2-code-seed-1",
    ]
    assert "gpt2-code-seed-1" in outcome.page.read_text("utf-8")


def test_other_seeds_are_other_models(out, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("it trained again"))
    with pytest.raises(pytest.fail.Exception, match="it trained again"):
        demo(out[0], 1, recipes=ONE, skills={}, methods=METHODS, points=3)


def test_what_is_not_ours_stays(out, tmp_path):
    (tmp_path / "vit-digits").mkdir()
    (tmp_path / "vit-digits/mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists: choose another --out"):
        demo(tmp_path, recipes=ONE, skills={}, methods=METHODS, points=3)
    assert (tmp_path / "vit-digits/mine.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="choose another --out"):
        demo(tmp_path / "file", recipes=ONE, skills={}, methods=METHODS, points=3)


def test_an_interrupt_keeps_whole_models_only(tmp_path, monkeypatch):
    def interrupt(a, b, methods, task, **_):
        assert [method.name for method in methods] == ["none", *module.METHODS], (
            "by default, every method"
        )
        raise KeyboardInterrupt

    quick = with_options(RECIPES["learned"], steps=2, start="identity")
    monkeypatch.setitem(module.METHODS, "learned", quick)
    monkeypatch.setattr(module, "measure_lines", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path, recipes=ONE, skills={})
    assert [item.name for item in tmp_path.iterdir()] == ["models"]
    assert sorted(item.name for item in (tmp_path / "models").iterdir()) == [
        "vit-digits-seed-0",
        "vit-digits-seed-1",
    ]

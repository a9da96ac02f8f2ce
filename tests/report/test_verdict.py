"""The verdict of a page: true whatever the results are."""

import json

import pytest
from report_data import (
    SOLUTION,
    Outline,
    curve,
    method,
    said,
    stored_verdict,
    together,
    write,
)

from symmerge.errors import SymmergeError
from symmerge.report.results import read_results
from symmerge.report.verdict import headline


def verdict_of(tmp_path, **files):
    return headline(read_results(write(tmp_path / "results", **files))[0])


@pytest.mark.parametrize(
    ("plain", "aligned", "level", "repaired"),
    [
        (2.0, 0.0, "good", 1.0),
        (2.0, 0.02, "good", 0.99),
        (2.0, 0.3, "usable", 0.85),
        (2.0, 1.0, "poor", 0.5),
        (2.0, -0.5, "good", 1.25),
        (2.0, 3.0, "poor", None),  # alignment does harm: averaging is the best merge
        (0.0, 0.5, "good", None),  # averaging does no damage
    ],
)
def test_level_and_share_follow_the_losses(tmp_path, plain, aligned, level, repaired):
    verdict = verdict_of(tmp_path, curve=curve(plain=plain, aligned=aligned))
    assert verdict.level == level
    shares = [figure.value for figure in verdict.figures if "%" in figure.value]
    assert shares == ([] if repaired is None else [f"{min(repaired, 1):.0%}".replace("%", " %")])
    harm = plain < aligned
    assert any("does not help" in sentence for sentence in verdict.sentences) == harm


@pytest.mark.parametrize(
    ("aligned", "said_of_it"),
    [(-0.5, "better than both"), (0.0, "is as good as"), (0.04, "almost"), (1.0, "much worse")],
)
def test_the_merge_is_compared_with_its_parents(tmp_path, aligned, said_of_it):
    assert said_of_it in verdict_of(tmp_path, curve=curve(aligned=aligned)).title


def test_the_key_figures_are_those_of_the_midpoint(tmp_path):
    figures = {figure.role: figure for figure in verdict_of(tmp_path, curve=curve()).figures[1:]}
    values = {role: figure.value for role, figure in figures.items()}
    assert values == {"best": "2.10", "parent": "1.55", "plain": "4.22", "ensemble": "1.43"}
    assert figures["best"].label == "best merge: weight matching"
    assert figures["best"].note == "loss · perplexity 8.17"
    without = verdict_of(tmp_path, curve=curve(ensemble=None)).figures
    assert "ensemble" not in {figure.role for figure in without}


def test_names_of_the_models_are_in_the_sentences(tmp_path):
    (first, *_) = verdict_of(tmp_path, curve=curve()).sentences
    assert "seed-0 and seed-1" in first
    pairs = {"schema": "symmerge.curves/1", "pairs": [curve(), curve()], "summary": {}}
    (first, *_) = verdict_of(tmp_path, curve=pairs).sentences
    assert "over 2 pairs" in first and "seed-0" not in first
    (first, *_) = verdict_of(tmp_path / "other", simplex=together(count=3)).sentences
    assert "seed-0, seed-1 and seed-2" in first


def test_one_method_and_overflows(tmp_path):
    record = curve()
    alone = {**record, "methods": record["methods"][1:]}
    verdict = verdict_of(tmp_path, curve=alone)
    assert "after weight matching" in verdict.sentences[0] and "%" not in verdict.figures[0].value
    for line in record["methods"]:
        line["points"][10]["loss"] = None
    verdict = verdict_of(tmp_path, curve=record)
    assert "overflows" in verdict.title and verdict.level == "poor"
    ends = [{**line, "points": line["points"][:: len(line["points"]) - 1]} for line in
            (method("none", "plain average", 1.0), method("w", "weights", 0.1))]  # fmt: skip
    assert "nothing between" in verdict_of(tmp_path, curve=curve(methods=ends)).title


def test_a_stored_verdict_comes_first(tmp_path, page):
    verdict = verdict_of(tmp_path, verdict=stored_verdict(), solution=SOLUTION)
    assert verdict.level == "poor" and verdict.title == "The merge has a loss of 2.1."
    assert [figure.value for figure in verdict.figures] == ["79 %", "1.50", "1.60", "4.22", "2.10"]
    text = page(verdict=stored_verdict())
    for shown in ("symmerge merge a b --effort best", "A: seed-0", "The merge has a loss of 2.1."):
        assert shown in said(text), shown
    tags = Outline(text).tags
    assert tags.index("svg") < tags.index("table")
    better = stored_verdict(verdict="better"), stored_verdict(verdict="unknown", sentences=[])
    levels = [verdict_of(tmp_path, verdict=one).level for one in better]
    assert levels == ["better", ""]


def test_a_stored_line_is_drawn(page):
    """Both lines, with the names of the parents; dots where there is no line, or one point."""
    line = [{"t": t, "loss": 1.5 + t * (1 - t)} for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    drawn = page(verdict=stored_verdict(aligned_line=line, plain_line=line))
    assert "verdict-line-best" in drawn and "verdict-line-plain" in drawn
    assert "1.75 at the midpoint" in drawn and ">A: seed-0</text>" in drawn
    for one in (stored_verdict(), stored_verdict(aligned_line=line[:1])):
        dots = page(verdict=one)
        assert "verdict-line-best" not in dots and "<svg" in dots


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"rows": [{"name": "x", "kind": "colour", "metrics": {"loss": 1.0}}]}, "of kind 'colour'"),
        ({"rows": [{"name": "x", "kind": "merge", "metrics": {}}]}, "without a loss"),
        ({"schema": "symmerge.verdict/9"}, "symmerge.verdict/1"),
        ({"next": None}, "next"),
        ({"rows": []}, "no parents"),
        ({"aligned_line": [{"t": 0.5}]}, "without a loss"),
    ],
)
def test_a_bad_verdict_is_one_line(tmp_path, change, remedy):
    folder = write(tmp_path / "results", verdict=stored_verdict(**change))
    with pytest.raises(SymmergeError) as caught:
        read_results(folder)
    assert remedy in str(caught.value) and "\n" not in str(caught.value)
    write(folder, verdict=stored_verdict())  # the control
    assert read_results(folder)[0].verdict.to_json() == json.loads(json.dumps(stored_verdict()))

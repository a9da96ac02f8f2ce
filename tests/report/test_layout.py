"""What comes first on a page, what is folded, and what is left out."""

import re

import pytest
from report_data import (
    AMOUNT,
    CORRELATIONS,
    SOLUTION,
    STRUCTURE,
    Outline,
    curve,
    experiment,
    said,
    stored_verdict,
    together,
    write,
)

from symmerge.report import glossary, report

EVIDENCE = {"solution": SOLUTION, "structure": STRUCTURE, "correlations": CORRELATIONS}
PAGES = {
    "curve": {"curve": curve(), **EVIDENCE},
    "simplex": {"simplex": together()},
    "experiment": {"results": experiment()},
    "alignment": EVIDENCE,
    "stored verdict": {"verdict": stored_verdict(), **EVIDENCE},
}


@pytest.mark.parametrize("kind", PAGES)
def test_verdict_then_picture_then_table_then_folds(page, kind):
    text = page(**PAGES[kind]).partition("<main")[2]
    places = [text.index(mark) for mark in ('class="verdict"', "<svg", "<table", "<details")]
    assert places == sorted(places)


def test_several_experiments_begin_with_the_same(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / "all" / name, **PAGES["curve"])
    text = report(tmp_path / "all", tmp_path / "page.html").read_text("utf-8")
    tags = Outline(text).tags
    assert tags.index("svg") < tags.index("table")
    for section in text.split('class="experiment"')[1:]:
        places = [section.index(mark) for mark in ('class="verdict"', "<svg", "<table", "<details")]
        assert places == sorted(places)


@pytest.mark.parametrize("kind", PAGES)
def test_folds_are_closed_and_hold_all_but_one_table(page, kind):
    text = page(**PAGES[kind])
    assert "<details" in text and not re.search(r"<details[^>]*\bopen\b", text)
    depth, open_tables = 0, 0
    for tag in re.findall(r"</?(?:details|table)\b", text):
        depth += {"<details": 1, "</details": -1}.get(tag, 0)
        open_tables += tag == "<table" and depth == 0
    assert open_tables <= 1


def test_one_point_is_no_plot(page):
    """A search of one sweep, a single layer, one amount of data: numbers, but no picture."""
    short = {**SOLUTION, "objective": [3.0]}
    layer = {**CORRELATIONS, "layers": CORRELATIONS["layers"][:1], "matrix": None}
    amount = {**AMOUNT, "methods": [AMOUNT["methods"][0], {**AMOUNT["methods"][1]}]}
    amount["methods"][1]["points"] = amount["methods"][1]["points"][:1]
    tiny = {"space": "one", "group": "Scale", "size": 1, "kind": "rotation", "matrix": [[1.0]]}
    few = {**STRUCTURE, "spaces": [tiny]}
    pictures = {"solution": "objective0-", "correlations": "-layers-", "amount": "-amount-"}
    pictures |= {"structure": "-space0-"}
    full = page(curve=curve(), amount=AMOUNT, **EVIDENCE)
    bare = page(curve=curve(), amount=amount, solution=short, correlations=layer, structure=few)
    for name, picture in pictures.items():
        assert picture in full and picture not in bare, name
    assert "What is left of the objective" in bare and "Mean correlation of matched" in bare


def test_alignments_are_shown_with_the_names_of_the_models(tmp_path, page):
    text = said(page(curve=curve(), **EVIDENCE))
    assert "coordinate of seed-1 goes, to fit those of seed-0" in text
    assert "feature of seed-0" in text and "feature of seed-1" in text
    folder = write(tmp_path / "aligned-pair", **EVIDENCE)
    nameless = said(report(folder, tmp_path / "a.html").read_text("utf-8"))
    assert "coordinate of model B" in nameless  # the control: nothing says where they came from
    for part, source in (("reference", "zoo/first"), ("aligned", "hub/second")):
        write(folder / part, symmerge=provenance(source))
    named = said(report(folder, tmp_path / "b.html").read_text("utf-8"))
    assert "coordinate of second goes, to fit those of first" in named
    assert "weights of first and second from 1.410" in named


def provenance(source):
    empty = {"architecture": "X", "family": "x", "stock": True, "steps": [], "versions": {}}
    hashes = {"source_sha256": "0", "spec_sha256": "0"}
    named = {"schema": "symmerge.provenance/1", "source": source, "verified": None}
    return {**named, **empty, **hashes}


def test_words_are_explained_where_they_are_used(page):
    text = page(curve=curve())
    verdict = text.partition('class="verdict"')[2].partition("<svg")[0]
    for word in ("damage", "ensemble", "alignment", "plain average", "parents"):
        assert f'popovertarget="{glossary.word_id(word)}"' in verdict, word
    used = set(re.findall(r'popovertarget="([\w-]+)"', text))
    assert {"word-barrier", "word-midpoint"} <= used <= set(Outline(text).ids)
    assert "popovertarget" not in glossary.explained("nothing that needs it")


def test_words_are_explained_once_and_user_text_stays_text():
    marked = glossary.explained("<b>barrier</b> and barriers & a barrier-free ensemble")
    assert marked.count("<button") == 2 and "<b>" not in marked and "&amp;" in marked

"""The page: what it says of result files made by hand, and how it says it."""

import math
import re
import subprocess
import sys

import pytest
from report_data import (
    AMOUNT,
    CORRELATIONS,
    NASTY,
    SOLUTION,
    STRUCTURE,
    Outline,
    curve,
    said,
    stored_verdict,
    summary_of,
    together,
    write,
)

from symmerge.errors import SymmergeError
from symmerge.report import report
from symmerge.report.phrases import estimate_text


def test_the_page_says_it_in_words_and_numbers(page):
    text = page(curve=curve())
    for shown in (
        "4.220",
        "1.432",
        "python-docs",
        "1,234,567",
        "a" * 64,
        "b" * 64,
        "torch 2.x",
        "max_sweeps",
        "Over the mean",
        "Over the line",
    ):
        assert shown in text, shown


def test_what_was_not_measured_is_not_on_the_page(page):
    parts = {
        "structure": ("Structure of the alignment", STRUCTURE),
        "correlations": ("Feature correlation", CORRELATIONS),
        "solution": ("The search", SOLUTION),
        "amount": ("Amount of data", AMOUNT),
    }
    bare = page(curve=curve())
    assert not any(title in bare for title, _ in parts.values())
    for name, (title, content) in parts.items():
        assert title in page(curve=curve(), **{name: content})
    searched = page(curve=curve(), solution=SOLUTION)
    weights = "weights of seed-0 and seed-1 were 1.410 apart before alignment and 0.9300"
    assert weights in said(searched)
    assert "ensemble of both" in bare and "ensemble of both" not in page(curve=curve(ensemble=None))


def test_several_pairs_have_means_errors_and_a_band(page):
    pairs = [curve(plain=height) for height in (1.0, 2.0, 3.0)]
    text = page(curve={"schema": "symmerge.curves/1", "pairs": pairs, "summary": {}})
    assert "on average over 3 pairs" in text and "s1-loss-band-none" in text
    means = summary_of({"schema": "symmerge.curves/1", "pairs": pairs, "summary": {}}).methods[0]
    assert means.barrier_mean.mean == pytest.approx(
        2.0
    ) and means.barrier_mean.error == pytest.approx(1 / math.sqrt(3))
    assert estimate_text(means.barrier_mean) == "2.00 ± 0.58"
    assert "band" not in page(curve=curve())


def test_a_folder_of_experiments_has_a_section_for_each(tmp_path):
    write(tmp_path / "demo" / "images", curve=curve(plain=1.0))
    write(tmp_path / "demo" / "texts", curve=curve(plain=3.0), structure=STRUCTURE)
    write(tmp_path / "demo" / "triples", simplex=together(count=3))
    text = report(tmp_path / "demo", tmp_path / "page.html").read_text("utf-8")
    table = text.partition("Barriers of every experiment")[2].partition("</tbody>")[0]
    assert re.findall(r">([^<>]+)</t[hd]>", table)[-4:] == [
        "triples",
        "weight matching",
        "0.2500",
        "0.1250",
    ]
    assert text.count('class="experiment"') == 3 and "Barriers of every experiment" in text
    assert (
        "<h1>Averaging models, before" in text
        and "images: Causal" in text
        and "raises the loss from 1.55 to 2.55" in text
        and "raises the loss from 1.55 to 4.55" in text
    )


def test_an_alignment_has_a_page_before_anything_is_measured(tmp_path, page):
    """The pictures, the objective and the settings; nothing about losses, which the control has."""
    alone, both = (
        page(solution=SOLUTION, structure=STRUCTURE),
        page(curve=curve(), solution=SOLUTION, structure=STRUCTURE),
    )
    for shown in (
        "from 1.410 to 0.9300 apart",
        "s1-space0-",
        "s1-space1-",
        "alignment: objective per sweep.",
        "<dt>seed</dt><dd>0</dd>",
    ):
        assert shown in alone, shown
    assert [
        words
        for words in ("What a barrier is", 'type="range"', 'data-curve="', "How it was measured")
        if words in alone
    ] == []
    assert "What a barrier is" in both and 'type="range"' in both and 'data-curve="' in both
    outline = Outline(alone)
    assert all(
        after <= before + 1
        for before, after in zip(outline.headings, outline.headings[1:], strict=False)
    ) and outline.references <= set(outline.ids)
    for name in ("one", "two"):
        write(tmp_path / "several" / name, solution=SOLUTION)
    text = report(tmp_path / "several", tmp_path / "page.html").read_text("utf-8")
    assert (
        text.count('class="experiment"') == 2
        and "one: Alignment" in text
        and "Barriers of every experiment" not in text
    )
    write(tmp_path / "several" / "two", curve=curve())
    assert "Barriers of every experiment" in report(
        tmp_path / "several", tmp_path / "page.html"
    ).read_text("utf-8")


def test_user_text_is_escaped_everywhere(page):
    record = curve(
        task={
            "name": NASTY,
            "data": NASTY,
            "samples": 1,
            "metrics": ["loss", "perplexity"],
            "seed": 0,
        }
    )
    record["models"]["a"]["where"] = NASTY
    verdict = stored_verdict(sentences=[NASTY], next=[NASTY])
    verdict["rows"][0]["name"] = NASTY
    record["methods"][1] |= {
        "label": NASTY,
        "name": NASTY,
        "settings": {NASTY: NASTY},
        "objective": [2.0, 1.0],
    }
    spaces = {**STRUCTURE, "spaces": [{**space, "space": NASTY} for space in STRUCTURE["spaces"]]}
    text = page(
        curve=record,
        structure=spaces,
        solution=SOLUTION,
        verdict=verdict,
        correlations={**CORRELATIONS, "layers": [{**CORRELATIONS["layers"][0], "space": NASTY}]},
    )
    assert "&lt;script&gt;alert" in text and "<script>alert" not in text and "<img" not in text
    assert text.count("</script>") == 2


def test_the_page_needs_nothing_else(page):
    text = page(curve=curve(), structure=STRUCTURE, correlations=CORRELATIONS, solution=SOLUTION)
    addresses = set(re.findall(r"https?://[^\"'\s<]+", text))
    assert addresses == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }  # names of XML dialects, never fetched
    assert not re.search(r"<link|@import|\ssrc=", text) and "default-src 'none'" in text


def test_a_screen_reader_finds_its_way(page):
    text = page(curve=curve(), structure=STRUCTURE, correlations=CORRELATIONS, solution=SOLUTION)
    outline = Outline(text)
    assert outline.headings[0] == 1 and outline.headings.count(1) == 1
    assert all(
        after <= before + 1
        for before, after in zip(outline.headings, outline.headings[1:], strict=False)
    )
    assert len(outline.ids) == len(set(outline.ids)), "ids are unique, also those of the figures"
    assert outline.references <= set(outline.ids)
    assert {"header", "main", "footer"} <= set(outline.tags) and 'lang="en"' in text
    assert outline.tags.count("caption") == outline.tags.count("table") and outline.tags.count(
        "figcaption"
    ) == outline.tags.count("figure")
    assert (
        outline.tags.count("svg") == outline.tags.count("desc") == outline.tags.count("title") - 1
    )


def test_the_same_results_give_the_same_bytes(tmp_path):
    write(
        tmp_path / "results",
        curve=curve(),
        structure=STRUCTURE,
        correlations=CORRELATIONS,
        solution=SOLUTION,
    )
    call = "import sys; from pathlib import Path; from symmerge.report import report; "
    call += "report(Path(sys.argv[1]), Path(sys.argv[2]))"
    pages = [report(tmp_path / "results", tmp_path / "here.html"), tmp_path / "there.html"]
    subprocess.run([sys.executable, "-c", call, tmp_path / "results", pages[1]], check=True)
    assert pages[0].read_bytes() == pages[1].read_bytes()
    write(tmp_path / "results", curve=curve(plain=2.6))
    assert (
        report(tmp_path / "results", tmp_path / "other.html").read_bytes() != pages[0].read_bytes()
    )


def test_a_loss_that_overflowed_is_a_gap_not_an_error(page):
    record = curve()
    record["methods"][0]["points"][10] |= {"loss": None, "perplexity": None}
    record["methods"][0]["barrier_mean"] = None
    text = page(curve=record)
    assert (
        "overflow" in text
        and "NaN" not in text.partition('id="numbers">')[2].partition("</script>")[0]
    )


def test_infinite_numbers_can_be_drawn(page):
    """Files hold null for them: JSON has no other."""
    record = curve(ensemble={"loss": None, "perplexity": None})
    for point in record["methods"][0]["points"]:
        point["perplexity"] = None
    record["methods"][0]["points"][0]["loss"] = None
    assert "<svg" in page(curve=record)
    record["methods"][0]["points"][0]["loss"] = math.inf
    with pytest.raises(SymmergeError, match="should be a number"):
        page(curve=record)


HEAVY = ("matplotlib", "jinja2", "typer", "rich", "sklearn", "transformers", "PIL")


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import symmerge", set()),
        ("from symmerge.models import structure", set()),
        ("import symmerge.cli", {"typer"}),
        ("from symmerge.report import curve_svg", {"matplotlib", "jinja2", "PIL"}),  # the control
    ],
)
def test_nobody_waits_for_libraries_that_are_not_needed(code, loaded):
    call = f"import sys; {code}; print(*(name for name in {HEAVY} if name in sys.modules))"
    assert (
        set(
            subprocess.run(
                [sys.executable, "-c", call], check=True, capture_output=True, text=True
            ).stdout.split()
        )
        == loaded
    )

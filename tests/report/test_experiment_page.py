"""The page of an experiment: our numbers beside the published ones."""

import re

from report_data import (
    experiment,
    write,
)

from symmerge.report import report


def test_an_experiment_beside_what_is_published(tmp_path):
    text = report(
        write(tmp_path / "results", results=experiment()), tmp_path / "page.html"
    ).read_text("utf-8")
    for said in (
        "Smaller models.",
        "1 of 2 numbers lie at or below the published ones",
        "it fell over",
        "2.00 ± 0.50",
        "-0.2500",
        "0.06250",
        "1 of 2",
    ):
        assert said in text, said
    assert (
        text.count("<figure") == 1
        and "vanilla: 1.500 at the first model, 3.50 ± 0.50 at the midpoint" in text
    )
    assert (
        "learned: 1.000 at the first model" in text and "the same again: " not in text
    )  # one line for the same cells
    midpoints = experiment()
    for entry in midpoints["tables"][0]["entries"]:
        entry["curves"] = [line[1:2] for line in entry["curves"]]
    alone = report(write(tmp_path / "alone", results=midpoints), tmp_path / "alone.html")
    assert "<figure" not in alone.read_text("utf-8"), "one point is no curve"
    without = report(
        write(tmp_path / "fine", results=experiment(failed=[])), tmp_path / "fine.html"
    ).read_text("utf-8")
    assert "What failed" in text and "What failed" not in without


def test_many_lines_are_drawn_in_panels(tmp_path):
    """Rows called "subject, method" have a panel per subject; other rows share one drawing."""
    one = experiment()["tables"][0]["entries"][0]
    names = {
        "grid": [
            f"{what}, {method}"
            for what in ("(i)", "(ii)", "(iii)")
            for method in ("naive", "ours", "ours, learned")
        ],
        "list": ["plain", "ours", "ours, learned"],
    }
    drawn = {}
    for kind, rows in names.items():
        entries = [{**one, "row": row, "cells": [f"{row} a", f"{row} b"]} for row in rows]
        table = {**experiment()["tables"][0], "entries": entries}
        text = report(
            write(tmp_path / kind, results=experiment(tables=[table], failed=[])),
            tmp_path / f"{kind}.html",
        ).read_text("utf-8")
        svg = text[text.index("<svg") : text.index("</svg>")]
        drawn[kind] = {
            "panels": len(re.findall(r'<g id="[^"]*axes_\d+"', svg)),
            "learned": len(re.findall(r">ours, learned</text>", svg)),
            "bands": svg.count("band-"),
        }
    assert drawn == {
        "grid": {"panels": 3, "learned": 1, "bands": 9},
        "list": {"panels": 1, "learned": 1, "bands": 3},
    }

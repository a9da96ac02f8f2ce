"""Result files by hand, and what a page or a drawing says."""

import html
import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

from symmerge.evaluation.results import CurveFile, CurvesFile, PlanePoint
from symmerge.report.results import summarize

T = [at / 20 for at in range(21)]


NASTY = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & $\\frac{"


def method(name, label, height, **more):
    points = [{"t": t, "loss": 1.5 + 0.1 * t + height * 4 * t * (1 - t)} for t in T]
    points = [{**point, "perplexity": math.exp(point["loss"])} for point in points]
    ends = (points[0]["loss"], points[-1]["loss"])
    mean = max(point["loss"] for point in points) - sum(ends) / 2
    linear = max(
        point["loss"] - (1 - point["t"]) * ends[0] - point["t"] * ends[1] for point in points
    )
    return {
        "name": name,
        "label": label,
        "points": points,
        "barrier_mean": mean,
        "barrier_linear": linear,
        "settings": {},
        **more,
    }


def curve(plain=2.67, aligned=0.55, **changes):
    """Two models, two methods; the barriers are what was asked for, up to how the path leans."""
    model = {"architecture": "SomeModel", "parameters": 1234567}
    return {
        "schema": "symmerge.curve/1",
        "task": {
            "name": "clm",
            "data": "python-docs",
            "samples": 64,
            "metrics": ["loss", "perplexity"],
            "seed": 7,
        },
        "models": {
            "a": {**model, "where": "seed-0", "sha256": "a" * 64},
            "b": {**model, "where": "seed-1", "sha256": "b" * 64},
        },
        "methods": [
            method("none", "plain average", plain),
            method("weights", "weight matching", aligned, settings={"max_sweeps": 50}),
        ],
        "ensemble": {"loss": 1.4321, "perplexity": math.exp(1.4321)},
        "versions": {"symmerge": "0.1.0", "torch": "2.x"},
        **changes,
    }


SOLUTION = {
    "schema": "symmerge.solution/1",
    "recipe": "by hand",
    "already_aligned": False,
    "changes": [2, 1, 0],
    "trials": [],
    "interrupted": False,
    "distance": None,
    "distance_before": 1.41,
    "distance_after": 0.93,
    "objective": [3.0, 2.0, 1.5],
    "by_space": {"residual": 0.9, "ff.0": 0.6},
    "converged": True,
    "seconds": 2.5,
    "settings": {"seed": 0},
}


STRUCTURE = {
    "schema": "symmerge.structure/1",
    "spaces": [
        {
            "space": "residual",
            "group": "Orthogonal",
            "size": 3,
            "kind": "rotation",
            "matrix": [[1, 0, 0], [0, 0.6, 0.8], [0, 0.8, 0.6]],
        },
        {
            "space": "ff.0",
            "group": "Permutation",
            "size": 4,
            "kind": "permutation",
            "index": [2, 0, 1, 3],
        },
    ],
}


CORRELATIONS = {
    "schema": "symmerge.correlations/1",
    "layers": [
        {"layer": layer, "space": "ff", "before": 0.125, "after": 0.75} for layer in range(3)
    ],
    "matrix": {
        "space": "heads.0",
        "values": [[0.9, 0.1, 0, 0], [0.1, 0.8, 0, 0], [0, 0, -0.7, 0], [0, 0, 0, None]],
        "borders": [2],
    },
}


AMOUNT = {
    "schema": "symmerge.amount/1",
    "unit": "tokens",
    "methods": [
        {
            "name": "none",
            "label": "plain average",
            "points": [{"samples": 0, "barriers": [3.0, 4.0]}],
        },
        {
            "name": "ours",
            "label": "activations",
            "points": [
                {"samples": 100, "barriers": [2.0, 3.0]},
                {"samples": 10000, "barriers": [1.0, 1.5]},
            ],
        },
    ],
}


PLANE = [
    PlanePoint((a / 4, b / 4, 1 - (a + b) / 4), {"loss": 1.0 + a * b})
    for a in range(5)
    for b in range(5 - a)
]


def summary_of(record):
    kind = CurvesFile if record["schema"] == CurvesFile.SCHEMA else CurveFile
    return summarize(kind.from_json(record))


def together(plain=2.5, aligned=0.25, count=4, **changes):
    """Barriers of pairs rise with their distance in the list, those of means with the count."""

    def one(name, label, height, universe):
        matrix = [[height * abs(a - b) for b in range(count)] for a in range(count)]
        points = [
            {
                "weights": [a / 4, b / 4, 1 - (a + b) / 4],
                "loss": 1.5 + height * a * b / 4,
                "perplexity": 5.0,
            }
            for a in range(5)
            for b in range(5 - a)
        ]
        return {
            "name": name,
            "label": label,
            "ends": [{"loss": 1.5 + number / 100, "perplexity": 4.5} for number in range(count)],
            "lines": [
                {
                    "a": 0,
                    "b": 1,
                    "points": [{"t": t, "loss": 1.5, "perplexity": 4.5} for t in (0.0, 0.5, 1.0)],
                    "barrier_mean": height,
                    "barrier_linear": height / 2,
                }
            ],
            "barriers": matrix,
            "means": [
                {
                    "count": merged,
                    "loss": 1.5 + height * merged,
                    "perplexity": 9.0,
                    "barrier": height * merged,
                }
                for merged in range(2, count + 1)
            ],
            "triangle": {"corners": [[0.0, 0.0], [3.0, 0.0], [1.0, 2.0]], "points": points},
            "ensemble": {"loss": 1.4321, "perplexity": 4.2},
            "universe": universe,
        }

    universe = {
        "schema": "symmerge.universe/1",
        "recipe": "by hand",
        "models": [f"zoo/seed-{number}" for number in range(count)],
        "reference": 0,
        "left_out": {},
        "interrupted": False,
        "spreads": [0.7654, 0.6543, 0.6542],
        "moved": [3, 0],
        "cycle_error": 3e-8,
        "settings": {"first": {"max_sweeps": 50}},
    }
    about = {"architecture": "SomeModel", "parameters": 1234567, "sha256": "c" * 64}
    return {
        "schema": "symmerge.simplex/1",
        "task": {
            "name": "clm",
            "data": "python-docs",
            "samples": 64,
            "metrics": ["loss", "perplexity"],
            "seed": 7,
        },
        "models": [{"where": f"zoo/seed-{number}", **about} for number in range(count)],
        "methods": [
            one("none", "plain average", plain, None),
            one("weights", "weight matching", aligned, universe),
        ],
        "versions": {"symmerge": "0.1.0", "torch": "2.x"},
        **changes,
    }


def stored_verdict(**changes):
    """The content of verdict.json: the merge is between its parents and their average."""
    losses = {"A: seed-0": 1.5, "B: seed-1": 1.6, "plain average": 4.22, "merge": 2.1}
    kinds = ("parent", "parent", "average", "merge")
    rows = [
        {"name": name, "kind": kind, "metrics": {"loss": loss, "perplexity": math.exp(loss)}}
        for (name, loss), kind in zip(losses.items(), kinds, strict=True)
    ]
    return {
        "schema": "symmerge.verdict/1",
        "task": curve()["task"],
        "rows": rows,
        "repaired": 0.79,
        "verdict": "poor",
        "sentences": ["The merge has a loss of 2.1."],
        "next": ["symmerge merge a b --effort best"],
        **changes,
    }


def pairs_of(ends):
    """A `curves` record; each pair has its own barrier."""
    pairs = []
    for at, (a, b) in enumerate(ends):
        pair = curve(plain=1.0 + at)
        pair["models"]["a"] |= {"where": f"zoo/seed-{a}", "sha256": str(a) * 64}
        pair["models"]["b"] |= {"where": f"zoo/seed-{b}", "sha256": str(b) * 64}
        pair["methods"][0]["barrier_mean"] = 1.125 + at
        pairs.append(pair)
    return {"schema": "symmerge.curves/1", "pairs": pairs, "summary": {}}


def experiment(**changes):
    entries = [
        {
            "row": "vanilla",
            "column": "text",
            "quantity": "barrier_linear",
            "cells": ["a", "b"],
            "values": [1.5, 2.5],
            "mean": None,
            "standard_error": None,
            "published": 2.25,
            "curves": [[1, 3, 1], [2, 4, 2]],
        },
        {
            "row": "learned",
            "column": "text",
            "quantity": "barrier_linear",
            "cells": ["c", "d"],
            "values": [0.125],
            "mean": None,
            "standard_error": None,
            "published": 0.0625,
            "curves": [[1, 1.5, 1]],
        },
        {
            "row": "the same again",
            "column": "text",
            "quantity": "gain",
            "cells": ["c", "d"],
            "values": [0.5],
            "mean": None,
            "standard_error": None,
            "published": None,
            "curves": [[1, 1.5, 1]],
        },
        {
            "row": "gone",
            "column": "text",
            "quantity": "barrier_linear",
            "cells": ["e"],
            "values": [],
            "mean": None,
            "standard_error": None,
            "published": None,
            "curves": [],
        },
    ]
    table = {
        "title": "Table 1",
        "about": "Barriers.",
        "differs": "Smaller models.",
        "rows": [],
        "columns": [],
        "entries": entries,
    }
    size = {"name": "small", "seeds": 2, "points": 3, "device": "cpu"}
    failed = [{"cell": "learned: s1 / s2", "key": "d", "reason": "it fell over"}]
    named = {
        "schema": "symmerge.experiment/1",
        "name": "t-methods",
        "about": "every method",
        "paper": "arXiv 2506.22712, Table 1",
        "size": size,
    }
    return {**named, "tables": [table], "failed": failed, **changes}


METHODS = ("symmerge", "weights-only", "permutations", "orthogonal", "two-stage", "activations")
METHODS += ("correlation", "learned")


def demo_like(folder):
    """Results of the size of the demo's: two experiments, nine methods, every kind of evidence."""
    lines = [method("none", "plain average", 2.3)]
    lines += [method(name, name, 0.3 * at, objective=[3.0, 2.0]) for at, name in enumerate(METHODS)]
    spaces = [{**STRUCTURE["spaces"][at % 2], "space": f"space.{at}"} for at in range(14)]
    evidence = {"structure": {**STRUCTURE, "spaces": spaces}, "correlations": CORRELATIONS}
    for name in ("gpt2-docs", "vit-digits"):
        record = curve(methods=lines)
        for letter, seed in (("a", 0), ("b", 1)):
            record["models"][letter]["where"] = f"demo/models/{name}-seed-{seed}"
        write(folder / name, curve=record, solution=SOLUTION, **evidence)
    return folder


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class Outline(HTMLParser):
    """Headings, ids, what they refer to, and the landmarks."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.ids, self.references, self.tags = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.references |= {
            name
            for key in ("aria-labelledby", "for")
            for name in (attributes.get(key) or "").split()
        }
        self.references |= {
            (attributes.get(key) or "")[1:]
            for key in ("href", "xlink:href")
            if (attributes.get(key) or "").startswith("#")
        }


def said(page):
    """The text of a page without its tags: words that explain themselves are buttons."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def texts(drawn):
    return [
        node.text for node in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    ]

"""The report: figures and a page from hand-made results, also in a browser where there is one."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from chromium import FOUND, chromium

import symmerge as sm
from symmerge.errors import SymmergeError
from symmerge.evaluation.experiment_results import AmountFile
from symmerge.evaluation.results import CurveFile, CurvesFile, PlanePoint, SimplexFile
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.structure import SpaceStructure, structure_of
from symmerge.observation.correlations import (
    CorrelationMatrix,
    Correlations,
    LayerCorrelation,
)
from symmerge.report import curve_svg, figures, maps, report, simplex_svgs
from symmerge.report.phrases import curve_summary, estimate_text
from symmerge.report.results import summarize
from symmerge.report.simplices import pair_matrices

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


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def page(tmp_path):
    """The text of the page of some result files."""
    return lambda **files: report(
        write(tmp_path / "results", **files), tmp_path / "page.html"
    ).read_text("utf-8")


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


def test_the_page_says_it_in_words_and_numbers(page):
    text = page(curve=curve())
    assert (
        "Averaging these two models as they are raises the loss by 2.67;"
        " after alignment (weight matching) by 0.55: 4.9 times less." in text
    )
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


@pytest.mark.parametrize(
    ("plain", "aligned", "said"),
    [
        (
            2.0,
            0.0,
            "by 2.00; after alignment (weight matching) it does not raise the loss.",
        ),
        (1.0, 2.0, "by 2.00: 2.0 times more."),
        (
            0.0,
            0.5,
            "does not raise the loss; after alignment (weight matching) it raises the loss by"
            " 0.50.",
        ),
        (2.0, 0.02, "by 0.02: 100 times less."),
    ],
)
def test_the_summary_is_true_whatever_the_result(plain, aligned, said):
    record = curve()
    record["methods"][0]["barrier_mean"], record["methods"][1]["barrier_mean"] = plain, aligned
    assert curve_summary(summary_of(record)).endswith(said)


def test_one_method_is_enough():
    record = curve()
    assert (
        curve_summary(summary_of({**record, "methods": record["methods"][:1]}))
        == "Averaging these two models as they are raises the loss by 2.67."
    )
    assert (
        curve_summary(summary_of({**record, "methods": record["methods"][1:]}))
        == "Averaging these two models after weight matching raises the loss by 0.55."
    )


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
    assert "1.410 apart before alignment and 0.9300 after" in page(curve=curve(), solution=SOLUTION)
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


def test_several_models_together_in_words_numbers_and_figures(page):
    text = page(simplex=together())
    assert (
        "Averaging all 4 models as they are raises the loss by 10.00;"
        " after alignment (weight matching) by 1.00: 10 times less." in text
    )
    assert (
        "Causal language modelling on python-docs, 4 models" in text
        and "the first three models" in text
    )
    for shown in (
        "s1-many-triangle0-",
        "s1-many-triangle1-",
        "s1-many-barriers0-",
        "s1-many-barriers1-",
        "s1-many-count-",
    ):
        assert shown in text, shown
    # barriers of pairs, spreads, rounds, nested settings, what was merged
    for shown in (
        "4.167",
        "7.500",
        "0.7654",
        "0.6542",
        "3.00e-08",
        "first.max_sweeps",
        "ensemble of all 4",
        "seed-3 alone",
        "c" * 64,
        "torch 2.x",
    ):
        assert shown in text, shown
    row = text.partition("The search for common coordinates")[2].partition("</tbody>")[0]
    assert re.findall(r">([^<>]+)</t[hd]>", row)[-7:] == [
        "weight matching",
        "0.7654",
        "0.6542",
        "2",
        "1",
        "3",
        "3.00e-08",
    ]
    assert [
        words for words in ("What a barrier is", 'type="range"', 'data-curve="') if words in text
    ] == []
    alone = together()
    alone["methods"] = alone["methods"][:1]
    bare = page(simplex=alone)
    assert (
        "common coordinates" not in bare
        and "Settings of the methods" not in bare
        and "Averaging all 4 models as they are raises" in bare
    )


def test_pages_of_several_models_find_their_way_and_escape(page):
    record = together()
    record["models"][0]["where"] = record["methods"][1]["label"] = record["methods"][1]["name"] = (
        NASTY
    )
    text = page(simplex=record)
    outline = Outline(text)
    assert (
        "<script>alert" not in text
        and "<img" not in text
        and text.count("</script>") == 2
        and "model 0" in text
    )
    assert all(
        after <= before + 1
        for before, after in zip(outline.headings, outline.headings[1:], strict=False)
    ) and outline.references <= set(outline.ids)
    assert (
        len(outline.ids) == len(set(outline.ids))
        and outline.tags.count("svg")
        == outline.tags.count("desc")
        == outline.tags.count("figcaption")
        == 5
    )
    files = simplex_svgs(SimplexFile.from_json(record))
    assert len(files) == 5 and all(re.fullmatch(r"[\w.-]+\.svg", name) for name in files)
    assert all(
        "prefers-color-scheme: dark" in svg and "<script>alert" not in svg for svg in files.values()
    )


def test_figures_that_are_compared_have_one_scale():
    """The lower of two methods looks lower; alone it has the whole scale to itself."""
    record = together()
    both, alone = (
        simplex_svgs(SimplexFile.from_json({**record, "methods": methods}))
        for methods in (record["methods"], record["methods"][1:])
    )
    assert (
        both["barriers-weights.svg"] != alone["barriers-weights.svg"]
        and both["triangle-weights.svg"] != alone["triangle-weights.svg"]
    )
    assert {"0.25", "0.75"} <= set(texts(both["barriers-weights.svg"])) and "7.50" in texts(
        both["barriers-none.svg"]
    )
    flat = together(plain=0.0, aligned=0.0)
    assert len(simplex_svgs(SimplexFile.from_json(flat))["triangle-none.svg"]) < len(
        both["triangle-none.svg"]
    )  # one colour, and no error


def test_many_models_get_maps_one_below_the_other(page):
    few, many = page(simplex=together(count=5)), page(simplex=together(count=6))
    assert "<summary>Barrier over the mean" in many and "<summary>Barrier over the mean" not in few
    assert (
        few.count('class="beside"') == 2
        and many.count('class="beside"') == 1
        and "s1-many-barriers1-" in many
    )


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


def test_all_pairs_of_several_models_have_a_map_of_barriers(page):
    text = page(curve=pairs_of([(0, 1), (2, 0), (1, 2)]))
    assert (
        "Barriers between every two models" in text
        and "s1-barriers0-" in text
        and "s1-barriers1-" in text
    )
    _, matrices = pair_matrices(summary_of(pairs_of([(0, 1), (2, 0), (1, 2)])))
    assert matrices[0].label == "plain average"
    assert matrices[0].values == [[0, 1.125, 2.125], [1.125, 0, 3.125], [2.125, 3.125, 0]]
    for ends in (
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(0, 1), (0, 1), (1, 2)],
        [(0, 1), (1, 0), (0, 2)],
        [(0, 1), (2, 3), (4, 5)],
    ):  # the controls
        assert "every two models" not in page(curve=pairs_of(ends)), ends


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
    assert (
        text.count('class="experiment"') == 3
        and "Averaging all 3 models" in text
        and "Barriers of every experiment" in text
    )
    assert (
        "<h1>Averaging models, before" in text
        and "images: Causal" in text
        and "raises the loss by 1.00" in text
        and "raises the loss by 3.00" in text
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


def layers(after):
    rows = [LayerCorrelation(at, "ff", 0.1, 0.5 + at * after) for at in (0, 1)]
    return Correlations(tuple(rows))


def amount(barriers):
    points = [{"samples": 9, "barriers": barriers}]
    return AmountFile.from_json({**AMOUNT, "methods": [{**AMOUNT["methods"][1], "points": points}]})


def space(number, **changes):
    return SpaceStructure.from_json(STRUCTURE["spaces"][number] | changes)


def tilted(change):
    return [
        PlanePoint(point.weights, {"loss": point.metrics["loss"] + change * point.weights[0]})
        for point in PLANE
    ]


# name -> figure of data that a number changes
DRAWINGS = {
    "curve": lambda x: figures.metric_curve(summary_of(curve(plain=2.67 + x)), "loss"),
    "metric": lambda x: figures.metric_curve(summary_of(curve(plain=2.67 + x)), "perplexity"),
    "layers": lambda x: figures.layer_correlation(layers(1 + x)),
    "amount": lambda x: figures.amount_curve(amount([1.0 + x, 2.0])),
    "objective": lambda x: figures.objective_curve("weights", [[3.0, 2.0 + x, 1.0]]),
    "matrix": lambda x: maps.correlation_matrix(
        CorrelationMatrix("h", ((1.0, 0.2 + x), (0.0, 0.5)), (1,))
    ),
    "permutation": lambda x: maps.element_map(space(1, index=[2, 0, 1, 3] if x else [0, 1, 2, 3])),
    "rotation": lambda x: maps.element_map(space(0, matrix=[[1.0, x], [0.0, 1.0]])),
    "together": lambda x: figures.barriers_by_count(SimplexFile.from_json(together(plain=2.5 + x))),
    "barriers": lambda x: maps.barrier_map(["a", "b"], [[0.0, 1.0 + x], [1.0, math.nan]]),
    "corners": lambda x: maps.plane_map(PLANE, corners=((0.0, 0.0), (3.0, 0.0), (1.0 + x, 2.0))),
    "plane": lambda x: maps.plane_map(tilted(x)),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_are_svg_and_change_with_the_data(name):
    drawn = DRAWINGS[name](0.0)
    root = ElementTree.fromstring(drawn)
    tags = {node.tag.rpartition("}")[2] for node in root.iter()}
    assert (
        root.tag == "{http://www.w3.org/2000/svg}svg"
        and {"title", "desc"} <= tags
        and tags & {"path", "image"}
    )
    assert drawn == DRAWINGS[name](0.0) and drawn != DRAWINGS[name](0.25)
    assert "var(--" in drawn and "#000000" not in drawn, (
        "colours come from the page, so that they read in light and dark"
    )


def test_the_curve_shows_methods_ensemble_and_parents():
    assert {"plain average", "weight matching", "ensemble of both", "A", "B", "loss"} <= set(
        texts(curve_svg(CurveFile.from_json(curve())))
    )
    assert "prefers-color-scheme: dark" in curve_svg(CurveFile.from_json(curve()))


def texts(drawn):
    return [
        node.text for node in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_barriers_against_amounts_have_means_errors_and_bands(page):
    text = page(curve=curve(), amount=AMOUNT)
    for shown in (
        "3.50 ± 0.50",
        "1.25 ± 0.25",
        "s1-amount-band-none",
        "s1-amount-band-ours",
        ">10,000<",
    ):
        assert shown in text, shown
    alone = [
        {
            **method,
            "points": [{**point, "barriers": point["barriers"][:1]} for point in method["points"]],
        }
        for method in AMOUNT["methods"]
    ]
    assert "band" not in figures.amount_curve(AmountFile.from_json({**AMOUNT, "methods": alone}))


def test_eight_methods_have_colours_of_their_own_and_a_legend_that_fits(page):
    """Long names are wrapped, not cut off; the drawing keeps its height below any legend."""
    long = "correlation of activations: units, and heads as wholes with the coordinates inside them"
    record = curve(
        methods=[method(f"m{at}", f"method {at}" if at else long, at / 4) for at in range(8)]
    )
    text = page(curve=record)
    for at in range(1, 9):
        assert f"key-{at}" in text and f"stroke: var(--series-{at})" in text, at
    drawn = texts(curve_svg(CurveFile.from_json(record)))
    assert long not in drawn and {"correlation of activations:", "method 7"} <= set(drawn)
    sides = [
        ElementTree.fromstring(
            curve_svg(CurveFile.from_json(curve(methods=record["methods"][:count])))
        )
        .get("viewBox")
        .split()
        for count in (2, 8)
    ]
    assert sides[0][2] == sides[1][2] and float(sides[0][3]) < float(sides[1][3])


def test_a_log_axis_is_labelled_in_numbers():
    """Formulas are off, so that names are shown as they are; default labels would be formulas."""
    drawn = texts(figures.metric_curve(summary_of(curve(plain=5.0)), "perplexity"))
    assert (
        "perplexity (log scale)" in drawn
        and {"10", "100"} <= set(drawn)
        and not any("$" in text for text in drawn)
    )


def test_a_loss_that_overflowed_is_a_gap_not_an_error(page):
    record = curve()
    record["methods"][0]["points"][10] |= {"loss": None, "perplexity": None}
    record["methods"][0]["barrier_mean"] = None
    text = page(curve=record)
    assert (
        "overflow" in text
        and "makes the loss overflow" in text
        and "NaN" not in text.partition('id="numbers">')[2].partition("</script>")[0]
    )


def test_infinite_numbers_can_be_drawn(page):
    record = curve(ensemble={"loss": math.inf, "perplexity": math.inf})
    for point in record["methods"][0]["points"]:
        point["perplexity"] = math.inf
    record["methods"][0]["points"][0]["loss"] = math.nan
    assert "infinite" in page(curve=record)


def test_structure_of_an_alignment():
    spec = sm.canonicalize(sm.load(small_model("neox"))).spec
    random = Alignment.random(spec, torch.Generator().manual_seed(0))
    spaces = {space.space: space for space in structure_of(random).spaces}
    identity = {space.space: space for space in structure_of(Alignment.identity(spec)).spaces}
    kinds = {space.kind for space in spaces.values()}
    assert spaces.keys() == spec.hidden.keys() and kinds == {"permutation", "rotation", "basis"}
    for name, space in spaces.items():
        maps.element_map(space)
        rows = space.size * space.blocks
        if space.kind == "permutation":
            assert identity[name].index == tuple(range(rows)) == tuple(sorted(space.index))
            assert space.index != identity[name].index
        else:
            assert len(space.matrix) == min(64, rows) and min(map(min, space.matrix)) >= 0
            still = torch.tensor(identity[name].matrix)
            assert torch.equal(still.argmax(-1), torch.arange(len(still)))
            assert not torch.allclose(still, torch.tensor(space.matrix))


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
        "paper": "T, Table 1",
        "size": size,
    }
    return {**named, "tables": [table], "failed": failed, **changes}


def test_an_experiment_beside_what_is_published(tmp_path):
    text = report(
        write(tmp_path / "results", results=experiment()), tmp_path / "page.html"
    ).read_text("utf-8")
    for said in (
        "Smaller models.",
        "1 of 2 lie at or below the published ones",
        "it fell over",
        "2.00 ± 0.50",
        "-0.2500",
        "0.06250",
        "1 of 2",
    ):
        assert said in text, said
    assert (
        text.count("<svg") == 1
        and "vanilla: 1.500 at the first model, 3.50 ± 0.50 at the midpoint" in text
    )
    assert (
        "learned: 1.000 at the first model" in text and "the same again: " not in text
    )  # one line for the same cells
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


BAD = {
    "experiment": (
        {"results": experiment(tables=[{"title": "x"}])},
        "results.json has no 'tables[0].about': write it again with symmerge experiment",
    ),
    "no curve": (
        {"structure": STRUCTURE},
        "no curve.json, no simplex.json, no solution.json, no universe.json, no results.json:"
        " run symmerge barrier",
    ),
    "another schema": (
        {"curve": curve(schema="symmerge.curve/9")},
        "schema 'symmerge.curve/9', this version reads symmerge.curve/1 or symmerge.curves/1",
    ),
    "no schema": ({"curve": [1, 2]}, "schema None"),
    "a part missing": (
        {"curve": {key: value for key, value in curve().items() if key != "methods"}},
        "has no 'methods': write it again with symmerge barrier",
    ),
    "models missing": ({"curve": curve(models={"a": {}})}, "has no 'models.a.where'"),
    "no pairs": (
        {"curve": {"schema": "symmerge.curves/1", "pairs": [], "summary": {}}},
        "holds no curve",
    ),
    "other points": (
        {
            "curve": curve(
                methods=[
                    method("none", "x", 1),
                    {**method("w", "y", 1), "points": method("w", "y", 1)["points"][::2]},
                ]
            )
        },
        "different values of t",
    ),
    "one point": (
        {
            "curve": curve(
                methods=[{**method("none", "x", 1), "points": method("none", "x", 1)["points"][:1]}]
            )
        },
        "two points or more",
    ),
    "structure": (
        {
            "curve": curve(),
            "structure": {"schema": "symmerge.structure/1", "spaces": [{"space": "ff"}]},
        },
        "structure.json has no 'spaces[0].group'",
    ),
    "correlations": (
        {"curve": curve(), "correlations": {"schema": 3}},
        "correlations.json has schema 3",
    ),
    "solution": (
        {"curve": curve(), "solution": {"schema": "symmerge.solution/1", "objective": [1.0]}},
        "solution.json has no 'recipe'",
    ),
    "amount": (
        {"curve": curve(), "amount": {**AMOUNT, "methods": [{"name": "x", "label": "x"}]}},
        "amount.json has no 'methods[0].points'",
    ),
    "simplex": (
        {"simplex": {**together(), "methods": [{"name": "x", "label": "x"}]}},
        "simplex.json has no 'methods[0].ends': write it again with symmerge barrier --together",
    ),
    "no methods": (
        {"simplex": together(methods=[])},
        "simplex.json is not of the form it claims (it holds no methods",
    ),
    "no triangle": (
        {"simplex": together(models=together()["models"][:2])},
        "less than three models",
    ),
    "another simplex": (
        {"simplex": together(schema="symmerge.simplex/2")},
        "this version reads symmerge.simplex/1",
    ),
    "solution alone": (
        {"solution": {"schema": "symmerge.solution/1", "objective": [1.0]}},
        "solution.json has no 'recipe'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_results_are_one_line_with_a_remedy(tmp_path, case):
    files, said = BAD[case]
    with pytest.raises(SymmergeError) as caught:
        report(write(tmp_path / "results", **files), tmp_path / "page.html")
    assert (
        said in str(caught.value)
        and "\n" not in str(caught.value)
        and not (tmp_path / "page.html").exists()
    )


def test_bad_places_are_one_line_with_a_remedy(tmp_path):
    results = write(tmp_path / "results", curve=curve())
    (results / "curve.json").with_name("broken").mkdir()
    (results / "broken" / "curve.json").write_text("{")
    for folder, out, said in (
        (results, results / "curve.json", r"ends in \.html"),
        (results, results / "curve.json" / "page.html", "choose another --out"),
        (tmp_path / "nowhere", tmp_path / "page.html", "is no folder"),
        (results / "broken", tmp_path / "page.html", "cannot be read as JSON"),
    ):
        with pytest.raises(SymmergeError, match=said):
            report(folder, out)
    assert json.loads((results / "curve.json").read_text()) == curve()


HEAVY = ("matplotlib", "jinja2", "typer", "rich", "sklearn", "transformers", "PIL")


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import symmerge", set()),
        ("from symmerge.models import structure", set()),
        ("import symmerge.cli", {"typer", "rich"}),
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


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_in_a_browser(tmp_path):
    record = curve()
    record["methods"][1]["label"] = NASTY
    results = write(
        tmp_path / "results",
        curve=record,
        structure=STRUCTURE,
        correlations=CORRELATIONS,
        solution=SOLUTION,
    )
    file = report(results, tmp_path / "page.html")
    with chromium() as browser:
        browser.open(file)
        cells = "[...document.querySelectorAll('.now td')].map(cell => cell.textContent)"
        place = "document.querySelector('[id$=loss-cursor]').getBoundingClientRect().x"
        before, cursor = browser.run(cells), browser.run(place)
        assert before[0] == "4.220"
        browser.run("document.querySelector('input[type=range]').focus()")
        browser.press("ArrowRight", 39)
        after = browser.run(cells)
        assert after[0] == "4.198" and after[1] != before[1] and browser.run(place) > cursor
        assert (
            browser.run(
                "document.querySelector('input[type=range]').getAttribute('aria-valuetext')"
            )
            == "t = 0.55"
        )
        assert "loss 4.198" in browser.run("document.querySelector('[aria-live]').textContent")

        column = (
            "[...document.querySelectorAll('[aria-labelledby$=barriers] tbody tr')]"
            ".map(row => row.cells[3].textContent)"
        )
        click = "document.querySelectorAll('[aria-labelledby$=barriers] th button')[3].click()"
        orders = [browser.run(f"{click}, {column}") for _ in range(2)]
        assert (
            orders[0] == sorted(orders[0], key=float) == orders[1][::-1] and orders[0] != orders[1]
        )
        assert (
            browser.run(
                "document.querySelectorAll('[aria-labelledby$=barriers] thead th')[3].ariaSort"
            )
            == "descending"
        )
        assert not browser.complaints()

        colours = []
        for dark in (False, True):
            browser.open(file, width=360, height=740, dark=dark)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (
                "the page scrolls sideways on a phone"
            )
            colours.append(
                browser.run(
                    "['body', 'svg text'].map(at => getComputedStyle(document.querySelector(at)))"
                    ".map(style => style.backgroundColor + style.fill)"
                )
            )
        assert colours[0][0] != colours[1][0] and colours[0][1] != colours[1][1], (
            "light and dark differ, in the page and in the figures"
        )
        assert not browser.complaints()


@pytest.mark.skipif(FOUND is None, reason="no Chromium here")
def test_the_browser_notices_mistakes(tmp_path):
    file = tmp_path / "bad.html"
    file.write_text(
        "<div style='width: 5000px'>wide</div><img src='other.png'><script>undefined.x</script>"
    )
    with chromium() as browser:
        browser.open(file, width=360, height=740)
        assert not browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert len(browser.complaints()) >= 2

"""Figures: SVG that changes with the data and reads on light and dark pages."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from report_data import (
    AMOUNT,
    PLANE,
    STRUCTURE,
    curve,
    method,
    summary_of,
    texts,
    together,
)

import symmerge as sm
from symmerge.evaluation.experiment_results import AmountFile
from symmerge.evaluation.results import CurveFile, PlanePoint, SimplexFile
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.structure import SpaceStructure, structure_of
from symmerge.observation.correlations import (
    CorrelationMatrix,
    Correlations,
    LayerCorrelation,
)
from symmerge.report import chart, curve_svg, figures, maps, simplex_svgs


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
    drawn = texts(curve_svg(CurveFile.from_json(curve())))
    assert {"plain average", "weight matching", "ensemble", "A", "B", "loss"} <= set(drawn)
    assert {"A: seed-0", "B: seed-1"} <= set(drawn), "the ends have the names of the models"
    assert "prefers-color-scheme: dark" in curve_svg(CurveFile.from_json(curve()))


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


LONG = "correlation of activations: units, and heads as wholes with the coordinates inside them"


def many_methods(count):
    return curve(
        methods=[
            method("none", "plain average", 2.0),
            *(method(f"m{at}", f"method {at}", 0.2 + at / 40) for at in range(count)),
            method("long", LONG, 0.5),
        ]
    )


def test_the_best_and_the_average_have_colours_and_the_rest_is_grey():
    drawn = curve_svg(CurveFile.from_json(many_methods(6)))

    def stroke(name):
        line = drawn.partition(f'id="curve-line-{name}"')[2]
        return re.search(r"stroke: var\(--([\w-]+)\)", line)[1]

    assert [stroke(name) for name in ("none", "m0", "m1", "m5", "long")] == [
        *("plain", "best", "rest", "rest", "rest")
    ]
    worse = curve(plain=0.1, aligned=0.5)  # the control: where averaging is best, nothing is blue
    assert "stroke: var(--best)" not in curve_svg(CurveFile.from_json(worse))


def label_places(drawn, labels):
    """Label -> the place of its text from the top."""
    nodes = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    places = {node.text: node for node in nodes}
    return [float(_place(places[label])) for label in labels]


def _place(node):
    moved = re.search(r"translate\([-\d.]+ ([-\d.]+)\)", node.get("transform") or "")
    return moved[1] if moved else node.get("y")


@pytest.mark.parametrize("frame", [chart.WIDE, chart.NARROW], ids=["wide", "narrow"])
def test_labels_of_close_lines_do_not_overlap(frame, monkeypatch):
    """Sixteen labels: a line apart at least, in the order of the lines, within the drawing."""
    count = 16
    record = summary_of(many_methods(count))
    drawn = figures.metric_curve(record, "loss", frame=frame)
    places = label_places(drawn, [f"method {at}" for at in range(count)])
    height = float(ElementTree.fromstring(drawn).get("viewBox").split()[3])
    gaps = [above - below for above, below in pairwise(places)]
    assert min(gaps) > 1.1 * frame.font and min(places) > 0 and max(places) < height
    assert LONG not in texts(drawn) and "correlation of" in drawn, "long labels are wrapped"
    monkeypatch.setattr(chart, "spread", lambda wanted, *rest: wanted)  # the control
    crowded = figures.metric_curve(record, "loss", frame=frame)
    places = label_places(crowded, [f"method {at}" for at in range(count)])
    assert min(above - below for above, below in pairwise(places)) < frame.font


@pytest.mark.parametrize("low_and_high", [(0.0, 10.0), (0.0, 3.0)])
def test_spread_keeps_order_distance_and_bounds(low_and_high):
    wanted, sizes = [0.1, 0.1, 0.2, 2.9], [0.5, 1.0, 0.5, 0.5]
    places = chart.spread(wanted, sizes, *low_and_high)
    edges = [(at - size / 2, at + size / 2) for at, size in zip(places, sizes, strict=True)]
    assert all(below[1] <= above[0] + 1e-9 for below, above in pairwise(edges))
    assert edges[0][0] >= low_and_high[0] - 1e-9 and edges[-1][1] <= low_and_high[1] + 1e-9
    assert chart.spread([1.0, 5.0], [1.0, 1.0], 0.0, 6.0) == [1.0, 5.0], "free ones stay"


def test_a_log_axis_is_labelled_in_numbers():
    """Formulas are off, so that names are shown as they are; default labels would be formulas."""
    drawn = texts(figures.metric_curve(summary_of(curve(plain=5.0)), "perplexity"))
    assert (
        "perplexity (log scale)" in drawn
        and {"10", "100"} <= set(drawn)
        and not any("$" in text for text in drawn)
    )


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

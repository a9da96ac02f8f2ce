"""Figures: SVG that changes with the data and reads on light and dark pages."""

import math
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
from symmerge.report import curve_svg, figures, maps, simplex_svgs


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
    assert {"plain average", "weight matching", "ensemble of both", "A", "B", "loss"} <= set(
        texts(curve_svg(CurveFile.from_json(curve())))
    )
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

"""Results that cannot be shown are one line with a remedy."""

import json
import os
import warnings

import pytest
from report_data import (
    AMOUNT,
    STRUCTURE,
    curve,
    experiment,
    method,
    together,
    write,
)

from symmerge.errors import SymmergeError
from symmerge.evaluation.results import PlanePoint, SimplexFile
from symmerge.report import report
from symmerge.report.maps import plane_map

BAD = {
    "experiment": (
        {"results": experiment(tables=[{"title": "x"}])},
        "results.json has no 'tables[0].about': write it again with symmerge experiment",
    ),
    "no curve": (
        {"structure": STRUCTURE},
        "no curve.json, no simplex.json, no solution.json, no universe.json, no results.json,"
        " no verdict.json, no kinship.json): give the folder that symmerge barrier, merge, align or"
        " experiment wrote",
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
        (tmp_path / "nowhere", tmp_path / "page.html", "is not a folder"),
        (results / "broken", tmp_path / "page.html", "cannot be read as JSON"),
    ):
        with pytest.raises(SymmergeError, match=said):
            report(folder, out)
    assert json.loads((results / "curve.json").read_text()) == curve()


def test_nobody_is_told_to_write_into_a_model(tmp_path):
    """The folder without results may be a checkpoint."""
    model = write(tmp_path / "model", config={})
    with pytest.raises(SymmergeError, match="give the folder that symmerge barrier") as caught:
        report(model, tmp_path / "page.html")
    assert f"--out {model}" not in str(caught.value)


def point_without_loss():
    line = method("none", "x", 1)
    return {**line, "points": [{"t": point["t"], "perplexity": 1.0} for point in line["points"]]}


def changed_task(**changes):
    return curve(task={**curve()["task"], **changes})


def mixture(**changes):
    """A simplex whose first mixture is changed."""
    simplex = together()
    simplex["methods"][0]["triangle"]["points"][0] |= changes
    return {"simplex": simplex}


# raw text or content of curve.json -> what is said
VALUES = {
    "deep": ("[" * 100_000, "cannot be read as JSON"),
    "thousands of digits": ('{"schema": ' + "9" * 5000 + "}", "cannot be read as JSON"),
    "no UTF-8": (b"\xff\xfe\x00", "cannot be read as JSON"),
    "half a character": (changed_task(data="\ud800"), "cannot be read as JSON"),
    "too large": (" " * 16_000_001, "16,000,000 at most"),
    "a schema of a megabyte": (curve(schema="x" * 10**6), "has schema 'xxx"),
    "a name of a megabyte": (changed_task(data="x" * 10**6), "at most 10,000 characters"),
    "a metric of a megabyte": (
        curve(ensemble={"loss": 1.0, "perplexity": 1.0, "x" * 10**6: 1.0}),
        "at most 10,000 characters",
    ),
    "unknown keys of a megabyte": (curve(**{"x" * 10**6: 1}), "does not know"),
    "thousands of unknown keys": (curve(**{f"x{n}": 1 for n in range(5000)}), "and 4996 more"),
    "a huge whole number": (changed_task(samples=10**30), "a whole number of 64 bits"),
    "a huge number": (curve(ensemble={"loss": 10**400, "perplexity": 1}), "within 1e300"),
    "NaN": (curve(ensemble={"loss": float("nan"), "perplexity": 1}), "within 1e300"),
    "infinity": (curve(ensemble={"loss": float("inf"), "perplexity": 1}), "within 1e300"),
    "points without a loss": (curve(methods=[point_without_loss()]), "some points have no loss"),
    "a metric that no point has": (
        changed_task(metrics=["loss", "colour"]),
        "some points have no colour",
    ),
    "an ensemble without a loss": (curve(ensemble={"perplexity": 1.0}), "have no loss"),
    "text as a number": (curve(ensemble={"loss": "1", "perplexity": 1}), "should be a number"),
    "a list as a name": (changed_task(name=["clm"]), "should be text"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_no_page_can_show(tmp_path, case):
    content, said = VALUES[case]
    if isinstance(content, dict):
        content = json.dumps(content)
    raw = content.encode() if isinstance(content, str) else content
    (tmp_path / "curve.json").write_bytes(raw)
    with pytest.raises(SymmergeError) as caught:
        report(tmp_path, tmp_path / "page.html")
    line = str(caught.value)
    assert said in line and "\n" not in line and len(line) < 600
    assert "write it again with symmerge barrier" in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": [1e299, 0, 0]}, "do not add up to 1"),
        ({"weights": [None, 0, 1]}, "do not add up to 1"),
        ({"weights": [5e3, -4e3, -999]}, "do not add up to 1"),
    ],
)
def test_mixtures_that_are_none(tmp_path, change, said):
    with pytest.raises(SymmergeError, match=said):
        report(write(tmp_path / "results", **mixture(**change)), tmp_path / "page.html")


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "curve.json")
    with pytest.raises(SymmergeError, match="not a regular file"):
        report(tmp_path, tmp_path / "page.html")


def test_equal_models_have_no_triangle():
    """Corners on one point, or no finite loss: a drawing without colours, no error."""
    points = SimplexFile.from_json(together()).methods[0].triangle.points
    drawn = plane_map(points)
    assert "loss" in drawn and "<svg" in drawn  # the control
    assert "<svg" in plane_map(points, corners=((0.0, 0.0),) * 3)
    overflowed = [PlanePoint(point.weights, {"loss": float("nan")}) for point in points]
    assert "<svg" in plane_map(overflowed)


def test_the_same_values_undamaged(tmp_path):
    """The control of the tests above: what is at the limits is shown."""
    content = changed_task(data="x" * 10_000, samples=2**63 - 1)
    content["ensemble"]["loss"] = 1e299
    page = report(write(tmp_path / "results", curve=content, **mixture()), tmp_path / "page.html")
    assert "x" * 10_000 in page.read_text("utf-8")


def test_lines_without_labels_have_no_legend(tmp_path):
    amount = {**AMOUNT, "methods": [{**one, "label": ""} for one in AMOUNT["methods"]]}
    folder = write(tmp_path / "results", curve=curve(), amount=amount)
    with warnings.catch_warnings(action="error", category=UserWarning):
        report(folder, tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()

"""Results that cannot be shown are one line with a remedy."""

import json

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
from symmerge.report import report

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

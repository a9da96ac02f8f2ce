"""Typed JSON: what is written is read back, and what does not fit is one line with a remedy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan
from typing import Annotated, Literal

import pytest

from symmerge.checkpoints.json_results import INLINE, OMIT, Record, ResultFile, read_result
from symmerge.errors import SymmergeError

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Place(Record):
    t: Annotated[float, "Share of model B."]
    metrics: Annotated[Mapping[str, float], INLINE]


@dataclass(frozen=True)
class Path(ResultFile):
    SCHEMA, WRITER = "test.path/1", "test"

    kind: Literal["line", "plane"]
    places: tuple[Place, ...]
    corner: tuple[float, float]
    left_out: Mapping[int, str]
    settings: Mapping[str, object]
    count: int = 3
    note: Annotated[str | None, OMIT] = None
    ensemble: Place | None = None

    def __post_init__(self):
        if not self.places:
            raise ValueError("it has no places")


@dataclass(frozen=True)
class Paths(ResultFile):
    SCHEMA, WRITER = "test.paths/1", "test"

    paths: tuple[Path, ...]


PATH = Path(
    kind="line",
    places=(Place(0.0, {"loss": 1.5}), Place(1.0, {"loss": 2.0, "accuracy": 0.5})),
    corner=(0.25, 0.75),
    left_out={2: "it fell over"},
    settings={"seed": 0, "nested": {"list": [1, None, "x"]}},
)


def test_what_is_written_is_read_back(tmp_path):
    PATH.write(tmp_path / "path.json")
    assert Path.read(tmp_path / "path.json") == PATH
    content = json.loads((tmp_path / "path.json").read_text())
    assert content == PATH.to_json() and content["left_out"] == {"2": "it fell over"}
    assert content["places"][1] == {"t": 1.0, "loss": 2.0, "accuracy": 0.5}
    assert "note" not in content and content["ensemble"] is None
    Paths((PATH, PATH)).write(tmp_path / "paths.json")
    assert read_result(tmp_path / "paths.json", Path, Paths) == Paths((PATH, PATH))


def test_a_number_that_overflowed_is_null_and_read_as_nan(tmp_path):
    Path("line", (Place(inf, {}),), (0.0, 1.0), {}, {"x": inf}).write(tmp_path / "path.json")
    assert json.loads((tmp_path / "path.json").read_text())["places"] == [{"t": None}]
    assert isnan(Path.read(tmp_path / "path.json").places[0].t)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "test.path/2"}, "has schema 'test.path/2', this version reads test.path/1"),
        ({"places": [{"loss": 1.0}]}, "has no 'places[0].t': write it again with test"),
        (
            {"places": [{"t": 0, "loss": "x"}]},
            "holds 'x' where 'places[0].loss' should be a number",
        ),
        ({"places": {}}, "holds {} where 'places' should be a list"),
        ({"places": []}, "is not of the form it claims (it has no places)"),
        ({"corner": [1.0]}, "where 'corner' should be 2 values"),
        ({"kind": "cube"}, "holds 'cube' where 'kind' should be 'line' or 'plane'"),
        ({"count": 1.5}, "where 'count' should be a whole number"),
        ({"left_out": {"x": "y"}}, "where 'left_out.key' should be a number"),
        ({"ensemble": [1]}, "holds [1] where ensemble should be an object"),
        ({"colour": "red"}, "has 'colour', which this version does not know"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, changes, message):
    file = tmp_path / "path.json"
    file.write_text(json.dumps(PATH.to_json() | changes))
    with pytest.raises(SymmergeError) as caught:
        Path.read(file)
    assert message in str(caught.value) and str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)

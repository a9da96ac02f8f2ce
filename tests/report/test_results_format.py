"""docs/results-format.md says what the types say, and its examples are results."""

import json
import re
from dataclasses import make_dataclass

import pytest
from schema_docs import DOCUMENT, MARKED, TYPES, with_field_tables

from symmerge.checkpoints.json_results import Record, field_types
from symmerge.evaluation.experiment_results import ExperimentFile

TEXT = DOCUMENT.read_text("utf-8")
EXAMPLE = re.compile(r"```json\n(.*?)```\n\n<!-- fields: (\w+) -->", re.DOTALL)


def test_the_document_has_the_fields_of_the_types():
    remedy = "run python tests/helpers/schema_docs.py"
    assert with_field_tables(TEXT) == TEXT, remedy
    assert {name for _, name, _ in MARKED.findall(TEXT)} == TYPES.keys()


def test_every_field_is_described():
    undescribed = [
        f"{name}.{field.name}"
        for name, record in TYPES.items()
        for field in field_types(record)
        if not field.about
    ]
    assert not undescribed


def test_a_new_field_changes_the_document(monkeypatch):
    """The control."""
    longer = make_dataclass("CurveFile", [("colour", str)], bases=(Record,))
    monkeypatch.setitem(TYPES, "CurveFile", longer)
    assert "`colour`" in with_field_tables(TEXT) != TEXT


STORED = [
    file
    for file in sorted((DOCUMENT.parents[1] / "experiments" / "results").glob("*.json"))
    if f'"{ExperimentFile.SCHEMA}"' in file.read_text("utf-8")
]


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_stored_experiments_can_be_read(file):
    assert ExperimentFile.read(file).to_json() == json.loads(file.read_text("utf-8"))


@pytest.mark.parametrize(("example", "name"), EXAMPLE.findall(TEXT))
def test_examples_can_be_read(example, name):
    TYPES[name].from_json(json.loads(example))

"""Texts: running text, or rows with labels.

From plain files (also .xz), TSV, CSV and JSONL files, embedded text, or the hub.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import python_docs, python_topics
from symmerge.evaluation.data.hub import is_hub, read_hub

TABLES = (".tsv", ".csv", ".jsonl")
# The test split for evaluation; the training split for calibration.
PYTHON_DOCS = {"python-docs": "test", "python-docs:train": "train"}
PYTHON_TOPICS = {"python-topics": "test", "python-topics:train": "train"}
LABELS = ("label", "labels")
# Columns with the text of a sample: the first group whose columns all exist.
TEXTS = (
    ("text", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text",),
    ("sentence",),
    ("content",),
)


@dataclass(frozen=True)
class TextRows:
    """One or two texts per row, and the labels of the rows, if any."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...] | None


def read_text(data: str) -> str:
    """Running text: a file, the rows of a table one after the other, or embedded text."""
    if data in PYTHON_DOCS:
        return python_docs(PYTHON_DOCS[data])
    if is_hub(data) or data in PYTHON_TOPICS or _suffix(data) in TABLES:
        return "\n".join(" ".join(texts) for texts in read_rows(data, labelled=False).texts)
    return _read_file(data)


def read_rows(data: str, *, labelled: bool = True) -> TextRows:
    """Rows of a TSV, CSV or JSONL file, of a Hugging Face data set, or embedded ones."""
    if data in PYTHON_TOPICS:
        labels, texts = zip(*python_topics(PYTHON_TOPICS[data]), strict=True)
        return TextRows(tuple((text,) for text in texts), labels if labelled else None)
    if is_hub(data):
        rows = read_hub(data)
        return _select(data, list(rows.column_names), rows, labelled)
    suffix = _suffix(data)
    if suffix not in TABLES:
        raise DataError(
            f"{data} has no rows with labels: give a TSV, CSV or JSONL file"
            " with the columns label and text, or a Hugging Face data set"
        )
    if suffix == ".jsonl":
        return _read_jsonl(data, labelled)
    return _read_separated(data, "\t" if suffix == ".tsv" else ",", labelled)


def _suffix(data: str) -> str:
    return Path(data.removesuffix(".xz")).suffix.lower()


def _read_file(data: str) -> str:
    opener = lzma.open if data.endswith(".xz") else open
    try:
        with opener(data, "rt", encoding="utf-8-sig") as file:  # drops a byte order mark
            return file.read()
    except FileNotFoundError as error:
        raise DataError(
            f"{data} is not there: give self, digits, python-docs, python-topics, hf:NAME,"
            " or a file or folder that exists"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{data} is not text in UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{data} cannot be read ({reason}): is it complete, and a text file?"
        ) from error


def _read_jsonl(data: str, labelled: bool) -> TextRows:
    rows = []
    for number, line in enumerate(_read_file(data).split("\n"), 1):
        try:
            if line.strip():
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{data}, line {number} is not a JSON object:"
                " write one per line, with the keys label and text"
            ) from error
    return _select(data, sorted({name for row in rows for name in row}), rows, labelled)


def _read_separated(data: str, separator: str, labelled: bool) -> TextRows:
    # Quotes are ordinary characters in tab-separated text.
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    file = io.StringIO(_read_file(data))
    try:
        lines = [line for line in csv.reader(file, delimiter=separator, quoting=quoting) if line]
    except csv.Error as error:
        raise DataError(
            f"{data} is not a table ({error}): fix it, or write the rows as JSONL"
        ) from error
    names, body = _column_names(lines)
    for number, line in enumerate(body, 1 + len(lines) - len(body)):
        if len(line) != len(names):
            raise DataError(
                f"{data}, line {number} has {len(line)} columns, not {len(names)}"
                f" ({', '.join(names)}): fix it, or name the columns in the first line"
            )
    return _select(data, names, [dict(zip(names, line, strict=True)) for line in body], labelled)


def _column_names(lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Column names and data lines; a first line that has a label is data, not a header."""
    if not lines:
        return [], []
    try:
        float(lines[0][0])
    except ValueError:
        return lines[0], lines[1:]
    return ["label", "text", "text2"][: len(lines[0])], lines


def _select(data: str, names: Sequence[str], rows: Any, labelled: bool) -> TextRows:
    """The columns that hold texts and labels."""
    if not len(rows):
        raise DataError(f"{data} is empty: give a file with rows")
    texts = next((columns for columns in TEXTS if set(columns) <= set(names)), ())
    label = next((name for name in LABELS if name in names), None) if labelled else None
    missing = ["text"] * (not texts) + ["label"] * (labelled and not label)
    if missing:
        raise DataError(
            f"{data} has no column {' and no column '.join(missing)};"
            f" it has: {', '.join(names)}. Rename those you mean"
        )
    columns = [*([label] if label else []), *texts]
    table = [tuple(row.get(name) for name in columns) for row in rows]
    for number, cells in enumerate(table, 1):
        if None in cells:
            raise DataError(
                f"{data}, row {number} lacks one of {', '.join(columns)}:"
                " complete or remove that row"
            )
    strings = tuple(tuple(str(cell) for cell in cells[-len(texts) :]) for cells in table)
    return TextRows(strings, tuple(cells[0] for cells in table) if label else None)

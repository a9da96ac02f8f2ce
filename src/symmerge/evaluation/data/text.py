"""Texts: running text, and rows with labels. From plain files (also .xz), TSV, CSV, JSONL, the embedded text, or the hub."""

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
PYTHON_TOPICS = {"python-topics": "test", "python-topics:train": "train"}
PYTHON_DOCS = {
    "python-docs": "test",
    "python-docs:train": "train",
}  # the part to measure on, and what models were trained on: to calibrate with
LABELS = ("label", "labels")
# The columns of one sample's text: the first that are all there.
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
    """Texts, one or two to a row, and a label for each row where there are labels."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[Any, ...] | None


def read_text(data: str) -> str:
    """Running text: a file, the rows of a table one after the other, or the embedded text."""
    if data in PYTHON_DOCS:
        return python_docs(PYTHON_DOCS[data])
    if is_hub(data) or data in PYTHON_TOPICS or _suffix(data) in TABLES:
        return "\n".join(" ".join(texts) for texts in read_rows(data, labelled=False).texts)
    return _content(data)


def read_rows(data: str, *, labelled: bool = True) -> TextRows:
    """Rows of a TSV, CSV or JSONL file, of a Hugging Face data set, or the embedded ones."""
    if data in PYTHON_TOPICS:
        labels, texts = zip(*python_topics(PYTHON_TOPICS[data]), strict=True)
        return TextRows(tuple((text,) for text in texts), labels if labelled else None)
    if is_hub(data):
        found = read_hub(data)
        return _rows(data, list(found.column_names), found, labelled)
    suffix = _suffix(data)
    if suffix not in TABLES:
        raise DataError(
            f"{data} has no rows with labels: give a TSV, CSV or JSONL file with the columns label and text, or a Hugging Face data set"
        )
    if suffix == ".jsonl":
        return _jsonl(data, labelled)
    return _separated(data, "\t" if suffix == ".tsv" else ",", labelled)


def _suffix(data: str) -> str:
    return Path(data.removesuffix(".xz")).suffix.lower()


def _content(data: str) -> str:
    try:
        # utf-8-sig: some programs begin a file with a mark, which is no text
        with (
            lzma.open(data, "rt", encoding="utf-8-sig")
            if data.endswith(".xz")
            else open(data, encoding="utf-8-sig") as file
        ):
            return file.read()
    except FileNotFoundError as error:
        raise DataError(
            f"{data} is not there: give self, digits, python-docs, python-topics, hf:NAME, or a file or folder that exists"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{data} is not text in UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"{data} cannot be read ({getattr(error, 'strerror', None) or error}): is it complete, and a text file?"
        ) from error


def _jsonl(data: str, labelled: bool) -> TextRows:
    rows = []
    for number, line in enumerate(_content(data).split("\n"), 1):
        try:
            if line.strip():
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{data}, line {number} is not a JSON object: write one per line, with the keys label and text"
            ) from error
    return _rows(data, sorted({name for row in rows for name in row}), rows, labelled)


def _separated(data: str, separator: str, labelled: bool) -> TextRows:
    # Quotes are ordinary characters in tab-separated text.
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    try:
        lines = [
            line
            for line in csv.reader(
                io.StringIO(_content(data)), delimiter=separator, quoting=quoting
            )
            if line
        ]
    except csv.Error as error:
        raise DataError(
            f"{data} is not a table ({error}): mend it, or write the rows as JSONL"
        ) from error
    names, body = (
        (["label", "text", "text2"][: len(lines[0])], lines)
        if lines and _is_number(lines[0][0])
        else (lines[0] if lines else [], lines[1:])
    )
    for number, line in enumerate(body, 1 + len(lines) - len(body)):
        if len(line) != len(names):
            raise DataError(
                f"{data}, line {number} has {len(line)} columns, not {len(names)} ({', '.join(names)}): mend it, or name the columns in the first line"
            )
    return _rows(data, names, [dict(zip(names, line, strict=True)) for line in body], labelled)


def _is_number(cell: str) -> bool:
    """Whether a first line that starts like this is a row, label first, and not the names of the columns."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _rows(data: str, names: Sequence[str], rows: Any, labelled: bool) -> TextRows:
    if not len(rows):
        raise DataError(f"{data} is empty: give a file with rows")
    texts = next((columns for columns in TEXTS if set(columns) <= set(names)), ())
    label = next((name for name in LABELS if name in names), None) if labelled else None
    missing = [
        what for what, there in (("text", texts), ("label", label or not labelled)) if not there
    ]
    if missing:
        raise DataError(
            f"{data} has no column {' and no column '.join(missing)}; it has: {', '.join(names)}. Rename those you mean"
        )
    needed = [*([label] if label else []), *texts]
    found = [tuple(row.get(name) for name in needed) for row in rows]
    incomplete = next((number for number, cells in enumerate(found, 1) if None in cells), None)
    if incomplete is not None:
        raise DataError(
            f"{data}, row {incomplete} lacks one of {', '.join(needed)}: complete or remove that row"
        )
    chosen = tuple(tuple(str(cell) for cell in cells[-len(texts) :]) for cells in found)
    return TextRows(chosen, tuple(cells[0] for cells in found) if label else None)

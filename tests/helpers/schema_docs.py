"""Field tables of docs/results-format.md: `python tests/helpers/schema_docs.py` rewrites them.

The document keeps its prose; the tables stand between `<!-- fields: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from symmerge.aligning.equivalence import Certificate
from symmerge.checkpoints.json_results import INLINE, OMIT, FieldType, Record, field_types
from symmerge.checkpoints.provenance import Provenance, Verdict
from symmerge.derivation.results import DerivedTable
from symmerge.evaluation.evaluation_results import EvaluationFile
from symmerge.evaluation.experiment_results import AmountFile, ExperimentFile
from symmerge.evaluation.results import CurveFile, CurvesFile, PlaneFile, SimplexFile
from symmerge.lineage.results import IndexMatches, Kinship, MergeShares
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.structure import StructureFile
from symmerge.observation.correlations import Correlations
from symmerge.transporting.transport_results import TransportVerdict

TYPES: Mapping[str, type[Record]] = {
    kind.__name__: kind
    for kind in (
        *(CurveFile, CurvesFile, SimplexFile, UniverseFile, SolutionFile, StructureFile),
        *(Correlations, AmountFile, PlaneFile, ExperimentFile, Provenance, Verdict, Certificate),
        *(EvaluationFile, MergeVerdict, TransportVerdict, DerivedTable),
        *(Kinship, MergeShares, IndexMatches),
    )
}
SCALARS = {float: "number", int: "integer", str: "text", bool: "true or false", object: "any"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "results-format.md"
MARKED = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_field_tables(document: str) -> str:
    """The document with the tables of every marked type, as the types are now."""
    documented: set[type[Record]] = set()

    def tables(match: re.Match[str]) -> str:
        return match[1] + "\n\n".join(_tables(TYPES[match[2]], documented)) + "\n" + match[3]

    return MARKED.sub(tables, document)


def _tables(record: type[Record], documented: set[type[Record]]) -> Iterator[str]:
    """Of a record and of the records inside it that have not been shown before."""
    if record in documented:
        return
    documented.add(record)
    about = (record.__doc__ or "").partition("\n")[0]
    schema = f" Schema `{record.__dict__['SCHEMA']}`." if "SCHEMA" in record.__dict__ else ""
    fields = field_types(record)
    rows = "\n".join(map(_row, fields))
    heading = f"**{record.__name__}**: {about}{schema}"
    yield f"{heading}\n\n| field | type | meaning |\n|---|---|---|\n{rows}"
    for one in fields:
        for inner in _records_in(one.hint):
            if inner not in TYPES.values():  # those have their own section
                yield from _tables(inner, documented)


def _row(one: FieldType) -> str:
    about = one.about.replace("|", "\\|")
    return f"| {_key(one)} | {_type_text(one.hint)} | {about} |"


def _key(one: FieldType) -> str:
    if INLINE in one.flags:
        return "other keys"
    absent = " (may be left out)" if OMIT in one.flags or not one.required else ""
    return f"`{one.name}`{absent}"


def _records_in(hint: object) -> Iterator[type[Record]]:
    if isinstance(hint, type) and issubclass(hint, Record):
        yield hint
    for inner in get_args(hint):
        yield from _records_in(inner)


def _type_text(hint: object) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return f"{_type_text(arguments[0])} or null"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} x "
        return f"list of {count}{_type_text(arguments[0])}"
    if arguments:
        return f"{_type_text(arguments[0])} -> {_type_text(arguments[1])}"
    return SCALARS.get(hint) or hint.__name__  # type: ignore[attr-defined, call-overload]


if __name__ == "__main__":
    DOCUMENT.write_text(with_field_tables(DOCUMENT.read_text("utf-8")), "utf-8")

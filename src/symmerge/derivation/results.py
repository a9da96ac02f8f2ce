"""A derived table as typed JSON, and as text to review: layers folded, the proof beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from symmerge.checkpoints.json_results import Record, ResultFile
from symmerge.derivation.deriving import Derivation
from symmerge.derivation.proving import SpaceProof
from symmerge.symmetry.notation import unparse
from symmerge.symmetry.spec import layer_of

LAYER = re.compile(r"(?<=\.)\d+(?=[.\s)*~+]|$)")


@dataclass(frozen=True)
class RefusedGroup(Record):
    """A larger group, and what its elements do to the outputs."""

    group: Annotated[str, "Its name."]
    change: Annotated[float, "Relative change; null where no element can be applied."]
    state: Annotated[str, "`refused`, or `unsure` where the change is below 1e-2."]


@dataclass(frozen=True)
class ProvedSpace(Record):
    """A space of a derived table, with its proof."""

    space: Annotated[str, "Its name."]
    group: Annotated[str, "Its group."]
    size: Annotated[int, "Coordinates of one element."]
    per: Annotated[str | None, "The space with one element for each of its indices."]
    change: Annotated[float, "What random elements change: rounding."]
    larger: Annotated[tuple[RefusedGroup, ...], "The next larger groups of our list."]


@dataclass(frozen=True, kw_only=True)
class DerivedTable(ResultFile):
    """A table derived from a module, with the proof of every space."""

    SCHEMA: ClassVar[str] = "symmerge.derived/1"
    WRITER: ClassVar[str] = "symmerge derive"

    architecture: Annotated[str, "The class of the module."]
    tensors: Annotated[Mapping[str, str], "Tensor -> its axes, in our notation."]
    spaces: Annotated[tuple[ProvedSpace, ...], "All spaces that have symmetries."]
    norms: Annotated[Mapping[str, tuple[str, ...]], "Gain -> the maps it can be folded into."]
    ties: Annotated[Mapping[str, str], "Tensor that is not stored -> the one it shares."]
    together: Annotated[float, "What a random element of all spaces at once changes."]
    unused: Annotated[tuple[str, ...], "Tensors that the example inputs do not reach."]
    notes: Annotated[tuple[str, ...], "What is not sure, and what was not proved."]


def results_of(derivation: Derivation) -> DerivedTable:
    """A derivation as it is stored."""
    spec = derivation.spec
    return DerivedTable(
        architecture=spec.architecture,
        tensors={name: unparse(axes) for name, axes in spec.tensors.items()},
        spaces=tuple(map(_space, derivation.proofs)),
        norms={norm.gain: norm.readers for norm in spec.norms},
        ties=dict(spec.ties),
        together=derivation.together,
        unused=derivation.unused,
        notes=derivation.notes,
    )


def _space(proof: SpaceProof) -> ProvedSpace:
    larger = tuple(RefusedGroup(one.group, one.change, one.state) for one in proof.larger)
    return ProvedSpace(proof.space, proof.group, proof.size, proof.per, proof.change, larger)


def text_of(derivation: Derivation) -> str:
    """The table for review: tensors, spaces with their proof, norms, ties, notes."""
    spec = derivation.spec
    rows = [(name, unparse(axes)) for name, axes in spec.tensors.items()]
    norms = [(norm.gain, f"-> {' '.join(norm.readers)}") for norm in spec.norms]
    norms += [(scale.gain, f"<- {scale.writer}") for scale in spec.scales]
    sections = {
        "Tensors: * reads, ~ rides along, shownN is visible": _aligned(_folded(rows)),
        "Spaces: what random elements change, and what those of larger groups do": [
            *_aligned(_proofs(derivation.proofs)),
            f"all at once: {derivation.together:.0e}",
        ],
        "Norms: gain -> the maps it is folded into, or <- the map it follows": _aligned(
            _folded(norms)
        ),
        "Ties": _aligned(list(spec.ties.items())),
        "Not reached by the example inputs: stays as it is": list(derivation.unused),
        "Notes": list(derivation.notes),
    }
    written = [f"# {title}\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    head = f"{spec.architecture}: derived, and every space proved in float64"
    return "\n\n".join([head, *written]) + "\n"


def _proofs(proofs: Iterable[SpaceProof]) -> list[tuple[str, ...]]:
    """One line for all layers in which a space is the same: the worst figures of them."""
    kinds: dict[tuple[str, str, int, str | None], list[SpaceProof]] = {}
    for proof in proofs:
        per = proof.per and _template(proof.per)
        kinds.setdefault((_template(proof.space), proof.group, proof.size, per), []).append(proof)
    return [
        (
            space,
            f"{group}({size})" + (f" per {per}" if per else ""),
            f"exact to {max(one.change for one in alike):.0e}",
            "; ".join(_refused(alike)),
        )
        for (space, group, size, per), alike in kinds.items()
    ]


def _refused(alike: Iterable[SpaceProof]) -> Iterator[str]:
    by_group: dict[str, list[tuple[float, str]]] = {}
    for proof in alike:
        for one in proof.larger:
            by_group.setdefault(one.group, []).append((one.change, one.state))
    for group, changes in by_group.items():
        change, state = min(changes)
        yield f"{group} {state}" + (f" ({change:.0e})" if change < float("inf") else "")


def _template(text: str) -> str:
    """The first number of every word as {i}: later ones are places inside a layer."""
    return re.sub(r"\S+", lambda word: LAYER.sub("{i}", word[0], count=1), text)


def _folded(rows: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Lines that differ in the layer alone, once; where others of the name differ, of which."""
    layers: dict[tuple[str, str], list[int | None]] = {}
    for name, axes in rows:
        line = _template(f".{name}")[1:], _template(axes)
        layers.setdefault(line, []).append(layer_of(f".{name}"))
    names = Counter(name for name, _ in layers)
    return [
        (name if names[name] == 1 else name.replace("{i}", _numbers(numbers)), axes)
        for (name, axes), numbers in layers.items()
    ]


def _numbers(layers: Iterable[int | None]) -> str:
    """Layers as {0,2,3}."""
    return "{" + ",".join(map(str, layers)) + "}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

"""`Alignment`: one group element per space, to apply, invert, compose and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.tensor_file import read_tensors, write_tensors
from symmerge.checkpoints.versions import installed_versions
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import CheckpointError, MismatchError, SymmetryError, shown
from symmerge.models.model import Model, device_of
from symmerge.symmetry.groups import Element
from symmerge.symmetry.notation import Piece
from symmerge.symmetry.spec import Spec

FORMAT = "symmerge.alignment/1"
PLACES, NUMBERS = (torch.int64,), (torch.float64, torch.float32)  # of indices, of all else


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _maps_text(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


HEADER: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("family", "spec", "source", "source_sha256"), (_is_text, "text")),
    **dict.fromkeys(("reference", "reference_sha256"), (_is_text, "text")),
    **dict.fromkeys(("source_tensors", "restrict"), (_maps_text, "an object of texts")),
    "canonical": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of names",
    ),
}
"""What the fields of a header hold; those not named here are for readers."""
ANOTHER_TABLE = "the alignment was made for another architecture"


@dataclass(frozen=True, repr=False)
class Alignment:
    """A symmetry of every model with this table: for each hidden space, an element of its group.

    `header` may name the one checkpoint it was made for (`source_sha256`); others are refused.
    """

    spec: Spec
    elements: Mapping[str, Element]
    header: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {group}" for group, count in _counts(self.spec).items())
        source = self.header.get("source", f"every {self.spec.architecture} of this size")
        return f"<Alignment of {len(self.elements)} spaces ({counts})\n for {source}>"

    def __getitem__(self, space: str) -> Element:
        return self.elements[space]

    @staticmethod
    def identity(spec: Spec) -> Alignment:
        """The symmetry that changes nothing."""
        return Alignment(
            spec,
            {name: space.group.identity(spec.batch(name)) for name, space in spec.hidden.items()},
        )

    @staticmethod
    def random(spec: Spec, generator: torch.Generator) -> Alignment:
        """A random element of the whole symmetry group, the same for the same seed."""
        return Alignment(
            spec,
            {
                name: space.group.random(generator, spec.batch(name))
                for name, space in spec.hidden.items()
            },
        )

    def to(self, device: torch.device) -> Alignment:
        """The same elements on a device."""
        elements = {
            name: {part: value.to(device) for part, value in element.items()}
            for name, element in self.elements.items()
        }
        return replace(self, elements=elements)

    def compose(self, inner: Alignment) -> Alignment:
        """First `inner`, then this one. Elements inside a head move with the head."""
        self.spec.check_same(inner.spec, ANOTHER_TABLE)
        elements: dict[str, Element] = {}
        for name, space in self.spec.hidden.items():
            first = inner[name]
            if space.per is not None:
                first = _reindex(first, self._order(space.per))
            elements[name] = space.group.compose(self[name], first)
        return Alignment(self.spec, elements)

    def inverse(self) -> Alignment:
        """The symmetry that undoes this one."""
        elements: dict[str, Element] = {}
        for name, space in self.spec.hidden.items():
            inverse = space.group.inverse(self[name])
            if space.per is not None:
                inverse = _reindex(inverse, self._order(space.per).argsort())
            elements[name] = inverse
        return Alignment(self.spec, elements)

    def _order(self, space: str) -> Tensor:
        if space not in self.elements:  # the outer space was restricted to the identity
            return torch.arange(self.spec.sizes[space])
        return self[space]["index"]

    def check(self) -> None:
        """Refuse elements that are missing or not in their groups."""
        if self.elements.keys() != self.spec.hidden.keys():
            odd = sorted(self.elements.keys() ^ self.spec.hidden.keys())
            raise MismatchError(
                f"the alignment and the table have different spaces: {', '.join(odd[:4])}"
            )
        for name, space in self.spec.hidden.items():
            verdict = space.group.check_shapes(self[name], self.spec.batch(name))
            if verdict.ok:  # values can be checked only if the shapes are right
                verdict = space.group.check(self[name])
            if not verdict.ok:
                raise SymmetryError(
                    f"'{name}': {verdict.reason}: this is not a symmetry; make the alignment again"
                )

    def transport(self, name: str, tensor: Tensor) -> Tensor:
        """One tensor in the new coordinates."""
        moved = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        cut = self.spec.pieces[name]
        for piece in cut:
            try:
                result = self.act_on(piece, piece.view(tensor))
            except SymmetryError as error:
                raise SymmetryError(f"{name} {list(tensor.shape)}: {error}") from error
            if len(cut) == 1:
                return result.reshape(tensor.shape)
            piece.view(moved).copy_(result)
        return moved

    def act_on(self, piece: Piece, view: Tensor) -> Tensor:
        """One piece in the new coordinates."""
        # Outer spaces first: elements inside heads are indexed by the head's new position.
        order = sorted(
            range(len(piece.atoms)),
            key=lambda at: self.spec.spaces[piece.atoms[at].space].per is not None,
        )
        for position in order:
            atom = piece.atoms[position]
            if atom.space not in self.elements:
                continue
            space = self.spec.spaces[atom.space]
            outer = None if space.per is None else next(piece.positions(space.per))
            laid, undo = lay(view, position, outer)
            view = undo(space.group.act(self[atom.space], laid, atom.role))
        return view

    def describe(self) -> list[dict[str, Any]]:
        """How far each element is from the identity: share of moved coordinates, or distance."""
        rows = []
        for name, space in self.spec.hidden.items():
            element, still = self[name], space.group.identity(self.spec.batch(name))
            moved = (
                (element["index"] != still["index"]).double().mean().item()
                if "index" in element
                else None
            )
            change = max(
                (_distance(element[part], still[part]) for part in element if part != "index"),
                default=0.0,
            )
            rows.append(
                {
                    "space": name,
                    "group": space.group.name,
                    "size": space.group.size,
                    "moved": moved,
                    "change": change,
                }
            )
        return rows

    def save(self, path: str | Path) -> None:
        """Write the elements as safetensors, with a header that says what they are for."""
        header = {
            "format": FORMAT,
            "family": self.spec.family,
            "spec": self.spec.fingerprint,
            "versions": installed_versions(),
            **self.header,
        }
        tensors = {
            f"{name}/{part}": value
            for name, element in self.elements.items()
            for part, value in element.items()
        }
        write_tensors(Path(path), tensors, header)

    @staticmethod
    def load(path: str | Path, spec: Spec) -> Alignment:
        """Read an alignment for a table; refuse one that was made for another."""
        header, tensors = read_alignment(path)
        if header["spec"] != spec.fingerprint:
            raise MismatchError(
                f"{path} was made for another {header['family']} table:"
                " another family, size, vocabulary, tie or set of tensors"
            )
        elements: dict[str, dict[str, Tensor]] = {name: {} for name in spec.hidden}
        for key, value in tensors.items():
            name, _, part = key.rpartition("/")
            elements.setdefault(name, {})[part] = value
        alignment = Alignment(spec, elements, header)
        alignment.check()
        return alignment


def read_alignment(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of an alignment file, whatever table it is for."""
    remedy = "make one with align or random"
    header, tensors = read_tensors(path, FORMAT, "an alignment file", remedy)
    if not header.keys() >= {"family", "spec"}:
        raise CheckpointError(
            f"{path} is not an alignment file (its header is incomplete): {remedy}"
        )
    for key, (is_right, expected) in HEADER.items():
        if key in header and not is_right(header[key]):
            raise CheckpointError(
                f"{path} is not an alignment file (its '{key}' is {shown(header[key])},"
                f" not {expected}): {remedy}"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in (PLACES if name.endswith("/index") else NUMBERS):
            raise CheckpointError(
                f"{path} is not an alignment file ({name} is stored as {tensor.dtype}): {remedy}"
            )
    return header, tensors


def lay(view: Tensor, position: int, outer: int | None):
    """Reshape a piece to [batch, n, rest], n being one space's dimension; also the inverse."""
    front = [] if outer is None else [outer]
    order = [*front, position, *(dim for dim in range(view.ndim) if dim not in (*front, position))]
    permuted = view.permute(order)
    shape = permuted.shape
    back = sorted(range(view.ndim), key=order.__getitem__)
    batch = 1 if outer is None else shape[0]
    return permuted.reshape(batch, view.shape[position], -1), partial(_undo, shape, back)


def _undo(shape: torch.Size, back: list[int], laid: Tensor) -> Tensor:
    return laid.reshape(shape).permute(back)


def _reindex(element: Element, order: Tensor) -> Element:
    return {part: value[order] for part, value in element.items()}


def _distance(value: Tensor, still: Tensor) -> float:
    return ((value - still).norm() / still.norm().clamp_min(1e-30)).item()


@dataclass(frozen=True)
class Moved:
    """How weights were moved, for the gate: by which alignment, and what they were `before`.

    `known` masks the rows of visible spaces that were moved; others were filled afterwards.
    """

    alignment: Alignment
    before: Model
    known: Mapping[str, Tensor] = field(default_factory=dict)


def apply(alignment: Alignment, model: Model, *, device: str = "cpu") -> Model:
    """The model in new coordinates: other weights, the same function. Lazy.

    Products are computed on `device`, tensor by tensor; the tensors come back to the processor.

    Preconditions: the alignment is for this table and, if for one checkpoint, for this one (each
    tensor is compared as it is read); gains on rotated streams are folded (`canonicalize`).
    """
    alignment.spec.check_same(model.spec, ANOTHER_TABLE)
    alignment.check()
    folded = {norm.stream for norm in model.spec.norms}
    if turning := [
        space for space in model.spec.joined if space in folded and model.spec.rotates(space)
    ]:
        raise SymmetryError(
            f"{model.where}: '{turning[0]}' is tied to the output of an activation, which cannot"
            " rotate: canonicalize first, which unties it"
        )
    place = device_of(device)
    move = partial(_moved, alignment.to(place), model, place)
    computed = {name: partial(move, name) for name in model.spec.tensors}
    spaces = ", ".join(f"{count} {group}" for group, count in _counts(model.spec).items())
    moved = DerivedWeights(model.weights, computed)
    smallest = min(computed, key=lambda name: torch.Size(model.weights.shape(name)).numel())
    moved[smallest]  # the wrong checkpoint is refused here, not in the middle of a long write
    step = HistoryStep("apply", f"one element per space ({spaces})")
    return model.derive(moved, step=step, moved=Moved(alignment, model))


def made_for(model: Model) -> dict[str, object]:
    """Header that ties an alignment to one checkpoint. Reads the whole checkpoint."""
    total = model.digest()
    return {
        "source_sha256": total,
        "source_tensors": {name: model.source.digests[name] for name in model.source},
        "source": model.where,
    }


def _moved(alignment: Alignment, model: Model, device: torch.device, name: str) -> Tensor:
    tensor = model.weights[name]
    expected = alignment.header.get("source_tensors", {}).get(name)
    actual = model.source.digests.get(name)
    if expected and actual and expected != actual:
        origin = alignment.header.get("source", "another checkpoint")
        raise MismatchError(
            f"this alignment was made for {origin}, not for {model.where}: {name} has other values;"
            " apply it to the model it was made for"
        )
    return alignment.transport(name, tensor.to(device)).to(tensor.device)


def _counts(spec: Spec) -> dict[str, int]:
    counts: dict[str, int] = {}
    for space in spec.hidden.values():
        counts[space.group.name] = counts.get(space.group.name, 0) + 1
    return counts

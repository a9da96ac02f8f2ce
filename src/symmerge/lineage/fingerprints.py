"""Fingerprints: what a test of kinship needs of a model, in at most two megabytes.

Units are described by their inner products with the embeddings of a few fixed tokens (or pixels,
positions: rows that everybody sees). No rotation of the stream, no order of units and no scale
changes these numbers, so that models can be compared without aligning them, one file at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.checkpoints.tensor_file import read_tensors, refuse_foreign_tensors, write_tensors
from symmerge.errors import CheckpointError, MismatchError
from symmerge.lineage.disguise import canonical, unit_spaces
from symmerge.lineage.relation import SURE
from symmerge.lineage.results import IndexMatch, IndexMatches
from symmerge.lineage.swaps import near_ties, toss, unit_rows, whitened
from symmerge.lineage.units import MOST, SHARE, LayerTest, combined, layer_test, rows_of
from symmerge.models.model import Model
from symmerge.symmetry.groups import ScaledPermutation, SignedPermutation
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec, layer_of
from symmerge.symmetry.threads import same_bytes

FORMAT, SUFFIX = "symmerge.fingerprint/1", ".fingerprint"
BYTES = 1_900_000  # of the units; the header and the names take less than the rest of 2 MB
ANCHORS = 64
RIDGE = 0.1  # of the mean variance of the anchors
HEADER = {"where": str, "digest": str, "anchors": str, "signs": bool}
REMEDY = "write it again with symmerge kinship --index FOLDER --add MODEL"


@dataclass(frozen=True)
class Fingerprint:
    """A model's units, layer by layer, as inner products with its anchors, in 8 bits."""

    where: str
    digest: str
    anchors: str
    signs: bool  # whether a symmetry may change the sign of a unit's weights
    units: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write it; a foreign file of that name is not replaced."""
        refuse_foreign_tensors(path, FORMAT)
        header = {name: getattr(self, name) for name in HEADER}
        write_tensors(path, self.units, {"format": FORMAT, **header})

    @staticmethod
    def load(path: Path) -> Fingerprint:
        """Read one; anything else is refused."""
        header, units = read_tensors(path, FORMAT, "a fingerprint", REMEDY)
        values = {name: header.get(name) for name in HEADER}
        in_order = all(
            u.dtype == torch.int8 and u.ndim == 3 and len(u) == 2 for u in units.values()
        )
        known = all(isinstance(values[name], kind) for name, kind in HEADER.items())
        if not known or not units or not in_order:
            raise CheckpointError(f"{path} is not a fingerprint (its content is damaged): {REMEDY}")
        return Fingerprint(**values, units=units)  # type: ignore[arg-type]


@torch.no_grad()
@same_bytes()
def fingerprint(model: ModelLike) -> Fingerprint:
    """The fingerprint of a model. Reads all of it once."""
    opened = open_model(model)
    form = canonical(opened)
    names, anchors = _anchors(form)
    units = {space: _described(form, space, anchors) for space in _chosen(form.spec, len(anchors))}
    signs = _has_signs(form.spec, next(iter(units)))
    return Fingerprint(opened.where, opened.digest(), names, signs, units)


def _has_signs(spec: Spec, space: str) -> bool:
    group = spec.spaces[space].group
    scaled = isinstance(group, ScaledPermutation) and not group.positive
    return scaled or isinstance(group, SignedPermutation)


def _chosen(spec: Spec, anchors: int) -> list[str]:
    """Layers spread over the depth, as many as fit, but one at least."""
    spaces = unit_spaces(spec)
    if not spaces:
        raise MismatchError(
            f"{spec.architecture} has no feed-forward units to take a fingerprint of"
        )
    room = max(1, BYTES // (2 * anchors * min(spec.sizes[spaces[0]], _most_units(anchors))))
    count = min(room, len(spaces))
    return [spaces[(2 * at + 1) * len(spaces) // (2 * count)] for at in range(count)]


def _most_units(anchors: int) -> int:
    return BYTES // (2 * anchors)


def _anchors(model: Model) -> tuple[str, Float[Tensor, "anchors stream"]]:
    """Rows of tensors that meet the stream and nothing else hidden, at places that never move.

    The first power of two of the rows: a vocabulary with a few more tokens has the same anchors.
    """
    spec, rows, names = model.spec, [], []
    for name, pieces in spec.pieces.items():
        spaces = {atom.space for piece in pieces for atom in piece.atoms}
        writes = any(a.space == spec.stream and a.role is Role.WRITES for a in pieces[0].atoms)
        if layer_of(name) is not None or spaces & {*spec.hidden} != {spec.stream} or not writes:
            continue
        at = next(pieces[0].positions(spec.stream))
        matrix = pieces[0].view(model.weights[name]).movedim(at, -1)
        matrix = matrix.reshape(-1, spec.sizes[spec.stream]).float()
        if len(matrix) > 1:
            rows.append(matrix[: 1 << (len(matrix).bit_length() - 1)])
            names.append(f"{name} {len(rows[-1])}")
    if not rows:
        raise MismatchError(f"{model.where} has no embeddings that a fingerprint could refer to")
    stacked = torch.cat([side / side.norm(dim=1).mean().clamp_min(1e-30) for side in rows])
    places = torch.arange(min(ANCHORS, len(stacked))) * len(stacked) // min(ANCHORS, len(stacked))
    return " ".join(names), _whitened_rows(stacked[places])


def _whitened_rows(rows: Float[Tensor, "anchors stream"]) -> Float[Tensor, "anchors stream"]:
    """The rows made nearly orthonormal: then inner products say as much as coordinates."""
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    root = (values.clamp_min(0) + RIDGE * values.mean().clamp_min(1e-30)).rsqrt()
    return vectors * root @ vectors.mT @ rows


def _described(model: Model, space: str, anchors: Tensor) -> Tensor:
    rows = rows_of(model, model.spec, space)
    width = anchors.shape[1]  # of a gated layer the gates alone: nothing changes their signs
    incoming, outgoing = (unit_rows(side[:, :width] @ anchors.mT) for side in rows)
    most = _most_units(len(anchors))
    if len(incoming) > most:  # the largest: no scale of a unit changes this product
        size = rows.incoming.norm(dim=1) * rows.outgoing.norm(dim=1)
        kept = size.topk(most).indices
        incoming, outgoing = incoming[kept], outgoing[kept]
    both = torch.stack([incoming, outgoing])
    return (both / both.abs().amax(2, keepdim=True).clamp_min(1e-30) * 127).round().to(torch.int8)


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> list[LayerTest]:
    """The test of every layer that both have. Raises where nothing can be compared."""
    if a.anchors != b.anchors:
        raise MismatchError(f"{b.where} has other embeddings: {b.anchors[:80]}")
    shared = [
        name for name in a.units if name in b.units and a.units[name].shape == b.units[name].shape
    ]
    if not shared:
        raise MismatchError(f"{b.where} has other layers, or units of another number")
    key = " ".join(sorted([a.digest, b.digest]))
    return [_compared(a, b, name, key) for name in shared]


def _compared(first: Fingerprint, second: Fingerprint, space: str, key: str) -> LayerTest:
    a, b = (side.units[space].float() for side in (first, second))
    unsigned = torch.abs if first.signs else torch.Tensor.clone
    score = unsigned(unit_rows(a[0]) @ unit_rows(b[0]).mT)
    mine, theirs = _mutual(score)
    count = max(1, len(mine) // SHARE)
    pairs = near_ties(score[mine][:, theirs], min(MOST, count))
    x, y = whitened(a[1], b[1])
    return layer_test(space, toss(unsigned(x @ y.mT)[mine][:, theirs], pairs), key)


def _mutual(score: Float[Tensor, "n m"]) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
    """Units that are one another's best: no assignment of thousands is solved for every model."""
    best, back = score.argmax(1), score.argmax(0)
    mine = torch.arange(len(score))[back[best] == torch.arange(len(score))]
    return mine, best[mine]


def add_to_index(folder: Path, model: ModelLike) -> Path:
    """Write a model's fingerprint into a folder, and return the file."""
    taken = fingerprint(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make {folder}: {error.strerror}; choose another folder for --index"
        ) from error
    file = folder / f"{Path(taken.where).name or 'model'}-{taken.digest[:12]}{SUFFIX}"
    taken.save(file)
    return file


@torch.no_grad()
def search_index(folder: Path, model: ModelLike) -> IndexMatches:
    """Compare a model with every fingerprint of a folder, one at a time; relatives first."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no fingerprints (*{SUFFIX}): add models with"
            f" symmerge kinship --index {folder} --add MODEL"
        )
    taken = fingerprint(model)
    matches = list(_matches(taken, files))
    matches.sort(key=lambda one: (one.p is None, one.p or 0.0, -one.wins, one.file))
    return IndexMatches(taken.where, tuple(matches))


def _matches(taken: Fingerprint, files: list[Path]) -> Iterator[IndexMatch]:
    for file in files:
        other = Fingerprint.load(file)
        try:
            tests = compare_fingerprints(taken, other)
        except MismatchError as error:
            yield IndexMatch(other.where, file.name, False, None, 0.0, 0, str(error))
            continue
        p = combined(tests)
        wins, pairs = (sum(getattr(one.coins, what) for one in tests) for what in ("wins", "pairs"))
        yield IndexMatch(other.where, file.name, p < SURE / len(files), p, float(wins), int(pairs))

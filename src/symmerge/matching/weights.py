"""Weight matching: align B to A from their weights alone.

Alternating sweeps over the stream, the heads (with the bases inside them) and the units. Each step is the exact minimum over its spaces
given the others, so the objective never increases. Two findings shape it (docs/log.md has the figures):

- Tensors that meet only the stream (embeddings, unembedding, class head) are certain evidence: nothing else has to be matched first.
  Where they determine the stream, they alone do; matched heads and units, which may be wrong, only complete it where they do not.
- No one weighting of that evidence is best everywhere. Several are tried, and language models choose by a score on text they write
  themselves: still no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from symmerge.alignment import Alignment, lay
from symmerge.errors import MismatchError
from symmerge.groups import Element, Gram, ScaledPermutation
from symmerge.matching.base import Solution
from symmerge.matching.heads import layers, match_heads
from symmerge.model import Model
from symmerge.notation import Role
from symmerge.probe import Probe, make_probe
from symmerge.spec import Occurrence, Spec

Report = Callable[[str], None]


@dataclass(frozen=True)
class Weighting:
    """How much each tensor counts: its squared error over its squared norm to the power `norm`; rows of frequent tokens more by `frequency`."""

    norm: float = 1.0
    frequency: float = 0.0


WEIGHTINGS = tuple(Weighting(norm, frequency) for frequency in (0.75, 0.5) for norm in (1.0, 0.5, 0.25, 0.0))


@final
@dataclass(frozen=True)
class WeightMatching:
    """Options of weight matching.

    `weightings` are tried in turn and the best is kept: by the probe's score for language models, else by the first one alone. `general` lets
    heads change basis by any invertible matrix; otherwise rotations in the balanced gauge, which merge as well and are much faster.
    """

    max_sweeps: int = 20
    tolerance: float = 1e-4
    weightings: tuple[Weighting, ...] = WEIGHTINGS
    general: bool = False
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def solve(self, a: Model, b: Model, *, report: Report | None = None) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table."""
        if a.spec.fingerprint != b.spec.fingerprint:
            raise MismatchError(f"{a.where} and {b.where} cannot be aligned; they differ in: {'; '.join(a.spec.differences(b.spec))}")
        began = time.perf_counter()
        tell = report or (lambda line: None)
        pair = [{name: model.weights[name].to(self.device, self.dtype) for name in model.weights} for model in (a, b)]
        probe = make_probe([a, b], seed=self.seed, device=self.device) if len(self.weightings) > 1 else None
        tries = self.weightings if probe else self.weightings[:1]
        best: tuple[float, _Sweeps, Weighting] | None = None
        for weighting in tries:
            sweeps = _Sweeps(a.spec, pair[0], pair[1], weighting, probe.counts if probe else None, self)
            sweeps.run(tell)
            score = _score(a, pair[0], sweeps.aligned(), probe) if probe and len(tries) > 1 else sweeps.objective[-1]
            tell(f"norm^{weighting.norm:g}, frequency^{weighting.frequency:g}: score {score:.4f}")
            if best is None or score < best[0]:
                best = (score, sweeps, weighting)
        assert best is not None
        score, sweeps, weighting = best
        settings = {**asdict(self), "dtype": str(self.dtype), "chosen": asdict(weighting), "score": score, "scored_on": "own text" if probe else "objective"}
        alignment = Alignment(a.spec, {name: {part: value.cpu() for part, value in element.items()} for name, element in sweeps.elements.items()})
        return Solution(alignment, tuple(sweeps.objective), sweeps.by_space(), tuple(sweeps.changes), sweeps.converged, time.perf_counter() - began, settings)


@torch.no_grad()
def _score(a: Model, first: Mapping[str, Tensor], second: Mapping[str, Tensor], probe: Probe) -> float:
    from symmerge.verify import full_module
    from symmerge.weights import MemoryWeights

    middle = a.derive(MemoryWeights({name: torch.lerp(first[name], second[name], 0.5) for name in first}), step={"step": "middle", "what": ""})
    return probe.score(full_module(middle, torch.float32).to(probe.tokens.device))


class _Sweeps:
    """The state of one solve: the two models' tensors, the elements so far, and how the objective went."""

    def __init__(
        self, spec: Spec, a: Mapping[str, Tensor], b: Mapping[str, Tensor], weighting: Weighting, counts: Tensor | None, options: WeightMatching
    ) -> None:
        self.spec, self.options = spec, options
        self.elements: dict[str, Element] = {}
        self.objective: list[float] = []
        self.changes: list[int] = []
        self.converged = False
        self._plain = b
        rows = _row_weights(spec, weighting, counts)
        self.a, self.b = ({name: _weighted(spec, name, tensor, rows) for name, tensor in side.items()} for side in (a, b))
        self.scale = {name: self._scale(name, weighting.norm) for name in spec.tensors}

    def _scale(self, name: str, power: float) -> float:
        """A bias counts as its matrix does; a gain by its length."""
        matrix = name.removesuffix("bias") + "weight"
        reference = matrix if name.endswith("bias") and matrix in self.a and self.a[matrix].ndim > 1 else name
        norm = (self.a[reference].norm() * self.b[reference].norm()).item()
        size = norm if self.a[reference].ndim > 1 else self.a[reference].numel()
        return max(size, 1e-12) ** -power

    @cached_property
    def stream(self) -> str:
        """The space that most tensors meet."""
        return max(self.spec.hidden, key=lambda name: len({met.piece.tensor for met in self.spec.occurrences(name)}))

    @cached_property
    def certain(self) -> set[str]:
        """Tensors that meet no hidden space but the stream."""
        met = {name: {atom.space for piece in cut for atom in piece.atoms} & self.spec.hidden.keys() for name, cut in self.spec.pieces.items()}
        return {name for name, spaces in met.items() if spaces == {self.stream}}

    @cached_property
    def determined(self) -> bool:
        """Whether the certain tensors have at least as many rows as the stream has coordinates."""
        rows = sum(self.a[name].numel() // self.spec.sizes[self.stream] for name in self.certain if self.a[name].ndim > 1)
        return rows >= self.spec.sizes[self.stream]

    def run(self, tell: Report) -> None:
        attention = layers(self.spec)
        inside = {name for heads in attention for name in heads.spaces}
        others = [name for name in self.spec.hidden if name != self.stream and name not in inside]
        for sweep in range(self.options.max_sweeps):
            before = dict(self.elements)
            if sweep == 0:
                self._step(self.stream, self.certain)
            elif not self.determined:
                self._step(self.stream, None)
            for heads in attention:
                self._keep(match_heads(self.spec, heads, self._sides(set(heads.spaces)), general=self.options.general))
            for name in others:
                self._step(name, None)
            self.objective.append(self._objective())
            self.changes.append(sum(_differs(before.get(name), element) for name, element in self.elements.items()))
            tell(f"sweep {sweep + 1}: objective {self.objective[-1]:.4f}, {self.changes[-1]} spaces changed")
            if self.determined or self._settled():
                self.converged = True
                return

    def _settled(self) -> bool:
        return len(self.objective) > 1 and self.objective[-2] - self.objective[-1] <= self.options.tolerance * abs(self.objective[-1])

    def _keep(self, found: Mapping[str, Element]) -> None:
        for name, element in found.items():
            self.elements[name] = {part: value.to(self.options.device) for part, value in element.items()}

    def _sides(self, moving: set[str]) -> Callable[[Occurrence], tuple[Tensor, Tensor]]:
        """Both models' views of a piece, weighted; B moved in every other space."""
        others = Alignment(self.spec, {name: element for name, element in self.elements.items() if name not in moving})

        def sides(met: Occurrence) -> tuple[Tensor, Tensor]:
            name = met.piece.tensor
            root = self.scale[name] ** 0.5
            view = others.act_on(met.piece, met.piece.view(self.b[name]))
            for position in met.piece.positions(next(iter(moving))) if len(moving) == 1 else ():
                if position != met.position:  # a space met twice in one tensor: the other place stays as it is now
                    view = self._act_at(met, position, view)
            return (met.piece.view(self.a[name]) * root).double(), (view * root).double()

        return sides

    def _act_at(self, met: Occurrence, position: int, view: Tensor) -> Tensor:
        atom = met.piece.atoms[position]
        if atom.space not in self.elements:
            return view
        laid, undo = lay(view, position, None)
        return undo(self.spec.spaces[atom.space].group.act(self.elements[atom.space], laid, atom.role))

    def _step(self, space: str, only: set[str] | None) -> None:
        """The exact minimum over one space."""
        group, sides = self.spec.spaces[space].group, self._sides({space})
        grams: dict[Role, Gram] = {}
        for met in self.spec.occurrences(space):
            if only is not None and met.piece.tensor not in only:
                continue
            a, b = (lay(side, met.position, None)[0][0] for side in sides(met))
            right = torch.diag_embed(b.square().sum(-1)) if isinstance(group, ScaledPermutation) else None
            gram = Gram(a @ b.mT, right)
            grams[met.role] = grams[met.role] + gram if met.role in grams else gram
        if not grams:
            self._keep({space: group.identity()})
            return
        some = next(iter(grams.values()))
        nothing = Gram(torch.zeros_like(some.cross), None if some.right is None else torch.zeros_like(some.cross))
        self._keep({space: group.nearest(grams.get(Role.WRITES, nothing), grams.get(Role.READS), grams.get(Role.RIDES))})

    def _errors(self) -> dict[str, float]:
        moved = Alignment(self.spec, self.elements)
        return {name: self.scale[name] * (self.a[name] - moved.transport(name, self.b[name])).square().sum().item() for name in self.spec.tensors}

    def _objective(self) -> float:
        return sum(self._errors().values())

    def by_space(self) -> dict[str, float]:
        """What is left of the objective in the tensors that meet each space."""
        errors = self._errors()
        return {name: sum(errors[tensor] for tensor in {met.piece.tensor for met in self.spec.occurrences(name)}) for name in self.spec.hidden}

    def aligned(self) -> dict[str, Tensor]:
        """B's own tensors, moved."""
        moved = Alignment(self.spec, self.elements)
        return {name: moved.transport(name, tensor) for name, tensor in self._plain.items()}


def _row_weights(spec: Spec, weighting: Weighting, counts: Tensor | None) -> Tensor | None:
    """The square roots of the tokens' weights; unseen tokens count as half an occurrence."""
    if counts is None or not weighting.frequency:
        return None
    weights = (counts + 0.5) ** weighting.frequency
    return (weights / weights.mean()).sqrt()


def _weighted(spec: Spec, name: str, tensor: Tensor, rows: Tensor | None) -> Tensor:
    axes = spec.tensors[name]
    first = axes[0].factors[0]
    if rows is None or len(axes) < 2 or getattr(first, "space", None) != "vocabulary":
        return tensor
    return tensor * rows.to(tensor)[:, None]


def _differs(before: Element | None, after: Element) -> bool:
    return before is None or any(not torch.allclose(before[part].double(), after[part].double(), atol=1e-6) for part in after)

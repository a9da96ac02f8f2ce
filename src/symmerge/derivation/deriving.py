"""`derive`: a table for a module, in our notation, with its proof."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from torch import nn

from symmerge.derivation.deciding import Choice, Kind
from symmerge.derivation.own_data import Loss, check_task, own_task
from symmerge.derivation.parameters import model_of, own_copy, parameters_of
from symmerge.derivation.proposals import Proposal, largest_proposal
from symmerge.derivation.proving import Prover, SpaceProof
from symmerge.derivation.recording import tensors_of
from symmerge.derivation.running import (
    EXACT,
    Read,
    Runner,
    check_repeatable,
    named_inputs,
    other_inputs,
    outputs_of,
    perturb_parameters,
    used_unseen,
)
from symmerge.derivation.state import train_buffers
from symmerge.derivation.tables import Table
from symmerge.derivation.walking import Followed
from symmerge.errors import SymmergeError, SymmetryError, UnsupportedModel
from symmerge.evaluation.tasks.base import Task
from symmerge.models.model import Model
from symmerge.models.progress import Progress, ProgressLike, reporter
from symmerge.symmetry.groups import Permutation, ScaledPermutation, SignedPermutation
from symmerge.symmetry.notation import unparse
from symmerge.symmetry.spec import Spec, listing


@dataclass(frozen=True, repr=False)
class Derivation:
    """A table that was derived from a module, and the proof of every space.

    `load` makes a model of any module of this class, for `align`, `apply` and `merge`; `module`
    makes a module of a model.
    """

    spec: Spec
    proofs: tuple[SpaceProof, ...]
    notes: tuple[str, ...]
    together: float
    unused: tuple[str, ...]
    runner: Runner = field(repr=False)

    def __repr__(self) -> str:
        hidden = len(self.spec.hidden)
        return f"<Derivation of {self.spec.architecture}: {hidden} spaces, each proved>"

    def load(self, module: nn.Module, where: str = "") -> Model:
        """A model of this table with a module's weights."""
        return model_of(self.spec, module, self.runner, where)

    def module(self, model: Model) -> nn.Module:
        """A copy of the module with a model's weights; what is tied no longer may have copies."""
        made = self.runner.module_of(model, model.dtype)
        for one in (*made.parameters(), *made.buffers()):
            one.data = one.data.clone()  # it may be trained, and the model stays as it is
        return made

    def task(self, batches: Iterable[Any], *, loss: Loss | None = None) -> Task:
        """Your data, for `merge`, `barrier` and `evaluate`: `derivation.task(pairs, loss=loss)`.

        `batches` are (inputs, targets), and `loss(answer, targets)` gives the mean loss of a batch;
        without a loss they are inputs alone, which can be looked at and learned from.
        """
        task = own_task(batches, loss, f"batches for {self.spec.architecture}")
        check_task(task, self.runner)
        return task

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The table, one line per tensor."""
        width = max(map(len, self.spec.tensors), default=0)
        return tuple(f"{name:{width}}  {unparse(axes)}" for name, axes in self.spec.tensors.items())


def derive(
    module: nn.Module,
    example_inputs: Any,
    *,
    read: Read = outputs_of,
    seed: int = 0,
    progress: ProgressLike = None,
) -> Derivation:
    """Derive the table of a module: its spaces, their groups, and a proof of each.

    `example_inputs` is what its forward takes: a tensor, a tuple, or a dictionary of arguments.
    `read` picks the tensors that are the module's answer; all others may change.
    """
    report = reporter(progress) or (lambda line: None)
    module = own_copy(module)
    perturb_parameters(module, seed)
    inputs = named_inputs(example_inputs)
    both = (inputs, other_inputs(inputs, seed + 1))
    state = train_buffers(module, both, seed)
    tensors, ties = parameters_of(module, state)
    own = tensors_of(module, buffers=False)
    frozen = [name for name, one in own.items() if not one.requires_grad]
    proposal = largest_proposal(module, tensors, ties, frozen, both, read)
    runner = Runner(module, both, read, state)
    check_repeatable(runner, tensors)
    return _proved(proposal, runner, ties, seed, report)


def _proved(
    proposal: Proposal, runner: Runner, ties: Mapping[str, str], seed: int, report: Progress
) -> Derivation:
    notes = sorted({*proposal.followed.walk.notes})
    used = proposal.followed.used
    used = used | {target for alias, target in ties.items() if alias in used}
    unused = sorted(proposal.followed.parameters.keys() - used)
    tensors, _ = parameters_of(runner.module, runner.state)
    notes += [
        f"{name} reaches the outputs in a way that leaves no trace (.numpy(), .data): it stays as"
        " it is"
        for name in used_unseen(runner, tensors, unused)
    ]
    untied = _prove_one(proposal.followed, proposal.kinds, {}, runner, seed, report)
    if not ties:
        return _derivation(untied, notes, runner, unused)
    joined = _join(proposal, untied.spec)
    tied = _prove_one(
        proposal.tied, proposal.tied_kinds, ties, runner, seed, report, untied.spec, joined
    )
    return _derivation(tied, notes, runner, unused)


def _join(proposal: Proposal, untied: Spec) -> set[int]:
    """Spaces that rotate only once ties are broken: they get the larger group, and are `joined`."""
    by_origin = {
        leaf.origin: root for root, kind in proposal.tied_kinds.items() for leaf in kind.leaves
    }
    joined: set[int] = set()
    table = Table(proposal.followed, proposal.kinds, {})
    for root, name in table.names.items():
        if name not in untied.spaces or not untied.rotates(name):
            continue
        kind = proposal.tied_kinds[by_origin[proposal.kinds[root].leaves[0].origin]]
        if type(kind.choices[0].group) in (Permutation, SignedPermutation, ScaledPermutation):
            roles = next(one for one in kind.choices if isinstance(one.group, Permutation)).powers
            kind.choices.insert(0, Choice(untied.spaces[name].group, roles))
            joined.add(kind.root)
    return joined


@dataclass
class _Proved:
    spec: Spec
    proofs: dict[str, SpaceProof]
    dropped: list[str]
    together: float


def _prove_one(
    followed: Followed,
    kinds: dict[int, Kind],
    ties: Mapping[str, str],
    runner: Runner,
    seed: int,
    report: Progress,
    untied: Spec | None = None,
    joined: Collection[int] = (),
) -> _Proved:
    """Prove a table space by space; where a group is not proved, take the next smaller one."""
    picked: dict[int, int] = {}
    dropped: list[str] = []
    kind = type(runner.module).__name__
    while True:
        table = Table(followed, kinds, picked)
        names = tuple(table.names[root] for root in joined if picked.get(root, 0) == 0)
        spec = replace(table.spec(kind, ties), untied=untied, joined=names)
        outcome = _attempt(spec, table, runner, seed, report)
        if isinstance(outcome, TableProof):
            spec = replace(spec, read_means=outcome.read_means)
            return _Proved(spec, outcome.proofs, dropped, outcome.together)
        if isinstance(outcome, Unseen):
            picked |= {root: len(kinds[root].choices) - 1 for root in outcome.spaces}
            dropped += [
                f"{space}: the example inputs do not show what its elements do: it stays as it is;"
                " give inputs that reach it"
                for space in outcome.spaces.values()
            ]
            continue
        root, space, change = outcome.root, outcome.space, outcome.change
        refused = table.group(root).name  # before the next is picked: the table shares `picked`
        picked[root] = picked.get(root, 0) + 1
        if picked[root] >= len(kinds[root].choices):
            raise UnsupportedModel(f"{kind}: no table was proved ({space}: {change})")
        why = "no element gives an answer" if change == inf else f"outputs change by {change:.0e}"
        dropped.append(
            f"{space}: {refused} is not proved ({why}):"
            f" {kinds[root].choices[picked[root]].group.name} instead"
        )


@dataclass(frozen=True)
class TableProof:
    """The proof of every space, of all at once, and streams whose mean is read."""

    proofs: dict[str, SpaceProof]
    together: float
    read_means: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A space whose group changes the outputs."""

    root: int
    space: str
    change: float


@dataclass(frozen=True)
class Unseen:
    """Spaces, by root, of which the example inputs show nothing."""

    spaces: Mapping[int, str]


def _attempt(
    spec: Spec, table: Table, runner: Runner, seed: int, report: Progress
) -> TableProof | Refused | Unseen:
    roots = {name: root for root, name in table.names.items()}
    model = model_of(spec, runner.module, runner)
    try:
        prover = Prover(model, runner)
    except SymmergeError:
        return _rotating(spec, roots, float("inf"))
    if prover.folding > EXACT:
        return _rotating(spec, roots, prover.folding)
    spaces = prover.model.spec.hidden
    unseen = [one for one in roots if one in spaces and not prover.observed(spaces[one], seed)]
    if unseen:
        return Unseen({roots[name]: name for name in unseen})
    proofs: dict[str, SpaceProof] = {}
    for name, space in prover.model.spec.hidden.items():
        if name not in roots:
            continue
        report(f"proving {name}: {space.group.name}({space.group.size})")
        proof = prover.prove(space, seed)
        if not proof.exact:
            return Refused(roots[name], name, proof.change)
        proofs[name] = proof
    together = max([prover.all_at_once(seed), *prover.while_tied(seed).values()])
    if together > EXACT:
        raise UnsupportedModel(
            f"{spec.architecture}: every space alone is exact, all together change the outputs by"
            f" {together:.0e}: no table"
        )
    return TableProof(proofs, together, prover.read_means())


def prove_table(spec: Spec, module: nn.Module, example_inputs: Any, *, seed: int = 0) -> Derivation:
    """Prove a table that somebody wrote; an error names the first space that is no symmetry."""
    _check_beside(spec)
    module = own_copy(module)
    perturb_parameters(module, seed)
    inputs = named_inputs(example_inputs)
    both = (inputs, other_inputs(inputs, seed + 1))
    runner = Runner(module, both, state=train_buffers(module, both, seed))
    if spec.untied:  # the groups in question
        spaces = {name: spec.spaces.get(name, one) for name, one in spec.untied.spaces.items()}
        spec = replace(spec, untied=replace(spec.untied, spaces=spaces))
    prover = Prover(model_of(spec, module, runner), runner)
    hidden = prover.model.spec.hidden.values()
    changes = {space.name: prover.exact(space, seed) for space in hidden}
    changes |= prover.while_tied(seed)
    changes |= {"folding the gains": prover.folding, "all spaces": prover.all_at_once(seed)}
    if wrong := [name for name, change in changes.items() if not change <= EXACT]:
        raise SymmetryError(
            f"{spec.architecture}: {wrong[0]} changes the outputs by {changes[wrong[0]]:.0e}:"
            " this table is wrong"
        )
    proofs = tuple(prover.prove(space, seed) for space in hidden)
    return Derivation(spec, proofs, (), changes["all spaces"], (), runner)


def _check_beside(spec: Spec) -> None:
    """Refuse a tensor with an element for each head whose heads are not beside it."""
    for tensor, pieces in spec.pieces.items():
        for piece in pieces:
            spaces = {atom.space for atom in piece.atoms}
            for name in spaces:
                if (per := spec.spaces[name].per) and per not in spaces:
                    raise SymmetryError(
                        f"{tensor}: {name} has one element for each index of {per}, which is not"
                        " beside it: this table is wrong"
                    )


def _rotating(spec: Spec, roots: Mapping[str, int], change: float) -> Refused:
    """The space to blame if folding the gains changes the outputs."""
    for name in spec.hidden:
        if spec.rotates(name) and name in roots:
            return Refused(roots[name], name, change)
    raise UnsupportedModel(
        f"{spec.architecture}: preparing the module changes its outputs by {change:.0e}: no table"
    )


def _derivation(
    proved: _Proved, notes: Iterable[str], runner: Runner, unused: Iterable[str]
) -> Derivation:
    unsure = [
        f"{proof.space}: not sure whether {one.group} is a symmetry as well"
        f" (outputs change by {one.change:.0e})"
        for proof in proved.proofs.values()
        for one in proof.unsure
    ]
    return Derivation(
        proved.spec,
        tuple(proved.proofs.values()),
        (*notes, *proved.dropped, *unsure),
        proved.together,
        tuple(unused),
        runner,
    )


__all__ = ["Derivation", "Iterator", "derive", "listing"]

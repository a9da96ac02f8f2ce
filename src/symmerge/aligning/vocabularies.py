"""Align models with different vocabularies: rows are matched by their tokens.

B is converted to A's vocabulary, aligned by the shared rows, and filled with A's rows for tokens
that only A has. A merge then has A's tokenizer. Rows that only B has are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from symmerge.aligning.aligned import Aligned, solve_pair
from symmerge.aligning.tokens import VOCABULARY, SharedTokens, match_tokens, verify_shared
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights
from symmerge.errors import FunctionChanged, MismatchError, SymmetryError
from symmerge.evaluation.tasks.preprocessing import max_length
from symmerge.matching.recipes import Recipe, Solver
from symmerge.matching.resume import ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import apply
from symmerge.models.distances import distance
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.models.tables import check_same_table
from symmerge.symmetry.spec import Spec, listing
from symmerge.verification.verdict import describe


def read_alike(models: Sequence[Model], shared_tokens: bool) -> list[Model]:
    """The models with one tokenizer: with `shared_tokens`, B is converted to A's vocabulary."""
    if not shared_tokens:
        return list(models)
    if len(models) > 2:
        raise MismatchError(
            f"--shared-tokens needs two models, not {len(models)}: merge two at a time"
        )
    return [models[0], respell(models[1], models[0])]


def respell(b: Model, a: Model, shared: SharedTokens | None = None) -> Model:
    """B in A's vocabulary, with A's tokenizer. Rows of tokens that only A has are zero. Lazy.

    Logits of shared tokens are B's (`verify_shared`). Probabilities are not: until `fill`, the
    softmax also runs over zero rows. Positions must not depend on the id of the pad token.
    """
    shared = shared or match_tokens(a, b)
    if shared.same:
        return b
    spec = replace(b.spec, spaces={**b.spec.spaces, VOCABULARY: a.spec.spaces[VOCABULARY]})
    axes = _axes(b.spec)
    rows = {
        name: partial(_respelled, b.weights, name, axes.get(name), shared) for name in b.weights
    }
    added = {name: (spec.shapes[name], b.weights.dtype(name)) for name in b.weights}
    # A's folder and files: the tokenizer now comes from there.
    respelled = b.derive(
        DerivedWeights(MemoryWeights({}), rows, added=added),
        step=HistoryStep("respell", _describe(a, shared)),
        config=_with_tokens_of(a, b),
        spec=spec,
        path=a.path,
        files=a.files,
    )
    if max_length(b) != max_length(respelled):
        pads = [model.config.get("pad_token_id") for model in (a, b)]
        raise MismatchError(
            f"{b.where} cannot be written in the vocabulary of {a.where}: its positions are counted"
            f" from the id of the pad token, which is {pads[1]} in one and {pads[0]} in the other;"
            " give models whose pad tokens have the same id"
        )
    return respelled


def _describe(a: Model, shared: SharedTokens) -> str:
    by_role = shared.by_role
    roles = f" ({len(by_role)} by role: {listing(by_role)})" if by_role else ""
    return (
        f"written in the vocabulary of {a.where}: {shared.tokens} tokens are shared{roles};"
        f" {shared.dropped} that only this model knew are dropped"
    )


def _with_tokens_of(a: Model, b: Model) -> dict[str, object]:
    """B's config with A's vocabulary size and token ids."""
    own = {key: value for key, value in b.config.items() if not _of_vocabulary(key)}
    return own | {key: value for key, value in a.config.items() if _of_vocabulary(key)}


def _of_vocabulary(key: str) -> bool:
    """Whether a config key is the vocabulary size or a token id."""
    return key == "vocab_size" or key.endswith("token_id")


def _axes(spec: Spec) -> dict[str, int]:
    """Tensor -> its vocabulary axis: embeddings, heads, output biases."""
    return {
        met.piece.tensor: spec.axis_of(met.piece.tensor, VOCABULARY, met.role)
        for met in spec.occurrences(VOCABULARY)
    }


def _respelled(weights: Weights, name: str, axis: int | None, shared: SharedTokens) -> Tensor:
    tensor = weights[name]
    if axis is None:
        return tensor
    rows = tensor.index_select(axis, shared.rows.clamp_min(0).to(tensor.device))
    return torch.where(_along(shared.known, axis, rows), rows, torch.zeros_like(rows))


def _along(mask: Bool[Tensor, " vocabulary"], axis: int, tensor: Tensor) -> Tensor:
    return mask.to(tensor.device).reshape([-1 if dim == axis else 1 for dim in range(tensor.ndim)])


def fill(aligned: Model, reference: Model, shared: SharedTokens) -> Model:
    """B, respelled and aligned, with A's rows for tokens that only A has: a merge keeps them.

    `reference` is A in the same coordinates. Lazy.
    """
    if shared.same:
        return aligned
    check_same_table([reference, aligned])
    filled = {
        name: partial(_filled, aligned.weights, reference.weights, name, axis, shared)
        for name, axis in _axes(aligned.spec).items()
    }
    unnamed = f", and {shared.unnamed} without a token," if shared.unnamed else ""
    what = f"the rows of {shared.filled} tokens that only {reference.where} knows{unnamed}"
    step = HistoryStep("fill", f"{what} are its own")
    moved = aligned.moved and replace(aligned.moved, known={VOCABULARY: shared.known})
    return aligned.derive(DerivedWeights(aligned.weights, filled), step=step, moved=moved)


def _filled(
    weights: Weights, reference: Weights, name: str, axis: int, shared: SharedTokens
) -> Tensor:
    tensor = weights[name]
    return torch.where(_along(shared.known, axis, tensor), tensor, reference[name].to(tensor))


def align_vocabularies(
    a: Model,
    b: Model,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Aligned:
    """Align B in A's vocabulary; the result is filled, and verified on shared tokens.

    Weight matching on shared rows comes first: until B is filled, it has no logits for tokens that
    only A has, so no text can be sampled from it. Solvers that need text, data or gradients start
    from there. Data is tokenized with A's tokenizer (`read_alike`).
    """
    shared, how = match_tokens(a, b), {"progress": progress, "resume_file": resume_file}
    if shared.same:
        return solve_pair(a, b, recipe, progress=progress, resume_file=resume_file)
    if recipe.non_symmetric:
        raise SymmetryError(
            f"this recipe is not a symmetry ({recipe.about}): its result is not the function of"
            f" {b.where}; choose another"
        )
    solver = _without_unshared(recipe.matching, shared)
    weights_alone = isinstance(solver, WeightMatching) and not solver.generate_text
    first = solver if weights_alone else _by_weights(solver, shared)
    start_file = resume_file if weights_alone else None
    start = solve_pair(
        a,
        respell(b, a, shared),
        replace(recipe, matching=first),
        progress=progress,
        resume_file=start_file,
    )
    reference, solution = start.reference, start.solution
    aligned = fill(start.aligned, reference, shared).cached()
    if not weights_alone and not solution.interrupted:
        further = solver.solve(reference, aligned, **how)
        aligned = fill(apply(further.alignment, aligned), reference, shared).cached()
        solution = replace(further, alignment=further.alignment.compose(solution.alignment))
    verdict = verify_shared(b, aligned, shared)
    if not verdict.same:
        raise FunctionChanged(
            f"in the vocabulary of {a.where}, {b.where} does not compute what it did"
            f" ({describe(verdict)}): please report it"
        )
    after = distance(reference, aligned)
    return Aligned(reference, aligned, solution, recipe, start.before, after, (a, b), shared)


def _by_weights(solver: Solver, shared: SharedTokens) -> WeightMatching:
    return WeightMatching(
        generate_text=False, token_counts=shared.counts, seed=solver.seed, device=solver.device
    )


def _without_unshared(solver: Solver, shared: SharedTokens) -> Solver:
    """The solver, ignoring rows that only A has; learned matching uses predictions instead."""
    if not isinstance(solver, Matching):
        return solver
    counts = 1 if solver.token_counts is None else solver.token_counts
    return replace(solver, token_counts=shared.counts * counts)

"""Models with different vocabularies: rows are matched by token, the rest is kept from the model that knows them.

B is written in A's vocabulary, aligned by the rows that both know, and given A's rows for the tokens that only A knows. What is merged then has A's
tokenizer. Rows of tokens that only B knows have no place in it: they are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from symmerge.aligning.pair import Aligned, align, recipe_for
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights
from symmerge.errors import MismatchError, SymmergeWarning, SymmetryError
from symmerge.evaluation.tasks.preprocessing import check_tokens, max_length, tokenizer_of
from symmerge.matching.recipes import Recipe, Solver
from symmerge.matching.resume import ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import apply
from symmerge.models.distances import distance
from symmerge.models.model import Model, Progress
from symmerge.models.tables import check_same_table
from symmerge.symmetry.spec import Spec, listing
from symmerge.verification.inputs import example_inputs
from symmerge.verification.modules import logits_of
from symmerge.verification.verdict import Verdict, gate, judge

VOCABULARY = "vocabulary"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARKERS = {"byte-level": "Ġ", "SentencePiece": "▁", "WordPiece": "##"}
"""How each kind of tokenizer marks where words begin, or go on: "Ġthe", "▁the" and "the" are one word, "the" alone is not the same everywhere."""
MARKED = 0.01  # of the tokens, at least: single ones turn up in every vocabulary
FEW, TOO_FEW = 0.5, 0.01  # of A's tokens


@dataclass(frozen=True)
class Shared:
    """Which tokens of A's vocabulary B knows, and in which row.

    `rows` has B's row for each row of A, -1 where B has none; `tokens` are shared, `filled` only A's, `dropped` only B's, `unnamed` rows of A that no
    token names. `by_role` are those with different strings and one role (a pad token). `same` says that nothing has to be rearranged.
    """

    rows: Int[Tensor, " vocabulary"] = field(repr=False, compare=False)
    tokens: int
    filled: int
    dropped: int
    unnamed: int
    by_role: tuple[str, ...] = ()
    same: bool = False

    @property
    def known(self) -> Bool[Tensor, " vocabulary"]:
        """Which of A's rows B knows."""
        return self.rows >= 0


def shared(a: Model, b: Model) -> Shared:
    """Match the tokens of two models by their strings in the vocabulary, and special tokens that are left by their role.

    Preconditions: both have a tokenizer in their folder, of one kind; at least 1 % of A's tokens are shared (below 50 % you are warned).
    """
    for model in (a, b):
        if VOCABULARY not in model.spec.sizes:
            raise MismatchError(
                f"{model.where} reads no tokens: only models with a vocabulary can be matched by it"
            )
    readers = [tokenizer_of(model) for model in (a, b)]
    mine, theirs = (reader.get_vocab() for reader in readers)
    for model, vocabulary in ((a, mine), (b, theirs)):
        check_tokens(model, max(vocabulary.values()))
    _refuse_kinds(a, b, mine, theirs)
    sizes = [model.spec.sizes[VOCABULARY] for model in (a, b)]
    if mine == theirs and sizes[0] == sizes[1]:
        return Shared(torch.arange(sizes[0]), len(mine), 0, 0, 0, same=True)
    pairs = {token: token for token in mine if token in theirs}
    by_role = _by_role(readers[0], readers[1], pairs)
    pairs |= by_role
    rows = torch.full((sizes[0],), -1)
    rows[[mine[token] for token in pairs]] = torch.tensor(
        [theirs[token] for token in pairs.values()], dtype=rows.dtype
    )
    _refuse_few(a, b, len(pairs), len(mine))
    words = tuple(f"{token} / {other}" for token, other in by_role.items())
    return Shared(
        rows,
        len(pairs),
        len(mine) - len(pairs),
        len(theirs) - len(pairs),
        sizes[0] - len(set(mine.values())),
        words,
    )


def _by_role(first: Any, second: Any, pairs: Mapping[str, str]) -> dict[str, str]:
    """Special tokens of one role whose strings neither vocabulary shares; a token with several roles is matched once, by the first."""
    found: dict[str, str] = {}
    for role in ROLES:
        token, other = (reader.special_tokens_map.get(role) for reader in (first, second))
        if (
            token
            and other
            and token not in pairs
            and other not in pairs
            and token not in found
            and other not in found.values()
        ):
            found[token] = other
    return found


def kind_of(vocabulary: Mapping[str, int]) -> str:
    """By the marker most tokens begin with.

    >>> kind_of({"Ġthe": 0, "ing": 1}), kind_of({"the": 0, "##ing": 1}), kind_of({"a": 0, "b": 1})
    ('byte-level', 'WordPiece', 'unmarked')
    """
    begin = {
        kind: sum(token.startswith(marker) for token in vocabulary)
        for kind, marker in MARKERS.items()
    }
    most = max(begin, key=lambda kind: begin[kind])
    return most if begin[most] > MARKED * len(vocabulary) else "unmarked"


def _refuse_kinds(a: Model, b: Model, mine: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    kinds = kind_of(mine), kind_of(theirs)
    if kinds[0] != kinds[1]:
        raise MismatchError(
            f"the tokenizer of {a.where} is {kinds[0]}, that of {b.where} {kinds[1]}: the same string is not the same piece of text in both"
            " (they mark the beginnings of words differently); give models with tokenizers of one kind"
        )


def _refuse_few(a: Model, b: Model, tokens: int, of: int) -> None:
    said = f"{b.where} has {tokens} of the {of} tokens of {a.where}"
    if tokens < TOO_FEW * of:
        raise MismatchError(
            f"{said}: too few to go by (less than {TOO_FEW:.0%}); give models whose tokenizers were made from similar text"
        )
    if tokens < FEW * of:
        warnings.warn(
            f"{said}, less than {FEW:.0%}: the rows of all others will be those of {a.where} alone",
            SymmergeWarning,
            stacklevel=3,
        )


def respell(b: Model, a: Model, found: Shared | None = None) -> Model:
    """B in A's vocabulary: rows of shared tokens where A has them, A's tokenizer, zeros for what only A knows until `fill`. Lazy.

    On shared tokens it computes what B does (`verify_shared`); the softmax also runs over the other tokens, and there it does not. Tokens that only B
    knows are dropped. Preconditions: those of `shared`; positions that do not depend on the pad token, or pad tokens with one id.
    """
    found = found or shared(a, b)
    if found.same:
        return b
    spec = replace(b.spec, spaces={**b.spec.spaces, VOCABULARY: a.spec.spaces[VOCABULARY]})
    weights = DerivedWeights(
        MemoryWeights({}),
        {
            name: partial(_respelled, b.weights, name, _axes(b.spec).get(name), found)
            for name in b.weights
        },
        added={name: (spec.shapes[name], b.weights.dtype(name)) for name in b.weights},
    )
    own = {key: value for key, value in b.config.items() if not _of_vocabulary(key)}
    config = own | {key: value for key, value in a.config.items() if _of_vocabulary(key)}
    roles = f" ({len(found.by_role)} by role: {listing(found.by_role)})" if found.by_role else ""
    what = f"written in the vocabulary of {a.where}: {found.tokens} tokens are shared{roles}; {found.dropped} that only this model knew are dropped"
    # The folder and the files are where its tokenizer now comes from.
    respelled = b.derive(
        weights,
        step={"step": "respell", "what": what},
        config=config,
        spec=spec,
        path=a.path,
        files=a.files,
    )
    if max_length(b) != max_length(respelled):
        pads = [model.config.get("pad_token_id") for model in (a, b)]
        raise MismatchError(
            f"{b.where} cannot be written in the vocabulary of {a.where}: its positions are counted from the id of the pad token, which is {pads[1]}, there"
            f" {pads[0]}; give models whose pad tokens have the same id"
        )
    return respelled


def _of_vocabulary(key: str) -> bool:
    """Keys of a config that speak of tokens by their numbers."""
    return key == "vocab_size" or key.endswith("token_id")


def _axes(spec: Spec) -> dict[str, int]:
    """Every tensor with a row for each token, and which of its axes that is: embeddings, unembeddings, output biases."""
    return {
        met.piece.tensor: spec.axis_of(met.piece.tensor, VOCABULARY, met.role)
        for met in spec.occurrences(VOCABULARY)
    }


def _respelled(weights: Weights, name: str, axis: int | None, found: Shared) -> Tensor:
    tensor = weights[name]
    if axis is None:
        return tensor
    rows = tensor.index_select(axis, found.rows.clamp_min(0).to(tensor.device))
    return torch.where(_along(found.known, axis, rows), rows, torch.zeros_like(rows))


def _along(mask: Bool[Tensor, " vocabulary"], axis: int, tensor: Tensor) -> Tensor:
    return mask.to(tensor.device).reshape([-1 if dim == axis else 1 for dim in range(tensor.ndim)])


def counts(found: Shared) -> Float[Tensor, " vocabulary"]:
    """For `token_counts` of a matching: rows that only A knows are no evidence."""
    return found.known.float()


def fill(aligned: Model, reference: Model, found: Shared) -> Model:
    """B, respelled and aligned, with A's own rows (`reference`: A in the same coordinates) for what only A knows: a merge keeps them as they are. Lazy."""
    if found.same:
        return aligned
    check_same_table([reference, aligned])
    computed = {
        name: partial(_filled, aligned.weights, reference.weights, name, axis, found)
        for name, axis in _axes(aligned.spec).items()
    }
    unnamed = f", and {found.unnamed} that no token names," if found.unnamed else ""
    what = f"the rows of {found.filled} tokens that only {reference.where} knows{unnamed} are filled with its own"
    return aligned.derive(
        DerivedWeights(aligned.weights, computed), step={"step": "fill", "what": what}
    )


def _filled(weights: Weights, reference: Weights, name: str, axis: int, found: Shared) -> Tensor:
    tensor = weights[name]
    return torch.where(_along(found.known, axis, tensor), tensor, reference[name].to(tensor))


def verify_shared(
    b: Model,
    respelled: Model,
    found: Shared,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Whether B and B in A's vocabulary give the same logits to shared tokens, after shared tokens.

    Other tokens cannot be compared, so the softmax is taken over the shared ones alone; other heads (a classifier) are compared whole.
    Every shared row of the output counts, and of the input those of the tokens that are drawn.
    """
    tokens = found.known.nonzero().flatten()
    pads = torch.isin(tokens, _pad(respelled)) | torch.isin(
        found.rows[tokens], _pad(b)
    )  # some models count positions by them
    readable = tokens[~pads] if not pads.all() else tokens
    inputs = readable[example_inputs(respelled, seed)["input_ids"] % len(readable)]
    first = _at(
        b,
        logits_of(b, {"input_ids": found.rows[inputs]}, dtype=dtype, progress=progress),
        found.rows[tokens],
    )
    second = _at(
        respelled,
        logits_of(respelled, {"input_ids": inputs}, dtype=dtype, progress=progress),
        tokens,
    )
    about = f"{'x'.join(str(n) for n in inputs.shape)} random shared tokens, seed {seed}; logits of the {len(tokens)} shared tokens"
    return judge(b, respelled, first, second, dtype=dtype, tolerance=tolerance, inputs=about)


def _pad(model: Model) -> Tensor:
    padding = model.config.get("pad_token_id")
    return torch.tensor([] if padding is None else [padding], dtype=torch.long)


def _at(model: Model, logits: list[Tensor], tokens: Tensor) -> list[Tensor]:
    return [
        found[..., tokens] if found.shape[-1] == model.spec.sizes[VOCABULARY] else found
        for found in logits
    ]


def align_spelled(
    a: Model,
    b: Model,
    matching: Solver | Recipe | None = None,
    *,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> tuple[Aligned, Shared]:
    """`align` for models with different vocabularies: A, and B in A's vocabulary and coordinates, filled and verified on shared tokens.

    With one vocabulary it is `align`. Else the weights alone are matched first, by shared rows: before it is filled, B has no logits for tokens that
    only A knows, and could write no text. A matching that looks at text, data or gradients goes on from there, with a B that knows every token; data is
    read with A's tokenizer: `make_task("clm", data, [a, respell(b, a)])`.
    """
    found = shared(a, b)
    if found.same:
        return align(a, b, matching, progress=progress, resume_file=resume_file), found
    chosen = recipe_for(matching)
    if chosen.non_symmetric:
        raise SymmetryError(
            f"this recipe is no symmetry ({chosen.about}): what it gives is not the function of {b.where}; choose another"
        )
    solver = _counted(chosen.matching, found)
    weights_alone = isinstance(solver, WeightMatching) and not solver.generate_text
    first = (
        solver
        if weights_alone
        else WeightMatching(
            generate_text=False, token_counts=counts(found), seed=solver.seed, device=solver.device
        )
    )
    start = align(
        a,
        respell(b, a, found),
        replace(chosen, matching=first),
        progress=progress,
        resume_file=resume_file if weights_alone else None,
    )
    aligned, solution = fill(start.aligned, start.reference, found).cached(), start.solution
    if not weights_alone and not solution.interrupted:
        further = solver.solve(start.reference, aligned, progress=progress, resume_file=resume_file)
        aligned = fill(apply(further.alignment, aligned), start.reference, found).cached()
        solution = replace(further, alignment=further.alignment.compose(solution.alignment))
    gate(b, compare=partial(verify_shared, found=found))(aligned)
    return replace(
        start,
        aligned=aligned,
        solution=solution,
        recipe=chosen,
        after=distance(start.reference, aligned),
    ), found


def _counted(solver: Solver, found: Shared) -> Solver:
    """The solver with no evidence from rows that only A knows; those that learn go by predictions, not by rows."""
    if not isinstance(solver, Matching):
        return solver
    given = 1 if solver.token_counts is None else solver.token_counts
    return replace(solver, token_counts=counts(found) * given)

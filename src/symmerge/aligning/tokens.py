"""Match the tokens of two vocabularies, and verify a model converted to the other one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks.preprocessing import check_tokens, tokenizer_of
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.verification.inputs import Sample, samples
from symmerge.verification.verdict import Verdict, compare

VOCABULARY = "vocabulary"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MARKERS = {"byte-level": "Ġ", "SentencePiece": "▁", "WordPiece": "##"}
"""How each kind of tokenizer marks where a word begins or continues: "Ġthe", "▁the" and "the" are
one word, but the string "the" is not the same piece of text in all of them."""
MIN_MARKED = 0.01  # share of tokens; every vocabulary has a few tokens with a marker by chance
FEW, TOO_FEW = 0.5, 0.01  # shared, of A's tokens


@dataclass(frozen=True)
class SharedTokens:
    """Which tokens of A's vocabulary B has, and in which row.

    `rows` has B's row for each row of A, -1 where B has none. Counts: `tokens` are shared, `filled`
    are only A's, `dropped` only B's, `unnamed` are rows of A without a token. `by_role` lists
    special tokens with different strings and one role (a pad token). `same`: identical rows.
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
        """Mask of A's rows that B has."""
        return self.rows >= 0

    @property
    def counts(self) -> Float[Tensor, " vocabulary"]:
        """For a solver's `token_counts`: rows that only A has carry no evidence."""
        return self.known.float()


def match_tokens(a: Model, b: Model) -> SharedTokens:
    """Match two vocabularies by the tokens' strings, then special tokens by their role.

    Both models need a tokenizer in their folder, of one kind. At least 1 % of A's tokens must be
    shared; below 50 % there is a warning.
    """
    for model in (a, b):
        if VOCABULARY not in model.spec.sizes:
            raise MismatchError(
                f"{model.where} reads no tokens: only models with a vocabulary can be matched by it"
            )
    tokenizers = [tokenizer_of(model) for model in (a, b)]
    mine, theirs = (tokenizer.get_vocab() for tokenizer in tokenizers)
    for model, vocabulary in ((a, mine), (b, theirs)):
        check_tokens(model, max(vocabulary.values()))
    _refuse_kinds(a, b, mine, theirs)
    sizes = [model.spec.sizes[VOCABULARY] for model in (a, b)]
    if mine == theirs and sizes[0] == sizes[1]:
        return SharedTokens(torch.arange(sizes[0]), len(mine), 0, 0, 0, same=True)
    pairs = {token: token for token in mine if token in theirs}
    by_role = _match_roles(tokenizers[0], tokenizers[1], pairs)
    pairs |= by_role
    rows = torch.full((sizes[0],), -1)
    rows[[mine[token] for token in pairs]] = torch.tensor(
        [theirs[token] for token in pairs.values()], dtype=rows.dtype
    )
    _refuse_few(a, b, len(pairs), len(mine))
    return SharedTokens(
        rows,
        tokens=len(pairs),
        filled=len(mine) - len(pairs),
        dropped=len(theirs) - len(pairs),
        unnamed=sizes[0] - len(set(mine.values())),
        by_role=tuple(f"{token} / {other}" for token, other in by_role.items()),
    )


def _match_roles(first: Any, second: Any, pairs: Mapping[str, str]) -> dict[str, str]:
    """Special tokens with one role and different strings; the first role of a token counts."""
    by_role: dict[str, str] = {}
    for role in ROLES:
        token, other = (tokenizer.special_tokens_map.get(role) for tokenizer in (first, second))
        matched = {*pairs, *by_role, *by_role.values()}
        if token and other and not {token, other} & matched:
            by_role[token] = other
    return by_role


def kind_of(vocabulary: Mapping[str, int]) -> str:
    """The kind of a tokenizer, by the most common token marker.

    >>> kind_of({"Ġthe": 0, "ing": 1}), kind_of({"the": 0, "##ing": 1}), kind_of({"a": 0, "b": 1})
    ('byte-level', 'WordPiece', 'unmarked')
    """
    counts = {
        kind: sum(token.startswith(marker) for token in vocabulary)
        for kind, marker in MARKERS.items()
    }
    most = max(counts, key=lambda kind: counts[kind])
    return most if counts[most] > MIN_MARKED * len(vocabulary) else "unmarked"


def _refuse_kinds(a: Model, b: Model, mine: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    kinds = kind_of(mine), kind_of(theirs)
    if kinds[0] != kinds[1]:
        raise MismatchError(
            f"the tokenizer of {a.where} is {kinds[0]}, that of {b.where} {kinds[1]}: the same"
            " string is not the same piece of text in both (they mark the start of words"
            " differently); give models with the same kind of tokenizer"
        )


def _refuse_few(a: Model, b: Model, tokens: int, of: int) -> None:
    shares = f"{b.where} has {tokens} of the {of} tokens of {a.where}"
    if tokens < TOO_FEW * of:
        raise MismatchError(
            f"{shares}: too few to match by (less than {TOO_FEW:.0%});"
            " give models whose tokenizers were made from similar text"
        )
    if tokens < FEW * of:
        warnings.warn(
            f"{shares}, less than {FEW:.0%}: all other rows will be those of {a.where} alone",
            SymmergeWarning,
            stacklevel=3,
        )


def verify_shared(
    b: Model,
    respelled: Model,
    shared: SharedTokens,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Verify B in A's vocabulary: the logits of shared tokens, on inputs of shared tokens.

    Other tokens cannot be compared, so the softmax runs over the shared ones alone. Other heads
    (a classifier) are compared in full. Every shared row is reached.
    """
    pairs = [_spelled(sample, b, respelled, shared) for sample in samples(respelled, seed)]
    verdict = compare(
        b.cached(),
        respelled.cached(),
        pairs,
        dtype=dtype,
        tolerance=tolerance,
        seed=seed,
        ignored={"vocab_size"},
        progress=progress,
    )
    return replace(verdict, inputs=f"{verdict.inputs}; logits of the {shared.tokens} shared tokens")


def _spelled(
    sample: Sample, b: Model, respelled: Model, shared: SharedTokens
) -> tuple[Sample, Sample]:
    """A sample of shared tokens, in B's spelling and in A's."""
    tokens = shared.known.nonzero().flatten()
    # Some models compute position ids from the pad token.
    pads = torch.isin(tokens, _pad(respelled)) | torch.isin(shared.rows[tokens], _pad(b))
    readable = tokens[~pads] if not pads.all() else tokens
    ids, outputs = sample.inputs["input_ids"], tokens
    ids = readable[:, None] if ids.shape[1] == 1 else readable[ids % len(readable)]
    if sample.outputs is not None:
        outputs = tokens[sample.outputs % len(tokens)]
    return (
        _with_tokens(sample, shared.rows[ids], shared.rows[outputs]),
        _with_tokens(sample, ids, outputs),
    )


def _with_tokens(sample: Sample, ids: Tensor, outputs: Tensor) -> Sample:
    return replace(sample, inputs={**sample.inputs, "input_ids": ids}, outputs=outputs)


def _pad(model: Model) -> Tensor:
    padding = model.config.get("pad_token_id")
    return torch.tensor([] if padding is None else [padding], dtype=torch.long)

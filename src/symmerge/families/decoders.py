"""What decoders share: the heads of their classes, and how a family of them is put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    check_last_token,
    with_bare,
    with_names,
)
from symmerge.families.parts import Part
from symmerge.families.spaces import (
    attention,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Group
from symmerge.symmetry.spec import Space

CLASSIFIER, TOKENS = "ForSequenceClassification", "ForTokenClassification"
ANSWERS = "ForQuestionAnswering"
TASKS = {
    CLASSIFIER: ("text-classification", "score.weight"),
    TOKENS: ("token-classification", "classifier.weight"),
    ANSWERS: ("question-answering", "qa_outputs.weight"),
}
DOUBLE = "DoubleHeadsModel"  # words, and a score for each text of several
_HEADS = {**TASKS, DOUBLE: ("causal-lm", "multiple_choice_head.summary.weight")}
# Classes of the older names, whose stream is in `transformer.`
GPT_HEADS = """
lm_head.weight     vocabulary   residual*  if untied
score.weight       label        residual*  if sequence
classifier.weight  label        residual*  if tokens
classifier.bias    label                   if tokens
qa_outputs.weight  answer       residual*  if answers
qa_outputs.bias    answer                  if answers
"""


def gpt_last_norm(norm: str) -> str:
    """The lines of the last norm before whichever of `GPT_HEADS` is there."""
    heads = {"lm_head": "lm", "score": "sequence", "classifier": "tokens", "qa_outputs": "answers"}
    return "\n".join(f"{norm} -> {head} if {flag}" for head, flag in heads.items()) + "\n"


def head_flags(config: Any) -> dict[str, bool]:
    """Which head the class has: words, a label of the sequence or of each token, or answers."""
    architecture = config.architectures[0]
    if architecture.endswith(CLASSIFIER):
        check_last_token(config)
    words = not architecture.endswith((*TASKS,))
    return {
        "lm": words,
        "classifier": architecture.endswith((CLASSIFIER, TOKENS)),
        "sequence": architecture.endswith(CLASSIFIER),
        "tokens": architecture.endswith(TOKENS),
        "answers": architecture.endswith(ANSWERS),
        "untied": words and not config.tie_word_embeddings,
    }


def gpt_spaces(
    config: Any,
    *,
    stream: Group,
    ff: Group,
    qk: Group | None = None,
    slopes: bool = False,
    heads: int | None = None,
    **shown: int,
) -> tuple[Space, ...]:
    """The spaces of a decoder of the older kind; `heads` are those with keys of their own.

    With `slopes` (ALiBi) heads keep their places: each has a slope of its own, which no tensor has.
    """
    width, every = config.hidden_size, config.num_attention_heads
    groups = heads or every
    basis = GeneralLinear(width // every)
    return (
        *visible(vocabulary=config.vocab_size, label=config.num_labels, answer=2, **shown),
        Space("residual", stream),
        *attention(heads=groups, queries=every // groups, qk=qk or basis, vo=basis, ordered=slopes),
        Space("ff.{i}", ff),
    )


def decoder(
    name: str,
    stems: Iterable[str],
    table: str,
    norms: str,
    read: Callable[[Any, Collection[str]], Reading],
    *,
    types: tuple[str, ...] = (),
    labels: Iterable[str] = (),
    renamed: Iterable[str] = (),
    bare: Iterable[str] = (),
    base: Literal["model.", "transformer.", "gpt_neox."] = "model.",
    embedding: str = "embed_tokens",
    renames: tuple[tuple[str, str], ...] = (),
    buffers: tuple[str, ...] = (r"rotary_emb\.inv_freq$",),
    parts: tuple[Part, ...] = (),
) -> Family:
    """A family of decoders: stems of the classes with words, and which other classes there are.

    `labels` are classes with another head; those in `renamed` call their stream `transformer`, as
    they did before it was called `model`. `bare` are classes without a head.
    """
    words = Head("causal-lm", f"{base}{embedding}.weight")
    family = Family(
        name=name,
        model_types=types or (name,),
        architectures={
            **_heads(labels),
            **{
                stem if stem.endswith("LMHeadModel") else f"{stem}ForCausalLM": words
                for stem in stems
            },
        },
        table=table,
        norms=norms,
        read=read,
        ties={"lm_head.weight": words.marker},
        renames=renames,
        buffers=buffers,
        parts=parts,
    )
    if others := _heads(renamed):
        family = with_names(family, re.escape(base), "transformer.", others)
    bare = tuple(bare)
    return with_bare(family, base, "text-features", bare) if bare else family


def _heads(classes: Iterable[str]) -> dict[str, Head]:
    """The head of each class, by the end of its name."""
    return {
        name: Head(*task) for name in classes for end, task in _HEADS.items() if name.endswith(end)
    }

"""What encoders of text share: their classes, by the ends of the names, and the lines of heads."""

from __future__ import annotations

from typing import Any

from symmerge.families.base import Head

MASKED, CAUSAL, SEQUENCE = "ForMaskedLM", "ForCausalLM", "ForSequenceClassification"
OLD_CAUSAL, NEXT = "LMHeadModel", "ForNextSentencePrediction"
TOKENS, ANSWERS = "ForTokenClassification", "ForQuestionAnswering"
TASKS = {
    MASKED: "masked-lm",
    **dict.fromkeys((CAUSAL, OLD_CAUSAL), "causal-lm"),
    NEXT: "next-sentence-prediction",
    SEQUENCE: "text-classification",
    TOKENS: "token-classification",
    ANSWERS: "question-answering",
}
"""End of a class's name -> its task."""
MARKERS = {TOKENS: "classifier.weight", ANSWERS: "qa_outputs.weight"}
"""Of classes that are alike in most families: a tensor that only they have."""
FLAGS = {
    "mlm": (MASKED, CAUSAL, OLD_CAUSAL),
    "classifier": SEQUENCE,
    "tokens": TOKENS,
    "answers": ANSWERS,
}
"""Flag of a table's lines -> the ends of the classes that have them."""


def heads(stem: str, **markers: str) -> dict[str, Head]:
    """The classes of an encoder: each has a tensor of its own, here or in `MARKERS`."""
    return {
        f"{stem}{end}": Head(TASKS[end], marker) for end, marker in {**markers, **MARKERS}.items()
    }


def head_flags(architecture: str) -> dict[str, bool]:
    """Which head a class has."""
    return {flag: architecture.endswith(ends) for flag, ends in FLAGS.items()}


def task_of(config: Any) -> str | None:
    """Of a causal class that is not a decoder: it sees every token, as a masked one does."""
    causal = config.architectures[0].endswith((CAUSAL, OLD_CAUSAL))
    return TASKS[MASKED] if causal and not config.is_decoder else None


# While the decoder is tied to the embedding, the transform's output is the residual space itself.
WORDS = """
cls.predictions.transform.dense.weight      transform    residual*   if mlm
cls.predictions.transform.dense.bias        transform                if mlm
cls.predictions.transform.LayerNorm.weight  transform~               if mlm
cls.predictions.transform.LayerNorm.bias    transform                if mlm
cls.predictions.decoder.weight              vocabulary   transform*  if untied
cls.predictions.bias                        vocabulary               if mlm
cls.predictions.decoder.bias                vocabulary               if untied
"""
ROBERTA_WORDS = """
lm_head.dense.weight        transform    residual*    if mlm
lm_head.dense.bias          transform                 if mlm
lm_head.layer_norm.weight   transform~                if mlm
lm_head.layer_norm.bias     transform                 if mlm
lm_head.decoder.weight      vocabulary   transform*   if untied
lm_head.bias                vocabulary                if mlm
lm_head.decoder.bias        vocabulary                if untied
"""

# Heads that label every token or find answers, after one that labels the sequence: by its pooled
# output, or by its first token.
PLACES = """
classifier.weight  label   residual*  if tokens
classifier.bias    label              if tokens
qa_outputs.weight  answer  residual*  if answers
qa_outputs.bias    answer             if answers
"""
POOLED_HEADS = (
    """
classifier.weight  label  pooled*  if classifier
classifier.bias    label           if classifier
"""
    + PLACES
)
FIRST_HEADS = (
    """
classifier.dense.weight     classifier  residual*    if classifier
classifier.dense.bias       classifier               if classifier
classifier.out_proj.weight  label       classifier*  if classifier
classifier.out_proj.bias    label                    if classifier
"""
    + PLACES
)

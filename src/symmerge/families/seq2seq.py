"""What encoder-decoders share: a place for each attention and each stack, and their spaces.

A place is `encoder.{i}`, `decoder.{j}` or `cross.{j}`, where a decoder reads the encoder's output.
Their streams are `residual.encoder` and `residual.decoder`; where they are one, `residual`.
"""

from __future__ import annotations

from typing import Any

from symmerge.families.base import Head
from symmerge.families.spaces import visible
from symmerge.symmetry.groups import Group, Permutation, SignedPermutation
from symmerge.symmetry.spec import Space

GENERATION = "seq2seq-lm"
ENCODER, DECODER, CROSS = "encoder.{i}", "decoder.{j}", "cross.{j}"
STREAM, ENCODED = "residual.decoder", "residual.encoder"
# A decoder by itself still reads an encoder's output, whose coordinates are then not its own.
ALONE, FOREIGN = "ForCausalLM", "encoded"

# BART's names, which others have as well.
_ATTENTION = """
{layer}.{kind}.q_proj.weight       (head.{at} qk.{at})    {stream}*
{layer}.{kind}.q_proj.bias         (head.{at} qk.{at})
{layer}.{kind}.k_proj.weight       (head.{at} qk.{at}*)   {source}*
{layer}.{kind}.k_proj.bias         (head.{at} qk.{at}*)               if key_bias
{layer}.{kind}.v_proj.weight       (head.{at} vo.{at})    {source}*
{layer}.{kind}.v_proj.bias         (head.{at} vo.{at})
{layer}.{kind}.out_proj.weight     {stream}    (head.{at} vo.{at}*)
{layer}.{kind}.out_proj.bias       {stream}
{layer}.{kind}_layer_norm.weight   {stream}~
{layer}.{kind}_layer_norm.bias     {stream}
"""
_UNITS = """
{layer}.fc1.weight                 ff.{at}     {stream}*
{layer}.fc1.bias                   ff.{at}
{layer}.fc2.weight                 {stream}    ff.{at}*
{layer}.fc2.bias                   {stream}
{layer}.final_layer_norm.weight    {stream}~
{layer}.final_layer_norm.bias      {stream}
"""
# Heads that T5 and BART have alike: a label of the whole text, read off its end, and answers.
_HEADS = """
qa_outputs.weight                   answer       {stream}*     if answers
qa_outputs.bias                     answer                     if answers
classification_head.dense.weight    classifier   {stream}*     if classifier
classification_head.dense.bias      classifier                 if classifier
classification_head.out_proj.weight label        classifier*   if classifier
classification_head.out_proj.bias   label                      if classifier
"""
LABEL = Head("text-classification", "classification_head.dense.weight")
ANSWERS = Head("question-answering", "qa_outputs.weight")


def _filled(lines: str, **names: str) -> str:
    for name, value in names.items():
        lines = lines.replace(f"{{{name}}}", value)
    return lines


def attention_lines(layer: str, kind: str, at: str, stream: str, source: str) -> str:
    """An attention that writes to a stream, and whose keys and values read a source."""
    return _filled(_ATTENTION, layer=layer, kind=kind, at=at, stream=stream, source=source)


def unit_lines(layer: str, at: str, stream: str) -> str:
    """The hidden units of a layer."""
    return _filled(_UNITS, layer=layer, at=at, stream=stream)


def head_lines(stream: str) -> str:
    """The heads of classes by label and of answers, which read the decoder's stream."""
    return _filled(_HEADS, stream=stream)


def head_flags(config: Any) -> dict[str, bool]:
    """Which head the class has: words, a label of the whole text, or answers."""
    architecture = config.architectures[0]
    return {
        "lm": architecture.endswith(("ForConditionalGeneration", "ForCausalLM")),
        "answers": architecture.endswith("ForQuestionAnswering"),
        "classifier": architecture.endswith("ForSequenceClassification"),
    }


def head_spaces(config: Any) -> tuple[Space, ...]:
    """What can be seen of the heads, and the hidden layer of a classifier."""
    return (
        *visible(label=config.num_labels, answer=2),
        Space("classifier", SignedPermutation(config.d_model)),
    )


def end_token(config: Any) -> int | None:
    """Where a class by label reads its text."""
    return config.eos_token_id if head_flags(config)["classifier"] else None


ENCODER_LAYER, DECODER_LAYER = "model.encoder.layers.{i}", "model.decoder.layers.{j}"
LAYERS = (
    attention_lines(ENCODER_LAYER, "self_attn", ENCODER, ENCODED, ENCODED)
    + unit_lines(ENCODER_LAYER, ENCODER, ENCODED)
    + attention_lines(DECODER_LAYER, "self_attn", DECODER, STREAM, STREAM)
    + attention_lines(DECODER_LAYER, "encoder_attn", CROSS, STREAM, ENCODED)
    + unit_lines(DECODER_LAYER, DECODER, STREAM)
)
"""The layers of both stacks, by BART's names."""


def attention_at(place: str, heads: int, basis: Group, order: str = "") -> tuple[Space, ...]:
    """The spaces of one attention; its heads are those of `order` where layers share theirs."""
    head = f"head.{order or place}"
    return (
        Space(head, Permutation(heads)),
        Space(f"qk.{place}", basis, per=head, translation="drops"),
        Space(f"vo.{place}", basis, per=head, translation="passes"),
    )

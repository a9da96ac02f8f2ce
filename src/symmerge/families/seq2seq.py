"""What encoder-decoders share: a place for each attention and each stack, and their spaces.

A place is `encoder.{i}`, `decoder.{j}` or `cross.{j}`, where a decoder reads the encoder's output.
Their streams are `residual.encoder` and `residual.decoder`; where they are one, `residual`.
"""

from __future__ import annotations

from symmerge.symmetry.groups import Group, Permutation
from symmerge.symmetry.spec import Space

GENERATION = "seq2seq-lm"
ENCODER, DECODER, CROSS = "encoder.{i}", "decoder.{j}", "cross.{j}"
STREAM, ENCODED = "residual.decoder", "residual.encoder"

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

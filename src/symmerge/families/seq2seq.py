"""What encoder-decoders share: a place for each attention and each stack, and their spaces.

A place is `encoder.{i}`, `decoder.{j}` or `cross.{j}`, where a decoder reads the encoder's output.
"""

from __future__ import annotations

from symmerge.symmetry.groups import Group, Permutation
from symmerge.symmetry.spec import Space

GENERATION = "seq2seq-lm"
ENCODER, DECODER, CROSS = "encoder.{i}", "decoder.{j}", "cross.{j}"


def attention_at(place: str, heads: int, basis: Group, order: str = "") -> tuple[Space, ...]:
    """The spaces of one attention; its heads are those of `order` where layers share theirs."""
    head = f"head.{order or place}"
    return (
        Space(head, Permutation(heads)),
        Space(f"qk.{place}", basis, per=head, translation="drops"),
        Space(f"vo.{place}", basis, per=head, translation="passes"),
    )

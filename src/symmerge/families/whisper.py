"""Whisper: an encoder of sound whose stream only permutes, and a decoder whose stream rotates.

The encoder's stream begins behind an activation (of its second convolution), which lets no rotation
pass; its positions are fixed sinusoids, but stored, and so they move with it. Channels between the
two convolutions permute. Keys have no bias. The head is the decoder's embedding while it is tied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import Family, Head, Reading, feed_forward, visible, with_bare
from symmerge.families.seq2seq import CROSS, DECODER, ENCODED, ENCODER, LAYERS, STREAM, attention_at
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation
from symmerge.symmetry.spec import Space

TABLE = (
    """
model.encoder.conv1.weight              filter             mel                 tap
model.encoder.conv1.bias                filter
model.encoder.conv2.weight              residual.encoder   filter*             tap
model.encoder.conv2.bias                residual.encoder
model.encoder.embed_positions.weight    frame              residual.encoder
model.encoder.layer_norm.weight         residual.encoder~
model.encoder.layer_norm.bias           residual.encoder
model.decoder.embed_tokens.weight       vocabulary         residual.decoder
model.decoder.embed_positions.weight    position           residual.decoder
model.decoder.layer_norm.weight         residual.decoder~
model.decoder.layer_norm.bias           residual.decoder
"""
    + LAYERS
    + """
proj_out.weight                         vocabulary         residual.decoder*   if untied
"""
)
# The encoder's gains may stay: what permutes carries them along.
NORMS = """
model.decoder.layers.{j}.self_attn_layer_norm     -> model.decoder.layers.{j}.self_attn.q_proj
    model.decoder.layers.{j}.self_attn.k_proj model.decoder.layers.{j}.self_attn.v_proj
model.decoder.layers.{j}.encoder_attn_layer_norm  -> model.decoder.layers.{j}.encoder_attn.q_proj
model.decoder.layers.{j}.final_layer_norm         -> model.decoder.layers.{j}.fc1
model.decoder.layer_norm                          -> proj_out   if lm
"""
TAPS = 3  # of both convolutions


def read(config: Any, names: Collection[str]) -> Reading:
    width, activation = config.d_model, config.activation_function
    counts = (config.encoder_attention_heads, config.decoder_attention_heads)
    bases = [GeneralLinear(width // count) for count in counts]
    speaks = config.architectures[0].endswith("ForConditionalGeneration")
    return Reading(
        layers={"i": config.encoder_layers, "j": config.decoder_layers},
        spaces=(
            *visible(vocabulary=config.vocab_size, position=config.max_target_positions),
            *visible(mel=config.num_mel_bins, frame=config.max_source_positions, tap=TAPS),
            Space(STREAM, OrthogonalFixingOnes(width)),
            Space(ENCODED, Permutation(width)),
            Space("filter", Permutation(width)),  # GELU, whatever the config says
            *attention_at(ENCODER, counts[0], bases[0]),
            *attention_at(DECODER, counts[1], bases[1]),
            *attention_at(CROSS, counts[1], bases[1]),
            Space(f"ff.{ENCODER}", feed_forward(activation, config.encoder_ffn_dim)),
            Space(f"ff.{DECODER}", feed_forward(activation, config.decoder_ffn_dim)),
        ),
        flags={
            "key_bias": False,
            "lm": speaks,
            "untied": speaks and not config.tie_word_embeddings,
        },
    )


HEADED = Family(
    name="whisper",
    model_types=("whisper",),
    architectures={
        "WhisperForConditionalGeneration": Head("speech-to-text", "model.encoder.conv1.weight")
    },
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"proj_out.weight": "model.decoder.embed_tokens.weight"},
)
FAMILY = with_bare(HEADED, "model.", "speech-features", ("WhisperModel",))

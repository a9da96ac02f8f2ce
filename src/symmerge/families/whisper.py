"""Whisper: an encoder of sound whose stream only permutes, and a decoder whose stream rotates.

The encoder's stream begins behind an activation (of its second convolution), which lets no rotation
pass; its positions are fixed sinusoids, but stored, and so they move with it. Channels between the
two convolutions permute. Keys have no bias. The head is the decoder's embedding while it is tied.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
    with_names,
)
from symmerge.families.seq2seq import (
    ALONE,
    CROSS,
    DECODER,
    ENCODED,
    ENCODER,
    FOREIGN,
    LAYERS,
    STREAM,
    attention_at,
    head_flags,
)
from symmerge.families.spaces import (
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation
from symmerge.symmetry.spec import Space

TABLE = (
    """
model.encoder.conv1.weight              filter             mel                 tap  if encoder
model.encoder.conv1.bias                filter                                  if encoder
model.encoder.conv2.weight              residual.encoder   filter*             tap  if encoder
model.encoder.conv2.bias                residual.encoder                        if encoder
model.encoder.embed_positions.weight    frame              residual.encoder     if encoder
model.encoder.layer_norm.weight         residual.encoder~                       if encoder
model.encoder.layer_norm.bias           residual.encoder                        if encoder
model.decoder.embed_tokens.weight       vocabulary         residual.decoder     if decoder
model.decoder.embed_positions.weight    position           residual.decoder     if decoder
model.decoder.layer_norm.weight         residual.decoder~                       if decoder
model.decoder.layer_norm.bias           residual.decoder                        if decoder
"""
    + LAYERS
    + """
proj_out.weight                         vocabulary         residual.decoder*   if untied
layer_weights                           stage                                  if weighted
projector.weight                        projected          residual.encoder*   if labels
projector.bias                          projected                              if labels
classifier.weight                       label              projected*          if labels
classifier.bias                         label                                  if labels
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
LABELS = "ForAudioClassification"
TAPS = 3  # of both convolutions


def read(config: Any, names: Collection[str]) -> Reading:
    width, activation = config.d_model, config.activation_function
    counts = (config.encoder_attention_heads, config.decoder_attention_heads)
    bases = [GeneralLinear(width // count) for count in counts]
    architecture, heads = config.architectures[0], head_flags(config)
    encoder, decoder = not architecture.endswith(ALONE), not architecture.endswith(LABELS)
    return Reading(
        layers={
            "i": config.encoder_layers if encoder else 0,
            "j": config.decoder_layers if decoder else 0,
        },
        spaces=(
            *visible(vocabulary=config.vocab_size, position=config.max_target_positions),
            *visible(mel=config.num_mel_bins, frame=config.max_source_positions, tap=TAPS),
            *visible(label=config.num_labels, stage=config.encoder_layers + 1),
            *visible(**{FOREIGN: width}),
            # Nothing but a mean stands between the two maps to the labels.
            Space("projected", GeneralLinear(config.classifier_proj_size)),
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
            "encoder": encoder,
            "decoder": decoder,
            "labels": not decoder,
            "weighted": not decoder and config.use_weighted_layer_sum,
            "lm": heads["lm"],
            "untied": heads["lm"] and not config.tie_word_embeddings,
        },
        same={} if encoder else {ENCODED: FOREIGN},
        encoded_as=None if encoder else "encoder_outputs",
    )


HEADED = Family(
    name="whisper",
    model_types=("whisper",),
    architectures={
        "WhisperForConditionalGeneration": Head("speech-to-text", "model.encoder.conv1.weight"),
        f"Whisper{ALONE}": Head("causal-lm", "model.decoder.embed_tokens.weight"),
    },
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"proj_out.weight": "model.decoder.embed_tokens.weight"},
)
LABELLED = with_names(
    HEADED,
    r"model\.encoder\.",
    "encoder.",
    {f"Whisper{LABELS}": Head("audio-classification", "projector.weight")},
)
FAMILY = with_bare(LABELLED, "model.", "speech-features", ("WhisperModel",))

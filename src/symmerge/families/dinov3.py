"""DINOv3's ViT: pre-LayerNorm, rotary positions in two dimensions, layer scales, and no head.

transformers has no classifier for it. Here a config with `problem_type`
"single_label_classification" makes one: the first `num_labels` coordinates of the pooled output
are the scores, so these coordinates of the stream are visible. (`num_labels` alone says nothing:
every config has it.) Otherwise all of the pooled output, and with it the stream, is visible.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    pair,
)
from symmerge.families.spaces import (
    attention,
    feed_forward,
    gated,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, RotaryPairs, Trivial
from symmerge.symmetry.spec import Space

# Half of the rotary pairs turn with the row of a patch, half with its column.
TABLE = """
embeddings.cls_token                     one one      stream
embeddings.mask_token                    one one      stream
embeddings.register_tokens               one register stream
embeddings.patch_embeddings.weight       stream       channel patch_height patch_width
embeddings.patch_embeddings.bias         stream
model.layer.{i}.norm1.weight             stream~
model.layer.{i}.norm1.bias               stream
model.layer.{i}.attention.q_proj.weight  (head.{i} qk.{i})   stream*
model.layer.{i}.attention.q_proj.bias    (head.{i} qk.{i})     if query_bias
model.layer.{i}.attention.k_proj.weight  (head.{i} qk.{i}*)  stream*
model.layer.{i}.attention.k_proj.bias    (head.{i} qk.{i}*)    if key_bias
model.layer.{i}.attention.v_proj.weight  (head.{i} vo.{i})   stream*
model.layer.{i}.attention.v_proj.bias    (head.{i} vo.{i})     if value_bias
model.layer.{i}.attention.o_proj.weight  stream       (head.{i} vo.{i}*)
model.layer.{i}.attention.o_proj.bias    stream                if proj_bias
model.layer.{i}.layer_scale1.lambda1     stream~
model.layer.{i}.norm2.weight             stream~
model.layer.{i}.norm2.bias               stream
model.layer.{i}.mlp.gate_proj.weight     ff.{i}~      stream*  if gated
model.layer.{i}.mlp.gate_proj.bias       ff.{i}~               if gate_bias
model.layer.{i}.mlp.up_proj.weight       ff.{i}       stream*
model.layer.{i}.mlp.up_proj.bias         ff.{i}                if mlp_bias
model.layer.{i}.mlp.down_proj.weight     stream       ff.{i}*
model.layer.{i}.mlp.down_proj.bias       stream                if mlp_bias
model.layer.{i}.layer_scale2.lambda1     stream~
norm.weight                              stream~
norm.bias                                stream
"""

NORMS = """
model.layer.{i}.norm1  -> model.layer.{i}.attention.q_proj
    model.layer.{i}.attention.k_proj model.layer.{i}.attention.v_proj       if classifier
model.layer.{i}.norm2  -> model.layer.{i}.mlp.up_proj                       if plain_classifier
model.layer.{i}.norm2  -> model.layer.{i}.mlp.gate_proj
    model.layer.{i}.mlp.up_proj                                             if gated_classifier
norm                   ->                                                   if classifier
"""

SCALES = """
model.layer.{i}.layer_scale1.lambda1  <- model.layer.{i}.attention.o_proj   if classifier
model.layer.{i}.layer_scale2.lambda1  <- model.layer.{i}.mlp.down_proj      if classifier
"""

BIASES = ("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias")


def read(config: Any, names: Collection[str]) -> Reading:
    width, heads, units = config.hidden_size, config.num_attention_heads, config.intermediate_size
    head_size, (patch_height, patch_width) = width // heads, pair(config.patch_size)
    classifier, is_gated = _classifies(config), config.use_gated_mlp
    shown = config.num_labels if classifier else width
    if classifier and shown > width - 2:
        raise ValueError(f"{shown} classes in a stream of {width}")
    visible_sizes = {
        "one": 1,
        "register": config.num_register_tokens,
        "channel": config.num_channels,
        "patch_height": patch_height,
        "patch_width": patch_width,
        "label": shown,
    }
    qk, vo = RotaryPairs(head_size, rotary=head_size), GeneralLinear(head_size)
    stream = OrthogonalFixingOnes(width - shown) if classifier else Trivial(width)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            Space("residual", stream),
            *visible(**visible_sizes),
            *attention(heads=heads, qk=qk, vo=vo),
            Space("ff.{i}", gated(units) if is_gated else feed_forward(config.hidden_act, units)),
        ),
        flags=_flags(config, classifier),
        same={"stream": "label + residual" if classifier else "residual"},
        pooled=shown,
        task="image-classification" if classifier else "image-features",
    )


def _flags(config: Any, classifier: bool) -> dict[str, bool]:
    is_gated = config.use_gated_mlp
    return {
        **{bias: getattr(config, bias) for bias in BIASES},
        "gated": is_gated,
        "gate_bias": is_gated and config.mlp_bias,
        "classifier": classifier,
        "plain_classifier": classifier and not is_gated,
        "gated_classifier": classifier and is_gated,
    }


def _classifies(config: Any) -> bool:
    return config.problem_type == "single_label_classification"


FAMILY = Family(
    name="dinov3",
    model_types=("dinov3_vit",),
    architectures={"DINOv3ViTModel": Head("image-features", "embeddings.mask_token")},
    table=TABLE,
    norms=NORMS,
    scales=SCALES,
    read=read,
    # transformers 5 moved the layers but still writes the old names; both are read
    renames=((r"^layer\.", "model.layer."),),
)

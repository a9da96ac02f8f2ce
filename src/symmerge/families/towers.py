"""Towers of CLIP and SigLIP: pre-LayerNorm layers of one shape, for texts and for images.

A model of two towers has each space twice: `mark` tells them apart, as `residual.text`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from symmerge.families.spaces import (
    attention,
    feed_forward,
)
from symmerge.families.vit import patch_sizes
from symmerge.symmetry.groups import GeneralLinear, Group
from symmerge.symmetry.spec import Space

LAYERS = """
{t}encoder.layers.{i}.layer_norm1.weight        residual{m}~
{t}encoder.layers.{i}.layer_norm1.bias          residual{m}
{t}encoder.layers.{i}.self_attn.q_proj.weight   (head{m}.{i} qk{m}.{i})   residual{m}*
{t}encoder.layers.{i}.self_attn.q_proj.bias     (head{m}.{i} qk{m}.{i})
{t}encoder.layers.{i}.self_attn.k_proj.weight   (head{m}.{i} qk{m}.{i}*)  residual{m}*
{t}encoder.layers.{i}.self_attn.k_proj.bias     (head{m}.{i} qk{m}.{i}*)
{t}encoder.layers.{i}.self_attn.v_proj.weight   (head{m}.{i} vo{m}.{i})   residual{m}*
{t}encoder.layers.{i}.self_attn.v_proj.bias     (head{m}.{i} vo{m}.{i})
{t}encoder.layers.{i}.self_attn.out_proj.weight residual{m}  (head{m}.{i} vo{m}.{i}*)
{t}encoder.layers.{i}.self_attn.out_proj.bias   residual{m}
{t}encoder.layers.{i}.layer_norm2.weight        residual{m}~
{t}encoder.layers.{i}.layer_norm2.bias          residual{m}
{t}encoder.layers.{i}.mlp.fc1.weight            ff{m}.{i}    residual{m}*
{t}encoder.layers.{i}.mlp.fc1.bias              ff{m}.{i}
{t}encoder.layers.{i}.mlp.fc2.weight            residual{m}  ff{m}.{i}*
{t}encoder.layers.{i}.mlp.fc2.bias              residual{m}
"""
LAYER_NORMS = """
{t}encoder.layers.{i}.layer_norm1 -> {t}encoder.layers.{i}.self_attn.q_proj
    {t}encoder.layers.{i}.self_attn.k_proj {t}encoder.layers.{i}.self_attn.v_proj
{t}encoder.layers.{i}.layer_norm2 -> {t}encoder.layers.{i}.mlp.fc1
"""
TEXT = (
    """
{t}embeddings.token_embedding.weight            vocabulary   residual{m}
{t}embeddings.position_embedding.weight         position     residual{m}
"""
    + LAYERS
    + """
{t}final_layer_norm.weight                      residual{m}~
{t}final_layer_norm.bias                        residual{m}
"""
)
PATCHES = """
{t}embeddings.patch_embedding.weight
    residual{m}  channel patch_height patch_width
{t}embeddings.position_embedding.weight         {place}      residual{m}
"""
LAST = """
{t}post_layernorm.weight                        residual{m}~
{t}post_layernorm.bias                          residual{m}
"""
MARKS = {"text_model.": (".text", "i"), "vision_model.": (".vision", "j")}
"""Of the towers of one model: what tells their spaces apart, and the letter of their layers."""


def alone(table: str, prefix: str) -> str:
    """The lines of a tower that is the whole model."""
    return _placed(table, prefix, "", "i", "position")


def beside(table: str, prefix: str, flag: str | None = None) -> str:
    """The lines of one of two towers, all of them on a condition if there is a flag."""
    lines = _placed(table, prefix, *MARKS[prefix], "place")
    return lines if flag is None else conditional(lines, flag)


def conditional(table: str, flag: str) -> str:
    """The same lines, all of them on a condition."""
    return re.sub(r"(?<=\S)\n", f"  if {flag}\n", re.sub(r"\n[ \t]+", " ", table))


def _placed(table: str, prefix: str, mark: str, letter: str, place: str) -> str:
    values = {"{t}": prefix, "{m}": mark, "{i}": f"{{{letter}}}", "{place}": place}
    for key, value in values.items():
        table = table.replace(key, value)
    return table


def marked(table: str, mark: str, letter: str) -> str:
    """The lines of a single stack as those of one of several."""
    table = re.sub(r"\bresidual\b", f"residual{mark}", table)
    table = re.sub(r"\b(head|qk|vo|ff)\.\{i\}", rf"\1{mark}.{{i}}", table)
    return table.replace("{i}", f"{{{letter}}}")


def spaces_of(config: Any, stream: Group, prefix: str | None = None) -> tuple[Space, ...]:
    """The hidden spaces of a tower; with its prefix, of one that has another beside it."""
    units = feed_forward(config.hidden_act, config.intermediate_size)
    mark = MARKS[prefix] if prefix else ("", "i")
    return tower_spaces(stream, config.num_attention_heads, units, *mark)


def tower_spaces(
    stream: Group, heads: int, units: Group, mark: str, letter: str
) -> tuple[Space, ...]:
    """The hidden spaces of one stack, with its mark and the letter of its layers."""
    basis = GeneralLinear(stream.size // heads)
    spaces = (*attention(heads=heads, qk=basis, vo=basis), Space("ff.{i}", units))

    def named(name: str) -> str:
        return name.replace(".{i}", f"{mark}.{{{letter}}}")

    return (
        Space(f"residual{mark}", stream),
        *(replace(one, name=named(one.name), per=one.per and named(one.per)) for one in spaces),
    )


def text_sizes(config: Any) -> dict[str, int]:
    """What of texts can be seen."""
    return {"vocabulary": config.vocab_size, "position": config.max_position_embeddings}


def image_sizes(config: Any, tokens: int, place: str = "position") -> dict[str, int]:
    """What of images can be seen; `tokens` have positions beside the patches.

    Beside texts, which have positions, those of images are called `place`.
    """
    sizes = patch_sizes(config, tokens)
    return {place if name == "position" else name: size for name, size in sizes.items()}

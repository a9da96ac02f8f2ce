"""Swin: stages of twice the width each, every one with a stream of its own.

The first stream comes out of a norm whose gain stays on it, and permutes. Between two stages four
neighbours are read side by side, by one norm over all of them: it takes out one mean for four
places, so that the mean of each place is seen. The next stream rotates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import vit
from symmerge.families.base import (
    Family,
    Head,
    Reading,
)
from symmerge.families.spaces import (
    feed_forward,
    visible,
)
from symmerge.families.towers import marked, tower_spaces
from symmerge.symmetry.groups import Group, OrthogonalFixingOnes, Permutation, Trivial
from symmerge.symmetry.spec import Space

LETTERS = "ijklmnop"  # of the layers of each stage, and so the most stages
PATCHES = """
{t}embeddings.patch_embeddings.projection.weight
    residual.stage1     channel patch_height patch_width
{t}embeddings.patch_embeddings.projection.bias       residual.stage1
{t}embeddings.norm.weight                            residual.stage1~
{t}embeddings.norm.bias                              residual.stage1
{t}embeddings.position_embeddings                    one position residual.stage1  if positions
"""
LAYER = (
    """
{layer}.attention.relative_position_bias.relative_position_bias_table   distance head.{i}~
"""
    + vit.LAYER
)
# Four neighbours, one after the other, become one place of the next stage.
MERGING = """
{stage}.downsample.norm.weight       (residual~ + residual~ + residual~ + residual~)  if {next}
{stage}.downsample.norm.bias         (residual + residual + residual + residual)      if {next}
{stage}.downsample.reduction.weight
    {merged}  (residual* + residual* + residual* + residual*)                         if {next}
"""
# Windows at the edge are filled with zeros behind the first norm of a layer.
STAGE_NORMS = """
{layer}.layernorm_before  padded -> {layer}.attention.q_proj
    {layer}.attention.k_proj {layer}.attention.v_proj                 if {turns}
{layer}.layernorm_after   -> {layer}.mlp.fc1                          if {turns}
{stage}.downsample.norm   -> {stage}.downsample.reduction             if {next}
"""
LAST = """
{t}layernorm.weight   residual.last~
{t}layernorm.bias     residual.last
"""
CLASSIFIER = """
classifier.weight     label   residual.last*
classifier.bias       label
"""
SUMS = "{t}embeddings.norm <- {t}embeddings.patch_embeddings.projection"


def stages(lines: str, first: int = 0) -> str:
    """The lines of each stage that there may be."""
    return "".join(_stage(lines, number) for number in range(first, len(LETTERS)))


def _stage(lines: str, number: int) -> str:
    path = f"{{t}}encoder.layers.{number}"
    lines = lines.replace("{layer}", f"{path}.blocks.{{i}}").replace("{stage}", path)
    lines = lines.replace("{turns}", f"turns{number + 1}")
    lines = marked(lines, f".stage{number + 1}", LETTERS[number])
    lines = lines.replace("{merged}", f"residual.stage{number + 2}")
    return lines.replace("{next}", f"stage{number + 2}")


def read(config: Any, names: Collection[str]) -> Reading:
    _check_stages(config)
    streams = [_stream(config, number) for number in range(len(config.depths))]
    of_stages = [_spaces(config, number, stream) for number, stream in enumerate(streams)]
    return Reading(
        layers=dict(zip(LETTERS, config.depths, strict=False)),
        spaces=(
            *visible(**vit.patch_sizes(config, tokens=0)),
            *visible(distance=(2 * config.window_size - 1) ** 2),
            *chain.from_iterable(of_stages),
        ),
        flags=_flags(config, streams),
        same={"residual.last": f"residual.stage{len(streams)}"},
    )


def _flags(config: Any, streams: list[Group]) -> dict[str, bool]:
    """`stage2`: there is one; `turns2`: its stream rotates; `turns`: the last one does."""
    turns = [isinstance(stream, OrthogonalFixingOnes) for stream in streams]
    most, count = len(LETTERS), len(streams)
    return {
        "qkv_bias": config.qkv_bias,
        "key_bias": config.qkv_bias,
        "plain": True,
        "positions": config.use_absolute_embeddings,
        **{f"stage{number + 1}": number < count for number in range(most + 1)},
        **{f"turns{number + 1}": number < count and turns[number] for number in range(most)},
        "turns": turns[-1],
    }


def _stream(config: Any, number: int) -> Group:
    width = config.embed_dim * 2**number
    if config.architectures[0] == "SwinModel" and number == len(config.depths) - 1:
        return Trivial(width)  # its answer
    return OrthogonalFixingOnes(width) if number else Permutation(width)


def _spaces(config: Any, number: int, stream: Group) -> tuple[Space, ...]:
    """The spaces of one stage."""
    units = feed_forward(config.hidden_act, int(config.mlp_ratio * stream.size))
    heads, mark = config.num_heads[number], f".stage{number + 1}"
    return tower_spaces(stream, heads, units, mark, LETTERS[number])


def _check_stages(config: Any) -> None:
    counts = len(config.depths), len(config.num_heads)
    if counts[0] != counts[1] or not 1 <= counts[0] <= len(LETTERS):
        raise UnsupportedModel(
            f"swin: config.json has {counts[0]} stages in 'depths' and {counts[1]} in 'num_heads':"
            f" give both one number for each of 1 to {len(LETTERS)} stages"
        )


def _named(lines: str, prefix: str) -> str:
    return lines.replace("{t}", prefix)


TABLE = PATCHES + stages(LAYER + MERGING) + LAST
NORMS = stages(STAGE_NORMS, first=1) + "{t}layernorm -> classifier  if turns\n"
HEADED = Family(
    name="swin",
    model_types=("swin",),
    architectures={"SwinForImageClassification": Head("image-classification", "classifier.weight")},
    table=_named(TABLE, "swin.") + CLASSIFIER,
    norms=_named(NORMS, "swin."),
    sums=_named(SUMS, "swin."),
    read=read,
    renames=(
        (r"\.attention\.self\.query\.", ".attention.q_proj."),
        (r"\.attention\.self\.key\.", ".attention.k_proj."),
        (r"\.attention\.self\.value\.", ".attention.v_proj."),
        (r"\.attention\.self\.rel", ".attention.relative_position_bias.rel"),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
    buffers=(r"relative_position_index$",),
)
# Only the last stream is shown: the others move as with a head.
BARE = replace(
    HEADED,
    architectures={"SwinModel": Head("image-features", "")},
    table=_named(TABLE, ""),
    norms=_named(NORMS, ""),
    sums=_named(SUMS, ""),
    stripped="swin.",
)
FAMILY = replace(HEADED, variants=(BARE,))

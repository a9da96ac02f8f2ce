"""The supported architectures: add a family by writing its table and listing it here."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from symmerge.errors import UnsupportedModel, shown
from symmerge.families import (
    albert,
    bart,
    beit,
    bert,
    bloom,
    clip,
    cohere,
    deberta_v2,
    deepseek,
    dinov2,
    dinov3,
    distilbert,
    electra,
    experts,
    falcon,
    gemma,
    gpt2,
    gpt_neo,
    gpt_oss,
    gptj,
    ijepa,
    llama,
    modernbert,
    mpnet,
    mpt,
    neox,
    olmo2,
    opt,
    phi,
    phi3,
    qwen3,
    roformer,
    siglip,
    smollm3,
    stablelm,
    starcoder2,
    swin,
    t5,
    vit,
    vit_mae,
    whisper,
)
from symmerge.families.base import Family

FAMILIES: tuple[Family, ...] = (
    bert.BERT,
    bert.ROBERTA,
    distilbert.FAMILY,
    electra.FAMILY,
    mpnet.FAMILY,
    deberta_v2.FAMILY,
    albert.FAMILY,
    roformer.FAMILY,
    modernbert.FAMILY,
    gpt2.FAMILY,
    vit.FAMILY,
    vit.DEIT,
    vit_mae.FAMILY,
    ijepa.FAMILY,
    beit.FAMILY,
    swin.FAMILY,
    dinov2.FAMILY,
    dinov2.REGISTERS,
    dinov3.FAMILY,
    clip.FAMILY,
    clip.TEXT_FAMILY,
    clip.IMAGE_FAMILY,
    siglip.FAMILY,
    siglip.TEXT_FAMILY,
    siglip.IMAGE_FAMILY,
    llama.FAMILY,
    qwen3.FAMILY,
    olmo2.FAMILY,
    gemma.GEMMA2,
    gemma.GEMMA3,
    smollm3.FAMILY,
    cohere.FAMILY,
    experts.MIXTRAL,
    experts.QWEN2_MOE,
    experts.QWEN3_MOE,
    experts.OLMOE_FAMILY,
    gpt_oss.FAMILY,
    deepseek.V3,
    phi3.FAMILY,
    starcoder2.FAMILY,
    stablelm.FAMILY,
    neox.FAMILY,
    opt.FAMILY,
    gptj.FAMILY,
    gpt_neo.FAMILY,
    phi.FAMILY,
    falcon.FAMILY,
    bloom.FAMILY,
    mpt.FAMILY,
    t5.FAMILY,
    t5.UMT5,
    bart.FAMILY,
    bart.MBART,
    whisper.FAMILY,
)
LONGEST = 60  # characters of a name that are compared
BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family for family in FAMILIES for model_type in family.model_types
}


def family_of(model_type: object, where: object, classes: object = None) -> Family:
    """The family of a config's `model_type` and class, or an error that says what to do."""
    if model_type is None:
        raise UnsupportedModel(
            f"{where}: config.json has no 'model_type': add it"
            f" (supported: {', '.join(sorted(BY_MODEL_TYPE))})"
        )
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
        raise UnsupportedModel(
            f"{where}: no table for model_type {shown(model_type)}; nearest supported:"
            f" {', '.join(nearest(model_type))} (of {len(BY_MODEL_TYPE)}, docs/architectures.md);"
            " derive a table (symmerge derive), or write one (docs/new-family.md)"
        )
    return BY_MODEL_TYPE[model_type].of(classes)


def nearest(model_type: object, count: int = 3) -> list[str]:
    """The supported model types whose names are most like this one's, the same stem first."""
    name = str(model_type)[:LONGEST].lower()

    def likeness(known: str) -> tuple[bool, float]:
        stem = re.sub(r"[\d._-].*", "", known)
        return name.startswith(stem), SequenceMatcher(None, name, known).ratio()

    return sorted(sorted(BY_MODEL_TYPE), key=likeness, reverse=True)[:count]


__all__ = ["BY_MODEL_TYPE", "FAMILIES", "Family", "family_of", "nearest"]

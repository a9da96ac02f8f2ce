"""The supported architectures: add a family by writing its table and listing it here."""

from __future__ import annotations

from symmerge.errors import UnsupportedModel, shown
from symmerge.families import (
    bert,
    dinov3,
    distilbert,
    gpt2,
    llama,
    modernbert,
    neox,
    olmo2,
    opt,
    phi3,
    qwen3,
    roformer,
    stablelm,
    starcoder2,
    vit,
)
from symmerge.families.base import Family

FAMILIES: tuple[Family, ...] = (
    bert.BERT,
    bert.ROBERTA,
    distilbert.FAMILY,
    roformer.FAMILY,
    modernbert.FAMILY,
    gpt2.FAMILY,
    vit.FAMILY,
    dinov3.FAMILY,
    llama.FAMILY,
    qwen3.FAMILY,
    olmo2.FAMILY,
    phi3.FAMILY,
    starcoder2.FAMILY,
    stablelm.FAMILY,
    neox.FAMILY,
    opt.FAMILY,
)
BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family for family in FAMILIES for model_type in family.model_types
}


def family_of(model_type: object, where: object, classes: object = None) -> Family:
    """The family of a config's `model_type` and class, or an error that lists all."""
    supported = ", ".join(sorted(BY_MODEL_TYPE))
    if model_type is None:
        raise UnsupportedModel(
            f"{where}: config.json has no 'model_type': add it (supported: {supported})"
        )
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
        raise UnsupportedModel(
            f"{where}: no table for model_type {shown(model_type)}; supported: {supported};"
            " symmerge derive proposes one for any class"
        )
    return BY_MODEL_TYPE[model_type].of(classes)


__all__ = ["BY_MODEL_TYPE", "FAMILIES", "Family", "family_of"]

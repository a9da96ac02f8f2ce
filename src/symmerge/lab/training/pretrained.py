"""Which pretrained models a text classifier may start from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from symmerge.errors import MismatchError
from symmerge.evaluation.data.text import read_rows
from symmerge.evaluation.tasks.preprocessing import check_tokens, max_length, tokenizer_of
from symmerge.lab.training.files import INSTALLED
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.models.model import Model

PRETRAINED = "masked-lm"
"""The required task. Classifiers are refused: they bring their own head, and all must be equal."""


def check_start(recipe: TrainingRecipe, model: Model) -> None:
    """Refuse a model that a classifier recipe cannot start from.

    transformers would load it anyway, with nearly all weights newly initialised.
    """
    what = f"a classifier on {recipe.data}"
    _check_type(recipe, model, what)
    tokenizer = tokenizer_of(model)
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        raise MismatchError(
            f"the tokenizer of {model.where} has no tokenizer.json or no padding token:"
            f" {what} needs both; save it with them"
        )
    check_tokens(model, max(tokenizer.get_vocab().values()))
    positions, longest = max_length(model), max(_lengths(recipe, tokenizer), default=0)
    if longest > positions:
        raise MismatchError(
            f"{model.where} takes {positions} tokens, and {recipe.data} has rows of {longest}:"
            f" {what} needs a model with more positions"
        )


def _check_type(recipe: TrainingRecipe, model: Model, what: str) -> None:
    import transformers

    kind = getattr(transformers, recipe.architecture).config_class.model_type
    if (model.config.get("model_type"), model.spec.task) != (kind, PRETRAINED) or not model.stock:
        raise MismatchError(
            f"{model.where} is a {model.spec.architecture}, for {model.spec.task}: {what} starts"
            f" from a stock model of the type {kind}, for {PRETRAINED}; give pretrained ones"
        )


def _lengths(recipe: TrainingRecipe, tokenizer: Any) -> Iterator[int]:
    """Tokens per row of installed tables; other tables simply lose rows that are too long."""
    for data in INSTALLED.get(recipe.data, ()):
        for texts in read_rows(data).texts:
            yield len(tokenizer(*texts, verbose=False)["input_ids"])

"""What a classifier of texts may begin from: a pretrained model of its own kind, with a tokenizer, and room for the rows."""

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
"""What it was for: a model that is a classifier already would bring a head, and heads are to begin alike."""


def check_start(recipe: TrainingRecipe, model: Model) -> None:
    """Refuse a model that a recipe for classifiers cannot begin from. (transformers would open it, with nearly all weights fresh.)"""
    import transformers

    what = f"a classifier on {recipe.data}"
    kind = getattr(transformers, recipe.architecture).config_class.model_type
    if (model.config.get("model_type"), model.spec.task) != (kind, PRETRAINED) or not model.stock:
        raise MismatchError(
            f"{model.where} is a {model.spec.architecture}, for {model.spec.task}: {what} begins from a stock model of the type {kind}, for {PRETRAINED};"
            " give pretrained ones"
        )
    tokenizer = tokenizer_of(model)
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        raise MismatchError(
            f"the tokenizer of {model.where} has no tokenizer.json or no token to fill up with: {what} reads texts side by side; save it with both"
        )
    check_tokens(model, max(tokenizer.get_vocab().values()))
    most, found = max_length(model), max(_lengths(recipe, tokenizer), default=0)
    if found > most:
        raise MismatchError(
            f"{model.where} takes {most} tokens, and {recipe.data} has rows of {found}: {what} needs a model with more positions"
        )


def _lengths(recipe: TrainingRecipe, tokenizer: Any) -> Iterator[int]:
    """Of the rows that come with the installation; of tables in a folder those that are too long are left out."""
    for data in INSTALLED.get(recipe.data, ()):
        yield from (
            len(tokenizer(*texts, verbose=False)["input_ids"]) for texts in read_rows(data).texts
        )

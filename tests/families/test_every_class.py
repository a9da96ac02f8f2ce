"""Every class of the installed transformers has a table, or a reason why it has none."""

import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from symmerge.families import BY_MODEL_TYPE, FAMILIES
from symmerge.families.left_out import LEFT_OUT, REASONS

pytestmark = pytest.mark.quick

SUPPORTED = {name for family in FAMILIES for name in family.classes}
MODELS = Path(transformers.__file__).parent / "models"
# Exported beside the classes: what they inherit from, and modules inside.
PARTS = re.compile(r"Pre[Tt]rained|(Layer|Norm)$")


@cache
def mapped():
    """The classes that an `Auto` class makes, by model type."""
    found = {}
    for name in filter(re.compile("MODEL_.*MAPPING_NAMES$").match, dir(modeling_auto)):
        for kind, classes in getattr(modeling_auto, name).items():
            found.setdefault(kind, set()).update([classes] if isinstance(classes, str) else classes)
    return found


def exported(kind):
    """The classes of a model type's file; it may have those of other types as well."""
    module = model_type_to_module_name(kind)
    text = (MODELS / module / f"modeling_{module}.py").read_text("utf-8")
    (listed,) = re.findall(r"^__all__ = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    others = set().union(*(names for other, names in mapped().items() if other != kind))
    return {name for name in re.findall(r'"(\w+)"', listed) if not PARTS.search(name)} - others


@cache
def classes_of_transformers():
    found = [mapped().get(kind, set()) | exported(kind) for kind in BY_MODEL_TYPE]
    return set().union(*found)


def problems(supported, left_out):
    """Classes that stand nowhere, in both, or in one although transformers has none such."""
    every = classes_of_transformers()
    return (
        (every - supported - left_out) | (supported & left_out) | ((supported | left_out) - every)
    )


def test_every_class_is_supported_or_left_out_for_a_reason():
    assert not problems(SUPPORTED, LEFT_OUT.keys())
    assert len(SUPPORTED) + len(LEFT_OUT) == len(classes_of_transformers())
    assert sum(map(len, REASONS.values())) == len(LEFT_OUT)  # one reason each
    # They are found in both places: in an auto mapping, and in a file alone.
    assert {"BertForMaskedLM", "GPT2DoubleHeadsModel"} <= classes_of_transformers()


@pytest.mark.parametrize("name", ["LlamaForQuestionAnswering", "GPT2DoubleHeadsModel", "BeitModel"])
def test_a_class_that_is_forgotten_or_in_both_is_a_problem(name):
    assert problems(SUPPORTED - {name}, LEFT_OUT.keys()) == {name}
    assert problems(SUPPORTED, {*LEFT_OUT, name}) == {name}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_reason_that_is_forgotten_or_stale_is_a_problem(name):
    assert problems(SUPPORTED, LEFT_OUT.keys() - {name}) == {name}
    assert problems(SUPPORTED | {name}, LEFT_OUT.keys()) == {name}
    assert problems(SUPPORTED, {*LEFT_OUT, f"{name}Gone"}) == {f"{name}Gone"}

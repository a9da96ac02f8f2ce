"""What a user prints fits on three lines and says what it is."""

import pytest

import symmerge as sm
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_what_a_user_holds_is_shown_on_three_lines(name, tmp_path):
    small_model(name).save_pretrained(tmp_path)
    model = sm.load(tmp_path)
    alignment, moved = random_member(model)
    values = (model, moved, alignment, model.source, model.source.base, moved.weights)
    for value in (*values, model.cached().weights, sm.verify(model, moved)):
        lines = repr(value).splitlines()
        assert len(lines) <= 3 and all(len(line) <= 200 for line in lines), value
        assert type(value).__name__ in repr(value)
    assert str(tmp_path) in repr(model) and f"{model.parameters:,}" in repr(model)
    assert "apply" in repr(moved) and f"{len(model.weights.names())} tensors" in repr(model.weights)

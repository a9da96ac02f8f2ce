"""`same` is as strict as rounding allows, and knows what a LayerNorm ignores."""

import pytest
import torch

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.lab.small_models import small_model
from symmerge.models.model import Model
from symmerge.models.orbit import random_member
from symmerge.models.saving import save


def written(model: Model, folder, **changed) -> Model:
    weights = DerivedWeights(
        model.weights, {name: lambda value=value: value for name, value in changed.items()}
    )
    return sm.load(save(model.derive(weights, step=model.history[-1]), folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
        ("llama", "model.layers.0.self_attn.v_proj.weight"),
        ("bert", "bert.encoder.layer.1.output.dense.weight"),
    ],
)
def test_one_percent_in_one_tensor_is_found(name, tensor, dtype, tmp_path):
    source = sm.load(small_model(name, seed=2, dtype=dtype))
    moved = random_member(source, seed=1)[1]
    assert sm.same(source, written(moved, tmp_path / "right")).same  # the control
    right = moved.weights[tensor]
    wrong = right * (
        1 + 0.01 * torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    )
    certificate = sm.same(source, written(moved, tmp_path / "wrong", **{tensor: wrong}))
    assert not certificate.same and certificate.units > 1


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("bert", "cls.predictions.bias"),
        ("vit", "vit.layers.1.mlp.fc1.bias"),
        ("vit", "vit.embeddings.position_embeddings"),
    ],
)
def test_one_row_is_found_in_coarse_weights(name, tensor, tmp_path):
    """It is lost in the norm of a tensor: rows, columns and numbers are compared as well."""
    source = sm.load(small_model(name, seed=2, dtype=torch.bfloat16))
    moved = random_member(source, seed=1)[1]
    assert sm.same(source, written(moved, tmp_path / "right")).same  # the control
    wrong = moved.weights[tensor].clone()
    rows = wrong.squeeze()
    rows[rows.reshape(len(rows), -1).norm(dim=1).argmax()] *= 1.05
    certificate = sm.same(source, written(moved, tmp_path / "wrong", **{tensor: wrong}))
    assert not certificate.same and certificate.units > 1


@pytest.mark.parametrize("name", ["bert", "bert-untied", "roformer"])
def test_a_constant_that_a_layernorm_ignores_is_a_symmetry(name, tmp_path):
    source = sm.load(small_model(name, seed=2))
    moved = random_member(source, seed=1)[1]
    family = source.spec.family
    rows = f"{family}.embeddings.{'token_type' if family == 'roformer' else 'position'}_embeddings"
    shifted = moved.weights[f"{rows}.weight"] + torch.tensor([[0.7]])
    assert sm.same(source, written(moved, tmp_path / "right", **{f"{rows}.weight": shifted})).same
    other = moved.weights[f"{rows}.weight"].clone()
    other[:, 0] += 0.7  # the control: one coordinate alone is none
    assert not sm.same(source, written(moved, tmp_path / "no", **{f"{rows}.weight": other})).same


@pytest.mark.parametrize("name", ["bert", "roberta-classifier", "roformer-classifier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_moved_between_embeddings_is_a_symmetry(name, dtype, tmp_path):
    source = sm.load(small_model(name, seed=2, dtype=dtype))
    moved = random_member(source, seed=1)[1]
    tables = f"{source.spec.family}.embeddings"
    kind = "word" if source.spec.family == "roformer" else "position"
    rows, types = f"{tables}.{kind}_embeddings.weight", f"{tables}.token_type_embeddings.weight"
    vector = 0.05 * torch.randn(
        moved.weights[rows].shape[1], generator=torch.Generator().manual_seed(0)
    )
    right = {rows: moved.weights[rows] + vector, types: moved.weights[types] - vector}
    assert sm.same(source, written(moved, tmp_path / "right", **right)).same
    wrong = {**right, types: moved.weights[types] - 0.8 * vector}  # the control
    assert not sm.same(source, written(moved, tmp_path / "wrong", **wrong)).same

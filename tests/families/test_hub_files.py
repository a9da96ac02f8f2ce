"""Files of the hub have more than their class reads, and other names: what is done with it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from strange import refused

import symmerge as sm
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member

# model -> what its files have on the hub, and no class reads
UNREAD = {
    "bart": {f"model.{stack}.version": torch.ones(1) for stack in ("encoder", "decoder")},
    "mbart": {f"model.{stack}.version": torch.ones(1) for stack in ("encoder", "decoder")},
    "deberta-v2": {
        "lm_predictions.lm_head.dense.weight": torch.ones(48, 48),
        "mask_predictions.classifier.weight": torch.ones(1, 48),
        "deberta.embeddings.position_embeddings.weight": torch.ones(64, 48),
    },
}


def stored(name, folder, change):
    """A small model as transformers writes it, with a change to its tensors."""
    small_model(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", UNREAD)
def test_what_no_class_reads_is_no_obstacle(name, tmp_path):
    model = sm.load(stored(name, tmp_path / "hub", lambda files: files.update(UNREAD[name])))
    for other in (model, random_member(model, 1)[1]):
        assert sm.verify(sm.load(small_model(name)), other).same
    strange = stored(name, tmp_path / "strange", lambda files: files.update(other=torch.ones(1)))
    assert "unexpected tensors: other" in refused(strange)  # the control


@pytest.mark.parametrize("name", ["dinov2", "dinov2_with_registers"])
def test_branches_that_files_hold_fused_are_cut(name, tmp_path):
    fused = f"{name}.encoder.layer.1.mlp.weights_in.bias"
    folder = tmp_path / "hub"
    small_model(name, use_swiglu_ffn=True).save_pretrained(folder)
    gate, up = load_file(folder / "model.safetensors")[fused].chunk(2)
    weights = sm.load(folder).weights
    for cut, expected in (("gate", gate), ("up", up)):
        assert torch.equal(weights[fused.replace("weights_in", f"{cut}_proj")], expected)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, fused: torch.ones(5)}, folder / "model.safetensors", {"format": "pt"})
    assert "not 2 equal blocks of rows" in refused(folder)

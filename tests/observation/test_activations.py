"""Activations move with the weights, as their axes say."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from observed_pairs import inputs

import symmerge as sm
from symmerge.lab.small_models import SMALL, small_model
from symmerge.observation.activations import extend_spec, record_activations
from symmerge.symmetry.notation import atoms
from symmerge.verification.modules import full_module


@cache
def canonical(name, seed=0):
    return sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))


def _wide(value):
    return value.double() if value.is_floating_point() else value


@pytest.mark.parametrize("name", SMALL)
def test_every_hidden_space_is_seen_and_moves_as_its_axis_says(name):
    """Run the model before and after a symmetry: what flows has moved exactly as the table says."""
    model = canonical(name)
    alignment = sm.Alignment.random(model.spec, torch.Generator().manual_seed(3))
    activations = []
    for which in (model, sm.apply(alignment, model)):
        module = full_module(which, torch.float64)
        with record_activations(model.spec, module) as recorder, torch.no_grad():
            for batch in inputs(model, 1, rows=2, length=12):
                module(**{key: _wide(value) for key, value in batch.items()})
        activations.append(recorder.activations())
    # Experts are no modules: what flows inside them is not recorded.
    inside = {name for name, space in model.spec.spaces.items() if "expert" in (space.per or name)}
    assert {
        atom.space for axis in activations[0].axes.values() for atom in atoms((axis,))
    } >= model.spec.hidden.keys() - inside
    moved = replace(alignment, spec=extend_spec(model.spec, activations[0]))
    for tensor, value in activations[0].values.items():
        expected, got = moved.transport(tensor, value), activations[1].values[tensor]
        # RMS norms of transformers compute in float32
        assert (expected - got).norm() <= 1e-6 * got.norm(), tensor
    away = max(
        ((activations[0].values[tensor] - value).norm() / value.norm()).item()
        for tensor, value in activations[1].values.items()
    )
    assert away > 0.1  # the control

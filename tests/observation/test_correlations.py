"""Correlations of matched features: of planted pairs, unrelated ones, and moved models."""

import json
from dataclasses import replace

import pytest
import torch

import symmerge as sm
from symmerge.aligning.aligned import write_evidence
from symmerge.lab.small_models import small_model
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.recipes import RECIPES
from symmerge.models.alignment import Alignment, apply
from symmerge.models.orbit import random_member
from symmerge.observation.calibration import pair_header
from symmerge.observation.correlations import MAX_FEATURES, Correlations, measure_correlations
from symmerge.observation.gathering import gather
from symmerge.observation.statistics import Statistics
from symmerge.report import report
from symmerge.verification.modules import full_module

FAMILIES = ["bert", "gpt2", "vit", "llama", "neox"]


def canonical(name, seed=0, **changes):
    return sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64, **changes)))


def statistics(a, b):
    """Of random inputs, with products in float64: what is compared below is then exact."""
    generator = torch.Generator().manual_seed(0)
    modules = full_module(a, torch.float64), full_module(b, torch.float64)
    if a.spec.task == "image-classification":
        batches = [
            {"pixel_values": torch.randn(16, 3, 16, 16, generator=generator, dtype=torch.float64)}
            for _ in range(2)
        ]
    else:
        batches = [
            {"input_ids": torch.randint(5, 101, (16, 32), generator=generator)} for _ in range(2)
        ]
    return gather(a.spec, modules, batches, dtype=torch.float64)


def values(record, when):
    return {(row.layer, row.space): getattr(row, when) for row in record.layers}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_symmetry_is_seen_in_every_layer_and_kind(name):
    model = canonical(name)
    planted = Alignment.random(model.spec, torch.Generator().manual_seed(1))
    record = measure_correlations(statistics(model, apply(planted, model)), planted.inverse())
    assert {kind for _, kind in values(record, "after")} >= {"ff", "qk", "vo", "residual"}
    assert {layer for layer, _ in values(record, "after")} == {0, 1, 2}
    for key, after in values(record, "after").items():
        assert after == pytest.approx(1.0, abs=1e-5), key
        assert abs(values(record, "before")[key]) < 0.3, key
    matrix = torch.tensor(record.matrix.values)
    assert torch.allclose(matrix.diagonal(), torch.ones(48), atol=1e-3)
    assert record.matrix.borders == (12, 24, 36)
    assert record.matrix.space == "vo.0" and matrix.abs().max() <= 1.001


@pytest.mark.parametrize("name", FAMILIES)
def test_after_is_what_the_moved_model_has_before(name):
    """The moved model's own statistics are the oracle; the unmoved model is the control."""
    a, b = canonical(name), canonical(name, seed=1)
    moving = Alignment.random(a.spec, torch.Generator().manual_seed(1))
    aligned = measure_correlations(statistics(a, b), moving)
    moved = measure_correlations(statistics(a, apply(moving, b)), Alignment.identity(a.spec))
    assert values(aligned, "after") == pytest.approx(values(moved, "before"), abs=1e-5)
    assert values(aligned, "before") != pytest.approx(values(moved, "before"), abs=1e-3)
    assert torch.allclose(
        torch.tensor(aligned.matrix.values), torch.tensor(moved.matrix.values), atol=1e-3
    )


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_align_finds_is_kept_and_shown(name, tmp_path):
    """From a planted pair to the page; unrelated models, aligned the same way, stay low."""
    model = canonical(name)
    planted, other = random_member(model, seed=1)[1], canonical(name, seed=1)
    after = []
    for number, b in enumerate((planted, other)):
        aligned = sm.align(model, b, _with_statistics(model, b))
        folder = tmp_path / str(number)
        folder.mkdir()
        write_evidence(aligned, folder)
        record = Correlations.from_json(json.loads((folder / "correlations.json").read_text()))
        assert record == aligned.solution.correlations
        after.append(min(values(record, "after").values()))
        assert "correlations" not in json.loads((folder / "solution.json").read_text())
        text = report(folder, folder / "page.html").read_text("utf-8")
        for shown in (
            "Feature correlation",
            "12 of the 12 features of each head, after alignment",
            "s1-matrix-border-24",
            "residual, after",
        ):
            assert shown in text, shown
    assert after[0] == pytest.approx(1.0, abs=1e-2) and after[1] < 0.6
    alone = sm.align(model, planted, RECIPES["weights-only"])
    write_evidence(alone, tmp_path)
    assert (tmp_path / "solution.json").exists() and not (tmp_path / "correlations.json").exists()


def _with_statistics(a, b):
    recipe = RECIPES["activations"]
    forms = [recipe.prepare(model) for model in (a, b)]
    assert isinstance(recipe.matching, ActivationMatching)
    header = pair_header(*forms)
    return replace(
        recipe,
        matching=replace(
            recipe.matching,
            statistics=replace(statistics(*forms), header=header),
            dtype=torch.float64,
        ),
    )


def test_large_heads_are_thinned_and_features_that_never_change_left_out():
    model = canonical("bert", hidden_size=192, num_attention_heads=12)
    observed = statistics(model, model)
    record = measure_correlations(observed, Alignment.identity(model.spec))
    assert len(record.matrix.values) == len(record.matrix.values[0]) == 120 <= MAX_FEATURES
    assert record.matrix.borders == tuple(range(10, 120, 10))
    assert record.matrix.features.startswith("10 of the 16 ")
    assert all(record.matrix.values[at][at] == pytest.approx(1.0, abs=1e-3) for at in range(120))
    name = next(name for name, moments in observed.moments.items() if "ff.0" in str(moments.axis))
    dead = observed.moments[name]
    still = {
        "sum_a": dead.count.expand(1),
        "square_a": dead.count.expand(1),
        "cross": dead.sum_b[None],
    }  # a feature that is always one
    sums = {part: torch.cat([value, getattr(dead, part)[1:]]) for part, value in still.items()}
    thinned = measure_correlations(
        Statistics({**observed.moments, name: replace(dead, **sums)}),
        Alignment.identity(model.spec),
    )
    assert values(thinned, "after")[0, "ff"] == pytest.approx(1.0, abs=1e-6)


def test_without_heads_that_move_there_is_no_matrix():
    model = sm.canonicalize(
        canonical("bert").restrict(head="identity", qk="identity", vo="identity")
    )
    record = measure_correlations(statistics(model, model), Alignment.identity(model.spec))
    assert record.matrix is None and "matrix" not in record.to_json()
    assert {kind for _, kind in values(record, "after")} == {"ff", "residual"}

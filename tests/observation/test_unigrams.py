"""Expected frequencies of tokens from chains of single tokens, and what they do to matching."""

import pytest
import torch

import symmerge as sm
from symmerge.evaluation.data.self_generated import first_logits
from symmerge.lab.small_models import small_model
from symmerge.matching.evidence import BY_FREQUENCY
from symmerge.matching.weights import WeightMatching
from symmerge.observation import unigrams
from symmerge.observation.unigrams import COUNT, token_frequencies
from symmerge.verification.modules import full_module


def pair(name):
    return [sm.load(small_model(name, seed=seed)) for seed in (0, 1)]


@torch.no_grad()
def stationary(model):
    """The frequencies of endless chains, by powers of the matrix of predictions."""
    every = torch.arange(model.spec.sizes["vocabulary"])[:, None]
    logits = first_logits(full_module(model, torch.float32)(input_ids=every))
    return torch.linalg.matrix_power(logits[:, -1].double().softmax(-1), 64)[0]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_frequencies_are_those_of_endless_chains(name, monkeypatch):
    models = pair(name)
    monkeypatch.setattr(unigrams, "CHAINS", 4096)
    found = token_frequencies(models).double()
    assert found.sum().item() == pytest.approx(COUNT, rel=1e-4)
    expected = COUNT * torch.stack([stationary(model) for model in models]).mean(0)
    uniform = torch.full_like(expected, COUNT / len(expected))
    assert (found - expected).norm() < 0.1 * (uniform - expected).norm()
    assert torch.equal(token_frequencies(models), token_frequencies(models))
    assert not torch.equal(token_frequencies(models), token_frequencies(models, seed=1))


def test_there_are_none_of_other_models_and_too_large_ones(monkeypatch):
    assert token_frequencies(pair("gpt2")) is not None
    assert token_frequencies(pair("vit")) is None
    assert token_frequencies(pair("bert")) is None  # a masked model does not continue a token
    monkeypatch.setitem(unigrams.WORK, "cpu", 1000)
    assert token_frequencies(pair("gpt2")) is None


def test_they_weigh_the_tokens_of_a_match():
    solver = WeightMatching(generate_text=False, unigrams=True)
    weighted = sm.align(*pair("gpt2"), solver).solution
    plain = sm.align(*pair("gpt2"), WeightMatching(generate_text=False)).solution
    assert (weighted.weighting.norm, weighted.weighting.frequency) == (
        BY_FREQUENCY.norm,
        BY_FREQUENCY.frequency,
    )
    assert weighted.objective != plain.objective
    images = sm.align(*pair("vit"), solver).solution
    assert images.objective == sm.align(*pair("vit"), WeightMatching()).solution.objective

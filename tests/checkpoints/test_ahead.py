"""Weights read ahead, and modules that are filled from them."""

import threading
from dataclasses import replace

import pytest
import torch

from symmerge import load
from symmerge.checkpoints import ahead
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
from symmerge.lab.small_models import small_model
from symmerge.models.canonical.form import canonicalize
from symmerge.models.circuits import computed_once
from symmerge.verification.modules import full_module

pytestmark = pytest.mark.quick
TENSORS = {name: torch.full((2,), float(number)) for number, name in enumerate("abcdef")}


@pytest.fixture
def many_workers(monkeypatch):
    monkeypatch.setattr(ahead, "workers", lambda: 4)


def test_tensors_are_computed_before_they_are_read(many_workers):
    begun = {name: threading.Event() for name in TENSORS}

    def compute(name):
        begun[name].set()
        return TENSORS[name]

    weights = DerivedWeights(
        MemoryWeights(TENSORS), {name: (lambda name=name: compute(name)) for name in TENSORS}
    )
    with ahead.read_ahead(weights, list(TENSORS)) as reading:
        assert torch.equal(reading["a"], TENSORS["a"])
        assert begun["c"].wait(5)  # nobody has asked for it
        assert not begun["f"].is_set()  # control: only a few are
        for name in ("c", "f", "b", "a", "d", "e"):  # out of turn, and one of them twice
            assert torch.equal(reading[name], TENSORS[name])


def test_errors_reach_the_reader(many_workers):
    def fail():
        raise ValueError("torn")

    weights = DerivedWeights(MemoryWeights(TENSORS), {"b": fail})
    with ahead.read_ahead(weights, list(TENSORS)) as reading:
        assert torch.equal(reading["a"], TENSORS["a"])
        with pytest.raises(ValueError, match="torn"):
            reading["b"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_module_is_filled_alike_with_one_worker_and_with_many(name, monkeypatch):
    model = canonicalize(load(small_model(name)))
    one = full_module(model, torch.float32).state_dict()
    monkeypatch.setattr(ahead, "workers", lambda: 4)
    many = full_module(model, torch.float32).state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[key], many[key]) for key in one)


def test_a_module_shares_the_memory_of_its_weights(many_workers):
    """Barriers write each mean into the tensors that the module was made of."""
    model = load(small_model("gpt2"))
    tensors = {name: model.weights[name] for name in model.weights}
    module = full_module(replace(model, weights=MemoryWeights(tensors)), torch.float32)
    tensors["transformer.wte.weight"].fill_(3.0)
    assert (module.transformer.wte.weight == 3.0).all()
    moved = full_module(replace(model, weights=MemoryWeights(tensors)), torch.float64, "cpu")
    tensors["transformer.wte.weight"].fill_(4.0)
    assert (moved.transformer.wte.weight == 3.0).all()  # control: another precision is a copy


def test_spaces_are_computed_side_by_side_and_once():
    met, calls = threading.Barrier(2, timeout=5), []

    def compute(space):
        calls.append(space)
        met.wait()  # breaks unless another space is computed meanwhile
        return {}

    pieces = computed_once(compute)
    threads = [threading.Thread(target=pieces, args=(space,)) for space in ("x", "y", "x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == ["x", "y"]


def test_a_space_that_failed_is_computed_again():
    answers = [ValueError("torn"), {}]

    def compute(space):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pieces = computed_once(compute)
    with pytest.raises(ValueError, match="torn"):
        pieces("x")
    assert pieces("x") == {} and not answers

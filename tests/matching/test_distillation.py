"""Batches are shuffled, full and apart from those held out; targets are the parents' mean."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import symmerge as sm
from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import IGNORED, LazyBatches
from symmerge.lab.small_models import small_model
from symmerge.matching.learning import distillation
from symmerge.matching.learning.distillation import (
    ROWS,
    TOKENS,
    DistillationData,
    distillation_loss,
    split_batches,
    usual_batch_size,
)
from symmerge.verification.modules import full_module

CPU = torch.device("cpu")
TASKS = {"gpt2": "clm", "llama": "clm", "bert": "mlm", "roberta": "mlm"}


@cache
def pair(name, **changes):
    return tuple(sm.load(small_model(name, seed=seed, **changes)) for seed in (0, 1))


@cache
def parents(name, **changes):
    return [full_module(model, torch.float32) for model in pair(name, **changes)]


@cache
def task(name, samples=26):
    return sm.make_task(TASKS[name], "self", pair(name), samples=samples)


def learning_data(name, target="parents", size=4, held_out=0.2):
    learned, _ = split_batches(task(name), size, 0, held_out)
    return DistillationData(learned, parents(name), target, CPU), list(learned)


def rows(batches):
    return [tuple(row.tolist()) for batch in batches for row in batch["input_ids"]]


# batches


def test_batches_are_shuffled_whole_and_apart():
    everything = rows(task("gpt2").batches)
    learned, held = (list(part) for part in split_batches(task("gpt2"), 4, 0, 0.2))
    assert [len(batch["labels"]) for batch in learned] == [4] * 5 and [
        len(batch["labels"]) for batch in held
    ] == [4]  # of 21 and 5 samples
    mine, others = rows(learned), rows(held)
    assert len(set(mine)) == 20 and set(mine) < set(everything) and not set(mine) & set(others)
    order = [everything.index(row) for row in mine]
    assert order != sorted(order)  # tasks keep them sorted
    assert all(
        torch.equal(batch["input_ids"], batch["labels"]) for batch in learned
    )  # labels stay with their samples


def test_the_same_seed_shuffles_the_same():
    first, again, other = (
        tuple(rows(part) for part in split_batches(task("gpt2"), 4, seed, 0.2))
        for seed in (0, 0, 1)
    )
    assert first == again and first[0] != other[0] and first[1] != other[1]


@pytest.mark.parametrize("held_out", [0.01, 0.5, 0.95])
def test_something_is_held_out_and_something_learned_from(held_out):
    learned, held = (rows(part) for part in split_batches(task("gpt2"), 1, 0, held_out))
    assert len(learned) + len(held) == 26 and len(held) == max(1, round(26 * held_out))


def test_fewer_samples_than_a_batch_are_one():
    learned, held = (list(part) for part in split_batches(task("gpt2"), 100, 0, 0.2))
    assert [len(batch["labels"]) for batch in (*learned, *held)] == [21, 5]


def test_too_few_samples_are_refused():
    one, two = (sm.make_task("clm", "self", pair("gpt2"), samples=samples) for samples in (1, 2))
    with pytest.raises(
        DataError, match="1 samples of self are too few to learn from and to evaluate on"
    ):
        split_batches(one, 4, 0, 0.1)
    assert [len(part) for part in split_batches(two, 4, 0, 0.1)] == [1, 1]  # the control


def test_batches_of_a_size_that_suits_the_task():
    assert (
        usual_batch_size(task("gpt2")) == TOKENS // 62 == TOKENS // task("gpt2").settings["block"]
    )
    assert usual_batch_size(replace(task("gpt2"), settings={"block": 10 * TOKENS})) == 1
    assert {
        name: usual_batch_size(replace(task("gpt2"), name=name, settings={})) for name in ROWS
    } == ROWS


# answers


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_the_mean_of_the_parents_where_it_counts(name):
    given, batches = learning_data(name)
    assert len(given) == len(batches) == 5
    for number, batch in enumerate(batches):
        taught, counts = given[number], (batch["labels"] != IGNORED).flatten()
        assert (
            taught.inputs.keys() == {"input_ids"} and taught.targets is not None
        )  # labels are not shown
        with torch.no_grad():
            both = [
                module(**taught.inputs).logits.double().softmax(-1).flatten(0, 1)[counts]
                for module in parents(name)
            ]
        answers = taught.targets[: int(counts.sum())].double()
        torch.testing.assert_close(
            answers, (both[0] + both[1]) / 2, rtol=2e-3, atol=1e-6
        )  # kept in half the memory
        assert not torch.allclose(
            answers, both[0], rtol=2e-3, atol=1e-4
        )  # the control: one parent is not both
        assert taught.targets.sum(-1).float().allclose(torch.ones(len(taught.targets)), atol=5e-3)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_masked_places_are_those_with_labels_and_weigh_one_together(name):
    given, batches = learning_data(name)
    counts = [int((batch["labels"] != IGNORED).sum()) for batch in batches]
    assert len(set(counts)) > 1  # the control: some batches must be filled up
    for number, batch in enumerate(batches):
        taught, some = given[number], counts[number]
        assert taught.positions is not None and taught.weights is not None
        assert (
            taught.positions[:some].tolist()
            == (batch["labels"] != IGNORED).flatten().nonzero().flatten().tolist()
        )
        assert taught.weights.sum().item() == pytest.approx(1, abs=1e-6)
        assert (taught.weights[:some] > 0).all() and not taught.weights[some:].any()
        assert (
            len(taught.positions) == len(taught.weights) == len(taught.targets) == max(counts)
        )  # all of one shape


def test_where_everything_counts_no_place_is_named():
    taught = learning_data("gpt2")[0][0]
    assert (
        taught.positions is None
        and taught.weights is None
        and taught.targets.shape == (4 * 62, 101)
    )


def test_answers_are_asked_for_once_and_kept(monkeypatch):
    asked = []
    real = distillation.logits_at
    monkeypatch.setattr(distillation, "logits_at", lambda *args: asked.append(1) or real(*args))
    given, _ = learning_data("bert")
    room = given.cache_left
    first, again = given[1], given[1]
    assert first is again and len(asked) == 2 and given.cache_left < room
    monkeypatch.setattr(distillation, "MAX_CACHE", 1)
    fresh, _ = learning_data("bert")
    assert (
        fresh[1] is not fresh[1] and len(asked) == 6 and fresh.cache_left == 1
    )  # where there is no room, they are asked again
    for name, tensor in fresh[1].tensors().items():
        assert torch.equal(first.tensors()[name], tensor)
    assert torch.equal(first.inputs["input_ids"], fresh[1].inputs["input_ids"]) and not torch.equal(
        first.inputs["input_ids"], fresh[2].inputs["input_ids"]
    )


# losses


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_the_cross_entropy_to_the_parents(name):
    given, batches = learning_data(name)
    with torch.no_grad():
        found = distillation_loss(parents(name)[0], given[0])
        counts = batches[0]["labels"] != IGNORED
        logits = [
            module(input_ids=batches[0]["input_ids"]).logits.double()[counts]
            for module in parents(name)
        ]
    answers = torch.stack([each.softmax(-1) for each in logits]).mean(0)
    plain = -(answers * logits[0].log_softmax(-1)).sum(-1).mean()
    assert found.item() == pytest.approx(plain.item(), abs=1e-3)
    entropy = -(answers * answers.log()).sum(-1).mean()
    assert found > entropy + 0.05  # the control: one parent alone cannot say what both do


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_fills_up_does_not_count(name):
    """The mean over places, whatever stands in those that only fill up; and the gradient flows."""
    given, _ = learning_data(name)
    model = full_module(pair(name)[0], torch.float32).requires_grad_(True)
    taught = given[0]
    before = distillation_loss(model, taught)
    if taught.weights is not None:
        filled = taught.weights == 0
        changed = replace(taught, targets=torch.where(filled[:, None], 1.0, taught.targets.float()))
        assert filled.any() and torch.equal(distillation_loss(model, changed), before)
        wrong = replace(taught, weights=torch.full_like(taught.weights, 1 / len(filled)))
        assert abs(distillation_loss(model, wrong) - before) > 1e-3  # the control
    before.backward()
    assert all(
        parameter.grad is None or parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    assert (
        sum(
            parameter.grad is not None and bool(parameter.grad.any())
            for parameter in model.parameters()
        )
        > 10
    )


@pytest.mark.parametrize("name", TASKS)
def test_labels_as_target_give_the_models_own_loss(name):
    given, batches = learning_data(name, "labels")
    taught = given[0]
    assert (
        taught.targets is None
        and taught.positions is None
        and torch.equal(taught.inputs["labels"], batches[0]["labels"])
    )
    with torch.no_grad():
        found, logits = (
            distillation_loss(parents(name)[1], taught),
            parents(name)[1](input_ids=taught.inputs["input_ids"]).logits.double(),
        )
    labels = taught.inputs["labels"]
    if TASKS[name] == "clm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    assert found.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).item(),
        rel=1e-5,
    )
    assert (
        abs(found - distillation_loss(parents(name)[1], learning_data(name)[0][0])) > 1e-2
    )  # the control: another target


def values(samples):
    tokens, labels = zip(*samples, strict=True)
    return {"input_ids": torch.stack(tokens), "labels": torch.tensor(labels)}


@pytest.mark.parametrize("target", ["parents", "labels"])
def test_values_are_learned_by_their_squared_error(target):
    tokens = torch.randint(5, 100, (6, 10), generator=torch.Generator().manual_seed(0))
    groups = LazyBatches(
        (tuple(zip(tokens, [0.5, 1.0, -2.0, 0.0, 3.0, 1.5], strict=True)),), values
    )
    modules = parents("bert-classifier", num_labels=1)
    taught = DistillationData(groups, modules, target, CPU)[0]
    with torch.no_grad():
        said = [module(input_ids=tokens).logits.squeeze(-1) for module in modules]
        found = distillation_loss(modules[0], taught)
    wanted = (
        (said[0] + said[1]) / 2
        if target == "parents"
        else torch.tensor([0.5, 1.0, -2.0, 0.0, 3.0, 1.5])
    )
    assert found.item() == pytest.approx((said[0] - wanted).square().mean().item(), rel=1e-5)
    assert taught.targets is None or taught.targets.dtype == torch.float32

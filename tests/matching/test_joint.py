"""Many models learned together: gradients as in pairs, better means, exact ends."""

from dataclasses import replace

import pytest
import torch

import symmerge as sm
from symmerge.aligning.many import align_many
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import make_task, task_of
from symmerge.lab.small_models import small_model
from symmerge.matching.base import cycle_error
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.joint import JointObjective
from symmerge.matching.learning.learner import joint_learner, pair_learner
from symmerge.matching.learning.moving import MovingModel
from symmerge.matching.learning.samplers import Shares
from symmerge.matching.weights import WeightMatching
from symmerge.models.interpolation import mean

FEW = {"steps": 12, "start": WeightMatching(generate_text=False), "batch_size": 4}


def three(name, count=3):
    return [sm.load(small_model(name, seed=seed)) for seed in range(count)]


def little(models):
    """Little self-generated text: generating it takes longer than learning."""
    return make_task(task_of(models[0]), "self", models, max_samples=24)


def begun(name, **options):
    models = [sm.canonicalize(model) for model in three(name)]
    starts = [
        sm.Alignment.random(models[0].spec, torch.Generator().manual_seed(number))
        for number in (1, 2)
    ]
    options = LearnedMatching(batch_size=4, data=little(models), **options)
    data = load_data(options, models, lambda line: None)
    return models, starts, joint_learner(options, models[0], models[1:], starts, data)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "neox"])
def test_every_member_follows_the_gradient_that_a_pair_would(name, monkeypatch):
    """The same mean as one member and the rest: a pair's gradient is tested against autograd."""
    monkeypatch.setattr(MovingModel, "_step", lambda self, optimizer: None)
    models, starts, learner = begun(name)
    batches, shares = (learner.data.train[0],), torch.tensor([0.5, 0.3, 0.2])
    learner.objective.shares.copy_(shares)
    learner.descend(batches)
    placed = [
        models[0],
        *(sm.apply(start, model) for start, model in zip(starts, models[1:], strict=True)),
    ]
    for number, member in enumerate(learner.objective.members, 1):
        rest = [index for index in range(3) if index != number]
        others = mean(
            [placed[index] for index in rest],
            [float(shares[index] / (1 - shares[number])) for index in rest],
        )
        start = starts[number - 1]
        pair = pair_learner(learner.options, others, models[number], start, learner.data)
        for share, same in ((shares[number], True), (shares[number] + 0.2, False)):
            pair.objective.segment.t.fill_(float(share))
            pair.descend(batches)
            joint, alone = (
                torch.cat([value.grad.flatten() for value in moving.parameters])
                for moving in (member, pair.objective.members[0])
            )
            assert ((joint - alone).norm() <= 1e-3 * alone.norm()) == same


def planted(name, size=0.05):
    """Three models that are one but for noise and a symmetry."""
    ready = sm.canonicalize(sm.load(small_model(name)))
    found = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        noisy = {
            key: ready.weights[key]
            + size
            * ready.weights[key].std()
            * torch.randn(ready.weights[key].shape, generator=generator)
            for key in ready.weights
        }
        noisy = {
            key: value if ready.weights[key].std() > 0 else ready.weights[key]
            for key, value in noisy.items()
        }
        model = ready.derive(MemoryWeights(noisy), step=HistoryStep("noise", ""))
        found.append(sm.apply(sm.Alignment.random(ready.spec, generator), model))
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_mean_of_all_gets_better_and_the_ends_stay(name):
    models = planted(name, 0.3)
    found = align_many(models, LearnedMatching(**FEW, lr=1e-2))
    losses = found.universe.settings["losses"]
    assert min(losses) < losses[0]
    for before, after in zip(models, found.models, strict=True):
        assert sm.verify(before, after).same
    assert not sm.verify(models[0], found.models[1]).same
    assert cycle_error(found.universe) <= 1e-5


def test_the_same_seed_gives_the_same_result():
    models = three("gpt2")
    found = [
        align_many(models, LearnedMatching(**FEW, data=little(models), seed=seed))
        for seed in (0, 0, 1)
    ]
    first, again, other = (
        [value for alignment in one.universe.alignments for value in _values(alignment)]
        for one in found
    )
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def _values(alignment):
    return [value for element in alignment.elements.values() for value in element.values()]


def test_only_what_was_chosen_moves_and_the_reference_never():
    models = three("gpt2")
    start = align_many(models, WeightMatching(generate_text=False), reference=1)
    found = align_many(
        models, LearnedMatching(**FEW, data=little(models), spaces=("ff",), lr=1e-2), reference=1
    )
    for number in range(3):
        before, after = start.universe.alignments[number], found.universe.alignments[number]
        for space in before.elements:
            if not space.startswith("ff") or number == 1:
                assert all(
                    torch.allclose(before[space][part], after[space][part], atol=1e-9)
                    for part in before[space]
                ), (number, space)


def test_interrupted_it_keeps_the_best(monkeypatch):
    models = three("gpt2")
    calls, real = [], JointObjective.descend

    def stop(self, batches):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(self, batches)

    monkeypatch.setattr(JointObjective, "descend", stop)
    found = align_many(models, LearnedMatching(**FEW, data=little(models)))
    assert (
        found.universe.interrupted
        and len(found.models) == 3
        and found.universe.settings["learned"]["steps"] == 6
    )
    assert all(
        sm.verify(before, after).same for before, after in zip(models, found.models, strict=True)
    )


def test_shares_are_drawn_as_they_say():
    def drawn(concentration, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([Shares(concentration).draw(generator, 3) for _ in range(200)])

    for concentration in (0.1, 1.0, 10.0):
        found = drawn(concentration)
        assert (
            torch.allclose(found.sum(1), torch.ones(200, dtype=torch.float64)) and found.min() >= 0
        )
        assert found.mean(0) == pytest.approx([1 / 3] * 3, abs=0.1)
        assert found.std(0).mean() == pytest.approx(
            (2 / 9 / (3 * concentration + 1)) ** 0.5, rel=0.2
        )
        assert torch.equal(found, drawn(concentration)) and not torch.equal(
            found, drawn(concentration, seed=1)
        )
    with pytest.raises(MismatchError, match="concentration"):
        Shares(0.0)
    with pytest.raises(MismatchError, match="concentration"):
        LearnedMatching(concentration=-1.0)


def test_many_cannot_start_from_the_identity():
    with pytest.raises(MismatchError, match="weights or activations"):
        align_many(three("gpt2"), replace(LearnedMatching(), start="identity"))

"""The optimisation loop, with something small to optimise; and learning rates."""

import math

import pytest
import torch

from symmerge.matching.optimization.buffers import StepLosses, copy_all
from symmerge.matching.optimization.loop import (
    Evaluation,
    History,
    Hooks,
    Loop,
    LoopPlan,
    NotFinite,
    Saver,
    evenly,
    require_finite,
)
from symmerge.matching.optimization.schedules import LearningRate


class Scripted:
    """Takes steps, and finds the losses that it was told."""

    def __init__(self, losses, stride=1):
        self.script, self.stride, self.value, self.best = list(losses), stride, 0, None

    def advance(self, step):
        self.value += self.stride
        return step + self.stride

    def evaluate(self, step):
        return Evaluation(require_finite(self.script[step], "held-out loss", step), " here")

    def keep_best(self):
        self.best = self.value

    def state(self, history):
        return {"value": self.value, "best": self.best, "history": history.to_json()}

    def restore(self, state):
        self.value, self.best = state["value"], state["best"]
        return History(**state["history"])


FALLING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.25]


def test_a_run_evaluates_both_ends_and_keeps_the_best():
    lines, subject = [], Scripted([5.0, 4.0, 3.0, 1.0, 2.0, 2.5, 2.0])
    plan = LoopPlan(steps=6, evaluate_every=2, evaluate_ends=True)
    history = Loop(subject, plan, Hooks(report=lines.append)).run()
    assert history.losses == [5.0, 3.0, 2.0, 2.0] and history.stopped == "all steps done"
    assert (subject.best, history.best_step, history.stale) == (4, 4, 1)
    assert lines[1] == "step 2 of 6: held-out loss 3.0000 here, the best so far"
    assert lines[3] == "step 6 of 6: held-out loss 2.0000 here"


def test_without_ends_only_every_so_many_steps_are_evaluated():
    assert Loop(Scripted(FALLING), LoopPlan(steps=5, evaluate_every=2)).run().losses == [3.0, 1.0]
    assert not Loop(Scripted(FALLING), LoopPlan(steps=5)).run().losses


def test_about_twenty_evaluations_are_spread_evenly():
    assert evenly(300).evaluate_every == 15 and evenly(7).evaluate_every == 1


@pytest.mark.parametrize(("least", "steps"), [(0, 3), (5, 5)])
def test_patience_ends_a_run_but_not_before_its_least_steps(least, steps):
    subject, lines = Scripted([5.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]), []
    plan = evenly(6, patience=2, least_steps=least)
    history = Loop(subject, plan, Hooks(report=lines.append)).run()
    assert history.step == steps and subject.best == 1
    assert history.stopped == f"no better for {steps - 1} evaluations" and steps < 6
    assert lines[-1] == f"stopped at step {steps}: {history.stopped}"
    assert Loop(Scripted(FALLING), plan).run().step == 6  # the control


def test_a_loss_that_is_not_finite_or_ctrl_c_leaves_the_best():
    def stop(step):
        if step == 3:
            raise KeyboardInterrupt

    broken, lines = [5.0, 4.0, math.nan, 1.0, 1.0, 1.0, 1.0], []
    failed = Loop(Scripted(broken), evenly(6), Hooks(report=lines.append)).run_to_best()
    assert failed.failed and failed.stopped == "the held-out loss was not finite at step 2"
    assert failed.losses == [5.0, 4.0] and "lower --lr" in lines[-1]
    stopped = Loop(Scripted(FALLING), evenly(6), Hooks(after_step=stop)).run_to_best()
    assert stopped.interrupted and stopped.step == 3 and stopped.losses == FALLING[:3]
    with pytest.raises(NotFinite):
        Loop(Scripted(broken), evenly(6)).run()
    with pytest.raises(KeyboardInterrupt):
        Loop(Scripted(FALLING), evenly(6), Hooks(after_step=stop)).run()


def test_a_resumed_run_ends_as_one_run_does():
    states, whole = [], Scripted(FALLING)
    straight = Loop(whole, evenly(6), Hooks(saver=Saver(states.append))).run()
    assert [state["value"] for state in states] == list(range(7))
    for state in states:
        subject = Scripted(FALLING)
        loop = Loop(subject, evenly(6))
        loop.resume(state)
        assert loop.run().to_json() == straight.to_json()
        assert (subject.value, subject.best) == (whole.value, whole.best)


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 3), (1000.0, 0)])
def test_a_timed_saver_needs_no_evaluation(seconds, count):
    states, advances = [], []
    hooks = Hooks(saver=Saver(states.append, seconds), progress=lambda *ends: advances.append(ends))
    Loop(Scripted(FALLING, stride=2), LoopPlan(steps=6), hooks).run()
    assert len(states) == count and advances == [(0, 2), (2, 4), (4, 6)]


def test_a_warm_up_can_overlap_the_decay():
    apart = LearningRate(lr=2.0, steps=100, warmup=10)
    overlapping = LearningRate(lr=2.0, steps=100, warmup=10, overlap=True)
    assert apart.at(9) == 2.0 > overlapping.at(9) > 1.9
    assert [overlapping.at(step) for step in (0, 4)] == [0.2, 1.0]
    assert overlapping.at(99) < 0.01


def test_the_first_loss_that_is_not_finite_is_found():
    losses = StepLosses(4, torch.device("cpu"))
    for value in (1.0, math.inf, math.nan):
        assert losses.first_not_finite() in (None, 2)
        losses.add(torch.tensor(value))
    assert losses.first_not_finite() == 2 and int(losses.step) == 3


def test_copies_convert_and_may_be_none():
    target = torch.zeros(2, dtype=torch.bfloat16)
    copy_all([target], [torch.tensor([1.5, 2.0])])
    copy_all([], [])
    assert target.tolist() == [1.5, 2.0]

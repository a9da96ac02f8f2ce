"""Runs side by side: results in order, and nothing goes on after a failure."""

from threading import Event

import pytest
import torch

from symmerge.verification.workers import run_all


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_jobs(workers):
    steps = []

    def job(number):
        def run(report):
            report(f"step {number}")
            assert not torch.is_grad_enabled() or workers == 1
            return number**2

        return run

    results = run_all([job(number) for number in range(9)], workers, steps.append)
    assert results == [number**2 for number in range(9)]
    assert sorted(steps) == [f"step {number}" for number in range(9)]


def test_the_others_stop_at_their_next_step_if_one_fails():
    failed, went_on = Event(), []

    def fails(report):
        failed.set()
        raise ValueError("broken")

    def endless(report):
        failed.wait(10)
        for step in range(10**9):
            report(str(step))
        went_on.append(True)

    with pytest.raises(ValueError, match="broken"):
        run_all([fails, endless, endless], 2, None)
    assert not went_on

"""Learned matching: elements move along their groups, the ends stay the parents, and the middle gets better."""

import pytest
import torch

import symmerge as sm
from symmerge.alignment import Alignment, apply
from symmerge.errors import MismatchError
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.weights import WeightMatching
from symmerge.zoo.small import small_model

START = WeightMatching(own_text=False, max_sweeps=2)


def pair(name):
    return [sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64))) for seed in (0, 1)]


def learn(name, **options):
    a, b = pair(name)
    task = None if a.spec.task == "causal-lm" else sm.make_task("image", "digits", [a, b], samples=40)
    return a, b, LearnedMatching(data=task, start=START, **{"steps": 10, **options}).solve(a, b)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_learning_helps_and_the_ends_stay_exact(name):
    a, b, solution = learn(name)
    assert min(solution.objective) < solution.objective[0]  # the loss on held-out inputs; the first is before any step
    assert sm.verify(b, apply(solution.alignment, b), dtype=torch.float64).difference <= 1e-10
    start = START.solve(a, b).alignment
    parts = [(solution.alignment[space][part].double(), start[space][part].double()) for space in start.elements for part in start[space]]
    apart = max(float((learned - before).abs().max()) for learned, before in parts if before.numel())
    assert apart > 1e-4  # the control: something was learned


def test_only_the_spaces_chosen_move():
    a, b, solution = learn("gpt2", spaces=("vo",))
    start = START.solve(a, b).alignment
    moved = {
        space.partition(".")[0] for space in start.elements for part in start[space] if not torch.equal(solution.alignment[space][part], start[space][part])
    }
    assert moved == {"vo"}


def test_the_same_seed_learns_the_same():
    first, again, other = (learn("gpt2", seed=seed)[2].objective for seed in (0, 0, 1))
    assert first == again and first != other


def test_nothing_to_learn_is_said():
    with pytest.raises(MismatchError, match="nothing can be learned"):
        learn("gpt2", spaces=("ff",), permutations=False)


def test_an_alignment_that_leaves_its_group_would_be_noticed():
    """The control of exactness: the same change without the exponential is no symmetry."""
    a, b = pair("gpt2")
    start = START.solve(a, b).alignment
    turned = start["residual"]["matrix"] + 0.01 * torch.randn(start["residual"]["matrix"].shape, generator=torch.Generator().manual_seed(0))
    wrong = Alignment(start.spec, {**start.elements, "residual": {"matrix": turned}})
    with pytest.raises(sm.SymmergeError):
        apply(wrong, b)

"""Soft permutations: the midpoint gets better, the soft end is not B, hardened is exact."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.errors import MismatchError, SymmergeError
from symmerge.lab.small_models import small_model
from symmerge.matching.base import Solution
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.distillation import distillation_loss
from symmerge.matching.learning.soft_permutations import (
    SoftPermutation,
    first_latent,
    hardened,
    one_hot,
    relax,
    sinkhorn,
    soft_table,
)
from symmerge.matching.resume import ResumeFile
from symmerge.matching.soft import SoftMatching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment, apply
from symmerge.symmetry.groups import Gram, Permutation
from symmerge.symmetry.notation import Role
from symmerge.verification.modules import full_module

START = WeightMatching(generate_text=False, max_sweeps=1)


def pair(name):
    return [
        sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))
        for seed in (0, 1)
    ]


@cache
def ready(name):
    """A pair, what its parents wrote, and where weight matching puts it: made once."""
    a, b = pair(name)
    return a, b, sm.make_task("clm", "self", [a, b], samples=24), START.solve(a, b).alignment


def soften(name, *, progress=None, resume_file=None, **options):
    a, b, task, start = ready(name)
    return (
        a,
        b,
        SoftMatching(data=task, **{"start": start, "steps": 8, "batch_size": 8, **options}).solve(
            a, b, progress=progress, resume_file=resume_file
        ),
    )


def generator():
    return torch.Generator().manual_seed(0)


def changed(solution, start):
    """The spaces whose elements are not the start's."""
    return {
        space
        for space, element in start.elements.items()
        for part in element
        if not torch.equal(solution.alignment[space][part], element[part])
    }


# the matrices


def test_sinkhorn_is_doubly_stochastic_and_lets_gradients_through():
    latent = torch.randn(3, 12, 12, generator=generator(), dtype=torch.float64, requires_grad=True)
    found = sinkhorn(latent, 20)
    for axis in (-1, -2):
        assert torch.allclose(found.sum(axis), torch.ones(3, 12, dtype=torch.float64), atol=1e-6)
    assert (
        float((sinkhorn(latent.detach(), 1).sum(-1) - 1).abs().max()) > 1e-3
    )  # the control: one normalisation is not enough for the rows
    assert torch.autograd.gradcheck(
        lambda x: sinkhorn(x, 3), latent[:1, :3, :3].detach().requires_grad_()
    )
    found[0, 0, 0].backward()
    assert (
        latent.grad is not None
        and float(latent.grad[0].abs().max()) > 1e-3
        and not latent.grad[1:].any()
    )


def test_without_noise_it_is_the_permutation():
    latent = first_latent(9, (2,), 0.0, generator())
    assert torch.allclose(
        sinkhorn(latent, 20), torch.eye(9, dtype=torch.float64).expand(2, 9, 9), atol=1e-6
    )
    index = torch.randperm(9, generator=generator())
    shuffled = sinkhorn(latent[0][index], 20)
    assert torch.allclose(shuffled, one_hot(index), atol=1e-6)
    noisy = sinkhorn(first_latent(9, (2,), 0.1, generator()), 20)  # the control
    assert float((noisy - torch.eye(9, dtype=torch.float64)).abs().max()) > 1e-2


def test_noise_is_as_wide_as_the_paper_says():
    noise = first_latent(300, (), 0.5, generator()).exp() - torch.eye(300, dtype=torch.float64)
    widest = 2 * 0.5 * 3**0.5 * (2 / (300 + 300)) ** 0.5
    assert 0.99 * widest < float(noise.max()) <= widest and float(noise.min()) >= 0


@pytest.mark.parametrize("role", Role)
def test_a_sharp_matrix_acts_as_its_permutation(role):
    index, x = (
        torch.randperm(7, generator=generator()),
        torch.randn(2, 7, 5, generator=generator(), dtype=torch.float64),
    )
    soft, hard = SoftPermutation(7), Permutation(7)
    assert torch.equal(
        soft.act({"matrix": one_hot(index)}, x, role), hard.act({"index": index}, x, role)
    )
    gram = Gram.of(x[0], x[1])
    assert torch.equal(soft.nearest(gram)["matrix"], one_hot(hard.nearest(gram)["index"]))


def test_what_is_no_soft_permutation_is_noticed():
    group = SoftPermutation(5)
    mixed = group.random(generator(), (2,))
    assert (
        group.check(group.identity()).ok
        and group.check(mixed).ok
        and group.check(group.compose(mixed, mixed)).ok
    )
    assert (
        not group.check({"matrix": mixed["matrix"] * 1.01}).ok
        and not group.check({"matrix": 2 * torch.eye(5) - mixed["matrix"][0]}).ok
    )
    with pytest.raises(SymmergeError, match="harden"):
        group.inverse(mixed)


# learning


@pytest.mark.parametrize(
    ("name", "moved"), [("gpt2", {"ff", "head"}), ("llama", {"head", "query"})]
)
def test_the_middle_gets_better_and_only_the_hardened_end_is_exact(name, moved):
    _, b, solution = soften(name, lr=0.3, noise=0.1)
    numbers = solution.settings["soft"]
    assert (
        solution.relaxed is not None
        and {space.partition(".")[0] for space in solution.relaxed.elements} == moved
    )
    assert (
        min(solution.objective) < solution.objective[0]
    )  # the loss on held-out inputs; the first is before any step
    assert numbers["midpoint"]["soft"] == pytest.approx(min(solution.objective), abs=1e-5)
    assert difference(b, apply(solution.alignment, b)) <= 1e-10
    # the negative control: a mixture is no symmetry, and both kinds of end errors say so
    mixed = difference(b, relax(solution, b))
    assert (
        mixed > 1e-3
        and numbers["end"]["function"] == pytest.approx(mixed, rel=1e-3)
        and abs(numbers["end"]["loss"]) > 1e-5
    )
    assert numbers["softness"] > 0.01 and {
        space.partition(".")[0] for space in changed(solution, ready(name)[3])
    } <= {*moved, "qk", "vo"}


def test_a_permuted_stream_and_ties_mix_too():
    """The merge of A and the soft end, its tied decoder included, has the recorded loss."""
    a, b = pair("bert")
    options = SoftMatching(
        data=sm.make_task("mlm", "self", [a, b], samples=16),
        start=START,
        steps=6,
        batch_size=4,
        lr=0.3,
        spaces=("residual",),
    )
    solution = options.solve(a, b)
    assert solution.relaxed is not None and list(solution.relaxed.elements) == ["residual"]
    numbers, merged = solution.settings["soft"], sm.average(a, relax(solution, b))
    assert min(solution.objective) < solution.objective[0] and numbers["end"]["function"] > 1e-3
    assert difference(b, apply(solution.alignment, b)) <= 1e-10
    held = load_data(options, [a, b], lambda line: None).held_out
    loss = sum(
        float(distillation_loss(full_module(merged, torch.float32), held[number]))
        for number in range(len(held))
    ) / len(held)
    assert (
        loss == pytest.approx(numbers["midpoint"]["soft"], abs=1e-4)
        and abs(loss - numbers["midpoint"]["start"]) > 1e-3
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_sharp_relaxation_is_the_hardened_alignment(name):
    """Mixed by permutation matrices, the soft end is the hard one, tensor by tensor."""
    _, b = pair(name)
    start = Alignment.random(b.spec, generator())
    spaces = SoftMatching().chosen_spaces(b.spec)
    flips = {
        space: Permutation(b.spec.sizes[space]).random(generator(), b.spec.batch(space))["index"]
        for space in spaces
    }
    relaxed = Alignment(
        soft_table(b.spec, spaces),
        {space: {"matrix": one_hot(index)} for space, index in flips.items()},
    )
    hard = hardened(relaxed, b.spec).compose(start)
    assert any(not torch.equal(hard[space]["index"], start[space]["index"]) for space in spaces)
    solution = Solution(alignment=hard, relaxed=relaxed)
    soft, exact = relax(solution, b), apply(hard, b)
    for tensor in b.weights:
        assert torch.allclose(soft.weights[tensor], exact.weights[tensor], atol=1e-12), tensor
    # the control: a matrix that is nearest to the same permutation, but mixes, leads elsewhere
    mixed = {
        space: {"matrix": 0.9 * element["matrix"] + 0.1 / element["matrix"].shape[-1]}
        for space, element in relaxed.elements.items()
    }
    other = relax(replace(solution, relaxed=Alignment(relaxed.spec, mixed)), b)
    assert (
        max(
            float((other.weights[tensor] - exact.weights[tensor]).abs().max())
            for tensor in b.weights
        )
        > 1e-2
    )


def test_the_same_seed_finds_the_same():
    first, again, other = (soften("gpt2", steps=4, seed=seed)[2] for seed in (0, 0, 1))
    assert first.objective == again.objective and first.settings["soft"] == again.settings["soft"]
    assert all(
        torch.equal(element["matrix"], again.relaxed[space]["matrix"])
        for space, element in first.relaxed.elements.items()
    )
    assert first.objective != other.objective


def test_it_may_start_where_the_models_lie():
    a, _, solution = soften("gpt2", steps=2, start="identity")
    still = Alignment.identity(a.spec)
    assert (
        not changed(solution, still)
        and changed(soften("gpt2", steps=2)[2], still)
        and solution.settings["start"] == "identity"
    )


def test_ctrl_c_returns_the_best_so_far(tmp_path):
    """And a run that is taken up again ends as if it had never stopped."""
    resume_file = ResumeFile(tmp_path / "journal", {"task": "test"})

    def stop(line):
        if line.startswith("step 3 "):
            raise KeyboardInterrupt

    _, b, whole = soften("gpt2", steps=6)
    stopped = soften("gpt2", steps=6, progress=stop, resume_file=resume_file)[2]
    assert (
        stopped.interrupted and not stopped.converged and stopped.objective == whole.objective[:4]
    )
    assert stopped.settings["soft"]["stopped"] == "interrupted"
    assert difference(b, apply(stopped.alignment, b)) <= 1e-10
    resumed = soften("gpt2", steps=6, resume_file=resume_file)[2]
    assert resumed.objective == whole.objective and not resumed.interrupted


# bad input


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"sinkhorn": 0}, "at least once"),
        ({"noise": -0.1}, "small number"),
        ({"noise": float("nan")}, "small number"),
        ({"steps": 0}, "above 0"),
        ({"lr": 0.0}, "above 0"),
        ({"held_out": 1.0}, "below 1"),
        ({"sampler": "everywhere"}, "narrow"),
    ],
)
def test_bad_options_are_refused(options, remedy):
    with pytest.raises(SymmergeError, match=remedy):
        SoftMatching(**options)


@pytest.mark.parametrize(
    ("name", "spaces"), [("gpt2", ("residual",)), ("llama", ("ff",)), ("gpt2", ("vo",))]
)
def test_nothing_to_mix_is_said(name, spaces):
    """Rotated streams, scaled units and bases inside heads stay as the start found them."""
    a, b = pair(name)
    with pytest.raises(MismatchError, match="choose others"):
        SoftMatching(spaces=spaces).solve(a, b)


def test_a_solution_without_a_soft_end_is_refused():
    _, b = pair("gpt2")
    with pytest.raises(MismatchError, match="SoftMatching"):
        relax(Solution(alignment=Alignment.identity(b.spec)), b)

"""Weight matching: planted symmetries are recovered in every family, also under noise."""

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.aligning.aligned import solve_pair
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.lab.small_models import SMALL, small_model
from symmerge.matching.evidence import Evidence, Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.recipes import RECIPES
from symmerge.matching.sweeps import Sweeps
from symmerge.matching.weights import WeightMatching
from symmerge.models.distances import distance
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import indices
from symmerge.symmetry.groups.assignment import solve_assignments

ONE = WeightMatching(dtype=torch.float64, generate_text=False)


def worst(a, b):
    """The largest relative difference of a tensor; of one that is zero in both, its norm."""
    return max(
        ((a.weights[name] - b.weights[name]).norm() / a.weights[name].norm().clamp_min(1e-6)).item()
        for name in a.weights
    )


def noisy(model, size):
    """The model with noise of `size` of each tensor's own scale."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name in model.weights:
        tensor = model.weights[name]
        tensors[name] = tensor + size * tensor.std(unbiased=False) * torch.randn(
            tensor.shape, generator=generator, dtype=tensor.dtype
        )
    return model.derive(MemoryWeights(tensors), step=HistoryStep("noise", str(size)))


# Where nothing bends between two maps, any change of basis outside of heads.
LINEAR = [("gpt2", {"activation_function": "linear"}), ("whisper-classifier", {})]


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in SMALL), *LINEAR])
def test_planted_symmetries_are_recovered(name, changes):
    model = sm.load(small_model(name, dtype=torch.float64, **changes))
    moved = random_member(model, seed=1)[1]
    result = sm.align(model, moved, ONE)
    assert worst(result.reference, result.aligned) <= 1e-6
    assert result.before > 0.5 and not result.already
    # The control: without the alignment the canonical forms are far apart.
    assert worst(result.reference, sm.canonicalize(moved)) > 0.5
    assert difference(moved, result.aligned) <= 1e-10


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama", "neox"])
def test_noise_is_survived(name):
    model = sm.load(small_model(name, dtype=torch.float64))
    canonical = sm.canonicalize(model)
    alignment = sm.Alignment.random(canonical.spec, torch.Generator().manual_seed(3))
    result = sm.align(canonical, noisy(sm.apply(alignment, canonical), 0.01), ONE)
    assert (
        distance(result.reference, result.aligned) <= 0.05
    )  # noise of 1% on both sides of every product
    assert distance(result.reference, sm.canonicalize(sm.apply(alignment, canonical))) > 0.5


@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_the_objective_never_increases(name):
    pair = [
        sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))
        for seed in (0, 1)
    ]
    solution = ONE.solve(*pair)
    falls = [
        before - after
        for before, after in zip(solution.objective, solution.objective[1:], strict=False)
    ]
    assert all(fall >= -1e-9 * solution.objective[0] for fall in falls)
    assert len(solution.objective) == len(solution.changes) and solution.seconds > 0
    assert solution.by_space.keys() == pair[0].spec.hidden.keys()
    assert "sweeps" in repr(solution) and len(repr(solution)) < 300  # no tensors in it


def test_alignment_brings_unrelated_models_closer_and_keeps_both_functions():
    a, b = (sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1))
    result = sm.align(a, b, "symmerge")
    assert result.after < distance(sm.canonicalize(a), sm.canonicalize(b))
    assert sm.verify(a, result.reference).same and sm.verify(b, result.aligned).same
    assert result.solution.scored_on == "self-generated text"


def test_the_same_seed_gives_the_same_alignment():
    # Llama in both precisions: test_recipes.py
    pair = [sm.canonicalize(sm.load(small_model("gpt2", seed=seed))) for seed in (0, 1)]
    first, second = (WeightMatching(seed=4, tries=2).solve(*pair).alignment for _ in range(2))
    assert all(
        torch.equal(first[name][part], second[name][part])
        for name in first.elements
        for part in first[name]
    )


def test_pairs_that_do_not_compare_are_refused():
    with pytest.raises(
        MismatchError,
        match=r"differ in: .*residual OrthogonalFixingOnes\(48\) / OrthogonalFixingOnes\(24\)",
    ):
        solve_pair(
            sm.load(small_model("gpt2")),
            sm.load(small_model("gpt2", n_embd=24)),
            RECIPES["weights-only"],
        )


def test_same_decides_by_alignment():
    model = sm.load(small_model("llama"))
    yes = sm.same(model, random_member(model, seed=2)[1])
    assert yes.same and yes.before > 0.5 and yes.after < 1e-4
    no = sm.same(model, sm.load(small_model("llama", seed=1)))
    assert (
        not no.same
        and no.after > 0.1
        and set(no.by_space) == {"residual", "head", "query", "qk", "vo", "ff"}
    )


def test_fine_tunes_are_recognised():
    model = sm.load(small_model("bert", dtype=torch.float64))
    assert sm.align(model, noisy(model, 0.05), ONE).already


def test_merge_is_a_stock_checkpoint_between_its_parents(tmp_path):
    import transformers

    a, b = (sm.load(small_model("vit", seed=seed)) for seed in (0, 1))
    result = sm.align(a, b)
    merged = sm.load(
        sm.save(sm.average(result.reference, result.aligned, t=0.25), tmp_path / "merged")
    )
    for name in merged.weights:
        expected = 0.75 * result.reference.weights[name] + 0.25 * result.aligned.weights[name]
        assert torch.allclose(merged.weights[name], expected, atol=1e-6)
    _, info = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "# Merge of" in (tmp_path / "merged" / "README.md").read_text()
    with pytest.raises(MismatchError, match="one weight per model"):
        sm.mean([result.reference, result.aligned], [1.0])


def test_merging_a_model_with_its_own_orbit_gives_the_model_back():
    """Averaging a model with a moved copy destroys it, unless the copy is aligned first."""
    model = sm.load(small_model("gpt2", dtype=torch.float64))
    moved = random_member(model, seed=1)[1]
    result = sm.align(model, moved, ONE)
    assert difference(model, sm.average(result.reference, result.aligned)) <= 1e-6
    assert difference(model, sm.average(sm.canonicalize(model), sm.canonicalize(moved))) >= 1e-1


def decayed(seed, noise):
    """A model whose later layers weight decay has killed: nothing but noise of their own."""
    model = small_model("vit", dtype=torch.float64, num_hidden_layers=4)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if dead(name) and "norm" not in name:
            fresh = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = noise * parameter.std() * fresh
    return sm.load(model)


def dead(name):
    return any(f"layers.{layer}." in name for layer in (1, 2, 3))


@pytest.mark.parametrize("noise, error", [(1e-9, 1e-6), (1e-2, 2e-2)])
def test_what_weight_decay_has_killed_does_not_count(monkeypatch, noise, error):
    a, b = decayed(0, noise), random_member(decayed(1, noise), seed=1)[1]

    def alive():
        x, y = sm.align(a, b, ONE).models
        matrices = [name for name in x.weights if not dead(name) and x.weights[name].ndim > 1]
        return max(
            ((x.weights[name] - y.weights[name]).norm() / x.weights[name].norm()).item()
            for name in matrices
        )

    recovered = alive()
    assert recovered <= error
    monkeypatch.setattr("symmerge.matching.evidence.FAINT", 0.0)
    monkeypatch.setattr("symmerge.matching.evidence.PEERS", 0.0)
    assert alive() > 10 * recovered  # the control: noise with as much say as all others


@pytest.mark.parametrize("name", SMALL)
def test_spaces_matched_side_by_side_share_no_tensor(name):
    sweeps = Sweeps(evidence(name), heads=HeadOptions())
    blocks = [block for wave in sweeps._waves for block in wave]
    spaces = [space for block in blocks for space in spaces_of(block)]
    assert sorted({*spaces, *sweeps.spec.streams} & sweeps.spec.hidden.keys()) == sorted(
        sweeps.spec.hidden
    )
    for wave in sweeps._waves:
        tensors = [sorted(tensors_of(sweeps, block)) for block in wave]
        names = [name for each in tensors for name in each]
        assert len(names) == len(set(names))


def test_all_layers_are_matched_at_once_except_where_they_share_tensors():
    sweeps = Sweeps(evidence("gpt2"), heads=HeadOptions())
    assert len(sweeps._waves) == 1 and len(sweeps._waves[0]) == 4  # heads and units of two layers
    layer, *others = sweeps._waves[0]
    assert sweeps._independent([layer, layer, *others]) == [[layer], [layer, *others]]


def test_prices_of_the_last_sweep_start_the_next(monkeypatch):
    cold = solved("vit", all_layers=True)
    starts = []

    def watch(score, prices=None):
        starts.append(prices)
        return solve_assignments(score, prices)

    monkeypatch.setattr(indices, "DENSE", 8)
    monkeypatch.setattr(indices, "solve_assignments", watch)
    warm = solved("vit", all_layers=True)
    first, later = starts[:2], starts[2:]  # two layers
    assert all(start is None for start in first) and all(start is not None for start in later)
    assert len(later) == 2 * (len(warm.objective) - 1) > 0
    assert warm.objective == pytest.approx(cold.objective, rel=1e-12)


def evidence(name, **weighting):
    a, b = (sm.canonicalize(sm.load(small_model(name, seed=seed))) for seed in (0, 1))
    weights = a.weights, b.weights
    return Evidence(table=a.spec, weights=weights, weighting=Weighting(**weighting))


def solved(name, **weighting):
    sweeps = Sweeps(evidence(name, **weighting), heads=HeadOptions())
    for _ in range(3):
        sweeps.sweep()
    return sweeps


def spaces_of(block):
    return (block,) if isinstance(block, str) else block.spaces


def tensors_of(sweeps, block):
    return set().union(*map(sweeps._tensors, spaces_of(block)))

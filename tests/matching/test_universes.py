"""Many models: planted copies are recovered, cycles close, rounds help, failures do not spread."""

from dataclasses import replace

import pytest
import torch

import symmerge as sm
from symmerge.aligning.many import align_many, write_aligned_many
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import CheckpointError, MismatchError
from symmerge.lab.small_models import small_model
from symmerge.matching.base import composition_error, cycle_error
from symmerge.matching.resume import ResumeFile
from symmerge.matching.universes import match_universe
from symmerge.matching.weights import WeightMatching
from symmerge.models.distances import distance
from symmerge.models.interpolation import mean
from symmerge.observation import probe

ONE = WeightMatching(dtype=torch.float64, generate_text=False)
FAMILIES = ["gpt2", "vit", "llama", "bert", "neox"]


def canonical(name, seed=0):
    return sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))


def noisy(model, size, seed):
    """The model with noise of `size` times each tensor's scale; constant tensors stay."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name in model.weights:
        tensor = model.weights[name]
        spread = tensor.std(unbiased=False) if tensor.numel() > 1 else torch.zeros(())
        tensors[name] = tensor + size * spread * torch.randn(
            tensor.shape, generator=generator, dtype=tensor.dtype
        )
    return model.derive(MemoryWeights(tensors), step=HistoryStep("noise", str(size)))


def copies(name, count, size, *, sizes=()):
    """One model, and copies of it, each under its own noise and random symmetry."""
    clean = canonical(name)
    moves = [
        sm.Alignment.random(clean.spec, torch.Generator().manual_seed(100 + number))
        for number in range(count)
    ]
    noise = [*sizes, *[size] * (count - len(sizes))]
    return clean, [
        sm.canonicalize(sm.apply(move, noisy(clean, noise[number], number)))
        for number, move in enumerate(moves)
    ]


def strangers(name, count=3):
    return [canonical(name, seed) for seed in range(count)]


# Without neox: its norms are GPT-2's, its rotary pairs Llama's, and it takes as long as both.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "neox"])
def test_planted_copies_are_recovered_and_their_noise_falls_by_the_root(name):
    clean, models = copies(name, 5, 0.01)
    universe = match_universe(models, ONE)
    together = [
        sm.apply(alignment, model)
        for alignment, model in zip(universe.alignments, models, strict=True)
    ]

    def noise(model):
        """What is left after the clean model was brought as near as it comes."""
        return distance(model, sm.apply(ONE.solve(model, clean).alignment, clean))

    alone = sum(map(noise, together)) / 5
    assert alone <= 0.05
    # Elements are found from noisy models, too, so a part of the noise stays.
    assert noise(mean(together)) <= 1.25 * alone / 5**0.5
    # The control: without alignment the mean is far from everything.
    assert noise(mean(models)) > 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_without_noise_are_recovered_exactly(name):
    _, models = copies(name, 5, 0.0)
    universe = match_universe(models, ONE)
    together = [
        sm.apply(alignment, model)
        for alignment, model in zip(universe.alignments, models, strict=True)
    ]
    assert (
        max(distance(together[0], other) for other in together[1:]) <= 1e-6
        and universe.spreads[-1] <= 1e-6
    )
    # The control: one member's element does not fit another.
    assert distance(together[0], sm.apply(universe.alignments[2], models[1])) > 0.1


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_cycles_close(name):
    models = strangers(name)
    universe = match_universe(models, ONE)
    assert cycle_error(universe) <= 1e-6
    assert repr(universe).startswith("Universe(3 of 3 models, reference 0")
    # The control: pairs that were matched one by one do not close.
    pairs = [
        ONE.solve(models[after], models[before]).alignment
        for before, after in ((0, 1), (1, 2), (2, 0))
    ]
    assert composition_error(pairs) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "vit", "llama"])
def test_rounds_only_bring_closer_and_the_reference_stays(name):
    models = strangers(name, 4)
    universe = match_universe(models, ONE, reference=2)
    assert all(
        after <= before + 1e-12
        for before, after in zip(universe.spreads, universe.spreads[1:], strict=False)
    )
    assert (
        len(universe.spreads) >= 2
        and universe.moved[0] > 0
        and universe.spreads[-1] < universe.spreads[0]
    )
    assert composition_error([universe.alignments[2]]) == 0
    assert match_universe(models, ONE, reference=2, rounds=0).spreads == universe.spreads[:1]


def test_rounds_look_at_the_members_and_write_once(monkeypatch):
    """Every solve of a round observes the other members, on the text that all generated first."""
    models, texts = (
        [sm.canonicalize(sm.load(small_model("gpt2", seed=seed))) for seed in range(3)],
        [],
    )
    make_probe, written = probe.make_probe, probe.sample_text

    def making(models, *, text=None, **options):
        texts.append((len(models), None if text is None else text.clone()))
        return make_probe(models, text=text, **options)

    monkeypatch.setattr("symmerge.matching.weights.make_probe", making)
    wrote = []
    monkeypatch.setattr(
        probe,
        "sample_text",
        lambda *args, **options: wrote.append(args) or written(*args, **options),
    )
    match_universe(models, WeightMatching(tries=2), rounds=1)
    pairs, judge, rounds = texts[:2], texts[2], texts[3:]
    assert (
        [count for count, _ in pairs] == [2, 2]
        and judge[0] == 3
        and [count for count, _ in rounds] == [3, 3, 3]
    )
    assert all(text is None for _, text in (*pairs, judge)) and all(
        torch.equal(text, rounds[0][1]) for _, text in rounds
    )
    assert len(wrote) == 2 * 2 + 3  # two pairs, then all three, then nobody


def test_all_stay_the_functions_they_were(tmp_path):
    models = [sm.load(small_model("llama", seed=seed)) for seed in range(3)]
    universe = align_many(models, ONE, reference=1)
    for before, after in zip(models, universe.models, strict=True):
        assert sm.verify(before, after).same
    assert not sm.verify(models[0], universe.models[1]).same
    write_aligned_many(universe, tmp_path / "out")
    for number, folder in ((0, "aligned-0"), (1, "reference"), (2, "aligned-2")):
        assert sm.verify(models[number], sm.load(tmp_path / "out" / folder)).same
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "alignment-0.safetensors",
        "alignment-2.safetensors",
        "universe.json",
    }


def test_the_medoid_is_who_is_closest_to_all():
    _, models = copies("gpt2", 4, 0.2, sizes=(0.2, 0.2, 0.0))
    universe = match_universe(models, ONE, reference="medoid", rounds=0)
    assert universe.reference == 2 and universe.settings["medoid"]["chosen"] == models[2].where


class Failing:
    """A solver that fails, or is interrupted, at one of its calls."""

    def __init__(self, at, error):
        self.calls, self.at, self.error = 0, at, error

    def solve(self, a, b, **how):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return ONE.solve(a, b)


def test_a_member_that_fails_does_not_lose_the_others():
    models, said = strangers("gpt2", 4), []
    universe = match_universe(
        models, Failing(2, CheckpointError("its third file is gone")), progress=said.append
    )
    assert universe.members == [0, 1, 3] and "third file" in universe.left_out[2]
    assert any("left out" in line for line in said)
    assert universe.spreads == pytest.approx(
        match_universe([models[0], models[1], models[3]], ONE).spreads
    )
    with pytest.raises(MismatchError, match="no model could be aligned"):
        match_universe(models[:2], Failing(1, CheckpointError("gone")))


@pytest.fixture(scope="module")
def uninterrupted():
    return match_universe(strangers("gpt2", 4), ONE)


@pytest.mark.parametrize("at", [2, 5])
def test_an_interrupted_run_goes_on_where_it_was(at, uninterrupted, tmp_path):
    models = strangers("gpt2", 4)
    resume_file = ResumeFile(tmp_path / "resume.safetensors", {"what": "test"})
    stopped = match_universe(models, Failing(at, KeyboardInterrupt()), resume_file=resume_file)
    assert stopped.interrupted and len(stopped.spreads) < len(uninterrupted.spreads)
    again = Failing(0, None)
    universe = match_universe(models, again, resume_file=resume_file)
    assert (universe.spreads, universe.moved) == (uninterrupted.spreads, uninterrupted.moved)
    for one, other in zip(universe.alignments, uninterrupted.alignments, strict=True):
        for space, parts in other.elements.items():
            assert all(torch.equal(one[space][part], value) for part, value in parts.items())
    assert not universe.interrupted and again.calls < 3 + 4 * (len(uninterrupted.spreads) - 1)
    with pytest.raises(KeyboardInterrupt):  # nothing was found yet
        match_universe(models, Failing(1, KeyboardInterrupt()))


def test_what_cannot_be_compared_is_named():
    models = strangers("gpt2", 2)
    odd = [canonical("gpt2-untied"), replace(canonical("vit"))]
    with pytest.raises(MismatchError) as told:
        match_universe([*models, *odd], ONE)
    assert all(model.where in str(told.value) for model in odd)
    with pytest.raises(MismatchError, match="give two or more models"):
        match_universe(models[:1], ONE)
    with pytest.raises(MismatchError, match="a number from 0 to 1"):
        align_many(models, ONE, reference=2)

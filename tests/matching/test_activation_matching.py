"""Activation matching: planted symmetries come back, functions stay, heads are the oracle's."""

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
import torch
from differences import difference
from observed_pairs import inputs, pair_statistics
from scipy.optimize import linear_sum_assignment

import symmerge as sm
from symmerge.aligning.aligned import write_aligned
from symmerge.errors import MismatchError, SymmergeWarning, SymmetryError
from symmerge.evaluation.data.self_generated import sample_text
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import SMALL, small_model
from symmerge.matching import evidence
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.evidence import Weighting
from symmerge.matching.recipes import RECIPES, WITH_DATA, with_options
from symmerge.models.orbit import random_member
from symmerge.observation import statistics
from symmerge.observation.activations import restrict_stream
from symmerge.observation.moments import samples_with_moments
from symmerge.observation.probe import make_probe
from symmerge.symmetry.groups import Permutation, RotaryPairs, ScaledPermutation
from symmerge.symmetry.notation import atoms
from symmerge.verification.modules import full_module

ALONE = Weighting(norm=0.5, stream=1.0, heads=1.0, units=1.0, weights=0.0)
EXACT = {name: recipe for name, recipe in WITH_DATA.items() if not recipe.non_symmetric}
NON_SYMMETRIC = {name: recipe for name, recipe in WITH_DATA.items() if recipe.non_symmetric}


@cache
def load(name, seed=0, **changes):
    return sm.load(small_model(name, seed=seed, dtype=torch.float64, **changes))


def solved(a, b, recipe, *, batches=2, rows=32, **options):
    """B aligned to A by a recipe, from statistics on random inputs."""
    statistics = pair_statistics(recipe.prepare(a), recipe.prepare(b), inputs(a, batches, rows))
    options |= {"statistics": statistics, "dtype": torch.float64}
    return sm.align(a, b, with_options(recipe, **options))


# planted symmetries, from activations alone


def planted(name, batches=1, other=None):
    """A moved copy of a model, and both aligned; the copy may have seen `other` inputs."""
    a = load(name)
    b = random_member(a, seed=1)[1]
    pair = sm.canonicalize(a), sm.canonicalize(b)
    statistics = pair_statistics(*pair, inputs(a, batches), theirs=other)
    matching = ActivationMatching(weighting=ALONE, statistics=statistics, dtype=torch.float64)
    return b, sm.align(a, b, matching)


def worst(a, b):
    return max(
        ((a.weights[name] - b.weights[name]).norm() / a.weights[name].norm().clamp_min(1e-6)).item()
        for name in a.weights
    )


# ReLU leaves a few units of a random model at zero for every token; nothing is known of those.
SLEEPING = "bert-classifier"
# What flows inside experts is not observed: weights alone match them.
AWAKE = [name for name in SMALL if name not in (SLEEPING, "distilbert-classifier", "mixtral")]


@pytest.mark.parametrize("name", AWAKE)
def test_planted_symmetries_come_back(name):
    """Units, stream, and bases and rotary pairs inside heads, without looking at a weight."""
    moved, result = planted(name, batches=2)
    assert result.before > 0.5 and worst(result.reference, result.aligned) <= 1e-5
    assert worst(result.reference, sm.canonicalize(moved)) > 0.5  # the control: not aligned
    assert difference(moved, result.aligned) <= 1e-10


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_other_inputs_tell_nothing(name):
    """The negative control of all of the above: what flows through B on other inputs."""
    result = planted(name, other=inputs(load(name), 1, seed=9))[1]
    assert result.after > 0.3


@pytest.mark.parametrize("score", ["correlation", "cosine", "covariance"])
def test_permutations_come_back_by_every_score(score):
    """As elements: what was result undoes what was planted."""
    a = load("bert").restrict(qk="permutation", vo="permutation")
    recipe = replace(RECIPES["activations"], steps=())
    alignment = sm.Alignment.random(a.spec, torch.Generator().manual_seed(1))
    b = sm.apply(alignment, a)
    matching = ActivationMatching(
        weighting=replace(ALONE, score=score),
        statistics=pair_statistics(a, b, inputs(a)),
        dtype=torch.float64,
    )
    solution = sm.align(a, b, replace(recipe, matching=matching)).solution
    both = solution.alignment.compose(alignment)
    for space, element in both.elements.items():
        if isinstance(a.spec.spaces[space].group, Permutation):
            assert torch.equal(
                element["index"],
                torch.arange(element["index"].shape[-1]).expand_as(element["index"]),
            ), space
    assert any(
        not torch.equal(element["index"], both[space]["index"])
        for space, element in alignment.elements.items()
    )  # the control


def test_units_that_sleep_are_all_that_is_missed():
    with pytest.warns(SymmergeWarning, match="28 coordinates never change"):  # 14 of each model
        result = planted(SLEEPING, batches=2)[1]
    after = pair_statistics(result.reference, result.aligned, inputs(load(SLEEPING)))
    for layer, sleeping in ((0, 0), (1, 14)):
        awake = after.moments[f"bert.encoder.layer.{layer}.output.dense.weight:in"].square_a > 0
        bias = f"bert.encoder.layer.{layer}.intermediate.dense.bias"
        away = (result.reference.weights[bias] - result.aligned.weights[bias]).abs() > 1e-6
        assert (
            (~awake).sum() == sleeping
            and not (away & awake).any()
            and bool(away.any()) is bool(sleeping)
        )


def test_rotary_pairs_and_grouped_heads_are_among_what_came_back():
    kinds = {
        name: {type(space.group) for space in sm.canonicalize(load(name)).spec.hidden.values()}
        for name in SMALL
    }
    assert (
        RotaryPairs in kinds["llama"]
        and RotaryPairs in kinds["neox"]
        and ScaledPermutation in kinds["gpt2-untied"]
    )


# recipes


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("which", EXACT)
def test_every_recipe_with_data_keeps_both_functions(name, which):
    a, b = load(name), load(name, 1)
    result = solved(a, b, RECIPES[which], batches=1)
    assert difference(a, result.reference) <= 1e-10
    assert difference(b, result.aligned) <= 1e-10
    assert sm.verify(a, result.aligned).difference > 1e-2  # the control: they are two functions


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("which", NON_SYMMETRIC)
def test_what_is_no_symmetry_is_another_function_and_is_not_written(name, which, tmp_path):
    a, b = load(name), load(name, 1)
    result = solved(a, b, RECIPES[which], batches=1)
    assert difference(b, result.aligned) > 1e-2
    with pytest.raises(SymmetryError, match="not a symmetry"):
        write_aligned(result, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    exact = solved(a, b, RECIPES["correlation"], batches=1)  # the control: one that is
    write_aligned(exact, tmp_path / "out")
    assert (tmp_path / "out/aligned/model.safetensors").exists()


def test_non_symmetric_tables_say_where_they_do_not_apply():
    with pytest.raises(MismatchError, match="no rotary positions"):
        RECIPES["correlation-ignore-heads"].prepare(load("llama"))


# heads, against an oracle


TINY = {"hidden_size": 9, "num_attention_heads": 3, "intermediate_size": 12, "num_hidden_layers": 1}


def oracle(a, b):
    """Every order of three heads; inside each pair the best assignment by correlation."""
    rows = []
    for model in (a, b):
        read, module = [], full_module(model, torch.float64)
        hook = module.bert.encoder.layer[0].attention.output.dense.register_forward_pre_hook(
            lambda _, inputs, read=read: read.append(inputs[0].flatten(0, 1))
        )
        with torch.no_grad():
            for batch in inputs(a):
                module(**batch)
        hook.remove()
        rows.append(torch.cat(read).numpy())
    scores = (
        np.corrcoef(rows[0].T, rows[1].T)[:9, 9:].reshape(3, 3, 3, 3).transpose(0, 2, 1, 3)
    )  # head of A, head of B, coordinates
    inner = {
        (i, j): linear_sum_assignment(scores[i, j], maximize=True)[1]
        for i in range(3)
        for j in range(3)
    }
    gain = {pair: scores[pair][range(3), order].sum() for pair, order in inner.items()}
    heads = max(
        permutations(range(3)), key=lambda order: sum(gain[i, j] for i, j in enumerate(order))
    )
    return list(heads), [inner[i, j].tolist() for i, j in enumerate(heads)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_heads_are_those_of_the_oracle(seed):
    a, b = load("bert", **TINY), load("bert", seed, **TINY)
    alignment = solved(a, b, RECIPES["correlation"]).solution.alignment
    heads, inside = oracle(a, b)
    assert alignment["head.0"]["index"].tolist() == heads
    assert alignment["vo.0"]["index"].tolist() == inside


def test_the_oracle_finds_other_heads_for_other_models():
    assert (
        len({str(oracle(load("bert", **TINY), load("bert", seed, **TINY))) for seed in (1, 2, 3)})
        > 1
    )


def test_queries_follow_values_or_go_their_own_way():
    a, b = load("bert"), load("bert", 1)
    follow, separate, monotonic = (
        solved(a, b, RECIPES[f"correlation{mode}"]).solution.alignment
        for mode in ("", "-separate-qk", "-monotonic")
    )
    for layer in (0, 1):
        assert torch.equal(follow[f"qk.{layer}"]["index"], follow[f"vo.{layer}"]["index"])
        assert not torch.equal(separate[f"qk.{layer}"]["index"], separate[f"vo.{layer}"]["index"])
        still = torch.arange(4)
        assert not torch.equal(follow[f"head.{layer}"]["index"], still)
        assert f"head.{layer}" not in monotonic.elements and not torch.equal(
            monotonic[f"vo.{layer}"]["index"], torch.arange(12).expand(4, 12)
        )


# the stream


def stream_places(statistics, stream="residual"):
    return [
        name
        for name, moments in statistics.moments.items()
        if [atom.space for atom in atoms((moments.axis,))] == [stream]
    ]


def test_places_of_the_stream():
    a, b = load("bert"), load("bert", 1)
    statistics = pair_statistics(a, b, inputs(a, 1, rows=4))
    everywhere = stream_places(statistics)
    assert (
        len(everywhere) == 5
    )  # before each block's attention and units, and before the decoder's transform
    first, last = (
        stream_places(restrict_stream(statistics, "residual", which)) for which in ("first", "last")
    )
    assert first == ["bert.encoder.layer.0.attention.self.query.weight:in"] and last == [
        "cls.predictions.transform.dense.weight:in"
    ]
    assert stream_places(restrict_stream(statistics, "residual", "all")) == everywhere
    assert (
        len(restrict_stream(statistics, "residual", "first").moments) == len(statistics.moments) - 4
    )  # nothing else is dropped


def test_a_first_token_that_the_model_does_not_have():
    """A config keeps GPT-2's 50256, whatever the vocabulary: then any token comes first."""
    model = sm.load(small_model("gpt2", bos_token_id=50256, eos_token_id=50256))
    text = sample_text(model, full_module(model, torch.float32), rows=3, length=5, seed=0)
    assert (
        text.shape == (3, 5)
        and len(text[:, 0].unique()) > 1
        and int(text.max()) < model.spec.sizes["vocabulary"]
    )
    known = sm.load(small_model("gpt2", bos_token_id=7))
    assert sample_text(known, full_module(known, torch.float32), rows=3, length=5, seed=0)[
        :, 0
    ].tolist() == [7, 7, 7]


def test_places_count_for_generated_text_too():
    models = [load("gpt2"), load("gpt2", 1)]
    probe = make_probe(models, scored=False)
    assert probe is not None
    first = restrict_stream(probe.observation, "residual", "first")
    dropped = [name for name in probe.observation.a.values if name not in first.a.values]
    assert dropped == [
        "transformer.h.0.mlp.c_fc.weight:in",
        "transformer.h.1.attn.c_attn.weight:in",
        "transformer.h.1.mlp.c_fc.weight:in",
    ]
    assert first.a.axes.keys() == first.a.values.keys() == first.b.values.keys()


def test_another_place_is_another_order():
    a, b = load("bert"), load("bert", 1)
    orders = {
        place: tuple(
            solved(a, b, RECIPES[f"residual-{place}"])
            .solution.alignment["residual"]["index"]
            .tolist()
        )
        for place in ("first", "last", "all")
    }
    assert len(set(orders.values())) == 3


def test_the_order_of_the_stream_is_the_best_by_correlation():
    """At its first place: the oracle is one assignment of the correlation of what layer 0 reads."""
    a, b = load("bert"), load("bert", 1)
    moments = pair_statistics(a, b, inputs(a)).moments[
        "bert.encoder.layer.0.attention.self.query.weight:in"
    ]
    mean_a, mean_b = moments.sum_a / moments.count, moments.sum_b / moments.count
    cross = moments.cross / moments.count - mean_a[:, None] * mean_b
    scale = [
        (square / moments.count - mean.square()).rsqrt()
        for square, mean in ((moments.square_a, mean_a), (moments.square_b, mean_b))
    ]
    best = linear_sum_assignment((scale[0][:, None] * cross * scale[1]).numpy(), maximize=True)[1]
    assert (
        solved(a, b, RECIPES["residual-first"]).solution.alignment["residual"]["index"].tolist()
        == best.tolist()
    )
    assert (
        solved(a, b, RECIPES["residual-last"]).solution.alignment["residual"]["index"].tolist()
        != best.tolist()
    )


def test_a_tied_decoder_moves_with_the_stream_and_an_untied_one_by_itself():
    a, b = load("bert"), load("bert", 1)
    tied, untied = (
        solved(a, b, RECIPES[name]) for name in ("residual-first", "residual-first-untied")
    )
    words, decoder, dense = (
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
        "cls.predictions.transform.dense.weight",
    )
    order = tied.solution.alignment["residual"]["index"]
    assert "transform" not in tied.aligned.spec.hidden and decoder not in tied.aligned.weights
    assert torch.equal(tied.aligned.weights[words], b.weights[words][:, order])
    assert torch.equal(
        tied.aligned.weights[dense], b.weights[dense][order][:, order]
    )  # what the decoder reads is the stream
    own = untied.solution.alignment["transform"]["index"]
    assert not torch.equal(own, untied.solution.alignment["residual"]["index"])
    assert torch.equal(untied.aligned.weights[decoder], b.weights[words][:, own])


# the search


def test_the_lowest_held_out_score_is_chosen_and_the_same_seed_gives_the_same():
    models = tuple(sm.canonicalize(sm.load(small_model("gpt2", seed=seed))) for seed in (0, 1))
    task = make_task("clm", "self", models, samples=8)
    first = ActivationMatching(data=task, tries=5).solve(*models)
    scores = [trial.score for trial in first.trials]
    assert len(scores) == 5 and len(set(scores)) > 1 and first.scored_on == "held-out data"
    assert first.weighting == first.trials[scores.index(min(scores))].weighting
    one, again = (ActivationMatching(data=task, tries=2).solve(*models) for _ in range(2))
    assert one.trials == again.trials == first.trials[:2] and one.settings == again.settings
    for name, element in one.alignment.elements.items():
        assert all(
            torch.equal(value, again.alignment[name][part]) for part, value in element.items()
        )
    other = ActivationMatching(
        data=make_task("clm", "self", models, samples=8, seed=1), tries=1
    ).solve(*models)
    assert other.trials[0].objective != first.trials[0].objective  # the control: other text
    # A score that was given is not searched over; else it is.
    recipe = with_options(RECIPES["activations"], data=task, tries=5, score="cosine")
    cosine = recipe.matching.solve(*models)
    scores = [{trial.weighting.score for trial in solution.trials} for solution in (first, cosine)]
    assert scores == [{"product", "covariance"}, {"cosine"}]


def test_without_data_or_text_there_is_nothing_to_see():
    with pytest.raises(MismatchError, match="give data to observe activations on"):
        sm.align(load("vit"), load("vit", 1), RECIPES["activations"])


def test_activations_are_computed_once_for_all_sweeps(monkeypatch):
    made = []

    def watch(moments, score):
        made.append(score)
        return samples_with_moments(moments, score)

    def computed(sweeps):
        made.clear()
        weighting = replace(ALONE, all_layers=True)
        recipe = replace(RECIPES["activations"], matching=ActivationMatching(weighting=weighting))
        result = solved(
            load("vit"),
            load("vit", seed=1),
            recipe,
            held_out=0.0,
            max_sweeps=sweeps,
            tolerance=-1.0,
        )
        assert len(result.solution.objective) == sweeps
        return len(made)

    monkeypatch.setattr(statistics, "samples_with_moments", watch)
    assert 0 < computed(5) < 1.5 * computed(2)
    monkeypatch.setattr(evidence, "CACHE_BYTES", 0)
    assert computed(5) > 1.5 * computed(2)  # the control: no room to keep them

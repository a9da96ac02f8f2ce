"""Relatives are found in any disguise, strangers are not; every kind of relation by name."""

import pytest
import torch
from scipy.stats import kstest

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.lineage.disguise import canonical, outgoing, undisguise
from symmerge.lineage.examine import kinship
from symmerge.lineage.merges import shares
from symmerge.lineage.shared import layers_of
from symmerge.lineage.swaps import Coins, near_ties, p_value, toss, unit_rows
from symmerge.lineage.units import LayerTest, combined


def changed(model, change):
    """The model with its tensors changed, in memory."""
    weights = MemoryWeights({name: change(name, model.weights[name]) for name in model.weights})
    return model.derive(weights, step=HistoryStep("changed", "by a test"))


def noisy(model, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return changed(
        model,
        lambda _, tensor: (
            tensor
            + share * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=generator)
        ),
    )


def disguised(model, seed=3):
    return noisy(sm.random_member(model, seed)[1], 0.01, seed)


def model(name, seed=0, **changes):
    return sm.load(small_model(name, seed=seed, **changes), check_class=False)


def pruned(_, tensor):
    least = tensor.abs().flatten().median()
    return tensor if tensor.ndim < 2 else tensor.where(tensor.abs() > least, torch.zeros(()))


def rounded(_, tensor):
    step = tensor.abs().amax(-1, keepdim=True) / 7
    return tensor if tensor.ndim < 2 else (tensor / step).round() * step


@pytest.fixture(scope="module")
def pair():
    """Two strangers."""
    return model("gpt2", 0), model("gpt2", 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit-tanh"])
def test_a_copy_is_found_in_any_disguise_and_a_stranger_is_not(name):
    a, stranger = model(name, 0), model(name, 1)
    found = kinship(a, disguised(a))
    assert found.related and found.relation == "copy" and found.p < 1e-5
    assert found.before is None or abs(found.before) < 0.1  # nothing is seen without undisguising
    control = kinship(a, disguised(stranger))
    assert not control.related and control.p > 0.01 and control.relation == "none"


CHANGES = {
    "pruned": lambda a, _: changed(a, pruned),
    "quantised": lambda a, _: changed(a, rounded),
    "fine-tune": lambda a, _: noisy(a, 0.4, 5),
    "merge": lambda a, b: sm.mean([*sm.align(a, b, "weights-only").models], [0.5, 0.5]),
    "layers borrowed": lambda a, b: changed(
        a, lambda name, tensor: b.weights[name] if ".1." in name else tensor
    ),
}


@pytest.mark.parametrize("relation", CHANGES)
def test_every_relation_has_its_name(pair, relation):
    found = kinship(pair[0], disguised(CHANGES[relation](*pair)))
    assert (found.relation, found.related) == (relation, True)
    assert (found.parent == "a") == (relation in ("pruned", "quantised"))


def test_the_same_function(pair):
    found = kinship(pair[0], sm.random_member(pair[0], 1)[1])
    assert found.relation == "same function" and found.after > 0.999


def test_who_was_pruned_is_known_as_stored(pair):
    child = changed(pair[0], pruned)
    assert kinship(child, pair[0]).parent == "b" and kinship(pair[0], child).parent == "a"


def test_an_aligned_stranger_is_no_relative(pair):
    """Its units stand in the order of A: the order alone would say that it is one."""
    aligned = sm.align(*pair, "weights-only")
    found = kinship(aligned.reference, aligned.aligned)
    assert found.relation == "same coordinates" and not found.related
    assert found.p_order < 1e-3 < kinship(*pair).p_order


# other depths, widths, vocabularies, heads


def test_a_deeper_model_tells_its_layers():
    a = model("llama", num_hidden_layers=2)
    deep = model("llama", 1, num_hidden_layers=3)
    sources = {0: 0, 1: 1, 2: 1}

    def take(name, tensor):
        number = next((at for at in sources if f".{at}." in name), None)
        return a.weights[
            name if number is None else name.replace(f".{number}.", f".{sources[number]}.")
        ]

    found = kinship(disguised(changed(deep, take)), a)  # either may come first
    assert found.relation == "deeper" and found.parent == "a"
    assert {one.layer: one.source for one in found.layers} == sources
    assert not kinship(a, deep).related


def test_a_narrow_model_inside_a_wide_one():
    sizes = {"n_embd": 64, "n_inner": 128}
    narrow, wide = model("gpt2"), model("gpt2", 1, **sizes)
    found = kinship(disguised(sm.widen(narrow, wide, units="split")), narrow)
    assert found.related and any("narrower" in line for line in found.sentences)
    assert not kinship(narrow, wide).related


def test_another_head_and_more_tokens(pair):
    base = pair[0]
    child = model("gpt2-classifier", 5, vocab_size=103)

    def take(name, tensor):
        if name not in base.weights:
            return tensor
        taken = tensor.clone()
        taken[: len(base.weights[name])] = base.weights[name]
        return taken

    found = kinship(base, disguised(changed(child, take)))
    assert found.related and found.before is None
    assert not kinship(base, child).related


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (("llama", {}), "nothing could be compared"),
        (("gpt2-classifier", {"n_inner": 64}), "could be compared"),
        (("bert", {"hidden_size": 32}), "no part can be compared"),
    ],
)
def test_what_cannot_be_compared_is_said(pair, other, words):
    with pytest.raises(MismatchError, match=words):
        kinship(pair[0], model(other[0], **other[1]))


# merges


def test_shares_of_a_merge(pair):
    base, share = pair[0], 0.3
    tuned = [noisy(base, 0.4, seed) for seed in (1, 2)]
    merge = sm.mean(tuned, [1 - share, share])
    found = shares(disguised(merge), [tuned[0], disguised(tuned[1], 8), pair[1]])
    first, second, stranger = (one.share for one in found.parents)
    assert abs(second - share) < 0.05 and abs(first - 1 + share) < 0.05 and stranger < 0.05
    assert [one.related for one in found.parents] == [True, True, False]
    assert found.explained > 0.9


def test_shares_need_one_table(pair):
    with pytest.raises(MismatchError, match="two or more candidates"):
        shares(pair[0], [pair[1]])
    with pytest.raises(MismatchError, match="differ in"):
        shares(pair[0], [pair[1], model("gpt2-untied")])


# the test itself


def test_what_is_held_out_is_not_looked_at(pair):
    """Other outgoing weights, and the alignment is the same; other incoming ones, and it is not."""
    a, b = map(canonical, pair)
    layers = {layer: layer for layer in layers_of(a.spec)}
    held_out = {*outgoing(b.spec).values()}

    def aligned(scrambled):
        other = changed(b, lambda name, x: x.flip(0) if name in scrambled else x)
        return undisguise(a, other, layers).aligned.weights["transformer.h.0.mlp.c_fc.weight"]

    assert torch.equal(aligned(set()), aligned(held_out))
    assert not torch.equal(aligned(set()), aligned({"transformer.wte.weight"}))


def test_p_values_of_fair_coins_are_uniform_and_of_others_are_not():
    draws = torch.rand(400, generator=torch.Generator().manual_seed(0)).tolist()
    tosses = torch.rand(400, 24, generator=torch.Generator().manual_seed(1))
    fair, loaded = (
        [
            p_value(Coins(float(wins), 24), draw)
            for wins, draw in zip((tosses < chance).sum(1), draws, strict=True)
        ]
        for chance in (0.5, 0.6)
    )
    assert kstest(fair, "uniform").pvalue > 0.01 > kstest(loaded, "uniform").pvalue
    tests = [LayerTest("ff", Coins(24, 24), p) for p in fair]
    pairs = [combined(tests[at : at + 2]) for at in range(0, 400, 2)]
    assert kstest(pairs, "uniform").pvalue > 0.01


def test_ties_are_disjoint_and_nearest_first():
    generator = torch.Generator().manual_seed(0)
    rows = unit_rows(torch.randn(40, 8, generator=generator))
    score = rows @ rows.mT
    pairs = near_ties(score.clone(), 10)
    assert len(pairs) == 10 and len(pairs.unique()) == 20
    nearest = (score - 2 * torch.eye(40)).argmax()
    assert {*pairs[0].tolist()} == {int(nearest) // 40, int(nearest) % 40}
    assert toss(score, pairs) == Coins(10.0, 10)
    assert toss(-score, pairs) == Coins(0.0, 10)
    assert toss(torch.zeros(40, 40), pairs) == Coins(5.0, 10)


def test_the_same_result_with_any_number_of_threads(pair):
    threads = torch.get_num_threads()
    first = kinship(*pair)
    torch.set_num_threads(2)
    try:
        assert kinship(*pair) == first
    finally:
        torch.set_num_threads(threads)

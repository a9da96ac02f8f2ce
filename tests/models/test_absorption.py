"""A norm on the stream goes into its embedding, exactly, or is refused."""

from dataclasses import replace

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import SymmetryError
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member

EXACT, SHOWS = 1e-10, 1e-2
GAIN, SHIFT, ROWS, READER = (
    "model.embeddings.norm.weight",
    "model.embeddings.norm.bias",
    "model.embeddings.tok_embeddings.weight",
    "model.layers.0.attn.Wqkv.weight",
)


def loaded(name="modernbert", dtype=torch.float64, **changes):
    return sm.load(small_model(name, dtype=dtype, **changes))


def edited(model, **edits):
    """The model with some tensors changed by functions."""
    tensors = {name: model.weights[name].clone() for name in model.weights}
    for name, edit in edits.items():
        tensors[name] = edit(tensors[name])
    source = replace(model.source, base=MemoryWeights(tensors), digests={})
    return replace(model, weights=source, source=source)


def at(places, value):
    """Some entries set."""
    return lambda tensor: tensor.index_fill(0, torch.tensor(places), value)


# what is done to the gains
GAINS = {
    "as it is": lambda gain: gain,
    "one is zero": at([3], 0.0),
    "several are zero": at([3, 5, 40], 0.0),
    "one is tiny": at([7], 1e-9),
    "one is negative": at([7], -0.6),
    "all are small": lambda gain: gain * 1e-4,
    "constant": torch.ones_like,
}


@pytest.mark.parametrize("case", GAINS)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modernbert", {}),
        ("modernbert", {"tie_word_embeddings": False, "norm_bias": True}),
        ("modernbert-classifier", {"classifier_pooling": "mean"}),
    ],
    ids=["tied", "shifts without biases", "shifts and biases"],
)
def test_the_function_stays(name, changes, case):
    model = edited(loaded(name, **changes), **{GAIN: GAINS[case]})
    folded = sm.canonicalize(model, ("fold",))
    assert difference(model, folded) <= EXACT and difference(model, sm.canonicalize(model)) <= EXACT
    assert difference(model, random_member(model, 1)[1]) <= EXACT
    gain = folded.weights[GAIN]
    assert (gain == gain[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_precisions_are_enough(dtype):
    model = loaded(dtype=dtype)
    assert sm.verify(model, random_member(model, 1)[1]).same


@pytest.mark.parametrize("name", [GAIN, ROWS, READER])
def test_every_part_of_it_is_needed(name):
    model = loaded(tie_word_embeddings=False)
    folded = sm.canonicalize(model, ("fold",))
    assert difference(model, edited(folded, **{name: lambda _: model.weights[name]})) >= SHOWS


def test_shifts_move_too():
    model = loaded("modernbert-classifier")
    folded = sm.canonicalize(model, ("fold",))
    assert difference(model, edited(folded, **{SHIFT: lambda _: model.weights[SHIFT]})) >= 1e-3


def test_gains_that_cancel_are_refused_and_permutations_still_go():
    def cancel(gain):
        return torch.where(torch.arange(len(gain)) % 2 == 0, 1.0, -1.0).to(gain)

    model = edited(loaded(), **{GAIN: cancel})
    with pytest.raises(
        SymmetryError,
        match=r"embeddings\.norm\.weight has gains of both signs.*restrict it to permutations",
    ):
        sm.canonicalize(model)
    assert difference(model, random_member(model.restrict(residual="permutation"), 1)[1]) <= EXACT


def test_a_tied_stream_that_was_not_untied_does_not_rotate():
    """With constant gains nothing else would notice."""
    model = loaded()
    fresh = edited(
        model,
        **{norm.gain: torch.ones_like for norm in model.spec.norms},
        **{"head.norm.weight": torch.ones_like},
    )
    with pytest.raises(SymmetryError, match=r"tied to the output of an activation.*canonicalize"):
        sm.apply(sm.Alignment.random(fresh.spec, torch.Generator().manual_seed(0)), fresh)
    assert difference(fresh, random_member(fresh, 1)[1]) <= EXACT


def test_a_stream_restricted_to_permutations_keeps_its_tie_and_its_gain():
    model = loaded().restrict(residual="permutation")
    member = random_member(model, 1)[1]
    assert member.spec.ties and difference(model, member) <= EXACT
    assert torch.equal(member.weights[GAIN].sort().values, model.weights[GAIN].sort().values)

"""OTHER in BASE's orbit: what is carried computes what TUNED does, in OTHER's own coordinates."""

import warnings

import pytest
import torch
from transported import answers, apart, base_of, orbit, own_coordinates, tuned_of

import symmerge as sm
from symmerge.errors import SymmergeWarning
from symmerge.lab.small_models import SMALL
from symmerge.models.alignment import Alignment
from symmerge.transporting.carrying import carried, tied_change
from symmerge.transporting.differences import divided
from symmerge.transporting.frames import Passage

EXACT, STOCK = 1e-10, 1e-5
GAINED = ["gpt2-untied", "llama", "vit", "opt", "qwen2", "dinov3"]
# Readers that are no modules (experts, pooled attention), four places in one norm, layer scales.
GAINED += ["mixtral", "gpt_oss", "siglip", "swin", "dinov2"]


@pytest.mark.parametrize("name", SMALL)
def test_what_is_carried_within_the_orbit_is_tuned(name):
    passage, tuned = orbit(name), tuned_of(name)
    expected = answers(tuned)
    assert apart(carried(passage, tuned), expected) <= EXACT
    # Control: the change added as it is.
    identity = Alignment.identity(passage.alignment.spec)
    assert apart(carried(passage.along(identity), tuned), expected) > 1e-2


@pytest.mark.parametrize("name", GAINED)
def test_other_keeps_gains_shifts_means_and_value_biases_of_its_own(name):
    passage, tuned = orbit(name), tuned_of(name)
    other = own_coordinates(passage.other)
    assert apart(other, base_of(name)) <= EXACT
    moved = carried(Passage(passage.base, other, passage.alignment), tuned)
    assert apart(moved, tuned) <= EXACT
    gains = [norm.gain for norm in other.spec.norms if other.spec.rotates(norm.stream)]
    for gain in gains:
        assert torch.equal(moved.weights[gain], other.weights[gain])
    # Control: the same change without undoing OTHER's own gains.
    plain = carried(passage, tuned)
    names = [name for name in other.weights if name not in gains]
    naive = {
        name: other.weights[name] + plain.weights[name] - passage.other.weights[name]
        for name in names
    }
    tensors = {name: other.weights[name] for name in other.weights} | naive
    wrong = sm.load(_module(other, tensors))
    assert not gains or apart(wrong, tuned) > 1e-2


def _module(model, tensors):
    import transformers

    kind = getattr(transformers, model.spec.architecture)
    module = kind(kind.config_class(**model.config)).double()
    module.load_state_dict(tensors, strict=False)
    return module.eval()


def test_a_gain_of_zero_becomes_one():
    weight, change = torch.randn(3, 4), torch.randn(3, 4)
    gain = torch.tensor([1.0, 0.0, -2.0, 0.5])
    after = weight + divided(weight, change, gain, 1)
    kept = torch.where(gain == 0, 1.0, gain)
    assert torch.allclose(after * kept, weight * gain + change, atol=1e-6)


def test_a_tied_head_stays_tied_and_untied_it_is_exact():
    # BASE's own orbit by permutations of the stream: every tie can stay.
    base, tuned = base_of("gpt2"), tuned_of("gpt2")
    limits = {"residual": "permutation"}
    kept = base.restrict(**limits)
    element = Alignment.random(kept.spec, torch.Generator().manual_seed(1))
    other = sm.load(_module(kept, dict(_tensors(sm.apply(element, kept)))))
    assert other.spec.ties
    still = carried(Passage(base, other, element.inverse(), (), limits), tuned)
    assert still.spec.ties and apart(still, tuned) <= EXACT
    # A rotation folds the gain of the head into it: tied again, it is a compromise.
    full = Alignment(orbit("gpt2").alignment.spec, element.elements)
    rotation = torch.eye(48, dtype=torch.float64)[element["residual"]["index"]]
    full = Alignment(full.spec, {**element.elements, "residual": {"matrix": rotation}})
    passage = Passage(base, other, full.inverse())
    assert apart(carried(passage, tuned, untie=True), tuned) <= EXACT
    tied = carried(passage, tuned)
    assert tied.spec.ties and 1e-3 < apart(tied, tuned) < apart(base, tuned)


def _tensors(model):
    yield from ((name, model.weights[name]) for name in model.weights)
    for alias, target in model.spec.ties.items():
        yield alias, model.weights[target]


def test_a_tie_is_no_loss_where_both_uses_agree():
    change, gain = torch.randn(7, 4), torch.rand(4) + 0.5
    assert torch.allclose(tied_change(change, change, gain), change, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2-untied", "llama", "bert"])
def test_an_alignment_that_is_found_carries_in_float32(name):
    base, tuned = base_of(name, torch.float32), tuned_of(name, torch.float32)
    other = orbit(name).other
    other = sm.load(_module(other, dict(_tensors(other))).float())
    result = sm.align(base, other, "weights-only")
    moved = carried(Passage.of(result), tuned)
    assert apart(moved, tuned) <= STOCK
    assert apart(carried(Passage.of(result), tuned, 0.9), tuned) > 1e-3  # the control


def test_heads_that_are_not_of_full_rank_are_said_to_be_approximate():
    # Queries of SigLIP's pooling are one constant: of its keys one direction counts.
    passage = orbit("siglip")
    result = sm.align(passage.base, passage.other, "weights-only")
    with pytest.warns(SymmergeWarning, match=r"qk\.pool are not of full rank"):
        moved = carried(Passage.of(result), tuned_of("siglip"))
        assert apart(moved, tuned_of("siglip")) < 0.5
    result = sm.align(base_of("gpt2"), orbit("gpt2").other, "weights-only")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SymmergeWarning)
        assert (
            apart(carried(Passage.of(result), tuned_of("gpt2"), untie=True), tuned_of("gpt2"))
            < STOCK
        )

"""Directions, probes and the state of Adam move with the model."""

import pytest
import torch
from transported import base_of, fine_tuned, orbit

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.transporting.frames import Passage
from symmerge.transporting.streams import both_streams
from symmerge.verification.modules import full_module

CLOSE = 1e-5  # transformers computes RMSNorm in float32
TOKENS = torch.arange(24).reshape(2, 12)


def modules(name):
    passage = orbit(name)
    return [full_module(model, torch.float64) for model in (passage.base, passage.other)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@torch.no_grad()
def test_probes_read_and_steering_vectors_steer_the_same(name):
    passage, (base, other) = orbit(name), modules(name)
    probes, vector = torch.randn(5, 48).double(), torch.randn(48).double()
    states = [m(TOKENS, output_hidden_states=True).hidden_states[1] for m in (base, other)]
    moved = sm.carry_direction(passage, probes, use="compared")
    # A pre-LayerNorm stream may differ by its mean, which no norm lets through.
    centred = [s - s.mean(-1, keepdim=True) if name == "gpt2" else s for s in states]
    read = centred[0] @ probes.T
    assert torch.allclose(centred[1] @ moved.T, read, atol=CLOSE)
    assert not torch.allclose(centred[1] @ probes.T, read, atol=1e-1)  # the control

    def steered(module, direction):
        embedding = module.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda *call: call[2] + direction)
        try:
            return module(TOKENS).logits
        finally:
            hook.remove()

    wanted = steered(base, vector)
    there = sm.carry_direction(passage, vector)
    assert torch.allclose(steered(other, there), wanted, atol=CLOSE)
    assert not torch.allclose(steered(other, vector), wanted, atol=1e-2)  # the control


@pytest.mark.parametrize(("name", "how"), [("llama", "rotation"), ("gpt2", "regression")])
def test_streams_that_are_fitted_on_inputs_give_back_the_symmetry(name, how):
    passage = orbit(name)
    task = sm.make_task("clm", "self", [passage.base], samples=8, length=24)
    fitted = sm.fit_streams(passage.base, passage.other, layer=1, how=how, data=task)
    first, second = both_streams(passage.base, passage.other, layer=1, data=task)
    weight, bias = torch.randn(48).double(), torch.tensor(0.3)
    moved, shift = fitted.probe(weight, bias)
    limit = 1e-4 if how == "rotation" else 0.1  # the ridge
    read = first @ weight + bias
    assert (second @ moved + shift - read).norm() <= limit * read.norm() and fitted.fit > 0.99
    # A direction moves as the alignment says, in what tokens tell apart.
    steer = sm.carry_direction(fitted, weight)
    wanted = sm.carry_direction(passage, weight)
    wanted = wanted - wanted.mean() if name == "gpt2" else wanted
    assert (steer - wanted).norm() <= 2 * limit * wanted.norm()
    # Control: as they are.
    assert (second @ weight + bias - read).norm() > 0.5 * read.norm()
    with pytest.raises(MismatchError, match="after layer 1"):
        sm.carry_direction(fitted, weight, layer=2)


def test_a_probe_that_is_fitted_to_answers_gives_the_same_answers():
    passage = orbit("llama")
    task = sm.make_task("clm", "self", [passage.base], samples=16, length=24)
    first, second = both_streams(passage.base, passage.other, layer=2, data=task)
    weight = torch.randn(48, generator=torch.Generator().manual_seed(1)).double()
    wanted = first @ weight > 0
    moved, shift = sm.carry_probe(passage.base, passage.other, weight, layer=2, data=task)
    assert ((second @ moved + shift > 0) == wanted).double().mean() > 0.97
    assert ((second @ weight > 0) == wanted).double().mean() < 0.9  # the control
    with pytest.raises(MismatchError, match="layer 3"):
        both_streams(passage.base, passage.other, layer=3)
    with pytest.raises(MismatchError, match="how"):
        sm.fit_streams(passage.base, passage.other, layer=1, how="magic")


@torch.no_grad()
def test_cached_keys_and_values_move():
    passage, pair = orbit("llama"), modules("llama")
    caches = [module(TOKENS, use_cache=True).past_key_values for module in pair]
    for layer in range(2):
        for part, space, use in (("keys", "qk", "compared"), ("values", "vo", "added")):
            before, after = (getattr(cache.layers[layer], part) for cache in caches)
            laid = before.transpose(1, 2)  # heads beside their coordinates
            moved = sm.carry_direction(passage, laid, space=space, layer=layer, use=use)
            assert torch.allclose(moved.transpose(1, 2), after, atol=CLOSE)
            assert not torch.allclose(before, after, atol=1e-1)  # the control


WRONG = {
    "no space": (torch.zeros(48), {"space": "ff"}),
    "no space called qk.9": (torch.zeros(2, 12), {"space": "qk", "layer": 9}),
    "ends in": (torch.zeros(47), {}),
    "ends in \\[48\\], not \\[\\]": (torch.tensor(1.0), {}),
    "use": (torch.zeros(48), {"use": "eaten"}),
    "int64": (torch.ones(48, dtype=torch.long), {}),
    "list": ([0.0] * 48, {}),
    "NaN": (torch.full((48,), float("nan")), {}),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_spaces_and_shapes_are_refused(reason):
    vector, how = WRONG[reason]
    unchecked = getattr(sm.carry_direction, "__wrapped__", sm.carry_direction)
    with pytest.raises(MismatchError, match=reason):
        unchecked(orbit("llama"), vector, **how)


def test_the_stream_is_the_same_after_every_layer_and_half_precision_is_moved_in_full():
    vector = torch.randn(48, generator=torch.Generator().manual_seed(0))
    exact = sm.carry_direction(orbit("llama"), vector)
    assert torch.equal(sm.carry_direction(orbit("llama"), vector, layer=1), exact)
    half = sm.carry_direction(orbit("llama"), vector.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(
        half, sm.carry_direction(orbit("llama"), vector.bfloat16().float()).bfloat16()
    )


def test_what_shows_no_stream_and_probes_of_other_sizes_are_refused():
    passage = orbit("t5")
    task = sm.make_task("seq2seq", "self", [passage.base], samples=2, length=8)
    with pytest.raises(MismatchError, match="shows no stream"):
        both_streams(passage.base, passage.other, layer=1, data=task)
    passage = orbit("llama")
    task = sm.make_task("clm", "self", [passage.base], samples=2, length=8)
    for wrong in (torch.zeros(47), torch.zeros(3, 48)):
        with pytest.raises(MismatchError, match="a probe has the shape"):
            sm.carry_probe(passage.base, passage.other, wrong, layer=1, data=task)


def test_moments_of_unknown_tensors_and_other_shapes_are_refused():
    for wrong in ({"x": torch.zeros(3)}, {"lm_head.weight": torch.zeros(3, 3)}):
        with pytest.raises(MismatchError, match="moment"):
            sm.carry_moments(orbit("llama"), wrong, {})


def test_moments_of_gains_move_under_rotations_as_their_diagonal():
    name = "model.norm.weight"
    flat = {name: torch.ones(48).double()}
    first, second = sm.carry_moments(orbit("llama"), flat, flat)
    assert torch.allclose(first[name], flat[name]) and torch.allclose(second[name], flat[name])
    steep = {name: torch.arange(48).double()}
    moved, _ = sm.carry_moments(orbit("llama"), steep, {})
    assert moved[name].sum() == pytest.approx(steep[name].sum().item())
    assert not torch.allclose(moved[name], steep[name])


def trained(module, steps, state=None):
    """Losses of steps of Adam, from a state of moments by name if there is one."""
    named = dict(module.named_parameters())
    optimizer = torch.optim.Adam(named.values(), lr=1e-2)
    for name, (first, second) in (state or {}).items():
        step = torch.tensor(3.0)
        moments = {"step": step, "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
        optimizer.state[named[name]] = moments
    losses = []
    for number in range(steps):
        loss = module(TOKENS + number, labels=TOKENS + number).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moments = {
        name: (optimizer.state[one]["exp_avg"], optimizer.state[one]["exp_avg_sq"])
        for name, one in named.items()
    }
    return losses, moments


def test_training_goes_on_as_if_nothing_had_happened():
    limits = {"residual": "permutation", "qk": "identity", "vo": "identity"}
    module = small_model("gpt2-untied", dtype=torch.float64)
    _, moments = trained(module, 3)
    base = sm.load(module).restrict(**limits)
    units = {f"ff.{i}": {"scale": torch.ones(96, dtype=torch.float64)} for i in range(2)}
    element = Alignment.random(base.spec, torch.Generator().manual_seed(2))
    element = Alignment(  # Adam's steps do not scale with the weights
        base.spec, {n: {**e, **units.get(n, {})} for n, e in element.elements.items()}
    )
    moved = full_module(sm.apply(element, base), torch.float64)
    passage = Passage(sm.load(module), sm.load(moved), element.inverse(), (), limits)
    firsts, seconds = ({n: m[at] for n, m in moments.items()} for at in range(2))
    state = dict(_pairs(*sm.carry_moments(passage, firsts, seconds)))
    for parameter in moved.parameters():
        parameter.requires_grad_(True)
    copy = fine_tuned(small_model("gpt2-untied", dtype=torch.float64), 0.0)
    copy.load_state_dict(moved.state_dict())
    wanted, _ = trained(module, 4, moments)
    got, _ = trained(moved, 4, state)
    assert got == pytest.approx(wanted, abs=1e-9)
    control, _ = trained(copy, 4, moments)  # moments that did not move
    assert abs(control[-1] - wanted[-1]) > 1e-3


def _pairs(first, second):
    yield from ((name, (first[name], second[name])) for name in first)


def test_second_moments_under_rotations_are_their_diagonal():
    passage = orbit("llama")
    shapes = base_of("llama").spec.shapes
    # Equal in all coordinates, a rotation changes nothing.
    flat = {name: torch.ones(shape).double() for name, shape in shapes.items() if "embed" in name}
    _, squares = sm.carry_moments(passage, {}, flat)
    assert all(torch.allclose(value, flat[name]) for name, value in squares.items())

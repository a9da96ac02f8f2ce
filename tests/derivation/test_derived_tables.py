"""Derived tables: as large as ours, proved on modules of users, and never wrong."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from custom_modules import Mixer, RegisterViT, TinyGPT, Units

import symmerge as sm
from symmerge.derivation.comparing import shortfalls
from symmerge.derivation.deriving import prove_table
from symmerge.derivation.proving import FEW, FORBIDDEN, _element_of_larger
from symmerge.derivation.results import text_of
from symmerge.derivation.running import EXACT
from symmerge.derivation.stock import derive_stock
from symmerge.errors import MismatchError, SymmergeError
from symmerge.lab.small_models import small_model
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
    Trivial,
)
from symmerge.symmetry.notation import atoms, parse, unparse

# One of each kind; experiments/derived_tables.py compares all.
KNOWN = ("gpt2", "modernbert", "llama", "dinov3-classifier", "siglip_vision_model", "swin")
TOKENS = torch.randint(1, 65, (3, 11), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
CUSTOM = {TinyGPT: TOKENS, Mixer: IMAGES, RegisterViT: IMAGES}


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind().eval()


@cache
def derived(kind):
    return sm.derive(made(kind), CUSTOM[kind])


@pytest.mark.parametrize("name", KNOWN)
def test_a_derived_table_is_as_large_as_ours(name):
    module = small_model(name, use_cache=False)
    known = sm.load(module).spec
    pixels = torch.randn(2, 3, 16, 16)
    inputs = {"pixel_values": pixels} if "channel" in known.spaces else {"input_ids": TOKENS}
    read = {"read": lambda out: [out.pooler_output[:, : known.pooled]]} if known.pooled else {}
    derivation = sm.derive(module, inputs, **read)
    assert not shortfalls(derivation.spec, known, derivation.unused)
    assert derivation.together <= EXACT
    # Control: a table without its stream falls short.
    still = replace(derivation.spec, spaces={**derivation.spec.spaces}, tensors={})
    assert shortfalls(still, known)


class Places(torch.nn.Module):
    """A stream of eight coordinates at five places, whose norm is read after a change of places."""

    def __init__(self, moved):
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.units, self.head = torch.nn.Linear(8, 12), torch.nn.Linear(12, 3)
        self.moved = moved
        torch.nn.init.normal_(self.norm.weight)
        torch.nn.init.normal_(self.norm.bias)

    def forward(self, x):
        places = self.moved(self.norm(self.inner(x)))
        return self.head(torch.nn.functional.gelu(self.units(places)))


def bordered(*sides, value=0.0):
    return lambda x: torch.nn.functional.pad(x, sides, value=value)


ROUND = {
    "as they are": (lambda x: x, OrthogonalFixingOnes),
    "places move round": (lambda x: x.roll(2, 1), OrthogonalFixingOnes),
    "coordinates move round": (lambda x: x.roll(2, 2)[..., :8], Trivial),
    "numbers move round": (lambda x: x.roll(2), Trivial),
    "no border": (bordered(0, 0, 0, 0), OrthogonalFixingOnes),
    "zeros beside the places": (bordered(0, 0, 0, 2), Permutation),  # where no shift is
    "zeros beside the coordinates": (lambda x: bordered(1, 0)(x)[..., 1:], Trivial),
    "ones beside the places": (bordered(0, 0, 0, 2, value=1.0), Trivial),
    "fewer places": (bordered(0, 0, 0, -1), Trivial),
    "in the same order": (
        lambda x: x.clone().as_strided_((3, 5, 8), (40, 8, 1)),
        OrthogonalFixingOnes,
    ),
    "in another order": (lambda x: x.clone().as_strided_((3, 5, 8), (40, 1, 5)), Trivial),
}


@pytest.mark.parametrize("case", ROUND)
def test_what_may_move_where_places_change(case):
    moved, group = ROUND[case]
    torch.manual_seed(0)
    derivation = sm.derive(Places(moved).eval(), torch.randn(3, 5, 6))
    spec = derivation.spec
    (stream,) = {atom.space for atom in atoms(spec.tensors["inner.bias"])}
    assert type(spec.spaces[stream].group) is group
    assert derivation.together <= EXACT


def test_a_stock_class_of_stages_is_built_small():
    derivation = derive_stock("SwinForImageClassification")
    groups = {type(space.group) for space in derivation.spec.hidden.values()}
    assert groups == {Permutation, OrthogonalFixingOnes, GeneralLinear}
    assert derivation.together <= EXACT
    lines = tensor_lines(derivation)
    named = [line.split()[0] for line in lines]
    assert len(named) == len(set(named))
    # Its stages differ, so that a name says which: {1} reads another stream than {0}.
    query = "swin.encoder.layers.{%d}.blocks.0.attention.q_proj.weight"
    assert {query % 0, query % 1} <= set(named)
    # Control: layers that are alike are one line.
    plain = [line.split()[0] for line in tensor_lines(derived(TinyGPT))]
    assert "h.{i}.c_fc.weight" in plain and not any("{0}" in name for name in plain)


def test_a_stock_class_with_its_own_names_for_sizes_is_built_small():
    derivation = derive_stock("TrOCRForCausalLM")  # decoder_layers, decoder_ffn_dim
    assert max(space.group.size for space in derivation.spec.hidden.values()) < 100
    assert derivation.together <= EXACT


def test_an_element_of_a_wide_larger_group_is_one_of_it():
    element = _element_of_larger(GeneralLinear(300), torch.Generator().manual_seed(0), (2,))
    inverse = torch.linalg.inv(element["matrix"]).mT
    torch.testing.assert_close(element["dual"], inverse)
    assert (element["matrix"][:, :FEW, :FEW].abs() > 1e-3).double().mean() > 0.5  # control


def tensor_lines(derivation):
    """The lines of a table's tensors, as they are shown for review."""
    return text_of(derivation).split("# Tensors", 1)[1].split("\n\n", 1)[0].splitlines()[1:]


@pytest.mark.parametrize("kind", CUSTOM)
def test_every_space_of_a_custom_module_is_proved_and_no_larger_group_is(kind):
    derivation = derived(kind)
    assert derivation.proofs and all(proof.exact for proof in derivation.proofs)
    larger = [one for proof in derivation.proofs for one in proof.larger]
    assert larger and all(one.state == "refused" for one in larger)
    assert all(one.change >= FORBIDDEN for one in larger)


def test_the_groups_of_the_custom_modules():
    groups = {
        kind: {type(space.group) for space in derived(kind).spec.hidden.values()} for kind in CUSTOM
    }
    assert groups[TinyGPT] == {OrthogonalFixingOnes, Permutation, GeneralLinear}
    assert groups[Mixer] == {Permutation, ScaledPermutation}
    assert groups[RegisterViT] == {Orthogonal, Permutation, GeneralLinear, ScaledPermutation}


@torch.no_grad()
@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_modules_are_aligned_moved_and_merged_in_memory(kind):
    derivation, inputs = derived(kind), CUSTOM[kind]
    a, b = (made(kind, seed) for seed in (1, 2))
    models = [derivation.load(module) for module in (a, b)]
    aligned = sm.align(*models, "weights")
    moved = derivation.module(aligned.aligned)
    assert torch.allclose(moved(inputs), b(inputs), atol=1e-4)
    assert aligned.after < aligned.before
    merged = derivation.module(sm.merge(aligned))
    assert torch.isfinite(merged(inputs)).all()
    random = sm.Alignment.random(aligned.aligned.spec, torch.Generator().manual_seed(0))
    elsewhere = derivation.module(sm.apply(random, aligned.aligned))
    assert torch.allclose(elsewhere(inputs), b(inputs), atol=1e-4)
    # Control: the weights did change.
    first = next(iter(aligned.aligned.spec.tensors))
    assert not torch.allclose(elsewhere.get_parameter(first), b.get_parameter(first), atol=1e-2)


def with_group(spec, name, group):
    spaces = {
        key: replace(space, group=group(space.group.size))
        if key.partition(".")[0] == name
        else space
        for key, space in spec.spaces.items()
    }
    return replace(spec, spaces=spaces)


def with_axes(spec, tensor, axes):
    return replace(spec, tensors={**spec.tensors, tensor: parse(axes)})


def any_sign(size):
    return ScaledPermutation(size, positive=False)


def halves(size):
    return RotaryPairs(size, size)


WRONG = {
    "signs on the stream": (TinyGPT, lambda s: with_group(s, "residual", SignedPermutation)),
    "rotations that move ones": (TinyGPT, lambda s: with_group(s, "residual", Orthogonal)),
    "any matrix on the stream": (RegisterViT, lambda s: with_group(s, "residual", GeneralLinear)),
    "rotations of GELU": (TinyGPT, lambda s: with_group(s, "ff", OrthogonalFixingOnes)),
    "signs on GELU": (Mixer, lambda s: with_group(s, "blocks_tokens", Signs)),
    "scales on GELU": (Mixer, lambda s: with_group(s, "blocks_tokens", ScaledPermutation)),
    "negative scales on ReLU": (Mixer, lambda s: with_group(s, "blocks_channels", any_sign)),
    "signs on registers": (RegisterViT, lambda s: with_group(s, "registers", SignedPermutation)),
    "heads mixed": (RegisterViT, lambda s: with_group(s, "head", Orthogonal)),
    "values read as written": (
        TinyGPT,
        lambda s: with_axes(s, "h.0.attn.c_proj.weight", "residual (head.0 vo.0)"),
    ),
    "queries and keys torn apart": (
        TinyGPT,
        lambda s: with_axes(
            s,
            "h.0.attn.c_attn.weight",
            "((head.0 qk.0) + (head.0 vo.0) + (head.0 qk.0*)) residual*",
        ),
    ),
    "heads inside their coordinates": (
        RegisterViT,
        lambda s: with_axes(s, "blocks.0.proj.weight", "residual (vo.0* head.0)"),
    ),
    "a basis without its heads": (
        TinyGPT,
        lambda s: with_axes(s, "h.0.attn.c_proj.weight", "residual (head.1 vo.0*)"),
    ),
    "units of another layer": (
        Mixer,
        lambda s: with_axes(s, "blocks.0.channels.2.weight", "residual blocks_channels.1*"),
    ),
    "a bias left behind": (TinyGPT, lambda s: with_axes(s, "h.1.c_fc.bias", "shown128")),
    "a gate that scales": (
        RegisterViT,
        lambda s: with_axes(s, "blocks.0.gate.weight", "ff.0 residual*"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_no_wrong_table_passes_its_proof(case):
    kind, wrong = WRONG[case]
    spec = wrong(derived(kind).spec)
    if "shown128" in str(spec.tensors.values()):
        spec = replace(
            spec,
            spaces={
                **spec.spaces,
                "shown128": replace(next(iter(spec.spaces.values())), name="shown128"),
            },
        )
    with pytest.raises(SymmergeError):
        prove_table(spec, made(kind), CUSTOM[kind])


@pytest.mark.parametrize("kind", CUSTOM)
def test_the_derived_table_passes_the_same_proof(kind):
    assert prove_table(derived(kind).spec, made(kind), CUSTOM[kind]).together <= EXACT


def test_a_module_of_other_sizes_is_refused():
    with pytest.raises(MismatchError, match="does not fit"):
        derived(TinyGPT).load(TinyGPT(width=16))


# Nothing knows these by name: oddness and homogeneity are measured.
ACTIVATIONS = {
    "erf": (torch.erf, SignedPermutation),
    "softshrink": (torch.nn.functional.softshrink, SignedPermutation),
    "leaky": (torch.nn.functional.leaky_relu, ScaledPermutation),
    "mish": (torch.nn.functional.mish, Permutation),
    "squared ReLU": (lambda x: x.relu().square(), Permutation),
    "leaky, written as a choice": (lambda x: torch.where(x > 0, x, x / 3), ScaledPermutation),
    "leaky, written as a maximum": (lambda x: torch.maximum(x, x / 3), ScaledPermutation),
    "hard shrinking": (lambda x: x * (x.abs() > 0.3), SignedPermutation),
    "a maximum beside a number": (lambda x: torch.maximum(x, torch.tensor(0.2)), Permutation),
    "sine of the square": (lambda x: x.square().sin(), SignedPermutation),
    "none": (lambda x: 2 * x, GeneralLinear),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_an_unknown_activation_allows_is_measured(name):
    activation, group = ACTIVATIONS[name]
    derivation = sm.derive(Units(activation), torch.randn(6, 5))
    (space,) = derivation.spec.hidden.values()
    assert type(space.group) is group


def test_an_operation_that_is_not_understood_leaves_what_it_reaches_as_it_is():
    derivation = sm.derive(Units(lambda x: x.cumsum(-1)), torch.randn(6, 5))
    assert not derivation.spec.hidden
    assert any("cumsum" in note for note in derivation.notes)


class Chosen(torch.nn.Module):
    """An expert by its score, places in another order, and a number of its own."""

    def __init__(self, order):
        super().__init__()
        self.first, self.router = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 4)
        self.experts = torch.nn.Parameter(torch.randn(4, 3, 7))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("order", order)

    def forward(self, x):
        hidden = self.first(x).gather(0, self.order[:, None].expand(-1, 7))
        score, expert = self.router(hidden).topk(1)
        return self.scale * torch.bmm(self.experts[expert[:, 0]], hidden[..., None])[..., 0] * score


def test_rows_that_a_choice_looks_up_keep_their_other_axes():
    derivation = sm.derive(Chosen(torch.tensor([2, 0, 1, 5, 4, 3])), torch.randn(6, 5))
    (space,) = derivation.spec.hidden.values()
    assert space.group == GeneralLinear(7)  # the experts stay in their places
    assert unparse(derivation.spec.tensors["scale"]) == "()"
    assert any("choice by size" in note for note in derivation.notes)


def test_places_that_differ_by_coordinate_hold_them():
    class Torn(Chosen):
        def forward(self, x):
            hidden = self.first(x).gather(0, torch.randint(6, (6, 7), generator=_seeded()))
            return self.router(hidden)

    assert not sm.derive(Torn(torch.arange(6)), torch.randn(6, 5)).spec.hidden


def _seeded():
    return torch.Generator().manual_seed(0)

"""What is no symmetry must show: forbidden elements, made by the same machinery as the allowed ones, change the logits.

Each control has an allowed twin that moves the same space, so that a control that always fires is caught as well.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import SymmetryError
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model, rebind
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
)
from symmerge.symmetry.notation import parse, unparse
from symmerge.symmetry.spec import Space

ALLOWED, FORBIDDEN = 1e-10, 1e-2
AnySign = partial(ScaledPermutation, positive=False)


@dataclass(frozen=True)
class Control:
    """Two ways to move a model: one a symmetry, one not."""

    allowed: Callable[[Model], Model]
    forbidden: Callable[[Model], Model]


@cache
def loaded(name):
    return sm.load(small_model(name, dtype=torch.float64))


@cache
def folded(name):
    return sm.canonicalize(loaded(name), ("fold",))


def family_of(space):
    return space.partition(".")[0]


def move(model, space, seed=1):
    """Only the spaces called so, in every layer; all others stay, so that nothing else can be the cause."""
    generator, still = torch.Generator().manual_seed(seed), Alignment.identity(model.spec)
    elements = {
        name: other.group.random(generator, model.spec.batch(name))
        for name, other in model.spec.hidden.items()
        if family_of(name) == space
    }
    assert elements, f"no space {space}"
    return sm.apply(replace(still, elements={**still.elements, **elements}), model)


def regroup(model, space, group):
    """The table with a group that its author was warned about."""
    spaces = {
        name: replace(old, group=group(old.group.size)) if family_of(name) == space else old
        for name, old in model.spec.spaces.items()
    }
    return replace(model, spec=replace(model.spec, spaces=spaces))


@cache
def moving(space):
    """The allowed way, one object per space: its measurement is shared by all controls of that space."""
    return partial(move, space=space)


def wrong_group(space, group):
    return Control(moving(space), lambda model: move(regroup(model, space, group), space))


def left_behind(*names):
    """The stream moves, but these tensors do not: a head or a tied decoder that was forgotten."""

    def forbidden(model):
        moved = move(model, "residual")
        return replace(
            moved,
            weights=DerivedWeights(
                moved.weights, {name: partial(model.weights.__getitem__, name) for name in names}
            ),
        )

    return Control(moving("residual"), forbidden)


def edit(model, change):
    """By hand: `change(view, spaces)` gives the new entries of a part of a tensor, whose dimensions are these spaces, or None."""

    def edited(name):
        tensor = model.weights[name].clone()
        for piece in model.spec.pieces[name]:
            view = piece.view(tensor)
            new = change(view, [family_of(atom.space) for atom in piece.atoms])
            if new is not None:
                view.copy_(new)
        return tensor

    return replace(
        model,
        weights=DerivedWeights(
            model.weights, {name: partial(edited, name) for name in model.spec.tensors}
        ),
    )


def roll(outer, *inner):
    """Every head (or query) to the next place, but only where one of the `inner` spaces is met."""
    return lambda model: edit(
        model,
        lambda view, spaces: (
            view.roll(1, spaces.index(outer)) if outer in spaces and {*inner} & {*spaces} else None
        ),
    )


def across_groups(model):
    """Query heads change places as if every one had its own key: the last of a group goes to the next group."""

    def change(view, spaces):
        if "query" not in spaces:
            return None
        head = spaces.index("head")
        return (
            view.flatten(head, head + 1).roll(1, head).unflatten(head, view.shape[head : head + 2])
        )

    return edit(model, change)


TORN_HEADS = Control(roll("head", "qk", "vo"), roll("head", "vo"))
QUERIES_ACROSS_GROUPS = Control(roll("query", "qk", "vo"), across_groups)


def gate_as_writer(model):
    """The gate scaled with the up branch: but it goes through the activation."""
    tensors = {
        name: parse(re.sub(r"(ff\.\d+)~", r"\1", unparse(axes)))
        for name, axes in model.spec.tensors.items()
    }
    return move(replace(model, spec=replace(model.spec, tensors=tensors)), "ff")


SCALED_GATE = Control(moving("ff"), gate_as_writer)


def apart(model, space):
    """The output of a tied decoder's transform as a space of its own; then only one of the two moves."""
    head = ("cls.predictions.transform.", "lm_head.dense.", "lm_head.layer_norm.")
    apart = {
        name: parse(re.sub(r"^residual", "transform", unparse(axes)))
        for name, axes in model.spec.tensors.items()
        if name.startswith(head)
    }
    assert len(apart) == 4
    spaces = {
        **model.spec.spaces,
        "transform": Space("transform", Permutation(model.spec.sizes["residual"])),
    }
    return move(
        replace(
            model, spec=replace(model.spec, spaces=spaces, tensors={**model.spec.tensors, **apart})
        ),
        space,
    )


TIED_DECODER = {
    "tied decoder moved, its transform not": Control(
        moving("residual"), partial(apart, space="residual")
    ),
    "tied decoder's transform moved alone": Control(
        moving("residual"), partial(apart, space="transform")
    ),
}


def shown_permuted(model):
    return move(regroup(model, "residual", Permutation), "residual")


def all_of_the_stream(model):
    """The table of a stream of which nothing is shown."""
    tensors = {
        name: parse(re.sub(r"\(label(\W?) \+ residual\W?\)", r"residual\1", unparse(axes)))
        for name, axes in model.spec.tensors.items()
    }
    width = model.spec.sizes["label"] + model.spec.sizes["residual"]
    spaces = {name: space for name, space in model.spec.spaces.items() if name != "label"} | {
        "residual": Space("residual", OrthogonalFixingOnes(width))
    }
    return replace(model, spec=replace(model.spec, spaces=spaces, tensors=tensors))


def scores_not_fixed(model):
    """All of the stream rotates; the last gain does not follow."""
    free = all_of_the_stream(model)
    gain, shift = model.weights["norm.weight"], model.weights["norm.bias"]
    plain = DerivedWeights(
        model.weights,
        {
            "norm.weight": lambda: torch.ones_like(gain),
            "norm.bias": lambda: torch.zeros_like(shift),
        },
    )
    moved = move(replace(free, weights=plain), "residual")
    kept = DerivedWeights(moved.weights, {"norm.weight": lambda: gain, "norm.bias": lambda: shift})
    return replace(moved, spec=model.spec, weights=kept)


# Permutations only: a post-LayerNorm stream, a GELU.
STREAM_SIGNS = {"signs on the stream": wrong_group("residual", SignedPermutation)}
GELU = {
    "signs on GELU": wrong_group("ff", SignedPermutation),
    "scales on GELU": wrong_group("ff", ScaledPermutation),
}
HEADS = {"torn heads": TORN_HEADS}
# A pre-LayerNorm stream after folding: rotations that move the ones vector, and what is no rotation.
LAYER_NORM = {
    **STREAM_SIGNS,
    "rotation that moves ones": wrong_group("residual", Orthogonal),
    "any matrix on the stream": wrong_group("residual", GeneralLinear),
}
RMS_NORM = {
    "any matrix on the stream": wrong_group("residual", GeneralLinear),
    "scales on the stream": wrong_group("residual", ScaledPermutation),
}
ROTARY = {
    "any matrix on rotary QK": wrong_group("qk", GeneralLinear),
    "rotation of rotary QK": wrong_group("qk", Orthogonal),
    "permutation across rotary pairs": wrong_group("qk", Permutation),
    "signs inside rotary pairs": wrong_group("qk", SignedPermutation),
}
HALVES, INTERLEAVED = (
    wrong_group("qk", lambda size, layout=layout: RotaryPairs(size, size, layout))
    for layout in ("halves", "interleaved")
)
HEAD_LEFT = {"head left behind": left_behind("lm_head.weight")}
LLAMA = {**RMS_NORM, **ROTARY, **HEADS, **HEAD_LEFT, "scaled gate": SCALED_GATE}

FORBIDDEN_ELEMENTS: dict[str, dict[str, Control]] = {
    "bert": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "bert-untied": {
        **STREAM_SIGNS,
        **GELU,
        **HEADS,
        "signs on the transform": wrong_group("transform", SignedPermutation),
        "transform left behind": left_behind("cls.predictions.transform.dense.weight"),
    },
    "bert-classifier": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "scales on the tanh pooler": wrong_group("pooled", ScaledPermutation),
        "pooler left behind": left_behind("bert.pooler.dense.weight"),
    },
    "roberta": {**STREAM_SIGNS, **GELU, **HEADS, **TIED_DECODER},
    "roberta-classifier": {
        "scales on the tanh classifier": wrong_group("classifier", ScaledPermutation)
    },
    "roformer": {
        **STREAM_SIGNS,
        **GELU,
        **ROTARY,
        "pairs in halves": HALVES,
        **HEADS,
        **TIED_DECODER,
    },
    "roformer-classifier": {
        "any matrix on rotary values": wrong_group("vo", GeneralLinear),
        "rotary values in halves": wrong_group("vo", lambda size: RotaryPairs(size, size)),
        "rotation of the embedding that moves ones": wrong_group("embedding", Orthogonal),
        "signs on the GELU classifier": wrong_group("classifier", SignedPermutation),
        "projection left behind": left_behind("roformer.embeddings_project.weight"),
    },
    "modernbert": {
        **LAYER_NORM,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        "scaled gate": SCALED_GATE,
        "signs on the transform": wrong_group("transform", SignedPermutation),
        "attention without a norm left behind": left_behind("model.layers.0.attn.Wqkv.weight"),
        "embedding left behind": left_behind("model.embeddings.tok_embeddings.weight"),
    },
    "modernbert-classifier": {
        **LAYER_NORM,
        "scaled gate": SCALED_GATE,
        "shift of the embedding left behind": left_behind("model.embeddings.norm.bias"),
        "pooled head left behind": left_behind("head.dense.weight"),
    },
    "gpt2": {**LAYER_NORM, **GELU, **HEADS, **HEAD_LEFT},
    "gpt2-untied": {
        "negative scales on ReLU": wrong_group("ff", AnySign),
        "final shift left behind": left_behind("transformer.ln_f.bias"),
    },
    "vit": {
        **LAYER_NORM,
        **GELU,
        **HEADS,
        "class token left behind": left_behind("vit.embeddings.cls_token"),
    },
    "vit-tanh": {"scales on tanh": wrong_group("ff", ScaledPermutation)},
    "dinov3": {
        **GELU,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        "permutation of what is shown": Control(moving("ff"), shown_permuted),
    },
    "dinov3-classifier": {
        **LAYER_NORM,
        **ROTARY,
        "interleaved pairs": INTERLEAVED,
        **HEADS,
        "scaled gate": SCALED_GATE,
        "scores change places": Control(
            moving("residual"), lambda model: move(regroup(model, "label", Permutation), "label")
        ),
        "rotation that mixes scores with the rest": Control(moving("residual"), scores_not_fixed),
        "class token left behind": left_behind("embeddings.cls_token"),
        "registers left behind": left_behind("embeddings.register_tokens"),
        "patches left behind": left_behind("embeddings.patch_embeddings.weight"),
        "shift before keys without a bias left behind": left_behind("model.layer.0.norm1.bias"),
    },
    "llama": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "mistral": LLAMA,
    "qwen2": {**LLAMA, "queries across groups": QUERIES_ACROSS_GROUPS},
    "neox": {**LAYER_NORM, **GELU, **ROTARY, **HEADS, **HEAD_LEFT},
}
CASES = [(name, case) for name, controls in FORBIDDEN_ELEMENTS.items() for case in controls]


def difference(a, b):
    return sm.verify(a, b, dtype=torch.float64).difference


@cache
def allowed_change(name, allowed):
    return difference(folded(name), allowed(folded(name)))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_allowed_element_passes_and_the_forbidden_one_shows(name, case):
    control, model = FORBIDDEN_ELEMENTS[name][case], folded(name)
    assert allowed_change(name, control.allowed) <= ALLOWED
    assert difference(model, control.forbidden(model)) >= FORBIDDEN


def test_every_family_has_three_controls():
    families = (
        "bert",
        "bert-untied",
        "roberta",
        "roformer",
        "modernbert",
        "gpt2",
        "vit",
        "dinov3",
        "dinov3-classifier",
        "llama",
        "mistral",
        "qwen2",
        "neox",
    )
    assert all(len(FORBIDDEN_ELEMENTS[name]) >= 3 for name in families)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt2-untied",
        "vit",
        "llama",
        "mistral",
        "qwen2",
        "neox",
        "modernbert-classifier",
        "dinov3-classifier",
    ],
)
def test_gains_that_are_not_folded_refuse_to_rotate(name):
    with pytest.raises(SymmetryError, match=r"(ln_|norm).*\.weight.*pointwise.*canonicalize"):
        difference(loaded(name), move(loaded(name), "residual"))
    assert difference(loaded(name), move(folded(name), "residual")) <= ALLOWED


def test_a_gain_of_scores_refuses_to_rotate():
    with pytest.raises(SymmetryError, match=r"norm\.weight.*pointwise"):
        difference(
            folded("dinov3-classifier"),
            move(all_of_the_stream(folded("dinov3-classifier")), "residual"),
        )


@pytest.mark.parametrize("group", [Orthogonal, GeneralLinear])
@pytest.mark.parametrize("name", ["bert", "roberta", "roformer"])
def test_a_post_norm_stream_refuses_to_rotate(name, group):
    # Its gains sit on the stream: there is nothing to fold them into.
    with pytest.raises(SymmetryError, match=r"LayerNorm\.weight.*pointwise"):
        difference(folded(name), move(regroup(folded(name), "residual", group), "residual"))


@pytest.mark.parametrize("seed", range(3))
def test_a_tied_decoder_that_was_copied_and_not_moved_shows(seed):
    # The tie is gone, so the copy must move with the stream like any other reader.
    model = loaded("gpt2").restrict(residual="permutation")
    weights = DerivedWeights(
        move(model, "residual", seed).weights,
        {"lm_head.weight": partial(model.weights.__getitem__, "transformer.wte.weight")},
        added={"lm_head.weight": (model.weights.shape("transformer.wte.weight"), torch.float64)},
    )
    untied = rebind(
        model,
        {**model.config, "tie_word_embeddings": False},
        weights,
        step=HistoryStep("untie", ""),
    )
    assert difference(model, move(model, "residual", seed)) <= ALLOWED
    assert difference(model, untied) >= FORBIDDEN

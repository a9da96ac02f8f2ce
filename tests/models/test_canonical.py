"""The canonical form: gauges are fixed, no logit changes, what cannot be folded is refused."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import SymmetryError
from symmerge.lab.small_models import SMALL, small_model
from symmerge.models.alignment import lay
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import (
    GeneralLinear,
    OrthogonalFixingOnes,
    RotaryPairs,
    ScaledPermutation,
)
from symmerge.symmetry.notation import Role

EXACT = 1e-10
ROTATING = [
    name
    for name in SMALL
    if not name.startswith(
        (
            *("bert", "roberta", "xlm-roberta", "distilbert", "roformer", "olmo", "bart"),
            *("mpnet", "albert", "gemma"),
            "clip",  # two streams: tests/families/test_towers.py
            "swin",  # stages: tests/families/test_swin.py
        )
    )
    and not name.endswith("-features")
    and name not in ("dinov3", "opt-post-norm")
]
LAYER_NORM = [
    name
    for name in ROTATING
    if name.startswith(
        ("gpt2", "vit", "neox", "modernbert", "dinov", "starcoder2", "stablelm", "opt", "bloom")
    )
]
RMS_NORM = [name for name in ROTATING if name not in LAYER_NORM]


@cache
def loaded(name):
    return sm.load(small_model(name, dtype=torch.float64))


@cache
def canonical(name):
    return sm.canonicalize(loaded(name))


def with_tensors(model, edits):
    """The model with some tensors changed in place by functions."""
    tensors = {name: model.weights[name].clone() for name in model.weights}
    for name, edit in edits.items():
        edit(tensors[name])
    source = replace(model.source, base=MemoryWeights(tensors), digests={})
    return replace(model, weights=source, source=source)


def biases(model, space, role):
    """Every bias that meets a kind of space in a role, as (head, coordinate) pieces."""
    met = [
        met
        for name in model.spec.spaces
        if name.startswith(f"{space}.")
        for met in model.spec.occurrences(name)
        if met.role is role
    ]
    return [item.piece for item in met if len(model.weights.shape(item.piece.tensor)) == 1]


def has(space, role):
    return [name for name in SMALL if biases(loaded(name), space, role)]


def read(model, piece):
    return piece.view(model.weights[piece.tensor])


def sides(model, space):
    """All that writes to a space and all that reads it, as [head, coordinate, rest]."""
    per = model.spec.spaces[space].per
    found = {Role.WRITES: [], Role.READS: []}
    for met in model.spec.occurrences(space):
        if met.role in found:
            outer = None if per is None else next(met.piece.positions(per))
            found[met.role].append(lay(read(model, met.piece), met.position, outer)[0])
    return (torch.cat(found[role], -1) for role in (Role.WRITES, Role.READS))


# fold and centre


@pytest.mark.parametrize("name", ROTATING)
def test_gains_are_exactly_one_and_shifts_gone_where_a_bias_takes_them(name):
    model = canonical(name)
    for norm in model.spec.norms:
        gain = model.weights[norm.gain]
        assert (loaded(name).weights[norm.gain] != 1).any()
        # the outside reads the first coordinates, and nobody the others
        if not (norm.readers or norm.writer):
            shown = model.spec.sizes["label"]
            assert torch.equal(gain[:shown], loaded(name).weights[norm.gain][:shown])
            assert (
                (gain[shown:] == 1).all()
                and not model.weights[norm.shift][shown:].any()
                and model.weights[norm.shift][:shown].all()
            )
            continue
        assert (gain == (gain[0] if norm.writer else 1)).all()
        if (
            norm.shift
            and not norm.writer
            and all(f"{reader}.bias" in model.spec.tensors for reader in norm.readers)
        ):
            assert not model.weights[norm.shift].any()


def test_a_constant_gain_does_not_keep_its_shift():
    model = with_tensors(
        loaded("gpt2"), {"transformer.h.0.ln_1.weight": lambda gain: gain.fill_(0.7)}
    )
    folded = sm.canonicalize(model)
    assert not folded.weights["transformer.h.0.ln_1.bias"].any()
    assert difference(model, folded) <= EXACT


def centred(tensor):
    tensor.sub_(tensor.mean(-1, keepdim=True))


def stream_means(model, kept):
    """The largest mean over the stream of tensors that meet it; norms and `kept` aside."""
    norms = {name for norm in model.spec.norms for name in (norm.gain, norm.shift)}
    met = [
        met
        for met in model.spec.occurrences("residual")
        if met.piece.tensor not in norms | kept and met.role is not Role.RIDES
    ]
    axes = {
        item.piece.tensor: model.spec.axis_of(item.piece.tensor, "residual", item.role)
        for item in met
    }
    return [model.weights[tensor].mean(axis).abs().max().item() for tensor, axis in axes.items()]


@pytest.mark.parametrize("name", LAYER_NORM)
def test_nobody_writes_or_reads_the_mean_of_a_layer_norm_stream(name):
    model = canonical(name)
    # Readers whose norm keeps its shift also read the ones component of that shift.
    kept = {
        f"{reader}.weight"
        for norm in model.spec.norms
        if norm.shift and model.weights[norm.shift].any()
        for reader in norm.readers
    }
    absorbed = {f"{norm.writer}.weight" for norm in model.spec.norms if norm.writer}
    assert max(stream_means(model, kept)) <= 1e-14
    assert (
        min(stream_means(sm.canonicalize(loaded(name), ("fold",)), kept | absorbed)) > 1e-4
    )  # there was something to take out
    assert not kept or difference(model, with_tensors(model, dict.fromkeys(kept, centred))) >= 1e-2


@pytest.mark.parametrize("name", RMS_NORM)
def test_an_rms_norm_stream_keeps_its_mean(name):
    # RMSNorm sees the mean: taking it out changes the function.
    model = sm.canonicalize(loaded(name), ("fold", "centre"))
    embedding = "shared.weight" if name == "t5" else "model.embed_tokens.weight"
    assert torch.equal(model.weights[embedding], loaded(name).weights[embedding])
    assert difference(model, with_tensors(model, {embedding: centred})) >= 1e-2


# biases inside attention: how far keys are dropped, and whether values have somewhere to go

KEYS = {
    "llama-mqa": 12,
    "qwen2": 12,
    "granite-tied": 12,
    "starcoder2": 12,
    "stablelm": 6,
    "olmo3": 6,
    "qwen3-tied": 6,  # of each half: all
    "neox": 6,
    "roformer": 12,
    "roformer-classifier": 12,
    "modernbert-classifier": 12,
    "dinov3": 12,
}  # how many coordinates of a key rotate, and keep their bias; elsewhere none
VALUES_STAY = (
    "qwen2",
    "stablelm",
    "roformer-classifier",
)  # no output bias to move them into; values that turn with the position


@pytest.mark.parametrize("name", has("qk", Role.READS))
def test_key_biases_are_zero_where_positions_do_not_rotate_them(name):
    rotated = KEYS.get(name, 0)
    for piece in biases(canonical(name), "qk", Role.READS):
        after = read(canonical(name), piece)
        assert (read(loaded(name), piece) != 0).all()
        assert not after[..., rotated:].any()
        assert (after[..., :rotated] != 0).all()


@pytest.mark.parametrize("name", KEYS)
def test_rotated_key_biases_matter(name):
    model = canonical(name)
    zeroed = {
        piece.tensor: lambda bias, piece=piece: piece.view(bias).zero_()
        for piece in biases(model, "qk", Role.READS)
    }
    assert difference(model, with_tensors(model, zeroed)) >= 1e-2


@pytest.mark.parametrize("name", has("vo", Role.WRITES))
def test_value_biases_move_into_the_output_bias(name):
    for piece in biases(canonical(name), "vo", Role.WRITES):
        assert read(loaded(name), piece).all()
        assert bool(read(canonical(name), piece).any()) == (name in VALUES_STAY)


# balance


def off_diagonal(gram):
    return gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("name", SMALL)
def test_circuits_are_balanced(name):
    """Writers and readers have the same size in every space where only their product matters."""
    model, before = (
        canonical(name),
        sm.canonicalize(loaded(name), ("fold", "centre", "values", "keys")),
    )
    checked = 0
    for space, group in ((space, model.spec.spaces[space].group) for space in model.spec.hidden):
        if isinstance(group, GeneralLinear):
            x, y = (side @ side.mT for side in sides(model, space))
            assert off_diagonal(x).norm() <= EXACT * x.norm()
            assert (x - y).norm() <= EXACT * x.norm()
            values = x.diagonal(dim1=-2, dim2=-1)  # singular values, largest first, to its rank
            assert ((values.diff(dim=-1) < 0) | (values[..., 1:] == 0)).all()
        elif isinstance(group, ScaledPermutation | RotaryPairs):
            x, y = (sizes(group, side) for side in sides(model, space))
            assert ((x - y) / x).abs().max() <= EXACT
        else:
            continue
        x, y = (side.norm(dim=-1) for side in sides(before, space))
        assert ((x - y) / x).abs().max() > 1e-2  # it was not balanced before
        checked += 1
    # queries and keys, values and outputs, in every layer
    assert checked >= 2 * sum(space.startswith("ff.") for space in model.spec.spaces)


def sizes(group, side):
    """What balance makes equal: sizes of units, rotary pairs and other coordinates."""
    if isinstance(group, ScaledPermutation):
        return side.norm(dim=-1)
    first, second, others = group.split(side)
    return torch.cat([torch.cat([first, second], -1).norm(dim=-1), others.norm(dim=-1)], -1)


@pytest.mark.parametrize("name", SMALL)
def test_the_canonical_form_of_a_canonical_form_is_itself(name):
    # Up to the signs of singular vectors, which nothing fixes.
    once, twice = canonical(name), sm.canonicalize(canonical(name))
    for tensor in once.spec.tensors:
        first, second = once.weights[tensor].abs(), twice.weights[tensor].abs()
        assert (first - second).norm() <= EXACT * first.norm(), tensor
    assert difference(once, twice) <= EXACT


@pytest.mark.parametrize("name", ["gpt2-untied", "vit", "bert"])
def test_one_function_has_one_canonical_form(name):
    # Inside heads, where the group is GL, the form does not depend on the place on the orbit.
    model = loaded(name).restrict(residual="identity", head="identity", ff="identity")
    first, second = (sm.canonicalize(member) for member in (model, random_member(model, 3)[1]))
    for tensor in first.spec.tensors:
        a, b = (member.weights[tensor].abs() for member in (first, second))
        assert (a - b).norm() <= 1e-9 * a.norm(), tensor


# scales after a map go into it


SCALED = "model.layer.0.layer_scale1.lambda1"


def test_scales_go_into_the_maps_before_them():
    name, writer = "dinov3-classifier", "model.layer.0.attention.o_proj"
    before, folded = loaded(name), sm.canonicalize(loaded(name), ("fold",))
    assert all(
        (before.weights[scale.gain] != 1).any() and (folded.weights[scale.gain] == 1).all()
        for scale in before.spec.scales
    )
    assert len(before.spec.scales) == 4 and "4 scales" in folded.history[0].what
    gain = before.weights[SCALED]
    assert torch.equal(
        folded.weights[f"{writer}.weight"], before.weights[f"{writer}.weight"] * gain[:, None]
    )
    assert torch.equal(folded.weights[f"{writer}.bias"], before.weights[f"{writer}.bias"] * gain)
    forgotten = with_tensors(
        folded, {SCALED: lambda scale: scale.copy_(gain)}
    )  # folded, and applied once more
    assert difference(before, folded) <= EXACT and difference(before, forgotten) >= 1e-2


def test_a_scale_of_zero_is_exact():
    model = with_tensors(
        loaded("dinov3-classifier"), {SCALED: zero(0, 7), "norm.weight": zero(1, 9)}
    )
    assert difference(model, loaded("dinov3-classifier")) >= 1e-3
    assert difference(model, random_member(model, 1)[1]) <= EXACT


# gains that are exactly zero


def zero(*places):
    return lambda tensor: tensor.index_fill_(0, torch.tensor(places), 0)


ZERO_GAINS = {
    "gpt2 inside": (
        "gpt2",
        {"transformer.h.0.ln_1.weight": zero(3, 4, 7), "transformer.h.1.ln_2.weight": zero(0, 47)},
    ),
    "gpt2 final, shift zero there": (
        "gpt2",
        {"transformer.ln_f.weight": zero(5, 6), "transformer.ln_f.bias": zero(5, 6)},
    ),
    "gpt2 final, nobody reads it there": (
        "gpt2-untied",
        {"transformer.ln_f.weight": zero(5), "lm_head.weight": lambda w: w[:, 5].zero_()},
    ),
    "vit final, the classifier has a bias": ("vit", {"vit.layernorm.weight": zero(1, 2)}),
    "neox final, shift zero there": (
        "neox",
        {"gpt_neox.final_layer_norm.weight": zero(9), "gpt_neox.final_layer_norm.bias": zero(9)},
    ),
    "llama everywhere": (
        "llama",
        {"model.norm.weight": zero(1), "model.layers.0.input_layernorm.weight": zero(2, 3)},
    ),
    "a whole norm": ("gpt2", {"transformer.h.0.ln_1.weight": torch.Tensor.zero_}),
}


@pytest.mark.parametrize("case", ZERO_GAINS)
def test_zero_gains_are_exact(case):
    name, edits = ZERO_GAINS[case]
    model = with_tensors(loaded(name), edits)
    assert difference(model, loaded(name)) >= 1e-3
    for other in (sm.canonicalize(model), random_member(model, 1)[1]):
        assert all(other.weights[tensor].isfinite().all() for tensor in other.spec.tensors)
        assert difference(model, other) <= EXACT


LOST = {
    "gpt2": "transformer.ln_f",
    "gpt2-untied": "transformer.ln_f",
    "neox": "gpt_neox.final_layer_norm",
    "stablelm": "model.norm",
}


@pytest.mark.parametrize(
    "gain", [0.0, 1e-6]
)  # a tiny gain would be divided by, and float32 would lose the shift's digits
@pytest.mark.parametrize("name", LOST)
def test_a_shift_that_has_nowhere_to_go_is_refused(name, gain):
    model = with_tensors(
        loaded(name),
        {f"{LOST[name]}.weight": lambda tensor: tensor.index_fill_(0, torch.tensor([5]), gain)},
    )
    for attempt in (sm.canonicalize, random_member):
        with pytest.raises(
            SymmetryError,
            match=rf"{LOST[name]}\.weight is zero, or too small to divide by, at 5 "
            r".*lm_head has no bias.*permutations",
        ):
            attempt(model)
    # The remedy it names works.
    restricted = model.restrict(residual="permutation")
    assert difference(model, random_member(restricted, 1)[1]) <= EXACT


# ties

TIED = {
    "gpt2": ("transformer.ln_f", "transformer.wte.weight"),
    "llama-mqa": ("model.norm", "model.embed_tokens.weight"),
}
TIED |= dict.fromkeys(
    ("qwen2", "qwen3-tied", "phi3-tied", "granite-tied", "starcoder2-tied", "stablelm-parallel"),
    TIED["llama-mqa"],
)


def is_tied(model, tmp_path):
    """What the model, its config and the checkpoint written from it say; they must agree."""
    folder = sm.save(model, tmp_path / "saved", overwrite=True)
    stored = "lm_head.weight" in sm.load(folder).weights.names()
    assert (
        stored == ("lm_head.weight" in model.weights) == ("lm_head.weight" not in model.spec.ties)
    )
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not stored
    return not stored


@pytest.mark.parametrize("name", TIED)
def test_a_final_gain_unties_the_head(name, tmp_path):
    assert is_tied(loaded(name), tmp_path)
    assert not is_tied(canonical(name), tmp_path)
    _, embedding = TIED[name]
    assert (
        canonical(name).weights["lm_head.weight"] - canonical(name).weights[embedding]
    ).norm() > 0.1
    assert difference(loaded(name), sm.load(tmp_path / "saved")) <= EXACT


@pytest.mark.parametrize("name", TIED)
def test_permutations_keep_the_tie(name, tmp_path):
    model = loaded(name).restrict(residual="permutation")
    for other in (sm.canonicalize(model), random_member(model, 1)[1]):
        assert is_tied(other, tmp_path)
        assert difference(model, other) <= EXACT
    assert not torch.equal(other.weights[TIED[name][1]], model.weights[TIED[name][1]])


@pytest.mark.parametrize("name", TIED)
def test_a_constant_final_gain_keeps_the_tie(name, tmp_path):
    norm, _ = TIED[name]
    edits = {f"{norm}.weight": lambda gain: gain.fill_(1.5), f"{norm}.bias": torch.Tensor.zero_}
    model = with_tensors(
        loaded(name),
        {tensor: edit for tensor, edit in edits.items() if tensor in loaded(name).spec.tensors},
    )
    for other in (sm.canonicalize(model), random_member(model, 1)[1]):
        assert is_tied(other, tmp_path)
        assert difference(model, other) <= EXACT


# the record

ALL = ["fold", "centre", "values", "keys", "balance"]
RECORDS = {
    **{
        name: ["values", "keys", "balance"]
        for name in SMALL
        if name.startswith(("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "bart"))
    },
    "roformer": ["values", "balance"],
    "roformer-classifier": ["fold", "centre", "balance"],
    "modernbert": ["untie", "fold", "centre", "balance"],
    "modernbert-classifier": ["fold", "centre", "values", "balance"],
    "dinov3": ["values", "balance"],
    "dinov3-classifier": ["fold", "centre", "values", "balance"],
    **dict.fromkeys(("gpt2-untied", "gpt2-classifier", "vit", "neox", "dinov2", "swin"), ALL),
    **{name: ["values", "keys", "balance"] for name in ("gpt2-features", "vit-features")},
    "llama-features": ["balance"],
    **{name: ["untie", *ALL] for name in ("gpt2", "opt", "bloom", "albert")},
    "opt-post-norm": ["values", "keys", "balance"],
    **{name: ["balance"] for name in ("olmo2", "gemma3")},
    "olmo3": ["values", "balance"],
    "starcoder2": ["fold", "centre", "values", "balance"],
    "starcoder2-tied": ["untie", "fold", "centre", "balance"],
    "stablelm": ["fold", "centre", "keys", "balance"],
    "clip": ALL,
    "stablelm-parallel": ["untie", "fold", "centre", "balance"],
    **{
        name: ["fold", "centre", "balance"]
        for name in ("vit-tanh", "neox-sequential", "opt-untied")
    },
    **{
        name: ["fold", "balance"]
        for name in ("llama", "llama-classifier", "mistral", "qwen3", "phi3", "granite", "mixtral")
    },
    **{
        name: ["untie", "fold", "values", "balance"]
        for name in ("llama-mqa", "qwen3-tied", "granite-tied")
    },
    **{name: ["untie", "fold", "balance"] for name in ("qwen2", "phi3-tied", "t5")},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_history_lists_what_was_done(name):
    assert [step.step for step in canonical(name).history] == RECORDS[name]
    assert [step.step for step in random_member(loaded(name))[1].history][-1] == "apply"
    assert all(step.what for step in canonical(name).history)


def test_steps_can_be_chosen_and_unknown_ones_are_refused():
    assert [step.step for step in sm.canonicalize(loaded("vit"), ("balance", "fold")).history] == [
        "fold",
        "balance",
    ]
    with pytest.raises(
        SymmetryError,
        match="no canonical step called center: choose one of untie, sums, fold, centre",
    ):
        sm.canonicalize(loaded("vit"), ("center",))


def test_the_model_itself_is_left_as_it_was():
    module = small_model("gpt2")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    member = random_member(sm.canonicalize(sm.load(module)), 1)[1]
    assert all(member.weights[name].isfinite().all() for name in member.spec.tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_streams_are_of_the_kind_their_norm_says():
    # The lists above must not be empty by mistake.
    assert len(LAYER_NORM) >= 6 and len(RMS_NORM) >= 4
    assert all(
        isinstance(loaded(name).spec.spaces["residual"].group, OrthogonalFixingOnes)
        for name in LAYER_NORM
    )


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama-tied"])
def test_untying_on_request_keeps_the_function_and_frees_a_space(name):
    model = loaded(name) if name in SMALL else loaded("llama")
    if not model.spec.ties:
        assert sm.canonicalize(model, ("untie",)) is model  # nothing to do
        return
    free = sm.canonicalize(model, ("untie",))
    assert (
        not free.spec.ties
        and set(model.spec.ties) <= set(free.weights)
        and not set(model.spec.ties) <= set(model.weights)
    )
    assert difference(model, free) <= 1e-10
    assert ("transform" in free.spec.spaces, "transform" in model.spec.spaces) == (
        (True, False) if name == "bert" else (False, False)
    )


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"rotary_value": True}, {"hidden_act": "relu"}]
)
def test_a_projected_embedding_rotates_by_itself(changes):
    model = sm.load(small_model("roformer", dtype=torch.float64, embedding_size=32, **changes))
    member = random_member(model, 1)[1]
    assert not member.spec.ties and isinstance(
        member.spec.spaces["embedding"].group, OrthogonalFixingOnes
    )
    assert difference(model, member) <= EXACT and difference(model, sm.canonicalize(model)) <= EXACT
    kept = model.restrict(embedding="permutation")  # what does not rotate keeps its tie
    assert kept.spec.ties == random_member(kept, 1)[1].spec.ties
    assert difference(model, random_member(kept, 1)[1]) <= EXACT

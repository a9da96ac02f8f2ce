"""Tables bound to stock models: shapes, groups that follow from the config, and refusals that say what is wrong."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.families import FAMILIES
from symmerge.lab.small_models import SMALL, small_model
from symmerge.symmetry.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Trivial,
)
from symmerge.symmetry.notation import Role, atoms, parse, unparse
from symmerge.symmetry.spec import Spec

every = pytest.mark.parametrize("name", SMALL)


@cache
def spec(name: str, **changes) -> Spec:
    return sm.load(small_model(name, **changes)).spec


@every
def test_shapes_are_the_modules(name):
    module = small_model(name)
    found = sm.load(module).spec
    # today's names: a module may still carry older ones
    rename = next(known.rename for known in FAMILIES if known.name == found.family)
    assert found.shapes == {
        rename(parameter): tuple(value.shape) for parameter, value in module.named_parameters()
    }


@every
def test_every_tensor_is_cut_without_loss(name):
    found = spec(name)
    for tensor, cut in found.pieces.items():
        entries = sum(prod(found.sizes[atom.space] for atom in piece.atoms) for piece in cut)
        assert entries == prod(found.shapes[tensor])


@every
def test_every_space_is_written_and_read(name):
    """Negative control of the table itself: an axis with a forgotten star would leave a space without readers."""
    found = spec(name)
    for space in found.hidden:
        roles = {occurrence.role for occurrence in found.occurrences(space)}
        permuted = isinstance(found.spaces[space].group, Permutation) and space.startswith(
            ("head", "query")
        )
        assert permuted or roles >= {Role.WRITES, Role.READS}, f"{space} has roles {roles}"
        assert found.spaces[space].per is None or found.spaces[space].per in found.spaces


@every
def test_lines_survive_the_notation(name):
    assert all(parse(unparse(axes)) == axes for axes in spec(name).tensors.values())


ACTIVATIONS = {
    "gelu": Permutation(96),
    "gelu_new": Permutation(96),
    "silu": Permutation(96),
    "relu": ScaledPermutation(96, positive=True),
    "tanh": SignedPermutation(96),
    "linear": GeneralLinear(96),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("bert", "hidden_act"),
        ("gpt2", "activation_function"),
        ("vit", "hidden_act"),
        ("neox", "hidden_act"),
    ],
)
def test_the_activation_decides_the_hidden_group(name, setting, activation):
    assert spec(name, **{setting: activation}).spaces["ff.1"].group == ACTIVATIONS[activation]


RESIDUAL = {
    "dinov3": Trivial(48),  # all it pools is shown
    "dinov3-classifier": OrthogonalFixingOnes(43),  # the first five coordinates are scores
    "bert": Permutation(48),
    "roberta": Permutation(48),
    "gpt2": OrthogonalFixingOnes(48),
    "vit": OrthogonalFixingOnes(48),
    "neox": OrthogonalFixingOnes(48),
    "llama": Orthogonal(48),
    "roformer": Permutation(48),
    "modernbert": OrthogonalFixingOnes(48),
}
QUERY_KEY = {
    "llama": RotaryPairs(12, 12),
    "llama-mqa": RotaryPairs(12, 12),
    "qwen2": RotaryPairs(12, 12),
    "mistral": RotaryPairs(16, 16),  # a head size of its own
    "roformer": RotaryPairs(12, 12, "interleaved"),
    "roformer-classifier": RotaryPairs(12, 12, "interleaved"),
    "modernbert": RotaryPairs(12, 12),
    "modernbert-classifier": RotaryPairs(12, 12),
    "dinov3": RotaryPairs(12, 12),
    "dinov3-classifier": RotaryPairs(12, 12),
    "neox": RotaryPairs(12, 6),
    "neox-sequential": RotaryPairs(12, 3 + 1),  # a quarter of 12 by default, and pairs are whole
}
VALUES = {
    "mistral": GeneralLinear(16),
    "roformer-classifier": RotaryPairs(12, 12, "interleaved"),
}  # the last rotates its values, too


@every
def test_groups_follow_from_the_config(name):
    found = spec(name)
    groups = {space: found.spaces[space].group for space in found.spaces}
    assert groups["residual"] == RESIDUAL.get(name, RESIDUAL.get(found.family))
    assert groups["qk.1"] == QUERY_KEY.get(name, GeneralLinear(12))
    assert groups["vo.1"] == VALUES.get(name, GeneralLinear(12))
    assert found.spaces["qk.1"].per == found.spaces["vo.1"].per == "head.1"
    if found.family in ("llama", "modernbert") or name == "dinov3-classifier":
        assert groups["ff.1"] == ScaledPermutation(96, positive=False)  # gated
    assert {"vocabulary", "position", "label", "channel"} & groups.keys()
    assert all(
        isinstance(groups[space], Trivial)
        for space in ("vocabulary", "position", "angle", "type", "label", "channel", "one")
        if space in groups
    )


@pytest.mark.parametrize(
    ("name", "heads", "queries"),
    [("llama", 2, 2), ("llama-mqa", 1, 4), ("mistral", 4, 1), ("qwen2", 2, 2)],
)
def test_grouped_heads(name, heads, queries):
    found = spec(name)
    assert (
        found.sizes["head.0"],
        found.sizes["query.0"],
        found.batch("query.0"),
        found.batch("qk.0"),
    ) == (heads, queries, (heads,), (heads,))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tied_decoder_has_no_space_of_its_own(name):
    """The output of the MLM transform meets the embedding: tied, it is the residual space itself."""
    tied, untied = spec(name), spec(name, tie_word_embeddings=False)
    assert "transform" not in tied.spaces and tied.ties
    assert untied.spaces["transform"].group == Permutation(48) and not untied.ties
    dense = next(
        tensor
        for tensor in tied.tensors
        if tensor.endswith(("transform.dense.weight", "lm_head.dense.weight"))
    )
    assert [unparse(found.tensors[dense]) for found in (tied, untied)] == [
        "residual residual*",
        "transform residual*",
    ]


# embedding of another width, tied -> what the embedding and the transform are; the groups of all spaces between
EMBEDDINGS = {
    (48, True): ("residual", "residual", {"residual": Permutation(48)}),
    (48, False): (
        "residual",
        "transform",
        {"residual": Permutation(48), "transform": Permutation(48)},
    ),
    (32, True): (
        "embedding",
        "embedding",
        {"residual": Permutation(48), "embedding": OrthogonalFixingOnes(32)},
    ),
    (32, False): (
        "embedding",
        "transform",
        {
            "residual": Permutation(48),
            "embedding": OrthogonalFixingOnes(32),
            "transform": Permutation(32),
        },
    ),
}


@pytest.mark.parametrize(("size", "tied"), EMBEDDINGS)
def test_a_projected_embedding_is_a_space_of_its_own(size, tied):
    found = spec("roformer", embedding_size=size, tie_word_embeddings=tied)
    embedding, transform, groups = EMBEDDINGS[size, tied]
    assert (
        unparse(found.tensors["roformer.embeddings.word_embeddings.weight"])
        == f"vocabulary {embedding}"
    )
    assert (
        unparse(found.tensors["cls.predictions.transform.dense.weight"]) == f"{transform} residual*"
    )
    assert {
        space: found.spaces[space].group
        for space in ("residual", "embedding", "transform")
        if space in found.spaces
    } == groups
    assert found.joined == ((embedding,) if tied else ())


def test_only_heads_that_are_there_are_tied():
    assert not any(spec(name).ties for name in SMALL if name.endswith("-classifier"))


@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("bert-classifier", "pooled"),
        ("bert-pretraining", "pooled"),
        ("roberta-classifier", "classifier"),
    ],
)
def test_classifier_hidden_layers_are_signed(name, space):
    assert spec(name).spaces[space].group == SignedPermutation(48)


@every
def test_spaces_come_outer_first(name):
    found = spec(name)
    order = [space.name for space in found.ordered()]
    assert sorted(order) == sorted(found.hidden)
    assert all(
        order.index(space.per) < order.index(space.name) for space in found.ordered() if space.per
    )


def test_axis_of():
    found = spec("gpt2")
    assert found.axis_of("transformer.h.0.mlp.c_fc.weight", "residual", Role.READS) == 0
    assert found.axis_of("transformer.h.0.mlp.c_fc.weight", "ff.0", Role.WRITES) == 1
    with pytest.raises(MismatchError, match=r"c_fc.weight has no axis 'ff.0\*'"):
        found.axis_of("transformer.h.0.mlp.c_fc.weight", "ff.0", Role.READS)


@every
def test_every_norm_is_in_the_table(name):
    found = spec(name)
    assert {norm.stream for norm in found.norms} == set(
        filter(found.rotates, found.hidden)
    )  # gains must be folded exactly where a stream rotates
    for norm in found.norms:
        assert unparse(found.tensors[norm.gain]) in (
            f"{norm.stream}~",
            f"(label~ + {norm.stream}~)",
        )
        assert norm.readers or found.pooled
        for reader in norm.readers:
            weight = f"{reader}.weight"
            found.axis_of(
                found.ties.get(weight, weight),
                norm.stream,
                Role.WRITES if weight in found.ties else Role.READS,
            )
    gains = {gain.gain for gain in (*found.norms, *found.scales)}
    riding = {
        tensor
        for tensor, axes in found.tensors.items()
        if any(
            unparse(axes).endswith((f"{norm.stream}~", f"{norm.stream}~)")) for norm in found.norms
        )
    }
    assert found.joined or {tensor for tensor in riding if len(found.tensors[tensor]) == 1} <= gains


# what happens to the shapes of a checkpoint -> what the refusal says
BAD_CHECKPOINTS = {
    r"missing tensors: transformer.wpe.weight\.": lambda shapes: shapes.pop(
        "transformer.wpe.weight"
    ),
    r"unexpected tensors: surprise\.": lambda shapes: shapes.update(surprise=(1,)),
    r"misshapen tensors: transformer.wpe.weight is \[64, 47\], the config says \[64, 48\]": lambda shapes: (
        shapes.update({"transformer.wpe.weight": (64, 47)})
    ),
    r"missing tensors: .*lm_head.*unexpected tensors: head": lambda shapes: shapes.update(
        head=shapes.pop("lm_head.weight")
    ),
    r"missing tensors: .* and 6 more": lambda shapes: [
        shapes.pop(name) for name in list(shapes)[:10]
    ],
}


@pytest.mark.parametrize("message", BAD_CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(message):
    found = spec("gpt2-untied")
    shapes = dict(found.shapes)
    found.check(shapes)
    BAD_CHECKPOINTS[message](shapes)
    with pytest.raises(MismatchError, match=message):
        found.check(shapes)


# one model; another, with changes to its config; what differs, in words
DIFFERENCES = [
    ("bert", "bert", {"seed": 1}, []),
    (
        "bert",
        "roberta",
        {},
        [
            "family bert / roberta",
            "class BertForMaskedLM / RobertaForMaskedLM",
            "tensors in one only: ",
        ],
    ),
    (
        "llama",
        "mistral",
        {"num_key_value_heads": 2, "head_dim": 12},
        ["class LlamaForCausalLM / MistralForCausalLM"],
    ),
    (
        "gpt2",
        "gpt2",
        {"n_embd": 24},
        [
            "residual OrthogonalFixingOnes(48) / OrthogonalFixingOnes(24)",
            "qk.1 GeneralLinear(12) / GeneralLinear(6)",
        ],
    ),
    (
        "gpt2",
        "gpt2",
        {"activation_function": "tanh"},
        ["ff.0 Permutation(96) / SignedPermutation(96)"],
    ),
    ("gpt2", "gpt2", {"vocab_size": 100}, ["vocabulary Trivial(101) / Trivial(100)"]),
    (
        "gpt2",
        "gpt2",
        {"n_layer": 1},
        ["ff.1 Permutation(96) / absent", "tensors in one only: transformer.h.1.attn.c_attn.bias"],
    ),
    ("gpt2", "gpt2", {"n_layer": 3}, ["ff.2 absent / Permutation(96)"]),
    ("gpt2", "gpt2", {"tie_word_embeddings": False}, ["tensors in one only: lm_head.weight"]),
]


@pytest.mark.parametrize(("one", "other", "changes", "expected"), DIFFERENCES)
def test_differences_are_named(one, other, changes, expected):
    mine, theirs = spec(one), spec(other, **changes)
    found = mine.differences(theirs)
    assert bool(found) == bool(expected) == (mine.fingerprint != theirs.fingerprint)
    assert all(any(line.startswith(words) for line in found) for words in expected), found
    assert bool(theirs.differences(mine)) == bool(expected)


def test_a_difference_in_the_axes_alone_is_noticed():
    found = spec("gpt2")
    turned = replace(
        found, tensors={**found.tensors, "transformer.wpe.weight": parse("position residual*")}
    )
    assert found.differences(turned) == ["the axes of some tensors"]


def test_restricted_groups_are_another_table():
    model = sm.load(small_model("gpt2"))
    assert model.spec.differences(model.restrict(residual="permutation").spec) == [
        "residual OrthogonalFixingOnes(48) / Permutation(48)"
    ]
    with pytest.raises(MismatchError, match="no space called resdual"):
        model.restrict(resdual="permutation")


def test_used_spaces_only():
    """A classifier has no transform, a decoder-only model no label: what no tensor uses is not in the table."""
    for name in SMALL:
        used = {atom.space for axes in spec(name).tensors.values() for atom in atoms(axes)}
        assert spec(name).spaces.keys() == used


def test_a_table_without_ties_can_be_asked_for_them():
    bare = Spec("gpt2", "GPT2LMHeadModel", "causal-lm", spaces={}, tensors={})
    assert bare.ties.get("lm_head.weight") is None


@every
def test_tables_print_on_three_lines(name):
    table = spec(name)
    for shown in (table, *table.spaces.values()):
        assert len(repr(shown)) <= 3 * 80 and "\n" not in repr(shown)

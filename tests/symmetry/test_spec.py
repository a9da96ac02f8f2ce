"""What a table can be asked: order, axes, differences, and whether a checkpoint fits it."""

from dataclasses import replace
from functools import cache

import pytest

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import SMALL, small_model
from symmerge.symmetry.notation import Role, parse
from symmerge.symmetry.spec import Spec

pytestmark = pytest.mark.quick

every = pytest.mark.parametrize("name", SMALL)


@cache
def spec(name: str, **changes) -> Spec:
    return sm.load(small_model(name, **changes)).spec


@every
def test_spaces_come_outer_first(name):
    table = spec(name)
    order = [space.name for space in table.ordered()]
    assert sorted(order) == sorted(table.hidden)
    inner = [space for space in table.ordered() if space.per in table.hidden]  # heads may stay
    assert all(order.index(space.per) < order.index(space.name) for space in inner)


def test_axis_of():
    table = spec("gpt2")
    assert table.axis_of("transformer.h.0.mlp.c_fc.weight", "residual", Role.READS) == 0
    assert table.axis_of("transformer.h.0.mlp.c_fc.weight", "ff.0", Role.WRITES) == 1
    with pytest.raises(MismatchError, match=r"c_fc.weight has no axis 'ff.0\*'"):
        table.axis_of("transformer.h.0.mlp.c_fc.weight", "ff.0", Role.READS)


WPE = "transformer.wpe.weight"
# what the refusal says -> what happens to the shapes of a checkpoint
BAD_CHECKPOINTS = {
    rf"missing tensors: {WPE}\.": lambda shapes: shapes.pop(WPE),
    r"unexpected tensors: surprise\.": lambda shapes: shapes.update(surprise=(1,)),
    rf"misshapen tensors: {WPE} is \[64, 47\], the config says \[64, 48\]": (
        lambda shapes: shapes.update({WPE: (64, 47)})
    ),
    r"missing tensors: .*lm_head.*unexpected tensors: head": (
        lambda shapes: shapes.update(head=shapes.pop("lm_head.weight"))
    ),
    r"missing tensors: .* and 6 more": (
        lambda shapes: [shapes.pop(name) for name in list(shapes)[:10]]
    ),
}


@pytest.mark.parametrize("message", BAD_CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(message):
    table = spec("gpt2-untied")
    shapes = dict(table.shapes)
    table.check(shapes)
    BAD_CHECKPOINTS[message](shapes)
    with pytest.raises(MismatchError, match=message):
        table.check(shapes)


# one model; another, with changes to its config; how the lines that name the differences begin
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
    lines = mine.differences(theirs)
    assert bool(lines) == bool(expected) == (mine.fingerprint != theirs.fingerprint)
    assert all(any(line.startswith(start) for line in lines) for start in expected), lines
    assert bool(theirs.differences(mine)) == bool(expected)


def test_a_difference_in_the_axes_alone_is_noticed():
    table = spec("gpt2")
    changed = replace(table, tensors={**table.tensors, WPE: parse("position residual*")})
    assert table.differences(changed) == ["the axes of some tensors"]


def test_restricted_groups_are_another_table():
    model = sm.load(small_model("gpt2"))
    assert model.spec.differences(model.restrict(residual="permutation").spec) == [
        "residual OrthogonalFixingOnes(48) / Permutation(48)"
    ]
    with pytest.raises(MismatchError, match="no space called resdual"):
        model.restrict(resdual="permutation")


def test_a_table_without_ties_can_be_asked_for_them():
    bare = Spec("gpt2", "GPT2LMHeadModel", "causal-lm", spaces={}, tensors={})
    assert bare.ties.get("lm_head.weight") is None


@every
def test_tables_print_on_three_lines(name):
    table = spec(name)
    for shown in (table, *table.spaces.values()):
        assert len(repr(shown)) <= 3 * 80 and "\n" not in repr(shown)

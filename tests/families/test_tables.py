"""Tables bound to stock models: shapes, roles, and groups that follow from the config."""

from functools import cache
from math import prod

import pytest
import transformers

import symmerge as sm
from symmerge.errors import UnsupportedModel
from symmerge.families import FAMILIES, family_of, nearest
from symmerge.lab.small_models import EVERY, small_model
from symmerge.lab.small_seq2seq import SEQ2SEQ
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
from symmerge.symmetry.notation import Role, atoms, parse, unparse
from symmerge.symmetry.spec import Spec

pytestmark = pytest.mark.quick

every = pytest.mark.parametrize("name", EVERY)


@cache
def spec(name: str, **changes) -> Spec:
    return sm.load(small_model(name, **changes)).spec


@every
def test_shapes_are_the_modules(name):
    module = small_model(name)
    table = sm.load(module).spec
    # today's names: a module may still carry older ones
    family = next(family for family in FAMILIES if family.name == table.family)
    rename = family.of([table.architecture]).rename
    stored = {key: value for key, value in module.named_buffers() if key in table.tensors}
    stored |= dict(module.named_parameters())
    shapes = {rename(key): tuple(value.shape) for key, value in stored.items()}
    # of two that are tied, the module lists the one that comes first
    assert table.shapes == {table.ties.get(key, key): shape for key, shape in shapes.items()}


@every
def test_every_tensor_is_cut_without_loss(name):
    table = spec(name)
    for tensor, cut in table.pieces.items():
        entries = sum(prod(table.sizes[atom.space] for atom in piece.atoms) for piece in cut)
        assert entries == prod(table.shapes[tensor])


@every
def test_every_space_is_written_and_read(name):
    """Control of the table itself: a forgotten star would leave a space without readers."""
    table = spec(name)
    for name, space in table.hidden.items():
        roles = {occurrence.role for occurrence in table.occurrences(name)}
        outer = isinstance(space.group, Permutation) and name.startswith(
            ("head", "query", "expert")
        )
        compared = name in table.compared  # two towers write, and the scores read
        assert outer or compared or roles >= {Role.WRITES, Role.READS}, f"{name} has roles {roles}"
        assert space.per is None or space.per in table.spaces


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
    [(name, "hidden_act") for name in ("bert", "vit", "neox", "starcoder2")]
    + [("gpt2", "activation_function")],
)
def test_the_activation_decides_the_hidden_group(name, setting, activation):
    assert spec(name, **{setting: activation}).spaces["ff.1"].group == ACTIVATIONS[activation]


RESIDUAL = {
    **dict.fromkeys(("dinov3", "siglip_text_model", "siglip_vision_model"), Trivial(48)),  # shown
    "clip_text_model": OrthogonalFixingOnes(48),
    "clip_vision_model": Permutation(48),
    **{name: Trivial(48) for name in EVERY if name.endswith("-features")},
    "dinov3-classifier": OrthogonalFixingOnes(43),  # the first five coordinates are scores
    "bert": Permutation(48),
    "roberta": Permutation(48),
    "distilbert": Permutation(48),
    "opt": OrthogonalFixingOnes(48),
    "opt-post-norm": Permutation(48),
    "gpt2": OrthogonalFixingOnes(48),
    "vit": OrthogonalFixingOnes(48),
    "neox": OrthogonalFixingOnes(48),
    "llama": Orthogonal(48),
    "qwen3": Orthogonal(48),
    "phi3": Orthogonal(48),
    "olmo2": SignedPermutation(48),
    "starcoder2": OrthogonalFixingOnes(48),
    "stablelm": OrthogonalFixingOnes(48),
    "roformer": Permutation(48),
    "modernbert": OrthogonalFixingOnes(48),
    **dict.fromkeys(("gemma2", "gemma3"), SignedPermutation(48)),
    **dict.fromkeys(("smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), Orthogonal(48)),
    **dict.fromkeys(("gpt_oss", "deepseek_v2", "deepseek_v3"), Orthogonal(48)),
    **dict.fromkeys(("electra", "mpnet", "albert", "deberta-v2"), Permutation(48)),
    **dict.fromkeys(("cohere", "gptj", "gpt_neo", "phi"), OrthogonalFixingOnes(48)),
    **dict.fromkeys(("falcon", "bloom", "mpt", "deit", "beit"), OrthogonalFixingOnes(48)),
    "ijepa": OrthogonalFixingOnes(48),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), OrthogonalFixingOnes(48)),
    **dict.fromkeys(("t5", "umt5"), Orthogonal(48)),
    **dict.fromkeys(("bart", "mbart"), Permutation(48)),
}
QUERY_KEY = {
    "llama": RotaryPairs(12, 12),
    **dict.fromkeys(("llama-mqa", "llama-classifier", "llama-features"), RotaryPairs(12, 12)),
    "llama-answers": RotaryPairs(12, 12),
    "qwen2": RotaryPairs(12, 12),
    "mistral": RotaryPairs(16, 16),  # a head size of its own
    **{name: RotaryPairs(12, 12, "interleaved") for name in EVERY if name.startswith("roformer")},
    **{name: RotaryPairs(12, 12) for name in EVERY if name.startswith("modernbert")},
    "dinov3": RotaryPairs(12, 12),
    "dinov3-classifier": RotaryPairs(12, 12),
    "qwen3": Signs(8),  # one per pair: a norm with gains comes before the positions
    "qwen3-tied": Signs(6),
    "phi3": RotaryPairs(12, 6),
    "phi3-tied": RotaryPairs(12, 12),
    "granite": RotaryPairs(12, 12),
    "olmo2": Signs(6),
    "olmo3": Signs(6),
    "starcoder2": RotaryPairs(12, 12),
    "starcoder2-tied": RotaryPairs(12, 12),
    "stablelm": RotaryPairs(12, 6),
    "stablelm-parallel": RotaryPairs(12, 6),
    "granite-tied": RotaryPairs(12, 12),
    "neox": RotaryPairs(12, 6),
    "gemma2": RotaryPairs(12, 12),
    "gemma3": Signs(8),
    "cohere": RotaryPairs(12, 12, "interleaved"),
    # the second layers of smollm3 and cohere2 have no positions
    "gptj": RotaryPairs(12, 8, "interleaved"),
    "phi": RotaryPairs(12, 6),
    **dict.fromkeys(("falcon", "falcon-mqa", "mixtral", "qwen2_moe"), RotaryPairs(12, 12)),
    "gpt_oss": RotaryPairs(12, 12),
    "qwen3_moe": Signs(8),
    "olmoe": Signs(6),
    "neox-sequential": RotaryPairs(12, 3 + 1),  # a quarter of 12 by default, and pairs are whole
}
# roformer-classifier rotates its values, too
VALUES = {
    "mistral": GeneralLinear(16),
    **dict.fromkeys(("qwen3", "gemma3", "qwen3_moe"), GeneralLinear(16)),
    "roformer-classifier": RotaryPairs(12, 12, "interleaved"),
}
TWO_TOWERS = ("residual.text", "residual.vision", "residual.encoder", "residual.decoder")
STAGES = {
    "residual.stage1": Permutation(16),  # a gain stays on it
    "residual.stage2": OrthogonalFixingOnes(32),
}
TOWERS = {
    "vit_mae": {
        "residual.encoder": OrthogonalFixingOnes(48),
        "residual.decoder": OrthogonalFixingOnes(32),
    },
    "vit_mae-features": {"residual.encoder": Trivial(48)},
    # a gain before the layers stays on the stream of CLIP's images
    "clip": {"residual.text": OrthogonalFixingOnes(32), "residual.vision": Permutation(48)},
    "clip-classifier": {"residual.vision": Permutation(48)},
    "siglip": {
        "residual.text": OrthogonalFixingOnes(32),
        "residual.vision": OrthogonalFixingOnes(48),
    },
    "siglip-classifier": {"residual.vision": OrthogonalFixingOnes(48)},
    "swin": {**STAGES, "residual.stage3": OrthogonalFixingOnes(64)},
    "swin-padded": {**STAGES, "residual.stage3": OrthogonalFixingOnes(64)},
    "swin-positions": STAGES,
    "swin-features": {**STAGES, "residual.stage3": Trivial(64)},
}
GATED = ("llama", "qwen3", "olmo2", "phi3", "stablelm", "modernbert")


@pytest.mark.parametrize("name", [name for name in EVERY if name not in SEQ2SEQ])
def test_groups_follow_from_the_config(name):
    table = spec(name)
    groups = {space: table.spaces[space].group for space in table.spaces}
    last = sum(space.startswith("ff.") for space in groups) - 1  # one layer may be run many times
    head = "head.0" if f"head.{last}" not in groups else f"head.{last}"  # layers may share them
    if table.stream in (*TWO_TOWERS, *STAGES):  # spaces have marks
        assert {stream: groups[stream] for stream in table.streams} == TOWERS[name]
        return
    assert groups["residual"] == RESIDUAL.get(name, RESIDUAL.get(table.family))
    assert groups[f"qk.{last}"] == QUERY_KEY.get(name, GeneralLinear(12))
    assert groups[f"vo.{last}"] == VALUES.get(name, GeneralLinear(12))
    assert table.spaces[f"qk.{last}"].per == table.spaces[f"vo.{last}"].per == head
    if table.family in GATED or name == "dinov3-classifier":
        assert groups["ff.1"] == ScaledPermutation(96, positive=False)  # gated
    if name == "gpt_oss":  # both sides of a unit are limited
        assert groups["ff.1"] == Permutation(96) and table.spaces["ff.1"].per == "expert.1"
    elif "expert.1" in groups:
        assert groups["ff.1"] == ScaledPermutation(96 if name == "mixtral" else 32, positive=False)
        assert (groups["expert.1"], table.spaces["ff.1"].per) == (Permutation(4), "expert.1")
    assert {"vocabulary", "position", "label", "channel"} & groups.keys()
    visible = {"vocabulary", "position", "angle", "type", "label", "channel", "one", "half"}
    visible |= {"answer", "choice"}
    assert all(isinstance(groups[space], Trivial) for space in visible & groups.keys())


# Units of the stacks, the same group for both unless their sizes differ.
UNITS = {
    "t5": [ScaledPermutation(96, positive=True)] * 2,
    **dict.fromkeys(("t5-gated", "umt5"), (ScaledPermutation(96, positive=False),) * 2),
    "t5-classifier": [ScaledPermutation(96, positive=True)] * 2,
    "t5-tokens": [ScaledPermutation(96, positive=False)],
    **dict.fromkeys(("bart", "bart-classifier", "mbart"), (Permutation(96), Permutation(80))),
    **dict.fromkeys(("whisper", "whisper-classifier"), (Permutation(96), Permutation(80))),
    **dict.fromkeys(("bart-decoder", "whisper-decoder"), (None, Permutation(80))),
    **{
        name: [ScaledPermutation(size, positive=True) for size in (96, 80)]
        for name in ("bart-untied", "whisper-untied")
    },
}
# Streams of their own: an encoder's, and the decoder's.
APART = {
    "bart-untied": (Permutation(48), Permutation(48)),
    **dict.fromkeys(("whisper", "whisper-untied"), (Permutation(48), OrthogonalFixingOnes(48))),
    # one stack alone
    "bart-decoder": (None, Permutation(48)),
    "whisper-decoder": (None, OrthogonalFixingOnes(48)),
    "whisper-classifier": (Permutation(48), None),
}
DEEPER = ("t5-gated", "t5-classifier", "bart-untied")  # three layers in the decoder
STACKS = {
    **dict.fromkeys(("t5-tokens", "whisper-classifier"), ("encoder",)),
    **dict.fromkeys(("bart-decoder", "whisper-decoder"), ("decoder", "cross")),
}
BASES = {"t5": (8, 8), "umt5": (12, 12), **dict.fromkeys(("bart", "mbart", "whisper"), (12, 8))}


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_groups_of_two_stacks_follow_from_the_config(name):
    table = spec(name)
    depth, bases = 3 if name in DEEPER else 2, BASES[table.family]
    stacks = {"encoder": (2, bases[0]), "decoder": (depth, bases[1]), "cross": (depth, bases[1])}
    shared = table.family == "t5"  # one table of distances, and so one order, for each stack
    there = {name.split(".")[1] for name in table.spaces if name.startswith("qk.")}
    assert there == {*STACKS.get(name, stacks)}
    for stack in there:
        count, size = stacks[stack]
        for place in (f"{stack}.{layer}" for layer in range(count)):
            head = f"head.{stack}" if shared and stack != "cross" else f"head.{place}"
            for kind in ("qk", "vo"):
                assert table.spaces[f"{kind}.{place}"].group == GeneralLinear(size)
                assert table.spaces[f"{kind}.{place}"].per == head
            if stack != "cross":
                assert table.spaces[f"ff.{place}"].group == UNITS[name][stack == "decoder"]
    streams = {"residual": RESIDUAL.get(table.family)}
    if name in APART:
        streams = dict(zip(("residual.encoder", "residual.decoder"), APART[name], strict=True))
        streams = {stream: group for stream, group in streams.items() if group}
    assert {stream: table.spaces[stream].group for stream in table.streams} == streams


@pytest.mark.parametrize(
    ("name", "given"),
    [("bart-decoder", "encoder_hidden_states"), ("whisper-decoder", "encoder_outputs")],
)
def test_a_decoder_alone_reads_what_is_not_its_own(name, given):
    table = spec(name)
    assert table.spaces["encoded"].group == Trivial(48) and table.encoded_as == given
    keys = "model.decoder.layers.1.encoder_attn.k_proj.weight"
    assert unparse(table.tensors[keys]) == "(head.cross.1 qk.cross.1*) encoded*"


def test_only_a_mean_stands_between_the_maps_to_the_labels_of_a_sound():
    table = spec("whisper-classifier")
    assert table.spaces["projected"].group == GeneralLinear(16)
    assert unparse(table.tensors["layer_weights"]) == "stage" and table.sizes["stage"] == 3


@pytest.mark.parametrize(
    ("name", "heads", "queries"),
    [
        ("llama", 2, 2),
        ("llama-mqa", 1, 4),
        ("mistral", 4, 1),
        ("qwen2", 2, 2),
        ("qwen3", 2, 2),
        ("phi3", 2, 2),
        ("granite", 2, 2),
        ("starcoder2", 2, 2),
        ("stablelm", 2, 2),
        ("olmo2", 2, 2),
    ],
)
def test_grouped_heads(name, heads, queries):
    table = spec(name)
    assert (table.sizes["head.0"], table.sizes["query.0"]) == (heads, queries)
    assert table.batch("query.0") == table.batch("qk.0") == (heads,)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tied_decoder_has_no_space_of_its_own(name):
    """While the decoder is tied, the output of the transform is the residual space itself."""
    tied, untied = spec(name), spec(name, tie_word_embeddings=False)
    assert "transform" not in tied.spaces and tied.ties
    assert untied.spaces["transform"].group == Permutation(48) and not untied.ties
    suffixes = "transform.dense.weight", "lm_head.dense.weight"
    dense = next(tensor for tensor in tied.tensors if tensor.endswith(suffixes))
    assert unparse(tied.tensors[dense]) == "residual residual*"
    assert unparse(untied.tensors[dense]) == "transform residual*"


# (embedding size, tied) -> the spaces of the embedding and of the transform
EMBEDDINGS = {
    (48, True): ("residual", "residual"),
    (48, False): ("residual", "transform"),
    (32, True): ("embedding", "embedding"),
    (32, False): ("embedding", "transform"),
}


@pytest.mark.parametrize(("size", "tied"), EMBEDDINGS)
def test_a_projected_embedding_is_a_space_of_its_own(size, tied):
    table = spec("roformer", embedding_size=size, tie_word_embeddings=tied)
    embedding, transform = EMBEDDINGS[size, tied]
    embeddings = "roformer.embeddings.word_embeddings.weight"
    dense = "cls.predictions.transform.dense.weight"
    assert unparse(table.tensors[embeddings]) == f"vocabulary {embedding}"
    assert unparse(table.tensors[dense]) == f"{transform} residual*"
    assert table.joined == ((embedding,) if tied else ())
    groups = {
        "residual": Permutation(48),
        "embedding": OrthogonalFixingOnes(32),
        "transform": Permutation(size),
    }
    for space, group in groups.items():
        used = space in ("residual", embedding, transform)
        assert table.spaces[space].group == group if used else space not in table.spaces


def test_only_heads_that_are_there_are_tied():
    of_text = (name for name in EVERY.keys() - SEQ2SEQ.keys() if name.endswith("-classifier"))
    assert not any(spec(name).ties for name in of_text)  # the stacks of a seq2seq share a table


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
def test_every_norm_is_in_the_table(name):
    table = spec(name)
    # gains must be folded exactly where a stream that has any rotates
    every_atom = (atom for axes in table.tensors.values() for atom in atoms(axes))
    gains = {atom.space for atom in every_atom if atom.role is Role.RIDES}
    rotating = set(filter(table.rotates, table.hidden))
    assert {norm.stream for norm in table.norms} == rotating & gains
    for norm in table.norms:
        assert unparse(table.tensors[norm.gain]) in (
            f"{norm.stream}~",
            f"(label~ + {norm.stream}~)",
            f"({' + '.join([f'{norm.stream}~'] * 4)})",  # neighbours that are merged
        )
        assert norm.readers or norm.writer or table.pooled
        for reader in norm.readers:
            weight = table.weight_of(reader)
            role = Role.WRITES if weight in table.ties else Role.READS
            table.axis_of(table.ties.get(weight, weight), norm.stream, role)


@every
def test_every_gain_on_a_rotating_stream_belongs_to_a_norm_or_scale(name):
    table = spec(name)
    gains = {gain.gain for gain in (*table.norms, *table.scales)}
    ends = tuple(f"{norm.stream}~{end}" for norm in table.norms for end in ("", ")"))
    vectors = {tensor for tensor, axes in table.tensors.items() if len(axes) == 1}
    riding = {tensor for tensor in vectors if unparse(table.tensors[tensor]).endswith(ends)}
    assert table.joined or riding <= gains


def test_classes_are_those_of_the_installed_transformers():
    for family in FAMILIES:
        kinds = [getattr(transformers, name).config_class for name in family.classes]
        assert {kind.model_type for kind in kinds} == {*family.model_types}
        assert {*family.model_types} <= {*transformers.CONFIG_MAPPING.keys()}


def test_an_unknown_type_names_its_nearest_relatives():
    assert nearest("qwen2_vl")[0] == "qwen2" and nearest("gemma4")[0].startswith("gemma")
    with pytest.raises(UnsupportedModel, match=r"nearest supported: qwen2, .*new-family\.md"):
        family_of("qwen2_vl", "folder")


def test_used_spaces_only():
    """A classifier has no transform, a decoder-only model no label."""
    for name in EVERY:
        used = {atom.space for axes in spec(name).tensors.values() for atom in atoms(axes)}
        assert spec(name).spaces.keys() == used

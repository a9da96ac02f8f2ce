"""Re-initialised components: exactly their parameters change, as the stock class and seed say."""

import pytest
import torch
import transformers

from symmerge.errors import CheckpointError, MismatchError, UnsupportedModel
from symmerge.lab.small_models import perturb, small_model
from symmerge.lab.training.loop import train, trained
from symmerge.lab.training.recipes import TRAINING, with_changes
from symmerge.lab.training.reinitialization import (
    COMPONENTS,
    MODULES,
    fresh_parameters,
    open_model,
    reinitialize,
)

# The classes of attention and of a layer, which is another way to know them than by their names.
CLASSES = {
    "gpt2": ({"GPT2Attention"}, "GPT2Block"),
    "gpt2-untied": ({"GPT2Attention"}, "GPT2Block"),
    "neox": ({"GPTNeoXAttention"}, "GPTNeoXLayer"),
    "llama": ({"LlamaAttention"}, "LlamaDecoderLayer"),
    "mistral": ({"MistralAttention"}, "MistralDecoderLayer"),
    "qwen2": ({"Qwen2Attention"}, "Qwen2DecoderLayer"),
    "qwen3": ({"Qwen3Attention"}, "Qwen3DecoderLayer"),
    "phi3": ({"Phi3Attention"}, "Phi3DecoderLayer"),
    "granite": ({"GraniteAttention"}, "GraniteDecoderLayer"),
    "starcoder2": ({"Starcoder2Attention"}, "Starcoder2DecoderLayer"),
    "stablelm": ({"StableLmAttention"}, "StableLmDecoderLayer"),
    "olmo2": ({"Olmo2Attention"}, "Olmo2DecoderLayer"),
    "olmo3": ({"Olmo3Attention"}, "Olmo3DecoderLayer"),
    "bert": ({"BertSelfAttention", "BertSelfOutput"}, "BertLayer"),
    "bert-classifier": ({"BertSelfAttention", "BertSelfOutput"}, "BertLayer"),
    "roberta": ({"RobertaSelfAttention", "RobertaSelfOutput"}, "RobertaLayer"),
    "vit": ({"ViTAttention"}, "ViTLayer"),
    "dinov3-classifier": ({"DINOv3ViTAttention"}, "DINOv3ViTLayer"),
    "roformer": ({"RoFormerSelfAttention", "RoFormerSelfOutput"}, "RoFormerLayer"),
}
SINUSOIDS = "roformer.encoder.embed_positions.weight"  # the same in every model
ROFORMER = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")

    def make(name):
        if not (place / name).exists():
            if name == "roformer":
                model = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**ROFORMER))
                perturb(model)
            else:
                model = small_model(name)
            model.save_pretrained(place / name)
        return place / name

    return make


def inside(model, classes):
    """Parameters below modules of these classes, a list for each, without norms of the stream."""
    found = [
        (name, module) for name, module in model.named_modules() if type(module).__name__ in classes
    ]
    return [
        [
            f"{name}.{inner}"
            for inner, _ in module.named_parameters()
            if len(classes) == 1 or "LayerNorm" not in inner
        ]
        for name, module in found
    ]


def expected(model, name, part):
    attention, layer = CLASSES[name]
    lists = {"attention": inside(model, attention), "layer": inside(model, {layer})}
    count = len(attention)
    return {
        "first-attention": {name for names in lists["attention"][:count] for name in names},
        "attention": {name for names in lists["attention"] for name in names},
        "first-layer": set(lists["layer"][0]),
        "everything": {name for name, _ in model.named_parameters()} - {SINUSOIDS},
    }[part]


@pytest.mark.parametrize("part", COMPONENTS)
@pytest.mark.parametrize("name", CLASSES)
def test_exactly_a_part_changes(name, part, folder):
    before, after = open_model(folder(name)), reinitialize(folder(name), part, seed=3)
    old = dict(before.named_parameters())
    differ = {
        key for key, parameter in after.named_parameters() if not torch.equal(parameter, old[key])
    }
    wanted = expected(before, name, part)
    assert differ == wanted and wanted
    assert differ == set(fresh_parameters(before, part)) - {SINUSOIDS}
    assert part == "everything" or wanted != expected(before, name, "everything")


def test_every_known_type_is_tested(folder):
    assert {open_model(folder(name)).config.model_type for name in CLASSES} == set(MODULES)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "roformer"])
def test_fresh_is_as_the_stock_class_begins(name, folder):
    model = reinitialize(folder(name), "everything", seed=5)
    torch.manual_seed(5)
    stock, other = type(model)(model.config), type(model)(model.config)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True)
    )
    assert not all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_the_seed_decides(folder):
    first, again, other = (
        reinitialize(folder("gpt2"), "first-attention", seed) for seed in (1, 1, 2)
    )
    key = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(first.get_parameter(key), again.get_parameter(key)) and not torch.equal(
        first.get_parameter(key), other.get_parameter(key)
    )


def test_the_global_generator_is_left_alone(folder):
    before = torch.get_rng_state()
    reinitialize(folder("gpt2"), "attention", seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_not_known_is_refused(folder, tmp_path):
    with pytest.raises(MismatchError, match="component heads: choose one of first-attention"):
        reinitialize(folder("gpt2"), "heads", seed=0)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        reinitialize(tmp_path, "attention", seed=0)
    other = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=20,
            hidden_size=8,
            ffn_dim=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            word_embed_proj_dim=8,
        )
    )
    with pytest.raises(UnsupportedModel, match="which parameters of a opt are attention"):
        fresh_parameters(other, "attention")


# training on

TINY = with_changes(
    TRAINING["vit-digits"],
    config={"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
    schedule={"steps": 3, "batch_size": 8},
)


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    return train(TINY, 0, tmp_path_factory.mktemp("begin") / "model")


def parameters(folder):
    return {name: parameter.detach() for name, parameter in open_model(folder).named_parameters()}


@pytest.mark.parametrize("only_fresh", [False, True])
def test_training_goes_on_from_there(begin, tmp_path, only_fresh):
    out = train(
        TINY, 1, tmp_path / "out", begin=begin, fresh="first-attention", only_fresh=only_fresh
    )
    before, after, fresh = (
        parameters(begin),
        parameters(out),
        set(fresh_parameters(open_model(begin), "first-attention")),
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert fresh <= moved and (moved == fresh) == only_fresh


def test_a_folder_knows_what_it_was_begun_from(begin, tmp_path):
    out = train(TINY, 1, tmp_path / "out", begin=begin, fresh="attention")
    assert trained(TINY, 1, out, begin=begin, fresh="attention")
    assert not trained(TINY, 1, out, begin=begin, fresh="first-layer")
    assert not trained(TINY, 1, out, begin=out, fresh="attention")
    assert not trained(TINY, 1, begin, begin=begin, fresh="attention")


def test_another_model_is_refused(begin, tmp_path, folder):
    with pytest.raises(
        MismatchError, match=r"differs in hidden_size, num_attention_heads.*choose its own recipe"
    ):
        train(TRAINING["vit-digits"], 1, tmp_path / "out", begin=begin)
    with pytest.raises(MismatchError, match="give it with --begin"):
        train(TINY, 1, tmp_path / "out", fresh="attention")
    with pytest.raises(MismatchError, match="none is fresh"):
        train(TINY, 1, tmp_path / "out", begin=begin, only_fresh=True)
    assert not list(tmp_path.iterdir())

"""LoRA adapters: carried exactly, in peft's format, and refused where they are no plain sum."""

import json
import warnings

import pytest
import torch
from fixtures import run
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transported import apart, base_of, orbit, own_coordinates

import symmerge as sm
from symmerge.errors import CheckpointError, MismatchError, SymmergeWarning
from symmerge.lab.small_models import small_model
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.distillation import distillation_loss
from symmerge.merging.healing import HealOptions
from symmerge.models.alignment import Alignment
from symmerge.transporting.adapter_files import read_adapter, save_adapter
from symmerge.transporting.adapters import adapted, carried_adapter, warn_unmerged
from symmerge.transporting.frames import Passage
from symmerge.transporting.healing import heal_adapter
from symmerge.verification.modules import full_module

peft = pytest.importorskip("peft")
EXACT, STOCK = 1e-10, 1e-5

# Fused matrices, Conv1D, grouped heads, rotary pairs, gates, layer scales, embeddings.
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head"],
    "qwen2": ["q_proj", "v_proj", "o_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],
    "bert": ["query", "value", "dense"],
    "dinov3": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "dinov2": ["q_proj", "classifier"],  # which reads two means side by side
    "modernbert": ["Wqkv", "Wo", "Wi"],  # the first reads the embedding's own norm
    "gpt2-untied": ["lm_head"],  # has no bias that could take a shift
    "mixtral": ["q_proj", "o_proj"],
    "whisper": ["q_proj", "k_proj", "out_proj"],  # only keys have no biases
}


def lora(name, folder, dtype=torch.float64, **changes):
    """A random adapter that peft wrote; ranks and alphas differ between modules."""
    settings = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": TARGETS.get(name),
        "rank_pattern": {"c_fc": 5, "q_proj": 2},
        "alpha_pattern": {"c_fc": 9},
        "init_lora_weights": False,
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        module = peft.get_peft_model(
            small_model(name, dtype=dtype), peft.LoraConfig(**settings)
        ).to(dtype)
    module.save_pretrained(folder, save_embedding_layers=False)
    return module.eval()


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_is_carried_exactly_and_keeps_its_ranks(name, tmp_path):
    lora(name, tmp_path / "lora")
    base, passage = base_of(name), orbit(name)
    adapter = read_adapter(tmp_path / "lora", base)
    wanted = adapted(base, adapter)
    moved = carried_adapter(passage, adapter)
    assert apart(adapted(passage.other, moved), wanted) <= EXACT
    ranks = {module: factors.rank for module, factors in adapter.modules.items()}
    assert ranks == {module: factors.rank for module, factors in moved.modules.items()}
    identity = passage.along(Alignment.identity(passage.alignment.spec))
    assert apart(adapted(passage.other, carried_adapter(identity, adapter)), wanted) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "dinov2", "gpt2-untied"])
def test_gains_shifts_and_value_biases_of_other_are_accounted_for(name, tmp_path):
    lora(name, tmp_path / "lora")
    passage = orbit(name)
    other = own_coordinates(passage.other)
    there = Passage(passage.base, other, passage.alignment)
    adapter = read_adapter(tmp_path / "lora", passage.base)
    wanted = adapted(passage.base, adapter)
    assert apart(adapted(other, carried_adapter(there, adapter)), wanted) <= EXACT
    # Control: the adapter for the other coordinates.
    assert apart(adapted(other, carried_adapter(passage, adapter)), wanted) > 1e-2


def test_an_adapter_of_a_model_whose_embedding_absorbs_its_norm_goes_both_ways(tmp_path):
    lora("modernbert", tmp_path / "lora")
    passage = orbit("modernbert")
    adapter = read_adapter(tmp_path / "lora", passage.base)
    wanted = adapted(passage.base, adapter)
    back = Passage(passage.other, passage.base, passage.alignment.inverse())
    there = carried_adapter(passage, adapter)
    assert apart(adapted(passage.base, carried_adapter(back, there)), wanted) <= EXACT
    assert apart(adapted(passage.base, there), wanted) > 1e-2  # the control


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_adapters_of_tied_embeddings_are_refused(name, tmp_path):
    target = {"gpt2": "wte", "t5": "shared"}[name]
    lora(name, tmp_path, target_modules=[target], rank_pattern={})
    passage = orbit(name)  # where OTHER has its ties broken
    with pytest.raises(MismatchError, match="shares its weight"):
        carried_adapter(passage, read_adapter(tmp_path, passage.base))


def test_peft_loads_biases_of_an_adapter_that_began_otherwise(tmp_path):
    lora("whisper", tmp_path / "lora", target_modules=["out_proj"])
    spoiled(tmp_path / "lora", init_lora_weights="gaussian")
    passage = orbit("whisper")
    other = own_coordinates(passage.other)
    there = Passage(passage.base, other, passage.alignment)
    moved = carried_adapter(there, read_adapter(tmp_path / "lora", passage.base))
    save_adapter(moved, tmp_path / "moved")
    assert peft.PeftConfig.from_pretrained(tmp_path / "moved").lora_bias
    warn_unmerged(moved, other)  # all its modules have biases: nothing is said
    lora("whisper", tmp_path / "keys", target_modules=["out_proj", "k_proj"])
    moved = carried_adapter(there, read_adapter(tmp_path / "keys", passage.base))
    with pytest.warns(SymmergeWarning, match="cannot merge"):
        warn_unmerged(moved, other)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_peft_loads_what_is_written(name, tmp_path):
    module = lora(name, tmp_path / "lora", torch.float32)
    base, passage = base_of(name), orbit(name)
    sm.save(passage.other, tmp_path / "other")
    moved = carried_adapter(passage, read_adapter(tmp_path / "lora", base))
    save_adapter(moved, tmp_path / "moved")
    stock = type(small_model(name)).from_pretrained(tmp_path / "other", dtype=torch.float32)
    tokens = torch.randint(0, 101, (2, 12))
    plain = stock(tokens).logits.detach()
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "moved").eval()
    wanted, got = module(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    assert (got - wanted).norm() <= STOCK * wanted.norm() < 1e-2 * (plain - wanted).norm()
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"c_fc": 5, "q_proj": 2}
    assert config["lora_bias"] == (name == "gpt2")  # only LayerNorm has shifts


def test_the_base_of_an_adapter_is_not_untied(tmp_path):
    lora("llama", tmp_path / "lora", torch.float32)
    with pytest.raises(MismatchError, match=r"--untie: .* is an adapter"):
        sm.transport(base_of("llama"), tmp_path / "lora", orbit("llama").other, untie=True)


def test_the_verb_writes_an_adapter_for_peft(tmp_path):
    module = lora("llama", tmp_path / "lora", torch.float32)
    small_model("llama").save_pretrained(tmp_path / "base")
    sm.save(orbit("llama").other, tmp_path / "other")
    folders = (
        "--from",
        tmp_path / "base",
        "--tuned",
        tmp_path / "lora",
        "--to",
        tmp_path / "other",
    )
    run("transport", *folders, "--scale", 1, "--no-verdict", "--out", tmp_path / "out")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "out").eval()
    tokens = torch.randint(0, 101, (2, 12))
    wanted, got = module(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    assert (got - wanted).norm() <= STOCK * wanted.norm()
    small_model("llama").save_pretrained(tmp_path / "copy")
    spoiled(tmp_path / "lora", base_model_name_or_path="org/base")
    for name, expected in (("base", 0), ("copy", 1)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            read_adapter(tmp_path / "lora", sm.load(tmp_path / name))
        assert len([one for one in said if one.category is SymmergeWarning]) == expected
    # Bad input through the verb: one line, and nothing is written.
    spoiled(tmp_path / "lora", use_dora=True)
    run("transport", *folders, "--scale", 1, "--out", tmp_path / "none", expect=2)
    assert not (tmp_path / "none").exists()


def spoiled(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def renamed(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(dict(change(name, value) for name, value in load_file(path).items()), path)


def test_an_adapter_is_healed_in_its_factors_and_scaled_by_module(tmp_path):
    lora("gpt2", tmp_path / "lora", torch.float32)
    base, passage = base_of("gpt2"), orbit("gpt2")
    adapter = read_adapter(tmp_path / "lora", base)
    tuned = adapted(base, adapter)
    task = sm.make_task("clm", "self", [tuned], samples=24, length=12)
    half = carried_adapter(passage, adapter, {"transformer.h.0.attn.c_attn.weight": 0.5})
    whole = carried_adapter(passage, adapter)
    names = [n for n, f in half.modules.items() if not torch.equal(f.b, whole.modules[n].b)]
    assert names == ["transformer.h.0.attn.c_attn"]
    wrong = carried_adapter(passage.along(Alignment.identity(passage.alignment.spec)), adapter)
    how = HealOptions(steps=12, data=task, batch_size=8)
    healed = heal_adapter(passage.other, wrong, tuned, how)
    assert healed.after < healed.before - 1e-2
    ranks = {name: factors.rank for name, factors in adapter.modules.items()}
    assert {name: factors.rank for name, factors in healed.adapter.modules.items()} == ranks
    # What is written is what learned: the same loss as a model.
    data = load_data(how.with_amounts(base), [tuned], print).evaluation_batches()
    module = full_module(adapted(passage.other, healed.adapter), torch.float32)
    losses = [float(distillation_loss(module, batch)) for batch in data]
    assert sum(losses) / len(losses) == pytest.approx(healed.after, abs=1e-4)


WRONG = {
    "dora": (lambda f: spoiled(f, use_dora=True), "use_dora"),
    "kind": (lambda f: spoiled(f, peft_type="IA3"), "IA3"),
    "prompts": (lambda f: spoiled(f, peft_type="PROMPT_TUNING"), "changes no weights"),
    "some tokens": (lambda f: spoiled(f, alora_invocation_tokens=[3]), "some tokens"),
    "several": (lambda f: spoiled(f, arrow_config={"top_k": 2}), "arrow_config"),
    "gradients": (lambda f: spoiled(f, init_lora_weights="lora_ga"), "lora_ga"),
    "a convolution": (
        lambda f: renamed(f, lambda name, value: (name, value[..., None, None])),
        "convolution",
    ),
    "whole attention": (
        lambda f: renamed(f, lambda n, v: (n.replace(".lora", ".base_layer.out.lora"), v)),
        "whole attention",
    ),
    "nothing": (lambda f: renamed(f, lambda name, value: (name, 0 * value)), "changes nothing"),
    "heads beside it": (lambda f: spoiled(f, modules_to_save=["score"]), "modules_to_save"),
    "biases": (lambda f: spoiled(f, bias="all"), "bias"),
    "another base": (lambda f: spoiled(f, init_lora_weights="pissa"), "pissa"),
    "quantised": (
        lambda f: renamed(f, lambda name, value: (name, value.to(torch.int8))),
        "quantised",
    ),
    "no such layer": (
        lambda f: renamed(f, lambda name, value: (name.replace("h.1.", "h.7."), value)),
        r"h\.7\..*does not have",
    ),
    "another size": (
        lambda f: renamed(f, lambda name, value: (name, value[:, :3].contiguous())),
        "weight|fit",
    ),
    "half": (
        lambda f: renamed(f, lambda name, value: (name.replace("lora_B.w", "x.lora_B.w"), value)),
        "does not have|factors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plain_lora_of_the_base_is_refused(case, tmp_path):
    spoil, reason = WRONG[case]
    lora("gpt2", tmp_path, torch.float32)
    read_adapter(tmp_path, base_of("gpt2"))
    spoil(tmp_path)
    with pytest.raises((MismatchError, CheckpointError), match=reason):
        read_adapter(tmp_path, base_of("gpt2"))

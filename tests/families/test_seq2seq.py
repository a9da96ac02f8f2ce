"""Encoder-decoders: written in every precision, fed on both sides, and continuing a text."""

import json

import pytest
import torch
from fixtures import checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

import symmerge as sm
from symmerge.errors import CheckpointError, MismatchError
from symmerge.evaluation.data import self_generated
from symmerge.evaluation.data.self_generated import halves, sample_text, text_inputs
from symmerge.lab.small_models import small_model
from symmerge.matching.weights import WeightMatching
from symmerge.models.orbit import random_member
from symmerge.observation.probe import make_probe
from symmerge.observation.unigrams import token_frequencies
from symmerge.verification.inputs import samples
from symmerge.verification.modules import full_module, logits_of
from symmerge.verification.written import gate

BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
CROSS = "decoder.block.1.layer.1.EncDecAttention"
# Small model, its precision, and a tensor whose damage must be found.
WRITTEN = [
    ("t5", torch.float32, f"{CROSS}.v.weight"),
    ("t5", torch.bfloat16, "shared.weight"),
    ("bart-untied", torch.bfloat16, "model.decoder.layers.1.encoder_attn.k_proj.weight"),
    ("bart", torch.float16, "model.encoder.embed_positions.weight"),
    ("t5-gated", torch.float16, "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"),
]


def damaged(folder, tensor, into):
    """The checkpoint with one tensor changed by two per cent at random."""
    module = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="auto")
    weight = module.state_dict()[tensor]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.copy_(weight.float() * (1 + 0.02 * noise))
    module.save_pretrained(into)
    return sm.load(into)


@pytest.mark.parametrize(("name", "dtype", "tensor"), WRITTEN)
def test_a_written_member_is_the_same_and_a_damaged_one_is_not(name, dtype, tensor, tmp_path):
    source = sm.load(small_model(name, seed=2, dtype=dtype))
    folder = sm.save(random_member(source, 1)[1], tmp_path / "member", gate=gate(source))
    member = sm.load(folder)
    assert {member.weights.dtype(one) for one in member.spec.tensors} == {dtype}
    assert sm.verify(source, member).same and sm.same(source, member).same
    assert not sm.same(source, damaged(folder, tensor, tmp_path / "damaged")).same


def test_both_stacks_read_tokens_and_both_outputs_of_a_bare_model_are_compared():
    model = sm.load(small_model("t5", kind="T5Model"))
    sample = samples(model, 0)[0]
    given, answered = sample.inputs["input_ids"], sample.inputs["decoder_input_ids"]
    assert not torch.equal(given, answered)
    assert set(given.flatten().tolist()) == set(range(1, 101))  # 0 is the padding
    outputs = logits_of(model, sample)
    with torch.no_grad():
        stock = small_model("t5", kind="T5Model")(**sample.inputs)
    stacks = {"logits": "last_hidden_state", "encoder_logits": "encoder_last_hidden_state"}
    assert outputs.keys() == stacks.keys()
    for ours, theirs in stacks.items():
        assert torch.allclose(outputs[ours], stock[theirs].flatten(0, 1), atol=1e-4)


# T5's config


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return sm.load(folder)


def test_how_a_head_is_scaled_is_written_out_before_it_is_untied(tmp_path):
    folder = checkpoint(tmp_path / "model", "t5")
    model = edited(folder, scale_decoder_outputs="absent", tie_word_embeddings="absent")
    assert model.config["scale_decoder_outputs"] is True and "lm_head.weight" in model.spec.ties
    written = sm.save(random_member(model, 1)[1], tmp_path / "member")
    assert sm.verify(model, sm.load(written)).same
    # The control: without it, transformers reads it off the tie, as of v1.1.
    assert not sm.verify(model, edited(written, scale_decoder_outputs="absent")).same


def test_an_embedding_that_is_stored_again_must_be_the_same(tmp_path):
    folder = checkpoint(tmp_path / "model", "t5")
    model, tensors = sm.load(small_model("t5")), load_file(folder / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert sm.verify(model, sm.load(folder)).same
    tensors["encoder.embed_tokens.weight"][3, 5] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens.* differs from shared"):
        sm.load(folder)


# the task: continuing a text


def test_a_decoder_continues_what_its_encoder_reads(tmp_path):
    folder = checkpoint(tmp_path / "model", "t5")
    model = sm.load(folder)
    (tmp_path / "text").write_text("the second half of a block answers the first. " * 30)
    task = sm.make_task("seq2seq", str(tmp_path / "text"), [model], samples=4, length=24)
    (batch,) = task.batches
    assert batch["input_ids"].shape == batch["decoder_input_ids"].shape == (4, 12)
    assert (batch["decoder_input_ids"][:, 0] == 0).all()  # the start token
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    module = small_model("t5")
    with torch.no_grad():
        stock = module(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
    measured = task.evaluate(full_module(model, torch.float32))
    assert measured["loss"] == pytest.approx(stock, rel=1e-5) and "perplexity" in measured


def test_a_decoder_writes_with_its_cache_what_it_would_write_without(monkeypatch):
    monkeypatch.setattr(self_generated, "_drawn", lambda logits: logits.argmax(-1, keepdim=True))
    model = sm.load(small_model("t5-gated"))
    module = full_module(model, torch.float32)
    text = sample_text(model, module, rows=3, length=11, seed=0)
    given, answer = halves(text)
    assert (given.shape, answer.shape) == ((3, 5), (3, 6))
    with torch.no_grad():
        logits = module(**text_inputs(model, text)).logits
    assert torch.equal(logits.argmax(-1), answer)  # each place predicts its own token
    assert not torch.equal(logits.argmax(-1)[:, 1:], answer[:, :-1])  # the control


def test_pairs_are_learned_and_weighed_on_text_of_their_own():
    models = [sm.load(small_model("t5", seed=seed)) for seed in (0, 1)]
    counts = token_frequencies(models)
    assert counts.shape == (101,) and counts.sum() == pytest.approx(64 * 256, rel=1e-3)
    probe = make_probe(models, text=torch.randint(0, 101, (4, 10)))
    assert len(probe.targets) == 4 * 5  # every token of the answers
    start = WeightMatching(generate_text=False, tries=1)
    how = {"steps": 2, "generated": 6, "generated_length": 12, "batch_size": 2}
    result = sm.align(*models, sm.LearnedMatching(start=start, **how))
    assert sm.verify(models[1], result.aligned).same
    assert result.after < result.before


def test_other_tasks_are_refused_in_clear_words():
    with pytest.raises(MismatchError, match=r"for seq2seq-lm: the task clm .* use seq2seq"):
        sm.make_task("clm", "self", [sm.load(small_model("t5"))])
    with pytest.raises(MismatchError, match="no task measures"):
        sm.make_task("text", "x", [sm.load(small_model("t5", kind="T5EncoderModel"))])

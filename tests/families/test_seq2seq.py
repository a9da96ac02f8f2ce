"""Encoder-decoders: written in every precision, fed on both sides, and continuing a text."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from fixtures import checkpoint
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import CheckpointError, MismatchError
from symmerge.evaluation.data import self_generated
from symmerge.evaluation.data.self_generated import halves, sample_text, text_inputs
from symmerge.lab.small_models import small_model
from symmerge.lab.training.datasets import Continued
from symmerge.matching.weights import WeightMatching
from symmerge.merging.verdict import cannot_judge
from symmerge.models.orbit import random_member
from symmerge.observation.probe import make_probe
from symmerge.observation.unigrams import token_frequencies
from symmerge.symmetry.groups import OrthogonalFixingOnes, Permutation
from symmerge.verification.inputs import samples
from symmerge.verification.modules import full_module, logits_of
from symmerge.verification.written import gate, run_briefly

BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
CROSS = "decoder.block.1.layer.1.EncDecAttention"
# Small model, its precision, and a tensor whose damage must be found.
WRITTEN = [
    ("t5", torch.float32, f"{CROSS}.v.weight"),
    ("t5", torch.bfloat16, "shared.weight"),
    ("bart-untied", torch.bfloat16, "model.decoder.layers.1.encoder_attn.k_proj.weight"),
    ("bart", torch.float16, "model.encoder.embed_positions.weight"),
    ("whisper", torch.float16, "model.encoder.conv1.weight"),
    ("whisper-classifier", torch.float32, "encoder.layers.1.fc2.weight"),
    ("bart-decoder", torch.bfloat16, "model.decoder.layers.1.encoder_attn.v_proj.weight"),
    ("t5-gated", torch.float16, "encoder.block.1.layer.1.DenseReluDense.wi_0.weight"),
]


def damaged(folder, tensor, into):
    """The checkpoint with one tensor changed by two per cent at random."""
    kind = getattr(transformers, sm.load(folder).spec.architecture)
    module = kind.from_pretrained(folder, dtype="auto")
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


def test_a_decoder_alone_is_given_noise_for_what_an_encoder_makes():
    model, module = sm.load(small_model("bart-decoder")), small_model("bart-decoder")
    first, rows, _ = samples(model, 0)
    assert first.inputs["encoder_hidden_states"].shape == (3, 16, 48)
    assert rows.inputs.keys() == {"input_ids"}
    with torch.no_grad():
        stock = module(**first.inputs).logits.flatten(0, 1)
        unread = module(first.inputs["input_ids"]).logits.flatten(0, 1)
    logits = logits_of(model, first)["logits"]
    assert torch.allclose(logits, stock, atol=1e-4) and not torch.allclose(logits, unread, atol=0.1)


def test_labels_are_read_off_the_last_end_of_a_text():
    model, module = sm.load(small_model("t5-classifier")), small_model("t5-classifier")
    ids = samples(model, 0)[0].inputs["input_ids"]
    assert model.spec.end_token == 1 and (ids == 1).sum(1).tolist() == [1] * len(ids)
    assert (ids[:, -1] == 1).all()
    with torch.no_grad():
        stock = module(ids).logits
    assert torch.allclose(logits_of(model, samples(model, 0)[0])["logits"], stock, atol=1e-4)
    other = sm.load(small_model("t5-classifier", eos_token_id=2))
    with pytest.raises(MismatchError, match="end of a text 1 / 2"):
        sm.verify(model, other)


# Whisper's encoder


def encoder_norms(model):
    """The tensors of the norms on the encoder's stream, without gains and shifts."""
    return {
        name: torch.full_like(model.weights[name], float(name.endswith("weight")))
        for name in model.spec.tensors
        if name.startswith("model.encoder.") and "layer_norm" in name
    }


def test_no_rotation_passes_the_activation_before_an_encoder_of_sound():
    """Not even where all gains are one: the stream comes out of a GELU, and only permutes."""
    model = sm.canonicalize(sm.load(small_model("whisper", dtype=torch.float64)), ("fold",))
    assert model.spec.spaces["residual.encoder"].group == Permutation(48)
    known = encoder_norms(model)
    assert len(known) == 2 * (2 * 2 + 1)
    plain = model.derive(
        DerivedWeights(model.weights, {name: partial(known.get, name) for name in known}),
        step=HistoryStep("edit", "no gains"),
    )
    identity = sm.Alignment.identity(model.spec).elements
    for group, same in ((Permutation(48), True), (OrthogonalFixingOnes(48), False)):
        space = replace(model.spec.spaces["residual.encoder"], group=group)
        spec = replace(model.spec, spaces={**model.spec.spaces, "residual.encoder": space})
        element = group.random(torch.Generator().manual_seed(1), ())
        moved = sm.apply(
            sm.Alignment(spec, {**identity, "residual.encoder": element}),
            replace(plain, spec=spec),
        )
        back = moved if same else replace(moved, weights=_with(moved.weights, known))
        other = replace(back, spec=model.spec)
        difference = sm.verify(plain, other, dtype=torch.float64).difference
        assert difference <= 1e-10 if same else difference >= 1e-2


def _with(weights, tensors):
    return DerivedWeights(weights, {name: partial(tensors.get, name) for name in tensors})


def test_what_an_encoder_hears_is_long_enough_and_reaches_every_frame():
    model = sm.load(small_model("whisper"))
    first, rows, places = samples(model, 0, long=False)
    assert first.inputs["input_features"].shape == (1, 8, 2 * 20)
    assert first.inputs["decoder_input_ids"].shape == (1, 24)
    assert not rows.layers and not places.layers and rows.inputs["input_features"].numel() == 101
    last = {"embed_positions.weight": torch.linspace(0, 0.5, 48), "conv1.bias": torch.tensor(0.5)}
    for end, more in last.items():
        changed = model.weights[f"model.encoder.{end}"].clone()
        changed[-1] += more
        weights = _with(model.weights, {f"model.encoder.{end}": changed})
        other = model.derive(weights, step=HistoryStep("edit", end))
        assert not run_briefly(model, other).same
    assert run_briefly(model, model).same


def test_stored_sinusoids_move_with_the_encoder_and_stay_as_they_are_written(tmp_path):
    model = sm.load(small_model("whisper"))
    name = "model.encoder.embed_positions.weight"
    folder = sm.save(random_member(model, 1)[1], tmp_path / "member")
    stock = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    positions = stock.state_dict()[name]
    assert torch.equal(positions, sm.load(folder).weights[name])
    assert not torch.equal(positions, model.weights[name])
    assert torch.equal(positions.sort(1).values, model.weights[name].sort(1).values)


def test_sound_is_aligned_by_weights_alone_and_measured_nowhere():
    model = sm.load(small_model("whisper"))
    moved = random_member(model, 1)[1]
    result = sm.align(model, moved, "fast")
    assert result.before > 0.5 and result.after < 1e-4
    assert "no task measures" in cannot_judge(model, None)
    with pytest.raises(MismatchError, match="for speech-to-text, which no task measures"):
        sm.make_task("seq2seq", "self", [model])


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


def test_models_are_trained_on_what_the_task_measures():
    tokens = torch.arange(40)
    inputs, targets = Continued(tokens, 12, 7).batch(torch.tensor([0, 20]), None)
    assert inputs["input_ids"].tolist() == [[*range(6)], [*range(20, 26)]]
    assert targets.tolist() == [[*range(6, 12)], [*range(26, 32)]]
    assert inputs["decoder_input_ids"].tolist() == [[7, *range(6, 11)], [7, *range(26, 31)]]

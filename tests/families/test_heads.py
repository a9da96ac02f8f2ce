"""Heads of supported families: classes by the last token, by token, answers and bare models."""

import pytest
import torch
from differences import difference
from fixtures import checkpoint
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import FunctionChanged, MismatchError, UnsupportedModel
from symmerge.families import FAMILIES
from symmerge.lab.small_models import EVERY, small_model
from symmerge.merging.verdict import cannot_judge
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import (
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    SignedPermutation,
    Trivial,
)
from symmerge.symmetry.notation import Role, unparse
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of
from symmerge.verification.written import gate

LABELS = {"num_labels": 3, "pad_token_id": 0}
# Class -> the small model whose config it takes, further settings, the group of its stream.
# They share tables with classes of EVERY, and the whole of the tests with those.
OTHERS = {
    "MistralForSequenceClassification": ("mistral", LABELS, Orthogonal(48)),
    "Qwen2ForSequenceClassification": ("qwen2", LABELS, Orthogonal(48)),
    "MistralModel": ("mistral", {}, Trivial(48)),
    "Qwen2Model": ("qwen2", {}, Trivial(48)),
    "RobertaForTokenClassification": ("roberta", {"num_labels": 3}, Permutation(48)),
    "RobertaForQuestionAnswering": ("roberta", {}, Permutation(48)),
    "RobertaModel": ("roberta", {}, Trivial(48)),
    "OPTForSequenceClassification": ("opt", LABELS, OrthogonalFixingOnes(48)),
    "OPTForQuestionAnswering": ("opt", {}, OrthogonalFixingOnes(48)),
    "OPTModel": ("opt-post-norm", {}, Trivial(48)),
    "DistilBertForTokenClassification": ("distilbert", {"num_labels": 3}, Permutation(48)),
    "DistilBertForQuestionAnswering": ("distilbert", {}, Permutation(48)),
    "DistilBertModel": ("distilbert", {}, Trivial(48)),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", {"num_labels": 3}, Permutation(48)),
    "XLMRobertaForTokenClassification": ("xlm-roberta", {"num_labels": 3}, Permutation(48)),
    "XLMRobertaForQuestionAnswering": ("xlm-roberta", {}, Permutation(48)),
    "XLMRobertaModel": ("xlm-roberta", {}, Trivial(48)),
}
# Other heads of tables whose whole is tested: stems of the classes -> small model, kinds of heads.
LABEL, TOKEN, ANSWER, BARE_MODEL = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "Model",
)
CAUSAL = "ForCausalLM"
GENERATES = "ForConditionalGeneration"
FURTHER = {
    "Roberta": ("roberta", CAUSAL),
    "XLMRoberta": ("xlm-roberta", CAUSAL),
    "Camembert": ("camembert", CAUSAL, LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Electra": ("electra-detector", CAUSAL, LABEL, TOKEN, ANSWER, BARE_MODEL),
    "MPNet": ("mpnet", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "DebertaV2": ("deberta-v2", TOKEN, ANSWER),
    "Albert": ("albert", "ForPreTraining", TOKEN, ANSWER, BARE_MODEL),
    "RoFormer": ("roformer", CAUSAL, ANSWER),
    "ModernBert": ("modernbert", TOKEN),
    "DeiT": ("deit", BARE_MODEL),
    "IJepa": ("ijepa", BARE_MODEL),
    "Beit": ("beit", BARE_MODEL),
    "Dinov2": ("dinov2", BARE_MODEL),
    "Dinov2WithRegisters": ("dinov2_with_registers", BARE_MODEL),
    "GPT2": ("gpt2", TOKEN, ANSWER),
    "GPTNeoX": ("neox", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Llama": ("llama", TOKEN),
    "Mistral": ("mistral", TOKEN, ANSWER),
    "Qwen2": ("qwen2", TOKEN, ANSWER),
    "Granite": ("granite", BARE_MODEL),
    "Qwen3": ("qwen3", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Olmo2": ("olmo2", LABEL, BARE_MODEL),
    "Olmo3": ("olmo3", LABEL, BARE_MODEL),
    "Gemma2": ("gemma2", LABEL, TOKEN, BARE_MODEL),
    "Gemma3Text": ("gemma3", LABEL, BARE_MODEL),
    "SmolLM3": ("smollm3", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Cohere": ("cohere", BARE_MODEL),
    "Cohere2": ("cohere2", BARE_MODEL),
    "Mixtral": ("mixtral", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Qwen2Moe": ("qwen2_moe", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Qwen3Moe": ("qwen3_moe", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Olmoe": ("olmoe", BARE_MODEL),
    "GptOss": ("gpt_oss", LABEL, TOKEN, BARE_MODEL),
    "DeepseekV3": ("deepseek_v3", LABEL, TOKEN, BARE_MODEL),
    "Phi3": ("phi3", LABEL, TOKEN, BARE_MODEL),
    "Starcoder2": ("starcoder2", LABEL, TOKEN, BARE_MODEL),
    "StableLm": ("stablelm", LABEL, TOKEN, BARE_MODEL),
    "GPTJ": ("gptj", LABEL, ANSWER, BARE_MODEL),
    "GPTNeo": ("gpt_neo", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Phi": ("phi", LABEL, TOKEN, BARE_MODEL),
    "Falcon": ("falcon", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Bloom": ("bloom", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "Mpt": ("mpt", LABEL, TOKEN, ANSWER, BARE_MODEL),
    "T5": ("t5", ANSWER, BARE_MODEL, "EncoderModel"),
    "MT5": ("t5-gated", GENERATES, LABEL, TOKEN, ANSWER, BARE_MODEL, "EncoderModel"),
    "Bart": ("bart", ANSWER, BARE_MODEL),
    "MBart": ("mbart", LABEL, ANSWER, "ForCausalLM", BARE_MODEL),
    "Whisper": ("whisper", BARE_MODEL),
    "UMT5": ("umt5", LABEL, TOKEN, ANSWER, BARE_MODEL, "EncoderModel"),
}
KINDS = {stem + kind: name for stem, (name, *kinds) in FURTHER.items() for kind in kinds}
NEW = [name for name in EVERY if name.endswith(("-tokens", "-answers", "-features"))]
NEW += ["gpt2-classifier", "llama-classifier"]
NEW += ["t5-classifier", "whisper-decoder"]
NEW += ["mixtral", "gpt_oss", "clip", "siglip", "vit_mae", "deberta-v2-classifier"]
NEW += ["deepseek_v3"]
NEW += ["distilbert", "distilbert-classifier", "xlm-roberta", "opt", "opt-post-norm", "bert-next"]
BARE = [name for name in EVERY if name.endswith("-features")]


def load(name, kind=None, **changes):
    return sm.load(small_model(name, kind=kind, dtype=torch.float64, **changes))


def edited(model, tensor, change):
    changed = {tensor: lambda: change(model.weights[tensor])}
    return model.derive(DerivedWeights(model.weights, changed), step=HistoryStep("edit", tensor))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_classes_of_the_same_tables_compute_the_same(kind):
    name, changes, stream = OTHERS[kind]
    model, other = load(name, kind, **changes), load(name, kind, seed=1, **changes)
    assert model.spec.architecture == kind and model.spec.spaces["residual"].group == stream
    assert difference(model, random_member(model, 1)[1]) <= 1e-10
    assert difference(model, sm.canonicalize(model)) <= 1e-10
    assert difference(model, other) > 1e-2  # the control


# One class for each way of writing a head: running all of them takes a minute.
RUN = (
    *("ElectraForSequenceClassification", "MPNetForQuestionAnswering", "AlbertForPreTraining"),
    *("AlbertForTokenClassification", "MPNetModel", "BeitModel", "Dinov2Model", "ElectraModel"),
    *("Gemma2ForSequenceClassification", "Phi3ForTokenClassification", "MixtralModel"),
    *("FalconForSequenceClassification", "BloomForTokenClassification", "BloomModel"),
    *("GPTJForQuestionAnswering", "PhiForTokenClassification", "GPT2ForTokenClassification"),
    *("GPTNeoXForSequenceClassification", "GPTNeoXModel", "Qwen3MoeForQuestionAnswering"),
    *("T5ForQuestionAnswering", "T5Model", "T5EncoderModel", "MT5ForConditionalGeneration"),
    *("BartForQuestionAnswering", "BartModel", "MBartForSequenceClassification"),
    *("UMT5ForSequenceClassification", "MBartForCausalLM", "WhisperModel"),
)


@pytest.mark.parametrize("kind", RUN)
def test_further_classes_are_the_same_after_a_random_element(kind):
    model = load(KINDS[kind], kind, pad_token_id=0)
    assert difference(model, random_member(model, 1)[1]) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_further_classes_have_the_tensors_of_their_tables(kind):
    model = load(KINDS[kind], kind, pad_token_id=0)
    assert model.spec.architecture == kind
    shown = kind.endswith("Model")
    assert (model.spec.spaces[model.spec.stream].group == Trivial(48)) is shown


CHOICE = "multiple_choice_head.summary.bias"
IN_TURN = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, IN_TURN[at % 3]) for at, name in enumerate(NEW)]
)
def test_a_member_passes_the_gate_and_is_the_same(name, dtype, tmp_path):
    source = sm.load(small_model(name, seed=2, dtype=dtype))
    moved = random_member(source, 1)[1]
    written = sm.load(sm.save(moved, tmp_path / "right", gate=gate(source)))
    assert written.dtype == dtype and sm.same(source, written).same
    # The control: the readers of the units, a tenth off.
    last = next(name for name in moved.spec.spaces if name.startswith("ff.") and name[-1] == "1")
    (units,) = (met.piece.tensor for met in moved.spec.occurrences(last) if met.role is Role.READS)
    noise = torch.randn(moved.spec.shapes[units], generator=torch.Generator().manual_seed(0))
    wrong = edited(moved, units, lambda weight: weight * (1 + 0.1 * noise))
    with pytest.raises(FunctionChanged):
        sm.save(wrong, tmp_path / "wrong", gate=gate(source))
    assert not sm.same(source, sm.load(sm.save(wrong, tmp_path / "wrong"))).same


def test_every_class_has_a_small_model():
    listed = {architecture for architecture, _ in EVERY.values()} | {*OTHERS} | {*KINDS}
    for family in FAMILIES:
        assert family.classes.keys() <= listed


@pytest.mark.parametrize("padding", [None, -1, 101])
@pytest.mark.parametrize("name", ["gpt2-classifier", "llama-classifier"])
def test_the_last_token_needs_a_padding_token(name, padding, tmp_path):
    folder = checkpoint(tmp_path / "model", name)
    assert sm.load(folder).spec.task == "text-classification"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"pad_token_id": 0', f'"pad_token_id": {padding or "null"}')
    )
    with pytest.raises(UnsupportedModel, match="pad_token_id"):
        sm.load(folder)


def test_the_last_token_is_read_and_no_other():
    model = load("gpt2-classifier")
    row = samples(model, 0)[0].inputs["input_ids"][:1]
    module = small_model("gpt2-classifier")
    padded = torch.cat([row, torch.zeros_like(row[:, :3])], 1)
    with torch.no_grad():
        plain, hidden = module(row).logits, module(padded, attention_mask=padded.ne(0)).logits
    assert torch.allclose(plain, hidden, atol=1e-5)


def test_choices_are_scores_of_whole_texts_beside_the_words():
    model, module = load("gpt2-choices"), small_model("gpt2-choices")
    sample = samples(model, 0)[0]
    outputs = logits_of(model, sample)
    with torch.no_grad():
        stock = module(**sample.inputs)
    assert torch.allclose(outputs["mc_logits"], stock.mc_logits[:, None], atol=1e-5)
    assert torch.allclose(outputs["logits"], stock.logits.flatten(0, 1), atol=1e-4)
    assert difference(model, edited(model, CHOICE, lambda bias: bias + 0.1)) > 1e-2
    # what the score is read off is a setting that counts here, and nowhere else
    for name, same in (("gpt2-choices", False), ("gpt2", True)):
        other = sm.load(small_model(name, summary_type="mean"))
        assert sm.verify(sm.load(small_model(name)), other).same is same
    with pytest.raises(UnsupportedModel, match="summary_use_proj"):
        load("gpt2-choices", summary_use_proj=False)


def test_answers_are_two_scores_for_each_token():
    model = load("bert-answers")
    sample = samples(model, 0)[0]
    logits = logits_of(model, sample)["logits"]
    assert logits.shape == (sample.inputs["input_ids"].numel(), 2)
    with torch.no_grad():
        stock = small_model("bert-answers")(**sample.inputs)
    assert torch.allclose(logits[:, 0], stock.start_logits.flatten(), atol=1e-5)
    # Scores are compared as they are: a constant of one of the two is seen.
    assert difference(model, edited(model, "qa_outputs.bias", lambda bias: bias + 0.1)) > 1e-2


@pytest.mark.parametrize("name", BARE)
def test_all_that_a_bare_model_returns_is_compared(name):
    model = load(name)
    sample = samples(model, 0)[0]
    outputs = logits_of(model, sample)
    with torch.no_grad():
        stock = small_model(name)(**sample.inputs)
    assert torch.allclose(outputs["logits"], stock.last_hidden_state.flatten(0, 1), atol=1e-4)
    pooled = stock.get("pooler_output")
    assert ("pooled_logits" in outputs) is (pooled is not None)
    assert pooled is None or torch.allclose(outputs["pooled_logits"], pooled, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("llama-features", "embed_tokens.weight"), ("gpt2-features", "wte.weight")],
)
def test_the_length_of_an_embedding_is_seen(name, tensor):
    """The last norm would hide it, were it to follow the embedding at once."""

    def longer(rows):
        rows = rows.clone()
        rows[70] *= 1.1
        return rows

    model = load(name, vocab_size=4096)
    verdict = sm.verify(model, edited(model, tensor, longer))
    assert not verdict.same and sm.verify(model, model).same


PREFIXES = {
    "bert": "bert.",
    "gpt2": "transformer.",
    "vit": "vit.",
    "llama": "model.",
    "clip_text_model": "text_model.",
    "clip_vision_model": "vision_model.",
    "vit_mae": "vit.",
    "deberta-v2": "deberta.",
    "roformer": "roformer.",
    "modernbert": "model.",
    "swin": "swin.",
}


@pytest.mark.parametrize("name", BARE)
def test_names_with_and_without_a_prefix_are_read(name, tmp_path):
    folder = checkpoint(tmp_path / "model", name)
    model, tensors = sm.load(folder), load_file(folder / "model.safetensors")
    start = PREFIXES[model.spec.family]
    assert not any(tensor.startswith(start) for tensor in tensors)
    assert sm.verify(model, sm.load(small_model(name))).same
    save_file(
        {start + tensor: value for tensor, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert sm.verify(sm.load(folder), sm.load(small_model(name))).same


def test_a_pooler_that_a_head_does_not_read_is_visible():
    assert load("bert-features").spec.spaces["pooled"].group == Trivial(48)
    assert load("bert-classifier").spec.spaces["pooled"].group == SignedPermutation(48)
    table = load("bert-tokens").spec
    assert "pooled" not in table.spaces
    assert unparse(table.tensors["classifier.weight"]) == "label residual*"


@pytest.mark.parametrize("name", ["bert-tokens", "bert-answers", "bert-next", *BARE])
def test_no_task_measures_them(name):
    model = load(name)
    assert "no task measures" in cannot_judge(model, None)
    with pytest.raises(MismatchError, match="no task measures"):
        sm.make_task("text", "nowhere", [model])


def test_a_visible_stream_is_not_widened():
    wide = load("llama-features", hidden_size=96, num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(MismatchError, match=r"cannot be widened.*coordinates of the stream of"):
        sm.widen(load("llama-features"), wide)

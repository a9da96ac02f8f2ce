"""Heads of encoders that need more than their table: classes that mask the future."""

import pytest
import torch
from differences import difference
from fixtures import checkpoint

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.evaluation.data.token_cache import reserved_cache
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member
from symmerge.verification.modules import full_module

# Causal class -> a small model whose config it takes.
CAUSAL = {
    "BertLMHeadModel": "bert",
    "RobertaForCausalLM": "roberta",
    "XLMRobertaForCausalLM": "xlm-roberta",
    "CamembertForCausalLM": "camembert",
    "ElectraForCausalLM": "electra",
    "RoFormerForCausalLM": "roformer",
}
causal = pytest.mark.parametrize("kind", CAUSAL)


def tokens(count=12):
    return torch.randint(4, 101, (1, count), generator=torch.Generator().manual_seed(0))


@causal
def test_a_causal_class_of_an_encoder_masks_the_future(kind):
    text = tokens()
    other = text.clone()
    other[:, 6:] = 3
    for decoder, task in ((True, "causal-lm"), (False, "masked-lm")):
        module = small_model(CAUSAL[kind], kind=kind, is_decoder=decoder)
        with torch.no_grad():
            change = (module(text).logits - module(other).logits)[:, :6].abs().max()
        assert bool(change == 0) is decoder  # the control: without `is_decoder` it sees the future
        assert sm.load(module).spec.task == task


@causal
def test_a_causal_class_is_sampled_from_as_it_is_run(kind):
    module, text = small_model(CAUSAL[kind], kind=kind, is_decoder=True), tokens()
    cache = reserved_cache(module.config, text.shape[1])
    with torch.no_grad():
        for token in text.T:
            last = module(input_ids=token[None], past_key_values=cache, use_cache=True)
        whole = module(text).logits[:, -1]
    assert torch.allclose(last.logits[:, -1], whole, atol=1e-4)
    alone = module(input_ids=text[:, -1:]).logits[:, -1]
    assert not torch.allclose(alone, whole, atol=1e-2)  # the control: without the earlier tokens


def test_the_future_is_masked_where_text_is_learned_and_measured(tmp_path):
    """Loss of the next token, through the task that decoders have."""
    folder = checkpoint(tmp_path / "model", "bert-causal")
    (tmp_path / "text.txt").write_text("one and two and three and four and five " * 40)
    model = sm.load(folder)
    task = sm.make_task("clm", str(tmp_path / "text.txt"), [model], max_samples=2)
    module = full_module(model, torch.float32)
    loss = task.evaluate(module)["loss"]
    (batch,) = task.batches
    with torch.no_grad():
        stock = module(**batch).loss
    assert loss == pytest.approx(float(stock), rel=1e-4)
    assert len(sm.make_task("clm", "self", [model], max_samples=2, length=8).batches) == 1


@pytest.mark.parametrize("kind", ["ElectraForCausalLM", "RoFormerForCausalLM"])
def test_a_random_element_of_a_causal_class_changes_no_logit(kind):
    module = small_model(CAUSAL[kind], kind=kind, is_decoder=True, dtype=torch.float64)
    model = sm.load(module)
    assert difference(model, random_member(model, 1)[1]) <= 1e-10
    other = small_model(CAUSAL[kind], kind=kind, is_decoder=True, seed=1, dtype=torch.float64)
    assert difference(model, sm.load(other)) > 1e-2  # the control


def test_a_decoder_is_not_the_encoder_of_the_same_weights():
    module = small_model("bert-causal")
    model = sm.load(module)
    module.config.is_decoder = False
    with pytest.raises(MismatchError, match="task causal-lm / masked-lm"):
        sm.verify(model, sm.load(module))

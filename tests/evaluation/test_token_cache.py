"""A cache with room for a whole text gives what transformers' own cache gives."""

import pytest
import torch
from transformers import DynamicCache

from symmerge.evaluation.data.token_cache import ReservedLayer, reserved_cache
from symmerge.lab.small_models import small_model


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_same_logits_token_by_token(name):
    module = small_model(name)
    tokens = torch.randint(0, module.config.vocab_size, (3, 7))
    ours, theirs = reserved_cache(module.config, 7), DynamicCache(config=module.config)
    for at in range(7):
        one, other = (
            module(input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True).logits
            for cache in (ours, theirs)
        )
        assert torch.equal(one, other)
    # control: without the earlier tokens the last logits are others
    alone = module(input_ids=tokens[:, -1:]).logits
    assert (alone - one).abs().max() > 1e-2


def test_no_memory_is_taken_after_the_first_token():
    layer = ReservedLayer(4)
    states = torch.ones(2, 3, 1, 5)
    first, _ = layer.update(states, states)
    second, _ = layer.update(2 * states, states)
    assert first.data_ptr() == second.data_ptr()
    assert second.shape == (2, 3, 2, 5) and second[..., 1, :].eq(2).all()

"""A TUNED with another head or more tokens than its BASE, and an OTHER that is narrower."""

from functools import cache

import pytest
import torch
from transported import apart, base_of, fine_tuned, orbit, own_coordinates, tuned_of

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.form import canonicalize
from symmerge.models.orbit import random_member
from symmerge.transporting.carrying import carried
from symmerge.transporting.frames import Passage
from symmerge.transporting.heads import as_tuned, has_more, headed
from symmerge.transporting.inputs import written_texts

EXACT = 1e-10
# BASE; TUNED: another class, or more rows
MORE = {
    "classifier of texts": ("bert", "bert-classifier", {"hidden_act": "gelu"}),
    "of tokens": ("bert-untied", "bert-tokens", {}),
    "last token": ("gpt2", "gpt2-classifier", {}),
    "rotary": ("llama", "llama-classifier", {}),
    "other labels": ("vit", "vit", {"num_labels": 7}),
    "new tokens": ("llama", "llama", {"vocab_size": 104}),
    "new tokens, LayerNorm": ("gpt2-untied", "gpt2-untied", {"vocab_size": 104}),
    "new tokens, post-norm": ("bert", "bert", {"vocab_size": 104}),
    "more positions": ("gpt2-untied", "gpt2-untied", {"n_positions": 80}),
}


@cache
def more(case):
    """A passage within the orbit of BASE, and a TUNED that has more."""
    base, name, changes = MORE[case]
    return orbit(base), sm.load(fine_tuned(small_model(name, dtype=torch.float64, **changes)))


@pytest.mark.parametrize("case", MORE)
def test_a_new_head_and_new_tokens_arrive_within_the_orbit(case):
    passage, tuned = more(case)
    assert has_more(passage.base, tuned)
    assert apart(carried(headed(passage, tuned), tuned), tuned) <= EXACT
    # Control: the same, not aligned.
    still = passage.along(Alignment.identity(passage.alignment.spec))
    assert apart(carried(headed(still, tuned), tuned), tuned) > 1e-2


@pytest.mark.parametrize("case", ["last token", "new tokens"])
def test_gains_of_other_are_undone_in_new_heads_and_rows(case):
    passage, tuned = more(case)
    other = own_coordinates(passage.other)
    there = headed(Passage(passage.base, other, passage.alignment), tuned)
    assert apart(carried(there, tuned), tuned) <= EXACT
    assert apart(carried(headed(passage, tuned), tuned), tuned) <= EXACT
    grown = as_tuned(other, passage.base, tuned)
    assert apart(grown, tuned) > 1e-2  # the control


def test_what_base_has_is_kept_and_the_rest_is_zero():
    passage, tuned = more("new tokens")
    grown = as_tuned(passage.other, passage.base, tuned)
    rows = grown.weights["model.embed_tokens.weight"]
    assert torch.equal(rows[:101], passage.other.weights["model.embed_tokens.weight"])
    assert not rows[101:].any() and grown.config["vocab_size"] == 104


def test_other_bodies_and_lost_rows_are_refused():
    base = base_of("llama")
    for wrong in ("gpt2-untied", "qwen2"):
        with pytest.raises(MismatchError, match="body"):
            as_tuned(base, base, base_of(wrong))
    with pytest.raises(MismatchError, match="symmetry"):  # another activation
        headed(orbit("bert"), base_of("bert-classifier"))
    fewer = sm.load(small_model("llama", dtype=torch.float64, vocab_size=99))
    with pytest.raises(MismatchError, match="smaller"):
        as_tuned(base, base, fewer)


def head_of_its_own(module):
    """The module, its head untied and other than its embedding."""
    module.config.tie_word_embeddings = False
    head = module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * torch.linspace(0.5, 1.5, 48))
    return module


TIES = ["TUNED alone is untied", "BASE alone is untied", "tied, and new tokens"]


@pytest.mark.parametrize("case", TIES)
def test_ties_may_differ_and_what_is_written_can_be_read(case, tmp_path):
    base, module = small_model("gpt2"), fine_tuned(small_model("gpt2"))
    if case == TIES[0]:
        module = head_of_its_own(module)
    elif case == TIES[1]:
        base = head_of_its_own(base)
    else:
        module.resize_token_embeddings(110, mean_resizing=False)
    base, tuned = sm.load(base), sm.load(module)
    other = random_member(base, 3)[1]  # untied, for the gain is folded into its head
    carried = sm.transport(base, tuned, other, scale=1.0, verdict=False).model
    sm.save(carried, tmp_path / "out")
    assert apart(sm.load(tmp_path / "out"), tuned) <= 1e-5
    still = sm.transport(base, tuned, other, method="none", verdict=False).model
    assert apart(still, tuned) > 1e-2  # the control
    tied = sm.load(small_model("gpt2", seed=5))
    arrived = sm.transport(base, tuned, tied, scale=1.0, verdict=False).model
    assert arrived.spec.ties and "compromise" in arrived.history[-1].what


def test_a_narrow_other_gets_back_what_it_has_room_for():
    small, tuned = base_of("gpt2-untied"), tuned_of("gpt2-untied")
    wide = sm.load(small_model("gpt2-untied", dtype=torch.float64, n_embd=64, n_inner=128))
    element, base = random_member(sm.widen(small, wide), 3)
    wide_tuned = canonicalize(sm.widen(tuned, wide), ("fold", "centre"))
    passage = Passage(base, sm.widen(small, base), element)
    tuned_there = sm.apply(element, wide_tuned)
    assert apart(tuned_there, tuned) <= EXACT
    # BASE has nothing that OTHER has no room for, so nothing is lost.
    got = carried(passage, tuned_there, narrow=small)
    assert got.spec.sizes == small.spec.sizes and apart(got, tuned) <= EXACT
    # Controls: not aligned, and a change that OTHER has no room for.
    still = passage.along(Alignment.identity(passage.alignment.spec))
    assert apart(carried(still, tuned_there, narrow=small), tuned) > 1e-2
    stranger = sm.load(
        fine_tuned(small_model("gpt2-untied", dtype=torch.float64, n_embd=64, n_inner=128))
    )
    lost = Passage(wide, sm.widen(small, wide), Alignment.identity(passage.alignment.spec))
    assert apart(carried(lost, stranger, narrow=small), stranger) > 1e-2


def test_a_base_writes_texts_for_its_classifier():
    tuned = sm.load(small_model("bert-classifier"))
    task = written_texts(tuned, sm.load(small_model("bert")), samples=5, length=20)
    (batch,) = task.batches
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape == (5, 20) and 8 <= int(lengths.min()) < int(lengths.max())
    assert not (batch["input_ids"] * (1 - batch["attention_mask"])).any()  # padding is token 0
    again = written_texts(tuned, sm.load(small_model("bert")), samples=5, length=20, seed=1)
    assert not torch.equal(next(iter(again.batches))["input_ids"], batch["input_ids"])

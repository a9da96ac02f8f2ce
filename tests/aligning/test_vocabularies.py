"""Different vocabularies: rows follow their tokens, and B stays B on shared tokens."""

import importlib
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from fixtures import CHARACTERS, SPECIAL, checkpoint
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import symmerge as sm
from symmerge.aligning.tokens import kind_of, match_tokens, verify_shared
from symmerge.aligning.vocabularies import _axes, fill, respell
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import FunctionChanged, MismatchError, SymmergeWarning, SymmetryError
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers, tokenizer_of
from symmerge.lab.small_models import small_model
from symmerge.matching.evidence import Evidence, Weighting
from symmerge.matching.recipes import RECIPES
from symmerge.models.distances import distance
from symmerge.models.orbit import random_member
from symmerge.verification.written import gate

module = importlib.import_module("symmerge.aligning.vocabularies")
align = partial(sm.align, shared_tokens=True)
ONE = sm.WeightMatching(dtype=torch.float64, generate_text=False)
EXACT = 1e-12
ONLY_A, ONLY_B = "QXZ0129\n", "äöüßéñ"
OTHER_ROLES = {**SPECIAL, "pad_token": "<pad>"}
MINE = [*SPECIAL.values(), *CHARACTERS]
THEIRS = [
    *"".join(sorted(ONLY_B + CHARACTERS, reverse=True)).translate(dict.fromkeys(map(ord, ONLY_A))),
    *OTHER_ROLES.values(),
]
FAMILIES = [
    "gpt2",
    "gpt2-untied",
    "llama",
    "llama-mqa",
    "neox",
    "bert",
    "bert-untied",
    "roformer",
    "modernbert",
]
MORE = ["bert-pretraining", "bert-classifier", "roberta", "qwen2"]
TEXT = "the rain in Spain stays mainly in the plain, and 345 cats. " * 2  # of shared tokens


def write_tokenizer(folder, tokens, roles):
    backend = Tokenizer(
        models.WordLevel(
            {token: number for number, token in enumerate(tokens)},
            unk_token=roles.get("unk_token", tokens[0]),
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **roles
    ).save_pretrained(folder)


def spelled(folder, name, tokens, roles, *, seed=0, rows, dtype=torch.float64, **changes):
    """A small model with these tokens, and rows to spare."""
    small_model(name, seed=seed, dtype=dtype, vocab_size=rows, **changes).save_pretrained(folder)
    write_tokenizer(folder, tokens, roles)
    return sm.load(folder)


@pytest.fixture
def pair(tmp_path):
    """Two models with different vocabularies: unrelated, or B a moved copy of A (`planted`)."""

    def make(name, *, planted=False, rows=(101, 80), dtype=torch.float64):
        a = spelled(tmp_path / "a", name, MINE, SPECIAL, rows=rows[0], dtype=dtype)
        b = spelled(tmp_path / "b", name, THEIRS, OTHER_ROLES, seed=1, rows=rows[1], dtype=dtype)
        if planted:
            tensors = {
                key: a.weights[key]
                if key not in _axes(a.spec)
                else copied(a.weights[key], b.weights[key])
                for key in b.weights
            }
            copy = b.derive(MemoryWeights(tensors), step=HistoryStep("copy", "of A"))
            b = sm.load(sm.save(random_member(copy, seed=3)[1], tmp_path / "planted"))
        return a, b

    return make


def copied(mine, theirs):
    """B's rows with A's where B has the token."""
    result = theirs.clone()
    for number, token in enumerate(THEIRS):
        token = "[PAD]" if token == "<pad>" else token
        if token in MINE:
            result[number] = mine[MINE.index(token)]
    return result


def worst(a, b):
    return max(
        ((a.weights[name] - b.weights[name]).norm() / a.weights[name].norm().clamp_min(1e-6)).item()
        for name in a.weights
    )


def with_rows(model, change):
    """The model with the rows of its tokens changed."""
    tensors = {
        name: change(model.weights[name].clone())
        if name in _axes(model.spec)
        else model.weights[name]
        for name in model.weights
    }
    return model.derive(MemoryWeights(tensors), step=HistoryStep("change", "for a control"))


def swapped(first, second):
    def change(tensor):
        tensor[[first, second]] = tensor[[second, first]]
        return tensor

    return change


# which tokens are shared


def test_tokens_are_matched_by_string_and_special_ones_by_role(pair):
    found = match_tokens(*pair("gpt2"))
    assert (found.tokens, found.filled, found.dropped, found.unnamed) == (
        len(MINE) - len(ONLY_A),
        len(ONLY_A),
        len(ONLY_B),
        101 - len(MINE),
    )
    assert found.by_role == ("[PAD] / <pad>",) and not found.same
    for number, token in enumerate(MINE):
        expected = (
            THEIRS.index(OTHER_ROLES["pad_token"] if token == "[PAD]" else token)
            if token not in ONLY_A
            else -1
        )
        assert found.rows[number] == expected
    assert (found.rows[len(MINE) :] == -1).all()
    assert (
        torch.equal(found.counts, (found.rows >= 0).float()) and found.counts.sum() == found.tokens
    )


def test_a_token_with_several_roles_is_matched_once(tmp_path):
    a = spelled(
        tmp_path / "a",
        "gpt2",
        ["<s>", "</s>", "<p>", *"abc"],
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"},
        rows=6,
    )
    b = spelled(
        tmp_path / "b",
        "gpt2",
        [*"abc", "<e>"],
        {"bos_token": "<e>", "eos_token": "<e>", "pad_token": "<e>"},
        rows=4,
    )
    assert match_tokens(a, b).rows.tolist() == [3, -1, -1, 0, 1, 2]
    assert match_tokens(b, a).rows.tolist() == [3, 4, 5, 0]


def test_a_string_goes_before_a_role(tmp_path):
    a = spelled(tmp_path / "a", "gpt2", ["<s>", "<e>", *"abc"], {"eos_token": "<s>"}, rows=5)
    b = spelled(tmp_path / "b", "gpt2", ["<e>", "<s>", *"abc"], {"eos_token": "<e>"}, rows=5)
    assert match_tokens(a, b).rows.tolist() == [1, 0, 2, 3, 4]


# the same function on shared tokens


@pytest.mark.parametrize("name", FAMILIES + MORE)
def test_b_computes_the_same_on_shared_tokens(pair, name):
    a, b = pair(name)
    found = match_tokens(a, b)
    respelled = respell(b, a, found)
    verdict = verify_shared(b, respelled, found, dtype=torch.float64)
    assert verdict.same and verdict.difference <= EXACT and "shared tokens" in verdict.inputs
    assert (
        respelled.spec.fingerprint == a.spec.fingerprint != b.spec.fingerprint
        and respelled.parameters == a.parameters
    )
    assert respelled.config["vocab_size"] == 101 and respelled.where == b.where
    # the controls: another model, rows of two tokens swapped, rows of B in their old order
    number = [MINE.index(token) for token in "et"]
    assert not verify_shared(b, a, found, dtype=torch.float64).same
    assert not verify_shared(
        b, with_rows(respelled, swapped(*number)), found, dtype=torch.float64
    ).same
    assert not verify_shared(
        b, respelled, replace(found, rows=found.rows.roll(1)), dtype=torch.float64
    ).same


def test_only_swapped_rows_of_tokens_that_b_knows_matter(pair):
    a, b = pair("gpt2")
    found, respelled = match_tokens(a, b), respell(b, a)
    unknown = [MINE.index(token) for token in ONLY_A[:2]]
    assert verify_shared(
        b, with_rows(respelled, swapped(*unknown)), found, dtype=torch.float64
    ).same


def test_every_table_of_the_vocabulary_is_rearranged(pair):
    a, b = pair("bert-untied")
    found, respelled = match_tokens(a, b), respell(b, a)
    tables = set(_axes(b.spec))
    heads = {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "cls.predictions.bias",
    }
    assert tables == heads | {"bert.embeddings.word_embeddings.weight"}
    for name in b.weights:
        before, after = b.weights[name], respelled.weights[name]
        if name not in tables:
            assert torch.equal(before, after)
            continue
        assert (
            torch.equal(after[found.known], before[found.rows[found.known]])
            and not after[~found.known].any()
        )


@pytest.mark.parametrize("rows", [(71, 69), (71, 130), (200, 69)])
def test_rows_that_no_token_names(pair, rows):
    a, b = pair("gpt2", planted=True, rows=rows)
    found = align(a, b, ONE)
    both = found.shared
    assert both.unnamed == rows[0] - len(MINE) and both.tokens == len(MINE) - len(ONLY_A)
    assert worst(found.reference, found.aligned) <= 1e-6
    assert found.aligned.weights["transformer.wte.weight"].shape == (rows[0], 48)


def test_it_reads_with_a_s_tokenizer_and_its_ids(pair, tmp_path):
    a, b = pair("gpt2")
    a, b = (
        replace(a, config={**a.config, "eos_token_id": 4}),
        replace(b, config={**b.config, "eos_token_id": 9, "n_ctx": 7}),
    )
    respelled = respell(b, a)
    assert respelled.config["eos_token_id"] == 4 and respelled.config["n_ctx"] == 7
    check_same_tokenizers([a, respelled])
    assert tokenizer_of(respelled).get_vocab() != tokenizer_of(b).get_vocab()
    with pytest.raises(MismatchError, match="tokenizers of"):
        check_same_tokenizers([a, b])


# the whole way


@pytest.mark.parametrize("name", FAMILIES)
def test_a_planted_copy_is_recovered(pair, name):
    a, b = pair(name, planted=True)
    found = align(a, b, ONE)
    both = found.shared
    assert worst(found.reference, found.aligned) <= 1e-6 and found.after <= 1e-6
    assert (
        sm.verify(a, sm.average(found.reference, found.aligned), dtype=torch.float64).difference
        <= 1e-6
    )
    assert verify_shared(b, found.aligned, both, dtype=torch.float64).difference <= 1e-10
    # the controls: rearranged but not aligned; aligned but with rows of tokens in B's order
    assert worst(found.reference, sm.canonicalize(respell(b, a))) > 0.5
    wrong = sm.align(a, with_rows(respell(b, a), lambda tensor: tensor.roll(1, 0)), ONE)
    assert worst(wrong.reference, wrong.aligned) > 0.3


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_unknown_rows_are_no_evidence_and_become_a_s(pair, name):
    a, b = pair(name, planted=True)
    both = match_tokens(a, b)
    respelled = respell(b, a)
    generator = torch.Generator().manual_seed(0)

    def noisy(tensor):
        tensor[~both.known] = 100 * torch.randn(
            tensor[~both.known].shape, generator=generator, dtype=tensor.dtype
        )
        return tensor

    loud = with_rows(respelled, noisy)
    counted = sm.align(a, loud, replace(ONE, token_counts=both.counts))
    filled = fill(counted.aligned, counted.reference, both)
    assert (
        worst(counted.reference, filled) <= 1e-6 < worst(counted.reference, counted.aligned)
    )  # the control: before it is filled
    for table in _axes(filled.spec):
        assert torch.equal(
            filled.weights[table][~both.known], counted.reference.weights[table][~both.known]
        )
    if name != "bert":  # permutations are robust; rotations follow whatever is loudest
        blind = sm.align(a, loud, ONE)
        assert worst(blind.reference, fill(blind.aligned, blind.reference, both)) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_merge_loads_in_transformers_with_a_s_tokenizer_and_is_a(pair, tmp_path, name):
    import transformers

    a, b = pair(name, planted=True, dtype=torch.float32)
    found = align(a, b, sm.WeightMatching(generate_text=False))
    out = sm.save(
        sm.average(found.reference, found.aligned, evidence=found.evidence()), tmp_path / "merged"
    )
    kind = getattr(transformers, a.spec.architecture)
    merged, stock, other = (
        kind.from_pretrained(folder, local_files_only=True).eval()
        for folder in (out, a.path, b.path)
    )
    reader = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert reader.get_vocab() == {token: number for number, token in enumerate(MINE)}
    inputs = reader(TEXT[:60], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = [model(input_ids=inputs, labels=inputs).loss for model in (merged, stock)]
        assert torch.isfinite(losses[0]) and losses[0] == pytest.approx(losses[1].item(), abs=1e-4)
        logits, expected = (model(input_ids=inputs).logits for model in (merged, stock))
        assert (logits - expected).norm() <= 1e-4 * expected.norm()
        # the control: B itself, given A's ids, computes something else
        wrong = other(input_ids=inputs.clamp_max(79)).logits
        assert (wrong - expected[..., : wrong.shape[-1]]).norm() > 0.1 * expected.norm()
    card, record = (out / "README.md").read_text(), json.loads((out / "symmerge.json").read_text())
    assert (
        "63 tokens are shared (1 by role: [PAD] / <pad>); 6 that only this model knew are dropped"
        in card
    )
    assert (
        "the rows of 8 tokens that only" in card and "and 30 without a token, are its own" in card
    )
    assert [step["step"] for step in record["steps"][-1]["parents"][1]["steps"]][-1] == "fill"


def test_unrelated_models_keep_a_s_rows_and_b_s_function(pair):
    a, b = pair("gpt2")
    found = align(a, b, ONE)
    both = found.shared
    assert verify_shared(b, found.aligned, both, dtype=torch.float64).difference <= 1e-10
    merged = sm.average(found.reference, found.aligned)
    for table in _axes(merged.spec):
        rows = [model.weights[table] for model in (merged, found.reference)]
        assert torch.equal(rows[0][~both.known], rows[1][~both.known]) and not torch.equal(
            rows[0][both.known], rows[1][both.known]
        )


# matchings that look at more than weights


@pytest.mark.parametrize(
    "matching",
    [
        "symmerge",
        sm.LearnedMatching(steps=3, patience=1),
        sm.ActivationMatching(tries=1),
    ],
    ids=["own text", "learned", "activations"],
)
def test_text_is_written_once_b_knows_every_token(pair, monkeypatch, matching):
    a, b = pair("gpt2", planted=True, dtype=torch.float32)
    made = []
    monkeypatch.setattr(
        "symmerge.matching.weights.make_probe", spy(made, "symmerge.observation.probe")
    )
    found = align(a, b, matching)
    both = found.shared
    assert all(
        (model.weights[table][~both.known].norm(dim=-1) > 0).all()
        for model in made
        for table in _axes(model.spec)
    )
    assert verify_shared(b, found.aligned, both).same
    assert distance(found.reference, found.aligned) <= 1e-2
    again = sm.apply(
        found.solution.alignment, sm.canonicalize(respell(b, a))
    )  # both steps are in the alignment
    assert distance(found.aligned, fill(again, found.reference, both)) <= 1e-3
    if matching == "symmerge":
        assert made and [step.step for step in found.aligned.history].count("fill") == 2


def spy(seen, where):
    real = importlib.import_module(where).make_probe

    def make(models, **options):
        seen.extend(models)
        return real(models, **options)

    return make


def test_counts_that_are_given_still_count(pair):
    a, b = pair("gpt2", planted=True)
    given = torch.arange(101.0)
    seen = []
    solver = replace(ONE, token_counts=given)
    found = align(a, b, solver, progress=seen.append)
    both = found.shared
    assert (
        found.solution.settings["tokens_that_occur"]
        == int((given * both.counts > 0).sum())
        == both.tokens - 1
    )
    assert worst(found.reference, found.aligned) <= 1e-6


def test_too_few_shared_rows_do_not_determine_the_stream(pair):
    a, b = pair("llama")
    both, ready = match_tokens(a, b), [sm.canonicalize(model) for model in (a, respell(b, a))]
    few = both.counts * (torch.arange(101) < 20)

    def determined(frequencies):
        return Evidence(
            table=ready[0].spec,
            weights=(ready[0].weights, ready[1].weights),
            weighting=Weighting(),
            frequencies=frequencies,
            ignore_unseen=frequencies is not None,
        ).determined

    assert determined(None) and determined(both.counts) and not determined(few)


# the same tokenizer


def test_the_same_tokenizer_rearranges_nothing(tmp_path):
    a, b = (
        sm.load(checkpoint(tmp_path / str(seed), "gpt2", seed=seed, dtype=torch.float64))
        for seed in range(2)
    )
    both = match_tokens(a, b)
    assert (
        both.same
        and both.tokens == len(MINE)
        and torch.equal(both.rows, torch.arange(101))
        and not both.filled + both.dropped
    )
    assert respell(b, a) is b and fill(b, a, both) is b and both.counts.all()
    found, plain = align(a, b, ONE), sm.align(a, b, ONE)
    assert all(
        torch.equal(found.aligned.weights[name], plain.aligned.weights[name])
        for name in plain.aligned.weights
    )
    assert not {"respell", "fill"} & {step.step for step in found.aligned.history}


def test_one_token_more_is_not_the_same(tmp_path):
    a = spelled(tmp_path / "a", "gpt2", MINE, SPECIAL, rows=101)
    b = spelled(tmp_path / "b", "gpt2", [*MINE, "ä"], SPECIAL, rows=101)
    both = match_tokens(a, b)
    assert not both.same and both.dropped == 1 and respell(b, a) is not b


# gates and refusals


def test_the_gate_goes_by_shared_tokens(pair, tmp_path):
    a, b = pair("gpt2", planted=True, dtype=torch.float32)
    found = align(a, b, sm.WeightMatching(generate_text=False))
    both = found.shared
    check = gate(b, run=partial(verify_shared, shared=both))
    sm.save(found.aligned, tmp_path / "aligned", gate=check)
    assert json.loads((tmp_path / "aligned" / "symmerge.json").read_text())["verified"][
        "inputs"
    ].endswith("logits of the 63 shared tokens")
    with pytest.raises(FunctionChanged, match="nothing was written"):
        sm.save(with_rows(found.aligned, swapped(10, 11)), tmp_path / "wrong", gate=check)
    assert not (tmp_path / "wrong").exists()


def test_a_wrong_filling_is_refused(pair, monkeypatch):
    a, b = pair("gpt2")
    monkeypatch.setattr(
        module, "fill", lambda aligned, reference, shared: with_rows(aligned, swapped(10, 11))
    )
    with pytest.raises(FunctionChanged):
        align(a, b, ONE)


KINDS = {
    "byte-level": ["Ġthe", "Ġcat", "ing", "the"],
    "SentencePiece": ["▁the", "▁cat", "ing", "the"],
    "WordPiece": ["the", "cat", "##ing", "##s"],
    "unmarked": ["the", "cat", "ing", "#"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_other_kinds_are_refused(tmp_path, kind):
    assert kind_of(dict.fromkeys(KINDS[kind], 0)) == kind
    a = spelled(tmp_path / "a", "gpt2", KINDS[kind], {}, rows=4)
    for other in KINDS.keys() - {kind}:
        with pytest.raises(
            MismatchError,
            match=f"is {kind}, that of .* {other}: .*; give models with the same kind",
        ):
            match_tokens(a, spelled(tmp_path / other, "gpt2", KINDS[other], {}, rows=4))
    assert (
        match_tokens(a, spelled(tmp_path / "alike", "gpt2", KINDS[kind][::-1], {}, rows=4)).tokens
        == 4
    )


def test_a_few_marked_tokens_make_no_kind():
    assert kind_of({**dict.fromkeys(map(str, range(1000)), 0), "▁": 0, "##": 0}) == "unmarked"


def test_few_shared_tokens_are_warned_of_and_too_few_refused(tmp_path):
    words = [f"w{number}" for number in range(200)]
    a = spelled(tmp_path / "a", "gpt2", words, {}, rows=200)
    with pytest.warns(SymmergeWarning, match=r"has 99 of the 200 tokens of .*, less than 50%"):
        match_tokens(a, spelled(tmp_path / "b", "gpt2", [*words[:99], "x"], {}, rows=100))
    with pytest.raises(
        MismatchError,
        match=r"has 1 of the 200 tokens of .*: too few to match by .*; give models",
    ):
        match_tokens(a, spelled(tmp_path / "c", "gpt2", ["w0", "x"], {}, rows=2))


def test_half_is_enough_without_a_word(tmp_path, recwarn):
    words = [f"w{number}" for number in range(20)]
    match_tokens(
        spelled(tmp_path / "a", "gpt2", words, {}, rows=20),
        spelled(tmp_path / "b", "gpt2", words[10:], {}, rows=10),
    )
    assert not [one for one in recwarn if issubclass(one.category, SymmergeWarning)]


def test_models_without_tokens_or_tokenizers_are_refused(pair, tmp_path):
    a, b = pair("gpt2")
    for two in ((a, sm.load(small_model("gpt2"))), (sm.load(small_model("gpt2")), b)):
        with pytest.raises(MismatchError, match="has no tokenizer: copy the files"):
            match_tokens(*two)
    with pytest.raises(MismatchError, match="reads no tokens"):
        match_tokens(sm.load(small_model("vit")), b)
    with pytest.raises(
        MismatchError, match="has a token 70, the model knows 60: it is another model's"
    ):
        match_tokens(a, spelled(tmp_path / "small", "gpt2", MINE, SPECIAL, rows=60))


def test_positions_that_hang_on_the_pad_token_are_refused(tmp_path):
    a = spelled(tmp_path / "a", "roberta", MINE, SPECIAL, rows=101, pad_token_id=1)
    b = spelled(tmp_path / "b", "roberta", THEIRS, OTHER_ROLES, rows=80, pad_token_id=3)
    with pytest.raises(
        MismatchError,
        match="pad token, which is 3 in one and 1 in the other; give models",
    ):
        respell(b, a)
    bert = [
        spelled(tmp_path / f"bert-{pad}", "bert", *words, rows=101, pad_token_id=pad)
        for pad, words in ((1, (MINE, SPECIAL)), (3, (THEIRS, OTHER_ROLES)))
    ]
    assert (
        respell(bert[1], bert[0]).config["pad_token_id"] == 1
    )  # the control: these count from the first place


def test_recipes_that_are_no_symmetries_are_refused(pair):
    with pytest.raises(SymmetryError, match="not a symmetry"):
        align(*pair("gpt2"), RECIPES["correlation-ignore-heads"])

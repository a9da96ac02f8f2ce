"""Classifiers fine-tuned from external pretrained models."""

import json
import shutil

import pytest
from experiment_steps import Here
from fixtures import checkpoint, run

from symmerge.cli.options import experiments
from symmerge.evaluation.data.text import read_rows
from symmerge.lab.experiments.catalog import EXPERIMENTS
from symmerge.lab.experiments.cells import with_needs
from symmerge.lab.experiments.components import line, model, models
from symmerge.lab.experiments.external import gather_external
from symmerge.lab.experiments.plan import make_size
from symmerge.lab.experiments.runner import run as compute
from symmerge.lab.experiments.steps import _source
from symmerge.lab.experiments.store import Store
from symmerge.lab.experiments.tables import cells_of
from symmerge.models.model import load

WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Pretrained models of two seeds, as MultiBERTs; pairs that no classifier starts from."""
    folder = tmp_path_factory.mktemp("home")
    kinds = {
        "bert": "bert-pretraining",
        "gpt2": "gpt2",
        "vit": "vit",
        "classifier": "bert-classifier",
        "roberta": "roberta",
        "roformer": "roformer",
    }
    for seed in (0, 1):
        for name, kind in kinds.items():
            checkpoint(folder / f"{name}-{seed}", kind, seed=seed)
        checkpoint(folder / f"short-{seed}", "bert", seed=seed, max_position_embeddings=40)
        checkpoint(folder / f"few-words-{seed}", "bert", seed=seed, vocab_size=20)
        mute = checkpoint(folder / f"mute-{seed}", "bert", seed=seed)
        for file in mute.glob("tokenizer*"):
            file.unlink()
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch, home):
    monkeypatch.setattr(experiments, "LocalEngine", lambda workers, heavy: Here())
    monkeypatch.chdir(home)


def verb(*words, out, size="smoke", expect=0):
    return run(
        "experiment", "v-tasks", "--models", *words, "--out", out, "--size", size, expect=expect
    )


def size_of(*names, size="smoke", **others):
    return make_size(
        size,
        external=gather_external("v-tasks", EXPERIMENTS["v-tasks"].accepts, names, None, None),
        **others,
    )


def keys(*names):
    return {
        cell.key: cell.label
        for cell in with_needs(cells_of(EXPERIMENTS["v-tasks"].tables(size_of(*names))))
    }


def words_of(folder):
    return load(folder).weights[f"bert.{WORDS}"]


def test_classifiers_begin_from_the_models_given(home, tmp_path):
    out, moved = tmp_path / "out", tmp_path / "moved"
    said = verb("bert-0", "bert-1", "--dry-run", out=out).stdout
    assert "topics-bert, bert-0 (" in said and "8 cells\t\t8 to do" in said and not out.exists()
    said = verb("bert-0", "bert-1", out=out).stdout
    assert "python-topics" in said and "8 cells computed, 0 reused" in said
    found = json.loads((out / "results.json").read_text())
    assert (
        found["external"]["architecture"] == "BertForPreTraining"
        and found["external"]["test"] is found["external"]["train"] is None
        and not found["failed"]
    )
    assert (
        "fine-tuned by our recipes" in found["tables"][0]["differs"]
        and "models given" in (out / "page.html").read_text()
    )

    # After a dozen steps a classifier is still near the model it began from, not near the other.
    size = size_of("bert-0", "bert-1")
    lines = cells_of(EXPERIMENTS["v-tasks"].tables(size))
    tuned = [words_of(out / "cells" / cell.key / "model") for cell in lines[0].needs]
    bases = [words_of(home / f"bert-{seed}") for seed in (0, 1)]
    distances = [[float((end - base).norm() / base.norm()) for base in bases] for end in tuned]
    assert max(distances[0][0], distances[1][1]) < 0.2 < 1 < min(distances[0][1], distances[1][0])
    assert all(
        cell.settings["recipe"] == "topics-bert"
        and not {"test", "task"} & cell.settings.keys()
        and "places" not in cell.beside
        for cell in lines
    )

    # The same files elsewhere, after a run: finished cells count, and a lost classifier is trained
    # again from the new place, to the same bytes.
    copies = [
        str(shutil.copytree(home / f"bert-{seed}", moved / f"base-{seed}")) for seed in (0, 1)
    ]
    before = (out / "results.json").read_bytes()
    assert (
        "0 cells computed, 8 reused" in verb(*copies, "--resume", out=out).stdout
        and (out / "results.json").read_bytes() == before
    )
    for cell in (lines[0], lines[0].needs[0]):
        shutil.rmtree(out / "cells" / cell.key)
    assert (
        "2 cells computed, 6 reused" in verb(*copies, "--resume", out=out).stdout
        and (out / "results.json").read_bytes() == before
    )
    assert (
        "of other models or other data"
        in verb("bert-1", "bert-0", "--resume", out=out, expect=2).stderr
    )


def test_models_that_the_experiment_trained_itself_give_its_own_numbers(tmp_path):
    def plain(size):
        return cells_of(EXPERIMENTS["v-tasks"].tables(size))[0]

    own = plain(make_size("smoke"))
    found = compute([own], Store(tmp_path / "own"), Here(), attempts=1)
    places = [str(tmp_path / "own/cells" / tuned.needs[0].key / "model") for tuned in own.needs]
    others = {
        external: plain(size_of(*names))
        for external, names in {"same": places, "swapped": places[::-1]}.items()
    }
    again = compute(list(others.values()), Store(tmp_path / "external"), Here(), attempts=1)
    assert (
        again.results[others["same"].key]
        == found.results[own.key]
        != again.results[others["swapped"].key]
    )


def test_keys_are_those_of_what_is_begun_from(home, tmp_path):
    before = keys("bert-0", "bert-1")
    copies = [shutil.copytree(home / f"bert-{seed}", tmp_path / f"bert-{seed}") for seed in (0, 1)]
    assert keys(*map(str, copies)).keys() == before.keys()
    weights = copies[1] / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # one bit of one weight
    same = [before[key] for key in before.keys() & keys(*map(str, copies)).keys()]
    assert len(same) == 2 and all(
        "bert-0" in label for label in same
    )  # the other model, and what is fine-tuned from it
    trained = with_needs(cells_of(EXPERIMENTS["v-tasks"].tables(make_size("smoke"))))
    assert not before.keys() & {cell.key for cell in trained}


def test_tables_in_a_folder_and_rows_that_are_too_long(tmp_path):
    data = tmp_path / "data"
    (data / "sst2").mkdir(parents=True)
    lines = [
        f"{at % 2}\t{'a good film' if at % 2 else 'a bad film'} number {at}" for at in range(60)
    ]
    for file in ("train.tsv", "dev.tsv"):
        (data / "sst2" / file).write_text("\n".join([*lines, "1\t" + "long " * 60]))
    size = size_of("bert-0", "bert-1", data=data)
    pair = tuple(
        model(size, "sst2-bert", seed, base=base) for seed, base in enumerate(models(size, ""))
    )
    cells = [line(size, pair, method) for method in ("none", "correlation")]
    outcome = compute(cells, Store(tmp_path / "out"), Here(), attempts=1)
    assert (
        outcome.failed == {}
        and outcome.results[cells[0].key]["losses"] != outcome.results[cells[1].key]["losses"]
    )
    _, source = _source(
        {**cells[0].settings, **cells[0].beside},
        [load(tmp_path / "out/cells" / pair[0].key / "model")],
        "test",
    )
    assert len(read_rows(source).texts) == 60

    said = verb(
        "bert-0",
        "bert-1",
        "--data-dir",
        data,
        "--device",
        "cpu",
        out=tmp_path / "none",
        size="published",
        expect=2,
    ).stderr
    assert (
        "needs the data of cola-bert" in said
        and "cola/train.tsv is missing" in said
        and not (tmp_path / "none").exists()
    )
    said = verb(
        "bert-0", "bert-1", "--data-dir", data, "--dry-run", out=tmp_path / "none", size="published"
    ).stdout
    assert (
        all(f"{name}-bert, bert-0 (" in said for name in ("sst2", "cola", "mrpc", "rte"))
        and "books-bert" not in said
    )


BEGINS = "a classifier on python-topics starts from a stock model of the type bert, for masked-lm"
REFUSED = {
    "text that goes on": (("gpt2-0", "gpt2-1"), ("is a GPT2LMHeadModel, for causal-lm", BEGINS)),
    "pictures": (("vit-0", "vit-1"), ("is a ViTForImageClassification", BEGINS)),
    "classifiers": (
        ("classifier-0", "classifier-1"),
        ("is a BertForSequenceClassification, for text-classification", BEGINS),
    ),
    "another kind": (
        ("roberta-0", "roberta-1"),
        ("is a RobertaForMaskedLM, for masked-lm", BEGINS),
    ),
    "rotary": (("roformer-0", "roformer-1"), ("is a RoFormerForMaskedLM", BEGINS)),
    "two kinds": (("bert-0", "gpt2-1"), ("models of different architectures cannot be merged",)),
    "no tokenizer": (("mute-0", "mute-1"), ("mute-0 has no tokenizer",)),
    "another's tokenizer": (
        ("few-words-0", "few-words-1"),
        ("the model knows 20: it is another model's",),
    ),
    "too few positions": (
        ("short-0", "short-1"),
        ("short-0 takes 40 tokens, and python-topics has rows of 48",),
    ),
    "one": (("bert-0",), ("v-tasks needs 2 models or more, 1 given",)),
    "measured on": (
        ("bert-0", "bert-1", "--test-data", "python-docs"),
        ("--test-data is for models that are measured as they are", "--data-dir FOLDER"),
    ),
    "looked at": (
        ("bert-0", "bert-1", "--train-data", "python-docs"),
        ("--train-data is for models that are measured as they are",),
    ),
    "seeds": (("bert-0", "bert-1", "--seeds", "3"), ("--seeds is for models that are trained",)),
}


@pytest.mark.parametrize(
    ("case", "more"), [*((case, ()) for case in REFUSED), ("classifiers", ("--dry-run",))]
)
def test_what_is_refused(case, more, tmp_path):
    words, expected = REFUSED[case]
    said = verb(*words, *more, out=tmp_path / "out", expect=2).stderr
    assert (
        all(part in said for part in expected)
        and said.count("\n") <= 1
        and not (tmp_path / "out").exists()
    )

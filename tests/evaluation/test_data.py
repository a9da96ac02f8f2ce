"""Data: the same samples from every kind of source, embedded data, self-generated text, the hub."""

import json
import lzma
import sys

import numpy as np
import pytest
import torch
from fixtures import checkpoint
from task_data import ROWS, TEXT, evaluate, only_batch

from symmerge.evaluation.data.embedded import (
    MAX_CHARACTERS,
    TOPICS,
    digits,
    python_docs,
    python_topics,
)
from symmerge.evaluation.data.self_generated import longest_text, sample_text
from symmerge.evaluation.data.text import read_rows, read_text
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.models.model import load
from symmerge.verification.modules import full_module

# embedded data


def test_embedded_splits_are_parts_of_a_whole():
    (train, of_train), (test, of_test) = digits("train"), digits("test")
    assert (
        len(train) + len(test) == 1797
        and train.min() >= 0
        and train.max() == 1
        and train.dtype == np.float32
        and of_test.dtype == np.int64
    )
    assert set(of_train) == set(of_test) == set(range(10))
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in test}
    assert (digits("test")[0] == test).all()
    assert (
        len(python_docs("train"))
        == 9 * (len(python_docs("train")) + len(python_docs("test"))) // 10
    )
    assert python_docs("test") not in python_docs("train")


# sources


def test_a_compressed_text_is_the_same_text(model, text):
    packed = text.with_suffix(".txt.xz")
    packed.write_bytes(lzma.compress(text.read_bytes()))
    tasks = [make_task("clm", str(file), [model("gpt2")], samples=5) for file in (text, packed)]
    assert torch.equal(*(only_batch(task)["input_ids"] for task in tasks))


def test_tables_in_every_form_are_the_same_rows(model, table, tmp_path):
    forms = {"named.tsv": "label\ttext\n" + table.read_text()}
    forms["rows.csv"] = "text,label\n" + "".join(f'"{text}",{label}\n' for label, text in ROWS)
    forms["rows.jsonl"] = "".join(
        json.dumps({"sentence": text, "label": label, "id": 7}) + "\n" for label, text in ROWS
    )
    wanted = only_batch(make_task("text", str(table), [model("bert-classifier")]))
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        batch = only_batch(make_task("text", str(tmp_path / name), [model("bert-classifier")]))
        assert all(torch.equal(wanted[key], batch[key]) for key in wanted), name


def test_labels_by_name(model, tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_text("label\ttext\nneutral\tab\nbad\tabc\ngood\tabcd\n")
    batch = only_batch(make_task("text", str(file), [model("bert-classifier")]))
    assert batch["labels"].tolist() == [2, 0, 1]  # by the alphabet, where the model has no names
    names = {"good": 0, "neutral": 1, "bad": 2}
    named = checkpoint(
        tmp_path / "named",
        "bert-classifier",
        label2id=names,
        id2label={number: name for name, number in names.items()},
    )
    batch = only_batch(make_task("text", str(file), [load(named)]))
    assert batch["labels"].tolist() == [1, 2, 0]


def test_a_folder_of_pictures_is_the_array(model, pictures):
    a = model("vit")
    array, folder = (
        make_task("image", str(pictures / name), [a]) for name in ("pictures.npz", "folder")
    )
    assert evaluate(array, a) == pytest.approx(evaluate(folder, a), abs=1e-6)


def test_rows_of_a_table_are_a_text_for_language_models(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": TEXT[:50]}) + "\n" for _ in range(9))
    )
    batch = only_batch(make_task("clm", str(tmp_path / "rows.jsonl"), [model("gpt2")]))
    assert batch["input_ids"].shape == ((51 * 9 - 1) // 64, 64)


def test_embedded_text(model):
    task = make_task("clm", "python-docs", [model("gpt2")], samples=3)
    assert task.to_record().to_json() == {
        "name": "clm",
        "data": "python-docs",
        "samples": 3,
        "seed": 0,
        "metrics": ["loss", "perplexity", "bits_per_character"],
        "block": 64,
    }


@pytest.mark.parametrize(("name", "task"), [("gpt2", "clm"), ("bert", "mlm")])
def test_self_generated_text(model, name, task):
    """Both parents sample text; a parent predicts its own text better than the other does."""
    a, b = model(name), model(name, seed=1)
    both = make_task(task, "self", [a, b], samples=12, seed=3)
    assert both.samples == 12 and evaluate(both, a) == evaluate(
        make_task(task, "self", [a, b], samples=12, seed=3), a
    )
    mine = make_task(task, "self", [a], samples=12)
    assert evaluate(mine, a)["loss"] < evaluate(mine, b)["loss"]
    assert mine.metrics == ("loss", "perplexity" if task == "clm" else "pseudo_perplexity")


def test_topics_of_the_documentation_are_rows_with_labels():
    train, test = (python_topics(split) for split in ("train", "test"))
    assert 3 < len(train) / len(test) < 5 and {label for label, _ in train} == {
        label for label, _ in test
    } == set(range(TOPICS))
    assert max(len(text.encode()) for _, text in train + test) <= MAX_CHARACTERS
    rows = read_rows("python-topics:train")
    assert (
        rows.labels == tuple(label for label, _ in train)
        and rows.texts[0] == (train[0][1],) != read_rows("python-topics").texts[0]
    )
    assert read_rows("python-topics", labelled=False).labels is None and test[0][1] in read_text(
        "python-topics"
    )


def test_much_text_is_sampled_in_chunks(model, monkeypatch):
    written = model("gpt2")
    module = full_module(written, torch.float32)
    once = sample_text(written, module, rows=3, length=8, seed=0)
    per_row = 8 * 2 * module.config.num_hidden_layers * module.config.hidden_size * 4
    name = "symmerge.evaluation.data.self_generated.CACHE_BYTES"
    monkeypatch.setattr(name, 3 * per_row)
    chunked = sample_text(written, module, rows=7, length=8, seed=0)
    assert chunked.shape == (7, once.shape[1])
    assert torch.equal(chunked[:3], once) and not torch.equal(
        chunked[3:6], once
    )  # the second part is other text, not the first once more


@pytest.mark.parametrize("name", ["mpt", "llama", "gpt2"])
def test_no_text_is_longer_than_the_model_allows(name):
    field = {"mpt": "max_seq_len", "gpt2": "n_positions"}.get(name, "max_position_embeddings")
    model = load(small_model(name, **{field: 9}))
    text = sample_text(model, full_module(model, torch.float32), rows=2, length=30, seed=0)
    assert text.shape[1] == longest_text(model, 30) <= 9
    assert longest_text(load(small_model(name)), 30) == 30  # the control


# Hugging Face data sets


def test_a_folder_of_the_hub(model, tmp_path, table):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    rows = datasets.Dataset.from_dict(
        {"sentence": [text for _, text in ROWS], "label": [label for label, _ in ROWS]}
    )
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows.select([0]), "validation": rows}).save_to_disk(
        tmp_path / "several"
    )
    wanted = only_batch(make_task("text", str(table), [model("bert-classifier")]))
    for folder in ("one", "several"):
        batch = only_batch(make_task("text", str(tmp_path / folder), [model("bert-classifier")]))
        assert all(torch.equal(wanted[key], batch[key]) for key in wanted)


def test_pictures_of_the_hub(model, tmp_path, pictures):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    files = sorted((pictures / "folder").rglob("*.png"))
    rows = {
        "image": [str(file) for file in files],
        "label": [int(file.parent.name) for file in files],
    }
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(
        tmp_path / "hub"
    )
    a = model("vit")
    folder, hub = (
        make_task("image", str(path), [a]) for path in (pictures / "folder", tmp_path / "hub")
    )
    assert evaluate(folder, a) == evaluate(hub, a)


class Rows(list):
    column_names = ("text", "label")


def test_hub_names_and_splits(model, monkeypatch):
    """Without `datasets`: what is asked of it, and which split is taken."""

    class Fake:
        @staticmethod
        def load_dataset(name, config):
            assert (name, config) == ("someone/glue", "sst2")
            return {
                "train": Rows(),
                "validation": Rows({"text": "ab", "label": label} for label in (0, 2)),
            }

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    assert make_task("text", "hf:someone/glue:sst2", [model("bert-classifier")]).samples == 2

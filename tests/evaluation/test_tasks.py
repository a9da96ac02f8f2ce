"""Tasks: losses and metrics against oracles, the same numbers in any order, and the same samples from every kind of source."""

import json
import lzma
import math
import random
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from fixtures import MEAN, STD, checkpoint
from scipy.stats import spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from symmerge.evaluation.data.embedded import (
    MAX_CHARACTERS,
    TOPICS,
    digits,
    python_docs,
    python_topics,
)
from symmerge.evaluation.data.self_generated import sample_text
from symmerge.evaluation.data.text import read_rows, read_text
from symmerge.evaluation.tasks import make_task
from symmerge.evaluation.tasks.metrics import accuracy, f1, matthews, spearman
from symmerge.models.model import load
from symmerge.verification.modules import full_module

ROWS = [
    (0, "a short one"),
    (2, "quite a bit longer, this one is"),
    (1, "b"),
    (0, "the last of them"),
    (1, "and 1 more"),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(name, seed=0, **changes):
        return load(
            checkpoint(
                root / "-".join([name, str(seed), *map(str, changes.values())]),
                name,
                seed=seed,
                **changes,
            )
        )

    return make


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_text("".join(f"{label}\t{text}\n" for label, text in ROWS))
    return file


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def pictures(tmp_path):
    """The same twenty pictures as an array and as files in folders."""
    from PIL import Image

    images, labels = (
        np.random.RandomState(0).randint(0, 256, (20, 16, 16, 3), np.uint8),
        np.arange(20) % 5,
    )
    np.savez(tmp_path / "pictures.npz", x=images, y=labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "folder" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folder" / str(label) / f"{number:02}.png")
    return tmp_path


def evaluate(task, model):
    return task.evaluate(full_module(model, torch.float32))


def only_batch(task):
    """Its one batch."""
    (batch,) = task.batches
    return batch


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


# metrics


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_those_of_scikit_learn(classes):
    generator = np.random.RandomState(classes)
    labels = generator.randint(0, classes, 200)
    predicted = np.where(generator.rand(200) < 0.6, labels, generator.randint(0, classes, 200))
    assert accuracy(predicted, labels) == np.mean(predicted == labels)
    assert f1(predicted, labels, classes) == pytest.approx(
        f1_score(labels, predicted, average="binary" if classes == 2 else "macro"), abs=1e-12
    )
    assert matthews(predicted, labels, classes) == pytest.approx(
        matthews_corrcoef(labels, predicted), abs=1e-12
    )
    values = np.round(generator.randn(200), 1)  # with ties
    assert spearman(values, labels + values) == pytest.approx(
        spearmanr(values, labels + values).statistic, abs=1e-12
    )


def test_undefined_metrics_are_zero():
    same, other = np.zeros(4), np.array([0.0, 1.0, 0.0, 1.0])
    assert f1(same, other, 2) == matthews(same, other, 2) == spearman(same, other) == 0
    assert matthews(other, other, 2) == f1(other, other, 2) == spearman(other, other) == 1


# losses against transformers' own


@pytest.mark.parametrize("name", ["bert", "bert-untied", "roberta", "bert-pretraining"])
def test_masked_loss_is_that_of_transformers(model, text, name):
    a = model(name)
    task = make_task("mlm", str(text), [a], samples=8)
    module = full_module(a, torch.float32)
    (batch,) = task.batches
    (logits,) = (
        value
        for key, value in module(input_ids=batch["input_ids"]).items()
        if "logits" in key and value.ndim == 3
    )
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    metrics = task.evaluate(module)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    bits = loss / math.log(2)
    assert metrics["pseudo_perplexity"] == pytest.approx(2**bits, rel=1e-5)


def test_masks_hide_what_is_asked(model, text):
    a = model("bert")
    task = make_task("mlm", str(text), [a], samples=20)
    batch = only_batch(task)
    asked = batch["labels"] != -100
    assert 0.1 < asked.float().mean() < 0.2
    assert (
        (batch["input_ids"][asked] == 4).all()
        and not (batch["input_ids"][~asked] == 4).any()
        and not (batch["labels"] == 4).any()
    )
    again = only_batch(make_task("mlm", str(text), [a], samples=20))
    assert all(torch.equal(batch[name], again[name]) for name in batch)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_causal_loss_is_that_of_transformers(model, text, name):
    a = model(name)
    task = make_task("clm", str(text), [a], samples=8)
    module = full_module(a, torch.float32)
    (batch,) = task.batches
    loss = module(**batch).loss.item()
    metrics = task.evaluate(module)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["bits_per_character"] == pytest.approx(
        loss / math.log(2), abs=1e-5
    )  # its tokenizer has a token per character


def test_bits_count_characters_not_tokens(model, text):
    task = make_task("clm", str(text), [model("gpt2")], samples=8)
    halved = replace(task, readout=replace(task.readout, characters_per_token=2.0))
    ones, twos = (evaluate(one, model("gpt2")) for one in (task, halved))
    assert (
        twos["bits_per_character"] == ones["bits_per_character"] / 2
        and twos["loss"] == ones["loss"]
    )


def test_text_is_read_without_its_padding(model, table):
    """Each row alone, without padding, through transformers: the same loss; what was filled up does not count."""
    a = model("bert-classifier")
    task = make_task("text", str(table), [a])
    (batch,) = task.batches
    assert (batch["attention_mask"] == 0).any()
    module = full_module(a, torch.float32)
    alone = []
    for tokens, types, mask, label in zip(
        *(batch[key] for key in ("input_ids", "token_type_ids", "attention_mask", "labels")),
        strict=True,
    ):
        real = mask.bool()
        alone.append(
            module(
                input_ids=tokens[real][None], token_type_ids=types[real][None], labels=label[None]
            ).loss.item()
        )
    assert task.evaluate(module)["loss"] == pytest.approx(np.mean(alone), abs=1e-5)
    lengths = [len(text) + 2 for _, text in ROWS]
    assert sorted(batch["attention_mask"].sum(1).tolist()) == sorted(lengths)


def test_pairs_of_texts(model, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"premise": "ab", "hypothesis": "cde", "label": 1}\n')
    batch = only_batch(make_task("text", str(file), [model("bert-classifier")]))
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    batch = only_batch(
        make_task("text", str(file), [model("roberta-classifier", type_vocab_size=1)])
    )
    assert "token_type_ids" not in batch


def test_regression(model, table):
    a = model("bert-classifier", num_labels=1)
    task = make_task("text", str(table), [a])
    module = full_module(a, torch.float32)
    (batch,) = task.batches
    metrics = task.evaluate(module)
    outputs = (
        module(**{key: value for key, value in batch.items() if key != "labels"})
        .logits[:, 0]
        .detach()
    )
    assert task.metrics == ("loss", "spearman")
    assert metrics["loss"] == pytest.approx(
        (outputs - batch["labels"]).square().mean().item(), abs=1e-5
    )
    assert metrics["spearman"] == pytest.approx(
        spearmanr(outputs, batch["labels"]).statistic, abs=1e-12
    )


def test_images_are_normalised_as_the_processor_says(model, pictures):
    a = model("vit")
    task = make_task("image", str(pictures / "pictures.npz"), [a])
    (batch,) = task.batches
    metrics = task.evaluate(full_module(a, torch.float32))
    assert metrics["loss"] == pytest.approx(
        full_module(a, torch.float32)(**batch).loss.item(), abs=1e-5
    )
    assert 0 <= metrics["accuracy"] < metrics["top5"] == 1  # there are five classes
    with np.load(pictures / "pictures.npz") as file:
        raw = (file["x"].transpose(0, 3, 1, 2) / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(
            STD, (3, 1, 1)
        )
        np.savez(pictures / "ready.npz", pixel_values=raw.astype(np.float32), labels=file["y"])
    normalized = make_task("image", str(pictures / "ready.npz"), [a])
    assert evaluate(normalized, a)["loss"] == pytest.approx(metrics["loss"], abs=1e-5)


def test_digits_in_colour_and_grey(model):
    for channels in (1, 3):
        a = model("vit", image_size=8, num_channels=channels, num_labels=10)
        (a.path / "preprocessor_config.json").write_text(
            json.dumps(
                {
                    "image_processor_type": "ViTImageProcessor",
                    "size": {"height": 8, "width": 8},
                    "image_mean": [0.5] * channels,
                    "image_std": [0.5] * channels,
                }
            )
        )
        batch = only_batch(make_task("image", "digits", [a], samples=50))
        assert (
            batch["pixel_values"].shape == (50, channels, 8, 8)
            and (batch["pixel_values"] >= -1).all()
            and batch["pixel_values"].max() == 1
        )


# the same samples, whatever the order


def test_no_order_of_rows_changes_a_number(model, table):
    a = model("bert-classifier")
    lines = table.read_text().splitlines(keepends=True) * 20
    lines = [line.replace("one", f"one {number}") for number, line in enumerate(lines)]
    table.write_text("".join(lines))
    first = evaluate(make_task("text", str(table), [a]), a)
    random.Random(1).shuffle(lines)
    table.write_text("".join(lines))
    task = make_task("text", str(table), [a])
    assert evaluate(task, a) == first
    assert (
        len(task.batches) > 2
        and evaluate(replace(task, batches=list(task.batches)[::-1]), a) == first
    )
    table.write_text("".join([lines[0].replace("0\t", "1\t").replace("2\t", "0\t"), *lines[1:]]))
    assert (
        evaluate(make_task("text", str(table), [a]), a) != first
    )  # the control: another label is noticed


def test_no_order_of_pictures_changes_a_number(model, pictures):
    a = model("vit")
    first = evaluate(make_task("image", str(pictures / "pictures.npz"), [a]), a)
    with np.load(pictures / "pictures.npz") as file:
        order = np.random.RandomState(1).permutation(20)
        np.savez(pictures / "shuffled.npz", x=file["x"][order], y=file["y"][order])
    assert evaluate(make_task("image", str(pictures / "shuffled.npz"), [a]), a) == first


def test_seeds_choose_samples(model, text):
    a = model("gpt2")
    tokens = [
        only_batch(make_task("clm", str(text), [a], samples=5, seed=seed))["input_ids"]
        for seed in (0, 0, 1)
    ]
    assert (
        torch.equal(tokens[0], tokens[1])
        and not torch.equal(tokens[0], tokens[2])
        and tokens[0].shape == (5, 64)
    )


def test_batches_go_by_length(model, table):
    table.write_text("".join(f"0\t{'a' * (1 + number * 7 % 50)}\n" for number in range(100)))
    batches = make_task("text", str(table), [model("bert-classifier")]).batches
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert len(lengths) == 4 and lengths == sorted(lengths) and lengths[0] < lengths[-1] == 52


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
def test_text_of_their_own(model, name, task):
    """Both parents write; what a parent wrote it expects better than what is random."""
    a, b = model(name), model(name, seed=1)
    both = make_task(task, "self", [a, b], samples=12, seed=3)
    assert both.samples == 12 and evaluate(both, a) == evaluate(
        make_task(task, "self", [a, b], samples=12, seed=3), a
    )
    mine = make_task(task, "self", [a], samples=12)
    assert evaluate(mine, a)["loss"] < evaluate(mine, b)["loss"]
    assert mine.metrics == ("loss", "perplexity" if task == "clm" else "pseudo_perplexity")


# Hugging Face data sets


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


def test_much_text_is_written_in_parts(model, monkeypatch):
    written = model("gpt2")
    module = full_module(written, torch.float32)
    once = sample_text(written, module, rows=3, length=8, seed=0)
    monkeypatch.setattr("symmerge.evaluation.data.self_generated.MAX_ROWS", 3)
    chunked = sample_text(written, module, rows=7, length=8, seed=0)
    assert chunked.shape == (7, once.shape[1])
    assert torch.equal(chunked[:3], once) and not torch.equal(
        chunked[3:6], once
    )  # the second part is other text, not the first once more


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

"""Losses and metrics against oracles; the order of samples does not change a number."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import MEAN, STD
from scipy.stats import spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from task_data import ROWS, evaluate, only_batch

from symmerge.evaluation.tasks import make_task, preprocessing
from symmerge.evaluation.tasks.metrics import accuracy, f1, matthews, spearman
from symmerge.models.model import load
from symmerge.verification.modules import full_module

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


def test_a_text_is_tokenized_once_and_again_by_another_tokenizer(model, text, tmp_path):
    """Every pair and method is measured on one text; what is remembered goes by content."""

    def tokens(a):
        return torch.cat([b["input_ids"] for b in make_task("clm", str(text), [a]).batches])

    preprocessing._encoded.cache_clear()
    a, b = model("gpt2"), model("gpt2", seed=1)
    assert torch.equal(tokens(a), tokens(b))
    assert preprocessing._encoded.cache_info().misses == 1
    other = Path(shutil.copytree(a.path, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    known = content["model"]["vocab"]
    known["a"], known["e"] = known["e"], known["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert not torch.equal(tokens(a), tokens(load(other)))


def test_bits_count_characters_not_tokens(model, text):
    task = make_task("clm", str(text), [model("gpt2")], samples=8)
    halved = replace(task, readout=replace(task.readout, characters_per_token=2.0))
    ones, twos = (evaluate(one, model("gpt2")) for one in (task, halved))
    assert (
        twos["bits_per_character"] == ones["bits_per_character"] / 2
        and twos["loss"] == ones["loss"]
    )


def test_text_is_read_without_its_padding(model, table):
    """Each row alone, without padding, has the same loss: padding does not count."""
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

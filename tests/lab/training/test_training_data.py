"""Data sets in a folder: missing files are named, preparation is done once; classifiers."""

import colorsys
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

import symmerge as sm
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.lab.training import acceleration
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment
from symmerge.lab.training.files import INSTALLED
from symmerge.lab.training.initialization import Origin
from symmerge.lab.training.loop import train
from symmerge.lab.training.prepared import held_out_data, training_data
from symmerge.lab.training.recipes import TRAINING, with_changes
from symmerge.lab.training.reinitialization import open_model
from symmerge.lab.training.tokens import cached_tokens, chunks, tokenize, train_tokenizer

SMALL_VIT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}
SMALL_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_inner": 16, "n_positions": 16}
SMALL_BERT = {**SMALL_VIT, "max_position_embeddings": 24}
NEUTRAL = torch.full((1, RANDOM_NUMBERS), 0.5)  # cropped in the middle, not flipped, no jitter


@pytest.fixture
def words():
    names = np.random.default_rng(0).choice(
        ["time", "light", "water", "stone", "and", "the", "of", "\n"], 3000
    )
    return " ".join(names)


# what is missing


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, recipe in TRAINING.items()
        if recipe.data not in INSTALLED and recipe.task != "text"
    ],
)
def test_missing_data_is_named(name, root, tmp_path):
    with pytest.raises(
        DataError,
        match=r"data/[\w.-]+ is missing.*put it there.*, or give another folder",
    ):
        train(TRAINING[name], 0, tmp_path / "out", data=root)
    with pytest.raises(
        DataError,
        match=r"does not come with the installation: put .* into a folder and give it with --data",
    ):
        held_out_data(TRAINING[name])
    assert not (tmp_path / "out").exists()


def test_a_folder_without_write_permission_stays_as_it_is(root, monkeypatch, tmp_path, words):
    monkeypatch.delenv("SYMMERGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (root / "tinyshakespeare.txt").write_text(words)
    root.chmod(0o555)
    try:
        assert (
            held_out_data(TRAINING["shakespeare-gpt2"], root).startswith(str(tmp_path / "home"))
            and len(list(root.iterdir())) == 1
        )
    finally:
        root.chmod(0o755)
    assert held_out_data(TRAINING["shakespeare-gpt2"], root) == str(
        root / "prepared/shakespeare-test.txt"
    )


# pictures


def save_cifar(root, train=40, test=12, **others):
    generator = np.random.default_rng(0)
    parts = {
        f"x_{part}": generator.integers(0, 256, (count, 32, 32, 3), np.uint8)
        for part, count in (("train", train), ("test", test))
    }
    np.savez(
        root / "cifar10.npz", **parts, y_train=np.arange(train) % 10, y_test=np.arange(test) % 10
    )
    return parts


@pytest.mark.parametrize("name", ["cifar10-vit", "cifar10-vit-best"])
def test_cifar_is_prepared_and_measured(name, root, tmp_path):
    parts = save_cifar(root)
    recipe = with_changes(
        TRAINING[name],
        config=SMALL_VIT,
        schedule={"steps": 4, "batch_size": 4, "evaluate_every": 2 if name.endswith("best") else 0},
    )
    out = train(recipe, 0, tmp_path / "out", data=root)
    found = json.loads((out / "metrics.json").read_text())
    assert [look["step"] for look in found["curve"]] == ([2, 4] if name.endswith("best") else [])
    with np.load(tmp_path / "cache/cifar10-test.npz") as file:
        assert {image.tobytes() for image in file["images"]} == {
            image.tobytes() for image in parts["x_test"]
        }
        assert not np.array_equal(file["images"], parts["x_test"])  # shuffled
    task = make_task("image", held_out_data(recipe, root), [sm.load(out)], samples=12)
    assert abs(task.evaluate(open_model(out))["loss"] - found["held_out"]["loss"]) < 1e-4
    assert training_data(recipe, root) == str(tmp_path / "cache/cifar10-augmented.npz")
    with (
        np.load(training_data(recipe, root)) as new,
        np.load(tmp_path / "cache/cifar10-train.npz") as old,
    ):
        assert np.array_equal(new["labels"], old["labels"]) and not np.array_equal(
            new["images"], old["images"]
        )


def test_augmentation_is_what_it_says():
    pictures = torch.rand(1, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(augment(pictures, NEUTRAL), pictures, atol=1e-6)
    flipped, moved, turned, bright = (NEUTRAL.clone() for _ in range(4))
    flipped[0, 2], moved[0, 0], turned[0, 6], bright[0, 3] = 0.1, 0.0, 1.0, 1.0
    assert torch.allclose(augment(pictures, flipped), pictures.flip(2), atol=1e-6)
    shifted = augment(pictures, moved)
    assert torch.allclose(shifted[:, 4:], pictures[:, :4], atol=1e-6) and not shifted[:, :4].any()
    assert torch.allclose(augment(pictures, bright), (1.4 * pictures).clamp(0, 1), atol=1e-6)
    hue, saturation, value = colorsys.rgb_to_hsv(*pictures[0, 3, 5].tolist())
    assert np.allclose(
        augment(pictures, turned)[0, 3, 5].tolist(),
        colorsys.hsv_to_rgb((hue + 0.1) % 1, saturation, value),
        atol=1e-5,
    )
    assert not torch.allclose(augment(pictures, turned), pictures, atol=0.01)


# text


def test_long_texts_are_read_in_pieces(words, monkeypatch):
    tokenizer = train_tokenizer(words, 300)
    whole = tokenize(tokenizer, words)
    monkeypatch.setattr("symmerge.lab.training.tokens.CHUNK", 100)
    parts = list(chunks(words))
    assert (
        "".join(parts) == words
        and len(parts) > 10
        and all(part.endswith("\n") for part in parts[:-1])
    )
    assert (
        tokenizer.decode(tokenize(tokenizer, words).tolist())
        == words
        == tokenizer.decode(whole.tolist())
    )


def test_texts_become_tokens_once(words, tmp_path, monkeypatch):
    tokenizer = train_tokenizer(words, 300)
    first = cached_tokens(tokenizer, words, tmp_path, "words")
    monkeypatch.setattr("symmerge.lab.training.tokens.tokenize", lambda *_: pytest.fail("again"))
    assert (
        np.array_equal(first, cached_tokens(tokenizer, words, tmp_path, "words"))
        and len(list(tmp_path.iterdir())) == 1
    )
    with pytest.raises(pytest.fail.Exception, match="again"):
        cached_tokens(train_tokenizer(words, 280), words, tmp_path, "words")


def test_shakespeare_is_divided_and_measured(root, tmp_path, words):
    (root / "tinyshakespeare.txt").write_text(words)
    recipe = with_changes(
        TRAINING["shakespeare-gpt2"],
        config={**SMALL_GPT2, "vocab_size": 300},
        schedule={"steps": 4, "batch_size": 2, "evaluate_every": 2},
    )
    with pytest.raises(
        DataError, match="gpt2_tokenizer is missing, but its tokenizer is read from it"
    ):
        train(recipe, 0, tmp_path / "out", data=root)
    train_tokenizer(words, 300).save_pretrained(root / "gpt2_tokenizer")
    out = train(recipe, 0, tmp_path / "out", data=root)
    learned, measured = (
        Path(data(recipe, root)).read_text() for data in (training_data, held_out_data)
    )
    assert (
        words.startswith(learned)
        and words.endswith(measured)
        and len(learned) == len(words) * 90 // 100
        and 0 < len(measured) <= len(words) // 20 + 1
    )
    task = make_task("clm", held_out_data(recipe, root), [sm.load(out)], max_samples=1000)
    found = json.loads((out / "metrics.json").read_text())
    assert abs(task.evaluate(open_model(out))["loss"] - found["held_out"]["loss"]) < 1e-4


@pytest.mark.parametrize("name", ["books-bert", "books-neox"])
def test_books_have_one_tokenizer(name, root, tmp_path, words):
    for file, text in (("books_train.txt.xz", words), ("books_valid.txt.xz", words[:2000])):
        (root / file).write_bytes(lzma.compress(text.encode()))
    sizes = {**SMALL_VIT, "vocab_size": 300, "max_position_embeddings": 16}
    recipe = with_changes(TRAINING[name], config=sizes, schedule={"steps": 2, "batch_size": 2})
    first, second = (train(recipe, seed, tmp_path / str(seed), data=root) for seed in (0, 1))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert held_out_data(recipe, root) == str(root / "books_valid.txt.xz")
    task = make_task(
        recipe.task, held_out_data(recipe, root), [sm.load(first), sm.load(second)], max_samples=8
    )
    assert task.evaluate(open_model(first))["loss"] > 0 and words.startswith(
        Path(training_data(recipe, root)).read_text()
    )


# classifiers


@pytest.fixture
def reviews(root):
    (root / "sst2").mkdir()
    lines = [
        f"{at % 2}\t{'a good film' if at % 2 else 'a bad film'} number {at}" for at in range(60)
    ]
    (root / "sst2/train.tsv").write_text("\n".join(lines))
    (root / "sst2/dev.tsv").write_text("\n".join([*lines[:6], "1\t" + "long " * 60]))
    return root


@pytest.fixture
def pretrained(tmp_path):
    recipe = with_changes(
        TRAINING["bert-docs"], config=SMALL_BERT, schedule={"steps": 2, "batch_size": 2}
    )
    return train(recipe, 0, tmp_path / "pretrained")


def test_classifiers_begin_with_the_same_head(reviews, pretrained, tmp_path):
    still = with_changes(
        TRAINING["sst2-bert"],
        schedule={"steps": 2, "batch_size": 4, "lr": 0.0, "evaluate_every": 2},
    )
    first, second, other = (
        open_model(
            train(
                still,
                seed,
                tmp_path / f"{seed}-{head}",
                data=reviews,
                begin=pretrained,
                head_seed=head,
            )
        ).state_dict()
        for seed, head in ((0, 0), (1, 0), (0, 1))
    )
    body = open_model(pretrained).state_dict()
    assert all(
        torch.equal(first[name], tensor)
        for name, tensor in body.items()
        if name.startswith("bert.") and "pooler" not in name
    )
    assert torch.equal(first["classifier.weight"], second["classifier.weight"]) and not torch.equal(
        first["classifier.weight"], other["classifier.weight"]
    )


def test_classifiers_learn_and_are_measured(reviews, pretrained, tmp_path):
    recipe = with_changes(
        TRAINING["sst2-bert"],
        schedule={"steps": 60, "batch_size": 16, "lr": 3e-3, "evaluate_every": 20},
    )
    out = train(recipe, 0, tmp_path / "out", data=reviews, begin=pretrained)
    with pytest.raises(DataError, match=r"row 7 has .* tokens"):
        make_task("text", held_out_data(recipe, reviews), [sm.load(out)], max_samples=10)
    task = make_task(
        "text", held_out_data(recipe, reviews, pretrained), [sm.load(out)], max_samples=10
    )
    assert task.samples == 6 and task.evaluate(open_model(out))["accuracy"] == 1.0
    assert len(Path(training_data(recipe, reviews, pretrained)).read_text().splitlines()) == 61
    small_model("gpt2", seed=0).save_pretrained(
        tmp_path / "gpt2"
    )  # transformers opens it as a BERT, with fresh weights
    with pytest.raises(
        MismatchError,
        match=r"gpt2 is a GPT2LMHeadModel, for causal-lm: a classifier on \w+ starts from",
    ):
        train(recipe, 0, tmp_path / "none", data=reviews, begin=tmp_path / "gpt2")
    with pytest.raises(MismatchError, match="classifiers start from a pretrained model"):
        train(recipe, 0, tmp_path / "none", data=reviews)


# other processes


def test_other_processes_train_one_model_after_another(tmp_path, capfd):
    """The next acceleration follows one that fails. A process that has trained waits for the next
    model, is replaced if it died meanwhile, and passes on what it refuses."""
    schedule = {"steps": 3, "batch_size": 4}
    recipe = with_changes(TRAINING["vit-digits"], config=SMALL_VIT, schedule=schedule)
    wider = with_changes(recipe, config={"intermediate_size": 24})
    processes, steps = [], []
    for number, (chosen, seed) in enumerate([(recipe, 1), (wider, 2), (recipe, 3)]):
        out = tmp_path / f"out-{number}"
        # First: it imports what sets variables, and processes serve one environment.
        here = open_model(train(chosen, seed, tmp_path / f"here-{number}")).state_dict()
        capfd.readouterr()
        accelerations = ("magic", "eager") if number == 0 else ("eager",)
        acceleration.train_accelerated(
            Origin(chosen, seed), out, steps.append, accelerations=accelerations, device="cpu"
        )
        assert len(steps) == 3 * (number + 1)
        assert ("magic failed" in capfd.readouterr().err) == (number == 0)
        processes.append(acceleration._waiting["eager"])
        if number == 1:
            processes[1]._popen.kill()  # while it waits
            processes[1]._popen.wait()
        there = open_model(out).state_dict()
        assert all(torch.equal(there[name], tensor) for name, tensor in here.items())
    assert processes[0] is processes[1] is not processes[2]
    with pytest.raises(DataError, match=r"cifar10\.npz is missing"):
        acceleration.train_accelerated(
            Origin(TRAINING["cifar10-vit"], 1),
            tmp_path / "none",
            None,
            accelerations=("eager", "eager"),
            device="cpu",
            data=tmp_path,
        )
    assert "failed" not in capfd.readouterr().err
    acceleration._end_all()
    assert not processes[2].alive


def test_rows_of_text_are_not_accelerated():
    slow, fast = (acceleration.accelerations_of(task) for task in ("text", "clm"))
    assert slow == ("eager",) != fast

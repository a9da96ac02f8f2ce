"""Image data sets: every form gives the same arrays, bad ones are named, pickles run no code."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

import symmerge as sm
from symmerge.errors import DataError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.training import cache
from symmerge.lab.training.cifar import LABELS, MD5
from symmerge.lab.training.files import PUBLISHED_AS
from symmerge.lab.training.files import data_folder as folder_with
from symmerge.lab.training.images import IMAGE_SETS, read_image_set
from symmerge.lab.training.loop import train
from symmerge.lab.training.prepared import held_out_data, prepare_images, training_data
from symmerge.lab.training.recipes import TRAINING, with_changes
from symmerge.lab.training.reinitialization import open_model
from symmerge.lab.training.splits import load_splits

SMALL_VIT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}
RECIPES = {
    "cifar10": "cifar10-vit",
    "cifar100": "cifar100-vit",
    "tiny-imagenet": "tiny-imagenet-vit",
}
PUBLISHED = {folder: tuple(hashes) for folder, hashes in MD5.items()}
TREE = "tiny-imagenet-200"


# the forms, written as they are published


def random_content(data, seed=0):
    """Every class in the training part, a few in the test part."""
    generator, kind = np.random.default_rng(seed), IMAGE_SETS[data]
    labels = {
        "train": generator.permutation(kind.classes),
        "test": generator.integers(0, kind.classes, 7),
    }
    return {
        split: (generator.integers(0, 256, (len(rows), kind.side, kind.side, 3), np.uint8), rows)
        for split, rows in labels.items()
    }


def as_arrays(root, data, content):
    np.savez(
        root / f"{data}.npz",
        **{
            f"{letter}_{part}": array
            for part, both in content.items()
            for letter, array in zip("xy", both, strict=True)
        },
    )
    return root / f"{data}.npz"


@pytest.fixture
def as_batches(root, monkeypatch):
    """Writes a folder of pickles, and lets it pass as the published one."""

    def write(data, content, protocol=2):
        folder = root / PUBLISHED_AS[data][0]
        folder.mkdir()
        hashes = {}
        for split, (images, labels) in content.items():
            names = [
                name for name in PUBLISHED[folder.name] if ("test" in name) == (split == "test")
            ]
            rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
            for at, name in enumerate(names):
                batch = {
                    "batch_label": "one",
                    LABELS[folder.name]: np.array_split(labels, len(names))[at].tolist(),
                    "data": np.array_split(rows, len(names))[at].copy(),
                }
                (folder / name).write_bytes(pickle.dumps(batch, protocol))
                hashes[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(MD5, folder.name, hashes)
        return folder

    return write


def as_tree(root, content):
    """As JPEGs, one of them grey; the content is then what they became."""
    folder, numbers = (
        root / TREE,
        [f"n{number:08d}" for number in np.random.default_rng(1).choice(10**7, 200, replace=False)],
    )
    (folder / "val/images").mkdir(parents=True)
    order = sorted(range(200), key=numbers.__getitem__)  # classes are places in the sorted numbers
    for name in (*numbers, "not-a-class.txt"):
        (folder / "train" / name / "images").mkdir(parents=True) if name.startswith("n0") else (
            folder / "train" / name
        ).touch()
    lines, images_of = [], {"train": [], "test": []}
    for part, (images, labels) in content.items():
        for at, (image, label) in enumerate(zip(images, labels, strict=True)):
            number = numbers[order[label]]
            file = folder / (
                f"train/{number}/images/{number}_{at}.JPEG"
                if part == "train"
                else f"val/images/val_{at}.JPEG"
            )
            Image.fromarray(image[..., 0] if at == 3 else image).save(file, "JPEG", quality=95)
            lines += [f"{file.name}\t{number}\t0\t0\t63\t63\n"] if part == "test" else []
            grey = np.asarray(Image.open(file))
            images_of[part].append((label, np.stack([grey] * 3, -1) if at == 3 else grey))
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    images_of["train"].sort(key=lambda pair: pair[0])
    return folder, {
        part: (np.stack([image for _, image in rows]), np.array([label for label, _ in rows]))
        for part, rows in images_of.items()
    }


def same(arrays, expected):
    return all(map(np.array_equal, arrays, expected))


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_batches_and_arrays_are_the_same(data, root, as_batches):
    content, other = random_content(data), random_content(data, seed=1)
    forms = as_arrays(root, data, content), as_batches(data, content)
    for split, expected in content.items():
        arrays, batches = (read_image_set(data, place, split) for place in forms)
        assert same(arrays, expected) and same(batches, expected)
        assert not same(batches, other[split])
        assert batches[0].dtype == np.uint8 and batches[1].dtype == np.int64


def test_trees_and_arrays_are_the_same(root, monkeypatch, capfd):
    tree, content = as_tree(root, random_content("tiny-imagenet"))
    forms = as_arrays(root, "tiny-imagenet", content), tree
    monkeypatch.setattr(cache, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for part, expected in content.items():
        arrays = [read_image_set("tiny-imagenet", place, part) for place in forms]
        assert (
            same(arrays[0], expected)
            and same(arrays[1], expected)
            and not same((arrays[1][0][::-1], arrays[1][1]), expected)
        )
    assert f"{TREE}, train split: 199 of 200" in capfd.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    read_image_set("tiny-imagenet", tree, "test")
    assert not capfd.readouterr().err  # only a terminal is told


@pytest.mark.parametrize("data", IMAGE_SETS)
def test_every_form_is_prepared_alike(data, root, as_batches):
    """And each under its own name: another form beside it is not mistaken for it."""
    content = random_content(data)
    folder, content = (
        as_tree(root, content) if data == "tiny-imagenet" else (as_batches(data, content), content)
    )
    place = folder_with(root, data)
    prepared = [prepare_images(place, data, "train")]
    as_arrays(root, data, content)
    prepared.append(prepare_images(place, data, "train"))
    assert [file.name for file in prepared] == [f"{folder.name}-train.npz", f"{data}-train.npz"]
    with np.load(prepared[0]) as first, np.load(prepared[1]) as second:
        assert same((first["images"], first["labels"]), (second["images"], second["labels"]))
        assert not np.array_equal(first["labels"], content["train"][1]) and sorted(
            first["labels"]
        ) == list(range(IMAGE_SETS[data].classes))


# training


@pytest.mark.parametrize("data", IMAGE_SETS)
def test_recipes_train_and_are_measured(data, root, tmp_path, as_batches):
    content = random_content(data)
    as_tree(root, content) if data == "tiny-imagenet" else as_batches(data, content)
    recipe = with_changes(
        TRAINING[RECIPES[data]], config=SMALL_VIT, schedule={"steps": 2, "batch_size": 4}
    )
    out = train(recipe, 0, tmp_path / "out", data=root)
    task = make_task("image", held_out_data(recipe, root), [sm.load(out)], samples=7)
    metrics = json.loads((out / "metrics.json").read_text())
    assert abs(task.evaluate(open_model(out))["loss"] - metrics["held_out"]["loss"]) < 1e-4
    assert (
        open_model(out).config.num_labels == IMAGE_SETS[data].classes
        and open_model(out).config.image_size == IMAGE_SETS[data].side
    )
    assert json.loads((out / "preprocessor_config.json").read_text())["image_mean"] == list(
        IMAGE_SETS[data].mean
    )
    with np.load(training_data(recipe, root)) as file:
        assert file["images"].shape == (
            IMAGE_SETS[data].classes,
            IMAGE_SETS[data].side,
            IMAGE_SETS[data].side,
            3,
        )


def test_every_data_set_has_its_own_mean(root, as_batches):
    as_batches("cifar100", random_content("cifar100"))
    dataset = load_splits(TRAINING["cifar100-vit"], root).test
    inputs = dataset.batch(torch.arange(7), None)[0]["pixel_values"]
    pixels = dataset.pixels.permute(0, 3, 1, 2).double() / 255
    mean, std = (
        torch.tensor(numbers)[None, :, None, None]
        for numbers in (IMAGE_SETS["cifar100"].mean, IMAGE_SETS["cifar100"].std)
    )
    assert torch.allclose(inputs.double(), (pixels - mean) / std, atol=1e-5)
    assert not torch.allclose(
        inputs.double(),
        (pixels - torch.tensor(IMAGE_SETS["cifar10"].mean)[None, :, None, None]) / std,
        atol=1e-3,
    )


# what is refused


class Deed:
    """Makes a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_only_published_pickles_are_read(root, tmp_path, as_batches):
    folder = as_batches("cifar100", random_content("cifar100"))
    rows = np.zeros((1, 3072), np.uint8)
    evil = pickle.dumps({"data": rows, "fine_labels": Deed(tmp_path / "deed")})
    (folder / "train").write_bytes(evil)
    with pytest.raises(DataError, match="cifar-100-python/train is not the published file"):
        train(TRAINING["cifar100-vit"], 0, tmp_path / "out", data=root)
    assert not (tmp_path / "deed").exists() and not (tmp_path / "out").exists()
    pickle.loads(evil)  # the control: unpickled, it would have run
    assert (tmp_path / "deed").exists()


def with_train(**changes):
    """Arrays as they should be, but for the training part."""

    def make(root):
        images, labels = random_content("cifar100")["train"]
        both = {
            "images": images,
            "labels": labels,
            **{name: change(images, labels) for name, change in changes.items()},
        }
        return as_arrays(root, "cifar100", {"train": (both["images"], both["labels"])})

    return make


def tree_with(change):
    def make(root):
        folder = as_tree(root, random_content("tiny-imagenet"))[0]
        change(folder)
        return folder

    return make


def first_of(folder):
    return sorted((folder / "train").glob("*/images/*.JPEG"))[0]


WRONG = {
    "floats": (
        "cifar100",
        with_train(images=lambda images, _: images / 255),
        "images are float64 .*uint8 .n, 32, 32, 3.",
    ),
    "channels first": (
        "cifar100",
        with_train(images=lambda images, _: images.transpose(0, 3, 1, 2)),
        r"uint8 \[100, 3, 32, 32\]",
    ),
    "too few labels": (
        "cifar100",
        with_train(labels=lambda _, labels: labels[1:]),
        "100 images and 99 labels",
    ),
    "labels in words": (
        "cifar100",
        with_train(labels=lambda _, labels: labels.astype(str)),
        r"y_train\.npy holds <U21",
    ),
    "classes that are not there": (
        "cifar100",
        with_train(labels=lambda _, labels: labels % 20),
        r"no images of 80 of the 100 classes of cifar100 \(20, 21, 22",
    ),
    "classes from 1": (
        "cifar100",
        with_train(labels=lambda _, labels: labels + 1),
        "unknown class 100, cifar100 has 0 to 99",
    ),
    "no arrays": (
        "cifar10",
        lambda root: np.savez(root / "cifar10.npz", a=np.zeros(1)) or root / "cifar10.npz",
        "no x_train and y_train: write them",
    ),
    "no npz": (
        "cifar10",
        lambda root: (root / "cifar10.npz").write_text("x") and root / "cifar10.npz",
        "without running code",
    ),
    "compact coding": (
        "cifar10",
        lambda root: np.savez(root / "cifar10.npz", d_train=0, y_train=0) or root / "cifar10.npz",
        "is compressed, not plain arrays: convert it with `python load_data.py IN OUT`",
    ),
    "no table": (
        "tiny-imagenet",
        tree_with(lambda folder: (folder / "val/val_annotations.txt").unlink()),
        "val_annotations.txt is missing",
    ),
    "a class less": (
        "tiny-imagenet",
        tree_with(lambda folder: first_of(folder).unlink()),
        r"no images of 1 of the 200 classes of tiny-imagenet \(0\)",
    ),
    "no picture": (
        "tiny-imagenet",
        tree_with(lambda folder: first_of(folder).write_text("x")),
        "cannot be read as an image",
    ),
    "another size": (
        "tiny-imagenet",
        tree_with(lambda folder: Image.new("RGB", (32, 32)).save(first_of(folder))),
        "differs in size from",
    ),
    "a file of the table": (
        "tiny-imagenet",
        tree_with(lambda folder: (folder / "val/images/val_2.JPEG").unlink()),
        "val_2.JPEG is missing",
    ),
    "a class of the table": (
        "tiny-imagenet",
        tree_with(
            lambda folder: (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn5\t0\n")
        ),
        "line 1: 'n5' is not a class of the training split",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, root):
    data, make, message = WRONG[case]
    place = make(root)
    with pytest.raises(DataError, match=message):
        for part in ("train", "test"):
            read_image_set(data, place, part)


def test_a_missing_batch_is_named(as_batches):
    folder = as_batches("cifar10", random_content("cifar10"))
    (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3 is missing: unpack the whole archive again"):
        read_image_set("cifar10", folder, "train")


def test_a_column_of_labels_will_do(root):
    content = random_content("cifar100")
    place = as_arrays(
        root,
        "cifar100",
        {part: (images, labels[:, None]) for part, (images, labels) in content.items()},
    )
    assert same(read_image_set("cifar100", place, "train"), content["train"])


@pytest.mark.parametrize("data", IMAGE_SETS)
def test_what_is_missing_is_named_with_its_place(data, root, tmp_path):
    with pytest.raises(
        DataError,
        match=rf"data/{data}\.npz is missing, .*, or the folder {PUBLISHED_AS[data][0]} next to it",
    ):
        train(TRAINING[RECIPES[data]], 0, tmp_path / "out", data=root)
    with pytest.raises(
        DataError, match=rf"put {data}\.npz \(or the folder {PUBLISHED_AS[data][0]}\) into a folder"
    ):
        held_out_data(TRAINING[RECIPES[data]])

"""Data sets of pictures: every form gives the same arrays, what is wrong is named, and a pickle that would do something does nothing."""

import json
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
import torch
from PIL import Image

import symmerge as sm
from symmerge.errors import DataError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.training import cache
from symmerge.lab.training.files import PUBLISHED_AS, held_out_data, prepare_images, training_data
from symmerge.lab.training.files import data_folder as folder_with
from symmerge.lab.training.loop import train
from symmerge.lab.training.pictures import SETS, read_pictures
from symmerge.lab.training.plainpickle import read_plain
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
TREE = "tiny-imagenet-200"


# the forms, made here as they are published


def python_2(content):
    """What Python 2 and the NumPy of its time wrote: dictionaries of byte strings, lists of small numbers, arrays of bytes."""

    def text(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def value_of(value):
        if isinstance(value, list):
            return b"](" + b"".join(b"K" + bytes([number]) for number in value) + b"e"
        if isinstance(value, bytes):
            return text(value)
        shape = b"".join(b"J" + struct.pack("<i", size) for size in value.shape)
        kind = (
            b"cnumpy\ndtype\n"
            + text(b"u1")
            + b"K\x00K\x01\x87R(K\x03"
            + text(b"|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        return (
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
            + text(b"b")
            + b"\x87R(K\x01("
            + shape
            + b"t"
            + kind
            + b"\x89"
            + text(value.tobytes())
            + b"tb"
        )

    return (
        b"\x80\x02}("
        + b"".join(text(key) + value_of(value) for key, value in content.items())
        + b"u."
    )


WRITTEN = {
    "python 2": python_2,
    **{
        f"protocol {number}": lambda content, number=number: pickle.dumps(content, number)
        for number in (2, 4, 5)
    },
}


def some(data, seed=0):
    """Every class in the training part, a few in the test part."""
    generator, kind = np.random.default_rng(seed), SETS[data]
    labels = {
        "train": generator.permutation(kind.classes),
        "test": generator.integers(0, kind.classes, 7),
    }
    return {
        part: (generator.integers(0, 256, (len(found), kind.side, kind.side, 3), np.uint8), found)
        for part, found in labels.items()
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


def as_batches(root, data, content, write=python_2):
    folder, labels = (
        root / PUBLISHED_AS[data][0],
        b"labels" if data == "cifar10" else b"fine_labels",
    )
    folder.mkdir()
    for part, (images, classes) in content.items():
        rows, names = images.transpose(0, 3, 1, 2).reshape(len(images), -1), [part]
        if data == "cifar10":
            names = (
                [f"data_batch_{number}" for number in range(1, 6)]
                if part == "train"
                else ["test_batch"]
            )
        for name, some_rows, some_classes in zip(
            names,
            np.array_split(rows, len(names)),
            np.array_split(classes, len(names)),
            strict=True,
        ):
            (folder / name).write_bytes(
                write(
                    {
                        b"batch_label": b"one",
                        labels: some_classes.tolist(),
                        b"data": some_rows.copy(),
                    }
                )
            )
    return folder


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
    lines, seen = [], {"train": [], "test": []}
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
            seen[part].append((label, np.stack([grey] * 3, -1) if at == 3 else grey))
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    seen["train"].sort(key=lambda pair: pair[0])
    return folder, {
        part: (np.stack([image for _, image in found]), np.array([label for label, _ in found]))
        for part, found in seen.items()
    }


def same(found, wanted):
    return all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_batches_and_arrays_are_the_same(data, written, root):
    content, other = some(data), some(data, seed=1)
    forms = as_arrays(root, data, content), as_batches(root, data, content, WRITTEN[written])
    for part, wanted in content.items():
        found = [read_pictures(data, place, part) for place in forms]
        assert same(found[0], wanted) and same(found[1], wanted) and not same(found[1], other[part])
        assert found[1][0].dtype == np.uint8 and found[1][1].dtype == np.int64


def test_what_python_2_wrote_is_what_we_say_it_wrote(tmp_path):
    """The hand-made pickle against Python's own reader."""
    content = {
        b"data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        b"labels": [3, 1, 2],
        b"batch_label": b"one",
    }
    (tmp_path / "file").write_bytes(python_2(content))
    stock, ours = pickle.loads(python_2(content), encoding="bytes"), read_plain(tmp_path / "file")
    assert np.array_equal(stock[b"data"], content[b"data"]) and stock[b"labels"] == [3, 1, 2]
    assert (
        np.array_equal(ours["data"], content[b"data"])
        and ours["labels"] == [3, 1, 2]
        and ours["batch_label"] == b"one"
    )


def test_trees_and_arrays_are_the_same(root, monkeypatch, capfd):
    tree, content = as_tree(root, some("tiny-imagenet"))
    forms = as_arrays(root, "tiny-imagenet", content), tree
    monkeypatch.setattr(cache, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for part, wanted in content.items():
        found = [read_pictures("tiny-imagenet", place, part) for place in forms]
        assert (
            same(found[0], wanted)
            and same(found[1], wanted)
            and not same((found[1][0][::-1], found[1][1]), wanted)
        )
    assert f"{TREE}, train part: 199 of 200" in capfd.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    read_pictures("tiny-imagenet", tree, "test")
    assert not capfd.readouterr().err  # only a terminal is told


@pytest.mark.parametrize("data", SETS)
def test_every_form_is_prepared_alike(data, root):
    """And each under its own name: another form beside it is not mistaken for it."""
    content = some(data)
    folder, content = (
        as_tree(root, content)
        if data == "tiny-imagenet"
        else (as_batches(root, data, content), content)
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
        ) == list(range(SETS[data].classes))


# training


@pytest.mark.parametrize("data", SETS)
def test_recipes_train_and_are_measured(data, root, tmp_path):
    content = some(data)
    as_tree(root, content) if data == "tiny-imagenet" else as_batches(root, data, content)
    recipe = with_changes(
        TRAINING[RECIPES[data]], config=SMALL_VIT, schedule={"steps": 2, "batch_size": 4}
    )
    out = train(recipe, 0, tmp_path / "out", data=root)
    task = make_task("image", held_out_data(recipe, root), [sm.load(out)], samples=7)
    found = json.loads((out / "metrics.json").read_text())
    assert abs(task.evaluate(open_model(out))["loss"] - found["held_out"]["loss"]) < 1e-4
    assert (
        open_model(out).config.num_labels == SETS[data].classes
        and open_model(out).config.image_size == SETS[data].side
    )
    assert json.loads((out / "preprocessor_config.json").read_text())["image_mean"] == list(
        SETS[data].mean
    )
    with np.load(training_data(recipe, root)) as file:
        assert file["images"].shape == (SETS[data].classes, SETS[data].side, SETS[data].side, 3)


def test_every_data_set_has_its_own_mean(root):
    as_batches(root, "cifar100", some("cifar100"))
    lessons = load_splits(TRAINING["cifar100-vit"], root).test
    seen = lessons.batch(torch.arange(7), None)[0]["pixel_values"]
    shown = lessons.pictures.permute(0, 3, 1, 2).double() / 255
    mean, std = (
        torch.tensor(numbers)[None, :, None, None]
        for numbers in (SETS["cifar100"].mean, SETS["cifar100"].std)
    )
    assert torch.allclose(seen.double(), (shown - mean) / std, atol=1e-5)
    assert not torch.allclose(
        seen.double(),
        (shown - torch.tensor(SETS["cifar10"].mean)[None, :, None, None]) / std,
        atol=1e-3,
    )


# what is refused


class Deed:
    """Makes a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_do_something_does_nothing(protocol, root, tmp_path):
    folder = as_batches(root, "cifar100", some("cifar100"))
    evil = pickle.dumps(
        {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": Deed(tmp_path / "deed")}, protocol
    )
    (folder / "train").write_bytes(evil)
    with pytest.raises(
        DataError,
        match=r"cifar-100-python/train asks for \w+\.mkdir when it is read, which data does not: get it again",
    ):
        train(TRAINING["cifar100-vit"], 0, tmp_path / "out", data=root)
    assert not (tmp_path / "deed").exists() and not (tmp_path / "out").exists()
    pickle.loads(evil)  # the control: elsewhere it would have been done
    assert (tmp_path / "deed").exists()


@pytest.mark.parametrize(
    "asked",
    [
        "builtins eval",
        "builtins getattr",
        "numpy ndarray.__class__",
        "numpy load",
        "copyreg _reconstructor",
        "numpy.core.multiarray scalar",
    ],
)
def test_a_pickle_may_ask_for_little(asked, tmp_path):
    module, name = asked.split()
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
    (tmp_path / "file").write_bytes(b"\x80\x04" + b"".join(words) + b"\x93.")
    with pytest.raises(DataError, match=rf"asks for {module}.{name} when it is read"):
        read_plain(tmp_path / "file")


DAMAGED = {
    "garbage": b"garbage",
    "empty": b"",
    "cut": python_2({b"data": np.zeros((4, 4), np.uint8)})[:-20],
    "no dictionary": pickle.dumps([1]),
    "objects": pickle.dumps({"data": np.array([{}, []], dtype=object)}),
    "too few bytes": python_2({b"data": np.zeros((4, 4), np.uint8)}).replace(
        b"J\x04\x00\x00\x00", b"J\x05\x00\x00\x00", 1
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_pickles_are_named(case, tmp_path):
    (tmp_path / "file").write_bytes(DAMAGED[case])
    with pytest.raises(DataError, match=r"file (is no pickle of a data set|has an array of)"):
        read_plain(tmp_path / "file")


def with_train(**changes):
    """Arrays as they should be, but for the training part."""

    def make(root):
        images, labels = some("cifar100")["train"]
        both = {
            "images": images,
            "labels": labels,
            **{name: change(images, labels) for name, change in changes.items()},
        }
        return as_arrays(root, "cifar100", {"train": (both["images"], both["labels"])})

    return make


def without(name):
    def make(root):
        folder = as_batches(root, "cifar10", some("cifar10"))
        (folder / name).unlink()
        return folder

    return make


def other_batches(root):
    folder = as_batches(root, "cifar10", some("cifar10"))
    return shutil.copytree(
        folder,
        root / "cifar-100-python",
        copy_function=lambda a, b: shutil.copy(a, str(b).replace("data_batch_1", "train")),
    )


def tree_with(change):
    def make(root):
        folder = as_tree(root, some("tiny-imagenet"))[0]
        change(folder)
        return folder

    return make


def first_of(folder):
    return sorted((folder / "train").glob("*/images/*.JPEG"))[0]


WRONG = {
    "floats": (
        "cifar100",
        with_train(images=lambda images, _: images / 255),
        "pictures are float64 .*uint8 .n, 32, 32, 3.",
    ),
    "channels first": (
        "cifar100",
        with_train(images=lambda images, _: images.transpose(0, 3, 1, 2)),
        r"uint8 \[100, 3, 32, 32\]",
    ),
    "too few labels": (
        "cifar100",
        with_train(labels=lambda _, labels: labels[1:]),
        "100 pictures and 99 labels",
    ),
    "labels in words": (
        "cifar100",
        with_train(labels=lambda _, labels: labels.astype(str)),
        "a whole number to every picture",
    ),
    "classes that are not there": (
        "cifar100",
        with_train(labels=lambda _, labels: labels % 20),
        r"no pictures of 80 of the 100 classes of cifar100 \(20, 21, 22",
    ),
    "classes from 1": (
        "cifar100",
        with_train(labels=lambda _, labels: labels + 1),
        "there is a class 100, and cifar100 has 100 of them, from 0 on",
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
    "a batch": (
        "cifar10",
        without("data_batch_3"),
        "data_batch_3 is missing: unpack the whole archive again",
    ),
    "another data set": (
        "cifar100",
        other_batches,
        "has batch_label, labels, data; needed are data and fine_labels: is it another data set?",
    ),
    "no table": (
        "tiny-imagenet",
        tree_with(lambda folder: (folder / "val/val_annotations.txt").unlink()),
        "val_annotations.txt is missing",
    ),
    "a class less": (
        "tiny-imagenet",
        tree_with(lambda folder: first_of(folder).unlink()),
        r"no pictures of 1 of the 200 classes of tiny-imagenet \(0\)",
    ),
    "no picture": (
        "tiny-imagenet",
        tree_with(lambda folder: first_of(folder).write_text("x")),
        "cannot be read as an image",
    ),
    "another size": (
        "tiny-imagenet",
        tree_with(lambda folder: Image.new("RGB", (32, 32)).save(first_of(folder))),
        "is of another size than",
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
        "line 1: 'n5' is no class of the training part",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, root):
    data, make, said = WRONG[case]
    place = make(root)
    with pytest.raises(DataError, match=said):
        for part in ("train", "test"):
            read_pictures(data, place, part)


def test_a_column_of_labels_will_do(root):
    content = some("cifar100")
    place = as_arrays(
        root,
        "cifar100",
        {part: (images, labels[:, None]) for part, (images, labels) in content.items()},
    )
    assert same(read_pictures("cifar100", place, "train"), content["train"])


@pytest.mark.parametrize("data", SETS)
def test_what_is_missing_is_named_with_its_place(data, root, tmp_path):
    with pytest.raises(
        DataError,
        match=rf"data/{data}\.npz is missing, .*: put it there, or the folder {PUBLISHED_AS[data][0]} beside it, or give another folder",
    ):
        train(TRAINING[RECIPES[data]], 0, tmp_path / "out", data=root)
    with pytest.raises(
        DataError, match=rf"put {data}\.npz \(or the folder {PUBLISHED_AS[data][0]}\) into a folder"
    ):
        held_out_data(TRAINING[RECIPES[data]])

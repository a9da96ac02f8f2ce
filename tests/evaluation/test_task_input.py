"""Bad data and wrong tasks: one line that says what, where and the remedy, before any work."""

import json
import lzma
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures import checkpoint

from symmerge.errors import SymmergeError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.models.model import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return lambda name, **changes: load(
        checkpoint(root / f"{name}{len(list(root.iterdir()))}", name, **changes)
    )


def refused(task, data, model, phrases, **options):
    """The message is one line with all phrases, which are separated by dots."""
    with pytest.raises(SymmergeError) as caught:
        make_task(task, str(data), [model], **options)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500
    missing = [phrase for phrase in phrases.split(" ... ") if phrase not in line]
    assert not missing, f"{missing} not in: {line}"


def content(name, text):
    """A file with this text or these bytes."""

    def make(folder):
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return folder / name

    return make


def arrays(**contents):
    def make(folder):
        np.savez(folder / "data.npz", **contents)
        return folder / "data.npz"

    return make


def picture(name, data):
    """A folder with an image for each of the model's classes, and one file more."""

    def make(folder):
        from PIL import Image

        for label in "01234":
            (folder / "pictures" / label).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(folder / "pictures" / label / "good.png")
        (folder / "pictures" / name).parent.mkdir(exist_ok=True)
        (folder / "pictures" / name).write_bytes(data)
        return folder / "pictures"

    return make


IMAGES, FLOATS = np.zeros((4, 16, 16, 3), np.uint8), np.zeros((4, 3, 16, 16), np.float32)
CLASSES = "label\ttext\n"

# (task, model) -> label -> what makes the data, phrases of the message
BAD = {
    ("clm", "gpt2"): {
        "no such file": (
            lambda folder: folder / "none.txt",
            "none.txt does not exist ... python-docs ... hf:NAME",
        ),
        "a folder as text": (lambda folder: folder, "cannot be read ... text file"),
        "empty text": (content("t.txt", ""), "t.txt ... 0 tokens ... give more data"),
        "text too short for one block": (
            content("t.txt", "a" * 63),
            "63 tokens in blocks of 64 ... 0 available, 1 needed",
        ),
        "not text": (content("t.txt", b"\xff\xfe\x00a"), "t.txt is not text in UTF-8 ... convert"),
        "not xz": (content("t.txt.xz", b"plain"), "t.txt.xz cannot be read ... complete"),
        "cut xz": (
            content("t.txt.xz", lzma.compress(b"plain " * 99)[:40]),
            "t.txt.xz cannot be read ... complete",
        ),
        "no text column for a language model": (
            content("t.jsonl", '{"body": "a"}\n'),
            "no column text; ... it has: body",
        ),
    },
    ("mlm", "bert"): {
        "text too short for a masked block": (
            content("t.txt", "a" * 63),
            "63 tokens in blocks of 64",
        )
    },
    ("text", "bert-classifier"): {
        "empty table": (content("t.tsv", ""), "t.tsv is empty"),
        "only names": (content("t.tsv", CLASSES), "t.tsv is empty"),
        "empty JSONL": (content("t.jsonl", "\n"), "t.jsonl is empty"),
        "text without rows": (content("t.txt", "words"), "t.txt has no rows with labels ... TSV"),
        "no label column": (
            content("t.tsv", "text\tstars\na\t1\n"),
            "no column label ... it has: text, stars ... Rename",
        ),
        "no text column": (
            content("t.csv", "label,review\n1,a\n"),
            "no column text ... it has: label, review",
        ),
        "neither column": (
            content("t.jsonl", '{"a": 1, "b": 2}\n'),
            "no column text and no column label ... it has: a, b",
        ),
        "uneven rows": (
            content("t.tsv", CLASSES + "1\ta\n1\ta\tb\n"),
            "t.tsv, line 3 has 3 columns, not 2 ... label, text",
        ),
        "too many columns": (
            content("t.tsv", "1\ta\tb\tc\n"),
            "line 1 has 4 columns, not 3 ... name the columns",
        ),
        "a row without a label": (
            content("t.jsonl", '{"text": "a", "label": 0}\n{"text": "b"}\n'),
            "row 2 lacks ... label, text",
        ),
        "not JSON": (
            content("t.jsonl", '{"text": "a", "label": 0}\n{"text'),
            "t.jsonl, line 2 is not a JSON object",
        ),
        "JSON that is no object": (content("t.jsonl", "17\n"), "line 1 is not a JSON object"),
        "label too large": (
            content("t.tsv", "0\ta\n3\tb\n"),
            "t.tsv has the label 3 ... 3 classes, 0 to 2",
        ),
        "negative label": (content("t.tsv", "-1\ta\n"), "has the label -1 ... 0 to 2"),
        "label between classes": (content("t.tsv", "0.5\ta\n"), "has the label 0.5 ... 0 to 2"),
        "label that is no number": (content("t.tsv", "nan\ta\n"), "has the label nan ... 0 to 2"),
        "unknown names": (
            content("t.tsv", CLASSES + "good\ta\nbad\tb\n"),
            "label bad, good ... 3 classes without names ... use numbers",
        ),
        "text too long": (
            content("t.tsv", f"0\ta\n1\t{'b' * 63}\n"),
            "t.tsv, row 2 has 65 tokens ... takes 64 ... shorten",
        ),
        "pictures as text": (arrays(x=IMAGES, y=np.arange(4)), "no rows with labels"),
        "own rows": (
            lambda folder: "self",
            "no inputs can be generated for the task text ... only for mlm, clm, seq2seq, image"
            " ... labelled data",
        ),
    },
    ("image", "vit"): {
        "text as pictures": (content("t.txt", "words"), "holds no images ... digits"),
        "no pictures": (
            lambda folder: folder,
            "has no images in subfolders ... one subfolder per class",
        ),
        "empty arrays": (
            arrays(x=IMAGES[:0], y=np.arange(0)),
            "images: 0 available ... give more data",
        ),
        "other arrays": (
            arrays(a=IMAGES, b=np.arange(4)),
            "has the arrays a, b ... x/y ... images/labels",
        ),
        "arrays that do not match": (
            arrays(x=IMAGES, y=np.arange(3)),
            "[4, 16, 16, 3] ... [3] ... one label per image",
        ),
        "whole numbers": (arrays(x=IMAGES.astype(np.int64), y=np.arange(4)), "are int64 ... uint8"),
        "pickled arrays": (arrays(x=np.array([{}]), y=np.arange(1)), "without running code"),
        "not an npz": (content("data.npz", "text"), "data.npz is not an .npz file"),
        "cut npz": (content("data.npz", b"PK\x03\x04 cut"), "data.npz is not an .npz file"),
        "no such npz": (lambda folder: folder / "none.npz", "none.npz does not exist"),
        "ready pictures of another size": (
            arrays(x=FLOATS[:, :, 1:], y=np.arange(4)),
            "[3, 15, 16] ... takes [3, 16, 16]",
        ),
        "label of a picture": (
            arrays(x=IMAGES, y=np.array([0, 1, 2, 5])),
            "has the label 5 ... 5 classes, 0 to 4",
        ),
        "a picture that is none": (
            picture("0/bad.png", b"no picture"),
            "0/bad.png cannot be read as an image ... replace or remove",
        ),
        "an empty picture": (picture("0/bad.jpg", b""), "0/bad.jpg cannot be read as an image"),
        "a class too many": (
            picture("cat/good.png", b""),
            "0, 1, 2, 3 and 2 more ... 5 classes without names",
        ),
    },
    ("mlm", "gpt2"): {
        "masked for a causal model": (
            lambda folder: "python-docs",
            "GPT2LMHeadModel, for causal-lm ... mlm is for masked-lm ... use clm",
        )
    },
    ("clm", "bert"): {
        "causal for a masked model": (lambda folder: "python-docs", "BertForMaskedLM ... use mlm")
    },
    ("image", "bert-classifier"): {
        "images for text": (lambda folder: "digits", "for text-classification ... use text")
    },
    ("text", "vit"): {
        "text for images": (lambda folder: "digits", "for image-classification ... use image")
    },
    ("speech", "gpt2"): {
        "unknown task": (
            lambda folder: "python-docs",
            "task speech ... mlm, clm, seq2seq, image, text",
        )
    },
}


CASES = [(task, name, label) for (task, name), cases in BAD.items() for label in cases]


@pytest.mark.parametrize(("task", "name", "label"), CASES)
def test_bad_data(model, tmp_path, task, name, label):
    make, phrases = BAD[task, name][label]
    refused(task, make(tmp_path), model(name), phrases)


def test_the_same_data_unspoilt(model, tmp_path):
    """The control: the same data without the defects of the table."""
    assert make_task("clm", str(content("t.txt", "a" * 64)(tmp_path)), [model("gpt2")]).samples == 1
    rows = content("t.tsv", f"0\ta\n1\t{'b' * 62}\n")(tmp_path)
    assert make_task("text", str(rows), [model("bert-classifier")]).samples == 2
    images = arrays(x=FLOATS, y=np.arange(4))(tmp_path)
    assert make_task("image", str(images), [model("vit")]).samples == 4


def test_a_damaged_picture_is_found_when_it_is_read(model, tmp_path):
    good = (picture("0/good.txt", b"")(tmp_path) / "0" / "good.png").read_bytes()
    (tmp_path / "pictures" / "0" / "cut.png").write_bytes(good[:45])
    task = make_task("image", str(tmp_path / "pictures"), [model("vit")])
    with pytest.raises(SymmergeError, match=r"cut\.png cannot be read as an image.*replace"):
        list(task.batches)


def test_too_many_samples(model):
    refused(
        "clm",
        "python-docs",
        model("gpt2"),
        "python-docs ... available, 100000 needed ... ask for fewer samples",
        samples=100000,
    )
    for data in ("python-docs", "self"):
        refused("clm", data, model("gpt2"), "samples 0 ... at least one", samples=0)


@pytest.mark.parametrize("name", ["roberta-classifier", "llama"])
def test_the_longest_text_is_the_model_s(model, tmp_path, name):
    """RoBERTa reserves two positions for padding; rotary models take what their config says."""
    a = model(name)
    if name == "llama":
        assert make_task("clm", "python-docs", [a], samples=1).settings == {"block": 64}
    else:
        refused(
            "text",
            content("t.tsv", f"1\t{'b' * 61}\n")(tmp_path),
            a,
            "row 1 has 63 tokens ... takes 62",
        )
        assert (
            make_task("text", str(content("t.tsv", f"1\t{'b' * 60}\n")(tmp_path)), [a]).samples == 1
        )


def test_values_for_a_regression(model, tmp_path):
    refused(
        "text",
        content("t.tsv", CLASSES + "good\ta\n")(tmp_path),
        model("bert-classifier", num_labels=1),
        "labels that are not numbers ... give numbers",
    )
    multi_label = model("bert-classifier", problem_type="multi_label_classification")
    refused(
        "text",
        content("t.tsv", "0\ta\n")(tmp_path),
        multi_label,
        "multi_label_classification ... one class or one value",
    )


# checkpoints without what the task needs


def without(model, *files):
    for file in files:
        (Path(model.path) / file).unlink()
    return load(model.path)


def test_no_tokenizer(model):
    refused(
        "clm",
        "python-docs",
        without(model("gpt2"), "tokenizer.json", "tokenizer_config.json"),
        "has no tokenizer ... tokenizer.json ... into its folder",
    )
    refused("clm", "python-docs", load(small_model("gpt2")), "in memory has no tokenizer")


def test_a_damaged_tokenizer(model):
    a = model("gpt2")
    (a.path / "tokenizer.json").write_text("{")
    refused("clm", "python-docs", a, "the tokenizer of ... cannot be opened ... restore")


def test_another_model_s_tokenizer(model, tmp_path):
    rows = str(content("t.tsv", "1\tzzz\n")(tmp_path))
    refused(
        "text",
        rows,
        model("bert-classifier", vocab_size=20),
        "has a token ... the model knows 20 ... another model's",
    )
    refused(
        "clm",
        "python-docs",
        model("gpt2", vocab_size=40),
        "has a token ... the model knows 40 ... another model's",
    )


def test_no_mask_token(model):
    a = model("bert")
    config = json.loads((a.path / "tokenizer_config.json").read_text())
    (a.path / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": None}))
    refused("mlm", "python-docs", a, "has no mask token ... mask_token")


def test_no_image_processor(model):
    a = without(model("vit", image_size=8, num_labels=10), "preprocessor_config.json")
    refused(
        "image",
        "digits",
        a,
        "has no image processor ... preprocessor_config.json ... .npz with floats",
    )


def test_an_image_processor_for_another_size(model):
    a = model("vit", image_size=8, num_labels=10)
    shutil.copy(model("vit").path / "preprocessor_config.json", a.path)
    with pytest.raises(
        SymmergeError,
        match=r"image processor of .* gives images of \[3, 16, 16\].* takes \[3, 8, 8\]",
    ):
        list(make_task("image", "digits", [a], samples=3).batches)


# data sets that need the network or a package


def test_without_the_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        "text",
        "hf:glue",
        model("bert-classifier"),
        "hf:glue ... need the package `datasets` ... pip install datasets ... TSV",
    )


def test_without_the_network(model, monkeypatch):
    class Fake:
        @staticmethod
        def load_dataset(name, config):
            raise ConnectionError(f"Couldn't reach '{name}' on the Hub\n(offline)")

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    refused(
        "text",
        "hf:glue",
        model("bert-classifier"),
        "hf:glue cannot be opened ... Couldn't reach 'glue' ... without network"
        " ... save_to_disk(FOLDER)",
    )


def test_no_split_to_take(model, monkeypatch):
    class Fake:
        @staticmethod
        def load_dataset(name, config):
            return {"unsupervised": []}

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    refused(
        "text",
        "hf:imdb",
        model("bert-classifier"),
        "hf:imdb has the splits unsupervised ... none of validation, test, train",
    )

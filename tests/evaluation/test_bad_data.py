"""Bombs, pipes, lies in headers and damaged tokenizers: one line, at once, with little memory."""

import json
import lzma
import os
import time
from pathlib import Path

import numpy as np
import pytest
from bad_files import (
    arrays,
    bmp,
    content,
    device,
    fifo,
    gif,
    jpeg,
    members,
    npy_array,
    npy_bytes,
    peak_memory,
    picture,
    png,
    sparse,
    xz_bomb,
)
from fixtures import checkpoint

from symmerge.errors import SymmergeError
from symmerge.evaluation.data.text import read_rows
from symmerge.evaluation.tasks import make_task
from symmerge.matching.evidence import read_token_counts
from symmerge.models.model import load

IMAGES, FLOATS = np.zeros((4, 16, 16, 3), np.uint8), np.zeros((4, 3, 16, 16), np.float32)
X, Y = npy_array(IMAGES), npy_array(np.arange(4))
SECONDS, MEMORY = 1.5, 500e6  # this machine may be busy: a second is what it takes alone


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    names = ("gpt2", "bert", "bert-classifier", "vit")
    return {name: load(checkpoint(root / name, name)) for name in names}


def refused(call):
    """The line of the error; it comes at once and takes little memory."""

    def caught():
        with pytest.raises(SymmergeError) as error:
            call()
        return str(error.value)

    start = time.perf_counter()
    line, memory = peak_memory(caught)
    assert time.perf_counter() - start < SECONDS
    assert memory < MEMORY
    assert "\n" not in line and ": " in line and len(line) < 600, line
    return line


def use(task, data, model, **options):
    """Make a task of this data and read all of it."""
    return list(make_task(task, str(data), [model], **options).batches)


def encrypted(info):
    info.flag_bits |= 1


def huge(info):
    info.file_size = 5_000_000_000


TOO_MUCH = "100,000,000"
NOT_PLAIN = "not a regular file"

# model -> case -> what makes the data, what is said
DATA = {
    "gpt2": {
        "xz bomb": (xz_bomb("t.txt.xz", 4), f"unpacks to more than {TOO_MUCH} bytes"),
        "xz bomb of tables": (xz_bomb("t.tsv.xz", 1), f"unpacks to more than {TOO_MUCH} bytes"),
        "xz with a dictionary of a gigabyte": (
            content(
                "t.txt.xz",
                lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]),
            ),
            "cannot be read",
        ),
        "a line of a gigabyte": (sparse("t.txt", 10**9), f"1,000,000,000 bytes, {TOO_MUCH}"),
        "a terabyte": (sparse("t.txt", 10**12), TOO_MUCH),
        "a table of gigabytes": (sparse("t.jsonl", 10**10), TOO_MUCH),
        "pipe": (fifo("t.txt"), NOT_PLAIN),
        "compressed pipe": (fifo("t.txt.xz"), NOT_PLAIN),
        "/dev/zero": (device("/dev/zero"), NOT_PLAIN),
        "/dev/urandom": (device("/dev/urandom"), NOT_PLAIN),
        "/dev/null": (device("/dev/null"), NOT_PLAIN),
        "a name with NUL": (device("a\0b"), "cannot be read"),
        "a name too long": (device("a" * 300), "cannot be read"),
        "no UTF-8": (content("t.txt", b"\xff\xfe\x00a"), "not text in UTF-8"),
        "UTF-16": (content("t.txt", "text".encode("utf-16")), "not text in UTF-8"),
        "empty": (content("t.txt", ""), "0 tokens"),
        "a long line of JSON": (
            content("t.jsonl", '{"text": "' + "a" * 1_000_001 + '"}\n'),
            "line 1 has 1,000,0",
        ),
        "deep JSON": (content("t.jsonl", "[" * 100_000), "line 1 is not a JSON object"),
        "digits of JSON": (content("t.jsonl", "9" * 5000), "line 1 is not a JSON object"),
        "text that is a list": (content("t.jsonl", '{"text": ["a"]}\n'), "row 1 lacks"),
        "thousands of columns": (content("t.csv", "a," * 5000 + "\n1\n"), "and 4993 more"),
        "a long field": (content("t.csv", "text\n" + "a" * 200_000), "is not a table"),
    },
    "bert-classifier": {
        "NUL in a table": (content("t.tsv", "label\ttext\n\0\ta\n"), "t.tsv"),
        "labels as lists": (content("t.jsonl", '{"text": "a", "label": [0]}\n'), "row 1 lacks"),
        "labels of hundreds of digits": (content("t.tsv", f"{'9' * 400}\ta\n"), "has the label"),
        "labels of a megabyte": (
            content("t.jsonl", json.dumps({"text": "a", "label": "b" * 900_000}) + "\n"),
            "has the label",
        ),
        "infinite labels": (content("t.tsv", "inf\ta\n"), "has the label inf"),
    },
    "vit": {
        "encrypted": (members(x=X, y=Y, claim=encrypted), "x.npy is encrypted"),
        "a bomb": (members(x=X, y=Y, claim=huge), "unpacks to 5,000,000,000 bytes"),
        "a zip that is no npz": (members(readme=b"text"), "has the arrays readme"),
        "members that are no arrays": (members(x=b"text", y=Y), "is not an .npz"),
        "empty members": (members(x=b"", y=b""), "is not an .npz"),
        "an npy called npz": (content("data.npz", X), "is not an .npz"),
        "an empty file": (content("data.npz", b""), "is not an .npz"),
        "a pipe": (fifo("data.npz"), NOT_PLAIN),
        "a folder called npz": (
            lambda folder: (folder / "d.npz").mkdir() or folder / "d.npz",
            "no images in subfolders",
        ),
        "scalars": (arrays(x=np.uint8(3), y=np.int64(1)), "do not match"),
        "a scalar label": (arrays(x=IMAGES, y=np.int64(1)), "do not match"),
        "objects": (arrays(x=np.array([{}]), y=np.arange(1)), "without running code"),
        "objects as labels": (arrays(x=IMAGES, y=np.array([{}] * 4)), "without running code"),
        "text as images": (arrays(x=np.array(["a"] * 4), y=np.arange(4)), "holds <U1"),
        "complex images": (arrays(x=FLOATS.astype(complex), y=np.arange(4)), "holds complex128"),
        "dates as labels": (arrays(x=IMAGES, y=np.zeros(4, "M8[s]")), "holds datetime64"),
        "fields": (arrays(x=IMAGES, y=np.zeros(4, [("a", "i4")])), "holds [('a'"),
        "a shape of terabytes": (members(x=npy_bytes((10**12,)), y=Y), "header promises"),
        "a shape that overflows": (members(x=npy_bytes((2**40, 2**40)), y=Y), "header promises"),
        "a shape of 100 digits": (members(x=npy_bytes((10**99,)), y=Y), "header promises"),
        "a negative shape": (members(x=npy_bytes((-4, 16, 16, 3)), y=Y), "of shape [-4"),
        "a shape of floats": (members(x=npy_bytes((1.5,)), y=Y), "is not an .npz"),
        "an infinite shape": (members(x=npy_bytes("(1e999,)"), y=Y), "is not an .npz"),
        "shape and data differ": (members(x=npy_bytes((4,), data=b"abc"), y=Y), "promises"),
        "a type that is none": (members(x=npy_bytes((4,), descr="'q9'"), y=Y), "is not an .npz"),
        "a header that is code": (
            members(x=npy_bytes("__import__('os')"), y=Y),
            "is not an .npz",
        ),
        "a deep header": (members(x=npy_bytes("(" * 5000), y=Y), "is not an .npz"),
        "a long header": (members(x=npy_bytes(tuple(range(9999))), y=Y), "is not an .npz"),
        "another version": (members(x=b"\x93NUMPY\x09\x00" + X[8:], y=Y), "version (9, 0)"),
        "NaN pixels": (arrays(x=FLOATS + np.nan, y=np.arange(4)), "image 0 has pixels"),
        "infinite pixels": (arrays(x=FLOATS + np.inf, y=np.arange(4)), "NaN or infinite"),
        "pixels beyond float32": (
            arrays(x=FLOATS.astype(float) + 1e300, y=np.arange(4)),
            "NaN or infinite",
        ),
        "labels between classes": (arrays(x=IMAGES, y=np.arange(4) / 2), "has the label 0.5"),
        "negative labels": (arrays(x=IMAGES, y=-np.arange(4)), "has the label -3"),
        "NaN as labels": (arrays(x=IMAGES, y=np.full(4, np.nan)), "has the label nan"),
        "no rows": (arrays(x=IMAGES[:0], y=np.arange(0)), "0 available"),
        "no pixels": (arrays(x=IMAGES[:, :0], y=np.arange(4)), "one side"),
        "two channels": (arrays(x=IMAGES[..., :2], y=np.arange(4)), "1, 3 or 4 channels"),
        "a long strip": (arrays(x=np.zeros((4, 2, 200, 3), np.uint8), y=np.arange(4)), "50 times"),
        "PNG of 50,000 x 50,000": (
            picture("0/bad.png", png(50_000, 50_000)),
            "more than 32,000,000 pixels",
        ),
        "PNG of 8,000 x 8,000": (picture("0/bad.png", png(8_000, 8_000)), "32,000,000 in all"),
        "PNG of billions": (picture("0/bad.png", png(2**31 - 1, 2**31 - 1)), "bad.png"),
        "PNG strip": (picture("0/bad.png", png(30_000_000, 1)), "50 times"),
        "JPEG of 65,000": (
            picture("0/bad.jpg", jpeg(65_000, 65_000)),
            "more than 32,000,000 pixels",
        ),
        "GIF of 65,000": (picture("0/bad.gif", gif(65_000, 65_000)), "more than 32,000,000 pixels"),
        "BMP of a million": (
            picture("0/bad.bmp", bmp(10**6, 10**6)),
            "more than 32,000,000 pixels",
        ),
        "PostScript called PNG": (
            picture("0/bad.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n"),
            "cannot be read as an image",
        ),
        "cut PNG": (picture("0/bad.png", png(16, 16, complete=True)[:45]), "bad.png cannot"),
        "picture pipe": (picture("0/bad.png", os.mkfifo), NOT_PLAIN),
        "picture device": (
            picture("0/bad.png", lambda path: path.symlink_to("/dev/zero")),
            NOT_PLAIN,
        ),
        "picture folder": (picture("0/bad.png", Path.mkdir), "bad.png cannot"),
    },
}
TASK = {"gpt2": "clm", "bert-classifier": "text", "vit": "image"}
CASES = [(name, case) for name, cases in DATA.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_data_that_cannot_be_used(models, tmp_path, name, case):
    make, said = DATA[name][case]
    data = make(tmp_path)
    assert said in refused(lambda: use(TASK[name], data, models[name]))


def test_too_many_rows(monkeypatch, tmp_path):
    monkeypatch.setattr("symmerge.evaluation.data.text.LARGEST_TABLE", 3)
    for name, row in (("t.tsv", "1\ta\n"), ("t.jsonl", '{"text": "a", "label": 1}\n')):
        assert len(read_rows(str(content(name, row * 3)(tmp_path))).texts) == 3
        data = content(name, row * 4)(tmp_path)
        assert "more than 3 rows" in refused(lambda data=data: read_rows(str(data)))


GOOD = {
    "gpt2": {
        "streams and padding": content(
            "t.txt.xz", lzma.compress(b"ab " * 50) + bytes(8) + lzma.compress(b"cd " * 50)
        ),
        "byte order mark": content("t.txt", "\ufeff" + "ab " * 50),
        "NUL and white space": content("t.txt", "\0 \n" * 50),
    },
    "bert-classifier": {"numbers as text": content("t.jsonl", '{"text": 3, "label": true}\n')},
    "vit": {
        "compressed members": members(x=X, y=Y),
        "Fortran order": arrays(x=np.asfortranarray(IMAGES), y=np.arange(4)),
        "big-endian floats": arrays(x=FLOATS.astype(">f4"), y=np.arange(4).astype(">i8")),
        "float16": arrays(x=FLOATS.astype(np.float16), y=np.arange(4)),
        "whole numbers as floats": arrays(x=IMAGES, y=np.arange(4.0)),
        "grey": arrays(x=IMAGES[..., 0], y=np.arange(4)),
        "a large PNG": picture("0/large.png", png(2000, 1500, complete=True)),
        "JPEG": picture("0/other.jpg", jpeg(16, 16)),
        "GIF": picture("0/other.gif", gif(16, 16)),
        "BMP": picture("0/other.bmp", bmp(16, 16)),
    },
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in GOOD for case in GOOD[name]])
def test_data_that_can_be_used(models, tmp_path, name, case):
    """The controls: the same kinds of files without defects."""
    assert use(TASK[name], GOOD[name][case](tmp_path), models[name])


def test_fortran_order_is_read_as_numpy_does(models, tmp_path):
    images = np.random.RandomState(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    for name, array in (("c", images), ("f", np.asfortranarray(images))):
        (batch,) = use(
            "image", arrays(f"{name}.npz", x=array, y=np.arange(4))(tmp_path), models["vit"]
        )
        order = batch["labels"].numpy()
        assert (batch["pixel_values"].numpy() == images[order]).all()


def test_the_largest_picture_takes_little_memory(models, tmp_path):
    data = picture("0/large.png", png(5600, 5600, complete=True))(tmp_path)
    batches, memory = peak_memory(lambda: use("image", data, models["vit"]))
    assert batches and memory < MEMORY


def test_a_long_text_is_excerpted(models, tmp_path, monkeypatch):
    """Pieces from all over it, each tokenized by itself."""
    monkeypatch.setattr("symmerge.evaluation.tasks.language.EXCERPT", 64)
    text = "".join(chr(97 + number) * 128 for number in range(8))
    task = make_task("clm", str(content("t.txt", text)(tmp_path)), [models["gpt2"]])
    (batch,) = task.batches
    assert task.samples == 8 and len({tuple(row.tolist()) for row in batch["input_ids"]}) == 8


COUNTS = {
    "pickle": lambda folder: np.save(folder / "c.npy", np.array([{}])),
    "scalar": lambda folder: np.save(folder / "c.npy", np.float32(1)),
    "matrix": lambda folder: np.save(folder / "c.npy", np.ones((2, 2))),
    "negative": lambda folder: np.save(folder / "c.npy", -np.ones(3)),
    "NaN": lambda folder: np.save(folder / "c.npy", np.full(3, np.nan)),
    "beyond float32": lambda folder: np.save(folder / "c.npy", np.full(3, 1e300)),
    "terabytes": content("c.npy", npy_bytes((10**12,), "'<f8'")),
    "text": content("c.npy", "text"),
    "empty": content("c.npy", ""),
    "pipe": fifo("c.npy"),
    "absent": lambda folder: None,
}


@pytest.mark.parametrize("case", COUNTS)
def test_token_counts(tmp_path, case):
    COUNTS[case](tmp_path)
    assert "c.npy" in refused(lambda: read_token_counts(tmp_path / "c.npy"))
    (tmp_path / "c.npy").unlink(missing_ok=True)
    np.save(tmp_path / "c.npy", np.arange(3))  # the control
    assert read_token_counts(tmp_path / "c.npy").tolist() == [0, 1, 2]

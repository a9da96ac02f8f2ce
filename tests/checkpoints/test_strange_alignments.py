"""Strange alignment files: `apply` refuses them in one line and writes nothing."""

import json
from pathlib import Path

import pytest
import torch
from fixtures import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strange import (
    NAN,
    make_fifo,
    make_loop,
    make_socket,
    one_line,
    sources,
)

__all__ = ["sources"]  # fixtures

# alignment files


@pytest.fixture(scope="module")
def alignment(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("moved") / "out"
    run("random", sources("llama"), "--out", out)
    return out / "alignment.safetensors"


HEADERS = {
    "family": (5, None, ["llama"]),
    "spec": (5, None, {}, "x" * 10**6),
    "canonical": ("fold", 5, None, [5], ["foo"], [["fold"]], {"fold": 1}),
    "restrict": ([], 5, None, {"residual": 5}, {"residual": "foo"}, {"foo": "full"}, {"self": "x"}),
    "source_tensors": ([], 5, None, {"lm_head.weight": 5}, {"lm_head.weight": "x" * 10**6}),
    "source": (5, {}),
    "format": ("symmerge.alignment/9", 5),
}
HEADER_CASES = [
    pytest.param(field, value, id=f"{field} {str(value)[:20]}")
    for field, values in HEADERS.items()
    for value in values
]
INDEX, MATRIX, PAIR = "head.0/index", "residual/matrix", "qk.0/pair"
ELEMENTS = {
    "integer matrix": (MATRIX, lambda t: t.long()),
    "complex matrix": (MATRIX, lambda t: t.to(torch.complex64)),
    "half matrix": (MATRIX, lambda t: t.half()),
    "boolean matrix": (MATRIX, lambda t: t > 0),
    "NaN matrix": (MATRIX, lambda t: t * NAN),
    "huge matrix": (MATRIX, lambda t: t * 1e300),
    "zero matrix": (MATRIX, lambda t: t * 0),
    "small matrix": (MATRIX, lambda t: t[:3, :3]),
    "float index": (INDEX, lambda t: t.double()),
    "short index": (INDEX, lambda t: t.int()),
    "boolean index": (INDEX, lambda t: t > 0),
    "negative index": (INDEX, lambda t: t - 1),
    "index out of range": (INDEX, lambda t: t + 10**12),
    "repeated index": (INDEX, lambda t: t * 0),
    "empty index": (INDEX, lambda t: t[:0]),
    "scalar index": (INDEX, lambda t: t[0]),
    "integer pair": (PAIR, lambda t: t.long()),
    "zero pair": (PAIR, lambda t: t * 0),
    "infinite pair": (PAIR, lambda t: t / 0),
    "missing": (MATRIX, lambda t: None),
}


def rewrite(alignment, target, *, header=(), tensors=(), names=()):
    with safe_open(alignment, "pt") as file:
        content = json.loads(file.metadata()["symmerge"])
    stored = {**load_file(alignment), **dict(tensors)}
    kept = {dict(names).get(key, key): value for key, value in stored.items() if value is not None}
    contiguous = {name: value.contiguous() for name, value in kept.items()}
    save_file(contiguous, target, {"symmerge": json.dumps({**content, **dict(header)})})
    return target


def refuse_alignment(file, sources, out):
    one_line("apply", file, sources("llama"), "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(("field", "value"), HEADER_CASES)
def test_header_of_an_alignment(alignment, sources, tmp_path, field, value):
    file = rewrite(alignment, tmp_path / "a.safetensors", header={field: value})
    refuse_alignment(file, sources, tmp_path / "out")


@pytest.mark.parametrize("label", ELEMENTS)
def test_elements_of_an_alignment(alignment, sources, tmp_path, label):
    name, change = ELEMENTS[label]
    value = change(load_file(alignment)[name])
    file = rewrite(alignment, tmp_path / "a.safetensors", tensors={name: value})
    refuse_alignment(file, sources, tmp_path / "out")


@pytest.mark.parametrize(
    "renamed", ["matrix", "/matrix", "residual/", "nowhere/matrix", "x" * 9999]
)
def test_names_in_an_alignment(alignment, sources, tmp_path, renamed):
    file = rewrite(alignment, tmp_path / "a.safetensors", names={MATRIX: renamed})
    refuse_alignment(file, sources, tmp_path / "out")


def test_a_good_alignment_passes(alignment, sources, tmp_path):
    file = rewrite(alignment, tmp_path / "a.safetensors", header={"note": "of a reader"})
    run("apply", file, sources("llama"), "--out", tmp_path / "out")


@pytest.mark.parametrize("make", [make_fifo, make_socket, Path.mkdir, make_loop])
def test_no_plain_alignment(sources, tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(Path("a"))
    refuse_alignment(Path("a"), sources, tmp_path / "out")

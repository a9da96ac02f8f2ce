"""Strange configs, tensors, indices and alignments: one line with a remedy, nothing written.

Each table holds what is done to a good checkpoint. What every verb that loads does, `load` does;
verbs are run where they do something of their own.
"""

import json
import os
import shutil
import socket
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from fixtures import checkpoint, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from symmerge.cli import app
from symmerge.errors import LONGEST, SymmergeError, SymmetryError
from symmerge.families.base import ACTIVATIONS
from symmerge.models.model import load
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.indices import assign

WTE = "transformer.wte.weight"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("sources"), {}

    def source(name):
        if name not in made:
            made[name] = checkpoint(root / name, name)
        return made[name]

    return source


@pytest.fixture
def copy_of(sources, tmp_path):
    return lambda name: Path(shutil.copytree(sources(name), tmp_path / name))


def refused(folder, **options):
    """The line with which a folder is refused."""
    with pytest.raises(SymmergeError) as error:
        load(folder, **options)
    said = str(error.value)
    assert "\n" not in said and len(said) <= LONGEST + 10 and ": " in said
    return said


def one_line(*arguments):
    """The line of a command that refuses its input."""
    result = run(*arguments, expect=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "report it" not in result.stderr
    return result.stderr


def set_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


# configs: family -> field -> values that it cannot have

SIZES = (-1, 0, 1.5, True, 10**9, 10**30, "wide", [], {}, NAN)
SHARES = (-0.5, 1.5, NAN, INF, "much", [0.1])
EPSILONS = (-1e-5, NAN, INF, "1e-5", [])
LABELS = ([1], "three", {"a": 1}, {"0": 5})
NESTED = ([["X"]], [1], {}, [None], "GPT2LMHeadModel", [{}])
CONFIGS = {
    "gpt2": {
        "activation_function": ("foo", "prelu", "xielu", "", 5, ["gelu"], "x" * 3000),
        "n_head": SIZES,
        "num_attention_heads": (1.5, -1),
        "n_embd": (-48, 0, 10**12),
        "vocab_size": (-1, 0, 10**15),
        "resid_pdrop": SHARES,
        "embd_pdrop": SHARES,
        "layer_norm_epsilon": EPSILONS,
        "architectures": NESTED,
        "model_type": (["gpt2"], 5, {}, "x" * 10**6, "GPT2"),
        "pad_token_id": (10**30, "0", 1.5),
        "num_labels": (10**9, 10**30, -1, INF),
        "text_config": ({}, {"model_type": "gpt2"}, 5),
        "sliding_window": (1.5, "8", {}),
    },
    "llama": {
        "hidden_act": ("foo", "xielu"),
        "num_key_value_heads": (0, -2, 3, 10**9),
        "head_dim": (0, -12, 24, 13),
        "attention_dropout": SHARES,
        "rms_norm_eps": EPSILONS,
        "rope_parameters": (
            *({"rope_type": "foo", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": -1}),
            *({"rope_type": "default", "rope_theta": NAN}, {"rope_theta": "big"}, 5, "default"),
            {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"},
        ),
        "max_position_embeddings": (-1, 1.5, 10**30),
    },
    "qwen2": {
        "num_hidden_layers": (10**9, -1),
        "layer_types": (["full_attention"], ["foo", "bar"], "full_attention", [1, 2]),
    },
    "bert-classifier": {
        "id2label": ({str(n): "x" for n in range(100_001)}, *LABELS),
        "hidden_dropout_prob": SHARES,
        "classifier_dropout": (2, -1),
        "type_vocab_size": (-1, 10**9),
        "pad_token_id": (200, -200),
    },
    "modernbert": {"norm_eps": EPSILONS, "local_attention": (-1, "all"), "pad_token_id": (10**9,)},
    "neox": {"partial_rotary_factor": (2.0, "half")},
    "vit": {"image_size": ([16], "large", [16, 16, 16], -16, 10**9), "patch_size": (0, [])},
    "dinov3": {"image_size": (10**6, 0), "drop_path_rate": (3,), "rope_theta": (-1.0, NAN)},
}
CASES = [
    pytest.param(name, field, value, id=f"{name} {field} {str(value)[:20]}")
    for name, fields in CONFIGS.items()
    for field, values in fields.items()
    for value in values
]
LATER = {"pad_token_id", "rope_parameters"}  # seen only when the class is built


@pytest.mark.parametrize(("name", "field", "value"), CASES)
def test_config(sources, tmp_path, name, field, value):
    """No weights are needed to refuse it; `inspect`, which builds no class, refuses it as well."""
    folder = tmp_path / name
    folder.mkdir()
    for file in sources(name).iterdir():
        os.link(file, folder / file.name)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**content, field: value}))
    said = refused(folder)
    assert "config.json" in said or "no table" in said
    if field not in LATER:
        assert refused(folder, check_class=False) == said


@pytest.mark.quick
def test_a_config_of_gigabytes(copy_of):
    folder = copy_of("gpt2")
    with open(folder / "config.json", "r+b") as file:
        file.truncate(6 * 10**9)  # sparse: nothing is on disk
    assert "at most" in refused(folder)


def test_every_good_config_passes(sources):
    for name in CONFIGS:
        assert load(sources(name)).parameters > 0


def test_activations_are_those_without_weights():
    from transformers.activations import ACT2FN

    assert ACT2FN.keys() >= ACTIVATIONS
    for name in ACTIVATIONS:
        assert not list(ACT2FN[name].parameters())
        x = torch.randn(7, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(ACT2FN[name](x)[3], ACT2FN[name](x[3:4])[0]), "not unit by unit"


def test_a_class_with_more_tensors_than_the_checkpoint(copy_of):
    folder = copy_of("gpt2")
    set_config(folder, add_cross_attention=True)
    assert "crossattention" in refused(folder)


def test_every_verb_refuses_at_once(sources, copy_of, tmp_path):
    folder, good, out = copy_of("gpt2"), sources("gpt2"), tmp_path / "out"
    run("random", good, "--out", tmp_path / "moved")
    set_config(folder, activation_function="foo")
    lines = {
        one_line("inspect", folder),
        one_line("verify", good, folder),
        one_line("same", folder, good),
        one_line("canonical", folder, "--out", out),
        one_line("random", folder, "--out", out, "--no-verify"),
        one_line("apply", tmp_path / "moved" / "alignment.safetensors", folder, "--out", out),
        one_line("align", good, folder, "--out", out),
        one_line("merge", folder, good, "--out", out),
    }
    assert len(lines) == 1 and "activation_function 'foo'" in lines.pop() and not out.exists()


def test_what_is_only_returned_otherwise_is_no_fault(copy_of):
    """`return_dict` and chunks change no function: such a config works."""
    folder = copy_of("bert-classifier")
    set_config(folder, return_dict=False, chunk_size_feed_forward=7)
    run("verify", folder, folder)


# tensors in .bin files


def expanded(tensor):
    return torch.zeros(1).expand(10**6, 10**6)


BINS = {
    "float8": (lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "meta": (lambda t: t.to("meta"), "meta device"),
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantised"),
    "boolean": (lambda t: t > 0, "bool"),
    "terabytes": (expanded, "expanded view"),
    "not a tensor": (lambda t: t.tolist(), "missing tensors"),
}


def write_bin(folder, content, **how):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin", **how)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("label", BINS)
def test_bin_tensor(copy_of, label, zipped):
    folder = copy_of("gpt2")
    change, words = BINS[label]
    tensors = load_file(folder / "model.safetensors")
    tensors[WTE] = change(tensors[WTE])
    write_bin(folder, tensors, _use_new_zipfile_serialization=zipped)
    said = refused(folder)
    assert not zipped or (words in said and WTE in said)  # older files have fewer kinds of tensors


@pytest.mark.parametrize(
    "content",
    [{"state_dict": {WTE: torch.ones(2)}}, {1: torch.ones(2)}, {}, torch.ones(2), "text"],
    ids=["nested", "number as name", "empty", "a tensor", "a text"],
)
def test_bin_of_something_else(copy_of, content):
    folder = copy_of("gpt2")
    write_bin(folder, content)
    refused(folder)


def test_a_compressed_bin(copy_of, tmp_path):
    folder = copy_of("gpt2")
    write_bin(folder, load_file(folder / "model.safetensors"))
    with (
        zipfile.ZipFile(folder / "pytorch_model.bin") as plain,
        zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as squeezed,
    ):
        for item in plain.infolist():
            squeezed.writestr(item.filename, plain.read(item))
    load(folder)  # the control: as torch wrote it
    shutil.move(tmp_path / "z", folder / "pytorch_model.bin")
    assert "compressed" in refused(folder)


def test_a_negative_view_is_read(copy_of):
    """Legal, if odd: a view that negates what is stored."""
    folder = copy_of("gpt2")
    tensors = load_file(folder / "model.safetensors")
    turned = torch.complex(torch.zeros_like(tensors[WTE]), -tensors[WTE]).conj().imag
    assert turned.is_neg()
    write_bin(folder, {**tensors, WTE: turned})
    assert torch.equal(load(folder).weights[WTE], tensors[WTE])


# headers and indices


def rewrite_header(folder, change):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.dumps(change(json.loads(content[8:end]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])


ENTRIES = {
    **{
        f"dtype {code}": {"dtype": code}
        for code in ("F4", "F6_E2M3", "F8_E8M0", "C64", "x" * 10**6, 5, None, ["F32"])
    },
    "offsets as text": {"data_offsets": ["0", "4"]},
    "offsets as floats": {"data_offsets": [0.0, 19392.0]},
    "offsets reversed": {"data_offsets": [19392, 0]},
    "negative offset": {"data_offsets": [-4, 19388]},
    "negative shape": {"shape": [-101, -48]},
    "boolean shape": {"shape": [True, 4848]},
    "overflowing shape": {"shape": [2**40, 2**40, 0]},
    "shape of the same size": {"shape": [48, 101]},
    "shape of nothing": {"shape": [0, 48], "data_offsets": [0, 0]},
    "deep shape": {"shape": [[[101]], 48]},
    "many axes": {"shape": [1] * 5000},
    "no dtype": {"dtype": {}},
}


@pytest.mark.parametrize("label", ENTRIES, ids=lambda label: label[:20])
def test_header_entry(copy_of, label):
    folder = copy_of("gpt2")
    rewrite_header(folder, lambda header: {**header, WTE: {**header[WTE], **ENTRIES[label]}})
    refused(folder)


def test_a_name_of_megabytes_is_cut(copy_of):
    folder = copy_of("gpt2")
    rewrite_header(
        folder, lambda header: {"x" * 10**6 if k == WTE else k: v for k, v in header.items()}
    )
    assert "unexpected tensors" in refused(folder)


INDICES = {
    "a list": {"weight_map": [1]},
    "a text": {"weight_map": "model.safetensors"},
    "numbers": {"weight_map": {WTE: 5}},
    "nothing": {"weight_map": {WTE: None}},
    "lists": {"weight_map": {WTE: ["a.safetensors"]}},
    "empty": {"weight_map": {}},
    "empty name": {"weight_map": {WTE: ""}},
    "zero byte": {"weight_map": {WTE: "a\0.safetensors"}},
    "long name": {"weight_map": {WTE: "x" * 5000}},
    "missing shard": {"weight_map": {WTE: "none.safetensors"}},
    "folder": {"weight_map": {WTE: "sub"}},
    "config": {"weight_map": {WTE: "config.json"}},
}


@pytest.mark.quick
@pytest.mark.parametrize("label", INDICES)
def test_index(copy_of, label):
    folder = copy_of("gpt2")
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {WTE: "a.safetensors"}, "metadata": 5}))
    load(folder)  # the control: a right map, and a total size that nobody needs
    index.write_text(json.dumps(INDICES[label]))
    refused(folder)


# huge finite weights


def scale(folder, factor, dtype, names=""):
    tensors = load_file(folder / "model.safetensors")
    grown = {
        name: tensor * (factor / tensor.abs().max()) if names in name else tensor
        for name, tensor in tensors.items()
    }
    save_file({k: v.to(dtype) for k, v in grown.items()}, folder / "model.safetensors")


def test_weights_that_no_product_survives(copy_of, tmp_path):
    folder, other = copy_of("gpt2"), checkpoint(tmp_path / "other", "gpt2", seed=1)
    scale(folder, 1e30, torch.float32, "mlp")
    lines = {
        one_line("verify", folder, other),
        one_line("same", folder, other),
        one_line("canonical", folder, "--out", tmp_path / "out"),
        one_line("random", folder, "--out", tmp_path / "out"),
        one_line("align", other, folder, "--out", tmp_path / "out", "--recipe", "permutations"),
        one_line("merge", other, folder, "--out", tmp_path / "out", "--recipe", "permutations"),
    }
    assert all("1e+30" in line for line in lines) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("factor", "dtype", "names"),
    [(6e4, torch.float16, ""), (9e11, torch.float32, ""), (9e11, torch.float32, "mlp")],
)
def test_large_weights_get_an_answer_or_one_line(copy_of, tmp_path, factor, dtype, names):
    folder, out = copy_of("gpt2"), tmp_path / "out"
    scale(folder, factor, dtype, names)
    assert one_line("random", folder, "--out", out) and not out.exists()
    for verb in ("verify", "same"):
        ended = CliRunner().invoke(app, [verb, str(folder), str(folder)])
        assert ended.exit_code in (0, 1) or one_line(verb, folder, folder)


def test_numbers_that_are_not_finite_are_said():
    bad = torch.full((3, 3), NAN)
    for compute in (assign, linalg.svdvals):
        compute(torch.eye(3))  # the control
        with pytest.raises(SymmetryError, match="too large"):
            compute(bad)


# files that are no files, names that are no names


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_loop(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [make_fifo, make_socket, Path.mkdir, make_loop])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_no_plain_file(copy_of, monkeypatch, make, name):
    folder = copy_of("gpt2")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    else:
        (folder / name).unlink()
    monkeypatch.chdir(folder)  # names of sockets are short
    make(Path(name))
    refused(folder)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 300, "x/" * 3000])
def test_long_paths(sources, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pair = sources("gpt2"), checkpoint(tmp_path / "other", "gpt2", seed=1)
    one_line("inspect", name)
    one_line("random", sources("gpt2"), "--out", name)
    one_line("canonical", sources("gpt2"), "--out", name, "--overwrite")
    one_line("align", *pair, "--out", name)
    one_line("merge", *pair, "--out", name)
    one_line("apply", name, sources("gpt2"), "--out", "o")
    assert not [file for file in tmp_path.rglob("*") if "partial" in file.name]


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

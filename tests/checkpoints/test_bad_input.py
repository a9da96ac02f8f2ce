"""Bad input: exit code 2, one line with the remedy, nothing written, no code run."""

import json
import os
import pickle
import runpy
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from symmerge.checkpoints import folders
from symmerge.cli import app
from symmerge.lab.small_models import small_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Small checkpoints from save_pretrained, each made once; copy before changing one."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def make(name="gpt2", seed=0, **changes):
        folder = root / "-".join(
            [name, str(seed), *(f"{key}{value}" for key, value in changes.items())]
        )
        small_model(name, seed=seed, **changes).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def folder(saved, tmp_path):
    """A small GPT-2 that a test may spoil."""
    return shutil.copytree(saved(), tmp_path / "model")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def snapshot(root):
    """Every file and folder below, hidden ones too, with size and time."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in root.rglob("*")}


def refused(root, *arguments, words):
    """Run a command that must fail as bad input does, and return its line."""
    before = snapshot(root)
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert (
        result.stdout == ""
        and result.stderr.count("\n") == 1
        and result.stderr.startswith("error: ")
    ), result.output
    missing = [word for word in words if word not in result.stderr]
    assert not missing, f"{missing} not in: {result.stderr}"
    assert snapshot(root) == before
    return result.stderr


# checkpoints that are spoilt, and what the line must say


def config(**changes):
    """Set config values; None removes one."""

    def spoil(folder):
        file = folder / "config.json"
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return spoil


def tensors(change):
    """Rewrite the tensors."""

    def spoil(folder):
        file = folder / "model.safetensors"
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in change(load_file(file)).items()},
            file,
            {"format": "pt"},
        )

    return spoil


def poison(name, value, dtype=torch.float32):
    """One bad entry in one tensor."""

    def change(found):
        tensor = found[name].clone()
        tensor.view(-1)[7] = value
        return {key: (tensor if key == name else other).to(dtype) for key, other in found.items()}

    return tensors(change)


def as_dtype(name, dtype):
    return tensors(lambda found: {**found, name: found[name].to(dtype)})


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def header_bytes(folder):
    return 8 + struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]


def cut(where):
    """Keep only the first bytes; `where` is given the header's end and the file's."""

    def spoil(folder):
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: where(header_bytes(folder), len(content))])

    return spoil


def header(change):
    """Rewrite the safetensors header and leave the data."""

    def spoil(folder):
        file = folder / "model.safetensors"
        start, content = header_bytes(folder), file.read_bytes()
        changed = change(content[8:start])
        file.write_bytes(struct.pack("<Q", len(changed)) + changed + content[start:])

    return spoil


def item(**changes):
    """Change one entry of the header."""

    def change(found):
        content = json.loads(found)
        content[WTE].update(changes)
        return json.dumps(content).encode()

    return header(change)


def shards(spoil):
    """Write the checkpoint in several files, then spoil that."""

    def both(folder):
        shutil.rmtree(folder)
        small_model("gpt2").save_pretrained(folder, max_shard_size="30KB")
        spoil(folder)

    return both


def second_shard(folder):
    return sorted(folder.glob("model-00002-of-*.safetensors"))[0]


def bin_file(content, **how):
    def spoil(folder):
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin", **how)

    return spoil


def adapter(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


WTE, LAST = "transformer.wte.weight", "transformer.wpe.weight"
FIT, AGAIN, FULL = (
    "config.json the one it was saved with",
    "download or copy it again",
    "use the float16 or float32 checkpoint",
)

SPOILT = {
    "unknown architecture": (
        config(model_type="mamba"),
        ["{folder}: ", "'mamba'", "nearest supported: ", "docs/new-family.md"],
    ),
    "class not a list": (config(architectures=5), ["{folder}: ", "architectures", "not a list"]),
    "type not a word": (config(model_type=["gpt2"]), ["no table for model_type", "supported"]),
    "no heads": (config(n_head=0), ["{folder}: ", "config.json", "restore"]),
    "unknown class": (
        config(architectures=["GPT2ForSpeech"]),
        ["{folder}: ", "GPT2ForSpeech", "GPT2LMHeadModel"],
    ),
    "no model_type": (
        config(model_type=None),
        ["{folder}: ", "no 'model_type'", "supported:", "gpt2"],
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        ["{folder} has no config.json", "Hugging Face checkpoint"],
    ),
    "config not JSON": (
        text("config.json", b'{"model_type": "gpt2",'),
        ["{folder}/config.json is not valid JSON", "restore"],
    ),
    "config not text": (
        text("config.json", b"\xff\xfe\x00"),
        ["{folder}/config.json is not valid JSON", "restore"],
    ),
    "config not an object": (
        text("config.json", b"[1]"),
        ["{folder}/config.json is not a JSON object", "restore"],
    ),
    "config nonsense": (config(n_embd="wide"), ["{folder}: ", "n_embd", "'wide'", "restore"]),
    "missing tensors": (
        tensors(lambda found: {key: found[key] for key in found if key not in (WTE, LAST)}),
        ["{folder}: ", "missing tensors", WTE, LAST, FIT],
    ),
    "unexpected tensors": (
        tensors(lambda found: {**found, "score.weight": torch.ones(2)}),
        ["{folder}: ", "unexpected tensors: score.weight", FIT],
    ),
    "misshapen tensors": (
        tensors(lambda found: {**found, WTE: found[WTE][:100]}),
        ["{folder}: ", f"misshapen tensors: {WTE} is [100, 48]", "[101, 48]", FIT],
    ),
    "many misshapen tensors": (
        config(n_embd=96),
        ["{folder}: ", "misshapen", "h.0.attn.c_attn.bias is [144]", "more", FIT],
    ),
    "NaN first": (
        poison(WTE, float("nan")),
        ["{folder}: ", WTE, "1 entries", "NaN", "use another checkpoint"],
    ),
    "NaN last": (
        poison("transformer.ln_f.bias", float("nan")),
        ["{folder}: ", "ln_f.bias", "NaN", "use another checkpoint"],
    ),
    "infinity": (
        poison("transformer.h.1.mlp.c_proj.weight", float("inf")),
        ["{folder}: ", "h.1.mlp.c_proj.weight", "infinite", "use another checkpoint"],
    ),
    "negative infinity in float16": (
        poison(LAST, float("-inf"), torch.float16),
        ["{folder}: ", LAST, "infinite", "use another checkpoint"],
    ),
    "NaN in bfloat16": (
        poison(LAST, float("nan"), torch.bfloat16),
        ["{folder}: ", LAST, "NaN", "use another checkpoint"],
    ),
    "empty file": (cut(lambda start, end: 0), ["{folder}/model.safetensors", "0 bytes", AGAIN]),
    "cut in the length": (
        cut(lambda start, end: 5),
        ["{folder}/model.safetensors", "5 bytes", AGAIN],
    ),
    "cut in the header": (
        cut(lambda start, end: start // 2),
        ["{folder}/model.safetensors", "header is cut short", AGAIN],
    ),
    "cut after the header": (
        cut(lambda start, end: start),
        ["{folder}/model.safetensors", "the header promises", AGAIN],
    ),
    "cut in the data": (
        cut(lambda start, end: (start + end) // 2),
        ["{folder}/model.safetensors", "the header promises", AGAIN],
    ),
    "cut by one byte": (
        cut(lambda start, end: end - 1),
        ["{folder}/model.safetensors", "the header promises", AGAIN],
    ),
    "header not JSON": (
        header(lambda found: b"{" * len(found)),
        ["{folder}/model.safetensors", "header does not parse", AGAIN],
    ),
    "header not text": (
        header(lambda found: b"\xff" * len(found)),
        ["{folder}/model.safetensors", "header does not parse", AGAIN],
    ),
    "header a list": (
        header(lambda found: b"[1, 2]"),
        ["{folder}/model.safetensors", "header does not parse", AGAIN],
    ),
    "header shape of words": (
        item(shape=["a"]),
        ["{folder}/model.safetensors", "header does not parse", AGAIN],
    ),
    "header shape too large": (
        item(shape=[102, 48]),
        ["{folder}/model.safetensors", WTE, "[102, 48]", AGAIN],
    ),
    "header offsets overlap": (
        item(data_offsets=[4, 101 * 48 * 4 + 4]),
        ["{folder}/model.safetensors", "does not fit", AGAIN],
    ),
    "header one offset": (
        item(data_offsets=[0]),
        ["{folder}/model.safetensors", "header does not parse", AGAIN],
    ),
    "header unknown precision": (
        item(dtype="F13"),
        ["{folder}/model.safetensors", WTE, "F13", AGAIN],
    ),
    "missing shard": (
        shards(lambda folder: second_shard(folder).unlink()),
        ["{folder}: ", "missing shard model-00002-of-", "fetch it again"],
    ),
    "truncated shard": (
        shards(lambda folder: os.truncate(second_shard(folder), 2000)),
        ["{folder}/model-00002-of-", AGAIN],
    ),
    "index without map": (
        shards(text("model.safetensors.index.json", b"{}")),
        ["{folder}/model.safetensors.index.json has no 'weight_map'", "restore"],
    ),
    "stored twice": (
        shards(
            lambda folder: shutil.copy(second_shard(folder), sorted(folder.glob("model-00001*"))[0])
        ),
        ["stored twice", "model-00001", "model-00002", "remove"],
    ),
    "pickle not a state dict": (
        bin_file([1, 2]),
        ["{folder}/pytorch_model.bin", "convert it to safetensors"],
    ),
    "pickle damaged": (
        lambda folder: (bin_file({})(folder), os.truncate(folder / "pytorch_model.bin", 100)),
        ["{folder}/pytorch_model.bin", "safetensors"],
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        ["{folder} has no model.safetensors", "model.gguf", "save_pretrained"],
    ),
    "quantised config": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        ["{folder} is quantised (gptq)", FULL],
    ),
    "int8 tensors": (
        as_dtype("transformer.h.0.mlp.c_fc.weight", torch.int8),
        ["{folder}: ", "h.0.mlp.c_fc.weight", "int8", "quantised", FULL],
    ),
    "float8 tensors": (
        as_dtype("transformer.h.0.mlp.c_fc.weight", torch.float8_e4m3fn),
        ["{folder}: ", "h.0.mlp.c_fc.weight", "quantised", FULL],
    ),
    "LoRA adapter": (adapter, ["{folder} is a LoRA adapter", "merge_and_unload"]),
    "LoRA adapter beside a model": (
        text("adapter_config.json", b"{}"),
        ["{folder} is a LoRA adapter", "merge_and_unload"],
    ),
    "two names of one tensor": (
        tensors(lambda found: {**found, "wte.weight": found[WTE]}),
        ["{folder}: ", "wte.weight", "two names of the same tensor", "remove"],
    ),
}


@pytest.mark.parametrize("label", SPOILT)
def test_spoilt_checkpoint(saved, folder, tmp_path, label):
    """Every verb says the same; verify must not take a broken model for a different one."""
    spoil, words = SPOILT[label]
    words = [word.replace("{folder}", str(folder)) for word in words]
    spoil(folder)
    line = refused(tmp_path, "random", folder, "--out", tmp_path / "out", words=words)
    assert refused(tmp_path, "verify", saved(), folder, words=words) == line
    assert (
        refused(
            tmp_path, "canonical", folder, "--out", tmp_path / "out", "--no-verify", words=words
        )
        == line
    )


def test_an_unspoilt_checkpoint_passes(saved, folder, tmp_path):
    """The control: what the table spoils is fine before, also in several files."""
    config(quantization_config=None, a_key="x")(folder)
    assert run("random", folder, "--out", tmp_path / "out").exit_code == 0
    shards(lambda folder: None)(folder)
    assert run("verify", folder, tmp_path / "out").exit_code == 0
    bin_file(load_file(saved() / "model.safetensors"))(shutil.copytree(saved(), tmp_path / "bin"))
    assert run("verify", folder, tmp_path / "bin").exit_code == 0


# code in a checkpoint


class Evil:
    """A pickle that runs a command where it is loaded without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_pickle_that_needs_code_is_not_run(folder, tmp_path, zipped):
    marker = tmp_path / "marker"
    bin_file({WTE: torch.ones(101, 48), "x": Evil(marker)}, _use_new_zipfile_serialization=zipped)(
        folder
    )
    refused(
        tmp_path,
        "random",
        folder,
        "--out",
        tmp_path / "out",
        words=["pytorch_model.bin", "without running code", "safetensors"],
    )
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))  # the control: such a pickle does run
    assert marker.exists()


@pytest.mark.parametrize("model_type", ["gpt2", "evil"])
def test_remote_code_is_not_run(folder, tmp_path, model_type):
    """A config with Python in its folder: a known model loads, an unknown one is refused."""
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "class Config: pass\nclass Model: pass\n"
    )
    config(
        model_type=model_type,
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )(folder)
    if model_type == "evil":
        refused(
            tmp_path, "random", folder, "--out", tmp_path / "out", words=["'evil'", "supported:"]
        )
    else:
        for arguments in (
            ("inspect", folder),
            ("random", folder, "--out", tmp_path / "out"),
            ("verify", folder, tmp_path / "out"),
        ):
            assert run(*arguments).exit_code == 0
        assert not list((tmp_path / "out").glob("*.py"))
    assert not marker.exists()
    runpy.run_path(str(folder / "evil.py"))  # the control: running it would leave the marker
    assert marker.exists()


# two models that cannot be compared

APART = {
    "architecture": (("bert", {}), ["class GPT2LMHeadModel / BertForMaskedLM"]),
    "class": (("bert-classifier", {}), ["class GPT2LMHeadModel / BertForSequenceClassification"]),
    "vocabulary": (("gpt2", {"vocab_size": 103}), ["vocabulary 101 / 103"]),
    "layers": (("gpt2", {"n_layer": 3}), ["layers 2 / 3"]),
    "size": (("gpt2", {"n_positions": 32}), ["position 64 / 32"]),
    "both": (
        ("gpt2", {"vocab_size": 103, "n_positions": 32}),
        ["vocabulary 101 / 103", "position 64 / 32"],
    ),
}


@pytest.mark.parametrize("label", APART)
def test_verify_names_what_differs(saved, tmp_path, label):
    (name, changes), words = APART[label]
    other = saved(name, **changes)
    line = refused(
        tmp_path,
        "verify",
        saved(),
        other,
        words=[str(saved()), str(other), "cannot be compared", "differ in", *words],
    )
    assert ("vocabulary" in line) == (
        label in ("vocabulary", "both")
    )  # and nothing that does not differ


# where to write


class Place(NamedTuple):
    out: str
    options: tuple[str, ...]
    words: tuple[str, ...]


PLACES = {
    "inside the input": Place("model/out", (), ("overlap", "choose another --out")),
    "deep inside the input": Place(
        "model/a/b", ("--overwrite",), ("overlap", "choose another --out")
    ),
    "the input itself": Place("model", ("--overwrite",), ("overlap", "choose another --out")),
    "around the input": Place(".", ("--overwrite",), ("overlap", "choose another --out")),
    "through a link into the input": Place("link/out", (), ("overlap", "choose another --out")),
    "exists": Place("there", (), ("there exists", "--overwrite")),
    "a file": Place("file", ("--overwrite",), ("file is a file", "choose another --out")),
    "below a file": Place("file/out", (), ("cannot write", "choose another --out")),
    "no permission": Place("/proc/out", (), ("/proc", "choose another --out")),
}


@pytest.mark.parametrize("label", PLACES)
def test_a_place_that_cannot_be_written(folder, tmp_path, label):
    place = PLACES[label]
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(folder)
    for verb in ("random", "canonical"):
        refused(
            tmp_path, verb, folder, "--out", tmp_path / place.out, *place.options, words=place.words
        )


def test_no_disk_space(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        folders.shutil,
        "disk_usage",
        lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**5, 10**5),
    )
    refused(
        tmp_path,
        "random",
        folder,
        "--out",
        tmp_path / "out",
        words=[str(tmp_path), "0.0 GB free", "are needed", "choose another --out"],
    )


FAILURES = {
    "mkdir": (13, "Permission denied", ["cannot write next to"]),
    "copyfile": (28, "No space left on device", ["writing", "failed", "nothing was left"]),
}


@pytest.mark.parametrize("call", FAILURES)
def test_the_system_refuses(folder, tmp_path, monkeypatch, call):
    """Errors of the system, at the start and in the middle of writing."""
    number, reason, words = FAILURES[call]

    def fail(*arguments, **options):
        raise OSError(number, reason)

    monkeypatch.setattr(
        *((Path, "mkdir") if call == "mkdir" else (folders.shutil, "copyfile")), fail
    )
    refused(
        tmp_path,
        "random",
        folder,
        "--out",
        tmp_path / "out",
        words=[str(tmp_path / "out"), reason, *words],
    )


# alignments and options


@pytest.fixture(scope="session")
def alignment(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("moved") / "out"
    assert run("random", saved(), "--out", out).exit_code == 0
    return out / "alignment.safetensors"


# label -> (alignment, or None for a good one; model; what the line must say)
WRONG_ALIGNMENTS = {
    "other values": (
        None,
        {"seed": 1},
        [
            "was made for",
            "gpt2-0",
            "not for",
            "gpt2-1",
            "has other values",
            "apply it to the model",
        ],
    ),
    "other vocabulary": (None, {"vocab_size": 103}, ["was made for another", "vocabulary"]),
    "other width": (None, {"n_inner": 64}, ["was made for another", "size"]),
    "other family": (None, {"name": "bert"}, ["was made for another", "family"]),
    "not there": (
        lambda folder: folder / "none.safetensors",
        {},
        ["none.safetensors is not an alignment file", "make one"],
    ),
    "a folder": (lambda folder: folder, {}, ["is not an alignment file", "make one"]),
    "a checkpoint": (
        lambda folder: folder / "model.safetensors",
        {},
        ["is not an alignment file", "make one"],
    ),
    "a text": (lambda folder: folder / "config.json", {}, ["is not an alignment file", "make one"]),
}


@pytest.mark.parametrize("label", WRONG_ALIGNMENTS)
def test_wrong_alignment(saved, alignment, tmp_path, label):
    chosen, model, words = WRONG_ALIGNMENTS[label]
    file = chosen(saved()) if chosen else alignment
    refused(tmp_path, "apply", file, saved(**model), "--out", tmp_path / "out", words=words)


def test_a_tampered_alignment(saved, alignment, tmp_path):
    """The right table and the right model, but an element that is no symmetry."""
    found = load_file(alignment)
    header = json.loads(
        alignment.read_bytes()[8 : 8 + struct.unpack("<Q", alignment.read_bytes()[:8])[0]]
    )["__metadata__"]
    save_file(
        {**found, "residual/matrix": found["residual/matrix"] * 1.01},
        tmp_path / "a.safetensors",
        header,
    )
    refused(
        tmp_path,
        "apply",
        tmp_path / "a.safetensors",
        saved(),
        "--out",
        tmp_path / "out",
        words=["'residual'", "not a symmetry", "make the alignment again"],
    )
    save_file(found, tmp_path / "a.safetensors", header)  # the control: untouched elements pass
    assert (
        run("apply", tmp_path / "a.safetensors", saved(), "--out", tmp_path / "out").exit_code == 0
    )


# label -> (what a YAML file holds, arguments after the verb, what the line must say)
OPTIONS = {
    "unknown option": (
        "sed: 1\nsede: 2\n",
        (),
        ["options.yaml", "unknown option sed, sede", "random knows", "seed"],
    ),
    "not a mapping": ("- seed\n", (), ["options.yaml", "seed: 1"]),
    "not YAML": ("seed: [1\n", (), ["options.yaml", "cannot be read as YAML", "seed: 1"]),
    "bad residual": (
        None,
        ("--residual", "rotation"),
        ["residual", "'rotation'", "full, permutation, identity"],
    ),
    "bad residual in YAML": (
        "residual: rotation\n",
        (),
        ["residual", "'rotation'", "full, permutation, identity"],
    ),
}


@pytest.mark.parametrize("label", OPTIONS)
def test_bad_options(folder, tmp_path, label):
    content, arguments, words = OPTIONS[label]
    if content:
        (tmp_path / "options.yaml").write_text(content)
        arguments = ("--config", tmp_path / "options.yaml")
    refused(tmp_path, "random", folder, "--out", tmp_path / "out", *arguments, words=words)


def test_missing_yaml(folder, tmp_path):
    refused(
        tmp_path,
        "random",
        folder,
        "--out",
        tmp_path / "out",
        "--config",
        tmp_path / "none.yaml",
        words=["none.yaml", "cannot be read"],
    )


def test_bad_precision(saved, tmp_path):
    refused(
        tmp_path,
        "verify",
        saved(),
        saved(),
        "--dtype",
        "float8",
        words=["--dtype float8", "float32 or float64"],
    )


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "no/such/folder"])
def test_a_hub_name_is_not_fetched(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refused(
        tmp_path, "random", name, "--out", "out", words=[f"{name} is not a folder", "hf download"]
    )


def test_a_malformed_value_is_a_usage_error(folder, tmp_path):
    """What the option parser refuses has the same exit code; its message is its own."""
    result = run("random", folder, "--out", tmp_path / "out", "--seed", "many")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "Invalid value for '--seed'" in result.stderr

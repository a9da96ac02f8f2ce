"""Checkpoints: safetensors and transformers are the oracles, kill -9 is the judge of atomicity."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.checkpoints.folders import new_folder
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.reading import open_checkpoint
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, digest
from symmerge.checkpoints.writing import DEFAULT_SHARD, write_weights
from symmerge.errors import CheckpointError, FunctionChanged
from symmerge.families import BY_MODEL_TYPE
from symmerge.lab.small_models import SMALL, small_model
from symmerge.models.orbit import random_member
from symmerge.verification.inputs import samples
from symmerge.verification.written import gate

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Small checkpoints from save_pretrained, each made once; copy before changing one."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def make(name, dtype=torch.float32, seed=0):
        folder = root / f"{name}-{dtype}-{seed}".replace("torch.", "")
        small_model(name, seed=seed, dtype=dtype).save_pretrained(folder)
        return folder

    return make


def same_bits(found, expected):
    """Names, precisions, shapes and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert digest(found[name]) == digest(tensor), name


def stored_tensors(folder):
    """What safetensors reads from all files of a folder; a name in two files is an error."""
    files = sorted(folder.glob("*.safetensors"))
    parts = [load_file(file) for file in files if file.name != "alignment.safetensors"]
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    assert len(tensors) == sum(len(part) for part in parts)
    return tensors


def change(folder, tensors=lambda found: found, config=lambda found: found):
    """Rewrite a copied checkpoint's tensors and config."""
    file = folder / "model.safetensors"
    changed = {
        name: tensor.clone().contiguous() for name, tensor in tensors(load_file(file)).items()
    }
    save_file(changed, file, {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(content)))


def stock(folder, architecture):
    """The stock class in float32 (bfloat16 is fatal on some CPUs); every name must fit."""
    model, info = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    return model.eval()


# safetensors and torch.save as oracles


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_bytes", [DEFAULT_SHARD, 1100], ids=["single", "sharded"])
def test_safetensors_reads_what_we_write(tmp_path, dtype, max_bytes):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "matrix": (17, 31),
        "vector": (5,),
        "scalar": (),
        "empty": (0, 3),
        "image": (2, 3, 4, 5),
        "last": (40, 7),
    }
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    tensors["transposed"] = (
        torch.randn(9, 4, generator=generator).to(dtype).T
    )  # memory order is not row order
    write_weights(
        tmp_path,
        MemoryWeights(tensors),
        stored_as={"vector": "old.name"},
        max_shard_bytes=max_bytes,
    )
    same_bits(
        stored_tensors(tmp_path),
        {"old.name" if name == "vector" else name: tensor for name, tensor in tensors.items()},
    )

    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    if max_bytes == DEFAULT_SHARD:
        assert (
            files == ["model.safetensors"]
            and not (tmp_path / "model.safetensors.index.json").exists()
        )
        return
    assert len(files) > 1 and files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == {
        name: file for file in files for name in load_file(tmp_path / file)
    }
    for file in files:
        part = load_file(tmp_path / file)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= max_bytes


def save_bins(model, folder, count, **how):
    """As the hub's older checkpoints: torch.save of a state dict, tied tensors in it twice."""
    model.config.save_pretrained(folder)
    state = model.state_dict()
    parts = [dict(list(state.items())[i::count]) for i in range(count)]
    files = (
        ["pytorch_model.bin"]
        if count == 1
        else [f"pytorch_model-{i:05d}-of-{count:05d}.bin" for i in range(1, count + 1)]
    )
    for file, part in zip(files, parts, strict=True):
        torch.save(part, folder / file, **how)
    if count > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )


WRITERS = {
    "safetensors": lambda model, folder: model.save_pretrained(folder),
    "sharded safetensors": lambda model, folder: model.save_pretrained(
        folder, max_shard_size="30KB"
    ),
    "bin": lambda model, folder: save_bins(model, folder, 1),
    "sharded bin": lambda model, folder: save_bins(model, folder, 3),
    "bin before torch 1.6": lambda model, folder: save_bins(
        model, folder, 1, _use_new_zipfile_serialization=False
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("writer", WRITERS)
def test_we_read_what_others_write(tmp_path, writer, dtype):
    model = small_model("gpt2", dtype=dtype)
    WRITERS[writer](model, tmp_path)
    assert len(list(tmp_path.glob("*0000*"))) >= (3 if "sharded" in writer else 0)
    opened = open_checkpoint(tmp_path).weights
    state = model.state_dict()
    same_bits({name: opened.raw(name) for name in opened}, {name: state[name] for name in opened})
    loaded = sm.load(tmp_path)
    assert set(loaded.weights) == state.keys() - {
        "lm_head.weight"
    }  # tied: stored twice in .bin, once in safetensors, one tensor here
    assert {loaded.weights.dtype(name) for name in loaded.weights} == {dtype}


def test_a_folder_with_two_kinds_of_files_means_what_transformers_reads(tmp_path):
    """A stale sharded copy beside a single file: transformers takes the single file."""
    new, old = small_model("gpt2", seed=1), small_model("gpt2", seed=0)
    old.save_pretrained(tmp_path / "old", max_shard_size="30KB")
    shutil.copytree(tmp_path / "old", tmp_path / "both")
    save_file(
        {name: tensor for name, tensor in new.state_dict().items() if name != "lm_head.weight"},
        tmp_path / "both/model.safetensors",
        {"format": "pt"},
    )
    read_by_transformers = stock(tmp_path / "both", "GPT2LMHeadModel")
    assert (
        sm.load(tmp_path / "both").digest()
        == sm.load(read_by_transformers).digest()
        != sm.load(old).digest()
    )


# a random member of the orbit, written, read by the stock class


# Every family in one of these in turn: each meets a dozen. In float32 and one file, those that are
# not named here are written and read by test_invariance.py.
WRITTEN = {
    "float16": (torch.float16, DEFAULT_SHARD),
    "bfloat16": (torch.bfloat16, DEFAULT_SHARD),
    "float32-sharded": (torch.float32, 40_000),
    "bfloat16-sharded": (torch.bfloat16, 20_000),
}
IN_TURN = [
    pytest.param(name, *how, id=f"{name}-{label}")
    for name, (label, how) in zip(SMALL, cycle(WRITTEN.items()), strict=False)
]


@pytest.mark.parametrize(
    ("name", "dtype", "max_bytes"),
    [*((name, torch.float32, DEFAULT_SHARD) for name in ("gpt2", "bert", "llama")), *IN_TURN],
)
def test_random_member_in_stock_transformers(saved, tmp_path, name, dtype, max_bytes):
    source = sm.load(saved(name, dtype))
    _, moved = random_member(source, seed=1)
    written = sm.save(moved, tmp_path / "out", max_shard_bytes=max_bytes)
    tensors = stored_tensors(written)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert (len(list(written.glob("model-*.safetensors"))) > 1) == (max_bytes != DEFAULT_SHARD)
    assert any(
        not torch.equal(tensors[key], value)
        for key, value in stored_tensors(saved(name, dtype)).items()
    )

    before, after = (
        stock(folder, source.spec.architecture) for folder in (saved(name, dtype), written)
    )
    verdict = sm.verify(source, sm.load(after))
    assert verdict.same, verdict
    # The same again without our streaming: the stock modules themselves.
    with torch.no_grad():
        inputs = samples(source, seed=3)[0].inputs
        outputs = [
            {key: value for key, value in model(**inputs).items() if "logits" in key}
            for model in (before, after)
        ]
    for key, logits in outputs[0].items():
        difference = (outputs[1][key] - logits).norm() / logits.norm()
        assert difference < 10 * verdict.rounding, (key, difference)


def test_another_model_is_not_the_same(saved):
    """The control: the same class with other weights differs in the coarsest precision."""
    for name in ("gpt2", "vit"):
        verdict = sm.verify(
            sm.load(saved(name, torch.bfloat16)), sm.load(saved(name, torch.bfloat16, seed=1))
        )
        assert not verdict.same and verdict.difference > 5 * verdict.rounding


def test_what_float16_cannot_hold_is_refused(saved, tmp_path):
    model = sm.load(saved("gpt2", torch.float16))
    name = "transformer.h.1.mlp.c_fc.weight"
    grown = model.derive(
        DerivedWeights(model.weights, {name: lambda: model.weights[name] * 1e6}),
        step=HistoryStep("grow", "too much"),
    )
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}.*65504.*bfloat16"):
        sm.save(grown, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# names that files have had over the years


def renamed(*pairs):
    def rename(tensors):
        for pattern, replacement in pairs:
            tensors = {
                re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()
            }
        return tensors

    return rename


def todays_vit(tensors):
    return {BY_MODEL_TYPE["vit"].rename(name): tensor for name, tensor in tensors.items()}


def with_masks(tensors):
    """GPT-2 as OpenAI's conversion left it: no prefix, and the causal mask of every layer."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {
        **bare,
        "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(),
        "h.1.attn.bias": torch.ones(1, 1, 64, 64).tril(),
    }


WORDS, DECODER, BIAS = (
    "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.bias",
)
DECODER_BIAS, MASKS, HEAD = (
    "cls.predictions.decoder.bias",
    {"h.0.attn.bias", "h.1.attn.bias"},
    "lm_head.weight",
)


def decoder(scale, bias_scale=None):
    """BERT with its decoder stored beside the embedding it is tied to, and perhaps its bias."""

    def add(tensors):
        bias = {} if bias_scale is None else {DECODER_BIAS: tensors[BIAS] * bias_scale}
        return {**tensors, DECODER: tensors[WORDS] * scale, **bias}

    return add


def no_class(config):
    return {key: value for key, value in config.items() if key != "architectures"}


def same(config):
    return config


# label -> (model, tensors changed, config changed, names removed, names added, config says tied)
OLD_NAMES = {
    "vit as written": ("vit", same, same, set(), set(), True),
    "vit as in memory": ("vit", todays_vit, same, set(), set(), True),
    "gpt2 without prefix": ("gpt2", with_masks, same, MASKS, {HEAD}, False),
    "gpt2 untied without prefix": (
        "gpt2-untied",
        renamed((r"^transformer\.", "")),
        same,
        set(),
        set(),
        False,
    ),
    "gpt2 with another head": (
        "gpt2",
        lambda found: {**found, HEAD: found["transformer.wte.weight"] * 1.5},
        same,
        set(),
        set(),
        False,
    ),
    "gpt2 with the head only": (
        "gpt2",
        renamed((r"^transformer\.wte", "lm_head")),
        same,
        set(),
        {"transformer.wte.weight"},
        False,
    ),
    "neox embed_out": ("neox", renamed((r"^lm_head", "embed_out")), same, set(), set(), False),
    "bert gamma and beta": (
        "bert",
        renamed((r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta")),
        same,
        set(),
        set(),
        True,
    ),
    "bert position ids": (
        "bert",
        lambda found: {**found, "bert.embeddings.position_ids": torch.arange(64)[None]},
        same,
        {"bert.embeddings.position_ids"},
        set(),
        True,
    ),
    "bert decoder equal": ("bert", decoder(1, 1), same, {DECODER, DECODER_BIAS}, set(), True),
    "bert decoder only": (
        "bert",
        renamed((re.escape(WORDS), DECODER)),
        same,
        {DECODER},
        {WORDS},
        True,
    ),
    "bert decoder differs": ("bert", decoder(1.5, 1.5), same, set(), set(), False),
    "bert decoder differs, bias equal": ("bert", decoder(1.5, 1), same, set(), set(), False),
    "bert decoder differs, bias shared": ("bert", decoder(1.5), same, set(), {DECODER_BIAS}, False),
    "bert decoder equal, bias differs": ("bert", decoder(1, 1.5), same, set(), set(), False),
    **{
        f"{name} without class": (
            name,
            same,
            no_class,
            set(),
            {HEAD} if name in ("gpt2", "qwen2") else set(),
            "bert" in name or name == "vit",
        )
        for name in (
            "bert",
            "bert-pretraining",
            "bert-classifier",
            "roberta-classifier",
            "gpt2",
            "vit",
            "llama",
            "mistral",
            "qwen2",
            "neox",
        )
    },
}


@pytest.mark.parametrize("label", OLD_NAMES)
def test_old_names(saved, tmp_path, label):
    name, tensors, config, lost, added, tied = OLD_NAMES[label]
    folder = shutil.copytree(saved(name), tmp_path / "source")
    change(folder, tensors, config)
    architecture = SMALL[name][0]
    before = stock(folder, architecture)
    source = sm.load(folder)
    assert source.spec.architecture == architecture
    written = sm.save(random_member(source, seed=1)[1], tmp_path / "out")

    names = stored_tensors(folder).keys()
    assert stored_tensors(written).keys() == (names - lost) | added
    found = json.loads((written / "config.json").read_text())
    assert found["architectures"] == [architecture]
    assert found.get("tie_word_embeddings", True) == tied
    assert sm.verify(sm.load(before), sm.load(stock(written, architecture))).same


def test_the_difference_of_an_untied_decoder_matters(saved, tmp_path):
    """The control of the rows above: without the stored decoder it is another function."""
    folder = shutil.copytree(saved("bert"), tmp_path / "source")
    change(folder, decoder(torch.linspace(0.5, 1.5, 48), 1))
    assert not sm.verify(sm.load(folder), sm.load(saved("bert"))).same


# what lies beside the weights


def test_files_beside_the_weights(saved, tmp_path):
    folder = shutil.copytree(saved("bert"), tmp_path / "source")
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
    ]
    kept += [
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "LICENSE",
    ]
    left = [
        "modeling_evil.py",
        "pytorch_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "optimizer.pt",
        "rng.pth",
        "x.gguf",
        ".gitattributes",
    ]
    left += [
        "training_args.bin",
        "other.safetensors",
        "old.safetensors.index.json",
        "scaler.pkl",
        "a.ckpt",
    ]
    for file in kept + left:
        (folder / file).write_bytes(file.encode() + b"\x00\xff\r\n")
    (folder / "README.md").write_text("the source's card")
    change(folder, config=lambda found: {**found, "a_key_of_your_own": [1, {"x": None}]})

    source = sm.load(folder)
    alignment, moved = random_member(source, seed=1)
    written = sm.save(
        moved,
        tmp_path / "out",
        gate=gate(source),
        beside=lambda there: alignment.save(there / "alignment.safetensors"),
    )
    ours = {
        "config.json",
        "model.safetensors",
        "README.md",
        "symmerge.json",
        "alignment.safetensors",
    }
    assert {file.name for file in written.glob("[!.]*")} == {*kept, *ours}
    for file in kept:
        assert (written / file).read_bytes() == (folder / file).read_bytes()
    assert json.loads((written / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )

    record = json.loads((written / "symmerge.json").read_text())
    assert record["source"] == str(folder) and record["source_sha256"] == source.digest()
    assert (
        record["architecture"] == "BertForMaskedLM"
        and record["spec_sha256"] == moved.spec.fingerprint
    )
    assert [step["step"] for step in record["steps"]] == ["apply"]
    assert record["verified"]["same"] and 0 < record["verified"]["difference"] < 1e-4
    assert record["versions"]["torch"] == torch.__version__
    card = (written / "README.md").read_text()
    assert card.startswith("---\nbase_model:\n") and "the source's card" not in card
    assert all(
        words in card
        for words in (
            folder.name,
            source.digest(),
            "**apply**",
            "Relative difference of the logits",
        )
    )


# whole or not at all


def test_a_refusing_gate_leaves_nothing(saved, tmp_path):
    a, b = sm.load(saved("gpt2")), sm.load(saved("gpt2", seed=1))
    with pytest.raises(FunctionChanged, match="nothing was written"):
        sm.save(a, tmp_path / "out", gate=gate(b))
    with pytest.raises(ZeroDivisionError):  # any other exception too
        sm.save(a, tmp_path / "out", gate=lambda written, computed: {"x": 1 / 0})
    assert not list(tmp_path.iterdir())
    sm.save(a, tmp_path / "out", gate=gate(a))  # the control: the right model passes
    assert (tmp_path / "out/model.safetensors").exists()


def test_an_existing_target_is_kept_unless_told(saved, tmp_path):
    a, b = sm.load(saved("gpt2")), sm.load(saved("gpt2", seed=1))
    out = sm.save(a, tmp_path / "out")
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()}
    with pytest.raises(CheckpointError, match=r"exists.*--overwrite"):
        sm.save(b, out)
    with pytest.raises(FunctionChanged):
        sm.save(b, out, overwrite=True, gate=gate(a))  # told, but the gate refuses
    assert {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in out.iterdir()
    } == before
    sm.save(b, out, overwrite=True)
    assert sm.load(out).digest() == b.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_appears_meanwhile_is_kept(saved, tmp_path):
    """Two runs to one target, neither told to overwrite: the first to finish stays."""
    with pytest.raises(CheckpointError, match="exists"), new_folder(tmp_path / "out") as slower:
        (slower / "which").write_text("slower")
        with new_folder(tmp_path / "elsewhere") as faster:
            (faster / "which").write_text("faster")
        (tmp_path / "elsewhere").rename(tmp_path / "out")
    assert (tmp_path / "out/which").read_text() == "faster" and len(list(tmp_path.iterdir())) == 1


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_stale_partials_are_swept(tmp_path):
    stale = [
        f".out.{dead_process()}.partial",
        f".out.{dead_process()}.old.partial",
        f".out.{os.getpid()}.partial",
    ]  # a number may come round
    living = [
        f".out.{os.getppid()}.partial",
        f".out.b.{dead_process()}.partial",
        ".out.notes.partial",
        ".out.12345678901234567890.partial",
    ]
    with new_folder(tmp_path / "out") as folder:
        (folder / "old").write_text("old")
    for name in (*stale, *living):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with new_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", *living}
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["new"]


def test_what_a_killed_overwrite_set_aside_comes_back(tmp_path):
    """Killed between its two renames, an overwrite must not lose the old folder."""
    aside = tmp_path / f".out.{dead_process()}.old.partial"
    aside.mkdir()
    (aside / "which").write_text("old")
    with pytest.raises(CheckpointError, match="exists"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out/which").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    with new_folder(tmp_path / "out") as folder:
        (folder / "which").write_text("old")
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith(f"{os.getpid()}.partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with (
        pytest.raises(CheckpointError, match="Input/output error"),
        new_folder(tmp_path / "out", overwrite=True) as folder,
    ):
        (folder / "which").write_text("new")
    assert (tmp_path / "out/which").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_forked_process_can_hash(saved):
    """Threads do not survive a fork: a process forked during a hash must not wait for it."""
    model, expected = sm.load(saved("gpt2")), sm.load(saved("gpt2")).digest()
    for name in model.weights:
        model.weights[name]
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends the child if it hangs
        os._exit(0 if model.digest() == expected == sm.load(saved("gpt2")).digest() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert model.digest() == expected

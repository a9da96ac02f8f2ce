"""Good inputs of every format, made once per run: tiny models and what symmerge writes of them."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import report_data
import torch
from fixtures import checkpoint, run
from PIL import Image
from safetensors.torch import load_file
from task_data import ROWS, TEXT

_GPT2 = {"n_embd": 16, "n_head": 2, "n_inner": 32}
_BODY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "gpt2": _GPT2,
    "llama": _BODY,
    "mistral": {**_BODY, "num_key_value_heads": 2, "head_dim": 8},
    "neox": _BODY,
    "bert": _BODY,
    "bert-classifier": _BODY,
    "roberta": _BODY,
    "roformer": _BODY,
    "modernbert": _BODY,
    "vit": _BODY,
    "dinov3-classifier": _BODY,
}
TINY = ("--recipe", "permutations", "--sweeps", "1")
OPTIONS = {
    "random": {"seed": 3, "residual": "full", "max_shard_size": 0.5, "overwrite": False},
    "merge": {"t": 0.5, "combine": "mean", "recipe": "permutations", "sweeps": 1, "seed": 0},
}


def make_samples(root: Path) -> None:
    """One folder per sample; a case works on a copy of one."""
    for name, sizes in FAMILIES.items():
        _pair(root / name, name, sizes)
    _texts(root / "gpt2")
    _tables(root / "bert-classifier")
    _images(root / "vit")
    _other_weights(root)
    _written(root / "gpt2", root)
    _results(root / "results")


def _pair(folder: Path, name: str, sizes: Mapping[str, object]) -> None:
    folder.mkdir(parents=True)
    for seed, which in enumerate(("model", "other")):
        checkpoint(folder / which, name, seed=seed, **sizes)
    (folder / "options.yaml").write_text(json.dumps(OPTIONS["random"]))
    (folder / "merge.yaml").write_text(json.dumps(OPTIONS["merge"]))


def _texts(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT)
    (folder / "text.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    np.save(folder / "counts.npy", np.arange(101))


def _tables(folder: Path) -> None:
    for suffix, separator in ((".tsv", "\t"), (".csv", ",")):
        lines = [separator.join(("label", "text"))]
        lines += [f"{label}{separator}{text.replace(',', '')}" for label, text in ROWS]
        (folder / f"rows{suffix}").write_text("\n".join(lines))
    rows = [json.dumps({"label": label, "text": text}) for label, text in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows))


def _images(folder: Path) -> None:
    images = np.random.RandomState(0).randint(0, 256, (10, 16, 16, 3), np.uint8)
    labels = np.arange(10) % 5
    np.savez(folder / "images.npz", x=images, y=labels)
    normalized = (images.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    np.savez(folder / "normalized.npz", x=normalized, y=labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / "images" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "images" / str(label) / f"{number}.png")


def _other_weights(root: Path) -> None:
    """The same models as shards with an index, and as a pickle."""
    for name in ("gpt2", "bert"):
        folder = shutil.copytree(root / name, root / f"{name}-pickle") / "model"
        tensors = load_file(folder / "model.safetensors")
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    sharded = shutil.copytree(root / "llama", root / "sharded")
    shutil.rmtree(sharded / "model")
    run("canonical", root / "llama" / "model", "--out", sharded / "model", "--max-shard-size", 2e-5)


def _written(folder: Path, root: Path) -> None:
    """What symmerge wrote: an orbit's member, statistics, files to resume from."""
    a, b = folder / "model", folder / "other"
    moved = shutil.copytree(folder, root / "moved")
    shutil.rmtree(moved / "other")
    run("random", a, "--out", moved / "other", "--residual", "permutation")
    run("random", a, "--out", moved / "result")
    gathered = shutil.copytree(folder, root / "statistics")
    how = ("--data", folder / "text.txt", "--samples", 4)
    run("statistics", a, b, *how, "--out", gathered / "pair.safetensors")
    _resumable(shutil.copytree(folder, root / "resume"))


def _resumable(folder: Path) -> None:
    """A run with two weightings that stopped after the first."""
    verb = import_module("symmerge.cli.align")  # the package's name is the function's
    here = os.getcwd()
    write, verb._write = verb._write, _stop
    os.chdir(folder)  # the file names the models as the command does
    try:
        run(*RESUMED, expect=2)
    finally:
        verb._write = write
        os.chdir(here)
    assert (folder / "result.partial.safetensors").exists()


RESUMED = ("align", "model", "other", "--recipe", "symmerge", "--tries", "2", "--out", "result")


def _stop(*_: object) -> None:
    raise RuntimeError("stopped before writing")


def _results(folder: Path) -> None:
    """Every file beside a curve, and curves alone: a page of all takes seconds."""
    curve = report_data.curve()
    files = {
        "solution": report_data.SOLUTION,
        "structure": report_data.STRUCTURE,
        "correlations": report_data.CORRELATIONS,
        "amount": report_data.AMOUNT,
        "simplex": report_data.together(),
        "universe": report_data.together()["methods"][1]["universe"],
        "results": report_data.experiment(),
    }
    for name, content in files.items():
        beside = {} if name in ("simplex", "results") else {"curve": curve}
        report_data.write(folder / name, **beside, **{name: content})
    report_data.write(folder / "curve", curve=curve)
    pairs = report_data.pairs_of([(0, 1), (0, 2)])
    report_data.write(folder / "pairs", curve=pairs)
    run("report", folder / "curve", "--out", folder / "page.html")  # finds fonts, which is slow

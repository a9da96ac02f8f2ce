"""Good inputs of every format, made once per run: tiny models and what symmerge writes of them."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import report_data
import torch
from fixtures import SPECIAL, checkpoint, run
from PIL import Image
from safetensors.torch import load_file
from task_data import ROWS, TEXT

from symmerge.evaluation.data.embedded import SPLITS
from symmerge.lab.training import loop as training_loop

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
    "merge": {"t": 0.5, "combine": "mean", "density": 0.5, "seed": 0, "at": ["ff=0.3"]},
}


def make_samples(root: Path) -> None:
    """One folder per sample; a case works on a copy of one."""
    for name, sizes in FAMILIES.items():
        _pair(root / name, name, sizes)
    _tokenizer_files(root / "bert" / "model")
    _texts(root / "gpt2")
    _tables(root / "bert-classifier")
    _images(root / "vit")
    _other_weights(root)
    _training_data(root / "training" / "data")
    _written(root / "gpt2", root)
    _results(root / "results")


def _pair(folder: Path, name: str, sizes: Mapping[str, object]) -> None:
    folder.mkdir(parents=True)
    for seed, which in enumerate(("model", "other")):
        checkpoint(folder / which, name, seed=seed, **sizes)
    (folder / "options.yaml").write_text(json.dumps(OPTIONS["random"]))
    (folder / "merge.yaml").write_text(json.dumps(OPTIONS["merge"]))


def _tokenizer_files(folder: Path) -> None:
    """Files that older tokenizers have beside tokenizer.json."""
    (folder / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    (folder / "added_tokens.json").write_text(json.dumps({"[MASK]": 4}))


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
    how = ("--calibration", folder / "text.txt", "--calibration-samples", 4)
    run("statistics", a, b, *how, "--out", gathered / "pair.safetensors")
    _resumable(folder, root)


RESUMED = ("align", "model", "other", "--recipe", "symmerge", "--tries", "2", "--out", "result")
GATHERED = (
    *(
        "statistics",
        "model",
        "other",
        "--calibration",
        "python-docs",
        "--calibration-samples",
        "70",
    ),
    *("--out", "result"),
)
SIZES = ("hidden_size=16", "num_attention_heads=2", "intermediate_size=32", "num_hidden_layers=1")
CHANGES = tuple(word for size in (*SIZES, "batch_size=8") for word in ("--change", size))
TRAINED = ("train", "vit-digits", "--steps", "3", *CHANGES, "--out", "result")
FROM_IMAGES = (
    *("train", "cifar10-vit", "--data-dir", "data", "--steps", "1", *CHANGES),
    *("--change", "warmup=0", "--out", "out"),
)


def _resumable(folder: Path, root: Path) -> None:
    """Runs that were interrupted: a search for a symmetry, statistics, training."""
    _interrupt(shutil.copytree(folder, root / "resume"), RESUMED, "_write")
    _interrupt(shutil.copytree(folder, root / "gathering"), GATHERED, "console")
    with mock.patch.object(training_loop, "SAVE_SECONDS", 0.0):
        _interrupt(root / "training", TRAINED, "console")


def _interrupt(folder: Path, command: Sequence[str], replaced: str) -> None:
    """Run a verb in a folder until it writes, or reports progress."""
    verb, here = import_module(f"symmerge.cli.{command[0]}"), os.getcwd()
    stop = _stop if replaced == "_write" else SimpleNamespace(progress=_stopping)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)  # the file names the models as the command does
    try:
        with mock.patch.object(verb, replaced, stop):
            run(*command, expect=130)
    finally:
        os.chdir(here)
    assert list(folder.glob("result*partial*")), command


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _stopping(*_: object) -> Iterator[Callable[[str], None]]:
    """Progress that is interrupted when it is reported again."""
    ticks = iter([None])
    yield lambda _: next(ticks, _stop) and _stop()


def _training_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.RandomState(0)
    images = {f"x_{split}": random.randint(0, 256, (20, 32, 32, 3), np.uint8) for split in SPLITS}
    labels = {f"y_{split}": np.arange(20) % 10 for split in SPLITS}
    np.savez(folder / "cifar10.npz", **images, **labels)


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

"""Which file of which sample is damaged how, and which verbs read it then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuzz.byte_mutators import mutate_bytes
from fuzz.damage import Mutator, replace_file
from fuzz.data_mutators import (
    mutate_image,
    mutate_npy,
    mutate_npz,
    mutate_table,
    mutate_xz,
    mutate_yaml,
)
from fuzz.json_mutators import mutate_json, mutate_json_lines
from fuzz.samples import FAMILIES, FROM_IMAGES, GATHERED, RESUMED, TINY, TRAINED
from fuzz.tensor_mutators import (
    mutate_data,
    mutate_header,
    mutate_pickle,
    mutate_tensors,
)

Command = tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A file of a sample, how it is damaged, and the commands that read it.

    Paths are relative to the copy. `writes` are prefixes of what a command may write when it
    succeeds, `caches` of what it may keep in any case.
    """

    format: str
    sample: str
    file: str
    mutators: Sequence[Mutator]
    commands: Sequence[Command]
    writes: tuple[str, ...] = ("out",)
    caches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.format}: {self.sample}/{self.file}"


OUT = ("--out", "out")
INSPECT = (("inspect", "model"), ("inspect", "model", "--json"))
COMPARE = (("verify", "model", "other"), ("verify", "other", "model"), ("same", "model", "other"))
WRITE = (("random", "model", *OUT), ("canonical", "model", *OUT))
SOLVE = (
    ("align", "model", "other", *TINY, *OUT),
    ("merge", "other", "model", *TINY, *OUT),
)
CHEAP = (*INSPECT, *INSPECT, *COMPARE[:2], *WRITE)
EVERY = (*INSPECT, *COMPARE, *WRITE, *SOLVE)
TASKS = {
    **dict.fromkeys(("gpt2", "llama", "mistral", "neox"), "clm"),
    **dict.fromkeys(("bert", "roberta", "roformer", "modernbert"), "mlm"),
    "bert-classifier": "text",
    **dict.fromkeys(("vit", "dinov3-classifier"), "image"),
}
DATA = {"clm": "python-docs", "mlm": "python-docs", "text": "rows.tsv", "image": "images"}
SAFETENSORS = (mutate_header, mutate_header, mutate_data, mutate_tensors, mutate_tensors)
PLACES = (mutate_bytes, replace_file)
PREPARED = ("data/prepared",)
CONTENTS = "result/.symmerge-contents.json"
OVERWRITE = (("random", "model", "--out", "result", "--overwrite"),)


def measure(task: str, data: str, *more: str) -> Command:
    """The line between two models, at three points."""
    how = ("--samples", "2", "--points", "3", "--method", "none")
    return ("barrier", "model", "other", "--task", task, "--data", data, *how, *more, *OUT)


def gather(data: str) -> Command:
    return (
        "statistics",
        "model",
        "other",
        "--calibration",
        data,
        "--calibration-samples",
        "2",
        *OUT,
    )


def _models() -> list[Target]:
    """Configs and weights of every family."""
    json_mutators = (*[mutate_json] * 5, *PLACES)
    found = []
    for family in FAMILIES:
        found += [
            Target("config", family, "model/config.json", json_mutators, EVERY),
            Target("weights", family, "model/model.safetensors", (*SAFETENSORS, *PLACES), EVERY),
        ]
    index = "model/model.safetensors.index.json"
    shard = "model/model-00001-of-00002.safetensors"
    for name in ("gpt2-pickle", "bert-pickle"):
        mutators = (*[mutate_pickle] * 3, *PLACES)
        found.append(Target("pickle", name, "model/pytorch_model.bin", mutators, CHEAP))
    return [
        *found,
        Target("index", "sharded", index, json_mutators, CHEAP),
        Target("index", "sharded", shard, (*SAFETENSORS, *PLACES), CHEAP),
        Target("provenance", "moved", "other/symmerge.json", json_mutators, _provenance()),
        Target("contents", "moved", CONTENTS, json_mutators, OVERWRITE, writes=("result",)),
    ]


def _provenance() -> Sequence[Command]:
    return (
        *(("inspect", "other"), ("random", "other", *OUT), ("canonical", "other", *OUT)),
        *(("merge", "model", "other", *TINY, *OUT), ("verify", "other", "model")),
    )


def _preprocessing() -> list[Target]:
    """Tokenizers and image processors: read with data."""
    found = []
    mutators = (*[mutate_json] * 4, *PLACES)
    for family in ("gpt2", "bert", "bert-classifier", "llama"):
        task = TASKS[family]
        commands = (measure(task, DATA[task]), ("merge", "model", "other", *TINY, *OUT))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            found.append(Target("tokenizer", family, f"model/{file}", mutators, commands))
    others = ("special_tokens_map.json", "added_tokens.json")
    masked = (measure("mlm", "python-docs"),)
    found += [Target("tokenizer", "bert", f"model/{one}", mutators, masked) for one in others]
    commands = (measure("image", "images"), gather("self"), gather("images"))
    processor = "model/preprocessor_config.json"
    return [
        *found,
        Target("processor", "vit", processor, mutators, commands),
        Target("config", "bert", "model/config.json", mutators, masked),
        Target("config", "vit", "model/config.json", mutators, (measure("image", "images"),)),
    ]


def _data() -> list[Target]:
    some = ("--data", "text.txt", "--samples", "4", *OUT)
    text = (
        *(measure("clm", "text.txt"), gather("text.txt")),
        ("align", "model", "other", "--recipe", "activations", "--sweeps", "1", *some),
        ("align", "model", "other", "--method", "learned", "--steps", "1", *some),
    )
    compressed = (measure("clm", "text.txt.xz"),)
    table = (*[mutate_table] * 3, *PLACES)
    lines = (mutate_json_lines, mutate_json_lines, *table)
    tables = {"rows.tsv": table, "rows.csv": table, "rows.jsonl": lines}
    arrays = (*[mutate_npz] * 3, *PLACES)
    counts = (("align", "model", "other", *TINY, "--token-counts", "counts.npy", *OUT),)
    pictures = (measure("image", "images", "--samples", "10"),)
    return [
        Target("text", "gpt2", "text.txt", (*[mutate_bytes] * 3, *PLACES), text),
        Target("xz", "gpt2", "text.txt.xz", (*[mutate_xz] * 2, *PLACES), compressed),
        *(
            Target("table", "bert-classifier", file, mutators, (measure("text", file),))
            for file, mutators in tables.items()
        ),
        Target("arrays", "vit", "images.npz", arrays, (measure("image", "images.npz"),)),
        Target("arrays", "vit", "normalized.npz", arrays, (measure("image", "normalized.npz"),)),
        Target("arrays", "gpt2", "counts.npy", (*[mutate_npy] * 3, *PLACES), counts),
        Target("arrays", "training", "data/cifar10.npz", arrays, (FROM_IMAGES,), caches=PREPARED),
        Target("image", "vit", "images/0/0.png", (*[mutate_image] * 2, *PLACES), pictures),
    ]


def _written() -> list[Target]:
    """What symmerge wrote and reads again."""
    apply = (("apply", "other/alignment.safetensors", "model", *OUT),)
    statistics = ("--statistics", "pair.safetensors", "--recipe")
    gathered = (
        ("align", "model", "other", *statistics, "activations", *OUT),
        ("statistics", "model", "other", "--add", "pair.safetensors", *OUT),
        ("merge", "model", "other", *statistics, "activations", *OUT),
    )
    tensors = (*SAFETENSORS, *[mutate_header] * 2, *PLACES)
    return [
        Target("alignment", "moved", "other/alignment.safetensors", tensors, apply),
        Target("alignment", "moved", "other/alignment.safetensors", tensors, apply),
        Target("statistics", "statistics", "pair.safetensors", tensors, gathered),
        Target("statistics", "statistics", "pair.safetensors", tensors, gathered),
        *_interrupted(tensors),
    ]


def _interrupted(tensors: Sequence[Mutator]) -> list[Target]:
    """Files to resume from, of every verb that has them."""
    align, gather, train = (((*line, "--resume"),) for line in (RESUMED, GATHERED, TRAINED))
    pair = "result.partial.safetensors"
    return [
        Target("resume", "resume", pair, tensors, align, writes=("result",)),
        Target("resume", "gathering", "result.partial", tensors, gather, writes=("result",)),
        Target("resume", "training", "result.partial", PLACES, train, writes=("result",)),
    ]


RESULTS = (
    *("curve", "solution", "structure", "correlations", "amount", "simplex", "universe"),
    *("results", "pairs"),
)


def _results() -> list[Target]:
    found = []
    for name in RESULTS:
        file = f"{name}/curve.json" if name == "pairs" else f"{name}/{name}.json"
        page = (("report", name, "--out", "out.html"),)
        found.append(Target("result", "results", file, (*[mutate_json] * 6, *PLACES), page))
    return found


def _options() -> list[Target]:
    mutators = (*[mutate_yaml] * 4, *PLACES)
    random = (("random", "model", "--out", "out", "--config", "options.yaml"),)
    merge = (("merge", "model", "other", *TINY, *OUT, "--config", "merge.yaml"),)
    return [
        Target("options", "gpt2", "options.yaml", mutators, random),
        Target("options", "gpt2", "merge.yaml", mutators, merge),
    ]


TARGETS: Sequence[Target] = (
    *(*_models(), *_preprocessing(), *_data(), *_written(), *_results(), *_options()),
)

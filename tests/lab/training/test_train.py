"""Training: the seed decides the weights, the folder is a stock checkpoint or absent."""

import inspect
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoTokenizer,
)
from typer.testing import CliRunner

import symmerge as sm
from symmerge.cli import app
from symmerge.errors import CheckpointError, MismatchError, UnsupportedModel
from symmerge.evaluation.data.embedded import digits, python_docs
from symmerge.evaluation.mixture import Mixture
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.lab.training import datasets
from symmerge.lab.training import loop as module
from symmerge.lab.training.datasets import CausalText, Images, MaskedText, batch_order, map_tensors
from symmerge.lab.training.embedded import EMBEDDED as EVERY
from symmerge.lab.training.initialization import Origin
from symmerge.lab.training.loop import train, trained
from symmerge.lab.training.recipes import TRAINING, Schedule, training_recipe, with_changes
from symmerge.lab.training.reinitialization import open_model
from symmerge.lab.training.resume import DIGEST, LENGTH, partial_file, save_state
from symmerge.lab.training.splits import load_splits
from symmerge.lab.training.step import TrainingStep, batch_loss, no_packed_sequences, working_copy
from symmerge.symmetry.groups.linalg import one_thread

EMBEDDED = [
    name for name, recipe in EVERY.items() if recipe.task != "text"
]  # classifiers begin from another's model: test_training_data.py


def short(name, steps=3, batch_size=4, **schedule):
    return with_changes(
        TRAINING[name], schedule={"steps": steps, "batch_size": batch_size, "warmup": 1, **schedule}
    )


CONSTANT = (
    "embed_positions.weight",
    "mask_token",
    "register_tokens",
)  # sinusoids; zeros, where nothing is masked; and of no size


def weights(folder):
    return {
        name: tensor
        for name, tensor in open_model(folder).state_dict().items()
        if not name.endswith(CONSTANT)
    }


def same(first, second):
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    return {name: train(short(name), 1, place / name) for name in EMBEDDED}


@pytest.mark.parametrize("name", ["vit-digits", "gpt2-docs", "bert-docs"])
def test_the_seed_decides_the_weights_alone(name, folders, tmp_path):
    first, again, other = (
        folders[name],
        train(short(name), 1, tmp_path / "again"),
        train(short(name), 2, tmp_path / "other"),
    )
    weights_1, weights_2 = weights(first), weights(other)
    assert same(weights_1, weights(again))
    matrices = [key for key, tensor in weights_1.items() if tensor.ndim > 1]
    assert not any(torch.equal(weights_1[key], weights_2[key]) for key in matrices)
    if name != "vit-digits":
        assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", [name for name in EMBEDDED if TRAINING[name].task == "clm"])
def test_language_models_load_as_stock(name, folders):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folders[name]),
        AutoModelForCausalLM.from_pretrained(folders[name]),
    )
    text = "The for statement: naïve\n    x = 1"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (
        type(model).__name__ == TRAINING[name].architecture
        and len(tokenizer) == model.config.vocab_size
    )
    prompt = tokenizer("The", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (
        1,
        prompt.shape[1] + 3,
    )


@pytest.mark.parametrize("name", [name for name in EMBEDDED if TRAINING[name].task == "mlm"])
def test_masked_models_load_as_stock(name, folders):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folders[name]),
        AutoModelForMaskedLM.from_pretrained(folders[name]),
    )
    assert (
        type(model).__name__ == TRAINING[name].architecture
        and len(tokenizer) == model.config.vocab_size
    )
    assert (
        tokenizer.mask_token == "[MASK]"
        and tokenizer.pad_token_id == model.config.pad_token_id == 0
    )
    pair = tokenizer("The for", "statement")
    assert (
        tokenizer.decode(pair["input_ids"]) == "[CLS]The for[SEP]statement[SEP]"
        and pair["token_type_ids"][0] == 0
        and pair["token_type_ids"][-1] == 1
    )
    assert (
        model(**tokenizer("The [MASK] statement", return_tensors="pt")).logits.shape[-1]
        == TRAINING[name].config["vocab_size"]
    )


def test_an_architecture_without_a_table_is_written_by_transformers(folders, tmp_path, monkeypatch):
    def refuse(model):
        raise UnsupportedModel("no table")

    monkeypatch.setattr(module, "load", refuse)
    out = train(short("bert-docs"), 1, tmp_path / "out")
    assert same(weights(folders["bert-docs"]), weights(out))


def test_pictures_are_seen_in_training_as_the_processor_shows_them(folders):
    assert (
        type(AutoModelForImageClassification.from_pretrained(folders["vit-digits"])).__name__
        == "ViTForImageClassification"
    )
    processor = AutoImageProcessor.from_pretrained(folders["vit-digits"])
    image = (digits("train")[0][0] * 255).round().astype("uint8")[None]
    shown = processor([image], input_data_format="channels_first", return_tensors="pt")[
        "pixel_values"
    ][0]
    seen = load_splits(TRAINING["vit-digits"]).train.inputs["pixel_values"][0]
    assert torch.allclose(shown, seen, atol=1e-6) and not torch.allclose(shown, -seen, atol=0.1)


def test_training_sees_no_test_data(tmp_path):
    held_out = {image.tobytes() for image in digits("test")[0]}
    assert not held_out & {image.tobytes() for image in digits("train")[0]}
    splits = load_splits(TRAINING["gpt2-docs"])
    splits.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(
        splits.train.tokens.tolist()
    ) == python_docs("train")


@pytest.mark.parametrize("name", ["vit-digits", "gpt2-docs"])
def test_training_helps(name, folders, tmp_path):
    """A fresh model predicts uniformly; a few steps later the held-out loss is lower, too."""
    recipe = short(name, steps=30, batch_size=32)
    train(recipe, 0, tmp_path / "longer")
    models = [sm.load(folders[name]), sm.load(tmp_path / "longer")]
    task = make_task(recipe.task, recipe.data, models, samples=32)
    before, after = (task.evaluate(Mixture([model]).at((1.0,)))["loss"] for model in models)
    losses = json.loads((tmp_path / "longer/metrics.json").read_text())["losses"]
    assert len(losses) == 30 and after < before - 0.1 and sum(losses[-5:]) < sum(losses[:5])


def test_a_folder_knows_how_it_was_trained(folders):
    recipe = short("vit-digits")
    assert trained(recipe, 1, folders["vit-digits"])
    assert not trained(recipe, 2, folders["vit-digits"])
    assert not trained(short("vit-digits", steps=4), 1, folders["vit-digits"])
    assert not trained(recipe, 1, folders["vit-digits"] / "nowhere")


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupt(item):
        assert list(tmp_path.iterdir()), "the place is taken while it trains"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(short("vit-digits"), 0, tmp_path / "out", interrupt)
    assert not list(tmp_path.iterdir())


def test_what_exists_is_refused_before_the_work(folders):
    def work(item):
        raise AssertionError("it trained")

    with pytest.raises(CheckpointError, match="exists: choose another --out"):
        train(short("vit-digits"), 0, folders["vit-digits"], work)


def test_an_unknown_recipe_is_refused_with_the_list():
    with pytest.raises(
        MismatchError,
        match=r"no training recipe called 'magic': choose one of vit-digits.*--list",
    ):
        training_recipe("magic")


def test_one_thread_is_given_back():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# validation

TINY = with_changes(
    TRAINING["vit-digits"],
    config={"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
    schedule={"steps": 8, "batch_size": 8},
)


def test_the_best_evaluation_is_kept_and_patience_ends_it(tmp_path, monkeypatch):
    at_step, losses = {}, iter([3.0, 1.0, 2.0, 2.5, 0.5])
    evaluate = TrainingStep.evaluate

    def scripted(self, dataset):
        step = int(self.losses.step)
        if step in at_step or step % 2:
            return evaluate(self, dataset)  # held-out data, at the end
        at_step[step] = self.weights()
        return {"loss": next(losses), "accuracy": 0.0}

    monkeypatch.setattr(TrainingStep, "evaluate", scripted)
    schedule = {"evaluate_every": 2, "patience": 2, "steps": 20}
    out = train(with_changes(TINY, schedule=schedule), 0, tmp_path / "out")
    metrics = json.loads((out / "metrics.json").read_text())
    losses, curve = metrics["losses"], metrics["curve"]
    assert metrics["best_step"] == 4 and len(losses) == 8
    assert [point["step"] for point in curve] == [2, 4, 6, 8]
    assert same(at_step[4], weights(out)) and not same(at_step[8], weights(out))
    for point in curve:
        mean = sum(losses[point["step"] - 2 : point["step"]]) / 2
        assert abs(point["training"] - mean) < 1e-5


@pytest.mark.parametrize("name", ["vit-digits", "gpt2-docs", "bert-docs"])
def test_what_is_looked_at_is_not_learned(name):
    complete, held = (
        load_splits(TRAINING[name]),
        load_splits(with_changes(TRAINING[name], schedule={"evaluate_every": 5})),
    )
    assert complete.valid is None and held.valid is not None
    if name == "vit-digits":
        parts = [
            {image.numpy().tobytes() for image in part.inputs["pixel_values"]}
            for part in (held.train, held.valid, held.test)
        ]
        assert (
            sum(map(len, parts)) == len(parts[0] | parts[1] | parts[2])
            and len(parts[1]) == len(complete.train.targets) // 10
        )
    else:
        assert 0.85 < len(held.train.tokens) / len(complete.train.tokens) < 0.95
        assert held.valid.rows().numel() > 0


def test_a_loss_that_is_no_number_ends_it(tmp_path):
    with pytest.raises(sm.errors.SymmergeError, match=r"the loss became nan.*lower the rate"):
        train(
            with_changes(TINY, schedule={"lr": 1e30, "warmup": 0, "clip": 0.0}), 0, tmp_path / "out"
        )
    assert not list(tmp_path.iterdir())


# schedules and batches


def test_learning_rates():
    schedule = Schedule(steps=100, batch_size=1, lr=1.0, warmup=10, decay=0.0)
    plain = schedule.learning_rate(7)
    assert plain.at(0) == 0.1 and plain.at(9) == plain.at(10) == 1.0
    assert abs(plain.at(55) - 0.5) < 1e-9
    line = replace(schedule, curve="linear").learning_rate(7)
    assert abs(line.at(55) - 0.5) < 1e-9 and abs(line.at(32) - (1 - 22 / 90)) < 1e-9
    assert plain.at(32) > line.at(32)
    stairs = replace(schedule, curve="epochs", warmup=0).learning_rate(10)
    assert stairs.at(10) == stairs.at(19) > stairs.at(20)
    assert stairs.at(10) == replace(schedule, warmup=0).learning_rate(10).at(10)


def test_every_epoch_sees_every_sample_once():
    dataset = map_tensors(load_splits(TRAINING["vit-digits"]).train, lambda tensor: tensor[:10])
    rows = batch_order(dataset, 8, 3, seed=1, anywhere=True)
    assert rows.shape == (8, 3) and all(
        len(set(rows[at : at + 3].flatten().tolist())) == 9 for at in (0, 3)
    )
    assert (
        rows[:3].tolist() != rows[3:6].tolist()
        and rows.tolist() != batch_order(dataset, 8, 3, seed=2, anywhere=True).tolist()
    )
    with pytest.raises(sm.errors.DataError, match="10 samples do not fill a batch of 11"):
        batch_order(dataset, 1, 11, seed=1, anywhere=False)


def test_gaps_are_fifteen_in_a_hundred_and_mostly_blank():
    dataset = MaskedText(
        torch.arange(5, 100_005) % 900 + 5, 100, mask_token=4, special=5, vocab_size=1000
    )
    found, rows = dataset.tokens.view(-1, 100), dataset.rows()
    inputs, targets = dataset.batch(
        rows, torch.rand(len(rows), dataset.noise_size, generator=torch.Generator().manual_seed(0))
    )
    asked, tokens = targets >= 0, inputs["input_ids"]
    assert (
        abs(asked.float().mean() - 0.15) < 0.005
        and torch.equal(targets[asked], found[asked])
        and torch.equal(tokens[~asked], found[~asked])
    )
    assert (
        abs((tokens[asked] == 4).float().mean() - 0.8) < 0.02
        and abs((tokens[asked] == found[asked]).float().mean() - 0.1) < 0.02
    )
    others = tokens[asked & (tokens != 4) & (tokens != found)]
    assert (
        others.min() >= 5 and others.max() < 1000 and (others > 910).any()
    )  # any word of the vocabulary, also one that the text has not
    fixed = dataset.fixed()
    assert torch.equal(fixed.inputs["input_ids"], dataset.fixed().inputs["input_ids"]) and set(
        fixed.inputs["input_ids"][fixed.targets >= 0].tolist()
    ) == {4}


def test_a_recipe_can_be_changed():
    recipe = TRAINING["gpt2-docs"]
    other = with_changes(recipe, config={"hidden_size": 96, "n_head": 6}, schedule={"steps": 60})
    assert (
        other.config["n_embd"] == 96
        and "hidden_size" not in other.config
        and (other.schedule.steps, other.schedule.warmup) == (60, 5)
    )
    assert recipe.config["n_embd"] == 64 and recipe.schedule.steps == 600
    assert with_changes(recipe, schedule={"steps": 60, "warmup": 9}).schedule.warmup == 9
    with pytest.raises(MismatchError, match="GPT2LMHeadModel has no setting speed, wings"):
        with_changes(recipe, config={"wings": 2}, schedule={"speed": 1})


def test_every_recipe_makes_a_stock_model():
    for name, recipe in TRAINING.items():
        kind = getattr(transformers, recipe.architecture)
        config = kind.config_class(**recipe.config)
        assert recipe.about and recipe.duration, name
        assert all(
            getattr(config, key) == value
            for key, value in recipe.config.items()
            if not isinstance(value, dict)
        ), name


def numbers():
    return torch.randint(5, 300, (1000,), generator=torch.Generator().manual_seed(0))


def images():
    return Images(
        numbers()[:960, None].expand(-1, 64).reshape(20, 32, 32, 3).byte(),
        torch.arange(20) % 10,
        (0.4, 0.5, 0.6),
        (0.2, 0.3, 0.4),
    )


def test_half_precision_copies_share_what_is_not_a_matrix():
    model = small_model("gpt2")
    net = working_copy(model)
    shared = {
        name
        for (name, mine), theirs in zip(model.named_parameters(), net.parameters(), strict=True)
        if mine is theirs
    }
    halves = {
        name for name, parameter in net.named_parameters() if parameter.dtype == torch.bfloat16
    }
    assert shared | halves == dict(model.named_parameters()).keys() and not shared & halves
    assert (
        "transformer.wte.weight" in shared
        and "transformer.h.0.ln_1.weight" in shared
        and "transformer.h.0.attn.c_attn.weight" in halves
    )


COMPILED = {  # what a compiler must take whole, one of every kind of data set
    "cifar10-vit": (
        {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
        },
        images,
    ),
    "books-gpt2-small": (
        {
            "n_embd": 16,
            "n_head": 2,
            "n_layer": 1,
            "n_inner": 16,
            "n_positions": 16,
            "vocab_size": 300,
        },
        lambda: CausalText(numbers(), 16),
    ),
    "books-bert": (
        {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 300},
        lambda: MaskedText(numbers(), 16, 4, 5, 300),
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_step_is_one_graph(name, monkeypatch):
    """Without breaks: only then a GPU can capture it. `fullgraph` raises at a break."""
    monkeypatch.setattr(
        datasets, "augment", inspect.unwrap(datasets.augment)
    )  # without the checks of shapes that tests have
    sizes, make = COMPILED[name]
    recipe, dataset = (
        with_changes(TRAINING[name], config=sizes, schedule={"steps": 2, "batch_size": 4}),
        make(),
    )
    model = Origin(recipe, 0).model()
    rows, noise = batch_order(dataset, 2, 4, 0, anywhere=False), torch.rand(4, dataset.noise_size)
    torch._dynamo.reset()
    with no_packed_sequences():
        compiled = torch.compile(batch_loss, dynamic=False, backend="eager", fullgraph=True)
        found = [
            loss(model.eval(), dataset, rows, noise, torch.tensor([at])).item()
            for at in (0, 1)
            for loss in (compiled, batch_loss)
        ]
    assert found[0] == found[1] != found[2] == found[3]


# resuming

GAPPED = with_changes(  # gaps and dropout: the generator's state matters
    TRAINING["bert-docs"],
    config={
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.1,
    },
    schedule={"steps": 8, "batch_size": 4, "evaluate_every": 2},
)


def stop_at(step):
    left = [step]

    def progress(item):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return progress


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(GAPPED, 3, tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train(GAPPED, 3, tmp_path / "out", stop_at(5))
    assert [file.name for file in tmp_path.iterdir()] == ["out.partial"]
    return tmp_path / "out"


def metrics(folder):
    found = json.loads((folder / "metrics.json").read_text())
    return {name: found[name] for name in ("losses", "curve", "best_step", "held_out")}


def test_an_interrupted_run_goes_on_to_the_same_weights(interrupted, uninterrupted):
    steps = []
    out = train(GAPPED, 3, interrupted, steps.append, resume=True)
    assert (
        len(steps) == 3
        and same(weights(uninterrupted), weights(out))
        and metrics(out) == metrics(uninterrupted)
    )
    assert [file.name for file in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("lost", ["random", "moments", "weights"])
def test_all_that_is_kept_is_needed(lost, interrupted, uninterrupted):
    file = partial_file(interrupted)
    content = torch.load(io.BytesIO(file.read_bytes()[DIGEST + LENGTH :]), weights_only=True)
    state = content["state"]
    state["best"] = {}  # else an earlier model might be written
    if lost == "random":
        state["random"]["cpu"] = torch.Generator().manual_seed(99).get_state()
    elif lost == "moments":
        state["moments"] = [{} for _ in state["moments"]]
    else:
        state["weights"] = {
            name: tensor + 0.1 * tensor.is_floating_point()
            for name, tensor in state["weights"].items()
        }
    save_state(file, content["origin"], state)
    assert (
        metrics(train(GAPPED, 3, interrupted, resume=True))["losses"]
        != metrics(uninterrupted)["losses"]
    )


def test_a_killed_run_goes_on(tmp_path, uninterrupted):
    code = """
import os, pickle, signal, sys
from pathlib import Path
from symmerge.lab.training import loop as module
recipe, out = pickle.load(sys.stdin.buffer)
module.SAVE_SECONDS, done = 0.0, []
def progress(item):
    done.append(item)
    if len(done) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
module.train(recipe, 3, out, progress)
"""
    import pickle

    killed = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((GAPPED, tmp_path / "out")),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (
        killed.returncode == -signal.SIGKILL
        and not (tmp_path / "out").exists()
        and partial_file(tmp_path / "out").exists()
    )
    out = train(GAPPED, 3, tmp_path / "out", resume=True)
    assert same(weights(uninterrupted), weights(out)) and [
        file.name for file in tmp_path.iterdir()
    ] == ["out"]


def test_only_the_same_training_is_resumed(interrupted):
    with pytest.raises(MismatchError, match="started with another seed: give the same options"):
        train(GAPPED, 4, interrupted, resume=True)
    with pytest.raises(MismatchError, match="started with another recipe"):
        train(with_changes(GAPPED, schedule={"lr": 1.0}), 3, interrupted, resume=True)
    assert partial_file(interrupted).exists()
    partial_file(interrupted).write_bytes(b"no state")
    with pytest.raises(CheckpointError, match="remove it, or leave out --resume"):
        train(GAPPED, 3, interrupted, resume=True)
    steps = []
    train(GAPPED, 3, interrupted, steps.append)  # without resume it begins anew
    assert len(steps) == 8


# the command line


def run(*arguments, expect=0):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)])
    assert result.exit_code == expect, (result.output, result.exception)
    return " ".join(result.output.split())


def test_the_command_line_lists_and_changes(tmp_path):
    assert all(
        name in run("--list") and recipe.about in run("--list") for name, recipe in TRAINING.items()
    )
    assert (
        json.loads(CliRunner().invoke(app, ["train", "--list", "--json"]).stdout)[0]["recipe"]
        == "vit-digits"
    )
    changes = (
        "--change",
        "hidden_size=16",
        "--change",
        "num_attention_heads=2",
        "--change",
        "lr=1e-3",
    )
    run("vit-digits", "--out", tmp_path / "out", "--steps", 2, *changes)
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    assert (
        len(found["losses"]) == 2
        and found["recipe"]["config"]["hidden_size"] == 16
        and found["recipe"]["schedule"]["lr"] == 1e-3
    )
    assert "no setting wings" in run(
        "vit-digits", "--out", tmp_path / "new", "--change", "wings=2", expect=2
    )
    assert "write NAME=VALUE" in run(
        "vit-digits", "--out", tmp_path / "new", "--change", "wings", expect=2
    )
    assert "choose first-attention" in run(
        "vit-digits", "--out", tmp_path / "new", "--fresh", "heads", expect=2
    )
    assert (
        "no --out" in run("vit-digits", expect=2)
        and "no recipe" in run(expect=2)
        and "PyTorch sees" in run("vit-digits", "--out", "x", "--device", "cuda:99", expect=2)
    )

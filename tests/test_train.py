"""Training: the seed decides the weights, the folder is a stock checkpoint, and nothing is left of a run that did not end."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

import symmerge as sm
from symmerge.errors import CheckpointError, MismatchError
from symmerge.groups.linalg import one_thread
from symmerge.mixture import Mixture
from symmerge.tasks import make_task
from symmerge.tasks.embedded import digits, python_docs
from symmerge.zoo.feed import FEEDS
from symmerge.zoo.recipes import TRAINING, training_recipe
from symmerge.zoo.train import train, trained


def short(name, steps=3, batch=4):
    recipe = TRAINING[name]
    return replace(recipe, schedule=replace(recipe.schedule, steps=steps, batch=batch, warmup=1))


def weights(folder):
    model = sm.load(folder)
    return {name: model.weights[name] for name in model.weights}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("trained")
    return {name: train(short(name), 1, place / name) for name in TRAINING}


@pytest.mark.parametrize("name", TRAINING)
def test_the_seed_decides_the_weights(name, folders, tmp_path):
    first, again, other = weights(folders[name]), weights(train(short(name), 1, tmp_path / "again")), weights(train(short(name), 2, tmp_path / "other"))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if first[key].ndim > 1)


@pytest.mark.parametrize("name", [name for name in TRAINING if TRAINING[name].task == "clm"])
def test_language_models_load_as_stock(name, folders):
    tokenizer, model = AutoTokenizer.from_pretrained(folders[name]), AutoModelForCausalLM.from_pretrained(folders[name])
    text = "The for statement: naïve\n    x = 1"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert type(model).__name__ == TRAINING[name].architecture and len(tokenizer) == model.config.vocab_size
    prompt = tokenizer("The", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, prompt.shape[1] + 3)


def test_every_seed_has_the_same_tokenizer(folders, tmp_path):
    train(short("gpt2-docs"), 7, tmp_path / "other")
    assert (folders["gpt2-docs"] / "tokenizer.json").read_bytes() == (tmp_path / "other/tokenizer.json").read_bytes()


def test_pictures_are_seen_in_training_as_the_processor_shows_them(folders):
    assert type(AutoModelForImageClassification.from_pretrained(folders["vit-digits"])).__name__ == "ViTForImageClassification"
    processor = AutoImageProcessor.from_pretrained(folders["vit-digits"])
    image = (digits("train")[0][0] * 255).round().astype("uint8")[None]
    shown = processor([image], input_data_format="channels_first", return_tensors="pt")["pixel_values"][0]
    seen = FEEDS["image"](TRAINING["vit-digits"]).images[0]
    assert torch.allclose(shown, seen, atol=1e-6) and not torch.allclose(shown, -seen, atol=0.1)


def test_training_sees_no_test_data():
    held_out = {image.tobytes() for image in digits("test")[0]}
    assert not held_out & {image.tobytes() for image in digits("train")[0]}
    feed = FEEDS["clm"](TRAINING["gpt2-docs"])
    assert feed.tokenizer.decode(feed.tokens.tolist()) == python_docs("train")


@pytest.mark.parametrize("name", ["vit-digits", "gpt2-docs"])
def test_training_helps(name, folders, tmp_path):
    """A fresh model gives every answer the same chance; a few steps later the loss is lower, on held-out data too."""
    recipe = short(name, steps=30, batch=32)
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
    with pytest.raises(MismatchError, match="no training recipe called 'magic': there are vit-digits, gpt2-docs, llama-docs"):
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

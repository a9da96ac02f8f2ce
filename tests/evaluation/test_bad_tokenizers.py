"""Damaged tokenizers and image processors: one line that names the model and the remedy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from bad_files import content, peak_memory
from fixtures import checkpoint

from symmerge.errors import SymmergeError
from symmerge.evaluation.data.self_generated import mask_token
from symmerge.evaluation.tasks import make_task
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.model import load

MEMORY = 500e6
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
PROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: checkpoint(root / name, name) for name in ("gpt2", "bert", "bert-classifier", "vit")
    }


@pytest.fixture
def damaged(sources, tmp_path):
    """A model with some damage to its files."""

    def make(name, damage):
        folder = Path(shutil.copytree(sources[name], tmp_path / name))
        damage(folder)
        return folder

    return make


def refused(call):
    def caught():
        with pytest.raises(SymmergeError) as error:
            call()
        return str(error.value)

    line, memory = peak_memory(caught)
    assert memory < MEMORY and "\n" not in line and ": " in line and len(line) < 700, line
    return line


def edited(file, change):
    """A JSON file with its content changed."""

    def damage(folder):
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(change(data)))

    return damage


def replaced(file, data):
    return lambda folder: content(file, data)(folder)


def settings(**changes):
    return edited(SETTINGS, lambda data: {**data, **changes})


def vocabulary(change):
    def damage(data):
        data["model"]["vocab"] = change(data["model"]["vocab"])
        return data

    return edited(TOKENIZER, damage)


def part(name, value):
    return edited(TOKENIZER, lambda data: {**data, name: value})


def added(**changes):
    token = {"id": 4, "content": "x", "single_word": False, "lstrip": False, "rstrip": False}
    token |= {"normalized": False, "special": True, **changes}
    return edited(TOKENIZER, lambda data: {**data, "added_tokens": [token]})


TOKENIZERS = {
    "truncated": lambda folder: replaced(TOKENIZER, (folder / TOKENIZER).read_bytes()[:500])(
        folder
    ),
    "empty": replaced(TOKENIZER, ""),
    "not JSON": replaced(TOKENIZER, "words"),
    "no UTF-8": replaced(TOKENIZER, b"\xff\xfe\x00"),
    "a list": replaced(TOKENIZER, "[]"),
    "a number": replaced(TOKENIZER, "17"),
    "deep": replaced(TOKENIZER, "[" * 100_000),
    "an empty object": replaced(TOKENIZER, "{}"),
    "model as text": part("model", "WordLevel"),
    "no model": part("model", None),
    "another model": part("model", {"type": "Nothing"}),
    "names of inputs as a number": settings(model_input_names=3),
    "no name of inputs": settings(model_input_names=["x"]),
    "a list among names of inputs": settings(model_input_names=["input_ids", ["x"]]),
    "special tokens that are nothing": settings(mask_token="", unk_token=""),
    "vocabulary as a list": vocabulary(list),
    "vocabulary as text": vocabulary(lambda _: "abc"),
    "no vocabulary": vocabulary(lambda _: {}),
    "negative ids": vocabulary(lambda known: {**known, "a": -1}),
    "ids as text": vocabulary(lambda known: {**known, "a": "one"}),
    "ids as fractions": vocabulary(lambda known: {**known, "a": 1.5}),
    "ids beyond the embedding": vocabulary(
        lambda known: {name: 10**6 + at for name, at in known.items()}
    ),
    "ids of 32 bits": vocabulary(
        lambda known: {name: 2**32 - 1 - at for name, at in known.items()}
    ),
    "ids beyond 32 bits": vocabulary(lambda known: {**known, "a": 2**40}),
    "no unknown token": vocabulary(lambda known: {"only": 0}),
    "pre-tokenizer of wrong type": part("pre_tokenizer", 3),
    "unknown pre-tokenizer": part("pre_tokenizer", {"type": "Nothing"}),
    "a pattern that does not parse": part(
        "pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    ),
    "added tokens as text": part("added_tokens", "abc"),
    "added tokens of wrong type": part("added_tokens", [3]),
    "added ids of wrong type": added(id="one"),
    "settings not JSON": replaced(SETTINGS, "{"),
    "settings as a list": replaced(SETTINGS, "[]"),
    "settings as text": replaced(SETTINGS, '"text"'),
    "settings no UTF-8": replaced(SETTINGS, b"\xff\xfe\x00"),
    "settings deep": replaced(SETTINGS, "[" * 100_000),
    "digits": replaced(SETTINGS, '{"model_max_length": ' + "9" * 5000 + "}"),
    "class of wrong type": settings(tokenizer_class=3),
    "class as a list": settings(tokenizer_class=["a"]),
    "pad token of wrong type": settings(pad_token=3),
    "pad token as a list": settings(pad_token=["a"]),
    "inputs of wrong type": settings(model_input_names=3),
    "decoder of wrong type": settings(added_tokens_decoder=[1, 2]),
    "decoder ids of wrong type": settings(added_tokens_decoder={"x": {"content": 3}}),
    "a link to nowhere": lambda folder: (
        (folder / TOKENIZER).unlink() or (folder / TOKENIZER).symlink_to("nowhere")
    ),
}
# What some version of the library may or may not read: clean either way.
TOLERATED = {
    "class nobody knows": settings(tokenizer_class="Nothing"),
    "class that needs code": settings(
        tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    ),
    "length of wrong type": settings(model_max_length="long"),
    "negative length": settings(model_max_length=-5),
    "huge length": settings(model_max_length=10**30),
    "special tokens of wrong type": settings(extra_special_tokens=3),
    "padding of a billion": part(
        "padding",
        {
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    ),
    "side of wrong type": settings(padding_side="above"),
    "clean-up of wrong type": settings(clean_up_tokenization_spaces="maybe"),
    "a template of wrong type": settings(chat_template=3),
    "a backend of wrong type": settings(backend=7),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return content("t.txt", "The quick brown fox jumps over the lazy dog. " * 9)(
        tmp_path_factory.mktemp("text")
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return content("t.tsv", "0\tone\n1\ttwo words\n")(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_cannot_be_used(damaged, text, case):
    folder = damaged("gpt2", TOKENIZERS[case])
    line = refused(lambda: list(make_task("clm", str(text), [load(folder)]).batches))
    assert str(folder) in line and ("tokenizer" in line)


@pytest.mark.parametrize("case", TOLERATED)
@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_tokenizers_that_may_be_used(damaged, text, rows, name, case):
    """Whatever the library makes of it: batches as without the damage, or one line."""
    folder = damaged(name, TOLERATED[case])
    task, data = ("clm", text) if name == "gpt2" else ("text", rows)
    try:
        batches, memory = peak_memory(
            lambda: list(make_task(task, str(data), [load(folder)]).batches)
        )
    except SymmergeError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    else:
        assert memory < MEMORY and batches[0]["input_ids"].max() < 101


@pytest.mark.parametrize("case", ["truncated", "a list", "settings as a list"])
def test_text_sampled_with_a_damaged_tokenizer(damaged, case):
    model = load(damaged("bert", TOKENIZERS[case]))
    assert "tokenizer" in refused(lambda: mask_token(model))
    assert "tokenizer" in refused(lambda: check_same_tokenizers([model, model]))


def test_special_tokens_beyond_the_vocabulary(damaged, rows):
    beyond = vocabulary(lambda known: {**known, "[PAD]": 5000, "[MASK]": 5001, "x1": 0, "x2": 4})
    tokens = edited(TOKENIZER, lambda data: {**data, "added_tokens": []})

    def both(folder):
        beyond(folder)
        tokens(folder)

    assert "a token 5001" in refused(lambda: mask_token(load(damaged("bert", both))))
    folder = damaged("bert-classifier", both)
    assert "a token 5000" in refused(lambda: make_task("text", str(rows), [load(folder)]))


def test_a_template_is_never_rendered(damaged, text, tmp_path):
    attack = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}a{% endfor %}"
    )
    folder = damaged("gpt2", settings(chat_template=attack))
    (folder / "chat_template.jinja").write_text(attack)
    assert list(make_task("clm", str(text), [load(folder)]).batches)


def test_code_beside_a_tokenizer_is_not_run(damaged, text, tmp_path):
    def damage(folder):
        TOLERATED["class that needs code"](folder)
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")

    folder = damaged("gpt2", damage)
    assert list(make_task("clm", str(text), [load(folder)]).batches)  # tokenizer.json is plain
    assert not (tmp_path / "ran").exists()


def processor(**changes):
    return edited(PROCESSOR, lambda data: {**data, **changes})


PROCESSORS = {
    "truncated": replaced(PROCESSOR, '{"size": '),
    "empty": replaced(PROCESSOR, ""),
    "a list": replaced(PROCESSOR, "[]"),
    "no UTF-8": replaced(PROCESSOR, b"\xff\xfe\x00"),
    "deep": replaced(PROCESSOR, "[" * 100_000),
    "no class": processor(image_processor_type="Nothing"),
    "class of wrong type": processor(image_processor_type=3),
    "class that needs code": processor(
        image_processor_type="Evil", auto_map={"AutoImageProcessor": "evil.Evil"}
    ),
    "a size of 10**6": processor(size={"height": 10**6, "width": 10**6}),
    "a short side of 10**6": processor(size={"shortest_edge": 10**6}),
    "a size of 10**30": processor(size={"height": 10**30, "width": 16}),
    "a negative size": processor(size={"height": -16, "width": 16}),
    "no size": processor(size={"height": 0, "width": 0}),
    "a size as text": processor(size={"height": "high", "width": 16}),
    "sizes as text": processor(size="large"),
    "a fractional size": processor(size={"height": 15.5, "width": 16}),
    "another size": processor(size={"height": 17, "width": 17}),
    "a crop of 10**6": processor(crop_size={"height": 10**6, "width": 10**6}, do_center_crop=True),
    "padding to 10**6": processor(pad_size={"height": 10**6, "width": 10**6}, do_pad=True),
    "a mean of wrong length": processor(image_mean=[0.5, 0.5]),
    "a mean as text": processor(image_mean="grey"),
    "a mean that is NaN": processor(image_mean=[float("nan")] * 3),
    "a standard deviation of 0": processor(image_std=[0, 0, 0]),
    "an infinite factor": processor(rescale_factor=1e999),
    "a factor as text": processor(rescale_factor="much"),
    "unknown resampling": processor(resample=99),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_image_processors_that_cannot_be_used(damaged, case):
    folder = damaged("vit", PROCESSORS[case])
    line = refused(lambda: list(make_task("image", "self", [load(folder)], samples=2).batches))
    assert str(folder) in line, line


def test_undamaged(damaged, sources, text, rows):
    """The control: the same models as they were."""
    for name, task, data in (("gpt2", "clm", text), ("bert-classifier", "text", rows)):
        assert list(make_task(task, str(data), [load(sources[name])]).batches)
    (batch,) = make_task("image", "self", [load(sources["vit"])], samples=2).batches
    assert torch.isfinite(batch["pixel_values"]).all()
    assert mask_token(load(sources["bert"])) == 4
    check_same_tokenizers([load(sources["gpt2"])] * 2)

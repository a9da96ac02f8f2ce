"""Statistics: streaming sums, files, and samples that have the same moments."""

import warnings
from functools import cache

import pytest
import torch
from observed_pairs import inputs, pair_statistics
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.errors import CheckpointError, DataError, MismatchError, SymmergeWarning
from symmerge.evaluation.results import TaskRecord
from symmerge.lab.small_models import small_model
from symmerge.matching.activations import ActivationMatching, warn_of_poor_statistics
from symmerge.observation.activations import record_activations, watch
from symmerge.observation.gathering import gather
from symmerge.observation.moments import SUMS, Moments, samples_with_moments
from symmerge.observation.statistics import Statistics
from symmerge.symmetry.notation import parse
from symmerge.verification.modules import full_module


@cache
def canonical(name="bert", seed=0):
    return sm.canonicalize(sm.load(small_model(name, seed=seed, dtype=torch.float64)))


def pair(name="bert"):
    return canonical(name), canonical(name, 1)


def padded(rows=12, length=16):
    """Tokens with pads behind most rows: [CLS] and [SEP], here 1 and 2, are tokens like others."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 101, (rows, length), generator=generator)
    tokens[:, 0] = 1
    lengths = torch.randint(2, length, (rows, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    tokens[torch.arange(rows), lengths[:, 0] - 1] = 2
    return {"input_ids": torch.where(mask.bool(), tokens, 0), "attention_mask": mask}


def all_activations(model, batch):
    """Every activation on every token that is no pad, in memory: [tokens, coordinates] by name."""
    module, activations, where = (
        full_module(model, torch.float64),
        {},
        batch["attention_mask"].bool(),
    )

    def keep(name, axis, values):
        activations[name] = (
            values[where] if values.shape[:2] == where.shape else values.flatten(0, -2)
        )

    with watch(model.spec, module, keep), torch.no_grad():
        module(**batch)
    return activations


def cut(batch, size):
    return [
        dict(zip(batch, rows, strict=True))
        for rows in zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
    ]


def directly(a, b, heads):
    inside = (
        torch.einsum("thn,thm->hnm", *(2 * [b.unflatten(1, (heads, -1))]))
        if heads
        else torch.zeros(0, 0, 0)
    )
    return dict(
        zip(
            SUMS,
            (
                torch.tensor(float(len(a))),
                a.sum(0),
                b.sum(0),
                a.square().sum(0),
                b.square().sum(0),
                a.T @ b,
                inside,
            ),
            strict=True,
        )
    )


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_streamed_sums_are_those_of_everything_in_memory(name, size):
    a, b = pair(name)
    batch = padded()
    statistics = pair_statistics(a, b, cut(batch, size))
    in_memory = [all_activations(model, batch) for model in (a, b)]
    assert statistics.moments.keys() == in_memory[0].keys() and statistics.samples == int(
        batch["attention_mask"].sum()
    )
    for activation, moments in statistics.moments.items():
        expected = directly(in_memory[0][activation], in_memory[1][activation], len(moments.inside))
        for part, value in expected.items():
            got = getattr(moments, part)
            assert got.dtype is torch.float64 and (
                got - value
            ).norm() <= 1e-10 * value.norm().clamp_min(1e-30), (activation, part)


def test_pads_are_left_out_and_special_tokens_are_not():
    a, b = pair()
    batch = padded()
    statistics = pair_statistics(a, b, [batch])
    unmasked = pair_statistics(
        a, b, [{**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}]
    )  # the control: pads are tokens
    name = next(iter(statistics.moments))
    assert unmasked.samples == batch["input_ids"].numel() > statistics.samples
    assert (
        unmasked.moments[name].sum_a / unmasked.samples
        - statistics.moments[name].sum_a / statistics.samples
    ).norm() > 1e-2
    without = batch["attention_mask"].clone()
    without[:, 0] = 0
    fewer = pair_statistics(
        a, b, [{**batch, "attention_mask": without}]
    )  # the other control: [CLS] hidden is not the same
    assert fewer.samples == statistics.samples - len(without)


def test_products_in_float64_on_request():
    a, b = pair("gpt2")
    modules = tuple(full_module(model, torch.float32) for model in (a, b))
    exact, coarse = (
        gather(a.spec, modules, inputs(a), dtype=dtype) for dtype in (torch.float64, torch.float32)
    )
    name, rows = next(name for name in exact.moments if "mlp" in name), []
    for module in modules:
        with record_activations(a.spec, module) as recorder, torch.no_grad():
            for batch in inputs(a):
                module(**batch)
        order = [
            torch.randperm(len(part), generator=torch.Generator().manual_seed(0)).argsort()
            for part in recorder.chunks[name]
        ]
        rows.append(
            torch.cat(
                [part[undo] for part, undo in zip(recorder.chunks[name], order, strict=True)]
            ).double()
        )
    truth = rows[0].T @ rows[1]
    errors = [
        ((statistics.moments[name].cross - truth).norm() / truth.norm()).item()
        for statistics in (exact, coarse)
    ]
    assert errors[0] <= 1e-13 < 1e-9 < errors[1] < 1e-5 and (
        exact.header.products,
        coarse.header.products,
    ) == ("float64", "float32")


def test_memory_does_not_grow_with_data():
    a, b = pair()
    sizes = [
        sum(
            getattr(m, part).numel()
            for m in pair_statistics(a, b, inputs(a, n, rows=2)).moments.values()
            for part in SUMS
        )
        for n in (1, 5)
    ]
    assert sizes[0] == sizes[1] > 0
    assert (
        pair_statistics(a, b, inputs(a, 5, rows=2)).samples
        == 5 * pair_statistics(a, b, inputs(a, 1, rows=2)).samples
    )  # the control: it saw more


def test_no_batches():
    with pytest.raises(DataError, match="no batches"):
        pair_statistics(*pair(), [])


# files


def apart(first, second):
    """The largest relative difference of any sum."""
    sums = [
        [getattr(moments, part) for moments in one.moments.values() for part in SUMS]
        for one in (first, second)
    ]
    return max(
        ((a - b).norm() / a.norm().clamp_min(1e-30)).item() for a, b in zip(*sums, strict=True)
    )


def random_inputs(seed):
    return TaskRecord(name="mlm", data="random", samples=1, seed=seed, metrics=(), settings={})


def test_saved_loaded_and_added(tmp_path):
    a, b = pair()
    one, other = (
        pair_statistics(a, b, inputs(a, 1, seed=seed), inputs=(random_inputs(seed),))
        for seed in (0, 1)
    )
    one.save(tmp_path / "one")
    loaded = Statistics.load(tmp_path / "one")
    assert (
        apart(loaded, one) == 0
        and loaded.header == one.header
        and list(loaded.moments) == list(one.moments)
    )
    assert all(loaded.moments[name].axis == one.moments[name].axis for name in one.moments)
    both, streamed = one + other, pair_statistics(a, b, inputs(a, 1, seed=0) + inputs(a, 1, seed=1))
    assert (
        apart(both, streamed) <= 1e-12
        and both.header.inputs == (random_inputs(0), random_inputs(1))
        and apart(both, one) > 0.1
    )
    assert apart(loaded, one) == 0  # adding left them alone


def test_of_another_pair_or_form_is_refused():
    a, b = pair()
    statistics, swapped = pair_statistics(a, b, inputs(a, 1)), pair_statistics(b, a, inputs(a, 1))
    with pytest.raises(MismatchError, match="another pair"):
        statistics + swapped
    still = [
        sm.load(small_model("bert", seed=seed, dtype=torch.float64)).restrict(ff="identity")
        for seed in (0, 1)
    ]
    with pytest.raises(MismatchError, match="another form"):
        ActivationMatching(statistics=statistics).solve(*still)


DAMAGES = {
    "cut short": lambda content: content[: len(content) // 2],
    "not of this kind": lambda content: b"label\ttext\n",
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, how):
    a, b = pair()
    pair_statistics(a, b, inputs(a, 1)).save(tmp_path / "s")
    (tmp_path / "s").write_bytes(DAMAGES[how]((tmp_path / "s").read_bytes()))
    with pytest.raises(CheckpointError, match="make it again with symmerge statistics"):
        Statistics.load(tmp_path / "s")


def test_a_file_that_lacks_sums_is_refused(tmp_path):
    a, b = pair()
    pair_statistics(a, b, inputs(a, 1)).save(tmp_path / "s")
    with safe_open(tmp_path / "s", "pt") as file:
        header = file.metadata()
    tensors = load_file(tmp_path / "s")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "t", header)
    with pytest.raises(CheckpointError, match="is incomplete"):
        Statistics.load(tmp_path / "t")
    save_file(tensors, tmp_path / "t", header)  # the control
    assert Statistics.load(tmp_path / "t").samples


# samples with these moments


def moments_of(a, b, heads):
    sums = directly(a, b, heads)
    return Moments(
        parse("(head vo)")[0] if heads else parse("ff")[0],
        *(value.double() for value in sums.values()),
    )


SCORES = {
    "correlation": lambda a, b: torch.corrcoef(torch.cat([a, b], 1).T)[: a.shape[1], a.shape[1] :],
    "absolute": lambda a, b: SCORES["correlation"](a, b).abs(),
    "cosine": lambda a, b: (a / a.norm(dim=0)).T @ (b / b.norm(dim=0)),
    "covariance": lambda a, b: (a - a.mean(0)).T @ (b - b.mean(0)) / len(a),
    "product": lambda a, b: a.T @ b / len(a),
}


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("score", SCORES)
def test_samples_have_the_moments(score, heads):
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(50, 12, generator=generator, dtype=torch.float64)
        @ torch.randn(12, 12, generator=generator, dtype=torch.float64)
        + 1
        for _ in range(2)
    )
    left, right = samples_with_moments(moments_of(a, b, heads), score)
    assert torch.allclose(left @ right.T, SCORES[score](a, b), atol=1e-8)
    own = SCORES[score](b, b)
    inside = (
        torch.block_diag(*(torch.ones(4, 4) for _ in range(3)))
        if heads and score in ("covariance", "product")
        else torch.eye(12)
    )
    assert torch.allclose(right @ right.T, own * inside, atol=1e-8)
    assert not torch.allclose(
        left @ right.T, SCORES["product" if score != "product" else "cosine"](a, b), atol=1e-2
    )  # the control


@pytest.mark.parametrize("score", SCORES)
def test_fewer_samples_than_coordinates(score):
    """Moments inside a head are singular then; products between the models are still right."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 16, generator=generator) for _ in range(2))
    left, right = samples_with_moments(moments_of(a, b, 2), score)
    assert torch.isfinite(left).all() and torch.allclose(
        left @ right.T, SCORES[score](a, b).double(), atol=1e-4
    )


# doubts


def test_too_few_tokens_are_told_with_the_figure():
    a, b = pair()
    with pytest.warns(
        SymmergeWarning, match=r"^64 tokens for spaces of up to 96 coordinates: .*give 192 or more$"
    ):
        warn_of_poor_statistics(pair_statistics(a, b, inputs(a, 1, rows=2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SymmergeWarning)
        warn_of_poor_statistics(pair_statistics(a, b, inputs(a, 1, rows=6)))  # the control


def test_constant_features_are_counted():
    """Units that never fire differently: their weights are zero, their bias is not."""
    module = small_model("gpt2")
    with torch.no_grad():
        module.transformer.h[0].mlp.c_fc.weight[:, :7] = 0
    a, b = sm.canonicalize(sm.load(module)), canonical("gpt2", 1)
    modules = tuple(full_module(model, torch.float32) for model in (a, b))
    statistics = gather(a.spec, modules, inputs(a))
    name = next(name for name in statistics.moments if "h.0.mlp.c_proj" in name)
    assert (
        statistics.moments[name].constant == 7
        and gather(a.spec, (modules[1], modules[1]), inputs(a)).moments[name].constant == 0
    )
    with pytest.warns(SymmergeWarning, match="^7 coordinates never change"):
        warn_of_poor_statistics(statistics)
    left, right = samples_with_moments(statistics.moments[name], "correlation")
    assert (
        torch.isfinite(left).all()
        and torch.isfinite(right).all()
        and left.abs().sum(1).eq(0).sum() == 7
    )

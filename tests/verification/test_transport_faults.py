"""Transport broken on purpose, in every family: rows, units, heads, layers, shards.

Each family gets at least forty faults. None may pass the gate, and none may be written.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle, islice

import pytest
import torch
from torch import Tensor

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import FunctionChanged
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model
from symmerge.models.orbit import random_member
from symmerge.verification.axis_maps import axis_map
from symmerge.verification.transport import check_transport, tensor_problem
from symmerge.verification.written import gate

FAMILIES = (
    "bert",
    "roberta",
    "roformer",
    "modernbert",
    "gpt2",
    "vit",
    "dinov3",
    "llama",
    "neox",
    "qwen3",
    "phi3",
    "starcoder2",
    "stablelm",
    "olmo2",
)
VARIANTS = ("modernbert-classifier", "dinov3-classifier")
Damage = Callable[[Tensor, Tensor], None]
"""Damages a transported tensor in place; the second is what it was before."""


def _set(change: Callable[[Tensor, Tensor], Tensor], at: Callable[[Tensor], object]) -> Damage:
    def damage(after: Tensor, before: Tensor) -> None:
        place = at(after)
        after[place] = change(after[place].clone(), before[place])

    return damage


ROWS: dict[str, Callable[[Tensor], object]] = {
    "first row": lambda x: 0,
    "last row": lambda x: len(x) - 1,
    "third quarter of the rows": lambda x: slice(len(x) // 2, 3 * len(x) // 4),
    "last column": lambda x: (..., x.shape[-1] - 1),
    "second quarter of the columns": lambda x: (..., slice(x.shape[-1] // 4, x.shape[-1] // 2)),
    "everything": lambda x: ...,
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zero": lambda x, before: torch.zeros_like(x),
    "times 1.1": lambda x, before: 1.1 * x,
    "not moved": lambda x, before: before,
    "mirrored": lambda x, before: -x,
    "in another order": lambda x, before: x.flatten().roll(1).reshape(x.shape),
}
FAULTS = {
    f"{where}: {what}": _set(change, at)
    for where, at in ROWS.items()
    for what, change in CHANGES.items()
}


@lru_cache(maxsize=4)
def moved(name: str, dtype: torch.dtype) -> Model:
    """A model in other coordinates; every tensor of a layer in the middle can be damaged."""
    return random_member(sm.load(small_model(name, seed=2, dtype=dtype)), seed=3)[1]


def damaged(model: Model, name: str, damage: Damage) -> Model:
    """The model with one tensor moved wrongly."""

    def compute() -> Tensor:
        after = model.weights[name].clone()
        damage(after, model.moved.before.weights[name])
        return after

    return replace(model, weights=DerivedWeights(model.weights, {name: compute}))


def as_written(model: Model) -> Model:
    """What a reader finds in the file: weights in their stored precision."""
    stored = {name: partial(_stored, model, name) for name in model.weights}
    return replace(model, weights=DerivedWeights(model.weights, stored))


def _stored(model: Model, name: str) -> Tensor:
    return model.weights[name].to(model.weights.dtype(name)).to(model.weights[name])


def changes(model: Model, wrong: Model, name: str, by: float) -> bool:
    """Whether a fault changes anything: zeros cannot be scaled, one row has no order."""
    right, other = (as_written(side).weights[name] for side in (model, wrong))
    return (right - other).norm() > by * right.norm()


def faults(model: Model, by: float) -> Iterator[tuple[str, str, Model]]:
    """Some of the faults for every tensor of one layer and outside of layers, all in turn."""
    turn = cycle(FAULTS.items())
    for name in model.weights:
        if not model.weights[name].numel() or ".0." in name:
            continue
        for fault, damage in islice(turn, 6):
            wrong = damaged(model, name, damage)
            if changes(model, wrong, name, by):
                yield name, fault, wrong


@pytest.mark.parametrize("name", FAMILIES + VARIANTS)
@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_no_fault_passes(name, dtype, by):
    model = moved(name, dtype).cached()
    assert check_transport(as_written(model), model) == len(model.weights.names())  # the control
    maps = lru_cache(maxsize=64)(partial(axis_map, model.moved.alignment))
    seen, passed = 0, []
    for tensor, fault, wrong in faults(model, by):
        seen += 1
        if not tensor_problem(as_written(wrong), model.moved, tensor, maps):
            passed.append((tensor, fault))
    assert seen >= 40 and not passed, (seen, passed)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("part", ["first", "last"])
def test_a_fault_of_transport_is_never_written(name, part, monkeypatch, tmp_path):
    """Through `save`: broken where tensors are computed, seen in what is on the disk."""
    source = sm.load(small_model(name, seed=2))
    alignment, model = random_member(source, seed=3)
    matrices = [n for n in model.weights if model.weights[n].ndim > 1]
    wrong = matrices[0 if part == "first" else -1]
    right = Alignment.transport

    def transport(self, name, tensor):
        result = right(self, name, tensor)
        if name == wrong:
            result = result.clone()
            result[..., -1] *= 1.01
        return result

    monkeypatch.setattr(Alignment, "transport", transport)
    with pytest.raises(FunctionChanged, match=wrong):
        sm.save(model, tmp_path / "out", gate=gate(source))
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    sm.save(model, tmp_path / "out", gate=gate(source))  # the control
    assert alignment.spec is model.spec


def swap_halves(raw: bytearray) -> None:
    middle = len(raw) // 2
    raw[middle : middle + 4000], raw[-4000:] = raw[-4000:], raw[middle : middle + 4000]


def clear_end(raw: bytearray) -> None:
    raw[-64:] = bytes(64)


def flip_a_bit(raw: bytearray) -> None:
    raw[len(raw) // 2 + 2] ^= 0x40  # in the exponent of some weight


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
@pytest.mark.parametrize("break_file", [swap_halves, clear_end])
def test_a_shard_that_was_written_wrongly_is_never_kept(name, break_file, monkeypatch, tmp_path):
    import symmerge.models.saving as module

    source = sm.load(small_model(name, seed=2))
    model = random_member(source, seed=3)[1]
    right = module.write_weights

    def write(folder, *args, **options):
        right(folder, *args, **options)
        file = sorted(folder.glob("*.safetensors"))[-1]
        raw = bytearray(file.read_bytes())
        break_file(raw)
        file.write_bytes(raw)

    monkeypatch.setattr(module, "write_weights", write)
    with pytest.raises(FunctionChanged, match="nothing was written"):
        sm.save(model, tmp_path / "out", max_shard_bytes=50_000, gate=gate(source))
    assert not list(tmp_path.iterdir())


def test_an_element_outside_its_group_is_refused(tmp_path):
    source = sm.load(small_model("llama", seed=2))
    alignment, model = random_member(source, seed=3)
    matrix = alignment["residual"]["matrix"]
    elements = {**alignment.elements, "residual": {"matrix": 1.01 * matrix}}
    wrong = replace(alignment, elements=elements)
    stretched = replace(model, moved=replace(model.moved, alignment=wrong))
    with pytest.raises(FunctionChanged, match="not in its group"):
        sm.save(stretched, tmp_path / "out", gate=gate(source))
    sm.save(model, tmp_path / "out", gate=gate(source))  # the control


# canonical steps: no element is known for them, so the runs must see it

BROKEN_STEPS = {
    "gpt2": ("transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight", "lm_head.weight"),
    "llama": ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"),
    "vit": ("vit.layers.1.mlp.fc1.weight", "classifier.weight"),
    "modernbert": ("model.layers.1.mlp.Wi.weight", "model.embeddings.tok_embeddings.weight"),
}


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, tensor) for name, all in BROKEN_STEPS.items() for tensor in all]
)
def test_a_broken_canonical_step_is_refused(name, tensor, tmp_path):
    """One row of a tensor is canonicalized wrongly, before any transport."""
    source = sm.load(small_model(name, seed=2))
    prepared = canonicalize(source)

    def compute() -> Tensor:
        result = prepared.weights[tensor].clone()
        result[-1] *= 1.05
        return result

    weights = DerivedWeights(prepared.weights, {tensor: compute})
    with pytest.raises(FunctionChanged, match="does not compute"):
        sm.save(replace(prepared, weights=weights), tmp_path / "out", gate=gate(source))
    sm.save(prepared, tmp_path / "out", gate=gate(source))  # the control


def test_as_many_heads_as_each_has_coordinates(tmp_path):
    source = sm.load(small_model("vit", hidden_size=16, num_attention_heads=4, seed=2))
    model = random_member(source, seed=3)[1]
    sm.save(model, tmp_path / "out", gate=gate(source))
    wrong = damaged(model, "vit.layers.0.attention.k_proj.weight", FAULTS["last row: times 1.1"])
    with pytest.raises(FunctionChanged):
        sm.save(wrong, tmp_path / "wrong", gate=gate(source))


def test_the_gate_changes_no_weight():
    """Float64 weights are compared without a copy."""
    model = random_member(sm.load(small_model("llama", seed=2, dtype=torch.float64)), seed=3)[1]
    cached = model.cached()
    before = {name: cached.moved.before.weights[name].clone() for name in cached.weights}
    after = {name: cached.weights[name].clone() for name in cached.weights}
    check_transport(cached, cached)
    assert all(torch.equal(cached.moved.before.weights[name], before[name]) for name in before)
    assert all(torch.equal(cached.weights[name], after[name]) for name in after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_that_folding_changed_are_judged_entry_by_entry(dtype):
    """One rounding in sixty is more than twice the usual one: of 999 biases, some are."""
    model = random_member(sm.load(small_model("vit", num_labels=999, dtype=dtype)), 1)[1]
    maps, name = partial(axis_map, model.moved.alignment), "classifier.bias"
    assert tensor_problem(as_written(model), model.moved, name, maps) is None

    def next_number(after, before):
        after[17] *= 1 + 2 * torch.finfo(dtype).eps

    wrong = as_written(damaged(model, name, next_number))
    assert tensor_problem(wrong, model.moved, name, maps) is not None  # the control

"""The streams of two models after one layer, compared on the same inputs. No data is needed.

An alignment is one symmetry for all layers, found from weights; what two seeds compute after a
layer is closer than that. Three ways, from the strictest to the loosest:

- "rotation": the rotation (with one scale) that brings OTHER's activations closest to BASE's. A
  symmetry of the stream, fitted at this layer alone.
- "regression": the linear map that predicts BASE's activations from OTHER's by least squares. No
  symmetry: it may stretch, mix and forget.
- answers (`carry_probe`): a new probe that answers on OTHER as the old one does on BASE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.models.model import Model, device_of
from symmerge.models.tables import check_same_kind, layer_count
from symmerge.symmetry.groups import OrthogonalFixingOnes
from symmerge.verification.modules import full_module

HOW = "rotation", "regression"
USES = "added", "compared"
INPUTS = {"clm": (128, 128), "mlm": (128, 128), "image": (512, None)}  # rows, tokens of each
RIDGE = 1e-3  # of the mean variance of a coordinate
PENALTY, STEPS = 1e-4, 100  # of a logistic probe


def check_numbers(tensor: object, what: str) -> None:
    """Refuse what is no tensor of finite floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise MismatchError(f"{what} is {kind}: give a torch tensor of floating-point numbers")
    if not tensor.isfinite().all():
        raise MismatchError(f"{what} has entries that are NaN or infinite")


@final
@dataclass(frozen=True, repr=False)
class StreamMap:
    """A linear map between the streams of two models after one layer: `fit_streams(a, b, layer=3)`.

    `compared` takes directions that are compared with BASE's stream to OTHER's, `added` those that
    are added. `fit` is the share of BASE's variance that OTHER explains.
    """

    layer: int
    how: str
    compared: Tensor  # [other, base]
    added: Tensor  # [other, base]
    means: tuple[Tensor, Tensor]  # of BASE's stream and OTHER's
    fit: float

    def __repr__(self) -> str:
        return f"<StreamMap after layer {self.layer} by {self.how}, {self.fit:.0%} explained>"

    def carry(self, vector: Tensor, use: str = "added") -> Tensor:
        """A direction [..., coordinates] of BASE as one of OTHER."""
        if use not in USES:
            raise MismatchError(f"use {use}: there are {', '.join(USES)}")
        check_numbers(vector, "a direction")
        if vector.shape[-1:] != self.compared.shape[1:]:
            raise MismatchError(
                f"a direction in the stream ends in [{self.compared.shape[1]}],"
                f" not {list(vector.shape)}"
            )
        matrix = self.compared if use == "compared" else self.added
        return (vector.to(matrix) @ matrix.mT).to(vector)

    def probe(self, weight: Tensor, bias: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """A linear probe of BASE as one of OTHER; the bias accounts for the means of both."""
        moved, (mine, its) = self.carry(weight, "compared"), self.means
        return moved, bias + weight @ mine.to(weight) - moved @ its.to(weight)


def fit_streams(
    base: ModelLike,
    other: ModelLike,
    *,
    layer: int,
    how: str = "rotation",
    data: str | Task | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> StreamMap:
    """Fit OTHER's stream after `layer` layers to BASE's, on inputs that both models make.

    Then `carry_direction(map, vector)`. `data` is as for `make_task`, if there are better inputs.
    """
    if how not in HOW:
        raise MismatchError(f"how {how}: choose one of {', '.join(HOW)}")
    first, second = both_streams(base, other, layer=layer, data=data, seed=seed, device=device)
    means = first.mean(0), second.mean(0)
    x, y = second - means[1], first - means[0]
    if how == "rotation":
        left, sizes, right = torch.linalg.svd(x.mT @ y, full_matrices=False)
        stretch = sizes.sum() / x.square().sum()
        compared = stretch * left @ right
        added = left @ right / stretch
    else:
        compared, added = _least_squares(x, y), _least_squares(y, x).mT
    lost = (y - x @ compared).square().sum() / y.square().sum()
    return StreamMap(layer, how, compared, added, means, 1 - float(lost))


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """The matrix M with x M closest to y; a little ridge, where x has no variance."""
    square = x.mT @ x
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square)).to(square)
    return torch.linalg.solve(square + ridge, x.mT @ y)


def carry_probe(
    base: ModelLike,
    other: ModelLike,
    weight: Tensor,
    bias: Tensor | float = 0.0,
    *,
    layer: int,
    data: str | Task | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """A probe for OTHER that answers as one of BASE does, on inputs that both models make.

    Logistic probes [coordinates]: yes where `stream @ weight + bias` is above zero. Nothing is
    moved: a new probe is fitted to the old one's answers, without labels and without data.
    """
    first, second = both_streams(base, other, layer=layer, data=data, seed=seed, device=device)
    check_numbers(weight, "a probe")
    if weight.shape != first.shape[1:]:
        raise MismatchError(
            f"a probe has the shape [{first.shape[1]}], not {list(weight.shape)}: give one at a"
            " time, as wide as BASE's stream"
        )
    answers = (first @ weight.to(first) + bias).sigmoid()
    spread = second.std(0).clamp_min(1e-12)
    x = (second - second.mean(0)) / spread
    fitted, shift = _logistic(x, answers)
    moved = fitted / spread
    return moved.to(weight), (shift - moved @ second.mean(0)).to(weight)


def _logistic(x: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    weight, bias = (torch.zeros(n, dtype=x.dtype, requires_grad=True) for n in (x.shape[1], 1))
    solver = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(x @ weight + bias, answers)
        loss = loss + PENALTY * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)  # type: ignore[arg-type]
    return weight.detach(), bias.detach()[0]


@torch.no_grad()
def both_streams(
    base: ModelLike,
    other: ModelLike,
    *,
    layer: int,
    data: str | Task | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """What flows through BASE and OTHER after `layer` layers, on the same inputs, in float64.

    Where only LayerNorms read the stream, they remove its mean: it is no part of it.
    """
    pair = open_model(base), open_model(other)
    check_same_kind(pair, "compared")
    if layer not in range(min(map(layer_count, pair)) + 1):
        raise MismatchError(f"layer {layer}: give 0 (embeddings) to {layer_count(pair[0])}")
    task = data if isinstance(data, Task) else _inputs(pair, data or "self", seed, device)
    return tuple(_stream(model, task, layer, device) for model in pair)  # type: ignore[return-value]


def _inputs(pair: tuple[Model, Model], data: str, seed: int, device: str) -> Task:
    kind = task_of(pair[0])
    rows, length = INPUTS.get(kind, (512, None))
    how: dict[str, Any] = {"max_samples": rows, "length": length, "seed": seed, "device": device}
    return make_task(kind, data, pair, **how)


def _stream(model: Model, task: Task, layer: int, device: str) -> Tensor:
    module = full_module(model, torch.float32, device_of(device))
    stream, states_by_batch = model.spec.spaces[model.spec.stream], []
    for batch in task.batches:
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        every = getattr(module(**inputs, output_hidden_states=True), "hidden_states", None) or ()
        if layer >= len(every):
            raise MismatchError(
                f"{model.where}: a {model.spec.architecture} shows no stream after layer {layer}:"
                " carry the direction by an alignment"
            )
        states = every[layer].double()
        mask = inputs.get("attention_mask")
        states = states.flatten(0, 1) if mask is None else states[mask.bool()]
        if isinstance(stream.group, OrthogonalFixingOnes):
            states = states - states.mean(-1, keepdim=True)
        states_by_batch.append(states.cpu())
    return torch.cat(states_by_batch)

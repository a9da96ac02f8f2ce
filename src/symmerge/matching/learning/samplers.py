"""Where between models to learn: distributions of B's share, or of many models' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from symmerge.errors import MismatchError

NAMED = {
    "narrow": "uniform:0.4,0.6",
    "fixed": "fixed:0.5",
    "wide": "uniform:0,1",
    "normal": "normal:0.5,0.1",
}
"""The four published samplers, by short names."""
FORMS = {"fixed": 1, "uniform": 2, "normal": 2, "beta": 2}  # how many numbers each takes
DIRICHLET = 10.0  # for many models; 0.1 is published, but makes the mean worse (docs/log.md)
HELP = (
    f"{', '.join(NAMED)}, or one of your own: fixed:0.5, uniform:0.3,0.7,"
    " normal:0.5,0.1 (mean, deviation; clipped), beta:2,2"
)


@final
@dataclass(frozen=True)
class Sampler:
    """Draws shares of B: `Sampler("narrow")`, `Sampler("beta:2,2")`."""

    name: str

    def __post_init__(self) -> None:
        form, numbers = self._parsed()
        low, high = (1e-3, 1e3) if form == "beta" else (0.0, 1.0)
        wrong = not all(low <= number <= high for number in numbers) or (
            form == "uniform" and numbers[0] > numbers[1]
        )
        if wrong:
            raise MismatchError(
                f"sampler {self.name}: shares of B must be between 0 and 1,"
                f" the numbers of a beta between 0.001 and 1000; {HELP}"
            )

    def _parsed(self) -> tuple[str, list[float]]:
        form, _, listed = NAMED.get(self.name, self.name).partition(":")
        try:
            numbers = [float(number) for number in listed.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != FORMS.get(form):
            raise MismatchError(f"no sampler called '{self.name}': choose one of {HELP}")
        return form, numbers

    def draw(self, generator: torch.Generator) -> float:
        """One share of B."""
        form, numbers = self._parsed()
        if form == "fixed":
            return numbers[0]
        if form == "beta":
            return float(_dirichlet(numbers, generator)[0])
        draw = torch.rand if form == "uniform" else torch.randn
        number = float(draw((), generator=generator, dtype=torch.float64))
        if form == "uniform":
            return numbers[0] + (numbers[1] - numbers[0]) * number
        return min(1.0, max(0.0, numbers[0] + numbers[1] * number))


@final
@dataclass(frozen=True)
class Shares:
    """Dirichlet weights of many models: small values favour the corners, large the midpoint."""

    concentration: float = DIRICHLET

    def __post_init__(self) -> None:
        if not 1e-3 <= self.concentration <= 1e6:
            raise MismatchError(
                f"concentration {self.concentration:g}: give a number between 0.001 and a million;"
                f" {DIRICHLET:g} is usual"
            )

    def draw(self, generator: torch.Generator, count: int) -> Tensor:
        """One weight per model; they sum to one."""
        return _dirichlet([self.concentration] * count, generator)


def _dirichlet(numbers: Sequence[float], generator: torch.Generator) -> Tensor:
    # Not every torch version's gamma sampler takes a generator: seed it from ours.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
        return torch.distributions.Dirichlet(torch.tensor(numbers, dtype=torch.float64)).sample()

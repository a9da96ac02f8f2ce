"""The steps of the canonical form, in order.

Folding the gains makes rotations of the stream possible; the other steps make models comparable.
"""

from __future__ import annotations

from collections.abc import Callable

from symmerge.errors import SymmetryError
from symmerge.models.canonical.balancing import balance
from symmerge.models.canonical.biases import drop_key_biases, move_value_biases
from symmerge.models.canonical.gains import fold
from symmerge.models.canonical.means import centre, centre_sums
from symmerge.models.canonical.ties import untie
from symmerge.models.model import Model


def canonicalize(model: Model, steps: tuple[str, ...] | None = None) -> Model:
    """The same function in canonical form.

    `steps` (default: all of `STEPS`) are done in the order given here, those `ON_REQUEST` first.
    Steps with nothing to do leave the model as it is: a post-norm stream keeps its gains.
    """
    known = ON_REQUEST | STEPS
    unknown = set(steps or ()) - known.keys()
    if unknown:
        raise SymmetryError(
            f"no canonical step called {', '.join(sorted(unknown))}: choose one of"
            f" {', '.join(known)}"
        )
    for name, step in known.items():
        if name in (STEPS if steps is None else steps):
            model = step(model)
    return model


STEPS: dict[str, Callable[[Model], Model]] = {
    "fold": fold,
    "centre": centre,
    "values": move_value_biases,
    "keys": drop_key_biases,
    "balance": balance,
}
ON_REQUEST: dict[str, Callable[[Model], Model]] = {"untie": untie, "sums": centre_sums}

"""The verb random: write a random member of a model's symmetry orbit."""

from pathlib import Path

from symmerge.cli.options.common import ModelPath, Residual, Seed, Written
from symmerge.cli.options.groups import verb
from symmerge.cli.writing import restriction, write_moved
from symmerge.models.model import load
from symmerge.models.orbit import keep, random_member


@verb(
    examples=(
        "model --out elsewhere",
        "model --out elsewhere --seed 1",
        "model --out elsewhere --residual permutation",
    )
)
def random(model: ModelPath, written: Written, seed: Seed = 0, residual: Residual = "full") -> None:
    """Write a random member of a model's symmetry orbit: new weights, the same function.

    Use this to test things that should not depend on a model's coordinates. The symmetry is saved
    with it (alignment.safetensors).
    """
    source, restrict = load(model), restriction(residual)
    alignment, moved = random_member(source.restrict(**restrict), seed)

    def save_alignment(folder: Path) -> None:
        keep(alignment, source, folder / "alignment.safetensors", restrict=restrict)

    write_moved(source, moved, written, save_alignment)

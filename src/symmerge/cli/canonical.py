"""The verb canonical: write a model in canonical form."""

from symmerge.cli.options.common import ModelPath, Residual, Written
from symmerge.cli.options.groups import verb
from symmerge.cli.writing import restriction, write_moved
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import load


@verb(
    examples=(
        "model --out canonical",
        "model --out canonical --residual permutation",
        "model --out canonical --overwrite",
    )
)
def canonical(model: ModelPath, written: Written, residual: Residual = "full") -> None:
    """Write a model in canonical form: gains folded, means removed, circuits balanced.

    Use this to compare weights: whatever the function leaves open is fixed, as far as a formula
    can do it. The steps are listed in the model card and in symmerge.json.
    """
    source = load(model)
    write_moved(source, canonicalize(source.restrict(**restriction(residual))), written)

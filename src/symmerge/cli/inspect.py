"""The verb inspect: show a model's symmetries."""

from symmerge.cli import console
from symmerge.cli.options.common import Json, ModelPath
from symmerge.cli.options.groups import verb
from symmerge.models.inspection import summary
from symmerge.models.model import load


@verb(
    examples=(
        "model",
        "model --json",
        "org/model-on-the-hub",
    )
)
def inspect(model: ModelPath, json: Json = False) -> None:
    """Show a model's symmetries: spaces, groups, degrees of freedom, axes of tensors.

    Shows what can change in a model without changing what it computes. Reads no weights.
    """
    about = summary(load(model, check_class=False))
    if json:
        console.show_json(about)
        return
    console.say(
        f"{about['architecture']} ({about['family']}), {about['task']},"
        f" {about['parameters']:,} parameters"
    )
    console.say(
        f"{about['degrees of freedom']:,} continuous degrees of freedom,"
        f" and 10^{about['discrete (log10)']:.0f} permutations and signs"
    )
    console.show_table("Spaces", about["spaces"])
    console.show_table("Tensors (* reads, ~ multiplies pointwise)", about["tensors"])

"""The verb verify: do two checkpoints compute the same function?"""

from typing import Annotated

import torch
import typer

from symmerge.aligning.choices import check_choice, either
from symmerge.aligning.options import SOLVE_DTYPES
from symmerge.cli import console
from symmerge.cli.options.common import Json, ModelA, ModelB, Seed
from symmerge.cli.options.groups import verb
from symmerge.models.model import load
from symmerge.verification.verdict import describe
from symmerge.verification.verdict import verify as compare


@verb(
    examples=(
        "model elsewhere",
        "model elsewhere --json",
        "model elsewhere --dtype float64",
    )
)
def verify(
    a: ModelA,
    b: ModelB,
    dtype: Annotated[
        str, typer.Option(help=f"The precision to compute in: {either(SOLVE_DTYPES)}.")
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The largest relative difference that counts as rounding.",
            show_default="what simulated rounding explains",
        ),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Do two checkpoints compute the same function? Exit code 0 for yes, 1 for no.

    Use this to check any tool that rewrites weights. It compares settings, and logits on inputs
    that reach every token, position and token type, ignoring constants that a softmax removes. How
    much rounding explains is measured on the models themselves.
    """
    check_choice("--dtype", dtype, SOLVE_DTYPES)
    models = load(a), load(b)
    how = {"dtype": getattr(torch, dtype), "tolerance": tolerance, "seed": seed}
    with console.progress("verifying", sum(len(m.weights.names()) for m in models)) as tick:
        verdict = compare(*models, **how, progress=tick)
    if json:
        console.show_json(verdict.to_json())
    else:
        answer = "the same function" if verdict.same else "NOT the same function"
        console.say(f"{answer}: {describe(verdict)}; on {verdict.inputs}")
    raise typer.Exit(0 if verdict.same else 1)

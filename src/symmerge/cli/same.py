"""The verb same: are two checkpoints equal up to symmetry?"""

import typer

from symmerge.aligning.equivalence import same as decide
from symmerge.cli import console
from symmerge.cli.options.common import Json, ModelA, ModelB
from symmerge.cli.options.groups import verb
from symmerge.verification.verdict import describe


@verb(
    examples=(
        "model elsewhere",
        "model elsewhere --json",
        "seed-0 seed-1 && echo the same",
    )
)
def same(a: ModelA, b: ModelB, json: Json = False) -> None:
    """Are two checkpoints the same function up to symmetry? Exit code 0 for yes, 1 for no.

    Use this to find out whether one checkpoint is another in disguise. Prints the certificate.
    """
    certificate = decide(a, b, progress=console.note)
    if json:
        console.show_json(certificate.to_json())
    else:
        verdict, is_same = certificate.verdict, certificate.same
        answer = "the same function up to symmetry" if is_same else "NOT the same function"
        console.say(
            f"{answer}: weights {certificate.before:.2e} apart before alignment,"
            f" {certificate.after:.2e} after, {certificate.units:.2g} times what rounding explains"
            f" ({certificate.tensor});"
            f" {describe(verdict)}"
        )
        rows = [{"space": name, **row} for name, row in certificate.by_space.items()]
        console.show_table("Distance by space", rows)
    raise typer.Exit(0 if certificate.same else 1)

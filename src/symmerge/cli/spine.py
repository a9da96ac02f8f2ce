"""Verbs of the spine: look at a model, move it in its symmetry orbit, compare two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from symmerge.checkpoints.writing import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options import (
    DTYPES,
    Config,
    Json,
    ModelA,
    ModelB,
    ModelPath,
    NoVerify,
    Out,
    Overwrite,
    Residual,
    Seed,
    ShardSize,
    choice,
    either,
)
from symmerge.models.canonical.form import canonicalize
from symmerge.models.inspection import summary
from symmerge.models.model import Model, load, save
from symmerge.models.orbit import follow, keep, random_member
from symmerge.verification.verdict import gate
from symmerge.verification.verdict import verify as compare


def inspect(model: ModelPath, json: Json = False, config: Config = None) -> None:
    """Show a model's symmetries: its spaces, their groups, sizes and degrees of freedom, and the axes of its tensors.

    Reads no weights. Example: [bold]symmerge inspect ./gpt2[/]
    """
    with console.friendly():
        found = summary(load(model))
        if json:
            console.show_json(found)
            return
        console.out.print(
            f"{found['architecture']} ({found['family']}), {found['task']}, {found['parameters']:,} parameters",
            soft_wrap=True,
        )
        console.out.print(
            f"{found['degrees of freedom']:,} continuous degrees of freedom, and 10^{found['discrete (log10)']:.0f} permutations and signs",
            soft_wrap=True,
        )
        console.show_table("Spaces", found["spaces"])
        console.show_table("Tensors (* reads, ~ rides along)", found["tensors"])


def random(
    model: ModelPath,
    out: Out,
    seed: Seed = 0,
    residual: Residual = "full",
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    max_shard_size: ShardSize = 5.0,
    config: Config = None,
) -> None:
    """Write a random member of a model's symmetry orbit: other weights, the same function.

    The element is kept beside it (alignment.safetensors). Example: [bold]symmerge random ./gpt2 --out ./elsewhere --seed 1[/]
    """
    with console.friendly():
        source = load(model)
        restrict = _restrict(residual)
        alignment, moved = random_member(source.restrict(**restrict), seed)
        _write(
            source,
            moved,
            out,
            overwrite,
            no_verify,
            max_shard_size,
            lambda folder: keep(
                alignment, source, folder / "alignment.safetensors", restrict=restrict
            ),
        )


def apply(
    alignment: Annotated[
        Path,
        typer.Argument(
            help="An alignment.safetensors, from random or align.",
            metavar="ALIGNMENT",
            show_default=False,
        ),
    ],
    model: ModelPath,
    out: Out,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    max_shard_size: ShardSize = 5.0,
    config: Config = None,
) -> None:
    """Move a model as an alignment says: other weights, the same function. Refuses any model it was not made for.

    Reads and writes tensor by tensor. Example: [bold]symmerge apply elsewhere/alignment.safetensors ./gpt2 --out ./there[/]
    """
    with console.friendly():
        source = load(model)
        _write(source, follow(alignment, source), out, overwrite, no_verify, max_shard_size)


def canonical(
    model: ModelPath,
    out: Out,
    residual: Residual = "full",
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    max_shard_size: ShardSize = 5.0,
    config: Config = None,
) -> None:
    """Write a model in canonical form: gains folded, means removed, biases moved, circuits balanced; the same function.

    What was done is in the model card and in symmerge.json. Example: [bold]symmerge canonical ./gpt2 --out ./gpt2-canonical[/]
    """
    with console.friendly():
        source = load(model)
        _write(
            source,
            canonicalize(source.restrict(**_restrict(residual))),
            out,
            overwrite,
            no_verify,
            max_shard_size,
        )


def verify(
    a: ModelA,
    b: ModelB,
    dtype: Annotated[
        str, typer.Option(help=f"The precision to compute in: {either(DTYPES)}.")
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The largest relative difference that counts as rounding.",
            show_default="by precision",
        ),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
    config: Config = None,
) -> None:
    """Do two checkpoints compute the same function? Exit code 0 for yes, 1 for no.

    Compares the logits on random inputs, up to what a softmax ignores. Example: [bold]symmerge verify ./gpt2 ./elsewhere[/]
    """
    with console.friendly():
        choice("--dtype", dtype, DTYPES)
        models = load(a), load(b)
        with console.progress("verifying", sum(len(m.weights.names()) for m in models)) as tick:
            verdict = compare(
                *models, dtype=getattr(torch, dtype), tolerance=tolerance, seed=seed, progress=tick
            )
        if json:
            console.show_json(verdict.to_json())
        else:
            answer = "the same function" if verdict.same else "NOT the same function"
            console.out.print(
                f"{answer}: relative logit difference {verdict.difference:.2e}, tolerance {verdict.tolerance:.0e} ({verdict.dtype}),"
                f" largest {verdict.largest:.2e}, on {verdict.inputs}",
                soft_wrap=True,
            )
        raise typer.Exit(0 if verdict.same else 1)


def _restrict(residual: str) -> dict[str, str]:
    return {} if residual == "full" else {"residual": residual}


def _write(
    source: Model,
    moved: Model,
    out: Path,
    overwrite: bool,
    no_verify: bool,
    max_shard_size: float,
    beside: Callable[[Path], None] | None = None,
) -> None:
    return_freed_memory()
    with console.progress(
        "writing and verifying", len(moved.weights.names()) * (1 if no_verify else 3)
    ) as tick:
        check = None if no_verify else gate(source, progress=tick)
        save(
            moved,
            out,
            overwrite=overwrite,
            max_shard_bytes=int(max_shard_size * 1e9),
            progress=tick,
            gate=check,
            beside=beside,
        )
    done = "; ".join(f"{step['step']}: {step['what']}" for step in moved.history)
    console.out.print(
        f"wrote {out} ({'not verified' if no_verify else 'verified: the same function'})",
        soft_wrap=True,
    )
    console.out.print(f"what was done: {done}", soft_wrap=True)

"""The command line: verbs, their options, and what they print. Work is done elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from symmerge import console
from symmerge.errors import MismatchError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are local folders; nothing is ever fetched
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages, which cost far less to get and give back

app = typer.Typer(
    help="Merge Transformers that were trained from different initialisations: find the symmetry between them, prove that it changes no function.",
    epilog="Exit codes: 0 yes or done, 1 no (verify), 2 a problem with the input; the message says what, where and the remedy.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _configure(context: Any, file: Path | None) -> Path | None:
    """Options from a YAML file become the defaults; unknown ones are refused."""
    # Any, because typer passes a context of its own that is no typer.Context.
    if file is None:
        return None
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    with console.friendly():
        options = _read_options(file)
        if unknown := sorted(options.keys() - known):
            raise MismatchError(f"{file}: unknown option {', '.join(unknown)}; {context.info_name} knows {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **options}
    return file


def _read_options(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MismatchError(f"{file} cannot be read as YAML ({error}): write one option per line, 'seed: 1'") from error
    if not isinstance(content, dict):
        raise MismatchError(f"{file} holds no options: write one per line, 'seed: 1'")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


ModelA = Annotated[Path, typer.Argument(help="A checkpoint folder.", metavar="A", show_default=False)]
ModelB = Annotated[Path, typer.Argument(help="Another, of the same architecture and size.", metavar="B", show_default=False)]
Method = Annotated[str, typer.Option(help="How to find the symmetry: weights (data-free).")]
Device = Annotated[str, typer.Option(help="Where to solve: cpu or cuda.")]
ModelPath = Annotated[Path, typer.Argument(help="A Hugging Face checkpoint folder.", metavar="MODEL", show_default=False)]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write. It appears whole or not at all.", show_default=False)]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the check that the function did not change; the card will say so.")]
ShardSize = Annotated[float, typer.Option("--max-shard-size", help="The largest weights file, in GB.", min=0.000001)]
Residual = Annotated[str, typer.Option(help="How the stream may move: full, permutation (keeps a tied head tied) or identity.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="A YAML file with any of these options.", callback=_configure, is_eager=True, show_default=False),
]


@app.command()
def inspect(model: ModelPath, json: Json = False, config: Config = None) -> None:
    """Show a model's symmetries: its spaces, their groups, sizes and degrees of freedom, and the axes of its tensors.

    Reads no weights. Example: [bold]symmerge inspect ./gpt2[/]
    """
    with console.friendly():
        from symmerge.inspection import summary
        from symmerge.model import load

        found = summary(load(model))
        if json:
            console.show_json(found)
            return
        console.out.print(f"{found['architecture']} ({found['family']}), {found['task']}, {found['parameters']:,} parameters", soft_wrap=True)
        console.out.print(
            f"{found['degrees of freedom']:,} continuous degrees of freedom, and 10^{found['discrete (log10)']:.0f} permutations and signs", soft_wrap=True
        )
        console.show_table("Spaces", found["spaces"])
        console.show_table("Tensors (* reads, ~ rides along)", found["tensors"])


@app.command()
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
        from symmerge.model import load
        from symmerge.orbit import keep, random_member

        source = load(model)
        restrict = {} if residual == "full" else {"residual": residual}
        alignment, moved = random_member(source.restrict(**restrict), seed)
        _write(
            source,
            moved,
            out,
            overwrite,
            no_verify,
            max_shard_size,
            lambda folder: keep(alignment, source, folder / "alignment.safetensors", restrict=restrict),
        )


@app.command()
def apply(
    alignment: Annotated[Path, typer.Argument(help="An alignment.safetensors, from random or align.", metavar="ALIGNMENT", show_default=False)],
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
        from symmerge.model import load
        from symmerge.orbit import follow

        source = load(model)
        _write(source, follow(alignment, source), out, overwrite, no_verify, max_shard_size)


@app.command()
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
        from symmerge.canonical import canonicalize
        from symmerge.model import load

        source = load(model)
        restrict = {} if residual == "full" else {"residual": residual}
        _write(source, canonicalize(source.restrict(**restrict)), out, overwrite, no_verify, max_shard_size)


@app.command()
def verify(
    a: ModelA,
    b: ModelB,
    dtype: Annotated[str, typer.Option(help="The precision to compute in: float32 or float64.")] = "float32",
    tolerance: Annotated[float | None, typer.Option(help="The largest relative difference that counts as rounding.", show_default="by precision")] = None,
    seed: Seed = 0,
    json: Json = False,
    config: Config = None,
) -> None:
    """Do two checkpoints compute the same function? Exit code 0 for yes, 1 for no.

    Compares the logits on random inputs, up to what a softmax ignores. Example: [bold]symmerge verify ./gpt2 ./elsewhere[/]
    """
    with console.friendly():
        import torch

        from symmerge.model import load
        from symmerge.verify import verify as compare

        kinds = {"float32": torch.float32, "float64": torch.float64}
        if dtype not in kinds:
            raise MismatchError(f"--dtype {dtype}: choose float32 or float64")
        models = load(a), load(b)
        with console.progress("verifying", sum(len(m.weights.names()) for m in models)) as tick:
            verdict = compare(*models, dtype=kinds[dtype], tolerance=tolerance, seed=seed, progress=tick)
        if json:
            console.show_json(verdict.record())
        else:
            answer = "the same function" if verdict.same else "NOT the same function"
            console.out.print(
                f"{answer}: relative logit difference {verdict.difference:.2e}, tolerance {verdict.tolerance:.0e} ({verdict.dtype}),"
                f" largest {verdict.largest:.2e}, on {verdict.inputs}",
                soft_wrap=True,
            )
        raise typer.Exit(0 if verdict.same else 1)


@app.command()
def align(
    a: ModelA,
    b: ModelB,
    out: Out,
    method: Method = "weights",
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Bring B into A's basin without data: writes OUT/reference and OUT/aligned, the same functions as A and B, now close.

    Also alignment.safetensors and solution.json (the evidence). Example: [bold]symmerge align ./seed-0 ./seed-1 --out ./aligned[/]
    """
    with console.friendly():
        from symmerge.align import align as solve
        from symmerge.align import write
        from symmerge.model import load

        models = load(a), load(b)
        found = solve(*models, _matching(method, seed, device), report=console.note)
        with console.progress("writing and verifying", 6 * len(found.reference.weights.names())) as tick:
            write(found, *models, out, overwrite=overwrite, progress=tick)
        if json:
            console.show_json(found.record())
            return
        if found.already:
            console.out.print("these two were aligned already (fine-tunes of one base?): a plain average would do", soft_wrap=True)
        console.out.print(f"distance {found.before:.3f} before, {found.after:.3f} after, in {found.solution.seconds:.1f} s; wrote {out}", soft_wrap=True)


@app.command()
def merge(
    a: ModelA,
    b: ModelB,
    out: Out,
    t: Annotated[float, typer.Option("-t", help="Where on the line from A (0) to B (1).", min=0.0, max=1.0)] = 0.5,
    method: Annotated[str, typer.Option(help="How to align first: weights, or none for a plain average.")] = "weights",
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Merge two models into one stock checkpoint of the original size: align B to A, then average.

    Example: [bold]symmerge merge ./seed-0 ./seed-1 --out ./merged[/]
    """
    with console.friendly():
        from symmerge.align import align as solve
        from symmerge.merge import merge as average
        from symmerge.model import load, save

        models = load(a), load(b)
        if method == "none":
            merged = average(*models, t)
        else:
            found = solve(*models, _matching(method, seed, device), report=console.note)
            merged = average(found.reference, found.aligned, t)
        with console.progress("writing", len(merged.weights.names())) as tick:
            save(merged, out, overwrite=overwrite, progress=tick)
        console.out.print(f"wrote {out}: {merged.history[-1]['what']}", soft_wrap=True)


@app.command()
def same(a: ModelA, b: ModelB, json: Json = False, config: Config = None) -> None:
    """Are two checkpoints the same function up to symmetry? Prints the certificate; exit code 0 for yes, 1 for no.

    Example: [bold]symmerge same ./gpt2 ./elsewhere[/]
    """
    with console.friendly():
        from symmerge.align import same as decide
        from symmerge.model import load

        found = decide(load(a), load(b), report=console.note)
        if json:
            console.show_json(found.record())
        else:
            answer = "the same function up to symmetry" if found.same else "NOT the same function"
            console.out.print(
                f"{answer}: weights {found.before:.2e} apart before, {found.after:.2e} after (tolerance {found.tolerance:.0e});"
                f" logits {found.verdict.difference:.2e} apart (tolerance {found.verdict.tolerance:.0e})",
                soft_wrap=True,
            )
            console.show_table("Distance by space", [{"space": name, **row} for name, row in found.by_space.items()])
        raise typer.Exit(0 if found.same else 1)


def _matching(method: str, seed: int, device: str) -> Any:
    from symmerge.errors import MismatchError
    from symmerge.matching.weights import WeightMatching

    if method != "weights":
        raise MismatchError(f"--method {method}: there is weights (others come later)")
    return WeightMatching(seed=seed, device=device)


@app.command()
def demo(seed: Seed = 0, json: Json = False, config: Config = None) -> None:
    """Move a small model of every family by a random element of its whole symmetry group, and compare the logits.

    Needs no checkpoint. Example: [bold]symmerge demo --seed 1[/]
    """
    with console.friendly():
        from symmerge.demo import rows
        from symmerge.zoo.small import SMALL

        found = []
        with console.progress("moving models", len(SMALL)) as tick:
            for row in rows(seed):
                found.append(row)
                tick(row["model"])
        if json:
            console.show_json(found)
            return
        console.show_table("A random element of the whole symmetry group: the weights move, the function does not", found)
        raise typer.Exit(0 if all(row["same function"] == "yes" for row in found) else 1)


def _write(source: Any, moved: Any, out: Path, overwrite: bool, no_verify: bool, max_shard_size: float, beside: Any = None) -> None:
    from symmerge.checkpoint import return_freed_memory
    from symmerge.model import save
    from symmerge.verify import gate

    return_freed_memory()
    with console.progress("writing and verifying", len(moved.weights.names()) * (1 if no_verify else 3)) as tick:
        check = None if no_verify else gate(source, progress=tick)
        save(moved, out, overwrite=overwrite, max_shard_bytes=int(max_shard_size * 1e9), progress=tick, gate=check, beside=beside)
    done = "; ".join(f"{step['step']}: {step['what']}" for step in moved.history)
    console.out.print(f"wrote {out} ({'not verified' if no_verify else 'verified: the same function'})", soft_wrap=True)
    console.out.print(f"what was done: {done}", soft_wrap=True)


def main() -> None:
    """The entry point of the `symmerge` command."""
    app()

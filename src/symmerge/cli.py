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
RecipeName = Annotated[str, typer.Option(help="Which variant: symmerge, weights-only, permutations, orthogonal or two-stage.")]
Metric = Annotated[str | None, typer.Option(help="How heads are compared: best, frobenius, cosine or spectrum.", show_default="by recipe")]
Inside = Annotated[str | None, typer.Option(help="How the basis inside heads is found: rotation, general or gradient.", show_default="by recipe")]
Tries = Annotated[int | None, typer.Option(help="How many weightings to try at most.", min=1, show_default="by size")]
SweepsMost = Annotated[int | None, typer.Option("--sweeps", help="How many sweeps at most.", min=1, show_default="by recipe")]
TokenCounts = Annotated[
    Path | None, typer.Option(help="How often each token occurred in training, as .npy: those that never did are left out.", show_default=False)
]
SolveType = Annotated[str, typer.Option("--dtype", help="The precision to solve in: float32 or float64.")]
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
        _choice("--dtype", dtype, tuple(kinds))
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
    recipe: RecipeName = "symmerge",
    metric: Metric = None,
    inside: Inside = None,
    tries: Tries = None,
    sweeps: SweepsMost = None,
    token_counts: TokenCounts = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: SolveType = "float32",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run with the same options was.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Bring B into A's basin without data: writes OUT/reference and OUT/aligned, the same functions as A and B, now close.

    Also alignment.safetensors and solution.json (the evidence). Ctrl-C keeps the best so far. Example: [bold]symmerge align ./seed-0 ./seed-1 --out ./aligned[/]

    Recipes: [bold]symmerge[/] (ours), [bold]weights-only[/] (ours without text the parents write), [bold]permutations[/] (git re-basin), [bold]orthogonal[/]
    (rotated stream, heads by their circuits), [bold]two-stage[/] (attention alone).
    """
    with console.friendly():
        from symmerge.align import align as solve
        from symmerge.align import write
        from symmerge.checkpoint import refuse, return_freed_memory
        from symmerge.matching.journal import Journal
        from symmerge.model import load

        return_freed_memory()
        models = load(a), load(b)
        refuse(out.absolute(), overwrite, (a, b))  # before the work, not after it
        chosen = _recipe(method, recipe, metric, inside, tries, sweeps, token_counts, seed, device, dtype)
        task = {"models": [model.where for model in models], "spec": models[0].spec.fingerprint, "recipe": recipe, **chosen.matching.record()}
        journal = Journal(out.with_name(f"{out.name}.partial.safetensors"), task)
        if not resume:
            journal.remove()
        found = solve(*models, chosen, report=console.note, journal=journal)
        with console.progress("writing and verifying", 6 * len(found.reference.weights.names())) as tick:
            write(found, *models, out, overwrite=overwrite, progress=tick)
        if not found.solution.interrupted:
            journal.remove()
        if json:
            console.show_json(found.record())
            return
        if found.solution.interrupted:
            console.out.print(f"interrupted: wrote the best so far ({len(found.solution.tried)} tries done); --resume --overwrite goes on", soft_wrap=True)
        if found.already:
            console.out.print("these two were aligned already (fine-tunes of one base?): a plain average would do", soft_wrap=True)
        console.out.print(f"distance {found.before:.3f} before, {found.after:.3f} after, in {found.solution.seconds:.1f} s; wrote {out}", soft_wrap=True)


@app.command()
def merge(
    a: ModelA,
    b: ModelB,
    out: Out,
    t: Annotated[float, typer.Option("-t", help="Where on the line from A (0) to B (1).", min=0.0, max=1.0)] = 0.5,
    at: Annotated[
        list[str] | None, typer.Option(help="Another t for a part: ff=0.3, vo.2=0.1, layer.0=0.4, residual=0.5. May be repeated.", show_default=False)
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Merge heads by factors (a straight line), svd (circuits cut to rank) or circuits (twice the head size; no stock checkpoint).")
    ] = "factors",
    method: Annotated[str, typer.Option(help="How to align first: weights, or none for a plain average.")] = "weights",
    recipe: RecipeName = "symmerge",
    metric: Metric = None,
    inside: Inside = None,
    tries: Tries = None,
    sweeps: SweepsMost = None,
    token_counts: TokenCounts = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: SolveType = "float32",
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Merge two models into one stock checkpoint of the original size: align B to A, then average.

    Example: [bold]symmerge merge ./seed-0 ./seed-1 --out ./merged[/]
    """
    with console.friendly():
        from symmerge.align import align as solve
        from symmerge.checkpoint import refuse, return_freed_memory
        from symmerge.merge import merge as average
        from symmerge.merge import piece_time
        from symmerge.model import load, save

        _choice("--attention", attention, ("factors", "svd", "circuits"))
        return_freed_memory()
        models = load(a), load(b)
        refuse(out.absolute(), overwrite, (a, b))
        times = _times(at or [])
        piece_time(models[0].spec, t, times)  # a part that is not there is refused before the work
        pair, evidence = models, None
        if method != "none":
            found = solve(*models, _recipe(method, recipe, metric, inside, tries, sweeps, token_counts, seed, device, dtype), report=console.note)
            pair, evidence = (found.reference, found.aligned), found.evidence()
            if found.solution.interrupted:
                console.note("interrupted: merging with the best alignment so far")
        merged = average(*pair, t, at=times, attention=attention, evidence=evidence)  # type: ignore[arg-type]
        with console.progress("writing", len(merged.weights.names())) as tick:
            save(merged, out, overwrite=overwrite, progress=tick)
        console.out.print(f"wrote {out}: {merged.history[-1]['what']}", soft_wrap=True)
        if attention == "circuits":
            console.out.print("this is no stock checkpoint: its heads have twice the size; only symmerge loads it", soft_wrap=True)


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


def _recipe(
    method: str,
    name: str,
    metric: str | None,
    inside: str | None,
    tries: int | None,
    sweeps: int | None,
    token_counts: Path | None,
    seed: int,
    device: str,
    dtype: str,
) -> Any:
    import torch

    from symmerge.matching.recipes import read_counts, recipe, with_options

    _choice("--method", method, ("weights",))
    _choice("--dtype", dtype, ("float32", "float64"))
    _choice("--metric", metric or "best", ("best", "frobenius", "cosine", "spectrum"))
    _choice("--inside", inside or "rotation", ("rotation", "general", "gradient"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MismatchError(f"--device {device}: PyTorch sees no CUDA device here; use --device cpu")
    counts = read_counts(token_counts) if token_counts else None
    kind = {"float32": torch.float32, "float64": torch.float64}[dtype]
    return with_options(recipe(name), metric=metric, inside=inside, tries=tries, max_sweeps=sweeps, token_counts=counts, seed=seed, device=device, dtype=kind)


def _choice(option: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise MismatchError(f"{option} {given}: choose {' or '.join(known)}")


def _times(given: list[str]) -> dict[str, float]:
    found = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise MismatchError(f"--at {item}: write NAME=T, for example ff=0.3") from None
        if not 0 <= found[name] <= 1:
            raise MismatchError(f"--at {item}: t must lie between 0 and 1")
    return found


@app.command()
def barrier(
    a: ModelA,
    b: ModelB,
    out: Out,
    task: Annotated[str, typer.Option(help="What to measure: mlm, clm, image or text.", show_default=False)],
    data: Annotated[
        str,
        typer.Option(help="self, digits, python-docs, a file (text, .xz, TSV, CSV, JSONL, .npz), a folder of pictures, or hf:NAME.", show_default=False),
    ],
    method: Annotated[str, typer.Option(help="Lines to compare, with commas: none, weights, or a recipe of align.")] = "none,weights",
    points: Annotated[int, typer.Option(help="Points on the line, both ends included.")] = 21,
    samples: Annotated[int | None, typer.Option(help="How many samples to use.", show_default="by task")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Measure the loss along the straight line from A to B: every method, both barriers, and the parents' ensemble.

    Writes curve.json, curve.csv and curve.svg. Example: [bold]symmerge barrier ./seed-0 ./seed-1 --task clm --data python-docs --out ./curve[/]
    """
    with console.friendly():
        from symmerge.barrier import run, write
        from symmerge.checkpoint import new_folder
        from symmerge.model import load
        from symmerge.report import curve_svg
        from symmerge.tasks import make_task

        if points < 2:
            raise MismatchError(f"--points {points}: a line needs both its ends; give 2 or more")
        models = load(a), load(b)
        made = make_task(task, data, models, samples=samples, seed=seed)  # bad data is refused before anything is solved
        chosen = {name.strip(): _line_recipe(name.strip(), seed, device) for name in method.split(",")}
        with new_folder(out, overwrite=overwrite, inputs=(a, b)) as folder:
            methods = [_line(name, models, recipe) for name, recipe in chosen.items()]
            with console.progress("evaluating", len(made.batches) * points * len(methods)) as tick:
                record = run(*models, methods, made, points=points, device=device, progress=tick)
            write(record, folder)
            (folder / "curve.svg").write_text(curve_svg(record), "utf-8")
        if json:
            console.show_json(record)
            return
        rows = [{"method": m["label"], "barrier over the mean": m["barrier_mean"], "barrier over the line": m["barrier_linear"]} for m in record["methods"]]
        console.show_table(f"Barriers: {task} on {data}, {made.samples} samples, {points} points; wrote {out}", rows)


def _line_recipe(name: str, seed: int, device: str) -> Any:
    return None if name == "none" else _recipe("weights", "symmerge" if name == "weights" else name, None, None, None, None, None, seed, device, "float32")


def _line(name: str, models: Any, recipe: Any) -> Any:
    from symmerge.align import align as solve
    from symmerge.barrier import Method

    if recipe is None:
        return Method(name, "plain average", models[0], models[1])
    found = solve(models[0], models[1], recipe, report=console.note)
    label = "weight matching" if name == "weights" else f"weight matching, {name}"
    return Method(name, label, found.reference, found.aligned, found.solution.settings, found.solution.objective)


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder with curve.json (from barrier), or with subfolders that have one.", metavar="DIR", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write: one HTML file that needs nothing else.", show_default=False)],
    config: Config = None,
) -> None:
    """Make one self-contained page of results: curves with a slider, tables that sort, how it was measured.

    Computes nothing again. Example: [bold]symmerge report ./results --out page.html[/]
    """
    with console.friendly():
        from symmerge.report import report as make_page

        console.out.print(f"wrote {make_page(folder, out)}", soft_wrap=True)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="What to train; an unknown name lists those there are.", metavar="RECIPE", show_default=False)],
    out: Out,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Train a small stock model on data that comes with the installation. Another seed gives other weights of the same quality.

    Pictures of digits, or the documentation of Python's standard library. Example: [bold]symmerge train RECIPE --seed 1 --out ./seed-1[/]
    """
    with console.friendly():
        from symmerge.zoo.recipes import training_recipe
        from symmerge.zoo.train import train as fit

        chosen = training_recipe(recipe)
        with console.progress(f"training {recipe}, seed {seed}", chosen.schedule.steps) as tick:
            fit(chosen, seed, out, tick, overwrite=overwrite)
        console.out.print(f"wrote {out}: {chosen.about}; the loss of every step is in metrics.json", soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where everything goes; trained models are kept there.")] = Path("out/demo"),
    seed: Seed = 0,
    symmetries: Annotated[bool, typer.Option("--symmetries", help="Instead: move a small model of every family by a random symmetry.")] = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Train two pairs of small models, average them, align them by every method, and show the barriers on one page.

    A second run does not train again. Example: [bold]symmerge demo --out ./demo[/]
    """
    with console.friendly("interrupted: models that were trained are kept, the rest was not written"):
        if symmetries:
            _symmetries(seed, json)
        from symmerge.demo import demo as show

        outcome = show(out, seed, bar=console.progress)
        if json:
            console.show_json(list(outcome.rows))
            return
        console.show_table("Loss barriers on held-out data: averaging, and what alignment leaves of it", outcome.rows)
        console.out.print(f"the page: {outcome.page}", soft_wrap=True)
        for folder in outcome.merged:
            console.out.print(f"merged, a stock checkpoint: {folder}", soft_wrap=True)


def _symmetries(seed: int, json: bool) -> None:
    from symmerge.demo import rows
    from symmerge.zoo.small import SMALL

    found = []
    with console.progress("moving models", len(SMALL)) as tick:
        for row in rows(seed):
            found.append(row)
            tick(row["model"])
    if json:
        console.show_json(found)
    else:
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

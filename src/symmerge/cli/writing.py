"""Write a transformed checkpoint, verify it against its source, and report what was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from symmerge.checkpoints.memory import return_freed_memory
from symmerge.cli import console
from symmerge.cli.options.common import Written
from symmerge.models.model import Model
from symmerge.models.saving import save
from symmerge.verification.written import PASSES, gate


def write_moved(
    source: Model,
    moved: Model,
    options: Written,
    beside: Callable[[Path], None] | None = None,
    inputs: tuple[Path, ...] = (),
    device: str = "cpu",
) -> None:
    """Write a model that must compute the same function as its source."""
    return_freed_memory()
    verified, out = not options.no_verify, options.out
    ticks = len(moved.weights.names()) * (1 + PASSES * verified)
    with console.progress("writing and verifying", ticks) as tick:
        save(
            moved,
            out,
            overwrite=options.overwrite,
            max_shard_bytes=int(options.max_shard_size * 1e9),
            progress=tick,
            gate=gate(source, progress=tick, device=device) if verified else None,
            beside=beside,
            inputs=inputs,
        )
    console.say(f"wrote {out} ({'verified: the same function' if verified else 'not verified'})")
    steps = "; ".join(f"{step.step}: {step.what}" for step in moved.history)
    console.say(f"steps: {steps}")


def restriction(residual: str) -> dict[str, str]:
    """Convert --residual to the argument of `Model.restrict`."""
    return {} if residual == "full" else {"residual": residual}

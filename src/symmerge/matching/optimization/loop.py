"""The optimisation loop: steps, evaluations on held-out inputs, early stopping, states to resume.

Whatever is optimised implements `Optimizable`. The loop decides when it steps, when it is
evaluated, when its state is saved, and when it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

from symmerge.errors import SymmergeError
from symmerge.models.progress import Counted

EVALUATIONS = 20  # per run of learned or soft matching
SECONDS_BETWEEN_LINES = 1.0  # of progress
CLIP_NORM = 1.0  # of the gradient, in learned and soft matching
State = TypeVar("State")


class NotFinite(SymmergeError):
    """A loss, or something that was learned, is no longer finite."""


class Diverged(NotFinite):
    """A loss that is far worse than where it began: no step from here on is worth its time."""


def require_finite(loss: float, name: str, step: int) -> float:
    """Return the loss if it is finite, else raise."""
    if not math.isfinite(loss):
        raise NotFinite(f"the {name} was not finite at step {step}")
    return loss


@final
@dataclass(frozen=True)
class Evaluation:
    """A loss on held-out inputs. `note` is added to the line that reports it."""

    loss: float
    note: str = ""


@final
@dataclass
class History:
    """What a run has done so far: its steps, the losses of its evaluations, and how it ended."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    evaluated_at: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    stale: int = 0  # evaluations since the best one
    stopped: str = "all steps done"
    interrupted: bool = False
    failed: bool = False

    def add(self, loss: float) -> bool:
        """Record an evaluation at the current step; returns whether it is the best so far."""
        better = loss < self.best_loss
        if better:
            self.best_loss, self.best_step = loss, self.step
        self.stale = 0 if better else self.stale + 1
        self.losses.append(loss)
        self.evaluated_at = self.step
        return better

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@runtime_checkable
class Optimizable(Protocol[State]):
    """The interface of what the loop optimises."""

    def advance(self, step: int) -> int:
        """Take one or more steps from `step`; returns the number of steps done in all."""
        ...

    def evaluate(self, step: int) -> Evaluation:
        """The loss on held-out inputs."""
        ...

    def keep_best(self) -> None:
        """Remember the current state as the best so far."""
        ...

    def state(self, history: History) -> State:
        """Everything needed to continue the run from here."""
        ...

    def restore(self, state: State) -> History:
        """Go back to a saved state."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How long a run is, and when it is evaluated.

    With `evaluate_ends` also before the first and after the last step. `patience` evaluations
    without improvement end the run, but not before `least_steps`.
    """

    steps: int
    evaluate_every: int = 0  # steps; 0: never
    evaluate_ends: bool = False
    patience: int | None = None
    least_steps: int = 0

    def evaluates(self, step: int) -> bool:
        regular = self.evaluate_every > 0 and step % self.evaluate_every == 0
        return regular or (self.evaluate_ends and step == self.steps)

    def enough(self, history: History) -> bool:
        stale = self.patience is not None and history.stale >= self.patience
        return stale and history.evaluated_at >= self.least_steps


def evenly(steps: int, *, patience: int | None = None, least_steps: int = 0) -> LoopPlan:
    """About twenty evaluations per run, including the start and the end."""
    every = max(1, steps // EVALUATIONS)
    return LoopPlan(
        steps=steps,
        evaluate_every=every,
        evaluate_ends=True,
        patience=patience,
        least_steps=least_steps,
    )


@final
@dataclass(frozen=True)
class Saver(Generic[State]):
    """Writes states to resume from: after every evaluation, or at intervals of `seconds`."""

    write: Callable[[State], None]
    seconds: float | None = None

    def due(self, evaluated: bool, waited: float) -> bool:
        return evaluated if self.seconds is None else waited > self.seconds


def _nothing(*_: object) -> None:
    """No-op hook."""


@final
@dataclass(frozen=True, kw_only=True)
class Hooks(Generic[State]):
    """Callbacks: a line per evaluation, the step after each step, both ends of every advance."""

    report: Callable[[str], None] = _nothing
    after_step: Callable[[int], None] = _nothing
    progress: Callable[[int, int], None] = _nothing
    remedy: str = "lower --lr"  # of a loss that is not finite
    saver: Saver[State] | None = None


@final
class Loop(Generic[State]):
    """One run: `Loop(subject, evenly(300), Hooks()).run()`."""

    def __init__(
        self, subject: Optimizable[State], plan: LoopPlan, hooks: Hooks[State] | None = None
    ) -> None:
        self.subject, self.plan, self.hooks = subject, plan, hooks or Hooks()
        self.history, self._saved, self._told = History(), 0.0, 0.0

    def resume(self, state: State) -> None:
        self.history = self.subject.restore(state)

    def run(self) -> History:
        """Run to the end. Ctrl-C and `NotFinite` pass through."""
        self._saved = self._told = time.perf_counter()
        if self.plan.evaluate_ends and not self.history.losses:
            self._evaluate()
            self._save(evaluated=True)
        while not self._ended():
            self._advance()
        return self.history

    def run_to_best(self) -> History:
        """Run to the end; Ctrl-C or a loss that is not finite ends it with the best so far."""
        try:
            return self.run()
        except KeyboardInterrupt:
            self.history.interrupted, self.history.stopped = True, "interrupted"
        except NotFinite as reason:
            self.history.failed, self.history.stopped = True, str(reason)
            self.hooks.report(f"{reason}: the best state before it is kept; {self.hooks.remedy}")
        return self.history

    def _advance(self) -> None:
        before = self.history.step
        self.history.step = step = self.subject.advance(before)
        self.hooks.after_step(step)
        if evaluated := self.plan.evaluates(step):
            self._evaluate()
        else:
            self._tell_step(step)
        self._save(evaluated=evaluated)
        self.hooks.progress(before, step)

    def _evaluate(self) -> None:
        history = self.history
        evaluation = self.subject.evaluate(history.step)
        better = history.add(evaluation.loss)
        if better:
            self.subject.keep_best()
        best = ", the best so far" if better else ""
        step, steps = history.step, self.plan.steps
        loss = f"held-out loss {evaluation.loss:.4f}{evaluation.note}{best}"
        self.hooks.report(Counted(f"step {step} of {steps}: {loss}", step, steps))

    def _tell_step(self, step: int) -> None:
        """Say how far it is, at most once a second."""
        if time.perf_counter() - self._told >= SECONDS_BETWEEN_LINES:
            self._told, steps = time.perf_counter(), self.plan.steps
            self.hooks.report(Counted(f"step {step} of {steps}", step, steps))

    def _save(self, *, evaluated: bool) -> None:
        saver = self.hooks.saver
        if saver and saver.due(evaluated, time.perf_counter() - self._saved):
            saver.write(self.subject.state(self.history))
            self._saved = time.perf_counter()

    def _ended(self) -> bool:
        history = self.history
        if self.plan.enough(history):
            history.stopped = f"no better for {history.stale} evaluations"
            self.hooks.report(f"stopped at step {history.step}: {history.stopped}")
            return True
        return history.step >= self.plan.steps

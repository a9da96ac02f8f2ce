"""Run steps as CUDA graphs: otherwise small models wait for Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from symmerge.errors import SymmergeWarning


@final
class GraphRecorder:
    """Warms up and captures on one side stream, so that its memory is reused."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work on the side stream, after earlier and before later work."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the work as a graph, on the same stream: gradients are bound to theirs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            work()
        return graph


@runtime_checkable
class GraphInput(Protocol):
    """A batch for a graph: copied into the batch that the graph was captured with."""

    def tensors(self) -> dict[str, Tensor]: ...

    def clone(self) -> GraphInput: ...


@final
class StepGraphs:
    """Replays a step as a graph; each combination of batch shapes has its own graph."""

    def __init__(self, step: Callable[[tuple[Any, ...]], None]) -> None:
        self.step, self.recorder = step, GraphRecorder()
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[GraphInput, ...]] | None] = {}
        self.waited: set[Hashable] = set()

    def __call__(self, batches: tuple[GraphInput, ...]) -> None:
        key = tuple(
            (name, tuple(tensor.shape))
            for batch in batches
            for name, tensor in batch.tensors().items()
        )
        if key in self.graphs:
            self._replay(key, batches)
            return
        waits = self._real_step(batches)
        if waits and key not in self.waited:  # maybe only a one-time setup waited: try again
            self.waited.add(key)
            return
        if waits:
            warnings.warn(
                f"steps wait for the GPU ({waits[0]}): they are not captured, so they are slower",
                SymmergeWarning,
                stacklevel=2,
            )
        self.graphs[key] = None if waits else self._captured(batches)

    def _real_step(self, batches: tuple[GraphInput, ...]) -> list[str]:
        """Take a step on the capture stream; return where in the code it waited for the GPU.

        One-time allocations are then done. A step that waits cannot be captured.
        """
        with warnings.catch_warnings(record=True) as caught:
            self.recorder.warm_up(lambda: self._watched(batches, caught))
        return [
            f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)
        ]

    def _watched(
        self, batches: tuple[GraphInput, ...], caught: list[warnings.WarningMessage]
    ) -> None:
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        caught.clear()  # enabling the mode warns, too
        try:
            self.step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _replay(self, key: Hashable, batches: tuple[GraphInput, ...]) -> None:
        captured = self.graphs[key]
        if captured is None:
            self.step(batches)
            return
        graph, inputs = captured
        for fixed, batch in zip(inputs, batches, strict=True):
            targets = fixed.tensors()
            for name, tensor in batch.tensors().items():
                targets[name].copy_(tensor)
        graph.replay()

    def _captured(
        self, batches: tuple[GraphInput, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[GraphInput, ...]]:
        inputs = tuple(batch.clone() for batch in batches)
        return self.recorder.capture(lambda: self.step(inputs)), inputs

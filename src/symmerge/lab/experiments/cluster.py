"""Cells computed on a Ray cluster, by workers that share a file system with this process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, final

from symmerge.errors import MismatchError
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.engines import ENVIRONMENT, PATIENCE, AttemptResult, attempt
from symmerge.lab.experiments.store import Store


@final
class RayEngine:
    """A Ray cluster at `address`, or one of this machine's own. The folder of the store must lie where every node sees it under the same path."""

    def __init__(self, address: str | None = None, workers: int = 2, *, gpus: float = 0.0) -> None:
        self.workers = self.heavy = workers
        self._address, self._gpus = address, gpus
        self._running: dict[Any, Cell] = {}

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._ray, self._store = _ray(), store
        self._ours = not self._ray.is_initialized()
        if self._ours:
            where = (
                {"address": self._address}
                if self._address
                else {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            )
            try:
                _knock(self._address)
                self._ray.init(**where, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                raise MismatchError(
                    f"no Ray cluster at {self._address or 'this machine'} ({reason}): start one with `ray start --head`"
                ) from error
        try:
            self._check_nodes()
        except BaseException:
            self.close()
            raise
        # A cluster has its own installation; on this machine workers find what this process finds.
        environment = (
            ENVIRONMENT
            if self._address
            else {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        # No retries of Ray's own: the run counts attempts.
        self._attempt = self._ray.remote(
            num_cpus=1, num_gpus=self._gpus, max_retries=0, runtime_env={"env_vars": environment}
        )(_attempt_there)

    def start(self, cell: Cell) -> None:
        self._running[self._attempt.remote(cell, self._store)] = cell

    def wait(self) -> list[AttemptResult]:
        ready, _ = self._ray.wait(list(self._running), timeout=PATIENCE)
        return [self._ended(reference, self._running.pop(reference)) for reference in ready]

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._ours:
            self._ray.shutdown()

    def _ended(self, reference: Any, cell: Cell) -> AttemptResult:
        try:
            ended = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # its process, its node or the way to it
            return AttemptResult(
                cell, f"the worker died ({str(error).strip().splitlines()[0]})", str(error)
            )
        if not ended.problem and not self._store.appears(cell):
            return AttemptResult(
                cell,
                f"{self._store.folder(cell)} was finished elsewhere and is not to be seen here: share this folder with all nodes",
                again=False,
            )
        return ended

    def _check_nodes(self) -> None:
        """That there are GPUs where they are asked for, and that every node sees the folder; one that joins later finds out with its first cell."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On  # type: ignore[import-not-found]

        if self._gpus and not self._ray.cluster_resources().get("GPU"):
            raise MismatchError(
                "no node of the Ray cluster has a GPU, and cells would wait for one for ever: use --device cpu, or add one"
            )
        look = self._ray.remote(num_cpus=0, max_retries=3)(_sees)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        seen = self._ray.get(
            [
                look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(self._store)
                for node in nodes
            ]
        )
        if blind := [
            node["NodeManagerHostname"] for node, sees in zip(nodes, seen, strict=True) if not sees
        ]:
            raise MismatchError(
                f"{', '.join(blind)} of the cluster cannot see {self._store.root}: choose a folder that all nodes share under the same path"
            )


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError as error:
        raise MismatchError(
            "Ray is not installed: pip install 'symmerge[ray]', or use --engine local"
        ) from error
    return ray


def _knock(address: str | None) -> None:
    """Ray takes minutes to find out that nobody is there."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()


def _attempt_there(cell: Cell, store: Store) -> AttemptResult:
    return attempt(cell, store, print)  # Ray keeps what workers print in its logs


def _sees(store: Store) -> bool:
    return store.cells.is_dir()

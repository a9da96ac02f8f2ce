"""The Ray engine: workers that share a file system with this process."""

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
    """A Ray cluster at `address`, or a local one.

    Every node must see the folder of the store under the same path.
    """

    def __init__(self, address: str | None = None, workers: int = 2, *, gpus: float = 0.0) -> None:
        self.workers = self.heavy = workers
        self._address, self._gpus = address, gpus
        self._running: dict[object, Cell] = {}

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._ray, self._store = _ray(), store
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect()
        try:
            self._check_nodes()
        except BaseException:
            self.close()
            raise
        # No retries by Ray: the runner counts attempts.
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_retries": 0}
        remote = self._ray.remote(**options, runtime_env={"env_vars": self._environment()})
        self._attempt = remote(_remote_attempt)

    def _connect(self) -> None:
        local = {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
        where = {"address": self._address} if self._address else local
        try:
            _check_address(self._address)
            self._ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise MismatchError(
                f"no Ray cluster at {self._address or 'this machine'} ({reason}):"
                " start one with `ray start --head`"
            ) from error

    def _environment(self) -> dict[str, str]:
        """Environment of workers: local ones import what this process does."""
        if self._address:
            return ENVIRONMENT
        return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(self, cell: Cell) -> None:
        self._running[self._attempt.remote(cell, self._store)] = cell

    def wait(self) -> list[AttemptResult]:
        done, _ = self._ray.wait(list(self._running), timeout=PATIENCE)
        return [self._result(reference, self._running.pop(reference)) for reference in done]

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._ours:
            self._ray.shutdown()

    def _result(self, reference: object, cell: Cell) -> AttemptResult:
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # process, node or network
            reason = str(error).strip().splitlines()[0]
            return AttemptResult(cell, f"the worker died ({reason})", str(error))
        if not result.problem and not self._store.appears(cell):
            problem = (
                f"{self._store.folder(cell)} was finished elsewhere and is not visible here:"
                " share this folder with all nodes"
            )
            return AttemptResult(cell, problem, again=False)
        return result

    def _check_nodes(self) -> None:
        """Check for GPUs, and that every node sees the folder; later nodes fail in their cells."""
        from ray.util import scheduling_strategies as strategies  # type: ignore[import-not-found]

        if self._gpus and not self._ray.cluster_resources().get("GPU"):
            raise MismatchError(
                "no node of the Ray cluster has a GPU, so cells would wait forever:"
                " use --device cpu, or add one"
            )
        check = self._ray.remote(num_cpus=0, max_retries=3)(_sees_store)
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        sees = {}
        for name in nodes:
            there = strategies.NodeAffinitySchedulingStrategy(name, soft=False)
            sees[name] = check.options(scheduling_strategy=there).remote(self._store)
        blind = [node for node, reference in sees.items() if not self._ray.get(reference)]
        if blind:
            hosts = ", ".join(nodes[node]["NodeManagerHostname"] for node in blind)
            raise MismatchError(
                f"{hosts} of the cluster cannot see {self._store.root}:"
                " choose a folder that all nodes share under the same path"
            )


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError as error:
        raise MismatchError(
            "Ray is not installed: pip install 'symmerge[ray]', or use --engine local"
        ) from error
    return ray


def _check_address(address: str | None) -> None:
    """Try to connect first: Ray takes minutes to notice that nothing answers."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()


def _remote_attempt(cell: Cell, store: Store) -> AttemptResult:
    return attempt(cell, store, print)  # Ray logs what workers print


def _sees_store(store: Store) -> bool:
    return store.cells.is_dir()

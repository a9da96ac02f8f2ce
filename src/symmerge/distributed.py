"""Helpers for processes that share one job, started by `torchrun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and the number of processes."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Join the processes that `torchrun` started into one group; they exit at the end.

    A single process just continues. Yields rank and world size.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield rank_and_world_size()
        return
    import torch.distributed as distributed

    distributed.init_process_group("gloo")  # sums are added up on the CPU
    try:
        yield rank_and_world_size()
        distributed.barrier()  # leaving early would break the connection of those still working
    except BaseException:
        distributed.destroy_process_group()
        raise
    # The work is done and written. While Python shuts down, gloo's threads sometimes abort the
    # process ("terminate called without an active exception", one run in fifty): skip that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def broadcast(value: Any) -> Any:
    """The first process's value, sent to all."""
    import torch.distributed as distributed

    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def decided_by_first(decide: Callable[[], Any]) -> Any:
    """Let the first process decide for all: rounding could make each decide differently."""
    rank, processes = rank_and_world_size()
    if processes == 1:
        return decide()
    return broadcast(decide() if rank == 0 else None)


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process."""
    if rank_and_world_size()[1] == 1:
        return flag
    return bool(sum_over_processes({"flag": torch.tensor(float(flag))})["flag"])


def local_device(name: str) -> str:
    """The GPU of this process, where several processes share several GPUs."""
    rank, processes = rank_and_world_size()
    if name == "cuda" and processes > 1 and torch.cuda.is_available():
        return f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
    return name


def sum_over_processes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums over all processes, under rank 0's names; a process without a tensor adds zero."""
    import torch.distributed as distributed

    layout = broadcast({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})
    sums = {}
    for name, (shape, dtype) in layout.items():
        sums[name] = tensors[name].cpu() if name in tensors else torch.zeros(shape, dtype=dtype)
        distributed.all_reduce(sums[name])
    return sums

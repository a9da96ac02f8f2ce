"""Several processes that share one job: started by `torchrun`, each takes its part, and sums are added up over all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """This process's number, and how many there are."""
    import torch.distributed as distributed

    return (
        (distributed.get_rank(), distributed.get_world_size())
        if distributed.is_available() and distributed.is_initialized()
        else (0, 1)
    )


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """While inside, the processes that `torchrun` started work together, and end with it; a process on its own is one of one, and goes on."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield rank_and_world_size()
        return
    import torch.distributed as distributed

    distributed.init_process_group("gloo")  # sums are added up on the CPU, wherever they were made
    try:
        yield rank_and_world_size()
        distributed.barrier()  # one that leaves while another still works pulls the connection from under it
    except BaseException:
        distributed.destroy_process_group()
        raise
    # The work is done and written. gloo's threads may outlive what they belong to while Python takes itself down, and then abort the process
    # ("terminate called without an active exception", about one run in fifty): leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def broadcast(value: Any) -> Any:
    """What the first process has, in all of them."""
    import torch.distributed as distributed

    held = [value]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def decided_by_first(decide: Callable[[], Any]) -> Any:
    """What the first process finds, in all of them: where each would decide by rounding, they would part."""
    rank, processes = rank_and_world_size()
    if processes == 1:
        return decide()
    return broadcast(decide() if rank == 0 else None)


def any_process(flag: bool) -> bool:
    """Whether any of the processes says so."""
    return (
        flag
        if rank_and_world_size()[1] == 1
        else bool(sum_over_processes({"flag": torch.tensor(float(flag))})["flag"])
    )


def local_device(name: str) -> str:
    """Each process of several has a GPU of its own, as far as there are any."""
    if name == "cuda" and rank_and_world_size()[1] > 1 and torch.cuda.is_available():
        return f"cuda:{int(os.environ.get('LOCAL_RANK', rank_and_world_size()[0])) % torch.cuda.device_count()}"
    return name


def sum_over_processes(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums over all processes, under the names the first one has; one that had nothing to do adds nothing."""
    import torch.distributed as distributed

    layout = broadcast({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()})
    found = {}
    for name, (shape, dtype) in layout.items():
        found[name] = mine[name].cpu() if name in mine else torch.zeros(shape, dtype=dtype)
        distributed.all_reduce(found[name])
    return found

"""Two processes of one job, forked: `torchrun` would have three import torch, for ten seconds."""

import os
import socket
import sys
import traceback

from symmerge.cli import app

SECONDS = 120


def run_in_two(*arguments, folder):
    """Run a verb in two processes that share it; what both printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    logs = [folder / f"said-{rank}.txt" for rank in range(2)]
    children = [_forked(list(map(str, arguments)), address, *one) for one in enumerate(logs)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    return said


def _forked(arguments, address, rank, log):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _said_in(log)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ.update(address | ranks)
        code = app(arguments, standalone_mode=False) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _said_in(log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")

"""Two processes that share one job, as `torchrun` starts them, but without its own import."""

import os
import socket
import subprocess
import sys
import traceback

from symmerge.cli import app

SECONDS = 300


def run_in_two(*arguments, folder):
    """Run a verb in two forked processes; what both printed. Nothing may be learned in a fork."""
    logs = [folder / f"said-{rank}.txt" for rank in range(2)]
    arguments = [str(argument) for argument in arguments]
    children = [
        _forked(arguments, ranks, log) for ranks, log in zip(_both_ranks(), logs, strict=True)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    return said


def run_script_in_two(script, *arguments):
    """Run a script in two processes of their own."""
    line = [sys.executable, str(script), *map(str, arguments)]
    running = [
        subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1", **ranks})
        for ranks in _both_ranks()
    ]
    try:
        assert [process.wait(timeout=SECONDS) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()


def _both_ranks():
    """The environments that `torchrun` would give."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def _forked(arguments, ranks, log):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _said_in(log)
        os.environ.update(ranks)
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

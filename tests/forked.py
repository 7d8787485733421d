"""Processes for tests that begin with torch and the project's modules loaded.

They are forked from a server of their own: the one of product code has modules that other tests look at. A start takes
milliseconds in place of 5 CPU-seconds of imports.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from unittest.mock import patch

import torch

from audiollm.commands import cli

MODULES = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.testing", "deepspeed", "pytest", "hypothesis", "peft",
    "webdataset", "transformers", "audiollm.commands.run", "audiollm.evaluate.report.suite", "audiollm.flow.training",
    "audiollm.supervised.run", "audiollm.rl.online.run", "audiollm.rl.preference.run", "audiollm.rl.reward_models.run",
    "tokenizer.training.run", "tokenizer.continuous.run", "pipelines.report.stage",
    "tests.audiollm.train.two_ranks",
)  # fmt: skip
"""Modules that the server imports."""

_server = forkserver.ForkServer()
_server.set_forkserver_preload(list(MODULES))


@contextmanager
def forked() -> Iterator[ForkServerContext]:
    """Start processes of this context from the server of tests."""
    for module in MODULES:
        assert find_spec(module), f"{module}: a server leaves out silently what it does not find"
    paths = os.pathsep.join(path for path in sys.path if path)
    start = patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process)
    with start, patch.dict(os.environ, PYTHONPATH=paths):
        yield get_context("forkserver")


def start_command(
    *arguments: str, output: Connection | None = None, file_limit: int | None = None
) -> BaseProcess:
    """Start `audiollm ARGUMENTS` in a process of its own, in this folder and environment.

    Args:
        output: takes the bytes that it prints; None: nobody reads them.
        file_limit: in bytes, of every file that it writes.
    """
    with forked() as context:
        process = context.Process(target=_command, args=(arguments, output, file_limit, dict(os.environ)))
        process.start()
    return process


def run_command(*arguments: str, file_limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `audiollm ARGUMENTS` in a process of its own to its end; `stdout` has its errors too."""
    reads, writes = Pipe(duplex=False)
    process = start_command(*arguments, output=writes, file_limit=file_limit)
    writes.close()
    with open(reads.fileno(), closefd=False) as output:
        told = output.read()
    process.join()
    reads.close()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, told)


def _command(
    arguments: Sequence[str],
    output: Connection | None,
    file_limit: int | None,
    environment: Mapping[str, str],
) -> None:
    begin(environment)
    place = output.fileno() if output else os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(place, standard)
    if output:
        output.close()
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = ["audiollm", *arguments]
    cli.main()


def begin(environment: Mapping[str, str]) -> None:
    """Take the environment of the process that asked for this one: the server has the one of its own start.

    One thread and no flushes of files to the disk, as in `conftest`.
    """
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.fsync = lambda fd: None

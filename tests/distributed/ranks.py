"""Run a function on several ranks: processes on this machine that talk through gloo.

Processes are forked from a server that has imported torch already, which makes a rank start in a tenth of a second.
"""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist

GROUP_TIMEOUT = 60.0
"""Seconds after which a collective that some rank does not join raises on the others."""

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    result: Any
    """What the function returned; None if it did not return."""
    error: str | None
    """The traceback of what it raised, or that it was ended; None if it returned."""
    seconds: float
    """From the start of all ranks."""


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: dict[str, Any]
    rank: int
    world: int
    file: str
    group_timeout: float
    together: bool


class _Answering:
    """Sends what a rank returned or raised. Pickled by hand: multiprocessing shares tensors through processes."""

    def __init__(self, answer: Connection) -> None:
        self.answer = answer
        self.result: Any = None

    def __enter__(self) -> _Answering:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        text = None if error is None else "".join(traceback.format_exception(kind, error, trace))
        self.answer.send_bytes(pickle.dumps((self.result if error is None else None, text)))
        return True


def _rank(pickled_task: bytes, answer: Connection) -> None:
    task: _Task = pickle.loads(pickled_task)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with _Answering(answer) as answering:
        dist.init_process_group(
            "gloo", init_method=f"file://{task.file}", rank=task.rank, world_size=task.world,
            timeout=datetime.timedelta(seconds=task.group_timeout),
        )  # fmt: skip
        answering.result = task.function(**task.arguments)
        if task.together:
            dist.barrier()
            dist.destroy_process_group()


def start(
    function: Callable[..., Any],
    world: int,
    folder: Path,
    *,
    timeout: float = 200.0,
    group_timeout: float = GROUP_TIMEOUT,
    together: bool = True,
    fresh: bool = False,
    **arguments: Any,
) -> list[Ended]:
    """Run `function(**arguments)` on every rank of a new default process group, and tell how each ended.

    Args:
        function: Of a module that can be imported. Its result is pickled.
        world: Number of ranks.
        folder: Where the ranks meet.
        timeout: Seconds after which those still running are ended.
        group_timeout: That of the process group.
        together: Whether the ranks wait for each other at the end, as they must if all are to return.
        fresh: Start new interpreters, which see the environment as it is now; it takes seconds.
        arguments: The same for every rank.
    """
    context: Any = multiprocessing.get_context("spawn") if fresh else forked.context()
    file = folder / f"meet{time.monotonic_ns()}"
    began = time.monotonic()
    processes, answers = [], []
    for rank in range(world):
        receiving, sending = context.Pipe(duplex=False)
        task = _Task(function, arguments, rank, world, str(file), group_timeout, together)
        process = context.Process(target=_rank, args=(pickle.dumps(task), sending))
        process.start()
        sending.close()
        processes.append(process)
        answers.append(receiving)
    ended: dict[int, Ended] = {}
    while len(ended) < world and time.monotonic() < began + timeout:
        waiting = {answers[rank]: rank for rank in range(world) if rank not in ended}
        for ready in multiprocessing.connection.wait(list(waiting), timeout=1.0):
            try:
                result, error = pickle.loads(ready.recv_bytes())
            except EOFError:
                result, error = None, "the process ended without an answer"
            ended[waiting[ready]] = Ended(result, error, time.monotonic() - began)
    for rank, process in enumerate(processes):
        process.join(5.0 if rank in ended else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
    missing = Ended(None, f"still running after {timeout} s", timeout)
    return [ended.get(rank, missing) for rank in range(world)]


def run(function: Callable[..., Any], world: int, folder: Path, **arguments: Any) -> list[Any]:
    """As :func:`start`, for functions that every rank must return from: their results in rank order."""
    ended = start(function, world, folder, **arguments)
    errors = "\n".join(f"rank {rank}: {end.error}" for rank, end in enumerate(ended) if end.error)
    assert not errors, errors
    return [end.result for end in ended]

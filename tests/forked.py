"""The fork server of the tests: a process that has imported what they need, from which others are forked in no time.

multiprocessing has one such server in a process, and it imports what was asked for when it started. So all that start
processes from it ask for the same.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

PRELOADED = [
    "torch._dynamo",  # the optimizer's step imports it, which takes seconds
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "luminav.cli.app",
    "matplotlib.backends.backend_agg",  # these the demo imports on the way
    "PIL.PngImagePlugin",
    "pydantic",
]


def context() -> Any:
    """The server's context; where there is none, that of new interpreters."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    found: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        found.set_forkserver_preload(PRELOADED)
    return found

"""Steps in every mode with whichever `luminav` is first on the path: prints a digest of weights and state per run.

`test_single_file.py` starts this file twice, once beside the package and once beside the single file, and compares.
Usage: python single_file_runs.py [engine ...]
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import interpreted
import support
import torch
from runs import LATE, STEP_MODES, all_modes, new_params, state_of, take_steps
from support import dtype_name
from torch import Tensor

import luminav

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = {
    "foreach": ((5,), (9, 11), (), (0, 3), (33,)),
    "single": ((5,), (9, 11), (), (0, 3)),
    "triton": ((9, 11), (0, 3)),
}
STEPS = {"foreach": LATE + 2, "single": LATE + 2, "triton": 2}


def modes(engine: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """All modes on the torch engines; in Triton's interpreter, which is slow, one for each way through the code."""
    chosen = {name: {**mode, "lr": 3e-3} for name, mode in STEP_MODES.items()} if engine == "triton" else all_modes()
    for name, options in chosen.items():
        if dtype in support.SIXTEEN_BIT or options.get("master_weights", "none") == "none":
            yield name, options
        if dtype == torch.bfloat16 and options.get("master_weights", "none") != "none":
            yield f"{name}-whole", {**options, "split_master_weights": False}


def digest(tensors: dict[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(engines: list[str]) -> None:
    torch.set_num_threads(1)
    runs = {}
    for engine in engines:
        if engine == "triton":
            interpreted.small_programs()
            interpreted.do_nothing_twice()
        for dtype in DTYPES:
            for name, options in modes(engine, dtype):
                params = new_params(dtype, SHAPES[engine])
                optimizer = support.optimizer_for(params, **{**options, "execution": engine})
                take_steps(optimizer, params, range(STEPS[engine]), late=None if engine == "triton" else 0)
                runs[f"{engine} {dtype_name(dtype)} {name}"] = digest(state_of(optimizer, params))
    print(json.dumps({"file": luminav.__file__, "runs": runs}))


if __name__ == "__main__":
    main(sys.argv[1:])

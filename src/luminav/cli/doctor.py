"""``luminav doctor``: what is installed, which devices there are, and the engine each would use and why."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from importlib import metadata

import torch

from luminav.cli.environment import device_name, versions
from luminav.engines import choose_engine, why_not_triton

_ACCELERATORS = ("cuda", "xpu", "mps")


def doctor() -> None:
    """Print versions, devices, and the engine that each device would use and why."""
    logging.getLogger("luminav").setLevel(logging.WARNING)  # the choice is printed below
    for name, version in {**versions(), "triton": _triton_version()}.items():
        print(f"{name:8} {version}")
    print(f"{'cuda':8} {_cuda_build()}")
    print()
    for device in _devices():
        engine, reason = _engine_of(device)
        print(f"{device!s:8} {device_name(device)}: {engine}, since {reason}")


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        found = importlib.util.find_spec("triton") is not None  # other vendors' builds have other package names
        needed = any(_is_available(kind) for kind in _ACCELERATORS)
        missing = "not installed" + (" (pip install '.[triton]')" if needed else "")
        return "of unknown version" if found else missing


def _cuda_build() -> str:
    """Say what torch was built for, and whether it finds a device: the usual reason that a GPU is missing below."""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda
    if build is None:
        return "this torch is built without CUDA"
    return f"torch is built for {build}" + ("" if torch.cuda.is_available() else ", but finds no device")


def _devices() -> Iterator[torch.device]:
    """The CPU, then every accelerator that torch can use."""
    yield torch.device("cpu")
    for kind in filter(_is_available, _ACCELERATORS):
        for index in range(getattr(torch, kind).device_count()):
            yield torch.device(kind, index)


def _is_available(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and module.is_available()


def _engine_of(device: torch.device) -> tuple[str, str]:
    """Name of the engine that "auto" picks on a device, and the reason."""
    if device.type == "cpu":
        return choose_engine("auto", device).name, _cpu_reason()
    try:
        reason = why_not_triton(device)
        engine = choose_engine("auto", device).name
    except (ImportError, OSError, RuntimeError) as error:  # a broken Triton is what the doctor is asked about
        return "none", f"Triton is installed but cannot be imported ({type(error).__name__}: {error})"
    return engine, reason or "Triton is installed and has kernels for it; they are compiled in the first step"


def _cpu_reason() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 runs Triton's kernels here with execution='triton' only, for tests"
    return "Triton's kernels need an accelerator; execution='compile' is faster where there is a C++ compiler"

"""What a run happened on: devices and versions, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from luminav import __version__
from luminav.cli.errors import CommandError


def find_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the first CUDA device, or the CPU.

    Raises:
        CommandError: The name is no device's, or the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"--device must be auto, cpu, cuda, cuda:1 or the like, got {name!r}.") from error
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = getattr(torch, device.type, None)  # torch.cuda, torch.xpu, torch.mps
    if accelerator is None or not hasattr(accelerator, "is_available"):
        raise CommandError(f"--device {name} is of no use here. Try --device auto.")
    count = accelerator.device_count() if accelerator.is_available() else 0
    if (device.index or 0) >= count:
        raise CommandError(
            f"--device {name} is not there: this machine has {count} {device.type} devices. Try --device auto."
        )
    return device


def device_name(device: torch.device) -> str:
    """Return what the device is sold as, with the number of threads for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    count = torch.get_num_threads()
    return f"{_cpu_model()}, {count} thread{'s' if count > 1 else ''}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions that a figure depends on."""
    return {"luminav": __version__, "torch": str(torch.__version__), "python": platform.python_version()}

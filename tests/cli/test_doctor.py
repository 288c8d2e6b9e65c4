"""`luminav doctor`: versions, devices, engines; on this machine, and on ones that are made up."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import luminav
from luminav.cli import doctor as doctor_module
from luminav.cli.app import run


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_versions_and_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    lines = printed_lines(capsys)
    assert f"luminav  {luminav.__version__}" in lines
    assert f"torch    {torch.__version__}" in lines
    assert any(line.startswith("triton ") for line in lines)
    (cpu,) = [line for line in lines if line.startswith("cpu")]
    assert "foreach, since Triton's kernels need an accelerator" in cpu and "execution='compile'" in cpu


def test_every_accelerator_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up GPUs, with Triton and without. Nothing is run on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor_module, "device_name", lambda device: f"<{device.type}>")
    reason = "Triton is not installed"
    monkeypatch.setattr(doctor_module, "why_not_triton", lambda device: reason)
    monkeypatch.setattr(doctor_module, "choose_engine", lambda execution, device: luminav.engines.ForeachEngine())
    lines = printed_lines(capsys)
    assert f"cuda:0   <cuda>: foreach, since {reason}" in lines
    assert f"cuda:1   <cuda>: foreach, since {reason}" in lines


def test_broken_triton_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> str:
        raise ImportError("libtriton.so: no such file")

    monkeypatch.setattr(doctor_module, "why_not_triton", broken)
    engine, reason = doctor_module._engine_of(torch.device("cuda", 0))
    assert engine == "none"
    assert "libtriton.so" in reason


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_without_kernels_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminav.engines.triton.INTERPRETED", False)
    engine, reason = doctor_module._engine_of(torch.device("mps", 0))
    assert engine == "foreach"
    assert "no kernels for the device 'mps'" in reason

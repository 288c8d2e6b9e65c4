"""Compiles the launches of the Triton engine for a GPU that is not here; prints what came of them, as JSON.

Run by `test_triton_compile.py` in a process of its own: `python triton_aot.py cuda 90 [--all]`. The kernels, their
arguments and launch options are taken from real launch plans, so what is compiled here is what a step launches.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from luminav.engines import Batch, TensorStep
from luminav.engines.triton import kinds, launch, rule
from luminav.hyperparameters import Options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEMI: dict[str, Any] = {"master_weights": "semi"}
COORDINATE: dict[str, Any] = {"bound_type": "coordinate"}
UNGATED_NEAREST: dict[str, Any] = {"cautious": False, "stochastic_rounding": False}
EIGHT_BIT: dict[str, Any] = {"state_bits": 8}
BLOCK_VARIANCE: dict[str, Any] = {"buffer": 1, "block_variance": True}
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# (name, dtype of the parameter, one-pass, options, numel, scaled). Every dtype, master, buffer, gate, bound and
# rounding, with and without sums on the way; aligned and not. The first ones are compiled for every target.
PLANS: tuple[tuple[str, torch.dtype, bool, dict[str, Any], int, bool], ...] = (
    ("bf16 exact", BF16, False, {}, 64, False),
    ("bf16 one-pass", BF16, True, {}, 64, False),
    ("fp16 semi coordinate one-pass scaled unaligned", FP16, True, SEMI | COORDINATE, 37, True),
    ("fp32 single", FP32, False, {"buffer": 1, "cautious": False}, 64, False),
    ("bf16 block variance one-pass", BF16, True, BLOCK_VARIANCE, 4096, False),
    ("bf16 semi one-pass", BF16, True, SEMI, 64, False),
    ("bf16 whole semi one-pass", BF16, True, SEMI | {"split_master_weights": False}, 64, False),
    ("bf16 full exact", BF16, False, {"master_weights": "full"}, 64, False),
    ("bf16 single", BF16, False, {"buffer": 1}, 64, False),
    ("fp32 exact", FP32, False, {}, 64, False),
    ("fp32 one-pass unaligned", FP32, True, {}, 37, False),
    ("fp16 exact", FP16, False, {}, 64, False),
    ("bf16 ungated coordinate nearest scaled unaligned", BF16, True, UNGATED_NEAREST | COORDINATE, 37, True),
    ("bf16 8-bit one-pass", BF16, True, EIGHT_BIT, 4096, False),
    ("bf16 8-bit exact", BF16, False, EIGHT_BIT, 4096, False),
    ("bf16 8-bit single", BF16, False, EIGHT_BIT | {"buffer": 1}, 4096, False),
    ("fp32 8-bit nearest one-pass", FP32, True, EIGHT_BIT | {"stochastic_rounding": False}, 4096, False),
    ("bf16 8-bit block variance one-pass", BF16, True, EIGHT_BIT | BLOCK_VARIANCE, 4096, False),
    ("fp16 semi 8-bit block variance exact", FP16, False, SEMI | EIGHT_BIT | BLOCK_VARIANCE, 4096, False),
)  # fmt: skip
FOR_EVERY_TARGET = 5


class Recorder(launch.Launch):
    """A launch plan that notes its launches instead of doing them."""

    calls: list[Call]

    def _launch(self, key: tuple[Any, ...] | None, kernel: Any, num_programs: int, *args: Any, **options: Any) -> None:
        self.calls.append((kernel, args, {"enable_fp_fusion": False, **options}))


def arithmetic(backend: str, arch: str, dtype: torch.dtype, master: bool) -> tuple[int, bool]:
    """As `arithmetic` chooses on the device."""
    if backend != "cuda":
        return rule.PORTABLE.value, False
    return rule.NVIDIA_COARSE.value if dtype == BF16 and not master else rule.NVIDIA.value, int(arch) >= 90


def calls_of(
    plan: tuple[str, torch.dtype, bool, dict[str, Any], int, bool], backend: str, arch: str = "90"
) -> list[Call]:
    """The launches of a plan's step."""
    _, dtype, one_pass, given, numel, scaled = plan
    options = Options.from_group({**given, "fused_single_pass": one_pass})
    moment = FP32 if options.master_weights == "full" else dtype
    master = options.master_weights != "none" and dtype != FP32
    split = master and options.split_master_weights and dtype == BF16
    coded, shared = options.state_bits == 8, options.block_variance
    moment = torch.uint8 if coded else moment
    blocks = numel // 64

    def new(dtype: torch.dtype, wanted: bool = True, numel: int = numel) -> torch.Tensor | None:
        return torch.zeros(numel, dtype=dtype) if wanted else None

    step = TensorStep(
        param=torch.zeros((numel // 256, 256) if shared else numel, dtype=dtype),
        grad=torch.zeros(numel, dtype=dtype),
        exp_avg=torch.zeros(numel, dtype=moment),
        exp_avg_sq=new(BF16, numel=blocks) if shared else new(moment, options.buffer == 2),
        master_param=new(FP32, master and not split),
        noise_key=None,
        step=torch.tensor(0),
        master_remainder=new(torch.int16, split),
        exp_avg_scale=new(torch.uint8, coded, blocks),
        exp_avg_sq_scale=new(torch.uint8, coded and options.buffer == 2, blocks),
        exp_avg_sq_col=new(BF16, shared, blocks),
    )
    kind = kinds.Kind.of(step, options)
    assert kind.aligned == (numel % 64 == 0)
    recorder = Recorder(kind, [(Batch(options, None, [step]), step)], *arithmetic(backend, arch, dtype, master))
    recorder.device = torch.device("cuda" if backend == "cuda" else "cpu")  # decides about NVIDIA's launch options
    recorder.calls = []
    flags = {"grad_scale": torch.ones(()), "found_inf": torch.zeros(())} if scaled else {}
    recorder.compile(exact=not one_pass, **flags)
    return recorder.calls


def compiled(call: Call, target: GPUTarget) -> Any:
    """One launch, compiled as Triton would for arguments that are aligned."""
    kernel, args, options = call
    names = kernel.arg_names
    given = dict(zip(names, args))
    constants = {name: options[name] for name in names if name in options}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in names}
    pointers = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    if "constexprs" in inspect.signature(ASTSource).parameters:
        attrs: Any = {(i,): [["tt.divisibility", 16]] for i in pointers}
        by_place = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, constexprs=by_place, attrs=attrs)
    else:  # Triton 3.2
        from triton.backends.compiler import AttrsDescriptor

        attrs = AttrsDescriptor.from_dict({"arg_properties": {"tt.divisibility": pointers}, "cls": "AttrsDescriptor"})
        source = ASTSource(kernel, {n: t for n, t in signature.items() if t != "constexpr"}, constants, attrs)
    launch_options = {name: value for name, value in options.items() if name not in names}
    return triton.compile(source, target=target, options=launch_options)


def type_of(value: Any) -> str:
    if isinstance(value, int):
        return "i32"
    kinds = {FP32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64"}
    return "*" + kinds[value.dtype]


# ---- what came out ---------------------------------------------------------------------------------------------------


def tool(name: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *args], check=True, capture_output=True, text=True).stdout


def report(kernel: Any, backend: str, *, with_code: bool) -> dict[str, Any]:
    """Registers and spilled bytes; the main loop's instructions, if they are asked for."""
    if backend == "hip":
        counts = re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", kernel.asm["amdgcn"])
        found = {key: int(value) for key, value in counts}
        return {"registers": found["vgpr_count"], "spilled": found["vgpr_spill_count"] + found["sgpr_spill_count"]}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("cuobjdump", "-sass", file.name) if with_code else ""
    figures = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    result: dict[str, Any] = {"registers": figures["REG"], "spilled": figures["STACK"] + figures["LOCAL"]}
    if with_code:
        result["loop"] = main_loop(code)
    return result


def main_loop(sass: str) -> list[str]:
    """The instructions of the longest innermost loop, or of the whole kernel if its loop was unrolled."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)]
    loops = []
    for at, text in lines:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            loops.append((int(jump[1], 16), at))
    innermost = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    first, last = max(innermost, key=lambda loop: loop[1] - loop[0], default=(0, lines[-1][0]))
    body = [text for at, text in lines if first <= at <= last]
    return body if len(body) > 100 else [text for _, text in lines]


def reports(backend: str, arch: str, *, every_plan: bool, with_code: bool) -> Iterator[dict[str, Any]]:
    threads = 64 if arch.startswith("gfx9") else 32
    target = GPUTarget(backend, arch if backend == "hip" else int(arch), threads)
    seen: set[Any] = set()
    for plan in itertools.islice(PLANS, None if every_plan else FOR_EVERY_TARGET):
        for call in calls_of(plan, backend, arch):
            kernel, args, options = call
            name = kernel.fn.__name__
            key = (name, *map(str, sorted(options.items())), *(type_of(arg) for arg in args))
            if key in seen:
                continue
            seen.add(key)
            code = with_code and name in ("update_kernel", "measure_kernel")
            yield {"kernel": name, "plan": plan[0], **report(compiled(call, target), backend, with_code=code)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=("cuda", "hip"))
    parser.add_argument("arch")
    parser.add_argument("--all", action="store_true", help="every plan, not only the first ones")
    parser.add_argument("--code", action="store_true", help="the main loops of the kernels that take the time")
    chosen = parser.parse_args()
    print(json.dumps(list(reports(chosen.backend, chosen.arch, every_plan=chosen.all, with_code=chosen.code))))

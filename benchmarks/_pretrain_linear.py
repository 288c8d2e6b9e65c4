"""Which gated delta rule the pretraining benchmark's model runs: flash-linear-attention's kernels, or plain torch.

    python benchmarks/_pretrain_linear.py HEADS WIDTH     compare the kernels with plain torch on this GPU

transformers decides while it imports the model: it takes `fla.ops.gated_delta_rule` if that can be imported, otherwise
its own torch code, whose kept activations and host time then outweigh the optimizer's. It does not say why an import
failed. The choice is therefore made here once for all contenders, and each process looks at what really ran.

The comparison is there because a kernel can be silently wrong: Triton 3.4 to 3.7.0 gives wrong gradients on Hopper
for tiles of 64 columns (flash-linear-attention issue 640). Versions 0.5.0 to 0.6.0 refuse to run there; 0.4.2 does not,
and takes tiles of 128 for this model's heads, which are right. The comparison also tunes the kernels. Triton keeps
their best settings on disk (FLA_CACHE_RESULTS=1, the default), so that the contenders' processes find them. Of each
kernel's settings a few are tried: compiling them all takes longer than the contenders train.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TORCH, FLA = "torch", "fla"
MODEL = "transformers.models.qwen3_5.modeling_qwen3_5"
KERNEL_MODULES = ("fla.ops.gated_delta_rule", "fla.modules")
"""Those that transformers takes kernels from."""
SETTINGS = 4
"""How many settings of a kernel are tried, spread over those that fla lists."""
TOKENS = 512
L2_LIMIT = 0.05
"""Relative L2 between BF16 kernels and FP32 torch."""
WORST_LIMIT = 0.3
"""The largest error of an element, relative to the RMS of its vector: issue 640 shows 0.5 beside an L2 of 0.017."""


def choose(asked: str) -> str:
    """What every contender runs: "fla" or "torch".

    Args:
        asked: "auto" for the kernels if transformers can use them, or one of the two.

    Raises:
        SystemExit: The kernels were asked for and are not to be had.
    """
    if asked == TORCH:
        return TORCH
    there = find_spec(FLA) is not None
    usable = there and import_module("transformers.utils.import_utils").is_flash_linear_attention_available()
    if asked == FLA and not usable:
        why = "transformers needs a GPU and fla >= 0.2.2 for it" if there else "package fla is not installed"
        raise SystemExit(f"--linear-attention fla: {why}. Try --linear-attention torch.")
    chosen = FLA if usable else TORCH
    if asked == "auto":
        print(f"--linear-attention auto: {chosen}, since package fla is {'' if usable else 'not '}usable", flush=True)
    return chosen


def prepare(chosen: str) -> None:
    """Hide fla from transformers, or import its kernels for their own error; before transformers imports the model."""
    if chosen == TORCH:
        sys.modules[FLA] = None  # type: ignore[assignment]  # an import of it fails from here on
    else:
        with few_settings(import_module("triton")):
            for module in KERNEL_MODULES:
                import_module(module)


@contextmanager
def few_settings(triton: Any) -> Iterator[None]:
    """Kernels that are defined in here try SETTINGS of their settings at most."""
    autotune = triton.autotune

    def autotune_few(configs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return autotune(configs[:: max(1, -(-len(configs) // SETTINGS))], *args, **kwargs)

    triton.autotune = autotune_few
    try:
        yield
    finally:
        triton.autotune = autotune


def ran_fla(loss: Tensor) -> bool:
    """Whether a function of fla's is in the loss's graph."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        forward = getattr(type(node), "_forward_cls", None)  # that of a torch.autograd.Function
        if forward is not None and forward.__module__.partition(".")[0] == FLA:
            return True
        left += [following for following, _ in node.next_functions]
    return False


def versions(chosen: str) -> dict[str, str]:
    """The versions that the model depends on."""
    found = {"transformers": metadata.version("transformers")}
    return {**found, FLA: str(import_module(FLA).__version__)} if chosen == FLA else found


def differences(kernels: Any, reference: Any, heads: int, width: int, device: torch.device) -> dict[str, float]:
    """How far two gated delta rules are apart in their output and gradients, from equal BF16 numbers.

    Returns:
        Relative L2 by name, and for what consists of vectors the "worst" element's error, see :data:`WORST_LIMIT`.
    """
    torch.manual_seed(0)
    sizes = {"q": (heads, width), "k": (heads, width), "v": (heads, width), "g": (heads,), "beta": (heads,)}
    inputs = {name: torch.randn(1, TOKENS, *size, device=device).bfloat16() for name, size in sizes.items()}
    inputs["g"] = torch.nn.functional.logsigmoid(inputs["g"].float())  # the log of a decay; FP32 in the model
    inputs["beta"] = inputs["beta"].sigmoid()
    weights = torch.randn_like(inputs["v"])

    def run(rule: Any, *, exact: bool) -> dict[str, Tensor]:
        leaves = {name: (t.float() if exact else t.clone()).requires_grad_() for name, t in inputs.items()}
        q, k, v, g, beta = leaves.values()
        output, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        (output.float() * weights.float()).sum().backward()
        return {
            "output": output.detach(),
            **{f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        }

    found, expected = run(kernels, exact=False), run(reference, exact=True)
    apart = {}
    for name, value in expected.items():
        error, rms = (found[name].double() - value.double()), value.double().square().mean().sqrt()
        apart[name] = float(error.square().mean().sqrt() / rms)
        if value.ndim == 4:
            rms_of_vector = value.double().square().mean(-1, keepdim=True).sqrt()
            apart[f"worst {name}"] = float((error.abs() / rms_of_vector.clamp_min(rms)).max())
    return apart


def beyond(apart: Mapping[str, float]) -> list[str]:
    """The names of differences that no rounding explains, NaN included."""
    return [name for name, value in apart.items() if not value <= (WORST_LIMIT if "worst" in name else L2_LIMIT)]


def check(heads: int, width: int) -> str | None:
    """What is wrong with the kernels on this GPU; None if nothing is."""
    prepare(FLA)
    rule = import_module(MODEL).torch_chunk_gated_delta_rule
    found = differences(rule, rule.__wrapped__, heads, width, torch.device("cuda"))
    shown = "  ".join(f"{name} {value:.2g}" for name, value in found.items())
    print(f"fla against plain torch: {shown}", flush=True)
    wrong = ", ".join(f"{name} {found[name]:.2g}" for name in beyond(found))
    return f"fla's kernels are wrong on this GPU, against plain torch by {wrong}." if wrong else None


if __name__ == "__main__":
    sys.exit(check(int(sys.argv[1]), int(sys.argv[2])))

"""Which gated delta rule the pretraining benchmark's model runs: flash-linear-attention's kernels, or plain torch.

    python benchmarks/_pretrain_linear.py HEADS WIDTH     compare the kernels with plain torch on this GPU

transformers decides while it imports the model: it takes `fla.ops.gated_delta_rule` if that can be imported, otherwise
its own torch code, whose kept activations and host time then outweigh the optimizer's. It does not say why an import
failed. The choice is therefore made here once for all contenders, and each process looks at what really ran.

The comparison is there because a kernel can be wrong without a word: Triton 3.4 to 3.7.0 gives wrong gradients for some
shapes on Hopper (flash-linear-attention issue 640). It also tunes the kernels, whose best settings Triton keeps on disk
(FLA_CACHE_RESULTS=1, the default), so that the contenders' processes find them.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

TORCH, FLA = "torch", "fla"
MODEL = "transformers.models.qwen3_5.modeling_qwen3_5"
KERNELS = "fla.ops.gated_delta_rule"
TOKENS = 512
TOLERANCE = 0.03
"""Relative L2 between BF16 kernels and FP32 torch: roundings make up to 0.01, the fault above 0.5."""


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
        import_module(KERNELS)


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
    """Relative L2 between two gated delta rules, of the output and of each gradient, from equal BF16 numbers."""
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
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm())
        for name, value in expected.items()
    }


def check(heads: int, width: int) -> str | None:
    """What is wrong with the kernels on this GPU; None if nothing is."""
    prepare(FLA)
    rule = import_module(MODEL).torch_chunk_gated_delta_rule
    found = differences(rule, rule.__wrapped__, heads, width, torch.device("cuda"))
    shown = "  ".join(f"{name} {value:.2g}" for name, value in found.items())
    print(f"fla against plain torch, relative L2: {shown}", flush=True)
    wrong = [name for name, value in found.items() if not value <= TOLERANCE]
    return f"fla's kernels are wrong on this GPU ({', '.join(wrong)} beyond {TOLERANCE})." if wrong else None


if __name__ == "__main__":
    sys.exit(check(int(sys.argv[1]), int(sys.argv[2])))

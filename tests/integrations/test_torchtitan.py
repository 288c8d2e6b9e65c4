"""torchtitan: an optimizer by the name that an `OptimizersContainer` resolves, and its flat state dict through DCP."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support
import tiny
import torch
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from torch import Tensor, nn

pytest.importorskip("torchtitan", reason="torchtitan 0.3 needs Python 3.11")
if Version(torch.__version__) < Version("2.11"):
    pytest.skip("torchtitan 0.3 needs torch 2.11", allow_module_level=True)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"


def told() -> SimpleNamespace:
    """What the page's code defines."""
    (code,) = re.findall(r"<!-- torchtitan.*?```py\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def config(options: dict[str, Any]) -> Any:
    """The page's, with more options in each group."""
    config = told().config
    for group in config.param_groups:
        group.optimizer_kwargs |= {"lr": 4e-3, **options}
    return config


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 3)).bfloat16()
        self.optimizers = config(options).build(model_parts=[self.model])

    def train(self, first: int, end: int) -> dict[str, Tensor]:
        for step in range(first, end):
            inputs = support.normal((4, 9), seed=step).bfloat16()
            self.model(inputs).square().sum().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
        return self.model.state_dict()

    def saved(self) -> dict[str, Any]:
        """As torchtitan's checkpointer asks for it; before the first step this makes the state that is loaded into."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict()}


@tiny.each_mode
def test_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole = Run(options).train(0, tiny.STEPS)
    stopped = Run(options)
    stopped.train(0, tiny.STOP)
    dcp.save(stopped.saved(), checkpoint_id=tmp_path)
    resumed = Run(options)
    file = resumed.saved()
    dcp.load(file, checkpoint_id=tmp_path)
    resumed.model.load_state_dict(file["model"])
    resumed.optimizers.load_state_dict(file["optimizer"])
    tiny.assert_same_weights(resumed.train(tiny.STOP, tiny.STEPS), whole)


def test_the_step_that_makes_state_changes_no_weight() -> None:
    """torchtitan asks for one with zero gradients and lr=0 before it loads."""
    run = Run({"master_weights": "semi"})
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.saved()
    tiny.assert_same_weights(run.model.state_dict(), before)
    (optimizer,) = run.optimizers
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.08]

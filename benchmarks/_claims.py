"""Claims of a check: what was promised, whether it held, and the figure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

Row = tuple[str, float | str, str]


@dataclass(frozen=True)
class Claim:
    """One promise."""

    name: str
    held: bool
    text: str
    value: float | None
    unit: str


class Claims:
    """The claims of one check, written to a file as they come, so that a crash loses none.

    Args:
        check: The check's name.
        report: The file; None for none.
    """

    def __init__(self, check: str, report: Path | None = None) -> None:
        self.check, self.report = check, report
        self.all: list[Claim] = []

    def claim(self, name: str, held: bool, text: str, value: float | None = None, unit: str = "") -> None:
        """Record a claim, with `value` in `unit` if it has a figure worth a row."""
        self.all.append(Claim(name, bool(held), text, None if value is None else float(value), unit))
        print(self.lines()[-1], flush=True)
        if self.report is not None:
            self.report.write_text(json.dumps([asdict(claim) for claim in self.all]))

    def at_most(self, name: str, value: float, limit: float, unit: str) -> None:
        """Claim that a figure is within its limit."""
        self.claim(name, value <= limit, f"{value:.4g} {unit}, at most {limit:g}", value, unit)

    def load(self, report: Path) -> None:
        """Take over what another process wrote."""
        if report.exists():
            self.all = [Claim(**entry) for entry in json.loads(report.read_text())]

    def lines(self) -> list[str]:
        return [f"{'PASS' if c.held else 'FAIL'}  {self.check}/{c.name}: {c.text}" for c in self.all]

    def rows(self) -> list[Row]:
        """The figures, and what failed, as rows of results.csv."""
        rows: list[Row] = []
        for claim in self.all:
            case = f"check/{self.check}/{claim.name}"
            if claim.value is not None:
                rows.append((case, claim.value, claim.unit))
            rows.append((case, "pass" if claim.held else f"fail: {claim.text}", "promise"))
        return rows


# ---- comparing bits ------------------------------------------------------------------------------------------------

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor."""
    tensor = tensor.detach()
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def num_differing(ours: list[Tensor], theirs: list[Tensor]) -> int:
    """Number of elements whose bits differ."""
    assert len(ours) == len(theirs)
    return sum(int((bits(a) != bits(b)).sum()) for a, b in zip(ours, theirs))


def most_ulps(ours: Tensor, theirs: Tensor) -> int:
    """The largest distance of two elements, counted in numbers of their format."""

    def ordered(tensor: Tensor) -> Tensor:
        pattern = bits(tensor).to(torch.int64)
        sign = 1 << (8 * tensor.element_size() - 1)
        return torch.where(pattern < 0, -(pattern + sign), pattern)

    return int((ordered(ours) - ordered(theirs)).abs().max()) if ours.numel() else 0


def snapshot(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all weights and state tensors, in a fixed order."""
    kept = [param.detach().clone() for param in params]
    for param in params:
        state = optimizer.state[param]
        kept += [state[key].detach().clone() for key in sorted(state) if isinstance(state[key], Tensor)]
    return kept

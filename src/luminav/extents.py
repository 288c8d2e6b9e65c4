"""The smallest and largest values of loaded state, and which of them no run can have saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from luminav.blocks import BLOCK
from luminav.distributed import local
from luminav.rule import SMALLEST_MEAN
from luminav.state import FINITE, KINDS, NO_COLUMN_MEANS, NOT_NEGATIVE, SCALES, ParamState


def check_values(state: Mapping[Tensor, ParamState], names: Mapping[Tensor, str]) -> None:
    """Refuse state that no run can have saved: a step would make NaN of it, or carry it on for good.

    To be called once everything is loaded. Then the host waits for a device once instead of for every tensor; and a
    rank that refuses its part leaves no other one waiting for it in the redistribution of a tensor.

    A master weight may hold anything: NaN where the weight is. The next step compares the two in any case, and a
    master that does not round to its weight begins there anew. Here they cannot be compared: the model may be loaded
    after the optimizer.

    Args:
        state: By parameter, in the form in which it is kept. Of DTensors this process looks at its own part.
        names: How messages name a parameter's entry in the file.

    Raises:
        ValueError: Values are not what the table of state says, or the column means of tiles were left out.
    """
    places = [(param, key, extent) for param, kept in state.items() for key, extent in _extents(kept)]
    extents: defaultdict[Tensor, dict[str, list[float]]] = defaultdict(dict)
    for (param, key, _), extent in zip(places, _numbers([extent for _, _, extent in places]), strict=True):
        extents[param][key] = extent
    for param, of_keys in extents.items():
        for key, (smallest, largest) in of_keys.items():
            _check_extent(smallest, largest, key, names[param])
        if _lacks_columns(of_keys):
            raise ValueError(NO_COLUMN_MEANS.format(names[param]))


def _extents(kept: ParamState) -> Iterator[tuple[str, Tensor]]:
    """Smallest and largest element of every tensor with limits; it takes one pass, and no memory."""
    for key, kind in KINDS.items():
        if kind.limits is None or kept.get(key) is None:
            continue
        held, moment = local(kept[key]), local(kept[SCALES.get(key, key)])
        if held.is_meta or held.numel() == 0 or (key in SCALES) != (moment.dtype == torch.uint8):
            continue  # 8-bit codes may be any, and there are scales for them only
        if key in SCALES:  # blocks that were never written have scale 0
            written = moment.reshape(-1, BLOCK).any(1).to(torch.bool)
            held = torch.where(written, held.view(-1), int(kind.limits[0]))
        yield key, torch.stack(torch.aminmax(held))  # NaN, if there is one


def _numbers(tensors: list[Tensor]) -> list[list[float]]:
    """What many small tensors hold; the host waits once for each device and dtype."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(number)
    numbers: list[list[float]] = [[]] * len(tensors)
    for places in alike.values():
        for place, held in zip(places, torch.stack([tensors[place] for place in places]).tolist(), strict=True):
            numbers[place] = held
    return numbers


def _check_extent(smallest: float, largest: float, key: str, where: str) -> None:
    limits = KINDS[key].limits
    assert limits is not None
    if limits[0] <= smallest and largest <= limits[1]:
        return
    wanted = {FINITE: "finite", NOT_NEGATIVE: "finite and >= 0"}.get(limits, f"in [{limits[0]}, {limits[1]}]")
    wrong = largest if limits[0] <= smallest else smallest
    raise ValueError(f"{where}: {key!r} must be {wanted}, but holds {wrong:g}. Is the file damaged?")


def _lacks_columns(of_keys: Mapping[str, list[float]]) -> bool:
    """Whether all column means of tiles are 0 and the row means say otherwise; tiny ones round to 0 before these do.

    What reads files into other state has left out the one half.
    """
    columns = of_keys.get("exp_avg_sq_col")
    return columns is not None and not any(columns) and of_keys["exp_avg_sq"][1] > SMALLEST_MEAN

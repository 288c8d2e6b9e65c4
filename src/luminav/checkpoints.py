"""Checkpoints: state dicts made fit to be saved, and files read, those of the public luminav 1.3.x included."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luminav.blocks import in_blocks
from luminav.distributed import is_dtensor, local, placed_like
from luminav.hyperparameters import OPTIONS, Options, meant_option
from luminav.rounding import largest_finite
from luminav.state import (
    MOMENTS,
    NO_COLUMN_MEANS,
    SCALES,
    STATE,
    ParamState,
    StateTensor,
    has_master,
    moment_dtype,
    reform_moments,
    saturated,
    zeros_like_param,
    zeros_per_block,
)

logger = logging.getLogger("luminav")

MASTER_FORMS = ("master_param", "master_remainder")
MOMENT_KEYS = tuple(key for key, _ in MOMENTS)
STEP_LIMIT = 2**63


@dataclass(frozen=True)
class Sealed:
    """A parameter's entry in a file on its way through ``Optimizer.load_state_dict``.

    The base class casts every tensor it sees to the parameter's dtype, which would round FP32 state to BF16; it passes
    on what is neither a tensor nor a container.
    """

    entry: Any


def seal(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of `state_dict` with the parameters' entries sealed. Checks that it is a file for our own `groups`."""
    check_is_dict(state_dict)
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"the loaded state dict has no {missing[0]!r}: it is not that of an optimizer. Pass the part of the "
            "checkpoint that optimizer.state_dict() gave."
        )
    for key, kind, wanted in (("state", Mapping, "dict"), ("param_groups", Sequence, "list")):
        if not isinstance(state_dict[key], kind) or isinstance(state_dict[key], str):
            got = type(state_dict[key]).__name__
            raise ValueError(f"{key!r} of the loaded state dict must be a {wanted}, got {got}. Is the file damaged?")
    for number, group in enumerate(state_dict["param_groups"]):
        _check_writer(group, f"param_groups[{number}] of the loaded state dict")
    _check_sizes(state_dict["param_groups"], groups)
    sealed = {key: Sealed(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": sealed}


def check_is_dict(state_dict: Any) -> None:
    """Refuse what is no state dict, as the name of a file: TypeError."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must be a dict that optimizer.state_dict() gave, got {type(state_dict).__name__}. Read a file "
            "first: torch.load(path), and pass the optimizer's part of it."
        )


def _check_writer(group: Any, where: str) -> None:
    """Refuse a group of a file that no version wrote whose moments and options mean what ours do."""
    if not isinstance(group, Mapping):
        raise ValueError(f"{where} must be a dict, got {type(group).__name__}. Is the file damaged?")
    if "centered_defect" in group or ("lam" in group and "alpha_ss" not in group):  # `lam` alone may be anybody's
        raise ValueError(
            f"{where} was written by the public luminav 1.5 or newer, now luminamoon "
            f"(version {group.get('version')!r}): its rule and its options are others. "
            "Files of luminav 1.3.x and of this package load. Load the model's weights only and start from fresh "
            "state, or finish the run with that package."
        )
    if "tau" not in group:
        raise ValueError(
            f"{where} has no 'tau': it was not written by LuminaV. Its moments mean something else, so start from "
            "fresh state instead."
        )
    if "params" not in group:
        raise ValueError(f"{where} has no 'params', which say whose state is whose. Is the file damaged?")


def _check_sizes(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups of other sizes, as torch does, in its words, and with a way out."""
    theirs, ours = ([len(group["params"]) for group in its] for its in (saved, groups))
    if len(theirs) != len(ours):
        wrong = f"has a different number of parameter groups: {len(theirs)}, the optimizer {len(ours)}"
    elif theirs != ours:
        number = next(number for number, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
        wrong = (
            "contains a parameter group that doesn't match the size of optimizer's group: "
            f"param_groups[{number}] has {theirs[number]} parameters, the optimizer's {ours[number]}"
        )
    else:
        return
    raise ValueError(
        f"loaded state dict {wrong}. Build the optimizer with the groups that it had when the file was saved: "
        "luminav.param_groups(model) makes up to two, model.parameters() is one; frozen parameters count only in the "
        "latter."
    )


@torch.no_grad()
def make_saveable(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Make of a new state dict what can be saved, and what leads to the optimizer's own dicts and tensors no more.

    Its tensors are others on the same memory: ``copy_`` into them reaches the optimizer, ``tensor.data = …`` does not.
    No process group, and no int16 DTensor, which cannot be gathered. Moments in the form that the group's options say:
    after a switch each parameter keeps the old one until it takes a step, and no file may hold one thing and say
    another.

    Args:
        state_dict: Changed, but for the optimizer's own dicts and tensors of state.
        groups: The optimizer's groups, which `state_dict` describes.
    """
    for group in state_dict["param_groups"]:
        group["process_group"] = None
    state = state_dict["state"]
    kept = {key: entry for key, entry in state.items() if isinstance(entry, dict)}  # the rest is somebody else's
    for key, entry in kept.items():
        state[key] = {name: value.detach() if isinstance(value, Tensor) else value for name, value in entry.items()}
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        options = Options.from_group(group)
        for key, param in zip(saved["params"], group["params"], strict=True):
            if key in state and in_blocks(param):
                reform_moments(state[key], param, options)
    for key in kept:
        entry = state[key]
        remainder = entry.get("master_remainder")
        if is_dtensor(remainder):  # neither Gloo nor NCCL has 16-bit integers
            state[key] = {**entry, "master_remainder": remainder.to(torch.int32)}


def loaded_group(saved: dict[str, Any], current: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A group from a file, with the options that belong to the running process left as they are.

    Args:
        saved: The group in the file. Not changed.
        current: The optimizer's own group of that number.
        number: For the log.

    Returns:
        The group to continue with. Differences in the rule's options are logged, and so are misspelt ones, which are
        left out.
    """
    group = _without_misspelt_options(saved, number)
    for name, option in OPTIONS.items():
        if option.process or name not in group:
            group[name] = current.get(name, option.default)
    if "block_variance" not in saved:
        group["block_variance"] = False  # an older file
    if group["buffer"] == 1 and group["fused_single_pass"] and not group["block_variance"]:
        group["fused_single_pass"] = False
        logger.warning(
            "param_groups[%d]: buffer=1 has no one-pass mode; the loaded group continues in exact mode.", number
        )
    options = Options.from_group(group)  # refuses before anything has changed
    group.update({name: getattr(options, name) for name in OPTIONS})
    changed = [name for name in OPTIONS if name != "process_group" and _differ(group[name], current.get(name))]
    for name in changed:
        level = logging.INFO if name == "lr" else logging.WARNING  # a scheduler's lr differs in every resumed run
        logger.log(level, "param_groups[%d]: %s=%r comes from the loaded file; the optimizer had %r.", number, name,
                   group[name], current.get(name))  # fmt: skip
    return group


def _without_misspelt_options(saved: dict[str, Any], number: int) -> dict[str, Any]:
    """A copy of a file's group. Not refused: the keys did nothing in the run that wrote the file, and it can go on."""
    meant = {key: option for key in saved if key not in OPTIONS and (option := meant_option(key))}
    for key, option in meant.items():
        logger.warning(
            "param_groups[%d]: %r in the loaded file is no option and is left out. Did you mean %s?",
            number, key, option,
        )  # fmt: skip
    return {key: value for key, value in saved.items() if key not in meant}


def report_dropped(keys: list[Any]) -> None:
    """Log entries of a file that belong to no parameter of its groups."""
    if keys:
        logger.warning(
            "state[%r] in the loaded file (of %d such) belongs to no parameter: dropped.", keys[0], len(keys)
        )


def report_missing_masters(state: Mapping[Any, ParamState], groups: list[dict[str, Any]]) -> None:
    """Log parameters whose options ask for a master weight that the file did not bring: it begins at the weight.

    So it is where ``torch.distributed.checkpoint`` has read a folder with masters into an optimizer without: it passes
    over what there is no place for, but takes the options.
    """
    for number, group in enumerate(groups):
        options = Options.from_group(group)
        wanting = [state[param] for param in group["params"] if param in state and has_master(param, options)]
        missing = sum(state.keys().isdisjoint(MASTER_FORMS) for state in wanting)
        if missing:
            logger.warning(
                "param_groups[%d]: %d parameters have master_weights=%r, but no master weight in the loaded file; "
                "theirs begin at the 16-bit weights. torch.distributed.checkpoint leaves out what the optimizer has no "
                "place for: construct it with the master_weights of the file.", number, missing, options.master_weights,
            )  # fmt: skip


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return b is None or float(a) != float(b)
    return bool(a != b)


def loaded_state(
    entry: Any, param: Tensor, options: Options, where: str, *, step_on_device: bool, says_bits: bool
) -> ParamState | None:
    """A parameter's state from its entry in a file, in private tensors of the mode's dtypes.

    Args:
        entry: The entry, of this version or of the public 1.3.x package. Not changed, not aliased.
        param: The parameter it belongs to.
        options: The options of its group, after loading.
        where: How messages name the entry.
        step_on_device: Whether the step count lives beside the parameter instead of on the CPU.
        says_bits: Whether the file says with which ``state_bits`` it was written; older ones do not.

    Returns:
        The state, or None if the parameter had taken no step.

    Raises:
        ValueError: A tensor is missing or has another shape than the parameter, or the entry is something else.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dict of tensors, got {type(entry).__name__}.")
    entry = _migrate_1_3({key: value for key, value in entry.items() if not isinstance(value, Mapping)}, options)
    step = _step_count(entry, where)
    if step == 0:
        return None
    state: ParamState = {"step": torch.tensor(step, device=param.device if step_on_device else "cpu")}
    for kind in STATE:
        value = entry.get(kind.key)
        other_form = kind.key in MASTER_FORMS and has_master(param, options) and value is not None
        of_codes = kind.key in SCALES and _holds_codes(entry.get(SCALES[kind.key]), param, options)
        if kind.key == "step" or not (kind.wanted(param, options) or other_form or of_codes):
            continue
        if value is None:
            if kind.key == "exp_avg_sq_col":
                raise ValueError(NO_COLUMN_MEANS.format(where))
            if kind.key in MOMENT_KEYS:
                needs = f"buffer={options.buffer}" + (" with block_variance=True" if options.block_variance else "")
                raise ValueError(
                    f"{where} has no {kind.key!r}, which {needs} of its group needs. Is the file damaged, or was "
                    "the group edited?"
                )
            continue  # conform() makes a missing master; a missing pair means an exact step
        if kind.key in MOMENT_KEYS and says_bits:
            _check_form(value, kind, where, param, options)
        dtype, empty = _form_of(value, kind, param, options, of_codes=of_codes)
        if kind.key in MOMENT_KEYS and dtype == torch.uint8 and f"{kind.key}_scale" not in entry:
            raise ValueError(
                f"{where} has 8-bit codes as {kind.key!r}, but no '{kind.key}_scale' to read them by. Is the file "
                "damaged?"
            )
        state[kind.key] = _private_copy(value, param, kind, dtype, where, empty)
    if "exp_avg_sq" in state and not says_bits:
        _saturate(local(state["exp_avg_sq"]))
    return state


def _saturate(exp_avg_sq: Tensor) -> None:
    """The variance of 1.3.x may have overflown; ours saturates, and where it is infinite a weight never moves again."""
    if exp_avg_sq.is_floating_point():
        exp_avg_sq.clamp_(max=largest_finite(exp_avg_sq.dtype))


def _form_of(
    value: Any, kind: StateTensor, param: Tensor, options: Options, *, of_codes: bool
) -> tuple[torch.dtype, Callable[[], Tensor]]:
    """In which form a tensor of a file is taken over: its dtype, and what makes an empty one.

    That is the one the options prescribe, but for a moment that was written with or without 8-bit codes, and for the
    scales of codes (`of_codes`): those are kept as they come, since :func:`luminav.state.conform` turns them.
    """
    dtype = kind.dtype(param, options)
    if of_codes:
        return torch.uint8, functools.partial(zeros_per_block, param, torch.uint8)
    if kind.key in MOMENT_KEYS and _holds_codes(value, param, options):
        return torch.uint8, functools.partial(zeros_like_param, param, torch.uint8)
    if kind.key in MOMENT_KEYS and dtype == torch.uint8 and isinstance(value, Tensor) and value.is_floating_point():
        dtype = moment_dtype(param, options)
        return dtype, functools.partial(zeros_like_param, param, dtype)
    return dtype, functools.partial(kind.first, param, options)


def _holds_codes(value: Any, param: Tensor, options: Options) -> bool:
    """Whether a moment of a file with ``state_bits=8`` is in codes, as it is even where an FP64 model is to read it."""
    codes = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape == param.shape
    return codes and options.state_bits == 8 and in_blocks(param)


def _check_form(value: Any, kind: StateTensor, where: str, param: Tensor, options: Options) -> None:
    """Refuse a moment that is in 8-bit codes, or not, other than its file says; an FP64 model keeps none.

    What reads a file into other state, as ``torch.distributed.checkpoint`` does, makes floating-point numbers of codes,
    or codes of floating-point numbers.
    """
    if not (in_blocks(param) and isinstance(value, Tensor)):
        return
    codes = value.dtype == torch.uint8
    lost = value.is_floating_point() and value.dtype != torch.float64 and kind.dtype(param, options) == torch.uint8
    if not (lost or (codes and options.state_bits == 16)):
        return
    wanted = "a floating-point tensor" if codes else "8-bit codes"
    raise ValueError(
        f"{where}: {kind.key!r} must be {wanted}, since its group in the file has state_bits={options.state_bits}, got "
        f"{value.dtype}. torch.distributed.checkpoint reads files into the state that the optimizer has: construct it "
        f"with state_bits={options.state_bits}, load, and then change the group if you want another setting."
    )


def _private_copy(
    value: Any, param: Tensor, kind: StateTensor, dtype: torch.dtype, where: str, empty: Callable[[], Tensor]
) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point() != dtype.is_floating_point:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        wanted = "a floating-point" if dtype.is_floating_point else "an integer"
        raise ValueError(f"{where}: {kind.key!r} must be {wanted} tensor, got {got}.")
    target = None if kind.per_tensor else empty()
    shape = torch.Size() if target is None else target.shape
    if value.shape != shape and (target is not None or value.numel() != 1):
        raise ValueError(
            f"{where}: {kind.key!r} has shape {tuple(value.shape)}, expected {tuple(shape)}. "
            "Is the file from another model, or are the parameters in another order?"
        )
    value = saturated(value.detach(), dtype)
    if value.dtype != dtype and not dtype.is_floating_point and bool((value.to(torch.int64).to(dtype) != value).any()):
        raise ValueError(f"{where}: {kind.key!r} must be within {dtype.itemsize * 8} bits. Is the file damaged?")
    if target is None:
        return value.reshape(()).to(device=param.device, dtype=dtype, copy=True)
    return target.copy_(placed_like(value, target))


def _step_count(entry: Mapping[str, Any], where: str) -> int:
    """`step` may be an int, a float or a one-element tensor of any dtype; 0 where an entry holds nothing at all."""
    step = entry.get("step")
    if step is None:
        held = [key for key in (*MOMENT_KEYS, *MASTER_FORMS) if entry.get(key) is not None]
        if held:
            raise ValueError(f"{where} has no 'step', without which its {held[0]!r} says little. Is the file damaged?")
        return 0
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(number, (int, float)) or not 0 <= number < STEP_LIMIT or number != int(number):
        raise ValueError(f"{where}: 'step' must be a whole number >= 0, got {step!r}.")
    return int(number)


def _migrate_1_3(entry: dict[str, Any], options: Options) -> dict[str, Any]:
    """Read the layout of the public luminav 1.3.x: c and s are items 3 and 4 of a five-element ``scratch``."""
    scratch = entry.pop("scratch", None)
    entry.pop("buf_count", None)
    if isinstance(scratch, Tensor) and scratch.numel() == 5 and options.fused_single_pass:
        entry.setdefault("cautious_scale", scratch[3])
        entry.setdefault("bound_scale", scratch[4])
    return entry

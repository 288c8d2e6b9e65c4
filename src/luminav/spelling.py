"""Names that are no option's: which option is meant, or what to do instead."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "lr",
        "wd": "weight_decay",
        "decay": "weight_decay",
        "epsilon": "eps",
        "beta1": "betas=(beta1, beta2)",
        "beta2": "betas=(beta1, beta2)",
        "momentum": "betas=(beta1, beta2)",
        "temperature": "tau",
        "compile": 'execution="compile"',
        "parameters": "params",
    }
)
"""What options are called elsewhere, to what they are called here."""
_NEVER_ANOTHERS = ("learning_rate", "wd", "epsilon", "beta1", "beta2")
"""Those that no framework keeps in a group for purposes of its own."""
WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {
        "fused": 'Leave it out: execution="auto", the default, picks the Triton engine where that runs.',
        "foreach": 'Leave it out: execution="auto", the default, picks the engine; "foreach" is one.',
        "amsgrad": "Leave it out: there is no AMSGrad here.",
        "nesterov": "Leave it out: the momentum always looks one step ahead.",
        "dampening": "Leave it out: beta1 weighs both the momentum and the gradient.",
        "differentiable": "Leave it out: no gradient goes through a step.",
        "decoupled_weight_decay": "Leave it out: weight_decay is always decoupled.",
        "gradient_release": "Call luminav.enable_gradient_release(model, optimizer) on the optimizer.",
        "enable_gradient_release": "Call luminav.enable_gradient_release(model, optimizer) on the optimizer.",
        "model": "Pass model.parameters() or luminav.param_groups(model) as params.",
        "param_groups": "Pass luminav.param_groups(model) as params.",
        "decay_embeddings": "Pass luminav.param_groups(model, decay_embeddings=...) as params.",
        "names": "Pass luminav.param_groups(model, names=True), or model.named_parameters(), as params.",
        "preset": "Pass its options: LuminaV(params, **luminav.preset(name)).",
        "plan": "Call luminav.plan(model) for the memory that each mode takes.",
        "diagnostics": "Take the step inside `with optimizer.diagnostics() as report:`.",
        "master_state_dict": "Call optimizer.master_state_dict(model).",
        "nonfinite_grad_count": "Call optimizer.nonfinite_grad_count().",
    }
)
"""What torch's optimizers have and LuminaV has no option for, and what it has functions for, to what to do."""
_OF_CONFIG_JSON = ("optimizer", "default_params", "presets")

_NEARLY_THE_SAME = 0.85  # difflib ratio: catches "weight_decy" and "beta", leaves "lr_scale" or "initial_lr" alone


@functools.lru_cache(maxsize=1024)  # a step asks for every group, and difflib takes as long as a small step
def meant_name(key: str, options: tuple[str, ...]) -> str | None:
    """The option that an unknown key of a group must mean, as a message spells it; None if it may be somebody's own."""
    near = difflib.get_close_matches(key, options, n=1, cutoff=_NEARLY_THE_SAME)
    if near:
        return repr(near[0])
    return OTHER_NAMES[key] if key in _NEVER_ANOTHERS else None


def way_out(key: str, options: tuple[str, ...]) -> str:
    """What to do instead of giving the constructor an option that it does not have."""
    if key in _OF_CONFIG_JSON:
        return (
            "That is a part of config.json, whose options are one level down: LuminaV(params, "
            '**json.load(open("config.json"))["default_params"]), or one of its presets by luminav.preset(name).'
        )
    if key in WAYS_OUT:
        return WAYS_OUT[key]
    near = OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(key, [*options, "params"], n=1)), None)
    return f"Did you mean {near}?" if near else f"Its options are {', '.join(options)}."

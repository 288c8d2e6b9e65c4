"""Options: defaults, ranges, aliases, misspellings, and what an error says."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from support import PROCESS_DEFAULTS, normal, parameter

import luminav
from luminav import LuminaV, preset
from luminav.hyperparameters import MASTER_WEIGHTS_ALIASES, OPTIONS, PRESETS, Options, refuse_misspelt_options


def one(**options: Any) -> LuminaV:
    return LuminaV([parameter(normal((3,), 0))], **options)


def test_defaults_are_those_of_the_specification() -> None:
    wanted = {**support.DEFAULTS, **PROCESS_DEFAULTS}
    assert {name: option.default for name, option in OPTIONS.items()} == wanted
    assert {name for name, option in OPTIONS.items() if option.process} == set(PROCESS_DEFAULTS)
    assert one().defaults == wanted
    group = dict(one().param_groups[0])
    del group["params"]
    assert group == wanted


def test_the_constructor_has_the_declared_options_in_their_order() -> None:
    parameters = list(inspect.signature(LuminaV).parameters.values())[1:]
    assert [(p.name, p.default) for p in parameters] == [(o.name, o.default) for o in OPTIONS.values()]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_explained(name: str) -> None:
    """Once in the declaration, once in the docstring of the class."""
    assert OPTIONS[name].meaning.endswith(".")
    assert re.search(rf"^ {{8}}{name}: [A-Z\"\d]", LuminaV.__doc__ or "", flags=re.MULTILINE)


# ---- ranges ------------------------------------------------------------------------------------------------------

NUMBERS = ("lr", "eps", "weight_decay", "tau", "alpha_ss", "cautious_clamp_min", "bound_ratio", "ema_decay")
FLAGS = ("cautious", "stochastic_rounding", "bound", "fused_single_pass", "fsdp_sync", "maximize", "capturable")

ACCEPTED: list[tuple[str, Any, Any]] = [  # name, value, what it means
    ("lr", 0.0, 0.0),
    ("lr", 1, 1.0),
    ("eps", 0, 0.0),
    ("weight_decay", 0.0, 0.0),
    ("tau", 1e-6, 1e-6),
    ("alpha_ss", 0.0, 0.0),
    ("cautious_clamp_min", 1.0, 1.0),
    ("cautious_clamp_min", 1e-3, 1e-3),
    ("bound_ratio", 10, 10.0),
    ("ema_decay", 0.0, 0.0),
    ("ema_decay", 0.999, 0.999),
    ("betas", (0.0, 0.0), (0.0, 0.0)),
    ("betas", [0.9, 0.95], (0.9, 0.95)),
    ("betas", (torch.tensor(0.5), 0), (0.5, 0.0)),
    ("tau", torch.tensor(0.5), 0.5),
    ("buffer", 1, 1),
    ("bound_type", "coordinate", "coordinate"),
    ("execution", "single", "single"),
    ("seed", 0, 0),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("cautious", 0, False),
    ("bound", 1, True),
    *(("master_weights", spelled, meaning) for spelled, meaning in MASTER_WEIGHTS_ALIASES.items()),
]


@pytest.mark.parametrize(("name", "value", "meaning"), ACCEPTED, ids=lambda value: str(value))
def test_values_are_normalised(name: str, value: Any, meaning: Any) -> None:
    """In the constructor, in a group, and in a group added later: one spelling, one type."""
    by_constructor = one(**{name: value})
    by_group = LuminaV([{"params": [parameter(normal((3,), 0))], name: value}])
    by_group.add_param_group({"params": [parameter(normal((3,), 1))], name: value})
    for group in (*by_constructor.param_groups, *by_group.param_groups):
        assert group[name] == meaning and type(group[name]) is type(meaning)


def test_aliases_are_those_of_the_specification() -> None:
    assert dict(MASTER_WEIGHTS_ALIASES) == {
        **dict.fromkeys([False, "none"], "none"),
        **dict.fromkeys(["semi", "half", "hybrid"], "semi"),
        **dict.fromkeys([True, "full", "fp32"], "full"),
    }


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", -1e-3, ValueError, "lr must be >= 0 and finite, got -0.001."),
    ("lr", torch.tensor(-1.0), ValueError, "lr must be >= 0 and finite, got -1.0."),
    ("lr", torch.tensor([1e-3, 1e-3]), ValueError, "lr as a tensor must have one element, got shape (2,)."),
    ("lr", torch.tensor(1j), TypeError, "lr must be real, got torch.complex64."),
    ("betas", 0.9, ValueError, "betas must be a pair (beta1, beta2), got 0.9."),
    ("betas", (0.9,), ValueError, "betas must be a pair (beta1, beta2), got (0.9,)."),
    ("betas", (0.9, 1.0), ValueError, "betas[1] must be in [0, 1), got 1.0."),
    ("betas", (-0.1, 0.9), ValueError, "betas[0] must be in [0, 1), got -0.1."),
    ("betas", ("0.9", 0.9), TypeError, "betas[0] must be a number in [0, 1), got '0.9'."),
    ("eps", -1e-8, ValueError, "eps must be >= 0 and finite, got -1e-08."),
    ("weight_decay", -0.1, ValueError, "weight_decay must be >= 0 and finite, got -0.1."),
    ("tau", 0.0, ValueError, "tau must be > 0 and finite, got 0.0."),
    ("tau", torch.ones(2), TypeError, "tau must be a number > 0 and finite, got tensor([1., 1.])."),
    ("alpha_ss", -0.5, ValueError, "alpha_ss must be >= 0 and finite, got -0.5."),
    ("cautious_clamp_min", 0.0, ValueError, "cautious_clamp_min must be in (0, 1], got 0.0."),
    ("cautious_clamp_min", 1.5, ValueError, "cautious_clamp_min must be in (0, 1], got 1.5."),
    ("bound_ratio", -0.1, ValueError, "bound_ratio must be > 0 and finite, got -0.1."),
    ("ema_decay", 1.0, ValueError, "ema_decay must be in [0, 1), got 1.0."),
    ("buffer", 3, ValueError, "buffer must be one of 1, 2, got 3."),
    ("buffer", True, ValueError, "buffer must be one of 1, 2, got True."),
    ("bound_type", "norm", ValueError, "bound_type must be one of 'radial', 'coordinate', got 'norm'."),
    (
        "execution",
        "tritn",
        ValueError,
        "execution must be one of 'auto', 'triton', 'foreach', 'single', 'compile', got 'tritn'.",
    ),
    ("master_weights", "fp8", ValueError, "got 'fp8'."),
    ("master_weights", 1, ValueError, "got 1."),
    ("master_weights", None, ValueError, "got None."),
    ("seed", -1, ValueError, "seed must be in [0, 2**63), got -1."),
    ("seed", 2**63, ValueError, "seed must be in [0, 2**63), got 9223372036854775808."),
    ("seed", 1.5, TypeError, "seed must be an int in [0, 2**63), got 1.5."),
    ("seed", "7", TypeError, "seed must be an int in [0, 2**63), got '7'."),
    ("seed", True, TypeError, "seed must be an int in [0, 2**63), got True."),
    ("process_group", "dp", TypeError, "process_group must be a torch.distributed.ProcessGroup or None, got 'dp'."),
    *((name, NAN, ValueError, f"{name} must be ") for name in NUMBERS),
    *((name, INF, ValueError, f"{name} must be ") for name in NUMBERS),
    *((name, 10**400, ValueError, f"{name} must be ") for name in NUMBERS),
    *((name, "0.5", TypeError, f"{name} must be a number") for name in NUMBERS),
    *((name, None, TypeError, f"{name} must be a number") for name in NUMBERS),
    *((name, True, TypeError, f"{name} must be a number") for name in NUMBERS),
    *((name, 1j, TypeError, f"{name} must be a number") for name in NUMBERS),
    *((name, "yes", TypeError, f"{name} must be True or False, got 'yes'.") for name in FLAGS),
    *((name, 2, TypeError, f"{name} must be True or False, got 2.") for name in FLAGS),
    *((name, None, TypeError, f"{name} must be True or False, got None.") for name in FLAGS),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_bad_values_are_refused_by_name_value_and_expectation(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    """In the constructor, in a group, in a group added later, and in a group that was changed between steps."""
    with pytest.raises(error, match=re.escape(message)):
        one(**{name: value})
    first, second = (parameter(normal((3,), number)) for number in range(2))
    with pytest.raises(error, match=re.escape(message)):
        LuminaV([{"params": [first]}, {"params": [second], name: value}])
    optimizer = LuminaV([first])
    with pytest.raises(error, match=re.escape(message)):
        optimizer.add_param_group({"params": [second], name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][name] = value
    first.grad = torch.ones(3)
    with pytest.raises(error, match=re.escape(message)):
        optimizer.step()
    assert not optimizer.state and torch.equal(first.detach(), normal((3,), 0))


def test_the_single_buffer_has_no_one_pass_mode() -> None:
    """In the constructor, where only one of the two stands in the group, and in a group added later."""
    first, second = (parameter(normal((3,), number)) for number in range(2))
    message = "buffer=1 cannot be combined with fused_single_pass=True"
    for params, options in (
        ([first], {"buffer": 1, "fused_single_pass": True}),
        ([{"params": [first], "buffer": 1}], {"fused_single_pass": True}),
        ([{"params": [first], "fused_single_pass": True}], {"buffer": 1}),
    ):
        with pytest.raises(ValueError, match=message):
            LuminaV(params, **options)
    optimizer = LuminaV([first], fused_single_pass=True)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], "buffer": 1})
    optimizer.add_param_group({"params": [second], "buffer": 1, "fused_single_pass": False})
    support.run(optimizer, [first, second], [[torch.ones(3), torch.ones(3)]])
    assert "exp_avg_sq" not in optimizer.state[second] and "bound_scale" in optimizer.state[first]


# ---- keys of a group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weight_decy", "weight_decay"),
        ("weightdecay", "weight_decay"),
        ("weight_decays", "weight_decay"),
        ("beta", "betas"),
        ("master_weight", "master_weights"),
        ("bound_ration", "bound_ratio"),
        ("boundratio", "bound_ratio"),
        ("bound_typ", "bound_type"),
        ("cautios", "cautious"),
        ("stochastic_roundng", "stochastic_rounding"),
        ("fused_singlepass", "fused_single_pass"),
        ("ema_dacay", "ema_decay"),
        ("maximise", "maximize"),
        ("excecution", "execution"),
    ],
)
def test_misspelt_options_are_refused(key: str, meant: str) -> None:
    """A group with `weight_decy=0.0` would decay in silence."""
    with pytest.raises(ValueError, match=rf"unknown option '{key}' in a parameter group. Did you mean '{meant}'\?"):
        LuminaV([{"params": [parameter(normal((3,), 0))], key: 1}])
    optimizer = one()
    with pytest.raises(ValueError, match=key):
        optimizer.add_param_group({"params": [parameter(normal((3,), 1))], key: 1})
    with pytest.raises(TypeError, match=key):
        LuminaV([parameter(normal((3,), 0))], **{key: 1})


@pytest.mark.parametrize("key", ["master_weight", "weight_decy", "learning_rate"])
def test_a_misspelt_option_set_between_steps_is_refused_by_the_next(key: str) -> None:
    param = parameter(normal((3,), 0))
    optimizer = LuminaV([param])
    support.run(optimizer, [param], [[torch.ones(3)]])
    before = param.detach().clone()
    optimizer.param_groups[0] |= {"initial_lr": 1.0, key: "full"}
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match=rf"unknown option '{key}' in a parameter group. Did you mean"):
        optimizer.step()
    assert torch.equal(param.detach(), before) and int(optimizer.state[param]["step"]) == 1
    del optimizer.param_groups[0][key]
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 2


@pytest.mark.parametrize(
    ("key", "meant"),
    [("wd", "weight_decay"), ("learning_rate", "lr"), ("epsilon", "eps"), ("beta1", r"betas=\(beta1, beta2\)")],
)
def test_what_an_option_is_called_elsewhere_is_refused_in_a_group_too(key: str, meant: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=rf"unknown option '{key}' in a parameter group. Did you mean {meant}\?"):
        LuminaV([{"params": [param], key: 0.5}])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("epsilon", "eps"),
        ("beta1", "betas=(beta1, beta2)"),
        ("momentum", "betas=(beta1, beta2)"),
        ("compile", 'execution="compile"'),
        ("weight_decy", "weight_decay"),
        ("statebits", "state_bits"),
        ("parameters", "params"),
        ("param", "params"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_the_one_that_is(key: str, meant: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"LuminaV has no option '{key}'. Did you mean {meant}?")):
        LuminaV([parameter(normal((3,), 0))], **{key: 1})


OF_TORCH = {
    name
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    for name in inspect.signature(kind).parameters
}
OF_OURS = {name for name in luminav.__all__ if inspect.isfunction(getattr(luminav, name))} | {
    name for name in vars(LuminaV) if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
}


@pytest.mark.parametrize(
    "key", sorted((OF_TORCH | OF_OURS | {"gradient_release", "decay_embeddings"}) - {*OPTIONS, "params"})
)
def test_what_is_no_option_here_is_answered_with_what_to_do(key: str) -> None:
    with pytest.raises(TypeError) as refused:
        one(**{key: True})
    message = str(refused.value)
    assert message.startswith(f"LuminaV has no option {key!r}. ") and "Its options are" not in message


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("fused", 'Leave it out: execution="auto"'),
        ("foreach", 'Leave it out: execution="auto"'),
        ("amsgrad", "Leave it out: there is no AMSGrad here."),
        ("gradient_release", "Call luminav.enable_gradient_release(model, optimizer)"),
        ("decay_embeddings", "luminav.param_groups(model, decay_embeddings="),
    ],
)
def test_the_way_out_can_be_taken(key: str, way_out: str) -> None:
    """Not `execution="triton"`, say, which is an error on a CPU."""
    with pytest.raises(TypeError, match=re.escape(f"LuminaV has no option {key!r}. ") + ".*" + re.escape(way_out)):
        one(**{key: True})


def test_an_option_that_resembles_none_is_answered_with_all() -> None:
    with pytest.raises(TypeError, match=f"no option 'xyzzy'. Its options are {', '.join(OPTIONS)}"):
        LuminaV([parameter(normal((3,), 0))], xyzzy=1)  # type: ignore[call-arg]


def test_the_whole_of_config_json_is_answered_with_its_part() -> None:
    config = json.loads((Path(__file__).resolve().parent.parent / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(TypeError, match=r'one level down: .*\["default_params"\]\), or .* luminav\.preset'):
        LuminaV([parameter(normal((3,), 0))], **config)
    for options in (config["default_params"], *config["presets"].values()):
        LuminaV([parameter(normal((3,), 0))], **options)


def test_a_subclass_may_have_options_of_its_own() -> None:
    class Mine(LuminaV):
        def __init__(self, params: Any, extra: int, **options: Any) -> None:
            super().__init__(params, **options)
            self.extra = extra

    assert Mine([parameter(normal((3,), 0))], extra=3, lr=0.5).param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match="Did you mean lr"):
        Mine([parameter(normal((3,), 0))], extra=3, learning_rate=0.5)


FOREIGN_KEYS = """
    initial_lr max_lr min_lr base_lr swa_lr lr_scale lr_mult decay_mult layer_id group_name name names base_momentum
    max_momentum momentum dampening nesterov amsgrad foreach fused differentiable initial_weight_decay wd_scale rank
    update_proj_gap scale is_expert_parallel default_config apply_decay
    """.split()  # noqa: SIM905
"""Keys that schedulers, timm, Megatron, GaLore and torch's own optimizers keep in groups."""


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_keys_of_others_are_left_alone(key: str) -> None:
    value = object()
    optimizer = LuminaV([{"params": [parameter(normal((3,), 0))], key: value}])
    assert optimizer.param_groups[0][key] is value
    support.run(optimizer, optimizer.param_groups[0]["params"], [[torch.ones(3)]])


def test_keys_need_not_be_text() -> None:
    refuse_misspelt_options({1: 2, None: 3, ("lr",): 4, "params": [], "param_names": []})


def test_options_of_a_group_are_frozen_and_complete() -> None:
    options = Options.from_group({"lr": 0.5})
    assert options.lr == 0.5 and options.tau == 0.8
    with pytest.raises(AttributeError):
        options.lr = 1.0  # type: ignore[misc]
    assert math.isclose(Options.from_group({}).weight_decay, 0.08)


# ---- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_what_it_names_and_nothing_else(name: str) -> None:
    chosen = preset(name)
    assert set(chosen) <= {option.name for option in OPTIONS.values() if not option.process}
    (group,) = LuminaV([parameter(normal((3,), 0))], **chosen).param_groups
    for option in OPTIONS.values():
        assert group[option.name] == chosen.get(option.name, option.default), option.name


def test_a_preset_is_the_callers_to_change() -> None:
    preset("pretrain")["lr"] = 7.0
    assert preset("pretrain")["lr"] != 7.0


def test_an_unknown_preset_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match=re.escape("name must be one of 'pretrain', 'finetune', 'smallest', got 'best'.")
    ):
        preset("best")

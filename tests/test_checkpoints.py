"""Checkpoints: saving, loading and going on changes no bit of a run, whichever way the state travels.

The expected bits are those of a run that never stopped; files of the 1.3 series are held against the float64 rule.
"""

from __future__ import annotations

import copy
import io
import itertools
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import torch.distributed.checkpoint as dcp
from runs import (
    AFTER,
    BEFORE,
    LATE,
    LATE_NUMBER,
    NET_MODES,
    Net,
    all_modes,
    assert_same_state,
    assert_weights_equal,
    file_size,
    new_params,
    state_of,
    take_steps,
    through_a_file,
    wanted_state,
)
from support import MASTER_MODES, assert_same_bits, dtype_name, normal, parameter
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import luminav
from luminav import LuminaV

# ---- save, load in a new process, go on ----------------------------------------------------------------------------


def resume_all(saved: str, resumed: str) -> None:
    """The new process: load every run of the file `saved`, go on, and write weights and state to `resumed`.

    Each run goes on twice: under the options that it began with, and on the other engine in an optimizer that was made
    with defaults, so that all options of the rule must come from the file.
    """
    results = {}
    for name, run in torch.load(saved, weights_only=True).items():
        for how, options in {"same": run["options"], "from file": {"execution": "single"}}.items():
            params = [parameter(weight) for weight in run["weights"]]
            optimizer = LuminaV(params, **options)
            optimizer.load_state_dict(run["optimizer"])
            take_steps(optimizer, params, range(BEFORE, BEFORE + AFTER), late=1)
            results[f"{name} ({how})"] = state_of(optimizer, params)
    torch.save(results, resumed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
def test_resuming_in_a_new_process_gives_the_bits_of_never_having_stopped(dtype: torch.dtype, tmp_path: Path) -> None:
    saved, expected = {}, {}
    for name, options in all_modes().items():
        params = new_params(dtype)
        optimizer = LuminaV(params, execution="foreach", **options)
        take_steps(optimizer, params, range(BEFORE), late=1)
        weights = [param.detach().clone() for param in params]
        saved[name] = {"options": options, "weights": weights, "optimizer": copy.deepcopy(optimizer.state_dict())}
        take_steps(optimizer, params, range(BEFORE, BEFORE + AFTER), late=1)
        expected[name] = state_of(optimizer, params)
    torch.save(saved, tmp_path / "saved.pt")
    code = "import sys, test_checkpoints; test_checkpoints.resume_all(*sys.argv[1:])"
    paths = [str(Path(__file__).parent), str(Path(luminav.__file__).parent.parent)]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved.pt"), str(tmp_path / "resumed.pt")],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=240,
    )
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert len(resumed) == 2 * len(expected) == 2 * 18 * 3 * 2
    for name, how in itertools.product(expected, ("same", "from file")):
        assert_same_state(resumed[f"{name} ({how})"], expected[name])
    assert any(  # the comparison can fail: without the state the weights are others
        not torch.equal(expected[name]["weight 0"], run_without_state(saved[name])) for name in expected
    )


def run_without_state(run: dict[str, Any]) -> Tensor:
    params = [parameter(weight) for weight in run["weights"]]
    take_steps(LuminaV(params, **run["options"]), params, range(BEFORE, BEFORE + AFTER), late=1)
    return params[0].detach()


# ---- copy, pickle, torch.distributed.checkpoint --------------------------------------------------------------------


Copier = Callable[[Net, LuminaV], tuple[Net, LuminaV]]


def by_deepcopy(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
    return copy.deepcopy((net, optimizer))


def by_pickle(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
    return pickle.loads(pickle.dumps((net, optimizer)))


def by_torch_save(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
    file = io.BytesIO()
    torch.save((net, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_state_dict(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
    other, other_optimizer = fresh_like(net)
    other_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    other.load_state_dict(through_a_file(net.state_dict()))
    return other, other_optimizer


def fresh_like(net: Net) -> tuple[Net, LuminaV]:
    """A new model of other weights and an optimizer made with defaults."""
    other = Net(net.scale.dtype)
    for param in other.parameters():
        param.data.fill_(0.5)
    return other, LuminaV(other.trained())


def by_distributed_state_dict(**options: Any) -> Copier:
    def copier(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
        how = StateDictOptions(strict=False, **options)
        saved = through_a_file(
            {
                "model": get_model_state_dict(net, options=how),
                "optimizer": get_optimizer_state_dict(net, optimizer, options=how),
            }
        )
        other, other_optimizer = fresh_with_options_of(net, optimizer)
        set_model_state_dict(other, saved["model"], options=how)
        load_distributed(other, other_optimizer, saved["optimizer"], options=how)
        return other, other_optimizer

    return copier


def load_distributed(net: Net, optimizer: LuminaV, file: dict[str, Any], options: StateDictOptions) -> None:
    try:
        set_optimizer_state_dict(net, optimizer, file, options=options)
    except KeyError:
        if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13):
            raise
        pytest.skip("this torch's state_dict API cannot load a file in which a parameter has no state")


def fresh_with_options_of(net: Net, optimizer: LuminaV) -> tuple[Net, LuminaV]:
    """As in a training script: the optimizer is made with the run's options, then a file is loaded.

    The flattened form and a folder are read into tensors that must be there beforehand, so the options must fit.
    """
    other, _ = fresh_like(net)
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in ("buffer", "fused_single_pass", "master_weights", "lr")}
    return other, LuminaV(other.trained(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", NET_MODES)
@pytest.mark.parametrize(
    "copier",
    [
        pytest.param(by_deepcopy, id="deepcopy"),
        pytest.param(by_pickle, id="pickle"),
        pytest.param(by_torch_save, id="torch.save"),
        pytest.param(by_state_dict, id="state_dict"),
        pytest.param(by_distributed_state_dict(), id="distributed"),
        pytest.param(by_distributed_state_dict(full_state_dict=True), id="distributed-full"),
        pytest.param(by_distributed_state_dict(full_state_dict=True, cpu_offload=True), id="distributed-offload"),
        pytest.param(by_distributed_state_dict(flatten_optimizer_state_dict=True), id="distributed-flat"),
    ],
)
def test_a_copy_goes_on_like_the_original(copier: Copier, mode: str, dtype: torch.dtype) -> None:
    """Also where one parameter has had no gradient yet: it stays without state, and starts when its gradient comes."""
    net = Net(dtype)
    optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
    take_steps(optimizer, net.trained(), range(BEFORE), late=LATE_NUMBER)
    other, other_optimizer = copier(net, optimizer)
    assert_same_state(state_of(other_optimizer, other.trained()), state_of(optimizer, net.trained()))
    assert not other_optimizer.state.get(other.late), "a parameter without a gradient so far has no state"
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in other.parameters()}
    for one, its in ((optimizer, net), (other_optimizer, other)):
        take_steps(one, its.trained(), range(BEFORE, BEFORE + AFTER), late=LATE_NUMBER)
    assert_same_state(state_of(other_optimizer, other.trained()), state_of(optimizer, net.trained()))
    assert int(other_optimizer.state[other.late]["step"]) == BEFORE + AFTER - LATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("mode", NET_MODES)
def test_a_folder_of_distributed_checkpoint_goes_on_like_the_original(
    mode: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    net = Net(dtype)
    optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
    take_steps(optimizer, net.trained(), range(BEFORE), late=LATE_NUMBER)
    other, other_optimizer = fresh_with_options_of(net, optimizer)

    def parts(its: Net, one: LuminaV) -> dict[str, Any]:
        return {"model": get_model_state_dict(its), "optimizer": get_optimizer_state_dict(its, one)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: saving without a process group
        dcp.save(parts(net, optimizer), checkpoint_id=tmp_path / "folder")
        into = parts(other, other_optimizer)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # the file knows nothing of `late`
        dcp.load(into, checkpoint_id=tmp_path / "folder", planner=planner)
    how = StateDictOptions(strict=False)
    set_model_state_dict(other, into["model"], options=how)
    load_distributed(other, other_optimizer, into["optimizer"], options=how)
    assert_same_state(state_of(other_optimizer, other.trained()), state_of(optimizer, net.trained()))
    for one, its in ((optimizer, net), (other_optimizer, other)):
        take_steps(one, its.trained(), range(BEFORE, BEFORE + AFTER), late=LATE_NUMBER)
    assert_same_state(state_of(other_optimizer, other.trained()), state_of(optimizer, net.trained()))


@pytest.mark.parametrize("flat", [False, True])
def test_masters_that_distributed_checkpoint_leaves_out_are_reported(
    flat: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads what the optimizer has a place for, and the file's options."""
    net, other, how = Net(torch.bfloat16), Net(torch.bfloat16), StateDictOptions(flatten_optimizer_state_dict=flat)
    trained = [param for param in net.trained() if param is not net.late]
    optimizer = LuminaV([{"params": trained}], master_weights="semi")
    take_steps(optimizer, trained, range(2))
    one = LuminaV([param for param in other.trained() if param is not other.late])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: saving without a process group
        dcp.save(get_optimizer_state_dict(net, optimizer, options=how), checkpoint_id=tmp_path / "folder")
        into = get_optimizer_state_dict(other, one, options=how)
        dcp.load(into, checkpoint_id=tmp_path / "folder")
    caplog.clear()
    set_optimizer_state_dict(other, one, into, options=how)
    assert one.param_groups[0]["master_weights"] == "semi"
    assert (
        f"{len(trained)} parameters have master_weights='semi', but no master weight in the loaded file" in caplog.text
    )
    caplog.clear()
    LuminaV([param for param in other.trained() if param is not other.late]).load_state_dict(optimizer.state_dict())
    assert "no master weight" not in caplog.text


def test_a_misspelt_option_in_a_file_is_left_out_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """It did nothing in the run that wrote the file; refused at the next step, that run could not go on."""
    params = new_params()
    optimizer = LuminaV(params)
    take_steps(optimizer, params, range(2))
    file = optimizer.state_dict()
    file["param_groups"][0] |= {"master_weight": "full", "initial_lr": 1.0}
    other_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = LuminaV(other_params)
    with caplog.at_level(logging.WARNING, logger="luminav"):
        other.load_state_dict(file)
    assert "param_groups[0]: 'master_weight' in the loaded file is no option and is left out" in caplog.text
    assert "Did you mean 'master_weights'?" in caplog.text and "initial_lr" not in caplog.text
    assert other.param_groups[0]["initial_lr"] == 1.0 and "master_weight" in file["param_groups"][0]
    for one, its in ((optimizer, params), (other, other_params)):
        take_steps(one, its, range(2, 4))
    assert_same_state(state_of(other, other_params), state_of(optimizer, params))


@pytest.mark.parametrize("mode", NET_MODES)
def test_asking_for_a_distributed_state_dict_before_the_first_step_changes_nothing(mode: str) -> None:
    """torch takes a step with lr 0 and zero gradients to make the state; training then starts as if it had not."""
    nets = Net(torch.bfloat16), Net(torch.bfloat16)
    for asked, net in zip((True, False), nets):
        optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
        if asked:
            made = get_optimizer_state_dict(net, optimizer)
            assert all(int(entry["step"]) == 0 for entry in made["state"].values())
            assert_weights_equal(net, Net(torch.bfloat16))
        take_steps(optimizer, net.trained(), range(3), late=LATE_NUMBER)
    assert_weights_equal(*nets)


def test_a_zero_step_is_counted_once_there_is_state() -> None:
    """lr 0 and zero gradients make a template only in an optimizer that has none: later such a step is a step."""
    param = parameter(normal((4,), 0))
    optimizer = LuminaV([param])
    take_steps(optimizer, [param], range(1))
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = torch.zeros(4)
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 2


# ---- files of the public 1.3 series --------------------------------------------------------------------------------

GROUP_1_3 = {
    "lr": 1e-2,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.08,
    "tau": 0.8,
    "alpha_ss": 0.5,
    "cautious": True,
    "cautious_clamp_min": 0.5,
    "buffer": 2,
    "stochastic_rounding": False,
    "bound": True,
    "bound_type": "radial",
    "bound_ratio": 0.03,
    "master_weights": "none",
    "execution": "triton",
    "fused_single_pass": False,
    "ema_decay": 0.8,
    "fsdp_sync": False,
    "seed": 1337,
}
"""A group as 1.3.x saves it."""


def file_1_3(
    weight: Tensor, steps: int, dtype: torch.dtype, kept: tuple[float, float] = (1.0, 1.0), **options: Any
) -> tuple[dict[str, Any], support.Reference]:
    """A file in the layout of 1.3.x after `steps` steps of the float64 rule, and the rule's run to go on with."""
    group = {**GROUP_1_3, **options}
    rule = {key: value for key, value in group.items() if key in support.DEFAULTS}
    reference = support.Reference(weight, dtype, **rule)
    for grad in support.gradients(weight.shape, steps, seed=3):
        reference.step(grad)
    moments = support.moment_dtype(dtype, group)
    entry: dict[str, Any] = {"step": steps, "exp_avg": reference.exp_avg.to(moments)}
    if group["buffer"] == 2:
        assert reference.exp_avg_sq is not None
        entry["exp_avg_sq"] = reference.exp_avg_sq.to(moments)
    if group["master_weights"] != "none":
        entry["master_param"] = reference.weight.to(torch.float32)
    scratch = torch.zeros(5)
    if group["buffer"] == 2:
        scratch[3:] = torch.tensor(kept)
    entry |= {"scratch": scratch, "buf_count": group["buffer"]}
    return {"state": {0: entry}, "param_groups": [{**group, "params": [0]}]}, reference


@pytest.mark.parametrize("master", MASTER_MODES)
@pytest.mark.parametrize("buffer", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_a_1_3_file_goes_on_as_the_rule_says(dtype: torch.dtype, buffer: int, master: str) -> None:
    """From the file's moments, master and step the next step is the closed form's, before it is stored."""
    weight = normal((40,), 0)
    file, reference = file_1_3(weight, 5, dtype, buffer=buffer, master_weights=master)
    entry = copy.deepcopy(file["state"][0])
    param = parameter(reference.weight, dtype)
    before = support.master_of(param, {} if dtype == torch.float32 else entry)
    optimizer = LuminaV([param])
    optimizer.load_state_dict(through_a_file(file))
    state = optimizer.state[param]
    options = {"buffer": buffer, "master_weights": master}
    as_in_the_file = wanted_state(dtype, {**options, "split_master_weights": False})  # a step brings it into our form
    assert {key: value.dtype for key, value in state.items()} == as_in_the_file
    for key in state.keys() - {"step"}:
        assert_same_bits(state[key], entry[key], key)
    grad = normal((40,), 99)
    support.run(optimizer, [param], [[grad]])
    assert {key: value.dtype for key, value in state.items()} == wanted_state(dtype, options)
    rule = {key: value for key, value in file["param_groups"][0].items() if key in support.DEFAULTS}
    expected = support.exact_step(before, entry["exp_avg"], entry.get("exp_avg_sq"), grad.to(dtype), 6, dtype, **rule)
    trained = support.master_of(param, state)
    nearest = support.grid_nearest(expected.weight, trained.dtype)
    # Nearest rounding: at most a handful of the 40 lie so close to a tie that FP32 arithmetic decides it otherwise.
    assert (trained.detach().double() - nearest).abs().max() <= support.spacing(nearest, trained.dtype).max()
    assert (trained.detach().double() != nearest).sum() <= (20 if trained.dtype == torch.float32 else 1)
    assert support.largest_error(trained, expected.weight) < (2e-6 if trained.dtype == torch.float32 else 2**-8)
    assert int(state["step"]) == 6


def test_a_1_3_file_brings_the_kept_scales_of_one_pass_mode() -> None:
    """Items 3 and 4 of its scratch are c and s, and the next step uses them."""
    weight, grad = normal((40,), 0), normal((40,), 99)
    kept = (1.5, 0.25)
    file, reference = file_1_3(weight, 5, torch.float32, kept=kept, fused_single_pass=True)
    param = parameter(reference.weight, torch.float32)
    optimizer = LuminaV([param], fused_single_pass=True)
    optimizer.load_state_dict(through_a_file(file))
    assert (float(optimizer.state[param]["cautious_scale"]), float(optimizer.state[param]["bound_scale"])) == kept
    reference.kept = kept
    reference.step(grad)
    support.run(optimizer, [param], [[grad]])
    assert support.largest_error(param, reference.weight) < 2e-6
    assert reference.kept is not None
    for key, expected in zip(("cautious_scale", "bound_scale"), reference.kept):
        assert float(optimizer.state[param][key]) == pytest.approx(expected, rel=1e-6)


def test_exact_mode_of_a_1_3_file_drops_its_scratch() -> None:
    file, reference = file_1_3(normal((40,), 0), 5, torch.float32, kept=(1.5, 0.25))
    param = parameter(reference.weight, torch.float32)
    optimizer = LuminaV([param])
    optimizer.load_state_dict(file)
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


def test_single_buffer_in_one_pass_mode_of_a_1_3_file_goes_on_exactly(caplog: pytest.LogCaptureFixture) -> None:
    file, reference = file_1_3(normal((40,), 0), 5, torch.float32, buffer=1)
    file["param_groups"][0]["fused_single_pass"] = True
    param = parameter(reference.weight, torch.float32)
    optimizer = LuminaV([param])
    with caplog.at_level(logging.WARNING, logger="luminav"):
        optimizer.load_state_dict(through_a_file(file))
    assert any("buffer=1 has no one-pass mode" in record.getMessage() for record in caplog.records)
    assert optimizer.param_groups[0]["fused_single_pass"] is False
    grad = normal((40,), 99)
    reference.step(grad)
    support.run(optimizer, [param], [[grad]])
    assert support.largest_error(param, reference.weight) < 2e-6


def test_the_alias_in_a_1_3_file_of_fp32_weights_is_dropped() -> None:
    """There `master_param` is the weight itself. A model loaded from elsewhere must not be pulled back to it."""
    file, reference = file_1_3(normal((40,), 0), 5, torch.float32, master_weights="full")
    param = parameter(reference.weight + 1.0, torch.float32)
    before = param.detach().clone()
    optimizer = LuminaV([param])
    optimizer.load_state_dict(through_a_file(file))
    assert "master_param" not in optimizer.state[param]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    support.run(optimizer, [param], [[normal((40,), 99)]])
    assert (param.detach() - before).abs().max() < 3e-2
    assert file_size(optimizer.state_dict()) < file_size(file)


def test_empty_parameters_have_no_entry_in_a_1_3_file() -> None:
    file, reference = file_1_3(normal((40,), 0), 5, torch.float32)
    file["param_groups"][0]["params"] = [0, 1]
    params = [parameter(reference.weight, torch.float32), parameter(torch.zeros(0))]
    optimizer = LuminaV(params)
    optimizer.load_state_dict(through_a_file(file))
    assert params[1] not in optimizer.state
    take_steps(optimizer, params, range(2))
    assert int(optimizer.state[params[0]]["step"]) == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_name)
def test_an_overflown_variance_of_a_1_3_file_is_the_largest_one(dtype: torch.dtype) -> None:
    """There it becomes infinite, and stays: no step would move the weight again. Ours saturates, so a file of ours
    that has one is damaged."""
    file, reference = file_1_3(normal((40,), 0), 5, dtype)
    file["state"][0]["exp_avg_sq"][3] = float("inf")
    param = parameter(reference.weight, dtype)
    optimizer = LuminaV([param])
    optimizer.load_state_dict(through_a_file(file))
    assert float(optimizer.state[param]["exp_avg_sq"][3]) == torch.finfo(dtype).max
    file["state"][0]["exp_avg_sq"][3] = float("nan")
    with pytest.raises(ValueError, match="'exp_avg_sq' must be finite and >= 0, but holds nan"):
        optimizer.load_state_dict(through_a_file(file))


# ---- files of the public package from 1.5 on -----------------------------------------------------------------------


def file_1_5(buffer: int) -> dict[str, Any]:
    """As luminamoon 1.0.6, which luminav 1.5.3 is a name for, saves it after a step of a 4 by 4 parameter."""
    group = {
        "lr": 0.0008, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.08, "tau": 0.8, "lam": 0.3,
        "cautious": True, "cautious_clamp_min": 0.5, "buffer": buffer, "centered_defect": False,
        "stochastic_rounding": True, "bound": True, "bound_type": 2, "bound_ratio": 0.05, "master_weights": 0,
        "execution": 0, "fused_single_pass": True, "ema_decay": 0.8, "fsdp_sync": False, "seed": 1337,
        "version": "1.5.3", "params": [0],
    }  # fmt: skip
    entry = {"step": 1, "scratch": torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0]), "exp_avg": torch.full((4, 4), 0.1)}
    if buffer == 2:
        entry["exp_avg_sq"] = torch.full((4, 4), 8e-4)
    return {"state": {0: {**entry, "buf_count": buffer}}, "param_groups": [group]}


@pytest.mark.parametrize("before", ["", "alpha_ss"])
@pytest.mark.parametrize("buffer", [1, 2])
def test_a_file_of_1_5_is_refused_by_name_with_a_way_out(buffer: int, before: str) -> None:
    """Also where that package went on from a file of 1.3.x, whose options it keeps beside its own."""
    param = parameter(torch.ones(4, 4))
    optimizer, file = LuminaV([param]), through_a_file(file_1_5(buffer))
    if before:
        file["param_groups"][0][before] = 0.5
    message = (
        r"param_groups\[0\] of the loaded state dict was written by the public luminav 1\.5 or newer, now luminamoon "
        r"\(version '1\.5\.3'\).* Files of luminav 1\.3\.x and of this package load\. Load the model's weights only "
        r"and start from fresh state, or finish the run with that package\."
    )
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(file)
    assert not optimizer.state and optimizer.param_groups[0]["bound_type"] == "radial"

"""FP32 master weights: they follow edits from outside, live through conversions of the model, and can be exported."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import support
import torch
from runs import (
    LATE_NUMBER,
    NET_MODES,
    Net,
    assert_same_state,
    assert_weights_equal,
    grad_of,
    holding,
    state_of,
    take_steps,
    through_a_file,
    wanted_state,
)
from support import MASTER_MODES, SIXTEEN_BIT, assert_same_bits, dtype_name, normal, parameter
from torch import Tensor, nn

from luminav import LuminaV

# ---- edits from outside --------------------------------------------------------------------------------------------


def trained_with_master(dtype: torch.dtype = torch.bfloat16, mode: str = "semi") -> tuple[nn.Parameter, LuminaV]:
    param = parameter(normal((300,), 0), dtype)
    optimizer = LuminaV([param], master_weights=mode, lr=1e-3)
    take_steps(optimizer, [param], range(3))
    return param, optimizer


def edit_by_copy(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def edit_by_index(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        for number in (values != param).nonzero().flatten().tolist():
            param[number] = values[number]


def edit_by_load_state_dict(param: nn.Parameter, values: Tensor) -> None:
    holding(param).load_state_dict({"weight": values})


def edit_by_replacing_data(param: nn.Parameter, values: Tensor) -> None:
    """The version counter says nothing of it."""
    param.data = values.to(param.dtype).clone()


def edit_by_vector_to_parameters(param: nn.Parameter, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.to(param.dtype), [param])


def edit_by_data_and_a_touch(param: nn.Parameter, values: Tensor) -> None:
    """What docs/checkpoints.md asks for after a write through param.data."""
    param.data.copy_(values)
    with torch.no_grad():
        param.mul_(1)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize(
    "edit",
    [
        edit_by_copy,
        edit_by_index,
        edit_by_load_state_dict,
        edit_by_replacing_data,
        edit_by_vector_to_parameters,
        edit_by_data_and_a_touch,
    ],
)
def test_masters_follow_edits_from_outside_and_only_where_there_was_one(
    edit: Callable[[nn.Parameter, Tensor], None], dtype: torch.dtype
) -> None:
    """Elements 0 to 99 get new weights; the others keep the full precision of their master."""
    param, optimizer = trained_with_master(dtype)
    master = optimizer.state[param]["master_param"].clone()
    values = param.detach().clone()
    values[:100] = normal((100,), 5, dtype=dtype) + 3
    edit(param, values)
    edited = optimizer.master_state_dict(holding(param))["weight"]
    assert_same_bits(edited[:100], values[:100].float())
    assert_same_bits(edited[100:], master[100:])
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert_same_bits(optimizer.state[param]["master_param"], edited)
    assert_same_bits(param, values)


def test_a_write_through_param_data_is_not_seen() -> None:
    """docs/checkpoints.md says so: torch keeps no count of it. The master wins in the next step."""
    param, optimizer = trained_with_master()
    master = optimizer.state[param]["master_param"].clone()
    param.data.fill_(5.0)
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = optimizer.state[param]["exp_avg"].clone()
    optimizer.step()
    assert (optimizer.state[param]["master_param"] - master).abs().max() < 3e-3
    assert (param - 5.0).abs().min() > 0.5 and before.any()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("mode", ["semi", "full"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "model only afterwards, twice"])
def test_model_and_optimizer_may_be_loaded_in_either_order(order: str, mode: str, dtype: torch.dtype) -> None:
    param, optimizer = trained_with_master(dtype, mode)
    model_file = through_a_file(holding(param).state_dict())
    optimizer_file = through_a_file(optimizer.state_dict())
    other = parameter(torch.ones(300), dtype)
    reader = LuminaV([other])
    loads = {
        "m": lambda: holding(other).load_state_dict(model_file),
        "o": lambda: reader.load_state_dict(optimizer_file),
    }
    for what in {"model first": "mo", "optimizer first": "om"}.get(order, "omm"):
        loads[what]()
    for one, its in ((optimizer, param), (reader, other)):
        take_steps(one, [its], range(3, 6))
    assert_same_state(state_of(reader, [other]), state_of(optimizer, [param]))


def test_an_older_optimizer_file_alone_does_not_pull_the_weights_back() -> None:
    """Masters of the file that do not belong to the present weights are re-made from them."""
    param, optimizer = trained_with_master()
    file = through_a_file(optimizer.state_dict())
    take_steps(optimizer, [param], range(3, 40))
    before = param.detach().clone()
    moved = support.grid_nearest(file["state"][0]["master_param"], torch.bfloat16) != before.double()
    optimizer.load_state_dict(file)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [param], range(1))
    assert moved.sum() > 50
    assert_same_bits(param, before)
    assert_same_bits(optimizer.state[param]["master_param"][moved], before[moved].float())


def test_another_models_weights_replace_the_masters() -> None:
    """A checkpoint of another model loaded after training: the next step starts from its weights."""
    param, optimizer = trained_with_master()
    other = normal((300,), 77, dtype=torch.bfloat16)
    other[other == param] = 5.0  # an element that happens to be the same was not edited
    holding(param).load_state_dict({"weight": other})
    param.grad = torch.zeros_like(param)
    optimizer.state[param]["exp_avg"].zero_()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert_same_bits(param, other)
    assert_same_bits(optimizer.state[param]["master_param"], other.float())


def test_non_finite_weights_from_outside_stay_what_they_are() -> None:
    param, optimizer = trained_with_master()
    with torch.no_grad():
        param[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    take_steps(optimizer, [param], range(3, 6))
    assert param[:3].isnan().tolist() == [True, False, False]
    assert param[1:3].tolist() == [float("inf"), float("-inf")]
    assert param[3:].isfinite().all() and optimizer.state[param]["master_param"][3:].isfinite().all()


def test_steps_without_edits_keep_every_bit_of_the_master() -> None:
    """One step of 1e-6 moves no BF16 weight of 1/16, and 500 of them must: the master remembers."""
    options = {"lr": 1e-6, "weight_decay": 0.0, "master_weights": "full"}
    param = parameter(torch.full((64,), 0.0625), torch.bfloat16)
    optimizer = LuminaV([param], **options)
    reference = support.Reference(param, **options)
    for step in range(1, 501):
        param.grad = torch.ones_like(param)
        optimizer.step()
        reference.step(torch.ones_like(param))
        if step == 250:  # halfway the model is saved and loaded again
            holding(param).load_state_dict({"weight": param.detach().clone()})
    travelled = 0.0625 - optimizer.state[param]["master_param"].double()
    assert (travelled / (0.0625 - reference.weight) - 1).abs().max() < 2e-3  # each step is rounded by up to 2⁻²⁹, 0.2 %
    assert (param < 0.0625).all()


# ---- model.bfloat16(), model.to(), state moved away and back -------------------------------------------------------


def trained_linear(mode: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, LuminaV]:
    net = nn.Linear(20, 30).to(dtype)
    optimizer = LuminaV(net.parameters(), master_weights=mode, lr=1e-3)
    take_steps(optimizer, list(net.parameters()), range(3))
    return net, optimizer


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=dtype_name)
@pytest.mark.parametrize("mode", ["semi", "full"])
def test_the_fp32_weight_becomes_the_master_when_the_model_is_converted(mode: str, dtype: torch.dtype) -> None:
    """An FP32 weight is its own master. After model.bfloat16() it lives on, in storage of its own, to the bit."""
    net, optimizer = trained_linear(mode)
    old = {name: param.detach().clone() for name, param in net.named_parameters()}
    net.to(dtype)
    for name, exported in optimizer.master_state_dict(net).items():
        assert_same_bits(exported, old[name], name)
    moments = {name: copy.deepcopy(optimizer.state[param]) for name, param in net.named_parameters()}
    take_steps(optimizer, list(net.parameters()), range(3, 4))
    for number, (name, param) in enumerate(net.named_parameters()):
        state = optimizer.state[param]
        assert {key: value.dtype for key, value in state.items()} == wanted_state(dtype, {"master_weights": mode})
        assert state["master_param"].untyped_storage().data_ptr() != param.untyped_storage().data_ptr()
        assert state["master_param"].untyped_storage().nbytes() == 4 * param.numel()
        stored = support.moment_dtype(dtype, {"master_weights": mode})
        m, v = (moments[name][key].to(stored) for key in ("exp_avg", "exp_avg_sq"))
        grad = grad_of(number, 3, param.shape, dtype)
        expected = support.exact_step(old[name], m, v, grad, 4, dtype, lr=1e-3, master_weights=mode)
        assert support.largest_error(state["master_param"], expected.weight) < 1e-6


@pytest.mark.parametrize("master", ["none", "semi"])
def test_moments_saturate_when_the_model_is_converted(master: str) -> None:
    """A variance of 10⁸ is nothing to FP32 and infinite to FP16, where it would never decay."""
    net, optimizer = trained_linear(master)
    optimizer.state[net.weight]["exp_avg_sq"].fill_(1e8)
    optimizer.state[net.weight]["exp_avg"].fill_(-1e8)
    net.half()
    net.weight.grad = torch.zeros_like(net.weight)
    optimizer.step()
    state = optimizer.state[net.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float16
    beta1, beta2 = 0.9, 0.999
    m = torch.tensor(-65504 * beta1, dtype=torch.float64)
    v = torch.tensor(65504 * beta2, dtype=torch.float64) + (1 - beta2) * m**2  # (g − m)² with g = 0
    v = v.clamp_max(65504)
    assert ((state["exp_avg"].double() - m).abs() <= support.spacing(m, torch.float16)).all()
    assert ((state["exp_avg_sq"].double() - v).abs() <= support.spacing(v, torch.float16)).all()


def test_converting_to_and_fro_between_the_16_bit_dtypes_keeps_the_master() -> None:
    """The weights are rounded to FP16 and back to BF16, with steps between; a frozen one keeps all its digits."""
    net, optimizer = trained_linear("full", torch.bfloat16)
    master = optimizer.state[net.weight]["master_param"].clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        net.to(dtype)
        take_steps(optimizer, list(net.parameters()), range(1))
        assert_same_bits(optimizer.state[net.weight]["master_param"], master)


def test_an_edit_after_the_conversion_is_seen() -> None:
    net, optimizer = trained_linear("semi")
    old = net.weight.detach().clone()
    net.bfloat16()
    with torch.no_grad():
        net.weight[0] = 7.0
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, list(net.parameters()), range(1))
    master = optimizer.state[net.weight]["master_param"]
    assert (master[0] == 7.0).all()
    assert_same_bits(master[1:], old[1:])


@pytest.mark.parametrize("master", MASTER_MODES)
def test_a_16_bit_model_may_become_fp32(master: str) -> None:
    """The weight is then its own master; moments widen exactly, and the step is the closed form's."""
    net, optimizer = trained_linear(master, torch.bfloat16)
    moments = {key: optimizer.state[net.weight][key].double() for key in ("exp_avg", "exp_avg_sq")}
    net.float()
    before = net.weight.detach().clone()
    take_steps(optimizer, list(net.parameters()), range(3, 4))
    state = optimizer.state[net.weight]
    assert {key: value.dtype for key, value in state.items()} == wanted_state(torch.float32, {})
    grad = grad_of(0, 3, net.weight.shape, torch.float32)
    expected = support.exact_step(before, moments["exp_avg"], moments["exp_avg_sq"], grad, 4, torch.float32, lr=1e-3)
    assert support.largest_error(net.weight, expected.weight) < 1e-6


@pytest.mark.parametrize("mode", NET_MODES)
def test_another_memory_layout_in_mid_training_changes_no_bit(mode: str) -> None:
    """model.to(memory_format=…) replaces the data of the weights; the state keeps its old strides."""
    results = []
    for converted in (False, True):
        torch.manual_seed(0)
        net = nn.Conv2d(3, 4, 3).bfloat16()
        optimizer = LuminaV(net.parameters(), **copy.deepcopy(NET_MODES[mode]))
        take_steps(optimizer, list(net.parameters()), range(2))
        if converted:
            net.to(memory_format=torch.channels_last)
            assert net.weight.stride() != results[0][1]
        take_steps(optimizer, list(net.parameters()), range(2, 4))
        results.append((state_of(optimizer, list(net.parameters())), net.weight.stride()))
    assert_same_state(results[1][0], results[0][0])


@pytest.mark.parametrize("mode", NET_MODES)
def test_state_may_be_moved_away_and_back(mode: str) -> None:
    """Offloading replaces the tensors, in whatever dtype holds them; the next step takes them back."""
    nets = Net(torch.bfloat16), Net(torch.bfloat16)
    for moved, net in zip((True, False), nets):
        optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
        take_steps(optimizer, net.trained(), range(2), late=LATE_NUMBER)
        if moved:
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.double()
        take_steps(optimizer, net.trained(), range(2, 4), late=LATE_NUMBER)
        dtypes = {key: value.dtype for key, value in optimizer.state[net.body.weight].items()}
        assert dtypes == wanted_state(torch.bfloat16, NET_MODES[mode])
    assert_weights_equal(*nets)


def test_swapped_parameters_keep_their_state() -> None:
    """torch.__future__.set_swap_module_params_on_conversion: the parameter object stays, its contents are exchanged."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net, optimizer = trained_linear("full")
        old = net.weight.detach().clone()
        net.weight.grad = net.bias.grad = None
        net.bfloat16()
        optimizer.param_groups[0]["lr"] = 0.0
        take_steps(optimizer, list(net.parameters()), range(3, 5))
        assert int(optimizer.state[net.weight]["step"]) == 5
        assert_same_bits(optimizer.state[net.weight]["master_param"], old)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# ---- FP32 export ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Input and output embedding share one weight; a module of FP32 and a buffer of integers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.untrained = nn.Parameter(torch.full((2,), 0.3))


@pytest.mark.parametrize("mode", MASTER_MODES)
def test_master_state_dict_is_the_model_in_fp32(mode: str) -> None:
    net = Tied().bfloat16()
    net.inner[0].float()
    trained = [param for name, param in net.named_parameters() if name != "untrained"]
    optimizer = LuminaV(trained, master_weights=mode)
    assert_export_is_widened(optimizer.master_state_dict(net), net)  # before there is any state
    assert not optimizer.state
    take_steps(optimizer, trained, range(3))
    exported = optimizer.master_state_dict(net)
    assert list(exported) == list(net.state_dict())
    assert exported["inner.1.running_mean"].dtype == torch.bfloat16 and "inner.1.num_batches_tracked" in exported
    assert_same_bits(exported["output.weight"], exported["embedding.weight"])
    assert_same_bits(exported["untrained"], net.untrained.float())
    if mode == "none":
        assert_export_is_widened(exported, net)
        return
    assert_same_bits(exported["embedding.weight"], optimizer.state[net.embedding.weight]["master_param"])
    assert_same_bits(exported["inner.0.weight"], net.inner[0].weight)
    exported["embedding.weight"].fill_(0.0)  # a copy
    assert optimizer.state[net.embedding.weight]["master_param"].any() and net.embedding.weight.any()
    wide = Tied()
    wide.load_state_dict({name: value.clone() for name, value in optimizer.master_state_dict(net).items()})
    assert_same_bits(wide.embedding.weight, optimizer.state[net.embedding.weight]["master_param"])


def assert_export_is_widened(exported: dict[str, Tensor], net: nn.Module) -> None:
    for name, param in net.named_parameters(remove_duplicate=False):
        assert_same_bits(exported[name], param.float(), name)


def test_loading_the_export_into_the_16_bit_model_keeps_the_masters() -> None:
    """torch rounds ties to even where the optimizer rounds them away from zero: neither is an edit."""
    param = parameter(torch.tensor([1.0, 1.0, -3.0, 0.5]), torch.bfloat16)
    optimizer = LuminaV([param], master_weights="semi")
    take_steps(optimizer, [param], range(1))
    ulp = 2.0**-7  # of BF16 in [1, 2)
    master = optimizer.state[param]["master_param"]
    master.copy_(torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, 1 + ulp / 3]))
    expected = master.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    holding(param).load_state_dict({"weight": expected.clone()})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same_bits(optimizer.state[param]["master_param"], expected)


# ---- on a device ---------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", NET_MODES)
def test_model_and_state_move_to_the_device_and_back(mode: str, device: torch.device) -> None:
    """Moments and masters follow the weights; moving loses nothing. What engines compute there is tested elsewhere."""
    net = Net(torch.bfloat16)
    optimizer = LuminaV(net.trained(), **copy.deepcopy(NET_MODES[mode]))
    take_steps(optimizer, net.trained(), range(2))
    before = state_of(optimizer, net.trained())
    optimizer.param_groups[0]["lr"] = 0.0
    for target in (device, torch.device("cpu")):
        net.to(target)
        for param in net.trained():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        assert {value.device.type for key, value in optimizer.state[net.scale].items() if key != "step"} == {
            target.type
        }
    after = state_of(optimizer, net.trained())
    for name, value in before.items():
        if name.split()[0] in ("weight", "master_param"):
            assert_same_bits(after[name], value, name)
    file = through_a_file(optimizer.state_dict())
    net.to(device)
    reader = LuminaV(net.trained())
    reader.load_state_dict(file)
    assert_same_state({k: v.cpu() for k, v in state_of(reader, net.trained()).items()}, after)

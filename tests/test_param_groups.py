"""luminav.param_groups: what decays, what does not, and that every trainable parameter is in one group."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import run
from torch import nn

import luminav
from luminav import LuminaV, param_groups


class Block(nn.Module):
    """A transformer block's kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.positions = nn.Parameter(torch.zeros(1, 4, 6))
        self.norm = nn.LayerNorm(6)
        self.rms_norm = nn.RMSNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.gain = nn.Parameter(torch.ones(6))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.conv = nn.Conv2d(3, 4, 2)
        self.batch_norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(6, 11)
        self.matrix_bias = nn.Parameter(torch.zeros(2, 6))


def names_by_decay(model: nn.Module, **options: Any) -> dict[float, set[str]]:
    """Names of the parameters of each group, by the weight decay that it has in LuminaV."""
    names = {param: name for name, param in model.named_parameters()}
    groups = LuminaV(luminav.param_groups(model, **options)).param_groups
    return {group["weight_decay"]: {names[p] for p in group["params"]} for group in groups}


DECAYING = {
    "embedding.weight",
    "positions",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "conv.weight",
    "head.weight",
}
PLAIN = {
    "norm.weight",
    "norm.bias",
    "rms_norm.weight",
    "attention.in_proj_bias",
    "attention.out_proj.bias",
    "gain",
    "temperature",
    "conv.bias",
    "batch_norm.weight",
    "batch_norm.bias",
    "head.bias",
    "matrix_bias",
}


def test_biases_norms_and_small_parameters_do_not_decay() -> None:
    model = Block()
    assert {name for name, _ in model.named_parameters()} == DECAYING | PLAIN
    assert names_by_decay(model, weight_decay=0.25) == {0.25: DECAYING, 0.0: PLAIN}


def test_biases_of_attention_and_recurrent_layers_do_not_decay() -> None:
    """``bias_k`` has three dimensions, and its name does not end in "bias"."""
    attention = nn.MultiheadAttention(6, 2, add_bias_kv=True)
    assert attention.bias_k is not None and attention.bias_k.ndim == 3
    assert names_by_decay(attention)[0.0] == {"in_proj_bias", "out_proj.bias", "bias_k", "bias_v"}
    assert names_by_decay(nn.LSTM(3, 4))[0.0] == {"bias_ih_l0", "bias_hh_l0"}


def test_the_default_decay_is_the_optimizers() -> None:
    """Its constructor's, which a default of the helper would override in silence."""
    assert set(names_by_decay(Block())) == {0.08, 0.0}
    for optimizer in (LuminaV, torch.optim.AdamW):
        groups = optimizer(param_groups(Block()), weight_decay=0.3).param_groups
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        groups = optimizer(param_groups(Block(), weight_decay=0.1), weight_decay=0.3).param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_embeddings_by_choice() -> None:
    groups = names_by_decay(Block(), weight_decay=0.25, decay_embeddings=False)
    assert groups == {0.25: DECAYING - {"embedding.weight"}, 0.0: PLAIN | {"embedding.weight"}}
    bag = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2))
    assert names_by_decay(bag, decay_embeddings=False) == {0.08: {"1.weight"}, 0.0: {"0.weight", "1.bias"}}


def test_norms_with_more_dimensions_do_not_decay() -> None:
    model = nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 2), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, affine=True))
    plain = {name for name, _ in model.named_parameters()} - {"1.weight"}
    assert names_by_decay(model) == {0.08: {"1.weight"}, 0.0: plain}
    assert "0.weight" in plain


def test_tied_weights_come_once_and_decay_with_the_output_layer() -> None:
    """An embedding that is also the output matrix is not only an embedding."""
    model = Block()
    model.head.weight = model.embedding.weight
    for choice in (True, False):
        groups = luminav.param_groups(model, decay_embeddings=choice)
        everything = [param for group in groups for param in group["params"]]
        assert len({id(param) for param in everything}) == len(everything) == len(DECAYING | PLAIN) - 1
        assert any(param is model.head.weight for param in groups[0]["params"])
    shared = nn.Module()
    shared.encoder, shared.decoder = nn.Embedding(5, 3), nn.Embedding(5, 3)
    shared.decoder.weight = shared.encoder.weight
    assert names_by_decay(shared, decay_embeddings=False) == {0.0: {"encoder.weight"}}


def test_modules_used_twice_come_once() -> None:
    layer = nn.Linear(3, 3)
    assert names_by_decay(nn.Sequential(layer, nn.ReLU(), layer)) == {0.08: {"0.weight"}, 0.0: {"0.bias"}}


def test_frozen_parameters_are_left_out_and_empty_groups_too() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.LayerNorm(2))
    model[0].weight.requires_grad_(False)
    assert names_by_decay(model) == {0.0: {"1.weight", "1.bias"}}
    model[1].requires_grad_(False)
    assert luminav.param_groups(model) == []
    assert names_by_decay(nn.Linear(3, 2, bias=False)) == {0.08: {"weight"}}


def test_order_within_a_group_is_the_models() -> None:
    """A checkpoint names parameters by their place, so it must not depend on hashing."""
    model = Block()
    position = {param: number for number, param in enumerate(model.parameters())}
    for group in luminav.param_groups(model):
        places = [position[param] for param in group["params"]]
        assert places == sorted(places)


def test_zero_decay_still_gives_valid_groups() -> None:
    groups = luminav.param_groups(Block(), weight_decay=0.0)
    assert sum(len(group["params"]) for group in groups) == len(DECAYING | PLAIN)
    LuminaV(groups)


def test_other_options_go_to_both_groups_and_are_checked_by_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = luminav.param_groups(model, weight_decay=0.5, lr=0.25, master_weights=True)
    optimizer = LuminaV(groups, lr=1.0)
    for group, decay in zip(optimizer.param_groups, (0.5, 0.0)):
        assert (group["lr"], group["weight_decay"], group["master_weights"]) == (0.25, decay, "full")
    with pytest.raises(ValueError, match="lr"):
        LuminaV(luminav.param_groups(model, lr=-1.0))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("decay_embedings", "decay_embeddings"),
        ("decay_embedding", "decay_embeddings"),
        ("decay_embeds", "decay_embeddings"),
        ("no_decay_embeddings", "decay_embeddings"),
        ("embeddings", "decay_embeddings"),
        ("weight_decy", "weight_decay"),
        ("wd", "weight_decay"),
        ("decay", "weight_decay"),
        ("params", "model"),
        ("param_names", "names"),
    ],
)
def test_misspelt_arguments_are_refused(key: str, meant: str) -> None:
    """In a group no optimizer would look at them."""
    with pytest.raises(TypeError, match=rf"param_groups has no argument '{key}'\. Did you mean {meant}\?"):
        param_groups(Block(), **{key: False})


OPTIMIZERS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
OF_OTHERS = {name for kind in OPTIMIZERS for name in inspect.signature(kind).parameters} - {"params", "weight_decay"}


@pytest.mark.parametrize("key", sorted({*OF_OTHERS, "initial_lr", "lr_scale", "group_name", "name", "apply_decay"}))
def test_options_of_other_optimizers_are_taken(key: str) -> None:
    assert all(group[key] == 1 for group in param_groups(Block(), **{key: 1}))


@pytest.mark.parametrize("optimizer", [LuminaV, torch.optim.AdamW])
def test_names_go_with_the_parameters_if_asked_for(optimizer: type[torch.optim.Optimizer]) -> None:
    """Those of the model, tied weights by the first; parameters themselves are as without names."""
    model = Block()
    model.head.weight = model.embedding.weight
    known = dict(model.named_parameters())
    plain = optimizer(param_groups(model)).param_groups
    named = optimizer(param_groups(model, names=True)).param_groups
    assert not any("param_names" in group for group in plain)
    for group, other in zip(named, plain):
        assert all(known[name] is param for name, param in zip(group["param_names"], group["params"], strict=True))
        assert all(param is its for param, its in zip(group["params"], other["params"], strict=True))
    assert "head.weight" not in {name for group in named for name in group["param_names"]}


@pytest.mark.parametrize("written_with", [True, False])
def test_files_load_with_names_and_without(written_with: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    params = list(model.parameters())
    writer = LuminaV(param_groups(model, names=written_with))
    run(writer, params, [[torch.ones_like(param) for param in params]])
    reader = LuminaV(param_groups(model, names=not written_with))
    reader.load_state_dict(writer.state_dict())
    assert reader.param_groups[1]["param_names"] == ["0.bias", "1.weight", "1.bias"]
    assert all(torch.equal(reader.state[param]["exp_avg"], writer.state[param]["exp_avg"]) for param in params)


def test_names_reach_the_messages_of_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("luminav.optimizer.check_param", lambda param, options, name: seen.append(name))
    LuminaV(param_groups(nn.Linear(3, 2), names=True))
    assert seen == ["weight", "bias"]


def test_names_are_asked_for_and_not_given() -> None:
    with pytest.raises(TypeError, match=r"names must be True or False, got \['a'\]"):
        param_groups(Block(), names=["a"])  # type: ignore[arg-type]


def test_parameters_in_place_of_a_model_are_refused() -> None:
    params = list(nn.Linear(3, 3).parameters())
    for use in (param_groups, LuminaV(params).master_state_dict):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list\. Pass the model"):
            use(params)  # type: ignore[operator]


def test_only_the_first_group_decays() -> None:
    """Zero gradients: what is left is the decay, 1 − η·λ."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = LuminaV(luminav.param_groups(model, weight_decay=0.5, lr=0.5))
    params = list(model.parameters())
    run(optimizer, params, [[torch.zeros_like(param) for param in params]])
    for name, param in model.named_parameters():
        factor = 0.75 if name == "0.weight" else 1.0
        assert torch.equal(param.detach(), factor * before[name])


def test_groups_serve_any_torch_optimizer() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(luminav.param_groups(model, weight_decay=0.5, lr=0.25))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]

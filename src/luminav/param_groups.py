"""Parameter groups with and without weight decay."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

_NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,
)
_EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)

_RESEMBLES: Mapping[str, float] = MappingProxyType({"decay_embeddings": 0.6, "weight_decay": 0.85})
"""Arguments, to the difflib ratio that catches "no_decay_embeds" and "weight_decy", and no option of torch.optim."""
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "wd": "weight_decay",
        "decay": "weight_decay",
        "params": "model",
        "parameters": "model",
        "named": "names",
        "param_names": "names",
        "named_parameters": "names",
    }
)


def check_model(model: Any) -> None:
    """Raise TypeError if `model` is something else than a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}. Pass the model that is trained.")


def num_foreign(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> int:
    """Number of an optimizer's parameters that are not the model's. Raises ValueError if none is the model's."""
    own: set[Any] = set(model.parameters())
    params = [param for group in groups for param in group["params"]]
    foreign = sum(param not in own for param in params)
    if foreign == len(params):
        raise ValueError(
            "none of the optimizer's parameters is in the model: it may be a copy, an average, or built anew. Pass the "
            "model that the optimizer was built from."
        )
    return foreign


def param_groups(
    model: nn.Module,
    weight_decay: float | None = None,
    *,
    decay_embeddings: bool = True,
    names: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into a group with weight decay and one without.

    Biases, the parameters of normalisation layers and every other parameter with fewer than two dimensions get no
    decay. A weight that several modules share appears once; it counts as an embedding only if every module that owns
    it is one, so an output layer tied to the embedding decays.

    Args:
        model: The model. Frozen parameters (``requires_grad=False``) are left out.
        weight_decay: Decay λ of the first group. Default None: that of the optimizer, :class:`luminav.LuminaV`'s 0.08
            or what its constructor is given.
        decay_embeddings: Whether embedding tables decay.
        names: Whether the groups have their parameters' names, as ``param_names``, for reports of ``diagnostics()``.
            Default False, since torch refuses to add a group without names to groups with names, and
            ``torch.distributed.checkpoint`` to read a folder without names into an optimizer with names.
        **options: Further options for both groups, such as ``lr``.

    Returns:
        Groups for :class:`luminav.LuminaV` or any torch optimizer, the decaying one first; an empty one is left out.
        Parameters keep the model's order within a group.

    Raises:
        TypeError: `model` is not a module, `names` is neither True nor False, or an argument is misspelt. Options are
            the optimizer's to check.
    """
    check_model(model)
    _refuse_misspelt_arguments(options)
    if not isinstance(names, bool):
        raise TypeError(f"names must be True or False, got {names!r}. Names are those of model.named_parameters().")
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                owners.setdefault(param, []).append((module, name))
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for param, places in owners.items():
        (decaying if _decays(param, places, decay_embeddings) else plain).append(param)
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": decaying, **decay, **options},
        {"params": plain, "weight_decay": 0.0, **options},
    ]
    if names:  # not as pairs in "params": whoever reads a group finds parameters there
        known = {param: name for name, param in model.named_parameters()}
        groups = [{**group, "param_names": [known[param] for param in group["params"]]} for group in groups]
    return [group for group in groups if group["params"]]


def _refuse_misspelt_arguments(options: Iterable[str]) -> None:
    """They would go to the groups, where optimizers leave alone what they do not know."""
    for key in options:
        near = (name for name, ratio in _RESEMBLES.items() if difflib.get_close_matches(key, [name], cutoff=ratio))
        meant = next(near, None) or _OTHER_NAMES.get(key)
        if meant:
            raise TypeError(f"param_groups has no argument {key!r}. Did you mean {meant}?")


def _decays(param: nn.Parameter, places: list[tuple[nn.Module, str]], decay_embeddings: bool) -> bool:
    if param.ndim < 2 or any(isinstance(module, _NORMS) or _is_bias(name) for module, name in places):
        return False
    return decay_embeddings or not all(isinstance(module, _EMBEDDINGS) for module, _ in places)


def _is_bias(name: str) -> bool:
    """Also ``in_proj_bias``, ``bias_ih_l0`` and the three-dimensional ``bias_k`` of attention."""
    return name.startswith("bias") or name.endswith("bias")

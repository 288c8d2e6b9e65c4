"""Forms of many tensors compared in one call. What kept launches do with it: ``engines/test_triton_custody.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luminav.premises import likeness, never_alike


def tensors() -> list[Tensor]:
    return [torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(3), torch.ones(0), torch.ones(())]


def sparse(tensor: Tensor, layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta state
        return tensor.to_sparse(layout=layout)


def inferred(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": Tensor.half,
    "dtype_in_place": lambda tensor: tensor.view(torch.float16),
    "shape": lambda tensor: tensor.view(16),
    "part": lambda tensor: tensor[:2],
    "strides": Tensor.t,
    "expanded": lambda tensor: tensor[:1].expand(4, 4),
    "device": lambda tensor: tensor.to("meta"),
    "coo": lambda tensor: sparse(tensor, torch.sparse_coo),
    "csr": lambda tensor: sparse(tensor, torch.sparse_csr),
    "class": nn.Parameter,
    "negative": torch._neg_view,
    "of_inference_mode": inferred,
}


@pytest.fixture
def alike() -> Callable[..., bool]:
    found = likeness(tensors())
    if found is never_alike:
        pytest.skip("this torch has no such test")
    return found


def test_likeness_is_of_form_and_not_of_values(alike: Callable[..., bool]) -> None:
    assert alike(*tensors()) and alike(*map(torch.zeros_like, tensors()))
    with torch.no_grad():
        assert alike(*tensors())


@pytest.mark.parametrize("other", OTHERS)
def test_another_form_is_not_alike(other: str, alike: Callable[..., bool]) -> None:
    first, *rest = tensors()
    assert not alike(OTHERS[other](first), *rest)
    assert alike(first, *rest)


def test_torch_has_the_test_that_is_used_where_it_can_be() -> None:
    """Its absence costs host time, and is to be known."""
    assert likeness(tensors()) is not never_alike


def test_without_it_nothing_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards", raising=False)
    assert likeness(tensors()) is never_alike and not never_alike(*tensors())

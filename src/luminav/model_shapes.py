"""What a model to be planned consists of: its parameters' shapes and dtypes, and what its activations take.

Of common decoder families a Hugging Face ``config.json`` is enough, without transformers: names, shapes and their order
are those of transformers 5, from which the tests have their list.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from luminav.blocks import BLOCK
from luminav.distributed import local
from luminav.hyperparameters import SUPPORTED_DTYPES

Shape: TypeAlias = tuple[int, ...]
Named: TypeAlias = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class Family:
    """What the configs of a family leave unsaid."""

    qkv_bias: bool = False
    """Biases of the query, key and value projections, whatever the config says."""
    biases_in_config: bool = False
    """Whether the config's ``attention_bias`` and ``mlp_bias`` count."""
    qk_norm: bool = False
    head_dim: int | None = None
    """Default of ``head_dim``; None is ``hidden_size // num_attention_heads``."""
    expert_count: str = ""
    """Name of the config's number of experts; empty where every MLP is dense."""
    expert_size: str = "intermediate_size"
    router_first: bool = False
    hybrid: bool = False
    """Gated attention, and gated delta rule (linear attention) in most layers."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(biases_in_config=True),
        "mistral": Family(),
        "mixtral": Family(expert_count="num_local_experts", router_first=True),
        "qwen2": Family(qkv_bias=True),
        "qwen3": Family(biases_in_config=True, qk_norm=True, head_dim=128),
        "qwen3_moe": Family(
            biases_in_config=True,
            qk_norm=True,
            expert_count="num_experts",
            expert_size="moe_intermediate_size",
        ),
        "qwen3_5_text": Family(biases_in_config=True, qk_norm=True, head_dim=256, hybrid=True),
    }
)
"""Known values of ``model_type``."""


@dataclass(frozen=True)
class Activations:
    """Estimated bytes of activations at their peak, at the start of the backward pass."""

    batch_size: int
    sequence_length: int
    full: int
    """Without activation checkpointing."""
    checkpointed: int
    """With every block recomputed in the backward pass."""
    loss: int
    """Part of both: logits and what the cross-entropy makes of them."""


class Decoder:
    """A decoder-only transformer of a known family.

    Args:
        config: The content of its ``config.json``.

    Raises:
        ValueError: The family is unknown, or a size is missing or not a positive int.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        family = FAMILIES.get(config.get("model_type", ""))
        if family is None:
            raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {config.get('model_type')!r}.")
        self.config, self.family = config, family
        self.hidden = self._size("hidden_size")
        self.vocabulary = self._size("vocab_size")
        self.num_layers = self._size("num_hidden_layers")
        heads = self._size("num_attention_heads")
        head_dim = self._size("head_dim", family.head_dim or self.hidden // heads)
        self.query = heads * head_dim
        self.key = self._size("num_key_value_heads", heads) * head_dim
        self.head_dim = head_dim
        self.attention_bias = family.biases_in_config and bool(config.get("attention_bias"))
        self.mlp_bias = family.biases_in_config and bool(config.get("mlp_bias"))
        self.tied = bool(config.get("tie_word_embeddings"))
        if family.hybrid:
            self.value_heads = self._size("linear_num_value_heads")
            self.value_dim = self._size("linear_value_head_dim")
            self.value = self.value_heads * self.value_dim
            self.mixed = self.value + 2 * self._size("linear_num_key_heads") * self._size("linear_key_head_dim")

    def _size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} in the model's config must be an int > 0, got {value!r}.")
        return value

    def _is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        if not self.family.hybrid:
            return False
        types = self.config.get("layer_types")
        if types is None:
            return (layer + 1) % self._size("full_attention_interval", 4) != 0
        if len(types) != self.num_layers:
            raise ValueError(f"layer_types in the model's config must have {self.num_layers} items, got {len(types)}.")
        return bool(types[layer] == "linear_attention")

    def _num_experts(self, layer: int) -> int:
        """Number of experts of a layer; 0 for a dense MLP."""
        if not self.family.expert_count or layer in (self.config.get("mlp_only_layers") or ()):
            return 0
        sparse = (layer + 1) % self._size("decoder_sparse_step", 1) == 0
        return self._size(self.family.expert_count) if sparse else 0

    # ---- parameters --------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every parameter, in the model's order; tied embeddings once."""
        named: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.num_layers):
            parts = [self._linear_attention() if self._is_linear(layer) else self._attention()]
            parts.append(self._experts(self._num_experts(layer)) if self._num_experts(layer) else self._mlp())
            named |= {f"model.layers.{layer}.{name}": shape for part in parts for name, shape in part}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                named[f"model.layers.{layer}.{norm}.weight"] = (self.hidden,)
        named["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            named["lm_head.weight"] = (self.vocabulary, self.hidden)
        return named

    def _attention(self) -> Named:
        gate = 2 if self.family.hybrid else 1  # the query projection also makes the output's gate
        qkv_bias = self.family.qkv_bias or self.attention_bias
        for name, rows in (("q", gate * self.query), ("k", self.key), ("v", self.key)):
            yield from _linear(f"self_attn.{name}_proj", rows, self.hidden, qkv_bias)
        yield from _linear("self_attn.o_proj", self.hidden, self.query, self.attention_bias)
        if self.family.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)

    def _linear_attention(self) -> Named:
        yield "linear_attn.dt_bias", (self.value_heads,)
        yield "linear_attn.A_log", (self.value_heads,)
        yield "linear_attn.conv1d.weight", (self.mixed, 1, self._size("linear_conv_kernel_dim", 4))
        yield "linear_attn.norm.weight", (self.value_dim,)
        yield from _linear("linear_attn.out_proj", self.hidden, self.value)
        rows = {"qkv": self.mixed, "z": self.value, "b": self.value_heads, "a": self.value_heads}
        for name, count in rows.items():
            yield from _linear(f"linear_attn.in_proj_{name}", count, self.hidden)

    def _mlp(self) -> Named:
        size = self._size("intermediate_size")
        yield from _linear("mlp.gate_proj", size, self.hidden, self.mlp_bias)
        yield from _linear("mlp.up_proj", size, self.hidden, self.mlp_bias)
        yield from _linear("mlp.down_proj", self.hidden, size, self.mlp_bias)

    def _experts(self, count: int) -> Named:
        size = self._size(self.family.expert_size)
        router = ("mlp.gate.weight", (count, self.hidden))
        if self.family.router_first:
            yield router
        yield "mlp.experts.gate_up_proj", (count, 2 * size, self.hidden)
        yield "mlp.experts.down_proj", (count, self.hidden, size)
        if not self.family.router_first:
            yield router

    # ---- activations -------------------------------------------------------------------------------------------------

    def activations(self, batch_size: int, sequence_length: int, itemsize: int = 2) -> Activations:
        """Estimate the activations of one training step.

        Counted as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), every tensor that a backward formula
        reads, adapted to these models: no dropout, RMSNorm, gated MLP, grouped queries, and attention that keeps no
        matrix of scores (FlashAttention, torch's scaled_dot_product_attention). Elements per token, with h the hidden
        size, q and k the widths of all query and of all key heads, f the MLP's:

        - block: 4h (input and output of both norms) + attention + MLP
        - attention: 2q + 2k, q + k more with norms of query and key, 2q more with a gate
        - linear attention, with fused kernels: 3 times queries, keys and values (before and after the convolution,
          after SiLU), 3 times values (output, gate, normalised output)
        - MLP: 4f (gate, up, SiLU of the gate, their product); with experts (h + 4f) for each expert of a token
        - end: 2h for the last norm; the loss 14 bytes for each logit (16-bit and FP32 logits, log-softmax and its
          gradient in FP32), whatever `itemsize`

        With checkpointing each block keeps its input, h, and one block at a time, or the loss, is there in full.
        Modules that are not fused keep more, above all norms in FP32.

        Args:
            batch_size: Sequences per step (per micro-batch, where gradients are accumulated).
            sequence_length: Tokens per sequence.
            itemsize: Bytes of an activation.
        """
        tokens = batch_size * sequence_length
        blocks = [tokens * itemsize * self._block_elements(layer) for layer in range(self.num_layers)]
        loss = tokens * self.vocabulary * 14
        end = tokens * itemsize * 2 * self.hidden
        inputs = tokens * itemsize * self.hidden * self.num_layers
        return Activations(
            batch_size, sequence_length, sum(blocks) + end + loss, inputs + end + max(*blocks, loss), loss
        )

    def _block_elements(self, layer: int) -> int:
        h, q, k = self.hidden, self.query, self.key
        if self._is_linear(layer):
            attention = 3 * self.mixed + 3 * self.value
        else:
            attention = 2 * q + 2 * k + self.family.qk_norm * (q + k) + self.family.hybrid * 2 * q
        if self._num_experts(layer):
            mlp = self._size("num_experts_per_tok") * (h + 4 * self._size(self.family.expert_size))
        else:
            mlp = 4 * self._size("intermediate_size")
        return 4 * h + attention + mlp


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Named:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


# ---- reading a model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model, as far as memory is concerned."""

    name: str
    """How messages and tables name it."""
    params: tuple[tuple[str, Tensor], ...]
    """Names and parameters on the meta device, each once; the local part of a DTensor. Without the module's buffers."""
    decoder: Decoder | None = None
    """Its architecture, where that is known."""
    is_count: bool = False
    """Whether only the number of parameters is known: the one tensor stands for all."""


_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*", flags=re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


MOST_PARAMETERS = 10**15


def read_model(model: Any, dtype: torch.dtype | None) -> Source:
    """Read a model in any of the forms that :func:`luminav.plan` takes; see there for the arguments and errors."""
    if isinstance(model, str) and (count := _COUNT.fullmatch(model)):
        model = round(float(count[1]) * _FACTORS[count[2].upper()])
    if isinstance(model, int) and not isinstance(model, bool):
        if not 0 < model <= MOST_PARAMETERS:
            raise ValueError(f"the number of parameters must be > 0, and at most {MOST_PARAMETERS:.0e}, got {model}.")
        body = model - model % BLOCK  # taken for a matrix, so that what is kept in blocks of a model's is here too
        sizes = {"matrices": (body // BLOCK, BLOCK), "rest": (model - body,)}
        params = {
            name: torch.empty(size, dtype=dtype or torch.bfloat16, device="meta", requires_grad=True)
            for name, size in sizes.items()
            if math.prod(size)
        }
        return Source("A model", tuple(params.items()), is_count=True)
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        return _from_config(_load(path / "config.json" if path.is_dir() else path), dtype)
    if isinstance(model, Mapping):
        return _from_config(model, dtype)
    if isinstance(model, nn.Module):
        return Source(type(model).__name__, _on_meta(model.named_parameters(), dtype), _decoder_of(model))
    if isinstance(model, Iterable) and not isinstance(model, (Tensor, bytes)):
        pairs = (item if isinstance(item, tuple) else (f"params[{i}]", item) for i, item in enumerate(model))
        return Source("A list", _on_meta(pairs, dtype))
    raise TypeError(
        "model must be a module, parameters, a config.json or a number of parameters such as 124_000_000 or '4.2B', "
        f"got {type(model).__name__}."
    )


def _on_meta(named: Iterable[tuple[str, Any]], dtype: torch.dtype | None) -> tuple[tuple[str, Tensor], ...]:
    """Each parameter once, without its memory, floating-point ones in `dtype` if that is given."""
    params: dict[int, tuple[str, Tensor]] = {}
    for name, param in named:
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} must be a parameter, got {type(param).__name__}.")
        with torch.no_grad():
            held = local(param)
        converted = dtype if dtype is not None and held.is_floating_point() else held.dtype
        meta = torch.empty(held.shape, dtype=converted, device="meta", requires_grad=param.requires_grad)
        params.setdefault(id(param), (name, meta))
    return tuple(params.values())


def _decoder_of(model: nn.Module) -> Decoder | None:
    """The architecture of a module that carries a transformers config of a known family."""
    config: Any = getattr(model, "config", None)
    content = config.to_dict() if hasattr(config, "to_dict") else {}
    return Decoder(content) if content.get("model_type") in FAMILIES else None


def _load(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: give a config.json, or a number of parameters such as 4.2B.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, or of the syntax
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def _from_config(config: Mapping[str, Any], dtype: torch.dtype | None) -> Source:
    kind = config.get("model_type")
    named = config.get("dtype") or config.get("torch_dtype")
    stored = torch.bfloat16 if named is None else getattr(torch, str(named).removeprefix("torch."), None)
    if dtype is None and stored not in SUPPORTED_DTYPES:
        raise ValueError(f"the config's dtype {named!r} is not one that LuminaV trains. Pass dtype.")
    dtype = dtype or stored
    if isinstance(kind, str) and kind in FAMILIES:
        decoder = Decoder(config)
        shapes = decoder.shapes().items()
        params = ((name, torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)) for name, shape in shapes)
        return Source(f"{kind} config", tuple(params), decoder)
    if not isinstance(kind, str) or importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"model_type {kind!r} is not known; known are {', '.join(FAMILIES)}. Install transformers, which "
            "builds others, or give the number of parameters, or in Python the model itself."
        )
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return Source(f"{kind} config, built by transformers", _on_meta(model.named_parameters(), dtype))

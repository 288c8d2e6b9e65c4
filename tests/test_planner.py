"""The planner: figures from arithmetic done here, and from what is really allocated."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import dtype_name
from torch import Tensor, nn

import luminav
from luminav import LuminaV, enable_gradient_release, gradient_release, planner
from luminav.model_shapes import Decoder
from luminav.planner import GPUS, PEERS, RESERVE, Plan, PlanRow

DATA = Path(__file__).parent / "data"
CASES: dict[str, Any] = json.loads((DATA / "decoder_shapes.json").read_text(encoding="utf-8"))
"""Configs with the shapes that transformers 5 makes of them: the Qwen3.5 of 4.2 B parameters, and small ones."""
LLAMA = CASES["llama"]["config"]
GIB = 2**30

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)


def rows(plan: Plan) -> dict[str, PlanRow]:
    return {row.mode: row for row in plan.rows}


def small_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 130, bias=False))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    model(torch.arange(50, device=device)).float().square().mean().backward()
    optimizer.step()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


# ---- weights, gradients, state ---------------------------------------------------------------------------------------

BYTES = {
    "none": 2 + 2 + 2 + 2,
    "none, buffer=1": 2 + 2 + 2,
    "semi": 2 + 2 + 2 + 2 + 2,
    "semi, buffer=1": 2 + 2 + 2 + 2,
    "semi, unsplit": 2 + 2 + 4 + 2 + 2,
    "full": 2 + 2 + 2 + 4 + 4,
    "full, buffer=1": 2 + 2 + 2 + 4,
    "full, unsplit": 2 + 2 + 4 + 4 + 4,
    "none, block variance": 2 + 2 + 2 + 2 * 2 / 64,
    "none, 8-bit": 2 + 2 + 2 * (1 + 1 / 64),
    "none, block variance, 8-bit": 2 + 2 + 1 + 1 / 64 + 2 * 2 / 64,
    "none, buffer=1, 8-bit": 2 + 2 + 1 + 1 / 64,
    "semi, 8-bit": 2 + 2 + 2 + 2 * (1 + 1 / 64),
    "torch AdamW, FP32": 4 + 4 + 4 + 4,
    "torch AdamW, BF16": 2 + 2 + 2 + 2,
}
"""Weights, gradients, master and moments of a BF16 model per parameter."""


def test_bytes_per_parameter() -> None:
    """A large tensor, so that step counts and tables do not show."""
    plan = luminav.plan(4096 * 4096)
    assert {row.mode for row in plan.rows} == BYTES.keys()
    for row in plan.rows:
        assert (row.total - row.scratch) / plan.num_params == pytest.approx(BYTES[row.mode], rel=0.001)
    odd = rows(luminav.plan(4096 * 4096 + 63))
    assert odd["none, 8-bit"].state == pytest.approx(rows(plan)["none, 8-bit"].state, rel=0.001)


@by_dtype
def test_every_mode_allocates_what_is_planned(dtype: torch.dtype) -> None:
    plan = luminav.plan(small_model().to(dtype))
    for row in plan.rows[: -len(PEERS)]:
        model = small_model().to(dtype)
        optimizer = LuminaV(model.parameters(), **row.options)
        step(model, optimizer)
        params = list(model.parameters())
        assert row.weights == storage_bytes(params)
        assert row.gradients == storage_bytes(param.grad for param in params)
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        assert row.state == pytest.approx(storage_bytes(state), rel=0.01)


GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


def most_held(
    device: str, shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any], *, release: bool
) -> tuple[int, int]:
    """Most bytes that the second of two training steps holds, and what is held behind it.

    On a GPU what its allocator says, of scratch too; else weights, gradients and state.
    """
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    params = [nn.Parameter(torch.randn(shape, device=device).bfloat16()) for shape in shapes]
    most: list[int] = []

    def held() -> int:
        if device == "cuda":
            return torch.cuda.memory_allocated() - before
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        return storage_bytes([*params, *(param.grad for param in params if param.grad is not None), *state])

    # In front of release's own hooks, when all that waits for a step is there.
    hooks: list[Any] = [p.register_post_accumulate_grad_hook(lambda _: most.append(held())) for p in params]
    optimizer = LuminaV(params, **options)
    if release:
        hooks.append(enable_gradient_release(nn.ParameterList(params), optimizer))
    for _ in range(2):
        most.clear()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.step()
        most.append(torch.cuda.max_memory_allocated() - before if device == "cuda" else held())
        behind = held()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return max(most), behind


@pytest.mark.parametrize("release", [False, True], ids=["after backward", "release"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_every_mode_holds_what_is_planned(device: str, release: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are kept in blocks, on a GPU of whole blocks of its allocator, which rounds the others up."""
    shapes = [(4096, 4096), (2048, 8192), (4096,)] if device == "cuda" else [(256, 256), (128, 512), (256,)]
    monkeypatch.setattr(gradient_release, "BUCKET", 1 << 15)  # so that each matrix is a bucket on a CPU too
    plan = luminav.plan([torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes])
    assert {"none, 8-bit", "none, block variance", "none, block variance, 8-bit"} <= rows(plan).keys()
    for row in plan.rows[: -len(PEERS)]:
        most, behind = most_held(device, shapes, row.options, release=release)
        total = row.released_total if release else row.total
        assert total is not None
        scratch = row.scratch if device == "cuda" else 0  # of a CPU's engine nothing is left behind a step
        assert total - row.scratch + scratch == pytest.approx(most, rel=0.01), row.mode
        gradients = 0 if release else row.gradients
        assert row.weights + row.state + gradients + scratch == pytest.approx(behind, rel=0.01), row.mode


@pytest.mark.parametrize(("name", "dtype"), PEERS)
def test_torch_adamw_allocates_what_is_planned(name: str, dtype: torch.dtype) -> None:
    row = rows(luminav.plan(small_model().bfloat16()))[name]
    model = small_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = storage_bytes(tensor for entry in optimizer.state.values() for tensor in entry.values())
    weights = storage_bytes(model.parameters())
    assert (row.weights, row.gradients, row.state) == (weights, weights, state)


def test_fp32_has_no_masters_and_fp16_no_split_ones() -> None:
    dtypes = {dtype: set(rows(luminav.plan(1000, dtype=dtype))) for dtype in (torch.float32, torch.float16)}
    assert not any("semi" in mode or "full" in mode for mode in dtypes[torch.float32])
    assert "semi" in dtypes[torch.float16] and "semi, unsplit" not in dtypes[torch.float16]


def test_gradient_release_keeps_the_largest_bucket() -> None:
    """A bucket holds 4 Mi elements in any model: all of a small one, or a larger tensor alone."""
    row = rows(luminav.plan(small_model().bfloat16()))["none"]
    assert row.transient == 2 * 500 * 64 and row.released_gradients == row.gradients
    with torch.device("meta"):
        params = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (3 << 20, 1 << 20, 6 << 20)]
    row = rows(luminav.plan(params))["none"]
    assert row.transient == row.released_gradients == 2 * (6 << 20)
    assert row.released_total == row.total - 2 * (4 << 20)


def test_of_mixed_dtypes_the_largest_gradient_counts_in_its_own() -> None:
    params = [torch.zeros(2000, dtype=torch.bfloat16, requires_grad=True), torch.zeros(10, requires_grad=True)]
    row = luminav.plan(params).rows[0]
    assert row.transient == 4000 and row.released_total == row.total


# ---- what is planned -------------------------------------------------------------------------------------------------


def test_frozen_and_shared_parameters() -> None:
    """Frozen ones are weights only; a shared one is there once; in a list as in the model."""
    model = small_model().bfloat16()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(96, 130, bias=False))
    model[4].weight = model[3].weight
    trained = 64 * 96 + 96 + 2 * 96 + 96 * 130
    weight = [param for param in model.parameters() if param.requires_grad]
    for form in (model, model.named_parameters(), [*model.parameters(), weight[-1]]):
        row = luminav.plan(form).rows[0]
        assert (row.weights, row.gradients) == (2 * (500 * 64 + trained), 2 * trained)


def test_dtype_converts_floating_parameters() -> None:
    model = small_model()
    model.register_parameter("codes", nn.Parameter(torch.zeros(7, dtype=torch.int8), requires_grad=False))
    assert luminav.plan(model, dtype=torch.bfloat16).rows[0].weights == 7 + 2 * sum(
        param.numel() for param in small_model().parameters()
    )


@pytest.mark.parametrize(
    ("form", "number"),
    [("4.2B", 4_200_000_000), ("124M", 124_000_000), ("350k", 350_000), ("1T", 10**12), ("17", 17), (10**13, 10**13)],
)
def test_counts(form: str | int, number: int) -> None:
    plan = luminav.plan(form)
    assert plan.num_params == number
    assert plan.largest is None
    assert plan.rows[0].weights == 2 * number
    assert plan.rows[0].released_total is None and plan.fits(plan.rows[0], release=True) == ()


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_transformers(case: str) -> None:
    """Names, shapes and order."""
    assert [[name, list(shape)] for name, shape in Decoder(CASES[case]["config"]).shapes().items()] == CASES[case][
        "shapes"
    ]


def test_config_forms(tmp_path: Path) -> None:
    """A dict, a file and its folder are the same plan; a dtype that is asked for comes before the config's."""
    config = CASES["qwen3_5_4b"]["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    plan = luminav.plan(config)
    assert plan == luminav.plan(path) == luminav.plan(str(path)) == luminav.plan(tmp_path)
    assert (plan.num_params, plan.num_tensors) == (4_205_751_296, 426)
    assert plan.largest == ("model.embed_tokens.weight", (248320, 2560))
    assert plan.rows[0].weights == 2 * 4_205_751_296
    assert luminav.plan(config, dtype=torch.float32).rows[0].weights == 4 * 4_205_751_296
    assert luminav.plan({**LLAMA, "torch_dtype": "float32"}).rows[0].weights == 4 * luminav.plan(LLAMA).num_params


def test_unknown_architecture_goes_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is installed; a stand-in here, so that the test does not depend on it."""
    built = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=lambda **config: config),
        AutoModelForCausalLM=SimpleNamespace(from_config=lambda config: nn.Linear(config["width"], 3)),
    )
    built.__spec__ = find_spec("json")
    monkeypatch.setitem(sys.modules, "transformers", built)
    plan = luminav.plan({"model_type": "mine", "width": 10**9})
    assert plan.source == "mine config, built by transformers"
    assert plan.rows[0].weights == 2 * (3 * 10**9 + 3)


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "architecture": ({"model_type": "mine"}, {}, ValueError, "'mine' is not known.*number of parameters"),
    "no architecture": ({}, {}, ValueError, "model_type None is not known"),
    "missing size": ({**LLAMA, "hidden_size": None}, {}, ValueError, "hidden_size .* int > 0, got None"),
    "wrong size": ({**LLAMA, "num_hidden_layers": "2"}, {}, ValueError, "num_hidden_layers .* got '2'"),
    "no file": ("nowhere.json", {}, FileNotFoundError, "nowhere.json is no file"),
    "count": (0, {}, ValueError, r"must be > 0, and at most 1e\+15, got 0"),
    "type": (4.2e9, {}, TypeError, "got float"),
    "bool": (True, {}, TypeError, "got bool"),
    "list of names": (["a"], {}, TypeError, r"params\[0\] must be a parameter, got str"),
    "empty": ([], {}, ValueError, "no parameters to train. Has the generator been used before"),
    "frozen": ([torch.zeros(3)], {}, ValueError, "no parameters to train"),
    "complex": ([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], {}, ValueError, "complex64"),
    "half a size": (LLAMA, {"batch_size": 1}, ValueError, "sequence_length is missing"),
    "checkpointing of what": (LLAMA, {"activation_checkpointing": True}, ValueError, "give batch_size and sequence"),
    "dtype": (17, {"dtype": torch.int8}, ValueError, "torch.bfloat16.* got torch.int8"),
    "batch": (LLAMA, {"batch_size": 0, "sequence_length": 8}, ValueError, "batch_size must be an int > 0.* got 0"),
    "activations": (17, {"batch_size": 1, "sequence_length": 8}, ValueError, "activations are not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model, options, error, message = REFUSED[case]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(error, match=message):
        luminav.plan(model, **options)


# ---- activations -----------------------------------------------------------------------------------------------------


def test_activations_of_a_llama() -> None:
    """h = 32, q = 32, k = 16, f = 80, two layers, 96 words, 3 x 5 tokens, two bytes each."""
    block = 4 * 32 + 2 * 32 + 2 * 16 + 4 * 80
    loss = 15 * 96 * 14
    activations = luminav.plan(LLAMA, batch_size=3, sequence_length=5).activations
    assert activations is not None
    assert activations.loss == loss
    assert activations.full == 15 * 2 * (2 * block + 2 * 32) + loss
    assert activations.checkpointed == 15 * 2 * (2 * 32 + 2 * 32) + max(15 * 2 * block, loss)


class Block(nn.Module):
    """A decoder block with fused norms, for counting what autograd keeps."""

    def __init__(self, hidden: int, heads: int, key_heads: int, size: int) -> None:
        super().__init__()
        width = hidden // heads
        self.heads, self.width = heads, width
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, key_heads * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, size, bias=False) for _ in range(2))
        self.down = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (p(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_activations_are_what_autograd_keeps() -> None:
    """Blocks of the counted kind, with as many keys as queries (torch on a CPU copies the keys of groups)."""
    hidden, heads, size, layers, batch, length = 128, 4, 352, 3, 2, 64
    config = {
        **LLAMA,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": size,
        "num_hidden_layers": layers,
    }
    model = nn.Sequential(*(Block(hidden, heads, heads, size) for _ in range(layers)), nn.LayerNorm(hidden)).bfloat16()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(batch, length, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(x)
    activations = Decoder(config).activations(batch, length)
    expected = activations.full - activations.loss
    assert storage_bytes([*kept, out]) - storage_bytes(model.parameters()) == pytest.approx(expected, rel=0.03)


# ---- scratch and GPUs ------------------------------------------------------------------------------------------------


def test_scratch() -> None:
    """The Triton engine's tables stay below one per cent of the weights; the foreach engine has sixteen pieces."""
    row = luminav.plan(CASES["qwen3_5_4b"]["config"]).rows[0]
    assert 0 < row.scratch < 0.01 * row.weights
    assert luminav.plan("124M", device="cpu").rows[0].scratch == 16 * 2**20


@pytest.mark.parametrize("mode", ["none", "none, buffer=1", "none, block variance"])
def test_triton_tables_are_no_larger(mode: str) -> None:
    """Made on the CPU, with what a step takes besides; nothing is launched."""
    pytest.importorskip("triton")
    from luminav.engines.batch import Batch, TensorStep
    from luminav.engines.triton.kinds import MOST_TILES, SPAN, Kind
    from luminav.engines.triton.launch import Launch
    from luminav.hyperparameters import Options

    assert SPAN >= planner.PROGRAM_NUMEL and MOST_TILES == planner.PROGRAM_TILES
    tiles = mode == "none, block variance"
    shapes = [(64, 64), (1, 8192), (130, 3, 1024)] if tiles else [(5,), (300_000,), (64,)]
    options = Options.from_group(dict(planner.MODES)[mode])
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    steps = [
        TensorStep(p, p, p, p if options.has_variance else None, None, None, step=torch.tensor(0), exp_avg_sq_col=col)
        for p, col in ((p.detach(), p.detach() if tiles else None) for p in params)
    ]
    batch = Batch(options, None, steps)
    launch = Launch(Kind.of(steps[1], options), [(batch, one) for one in steps], 0, False)
    launch.take_partials()
    held = [*vars(launch).values(), *vars(launch.tables).values()]
    tables = storage_bytes(value for value in held if isinstance(value, Tensor))
    assert 0 < tables <= rows(luminav.plan(params))[mode].scratch


def test_fits() -> None:
    """At the very edge: total, one more gradient, activations and the reserve."""
    plan = luminav.plan(CASES["qwen3_5_4b"]["config"], batch_size=1, sequence_length=512)
    assert plan.activations is not None
    row = rows(plan)["none"]
    gradient = 2 * 248320 * 2560
    assert plan.peak(row) == row.total + gradient + plan.activations.full
    assert plan.peak(row, release=True) == row.total - row.gradients + 2 * gradient + plan.activations.full
    for release in (False, True):
        need = plan.peak(row, release=release)
        assert need is not None
        assert plan.fits(row, release=release) == tuple(name for name, size in GPUS if size * GIB >= need + RESERVE)
    smaller = luminav.plan(
        CASES["qwen3_5_4b"]["config"], batch_size=1, sequence_length=512, activation_checkpointing=True
    )
    assert smaller.peak(row) == row.total + gradient + plan.activations.checkpointed


def test_nothing_fits_a_trillion() -> None:
    plan = luminav.plan("1T")
    assert plan.fits(plan.rows[0]) == ()
    assert " none" in str(plan).splitlines()[3]


def test_a_cpu_has_the_memory_that_it_has() -> None:
    plan = luminav.plan(LLAMA, batch_size=1, sequence_length=8, device="cpu")
    assert all(plan.fits(row) == () == plan.fits(row, release=True) for row in plan.rows)
    assert "fits:" not in str(plan) and "CUDA" not in str(plan) and " none" not in str(plan)


# ---- output ----------------------------------------------------------------------------------------------------------


def test_text() -> None:
    plan = luminav.plan(CASES["qwen3_5_4b"]["config"], batch_size=1, sequence_length=512)
    lines = str(plan).splitlines()
    assert lines[0] == "qwen3_5_text config: 4,205,751,296 parameters in 426 tensors"
    assert lines[1].startswith("Largest tensor: model.embed_tokens.weight, [248320, 2560]. Its gradient, 1.18 GiB,")
    assert lines[2].startswith("Activations (estimate), 1 x 512 tokens: 4.12 GiB, with checkpointing 1.74 GiB;")
    (none,) = [line.split() for line in lines if line.startswith("none  ")]
    assert none[1:4] == ["7.83", "7.83", "15.67"] and none[6] == "8.00"
    assert all(any(line.startswith(row.mode) for line in lines) for row in plan.rows)


def test_dict_is_json_and_complete() -> None:
    plan = luminav.plan(small_model().bfloat16())
    content = json.loads(json.dumps(plan.to_dict()))
    assert content["num_params"] == plan.num_params
    assert [row["total"] for row in content["rows"]] == [row.total for row in plan.rows]
    assert content["rows"][0]["released_bytes_per_param"] == plan.rows[0].released_total / plan.num_params
    assert content["rows"][0]["fits"][0] == GPUS[0][0]

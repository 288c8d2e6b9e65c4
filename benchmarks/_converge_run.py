"""One run of the convergence benchmark, and the process that takes runs one after the other.

    python benchmarks/_converge_run.py      reads a run a line from standard input, answers with a line each

A process imports one package called luminav: this checkout's, or the public one that stands first on its path. Models
and compiled code are kept from run to run; weights are set anew.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _converge_contenders import DTYPES, Contender, find_contender
from _converge_model import SIZES, Decoder, Size, initial_weights
from _converge_text import Corpus
from torch import Tensor

FINITE_EVERY = 25
"""Steps between looks at the loss, each of which waits for the device."""
TRACE_EVERY = 10
UNTIMED = 5
"""First steps, in which an optimizer makes its state and compiles its kernels: left out of the speed."""
SMOOTHED = 20
"""Steps of the final training loss."""


@dataclass(frozen=True)
class Recipe:
    """How long and how a model is trained, whatever the optimizer."""

    name: str
    steps: int
    warm_up: int
    schedule: str = "cosine"
    """"cosine", "wsd" (flat, then down over the last fifth) or "constant"."""
    final_share: float = 0.1
    """Of the peak learning rate, at the end."""
    eval_batches: int = 16
    eval_every: int = 100
    last_evals: int = 5
    """The validation loss is the mean of so many, the last ones, `last_every` steps apart."""
    last_every: int = 10

    def lr_share(self, step: int) -> float:
        """Share of the peak learning rate at a step, from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up + 1) / max(1, self.steps - self.warm_up)
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            return 1.0 - (1.0 - self.final_share) * max(0.0, (done - 0.8) / 0.2)
        return self.final_share + (1.0 - self.final_share) * 0.5 * (1.0 + math.cos(math.pi * done))

    def evaluates(self, done: int) -> bool:
        """True if the validation loss is taken after `done` steps."""
        left = self.steps - done
        last = left < self.last_evals * self.last_every and left % self.last_every == 0
        return last or done % self.eval_every == 0


@dataclass(frozen=True)
class Run:
    """One run: everything that a worker is told."""

    contender: str
    lr: float
    seed: int
    size: str
    recipe: Recipe
    corpus: Corpus
    compiled: bool
    start: str | None = None
    """File of FP32 weights to start from, in place of the seed's."""
    save: str | None = None
    """Where to leave the final weights, in FP32."""

    @classmethod
    def from_json(cls, text: str) -> Run:
        values = json.loads(text)
        return cls(**values | {"recipe": Recipe(**values["recipe"]), "corpus": Corpus(**values["corpus"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Bench:
    """What stays in a process between runs."""

    device: torch.device
    models: dict[tuple[Any, ...], Decoder] = field(default_factory=dict)
    tokens: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def model(self, run: Run, contender: Contender) -> Decoder:
        """The model of a size and dtype, warmed up: compiled code and workspaces are there before anything is timed."""
        key = (run.size, contender.dtype, run.corpus.vocabulary, run.compiled)
        if key not in self.models:
            with torch.device(self.device):
                model = Decoder(SIZES[run.size], run.corpus.vocabulary, compiled=run.compiled)
            self.models[key] = model.to_dtype(DTYPES[contender.dtype])
            batch = next(batches(self, run, "train"))
            for _ in range(2):
                (loss_of(model, contender, batch) * contender.loss_scale).backward()
            model.zero_grad(set_to_none=True)
        return self.models[key]

    def windows(self, corpus: Corpus, part: str, context: int) -> Tensor:
        """The tokens as int32 on the device, and as many whole windows of context + 1 as they hold."""
        key = (getattr(corpus, part), part)
        if key not in self.tokens:
            self.tokens[key] = torch.from_numpy(corpus.tokens(part).astype(np.int32)).to(self.device)
        tokens = self.tokens[key]
        count = (len(tokens) - 1) // context
        return tokens[: count * context + 1].unfold(0, context + 1, context)


def batches(bench: Bench, run: Run, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: the training part in an order that depends on the seed alone, the validation part in its own."""
    size = SIZES[run.size]
    windows = bench.windows(run.corpus, part, size.context)
    if len(windows) < size.batch:
        raise SystemExit(
            f"the {part} part has {len(windows)} windows of {size.context} tokens, {size.batch} are needed."
        )
    generator = torch.Generator().manual_seed(10_000 + run.seed)
    while True:
        order = torch.randperm(len(windows), generator=generator) if part == "train" else torch.arange(len(windows))
        order = order.to(bench.device)
        for chosen in order[: len(order) // size.batch * size.batch].split(size.batch):
            batch = windows[chosen].long()
            yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def loss_of(model: Decoder, contender: Contender, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats."""
    device = model.cos.device.type
    context = torch.autocast(device, torch.bfloat16) if contender.autocast else nullcontext()
    with context:
        return model(*batch)


def evaluate(bench: Bench, run: Run, model: Decoder, contender: Contender) -> float:
    """Mean loss over the fixed validation batches."""
    total = torch.zeros((), dtype=torch.float64, device=bench.device)
    count = 0
    for _, batch in zip(range(run.recipe.eval_batches), batches(bench, run, "validation")):
        total += loss_of(model, contender, batch).detach()  # with gradients on: the compiled code is the training's
        count += 1
    return total.item() / count


def set_weights(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Store FP32 weights in the model, rounded to nearest."""
    for name, param in model.named_parameters():
        param.data.copy_(weights[name])


def state_bytes(optimizer: torch.optim.Optimizer, model: Decoder) -> int:
    """Bytes of weights and optimizer state, each storage once."""
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in model.parameters()}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


@dataclass
class Clock:
    """Seconds of training, evaluation left out."""

    device: torch.device
    seconds: float = 0.0
    started: float = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.started = self.now()

    def stop(self) -> None:
        self.seconds += self.now() - self.started


def train(run: Run, bench: Bench) -> dict[str, Any]:
    """Train once.

    Returns:
        The figures of the run's row, and "train" and "validation": (step, loss) pairs.
    """
    began = time.perf_counter()
    torch.manual_seed(run.seed)  # for optimizers that draw from the global generator
    contender = find_contender(run.contender)
    model, size, recipe = bench.model(run, contender), SIZES[run.size], run.recipe
    compiled_s = time.perf_counter() - began
    gc.collect()  # the last run's optimizer, or its state would be taken away from this one's
    set_weights(model, _first_weights(run))
    for part in ("train", "validation"):
        bench.windows(run.corpus, part, size.context)
    first = {name: param.detach().clone().bfloat16() for name, param in model.named_parameters()} if run.start else {}
    start_loss = evaluate(bench, run, model, contender) if run.start else math.nan
    optimizer = contender.make(model, run.lr, run.seed)
    losses, validation, seconds, finite = _loop(run, bench, model, contender, optimizer)
    params = sum(param.numel() for param in model.parameters())
    kept = state_bytes(optimizer, model)
    if bench.device.type == "cuda":  # the allocator knows of state that no state dict shows
        kept = sum(param.numel() * param.element_size() for param in model.parameters()) + _allocated(bench.device)
        del optimizer
        gc.collect()
        kept -= _allocated(bench.device)
    last = validation[-recipe.last_evals :]
    if run.save is not None and finite:
        torch.save({name: param.detach().float().cpu() for name, param in model.named_parameters()}, run.save)
    return {
        "val_loss": sum(loss for _, loss in last) / len(last) if finite else math.nan,
        "train_loss": float(np.mean(losses[-SMOOTHED:])) if finite else math.nan,
        "status": "finite" if finite and validation[-1][1] < math.log(run.corpus.vocabulary) else "diverged",
        "tokens_per_s": max(1, len(losses) - UNTIMED) * size.tokens / seconds,
        "bytes_per_param": kept / params,
        "params": params,
        "seconds": time.perf_counter() - began - compiled_s,
        "compile_s": compiled_s,
        "start_loss": start_loss,
        "moved": _moved(model, first) if first else math.nan,
        "train": [(step + 1, loss) for step, loss in enumerate(losses) if (step + 1) % TRACE_EVERY == 0 or step < 5],
        "validation": validation,
    }


def _loop(
    run: Run, bench: Bench, model: Decoder, contender: Contender, optimizer: torch.optim.Optimizer
) -> tuple[list[float], list[tuple[int, float]], float, bool]:
    """The steps: training losses, validation losses, seconds of training, and whether all stayed finite."""
    recipe, clock = run.recipe, Clock(bench.device)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = torch.zeros(recipe.steps, device=bench.device)
    validation: list[tuple[int, float]] = []
    step, finite = 0, True
    for step, batch in zip(range(recipe.steps), batches(bench, run, "train")):
        if step == min(UNTIMED, recipe.steps - 1):
            clock.start()
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * recipe.lr_share(step)
        loss = loss_of(model, contender, batch)
        (loss * contender.loss_scale).backward()
        if contender.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), contender.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        done = step + 1
        if done % FINITE_EVERY == 0 and not math.isfinite(losses[step].item()):
            finite = False
            break
        if recipe.evaluates(done):
            clock.stop()
            validation.append((done, evaluate(bench, run, model, contender)))
            clock.start()
    clock.stop()
    optimizer.zero_grad(set_to_none=True)
    taken = losses[: step + 1].tolist()
    finite = finite and all(math.isfinite(loss) for _, loss in validation)
    return taken, validation or [(step + 1, math.nan)], clock.seconds, finite


def _first_weights(run: Run) -> Mapping[str, Tensor]:
    """The seed's weights or the file's, the latter as BF16 has them, so that all contenders start alike."""
    size: Size = SIZES[run.size]
    if run.start is None:
        return initial_weights(size, run.corpus.vocabulary, run.seed)
    loaded: dict[str, Tensor] = torch.load(Path(run.start), weights_only=True)
    return {name: weight.bfloat16().float() for name, weight in loaded.items()}


def _moved(model: Decoder, first: Mapping[str, Tensor]) -> float:
    """Share of the weights whose value in BF16 is another than at the start."""
    params = dict(model.named_parameters())
    changed = sum(int((params[name].detach().bfloat16() != start).sum()) for name, start in first.items())
    return changed / sum(start.numel() for start in first.values())


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def serve(answer: Callable[[str], object]) -> None:
    """Take runs from standard input until it ends."""
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for line in sys.stdin:
        run = Run.from_json(line)
        result = train(run, bench)
        module = sys.modules.get("luminav")
        result["luminav"] = [getattr(module, "__version__", ""), getattr(module, "__file__", "")]
        answer(json.dumps(result))


if __name__ == "__main__":
    output = sys.stdout
    sys.stdout = sys.stderr  # whatever a package prints is no answer
    serve(lambda text: print(text, file=output, flush=True))

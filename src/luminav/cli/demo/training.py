"""Training one contender: a step, a validation, a checkpoint, and going on from it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luminav.cli.demo.contenders import Contender
from luminav.cli.demo.data import Corpus
from luminav.cli.demo.model import ByteTransformer, native_compute_dtype, sample
from luminav.cli.demo.settings import DemoSettings
from luminav.cli.errors import CommandError

BITS_PER_NAT = 1 / math.log(2)

CURVE_POINTS = 10
"""Validations along a run, for the chart."""
CURVE_BYTES = 32 * 1024

SAMPLE_PROMPT_BYTES = 48
SAMPLE_BYTES = 400
SAMPLE_TEMPERATURE = 0.8

_UNTIMED_STEPS = 5  # allocations and caches of the first steps are not the optimizer's cost


@dataclass
class History:
    """What a run has seen so far. The losses repeat bit for bit after a resume, the timings need not."""

    loss: list[float] = field(default_factory=list)
    """Training loss of each step, bits per byte."""
    validation: dict[int, float] = field(default_factory=dict)
    """Steps taken to bits per byte on a part of the held-out text."""
    optimizer_seconds: list[float] = field(default_factory=list)
    """Time of each ``optimizer.step()``."""
    seconds: float = 0.0
    """Training time, validations left out."""


@dataclass(frozen=True)
class Result:
    """What a finished contender is judged by."""

    bits_per_byte: float
    num_params: int
    weight_bytes: int
    state_bytes: int
    optimizer_ms: float
    seconds: float
    prompt: str
    """Held-out text that the sample goes on from."""
    sample: str

    @property
    def bytes_per_param(self) -> float:
        """Bytes of weights and optimizer state per parameter, as measured."""
        return (self.weight_bytes + self.state_bytes) / self.num_params


class Run:
    """One contender's training, between two steps.

    Args:
        contender: Which one.
        settings: The demo's settings; both contenders get the same initial values from its seed.
        corpus: The text.
        device: Where to train.
        compute_dtype: Dtype of the activations; None is what the device is fast at.
    """

    def __init__(
        self,
        contender: Contender,
        settings: DemoSettings,
        corpus: Corpus,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.contender = contender
        self.settings = settings
        self.corpus = corpus
        self.device = device
        self.model = ByteTransformer(settings.shape, settings.seed).to(device=device, dtype=contender.dtype)
        self.model.compute_dtype = compute_dtype or native_compute_dtype(contender.dtype, device)
        self.optimizer = contender.make_optimizer(self.model)
        # FP16 gradients of a mean over thousands of bytes underflow without a loss scale.
        self.scaler = torch.amp.GradScaler(device.type, enabled=contender.dtype is torch.float16)
        self.history = History()
        self.result: Result | None = None

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return len(self.history.loss)

    def checkpoint(self) -> dict[str, Any]:
        """Return everything needed to go on, as plain values and tensors."""
        return {
            "contender": self.contender.key,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "history": asdict(self.history),
            "result": None if self.result is None else asdict(self.result),
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from :meth:`checkpoint` of the same contender and settings."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.history = History(**checkpoint["history"])
        if checkpoint["result"] is not None:
            self.result = Result(**checkpoint["result"])

    def take_step(self) -> None:
        """Train on one batch.

        Raises:
            CommandError: The loss is no longer finite. The last checkpoint stays as it is.
        """
        settings = self.settings
        started = time.perf_counter()
        windows = self.corpus.batch(settings.seed, self.step, settings.batch_size).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate(self.contender.peak_lr, self.step)
        loss = self.model.loss(windows)
        self.scaler.scale(loss).backward()
        loss_value = loss.item() * BITS_PER_NAT
        if not math.isfinite(loss_value):
            raise CommandError(
                f"{self.contender.title} diverged at step {self.step + 1} (loss {loss_value}): "
                f"its peak learning rate {self.contender.peak_lr} is too high for these settings."
            )
        optimizer_seconds = self._timed_update()
        self.history.loss.append(loss_value)
        self.history.optimizer_seconds.append(optimizer_seconds)
        self.history.seconds += time.perf_counter() - started

    def _timed_update(self) -> float:
        """Let the optimizer take its step and return how long it took, the device's work included."""
        self._wait()
        started = time.perf_counter()
        self.scaler.step(self.optimizer)  # plain optimizer.step() where no loss scale is in use
        self._wait()
        seconds = time.perf_counter() - started
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return seconds

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def validate(self, max_bytes: int, check: Callable[[], None]) -> float:
        """Return bits per byte on held-out text, in FP64 over batches of FP32 sums.

        Args:
            max_bytes: How much of the held-out text to use.
            check: Called between batches; may raise to leave.
        """
        windows = self.corpus.validation(max_bytes)
        nats = 0.0
        with torch.inference_mode():
            for batch in windows.split(2 * self.settings.batch_size):
                check()
                nats += self._nats(batch.to(self.device))
        return nats / (len(windows) * self.settings.context) * BITS_PER_NAT

    def _nats(self, windows: Tensor) -> float:
        logits = self.model(windows[:, :-1])
        return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum"))

    def finish(self, check: Callable[[], None]) -> Result:
        """Judge the trained weights: the figures of the table, and a sample."""
        prompt = bytes(self.corpus.held_out[0, :SAMPLE_PROMPT_BYTES].tolist())
        bits_per_byte = self.validate(self.settings.validation_bytes, check)
        check()
        written = sample(
            self.model, prompt, SAMPLE_BYTES, temperature=SAMPLE_TEMPERATURE, seed=self.settings.seed, check=check
        )
        timed = self.history.optimizer_seconds[_UNTIMED_STEPS:] or self.history.optimizer_seconds
        self.result = Result(
            bits_per_byte=bits_per_byte,
            num_params=sum(param.numel() for param in self.model.parameters()),
            weight_bytes=stored_bytes(self.model.parameters()),
            state_bytes=stored_bytes(self.optimizer.state.values()),
            optimizer_ms=1e3 * statistics.median(timed),
            seconds=self.history.seconds,
            prompt=prompt.decode("utf-8", errors="replace"),
            sample=written.decode("utf-8", errors="replace"),
        )
        return self.result


def train(run: Run, *, check: Callable[[], None], each_step: Callable[[Run], None]) -> Result:
    """Train to the last step and judge the result; goes on where `run` stands.

    Args:
        run: The contender's run, new or restored.
        check: Called wherever the run can be saved as it is; may raise to leave.
        each_step: Called after each step, to show it and to save it.

    Returns:
        The figures, which `run` holds as well.
    """
    every = max(1, run.settings.steps // CURVE_POINTS)
    while True:
        if run.step % every == 0 and run.step not in run.history.validation:
            run.history.validation[run.step] = run.validate(CURVE_BYTES, check)
        check()
        if run.step == run.settings.steps:
            return run.result or run.finish(check)
        run.take_step()
        each_step(run)


def stored_bytes(kept: Any) -> int:
    """Return the bytes of memory behind the tensors of nested containers, memory that several share counted once."""
    storages = {}
    for tensor in _tensors(kept):
        storage = tensor.untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, Mapping):
        yield from _tensors(kept.values())
    elif not isinstance(kept, (str, bytes)) and hasattr(kept, "__iter__"):
        for item in kept:
            yield from _tensors(item)

"""A step: from gradients to batches → measure → scales → update.

:class:`Stepper` holds what belongs to the running process and is neither copied nor saved: the launches of the last
step, where shards lie, what our own writes looked like. The optimizer's state and groups stay the optimizer's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from luminav import rule
from luminav.custody import Custody
from luminav.distributed import Sharding, local
from luminav.domains import Domain
from luminav.engines import able_engine, choose_engine, triton_errors
from luminav.hyperparameters import Options
from luminav.pending import (
    UNSCALED,
    Pending,
    Scaling,
    check_param,
    check_state,
    checked_grad,
    missing_grad,
    numbers_on_device,
)
from luminav.replay import Replay, ShardedReplay, TritonFailed
from luminav.state import (
    KEPT_SCALES,
    Written,
    catch_up,
    drop_template,
    has_block_variance,
    keeps_blocks,
    kept_tensors,
)
from luminav.works import Work, combine, measure, measure_lookahead, prepare, sort_into_works, update


@dataclass(frozen=True, eq=False)
class Share:
    """Some of an optimizer's parameters that take their step by themselves, the others' gradients left alone."""

    params: list[Tensor]

    @functools.cached_property
    def members(self) -> frozenset[Tensor]:
        """The parameters as a set."""
        return frozenset(self.params)


class Stepper:
    """Takes the steps of an optimizer.

    Args:
        optimizer: Whose parameters, state and groups they are. A loss scaler leaves its scale and flag there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.custody = Custody(optimizer)
        self.written: dict[Tensor, Written] = {}  # with master weights: each weight after our last write
        self.sharding = Sharding()
        self.replays: dict[Share | None, Replay | ShardedReplay] = {}  # kept: of a whole step (None), of shares
        self.release: Any = None  # the handle of gradient release, while it is on
        self.nonfinite: dict[torch.device, Tensor] = {}
        self.warned_nonfinite = False
        self.template = True  # the state may come from an allocation-only step: looked at once, before the next step

    @property
    def state(self) -> Any:
        """The optimizer's state, taken without handing it out."""
        return self.custody.state

    def step(self, share: Share | None = None) -> None:
        """Take one step; see :meth:`luminav.LuminaV.step`.

        Args:
            share: The parameters that take it; None for all.
        """
        with self._taking_scale_away():
            self._step(share)
        if share is None and self.release is not None:
            self.release.end_pass()

    def _step(self, share: Share | None) -> None:
        if self._replayed(share):
            return
        self.sharding.plan(self.optimizer.param_groups)
        pending = self._checked(share)
        if not pending and not self.sharding.domains:
            return
        self.custody.changed()
        self._drop_template()
        scaling = self._scaling(pending)
        if scaling is None:
            return
        allocation_only = self._is_allocation_only(pending)
        if allocation_only and not self.sharding.domains:
            self._allocate(pending, scaling)
            return
        self._prepare(pending, scaling)
        try:
            self._run(pending, scaling, allocation_only, share)
        except TritonFailed as failure:
            failure.settle()
            self._step(share)

    @contextmanager
    def _taking_scale_away(self) -> Iterator[None]:
        """If a step fails, take away the scale that a loss scaler has set for it.

        ``GradScaler`` takes it away after a step that returns. Left behind, the next one would multiply the two.
        """
        with ExitStack() as failed:
            failed.callback(self._take_scale_away)
            yield
            failed.pop_all()

    def _take_scale_away(self) -> None:
        if hasattr(self.optimizer, "found_inf"):
            del self.optimizer.found_inf
            self.optimizer.__dict__.pop("grad_scale", None)

    def _checked(self, share: Share | None) -> list[Pending]:
        """What is pending, if nothing of it is refused."""
        self._check_release()
        return list(self._pending(share))

    def _check_release(self) -> None:
        """Refuse a loss scaler under gradient release."""
        if self.release is not None and any(hasattr(self.optimizer, name) for name in ("grad_scale", "found_inf")):
            raise RuntimeError(
                "a loss scaler cannot be combined with gradient release: whether gradients overflowed is known when "
                "all are there. Train in BF16 without a scaler, or call remove() on the handle."
            )

    def _pending(self, share: Share | None) -> Iterator[Pending]:
        """The parameters that have a gradient, or may have one on another rank, checked."""
        seen: set[Tensor] = set()  # torch only warns of a parameter that comes twice in a group
        for number, group in enumerate(self.optimizer.param_groups):
            options = Options.from_group(group)
            for index, param in enumerate(group["params"], self.sharding.bases[number]):
                if share is not None and param not in share.members:
                    continue
                part = self.sharding.part(param)
                elsewhere = param.grad is None and param.requires_grad and part.domain is not None
                elsewhere = elsewhere and not (self.release is not None and self.release.has_stepped(param))
                if (param.grad is not None or elsewhere) and param not in seen:
                    seen.add(param)
                    names = group.get("param_names")
                    check_param(param, options, names[index - self.sharding.bases[number]] if names else None)
                    grad = missing_grad(param) if elsewhere else checked_grad(param)
                    state = self.state.get(param, {})
                    check_state(param, state, options)
                    engine = able_engine(
                        choose_engine(options.execution, param.device),
                        [local(param), grad, *kept_tensors(state)],
                        part.layout.first_index,
                        not part.layout.jumps,
                        keeps_blocks(param, options),
                        has_block_variance(param, options),
                    )
                    yield Pending(param, grad, options, number, index, engine, part, elsewhere)

    def _scaling(self, pending: list[Pending]) -> Scaling | None:
        """What the loss scaler asks for; None if the host knows that the gradients overflowed."""
        grad_scale = getattr(self.optimizer, "grad_scale", None)
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is None:
            return UNSCALED if grad_scale is None else Scaling(grad_scale, None)
        # A parameter without kept scales must be known to have stepped, or its next step could not tell whether to
        # measure: one-pass mode looks at the flag until every parameter has its pair.
        unsure = any(
            p.options.fused_single_pass and not self.state.get(p.param, {}).keys() >= set(KEPT_SCALES) for p in pending
        )
        on_host = found_inf.device.type == "cpu" or unsure
        if self.sharding.domains:
            return Scaling(grad_scale, None if on_host else found_inf, overflow=found_inf)
        if on_host:
            return None if found_inf.item() else Scaling(grad_scale, None)
        return Scaling(grad_scale, found_inf)

    def _is_allocation_only(self, pending: list[Pending]) -> bool:
        """Whether this step is how ``torch.distributed.checkpoint`` asks for state to load into.

        It sets lr to 0 and every gradient to zero on an optimizer without state. Such a step would change nothing but
        the step counts; leaving those at 0 lets parameters that the file does not know stay without state.
        """
        return (
            not any(self.custody.of_params())
            and all(float(item.options.lr) == 0.0 for item in pending)
            and not any(item.grad is not None and item.grad.any() for item in pending)
        )

    def _drop_template(self) -> None:
        """Forget what an allocation-only step made beyond a parameter's first state, if no file was read into it."""
        if self.template:
            for state in self.custody.of_params():
                drop_template(state)
            self.template = False

    def _allocate(self, pending: list[Pending], scaling: Scaling) -> None:
        """Make state to load into."""
        self._prepare(pending, scaling, template=True)
        self.state.update({item.param: item.state for item in pending if not item.missing})
        self.template = True

    def _prepare(self, pending: list[Pending], scaling: Scaling, *, template: bool = False) -> None:
        """Bring every parameter's state into the form its mode prescribes."""
        for item in pending:
            state = item.state = self.state.get(item.param) or {}
            on_device = numbers_on_device(item, scaling)
            written = self.written.get(item.param)
            catch_up(state, item.param, item.options, written, step_on_device=on_device, template=template)

    def _run(self, pending: list[Pending], scaling: Scaling, allocation_only: bool, share: Share | None) -> None:
        """Measure, scale and update.

        Nothing is written before every exact tensor is measured, and measured on all ranks that hold a part of it.
        Tensors whose scales are known beforehand (one-pass mode, or neither gate nor radial bound) are updated and
        measured in one go.
        """
        domains = self.sharding.domains
        works = sort_into_works(pending, scaling, sharded=bool(domains))
        # Not beside sharded parameters: whether anything may be written is known when all ranks have been heard.
        replayable = [work for work in works if work.engine.numbers_on_device and not domains]
        works = [work for work in works if work not in replayable]
        replay = self._compiled(replayable, scaling) if replayable else None
        prepare(works)
        launch = None
        if replay is not None:
            launch = functools.partial(self._launch, replay, replayable, scaling, share, keep=not works)
        idle = functools.partial(self._allocate, pending, scaling) if allocation_only else None
        taken = self._take(works, domains, scaling, launch, idle)
        if domains and taken and ShardedReplay.can_keep(works, scaling):
            take = functools.partial(self._take, works, domains, scaling)
            self._keep(ShardedReplay(works, take), share)

    def _take(
        self,
        works: list[Work],
        domains: Sequence[Domain],
        scaling: Scaling,
        launch: Callable[[], None] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Take a step with works.

        Args:
            works: The works.
            domains: The ranks that hold other parts of their parameters.
            scaling: What the loss scaler asks for.
            launch: Takes the step of other works, when all exact ones of these are measured.
            idle: On a rank that has nothing to do: what to do if no other rank has anything either.

        Returns:
            Whether anything was written.
        """
        early, late = [work for work in works if work.early], [work for work in works if not work.early]
        measure_lookahead(works, domains)
        measure(late)
        if launch is not None:
            launch()
        update(early, gather=True)
        if domains:
            overflow, busy = combine(works, domains, self._flags(domains, scaling, idle is not None))
            if idle is not None and not busy.item():
                idle()
                return False
            if scaling.overflow is not None and scaling.found_inf is None and overflow.item():
                return False
            late = [work for work in late if work.items]
            for work in late:
                work.batch.skip = None if scaling.found_inf is None else overflow.to(work.batch.device) != 0
        update(late, gather=False)
        for work in early + late:
            self._finish(work)
        for work in early + late:  # last: its warning may be an error
            self._count_nonfinite(rule.Sums.of(work.sums))
        return True

    # ---- steps of the Triton engine ----------------------------------------------------------------------------------

    def _replayed(self, share: Share | None) -> bool:
        """Take the step by the launches of the last one, if what they were built from still holds."""
        replay = self.replays.get(share)
        if replay is None:
            return False
        scaling = self._scaling([])
        if replay.holds(self.optimizer.param_groups, self.custody, scaling):
            if scaling is not None:
                replay.run(scaling)
                if replay.saw_whole_nonfinite:
                    self._warn_of_nonfinite()
            return True
        self._end_replay(replay, share)
        return False

    def _compiled(self, works: list[Work], scaling: Scaling) -> Replay:
        """The launches of the Triton engine's works, compiled: what fails to compile must fail before it writes."""
        replay = Replay(works)
        try:
            replay.compile(scaling)
        except triton_errors() as error:
            if "out of memory" in str(error):  # for a kernel's code, say: nothing that another engine would mend
                raise
            reason = f"its kernels did not compile ({type(error).__name__}: {error})"
            raise TritonFailed(works, reason) from error
        return replay

    def _launch(self, replay: Replay, works: list[Work], scaling: Scaling, share: Share | None, *, keep: bool) -> None:
        """Run the launches; with `keep`, remember them for the next step."""
        replay.run(scaling)
        self.state.update({item.param: item.state for work in works for item in work.items})
        self._keep(replay, share)
        if not (keep and replay.is_steady):
            self._end_replay(replay, share)

    def _keep(self, replay: Replay | ShardedReplay, share: Share | None) -> None:
        """Remember a step that has been taken."""
        replay.remember(self.optimizer.param_groups, self.custody, alone=share is None)
        self.replays[share] = replay

    def _end_replay(self, replay: Replay | ShardedReplay, share: Share | None = None) -> None:
        """Take over what the launches know and the optimizer must not forget."""
        self.replays.pop(share, None)
        self.written.update(replay.premises.written())
        for device, count in replay.nonfinite_counts():
            self.nonfinite[device] = self.nonfinite.get(device, 0) + count

    def _flags(self, domains: Sequence[Domain], scaling: Scaling, is_idle: bool) -> Tensor:
        """What the ranks tell each other: whether gradients overflowed, whether there is more to do than allocating."""
        flags = torch.tensor([0.0, float(not is_idle)], dtype=torch.float64, device=domains[0].device)
        if scaling.overflow is not None:
            flags[0] = scaling.overflow.reshape(())
        return flags

    def _finish(self, work: Work) -> None:
        """Count the step, keep the scales, note our own write; of a kept work, only what its tables do not do."""
        batch = work.batch
        if not work.is_kept:
            self.state.update({item.param: item.state for item in work.items})
            self._count(work)
            if batch.options.master_weights != "none":
                self.written.update({item.param: Written.of(item.param) for item in work.items})
        if batch.options.fused_single_pass:
            work.keep_scales()

    def _count(self, work: Work) -> None:
        """Count a step. The Triton engine counts in its tables; the state has views of them."""
        batch, engine = work.batch, work.engine
        if not engine.numbers_on_device:
            done = 1 if batch.skip is None else torch.logical_not(batch.skip).to(torch.int64)
            for item in work.items:
                item.state["step"] += done
            return
        states = {id(step): item.state for item, step in zip(work.items, batch.steps, strict=True)}
        for launch, _ in engine.launches_of(batch):  # type: ignore[attr-defined]
            for step, count in zip(launch.steps_of, launch.tables.steps.unbind(), strict=True):
                states[id(step)]["step"] = count

    # ---- for diagnostics -------------------------------------------------------------------------------------------

    def pending(self) -> list[Pending]:
        """What a step would work on now, checked, each with the optimizer's own state."""
        with self._taking_scale_away():
            found = self._checked(None)
        for item in found:
            item.state = self.state.get(item.param) or {}
        return found

    def scaling(self) -> Scaling:
        """What the loss scaler asks for now, as far as gradients are concerned."""
        return Scaling(getattr(self.optimizer, "grad_scale", None), None)

    # ---- non-finite gradients --------------------------------------------------------------------------------------

    def _count_nonfinite(self, sums: rule.Sums) -> None:
        device = sums.nonfinite.device
        total = self.nonfinite.get(device)
        self.nonfinite[device] = sums.nonfinite.sum() if total is None else total.add_(sums.nonfinite.sum())
        if device.type == "cpu" and bool(((sums.nonfinite == sums.numel) & (sums.numel > 0)).any()):
            self._warn_of_nonfinite()

    def _warn_of_nonfinite(self) -> None:
        if self.warned_nonfinite:
            return
        self.warned_nonfinite = True
        warnings.warn(
            "every element of a parameter's gradient is NaN or infinite and counts as 0: the parameter gets decay and "
            "momentum only. A clipped infinite norm does this; so does a loss that is NaN. "
            "optimizer.nonfinite_grad_count() counts such elements.",
            RuntimeWarning,
            stacklevel=2,
        )

    def num_nonfinite(self) -> int:
        """Number of non-finite gradient elements so far; waits for the devices."""
        running = [pair for replay in self.replays.values() for pair in replay.nonfinite_counts()]
        return int(sum(float(count) for _, count in [*self.nonfinite.items(), *running]))

    def end_shares(self) -> None:
        """No share takes its step by itself any more."""
        for share, replay in list(self.replays.items()):
            if share is not None:
                self._end_replay(replay, share)

    def all_written(self) -> dict[Tensor, Written]:
        """The weights that have a master, or may get one, after our last write; those of kept launches too."""
        running = [pair for replay in self.replays.values() for pair in replay.premises.written()]
        return {**self.written, **dict(running)}

    def forget_writes(self) -> None:
        """State and groups come from elsewhere now: nothing remembered of our last step still holds."""
        for share, replay in list(self.replays.items()):
            self._end_replay(replay, share)
        self.written.clear()

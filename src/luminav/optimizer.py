"""LuminaV: options in, and a step as batches → measure → scales → update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from luminav import rule
from luminav.assembly import (
    Pending,
    Scaling,
    Work,
    check_layout,
    check_param,
    check_state,
    checked_grad,
    combine,
    measure,
    measure_lookahead,
    missing_grad,
    numbers_on_device,
    sort_into_works,
    update,
    without_autocast,
)
from luminav.distributed import Sharding, local
from luminav.engines import able_engine, choose_engine, compile_errors
from luminav.hyperparameters import OPTIONS, Options, refuse_misspelt_options
from luminav.replay import Replay, TritonFailed
from luminav.state import (
    KEPT_SCALES,
    Sealed,
    Written,
    adopt_edits,
    conform,
    drop_template,
    elementwise,
    former_weight,
    loaded_group,
    loaded_state,
    seal,
    without_process_group,
)


class LuminaV(Optimizer):
    r"""LuminaV: training with weights stored in BF16 or FP16 and no FP32 copy.

    The rule is that of LuminaV (Lumina Moon, 2026; paper doi 10.57967/hf/10270, software doi 10.57967/hf/10365); this
    is an independent implementation. For a parameter p with gradient g at its own step t = 1, 2, …, in FP32 arithmetic
    whatever the storage dtype:

    .. math::
        m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad \tilde m = \beta_1 m + (1-\beta_1) g \\
        v &\leftarrow \beta_2 v + (1-\beta_2)(g - m)^2 \\
        u &= \tanh\left(\tilde m / \sigma\right), \quad
            \sigma = \tau\,\frac{1-\beta_1^{t+1}}{\sqrt{1-\beta_2^t}}\sqrt v + \epsilon\tau(1-\beta_1^{t+1}) \\
        d &= c \cdot \mathrm{keep} \cdot u, \quad \mathrm{keep} = [\tilde m g > 0], \quad
            c = 1/\mathrm{clamp}(\mathrm{mean}(\mathrm{keep}), \gamma, 1) \\
        p &\leftarrow p(1-\eta\lambda) - \eta s d, \quad s = \tanh(r)/r, \quad
            r = \eta\lVert d\rVert / (\rho\max(\lVert p\rVert, 1))

    With ``buffer=1`` there is no v; one root mean square per tensor takes its place. Weights and moments in 16 bits are
    rounded stochastically with noise that is a pure function of (seed, step, parameter index, element index), so the
    global random state is never touched and a resumed run repeats bit for bit.

    Args:
        params: Parameters or parameter groups, named or not; FP16, BF16, FP32 or FP64, of any layout.
        lr: Learning rate η, a float or a one-element tensor.
        betas: Decay rates (β₁, β₂) of momentum and variance, each in [0, 1).
        eps: Floor of the denominator; at least 1e-4 for FP16 parameters.
        weight_decay: Decoupled decay λ: weights shrink by η·λ of themselves each step.
        tau: Temperature τ of the tanh envelope.
        alpha_ss: Compression α of the single buffer's direction.
        cautious: Drop coordinates whose look-ahead momentum disagrees with the gradient in sign.
        cautious_clamp_min: Lower limit γ of the gate's density, in (0, 1].
        buffer: 2 keeps momentum and variance, 1 momentum only.
        stochastic_rounding: Stochastic rounding of 16-bit stores; False rounds to nearest.
        bound: Limit the step relative to the weights.
        bound_type: "radial" (length of the tensor's step) or "coordinate" (each element).
        bound_ratio: Size ρ of the bound.
        master_weights: "none", "semi" (FP32 master weight) or "full" (FP32 moments too); False is "none", True and
            "fp32" are "full", "half" and "hybrid" are "semi". FP32 and FP64 parameters are their own master.
        fused_single_pass: One pass over memory with scales kept from earlier steps; needs ``buffer=2``.
        ema_decay: Memory κ of the kept scales, in [0, 1).
        fsdp_sync: The parameters are plain shards whose sums are taken over the process group.
        execution: Engine: "auto", "triton", "foreach" or "single".
        seed: Key of the rounding noise, an int in [0, 2⁶³).
        maximize: Maximise instead of minimise.
        capturable: Keep the step count and per-step numbers on the device.
        process_group: Process group of the plain shards.

    Raises:
        ValueError: An option is out of range, or ``buffer=1`` is combined with ``fused_single_pass=True``.
        TypeError: An option or a parameter has the wrong type; complex parameters are not supported.
        RuntimeError: The engine asked for cannot run here.

    Every option can be overridden per parameter group, with the same spellings. State per parameter: ``step`` (int64),
    ``exp_avg``, ``exp_avg_sq`` (buffer=2), ``master_param`` (FP32, 16-bit parameters in "semi" and "full"), and in
    one-pass mode ``cautious_scale`` and ``bound_scale``.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf around step()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 8e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 8e-2,
        tau: float = 0.8,
        alpha_ss: float = 0.5,
        cautious: bool = True,
        cautious_clamp_min: float = 0.5,
        buffer: int = 2,
        stochastic_rounding: bool = True,
        bound: bool = True,
        bound_type: str = "radial",
        bound_ratio: float = 0.03,
        master_weights: bool | str = "none",
        fused_single_pass: bool = False,
        ema_decay: float = 0.8,
        fsdp_sync: bool = False,
        execution: str = "auto",
        seed: int = 1337,
        maximize: bool = False,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in OPTIONS}
        options = Options.from_group(given)
        self._forget_process()
        super().__init__(params, {name: getattr(options, name) for name in OPTIONS})

    def _forget_process(self) -> None:
        """Set what belongs to the running process and is neither copied nor saved."""
        self._written: dict[Tensor, Written] = {}  # with master weights: each weight after our last write
        self._sharding = Sharding()
        self._replay: Replay | None = None
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._warned_nonfinite = False
        self._template = True  # the state may come from an allocation-only step: looked at once, before the next step

    # ---- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it does not name take the constructor's values.

        Args:
            param_group: "params" (parameters, named or not) and option overrides.

        Raises:
            ValueError: A bad or misspelt option.
            TypeError: A parameter that is not a real floating-point tensor.
        """
        if isinstance(param_group, dict):
            param_group = self._normalised_group(param_group)
        super().add_param_group(param_group)

    def _normalised_group(self, group: dict[str, Any]) -> dict[str, Any]:
        refuse_misspelt_options(group)
        options = Options.from_group({**self.defaults, **group})
        params = group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
        for param in [params] if isinstance(params, Tensor) else params:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                check_layout(tensor)
                check_param(tensor, options)
        return {**group, "params": params, **{name: getattr(options, name) for name in OPTIONS}}

    # ---- the step --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            TypeError: A sparse or complex gradient.
            ValueError: A bad option in a group.
            RuntimeError: An engine that cannot run on a parameter's device.

            Whatever is raised here comes before any weight, state or step count has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # eager inside a compiled training step; the base class marks its own methods in this way
    @torch.inference_mode(False)  # state made in inference mode could not be updated outside it
    @torch.no_grad()
    @without_autocast()
    def _step(self) -> None:
        if self._replayed():
            return
        self._sharding.plan(self.param_groups)
        pending = self._checked()
        if not pending and not self._sharding.domains:
            return
        self._drop_template()
        scaling = self._scaling(pending)
        if scaling is None:
            return
        allocation_only = self._is_allocation_only(pending)
        if allocation_only and not self._sharding.domains:
            self._allocate(pending, scaling)
            return
        self._prepare(pending, scaling)
        try:
            self._run(pending, scaling, allocation_only)
        except TritonFailed as failure:
            failure.settle()
            self._step()

    def _checked(self) -> list[Pending]:
        """What is pending; if any of it is refused, without the scale that a loss scaler has set for this step.

        ``GradScaler`` takes its scale away after a step that returns. Left behind, the next one would multiply the two.
        """
        try:
            return list(self._pending())
        except (TypeError, ValueError, RuntimeError):
            if hasattr(self, "found_inf"):
                del self.found_inf
                self.__dict__.pop("grad_scale", None)
            raise

    def _pending(self) -> Iterator[Pending]:
        """The parameters that have a gradient, or may have one on another rank, checked."""
        seen: set[Tensor] = set()  # torch only warns of a parameter that comes twice in a group
        for number, group in enumerate(self.param_groups):
            options = Options.from_group(group)
            for index, param in enumerate(group["params"], self._sharding.bases[number]):
                part = self._sharding.part(param)
                elsewhere = param.grad is None and param.requires_grad and part.domain is not None
                if (param.grad is not None or elsewhere) and param not in seen:
                    seen.add(param)
                    check_param(param, options)
                    grad = missing_grad(param) if elsewhere else checked_grad(param)
                    state = self.state.get(param, {})
                    check_state(param, state, options)
                    engine = able_engine(
                        choose_engine(options.execution, param.device),
                        [local(param), grad, *elementwise(state)],
                        part.layout.first_index,
                        not part.layout.jumps,
                    )
                    yield Pending(param, grad, options, number, index, engine, part, elsewhere)

    def _scaling(self, pending: list[Pending]) -> Scaling | None:
        """What the loss scaler asks for; None if the host knows that the gradients overflowed."""
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return Scaling(grad_scale, None)
        # A parameter without kept scales must be known to have stepped, or its next step could not tell whether to
        # measure: one-pass mode looks at the flag until every parameter has its pair.
        unsure = any(p.options.fused_single_pass and "bound_scale" not in self.state.get(p.param, {}) for p in pending)
        on_host = found_inf.device.type == "cpu" or unsure
        if self._sharding.domains:
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
            not any(self.state.values())
            and all(float(item.options.lr) == 0.0 for item in pending)
            and all(not item.grad.any() for item in pending)
        )

    def _drop_template(self) -> None:
        """Forget what an allocation-only step made beyond a parameter's first state, if no file was read into it."""
        if self._template:
            for state in self.state.values():
                drop_template(state)
            self._template = False

    def _allocate(self, pending: list[Pending], scaling: Scaling) -> None:
        """Make state to load into."""
        self._prepare(pending, scaling, template=True)
        self.state.update({item.param: item.state for item in pending if not item.missing})
        self._template = True

    def _prepare(self, pending: list[Pending], scaling: Scaling, *, template: bool = False) -> None:
        """Bring every parameter's state into the form its mode prescribes."""
        for item in pending:
            state = item.state = self.state.get(item.param) or {}
            on_device = numbers_on_device(item, scaling)
            written = self._written.get(item.param)
            if "master_param" not in state and (former := former_weight(item.param, written)) is not None:
                state["master_param"] = former
            conform(state, item.param, item.options, step_on_device=on_device, template=template)
            if "master_param" in state:
                adopt_edits(item.param, state["master_param"], written)

    def _run(self, pending: list[Pending], scaling: Scaling, allocation_only: bool) -> None:
        """Measure, scale and update.

        Nothing is written before every exact tensor is measured, and measured on all ranks that hold a part of it.
        Tensors whose scales are known beforehand (one-pass mode, or neither gate nor radial bound) are updated and
        measured in one go.
        """
        works, domains = sort_into_works(pending, scaling), self._sharding.domains
        replayable = [work for work in works if work.engine.numbers_on_device and work.domain is None]
        works = [work for work in works if work not in replayable]
        replay = self._compiled(replayable, scaling) if replayable else None
        early, late = [work for work in works if work.early], [work for work in works if not work.early]
        measure_lookahead(works, domains)
        measure(late)
        if replay is not None:
            self._launch(replay, replayable, scaling, keep=not works and not domains)
        update(early, gather=True)
        if domains:
            overflow, busy = combine(works, domains, self._flags(scaling, allocation_only))
            if allocation_only and not busy.item():
                self._allocate(pending, scaling)
                return
            if scaling.overflow is not None and scaling.found_inf is None and overflow.item():
                return
            late = [work for work in late if work.items]
            for work in late:
                work.batch.skip = None if scaling.found_inf is None else overflow.to(work.batch.device) != 0
        update(late, gather=False)
        for work in early + late:
            self._finish(work)
        for work in early + late:  # last: its warning may be an error
            self._count_nonfinite(rule.Sums.of(work.sums))

    # ---- steps of the Triton engine ----------------------------------------------------------------------------------

    def _replayed(self) -> bool:
        """Take the step by the launches of the last one, if what they were built from still holds."""
        replay = self._replay
        if replay is None:
            return False
        scaling = self._scaling([])
        if replay.holds(self.param_groups, self.state, scaling):
            if scaling is not None:
                replay.run(scaling)
                if replay.saw_whole_nonfinite:
                    self._warn_of_nonfinite()
            return True
        self._end_replay(replay)
        return False

    def _compiled(self, works: list[Work], scaling: Scaling) -> Replay:
        """The launches of the Triton engine's works, compiled: what fails to compile must fail before it writes."""
        replay = Replay(works)
        try:
            replay.compile(scaling)
        except compile_errors() as error:
            reason = f"its kernels did not compile ({type(error).__name__}: {error})"
            raise TritonFailed(works, reason) from error
        return replay

    def _launch(self, replay: Replay, works: list[Work], scaling: Scaling, *, keep: bool) -> None:
        """Run the launches; with `keep`, remember them for the next step."""
        replay.run(scaling)
        self.state.update({item.param: item.state for work in works for item in work.items})
        replay.remember(self.param_groups, self.state)
        self._replay = replay
        if not (keep and replay.is_steady):
            self._end_replay(replay)

    def _end_replay(self, replay: Replay) -> None:
        """Take over what the launches know and the optimizer must not forget."""
        self._replay = None
        self._written.update(replay.written())
        for device, count in replay.nonfinite_counts():
            self._nonfinite[device] = self._nonfinite.get(device, 0) + count

    def _flags(self, scaling: Scaling, allocation_only: bool) -> Tensor:
        """What the ranks tell each other: whether gradients overflowed, whether there is more to do than allocating."""
        device = self._sharding.domains[0].device
        flags = torch.tensor([0.0, float(not allocation_only)], dtype=torch.float64, device=device)
        if scaling.overflow is not None:
            flags[0] = scaling.overflow.reshape(())
        return flags

    def _finish(self, work: Work) -> None:
        """Count the step, keep the scales, note our own write."""
        batch, scales = work.batch, work.new_kept
        done = 1 if batch.skip is None else torch.logical_not(batch.skip).to(torch.int64)
        for number, item in enumerate(work.items):
            state = self.state[item.param] = item.state
            state["step"] += done
            if batch.options.master_weights != "none":
                self._written[item.param] = Written.of(item.param)
            if batch.options.fused_single_pass:
                for key, scale in zip(KEPT_SCALES, (scales.cautious[number], scales.bound[number]), strict=True):
                    old = state.get(key)
                    state[key] = (
                        scale.clone() if batch.skip is None or old is None else torch.where(batch.skip, old, scale)
                    )

    # ---- non-finite gradients --------------------------------------------------------------------------------------

    def _count_nonfinite(self, sums: rule.Sums) -> None:
        device = sums.nonfinite.device
        total = self._nonfinite.get(device)
        self._nonfinite[device] = sums.nonfinite.sum() if total is None else total.add_(sums.nonfinite.sum())
        if device.type == "cpu" and bool(((sums.nonfinite == sums.numel) & (sums.numel > 0)).any()):
            self._warn_of_nonfinite()

    def _warn_of_nonfinite(self) -> None:
        if self._warned_nonfinite:
            return
        self._warned_nonfinite = True
        warnings.warn(
            "every element of a parameter's gradient is NaN or infinite and counts as 0: the parameter gets decay and "
            "momentum only. A clipped infinite norm does this; so does a loss that is NaN. "
            "optimizer.nonfinite_grad_count() counts such elements.",
            RuntimeWarning,
            stacklevel=2,
        )

    def nonfinite_grad_count(self) -> int:
        """Number of NaN and infinite gradient elements seen so far by this process; each counted as 0 in the rule.

        The count is kept on the device; asking for it waits for the device.
        """
        running = [] if self._replay is None else self._replay.nonfinite_counts()
        return int(sum(float(count) for _, count in [*self._nonfinite.items(), *running]))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups' options, in torch's layout; a process group is saved as None."""
        # Registered for this call only, so that it runs before the user's hooks, which may rewrite the file.
        handle = self.register_state_dict_post_hook(lambda _, saved: without_process_group(saved), prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state written by this class or by the public luminav 1.3.x.

        Every tensor gets the dtype that the mode prescribes and is a private copy. The rule's options come from the
        file, with a log line for each that differs; ``execution``, ``process_group``, ``fsdp_sync`` and ``capturable``
        stay as they are in this process.

        Args:
            state_dict: What :meth:`state_dict` returned. Not changed.

        Raises:
            ValueError: The groups or shapes do not fit, a tensor is missing, or another optimizer wrote the file;
                nothing has changed then.
        """
        # Registered for this call only, so that it runs after the user's hooks, which may rewrite the file.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: seal(loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "param_groups" not in self.__dict__:  # unpickled or deep-copied
            self._forget_process()
            super().__setstate__(state)
            return
        super().__setstate__(self._unsealed(state))
        if self._replay is not None:
            self._end_replay(self._replay)
        self._written.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _unsealed(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Groups and state of a file, checked, in the form this optimizer keeps them. Changes nothing itself."""
        groups = [
            loaded_group(saved, current, number)
            for number, (saved, current) in enumerate(zip(loaded["param_groups"], self.param_groups, strict=True))
        ]
        state = type(self.state)(dict)  # a defaultdict, as the base class keeps it
        index = 0
        for group in groups:
            options = Options.from_group(group)
            for param in group["params"]:
                sealed = loaded["state"].get(param)
                if isinstance(sealed, Sealed):
                    entry = loaded_state(sealed.entry, param, options, f"state[{index}]")
                    if entry is not None:
                        state[param] = entry
                index += 1
        return {**loaded, "state": state, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        groups = [{**group, "process_group": None} for group in self.param_groups]
        return {"defaults": {**self.defaults, "process_group": None}, "state": self.state, "param_groups": groups}

    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The model's state dict with FP32 weights.

        Args:
            model: The model whose parameters this optimizer trains.

        Returns:
            Name to tensor as in ``model.state_dict()``. Parameters that have a master weight give a copy of it, other
            16-bit parameters are widened to FP32; buffers, and FP32 and FP64 parameters, are what the model holds.
        """
        exported = model.state_dict()
        for name, param in model.named_parameters(remove_duplicate=False):
            if name not in exported or param.dtype not in (torch.float16, torch.bfloat16):
                continue
            written = self._written.get(param)
            master = self.state.get(param, {}).get("master_param")
            if master is None:
                master = former_weight(param, written)
            if master is not None:
                adopt_edits(param, master, written)
            exported[name] = (param.detach() if master is None else master).to(torch.float32, copy=True)
        return exported

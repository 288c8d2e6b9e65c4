"""LuminaV: options and groups in, checkpoints in and out. What a step does is in ``rule.py``, how in ``stepper.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from luminav.checkpoints import (
    Sealed,
    check_is_dict,
    loaded_group,
    loaded_state,
    make_saveable,
    report_dropped,
    report_missing_masters,
    seal,
)
from luminav.diagnostics import Report, watching
from luminav.engines import counts_on_device
from luminav.extents import check_values
from luminav.hyperparameters import OPTIONS, Options, naming_unknown_options
from luminav.modes import ordinary_mode
from luminav.param_groups import check_model, num_foreign
from luminav.pending import check_layout, check_param
from luminav.rounding import SIXTEEN_BIT
from luminav.state import adopt_edits, former_weight, joined
from luminav.stepper import Share, Stepper


def checked_params(params: Any) -> Any:
    """What an optimizer is given to train, iterated over once, with a way out in the messages for what it cannot be."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"params must be parameters, got a module, {type(params).__name__}. Pass model.parameters().")
    if isinstance(params, (Tensor, dict, set)):
        return params  # refused by the base class, in the words that users of torch's optimizers know
    params = list(params)
    if not params:
        raise ValueError(
            "optimizer got an empty parameter list. Has the generator been used before, or is every parameter frozen?"
        )
    return params


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
        fused_single_pass: One pass over memory with scales kept from earlier steps; needs a variance: ``buffer=2`` or
            ``block_variance=True``.
        ema_decay: Memory κ of the kept scales, in [0, 1).
        fsdp_sync: The parameters are plain shards whose sums are taken over the process group.
        execution: Engine: "auto", "triton", "foreach", "single" or "compile".
        seed: Key of the rounding noise, an int in [0, 2⁶³).
        maximize: Maximise instead of minimise.
        capturable: Keep the step count and per-step numbers on the device.
        process_group: Process group of the plain shards.
        split_master_weights: Keep the FP32 master of a BF16 weight as the weight itself and a 16-bit remainder, to the
            same bits in half the memory. False keeps a whole ``master_param``.
        state_bits: 8 keeps the moments of matrices in 8-bit codes, with a power of two for every 64 elements of a row;
            vectors, matrices of fewer than 4096 elements and rows that are no multiple of 64 keep 16. Default 16: the
            parameter's dtype.
        block_variance: With ``buffer=1``: keep a variance of rank 1 in every tile of 64 rows (``param[i]``, flattened)
            and 64 columns of a matrix, as BF16 means of the tile's rows and columns, in place of one RMS per tensor;
            where ``state_bits=8`` would keep 16 bits, a variance for each element. Default False.

    Raises:
        ValueError: An option is out of range, or two exclude each other.
        TypeError: An option or a parameter has the wrong type, or an option does not exist; complex parameters are
            not supported.
        RuntimeError: The engine asked for cannot run here.

    Every option can be overridden per parameter group, with the same spellings. State per parameter: ``step`` (int64),
    ``exp_avg``, ``exp_avg_sq`` (with a variance), ``exp_avg_sq_col`` (if it is one of tiles), ``exp_avg_scale`` and
    ``exp_avg_sq_scale`` (8-bit codes), in "semi" and "full" ``master_remainder`` (int16, BF16 parameters) or
    ``master_param`` (FP32, FP16 ones), and in one-pass mode ``cautious_scale`` and ``bound_scale``.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf around step()

    @naming_unknown_options
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
        split_master_weights: bool = True,
        state_bits: int = 16,
        block_variance: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in OPTIONS}
        options = Options.from_group(given)
        self._stepper = Stepper(self)
        super().__init__(checked_params(params), {name: getattr(options, name) for name in OPTIONS})

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
        options = Options.from_group({**self.defaults, **group})
        params = group["params"]
        if not isinstance(params, (Tensor, set)):
            params = list(params)
        names = dict(enumerate(group.get("param_names", ())))
        for number, param in enumerate([params] if isinstance(params, Tensor) else params):
            name, tensor = param if isinstance(param, tuple) else (names.get(number), param)
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                check_layout(tensor)
                check_param(tensor, options, name)
        return {**group, "params": params, **{name: getattr(options, name) for name in OPTIONS}}

    # ---- the state -------------------------------------------------------------------------------------------------

    # A property, so that a step knows whether anybody may have changed it. It is kept where the base class keeps it.

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """What is kept per parameter: a dict of tensors for each. Edits count from the next step on."""
        if "state" not in self.__dict__:
            raise AttributeError("the optimizer has no state yet")
        state: defaultdict[Tensor, Any] = self.__dict__["state"]
        self._stepper.custody.hand_out()  # while it is held: another thread may be in a step
        return state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if "state" in self.__dict__:  # otherwise the base class's first one
            self._stepper.custody.hand_out()
        self.__dict__["state"] = state

    # ---- the step --------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, first, with gradients enabled.

        Returns:
            What the closure returned, else None.

        Raises:
            TypeError: A sparse or complex gradient.
            ValueError: A bad option in a group; a gradient or a state that does not fit its parameter.
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
    def _step(self, share: Share | None = None) -> None:
        with ordinary_mode():
            self._stepper.step(share)

    def nonfinite_grad_count(self) -> int:
        """Number of NaN and infinite gradient elements seen so far by this process; each counted as 0 in the rule.

        The count is kept on the device; asking for it waits for the device.
        """
        return self._stepper.num_nonfinite()

    def diagnostics(self) -> AbstractContextManager[Report]:
        """Watch the step taken inside a ``with``: gate, scales, size of the update, and rounding, by parameter.

        Nothing is computed, allocated or waited for in steps outside the ``with``. Inside it, a step costs a copy of
        the weights and about one more exact step, and the host waits for the device once.

        Returns:
            A context manager that gives a :class:`luminav.diagnostics.Report`: parameter name (or position) to
            :class:`luminav.diagnostics.Figures`, filled when the step is done.

        Raises:
            RuntimeError: From the step: it was given a closure, a parameter is sharded, or gradient release is on.
        """
        return watching(self._stepper)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups' options, in torch's layout; a process group is saved as None.

        The dicts in it are copies, and its tensors share memory with those of the optimizer.
        """
        groups, custody = self.param_groups, self._stepper.custody
        note = custody.note()

        def before(_: Optimizer) -> None:
            nonlocal note
            note = custody.note()

        def after(_: Optimizer, saved: dict[str, Any]) -> None:
            make_saveable(saved, groups)
            custody.restore(note)  # nothing of what the base class has read is left in the file

        # Registered for this call only: right before the base class reads, and before the user's hooks, which may
        # rewrite the file.
        handles = [self.register_state_dict_pre_hook(before), self.register_state_dict_post_hook(after, prepend=True)]
        try:
            return super().state_dict()
        finally:
            for handle in handles:
                handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state written by this class or by the public luminav 1.3.x.

        Every tensor gets the dtype that the mode prescribes and is a private copy. The rule's options come from the
        file, with a log line for each that differs; ``execution``, ``process_group``, ``fsdp_sync``, ``capturable``
        and ``split_master_weights`` stay as they are in this process; either form of master weights is taken.

        Args:
            state_dict: What :meth:`state_dict` returned. Not changed.

        Raises:
            TypeError: `state_dict` is no dict.
            ValueError: The groups or shapes do not fit, a tensor is missing or holds what no run saves (NaN, a negative
                variance), or another optimizer wrote the file; nothing has changed then.
        """
        check_is_dict(state_dict)
        # Registered for this call only, so that it runs after the user's hooks, which may rewrite the file.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: seal(loaded, self.param_groups))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "param_groups" not in self.__dict__:  # unpickled or deep-copied
            self._stepper = Stepper(self)
            super().__setstate__(state)
            self._stepper.custody.hand_out()  # after copy.copy() two optimizers have one state
            return
        super().__setstate__(self._unsealed(state))
        self._stepper.forget_writes()
        self._stepper.custody.renew()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _unsealed(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Groups and state of a file, checked, in the form this optimizer keeps them. Changes nothing itself."""
        groups = [
            loaded_group(saved, current, number)
            for number, (saved, current) in enumerate(zip(loaded["param_groups"], self.param_groups, strict=True))
        ]
        state: defaultdict[Tensor, Any] = defaultdict(dict)  # as the base class keeps it
        names: dict[Tensor, str] = {}
        for saved, group in zip(loaded["param_groups"], groups, strict=True):
            options, says_bits = Options.from_group(group), "state_bits" in saved
            for param in group["params"]:
                sealed, names[param] = loaded["state"].get(param), f"state[{len(names)}]"
                if isinstance(sealed, Sealed):
                    on_device = options.capturable or counts_on_device(options.execution, param.device)
                    entry = loaded_state(
                        sealed.entry, param, options, names[param], step_on_device=on_device, says_bits=says_bits
                    )
                    if entry is not None:
                        state[param] = entry
        check_values(state, names)
        report_dropped([key for key in loaded["state"] if not isinstance(key, Tensor)])
        report_missing_masters(state, groups)
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

        Raises:
            TypeError: `model` is no module.
            ValueError: None of its parameters is this optimizer's.
        """
        check_model(model)
        num_foreign(model, self.param_groups)
        exported = model.state_dict()
        all_written = self._stepper.all_written()
        for name, param in model.named_parameters(remove_duplicate=False):
            if name not in exported or param.dtype not in SIXTEEN_BIT:
                continue
            written = all_written.get(param)
            state = self._stepper.state.get(param, {})
            master = state.get("master_param")
            if "master_remainder" in state:
                exported[name] = joined(param, state["master_remainder"])
                continue
            if master is None:
                master = former_weight(param, written)
            if master is not None:
                adopt_edits(param, master, written)
            exported[name] = (param.detach() if master is None else master).to(torch.float32, copy=True)
        return exported

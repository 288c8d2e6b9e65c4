"""A step of the Triton engine that is kept: checked quickly, and launched again.

Most steps differ from the one before in gradient addresses and learning rate only. Working through every option, state
tensor and table again would take longer on the host than the whole step on the device, so a :class:`Replay` remembers
what the launches were built from. If that still holds, a step is a few launches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress, groupby, starmap, zip_longest
from operator import attrgetter, is_, itemgetter, mod
from typing import Any

import torch
from torch import Tensor

from luminav.assembly import Scaling, Work
from luminav.custody import Custody
from luminav.distributed import local
from luminav.engines import give_up_triton
from luminav.engines.batch import ALIGNMENT, NOT_NULL, lie_as_they_read
from luminav.hyperparameters import OPTIONS
from luminav.state import KEPT_SCALES, ParamState, Written


class TritonFailed(Exception):
    """The Triton engine's kernels did not compile. Nothing has been launched."""

    def __init__(self, works: Sequence[Work], reason: str) -> None:
        super().__init__(reason)
        self._works, self._reason = works, reason

    def settle(self) -> None:
        """Let "auto" use another engine from now on, with one warning; raise RuntimeError if Triton was asked for."""
        if any(work.batch.options.execution == "triton" for work in self._works):
            raise RuntimeError(f"execution='triton' cannot run here: {self._reason}.") from self.__cause__
        for device in {work.batch.device for work in self._works}:
            give_up_triton(device, self._reason)
        message = f"luminav uses the foreach engine instead of Triton: {self._reason}."
        warnings.warn(message, RuntimeWarning, stacklevel=5)


_values = itemgetter(*(name for name in OPTIONS if name != "lr"))
_form = attrgetter("dtype", "device", "layout", "shape")


class Replay:
    """The launches of a step, and what they were built from.

    It is made and compiled before anything is written, and touches the optimizer's state only in :meth:`remember`, when
    its first step is done: a step that fails leaves no trace there.

    Args:
        works: The works of a step that the Triton engine serves alone and unsharded.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)
        engine: Any = works[0].engine
        self.early: list[Any] = engine.launches([work.batch for work in works if work.early])
        self.late: list[Any] = engine.launches([work.batch for work in works if not work.early])
        self._launches = self.early + self.late
        pairs = [pair for work in works for pair in zip(work.items, work.batch.steps, strict=True)]
        self._items, self._steps = [item for item, _ in pairs], [step for _, step in pairs]
        self.params = [item.param for item in self._items]
        self._grad_addresses = _addresses([step.present_grad for step in self._steps])
        places = {id(step): place for place, step in enumerate(self._steps)}
        self._places = [[places[id(step)] for step in launch.steps_of] for launch in self._launches]
        self._in_order = [own == list(range(len(self._steps))) for own in self._places]
        self._kernels: list[tuple[Any, list[Any]]] | None = None
        self._watch = Watch([launch.whole_nonfinite for launch in self._launches])
        self._compiled: tuple[bool, bool] | None = None
        self._remembered = False

    def remember(self, groups: list[dict[str, Any]], custody: Custody, *, alone: bool) -> None:
        """Note what the launches were built from, after their first step.

        Args:
            groups: The optimizer's groups.
            custody: The optimizer's state. Step counts and kept scales become views of the tables that kernels write.
            alone: Whether these parameters are all that take a step, so that none of the others may have a gradient.
        """
        served = {id(param) for param in self.params}
        self._group_params = [list(group["params"]) for group in groups]
        params = [param for group in self._group_params for param in group]
        self._idle = [param for param in params if id(param) not in served] if alone else []
        self._watches_all = alone
        self._group_values = [_values(group) for group in groups]
        self._lrs = [group["lr"] for group in groups]
        self._batches = [[work.batch for work in self._works if work.items[0].group == n] for n in range(len(groups))]
        aligned = {id(step): launch.kind.aligned for launch in self._launches for step in launch.steps_of}
        self._alignment = [ALIGNMENT if aligned[id(step)] else 1 for step in self._steps]
        self._forms = [_form(param) for param in self.params]
        self._grad_forms = [_form(step.present_grad) for step in self._steps]
        self._params_are_alike = self._grads_are_alike = never_alike
        self._param_addresses = list(map(Tensor.data_ptr, self.params))
        self._note_state(custody)
        watched = [item for item in self._items if item.options.master_weights != "none"]
        self._written = [(item.param, Written.of(item.param)) for item in watched]
        self._masters = [number for number, item in enumerate(watched) if "master_param" in item.state]
        self._versions = [param._version for param, _ in self._written]
        for item, step in zip(self._items, self._steps, strict=True):
            item.grad = step.grad = None  # or the gradients of this step would stay in memory for good
        self._remembered = True

    def _note_state(self, custody: Custody) -> None:
        """Note the state, which has not been looked at since."""
        self._install_views()
        first_views = [self._items[places[0]].state["step"] for places in self._places]
        kept = [tensor for step in self._steps for tensor in step.kept[1:] if tensor is not None]
        self._state_tensors = kept + first_views
        self._state_addresses = list(map(Tensor.data_ptr, self._state_tensors))
        states = self._states(custody)
        self._state_names = list(self._names(custody, states))
        self._state_values = list(chain.from_iterable(map(dict.values, states)))
        custody.changed()
        self._events, self._looks, self._settled = custody.events, True, False

    def _install_views(self) -> None:
        for launch, places in zip(self._launches, self._places, strict=True):
            for row, place in enumerate(places):
                item = self._items[place]
                item.state["step"] = launch.steps[row]
                if item.options.fused_single_pass:
                    item.state.update(zip(KEPT_SCALES, launch.kept_scales[row].unbind(), strict=True))

    # ---- does it still hold? -----------------------------------------------------------------------------------------

    def holds(self, groups: list[dict[str, Any]], custody: Custody, scaling: Scaling | None) -> bool:
        """Whether a step now would do the same launches. Takes over new gradients and learning rates if so.

        Options, parameters and gradients are compared every time, since anybody may change them without our knowledge;
        state only if somebody may have. Loops are left to C, and no object is looked at that need not be: after a wait
        for the device thousands of small objects are no longer in the cache.
        """
        return (
            self._same_groups(groups)
            and self._same_params()
            and self._same_grads()
            and self._same_state(custody)
            and self._masters_unedited()
            and (scaling is None or _kind_of(scaling) == self._compiled)
        )

    def _same_params(self) -> bool:
        """Whether the weights lie where they lay, in the same form: ``param.data = …`` leaves no other trace."""
        params = self.params
        if not self._params_are_alike(*params):
            if not _have_forms(params, self._forms):
                return False
            self._params_are_alike = likeness(params)
        return list(map(Tensor.data_ptr, params)) == self._param_addresses

    def _same_state(self, custody: Custody) -> bool:
        """Whether the state holds the very same objects, and these the same memory.

        After somebody outside had the state in hand, one step looks at it and the next, if it was left alone since,
        finds out whether it is still held, and so whether all further steps must look. Of the step counts, which lie in
        one table, the first one's address is compared.
        """
        untouched = custody.events == self._events
        if untouched and not self._looks:
            return True
        states = self._states(custody)
        if not all(starmap(is_, zip_longest(self._names(custody, states), self._state_names))):
            return False
        if not all(starmap(is_, zip_longest(chain.from_iterable(map(dict.values, states)), self._state_values))):
            return False
        if list(map(Tensor.data_ptr, self._state_tensors)) != self._state_addresses:
            return False
        if not untouched:
            self._events, self._looks, self._settled = custody.events, True, False
        elif not self._settled:
            self._looks, self._settled = custody.is_lent(states, self._references()), True
        return True

    def _states(self, custody: Custody) -> list[ParamState]:
        """The state of all parameters, or of those of these launches."""
        return custody.of_params() if self._watches_all else list(filter(None, map(custody.state.get, self.params)))

    def _names(self, custody: Custody, states: list[ParamState]) -> Iterator[Any]:
        """Whose the states are, and what is called what in them: of equal objects two may have changed places."""
        return chain(custody.state if self._watches_all else (), chain.from_iterable(states))

    def _references(self) -> Iterator[Any]:
        """What holds state here: each object as often as it is held."""
        fields = chain.from_iterable(vars(step).values() for step in self._steps)
        return chain((item.state for item in self._items), fields, self._state_tensors, self._state_values)

    def _masters_unedited(self) -> bool:
        """Whether nobody has written a weight that has a master, which would have to adopt the edit."""
        return all(self._written[number][0]._version == self._versions[number] for number in self._masters)

    def _same_groups(self, groups: list[dict[str, Any]]) -> bool:
        if [_values(group) for group in groups] != self._group_values:
            return False
        for group, params in zip(groups, self._group_params, strict=True):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                return False
        return all(self._same_lr(number, group) for number, group in enumerate(groups))

    def _same_lr(self, number: int, group: dict[str, Any]) -> bool:
        """Whether a group's learning rate, perhaps a new one, can be taken over."""
        lr, old = group["lr"], self._lrs[number]
        if isinstance(lr, Tensor) or isinstance(old, Tensor):
            same = lr is old and lr.device.type != "cpu"  # on a device it is read there; on the host it must be checked
        else:
            same = lr == old
        if same:
            return True
        try:
            checked = OPTIONS["lr"].check("lr", lr)
        except (TypeError, ValueError):
            return False  # the step that follows refuses it
        self._lrs[number] = lr
        for batch in self._batches[number]:
            batch.options = replace(batch.options, lr=checked)
        return True

    def _same_grads(self) -> bool:
        """Whether gradients of the same form are there; a parameter without one is inactive for this step."""
        if any(param.grad is not None for param in self._idle):
            return False
        grads = [grad for param in self.params if (grad := param.grad) is not None]
        if len(grads) == len(self.params):
            if not self._grads_are_alike(*grads):
                if not _have_forms(grads, self._grad_forms):
                    return False
                self._grads_are_alike = likeness(grads)
            addresses = _addresses(grads)
        else:
            has_grad = [param.grad is not None for param in self.params]
            if not _have_forms(grads, list(compress(self._grad_forms, has_grad))):
                return False
            found = iter(_addresses(grads))
            addresses = [next(found) if has else 0 for has in has_grad]
        if addresses != self._grad_addresses:
            if any(map(mod, addresses, self._alignment)):
                return False
            self._grad_addresses = addresses
        return True

    # ---- launch ------------------------------------------------------------------------------------------------------

    def compile(self, scaling: Scaling) -> None:
        """Compile all kernels that a step under this kind of scaling needs; raises what the compiler raises."""
        for launch in self._launches:
            launch.compile(exact=launch in self.late, **_on_device(scaling, launch.device))
        self._compiled = _kind_of(scaling)

    def run(self, scaling: Scaling) -> None:
        """Take the step. Nothing of an exact tensor is written before every exact tensor is measured."""
        addresses = self._grad_addresses
        for launch, places, in_order in zip(self._launches, self._places, self._in_order, strict=True):
            launch.refresh(addresses if in_order else [addresses[place] for place in places])
        if self._kernels is None:
            self._kernels = self._launch_and_note(scaling)
        elif self._kernels:
            for launch, kernels in self._kernels:
                launch.launch_again(kernels)
        else:
            self._launch(scaling)
        torch.autograd.graph.increment_version(self.params)
        self._watch.after_step()
        if self._remembered and self._written:
            self._versions = [param._version for param, _ in self._written]

    def _launch_and_note(self, scaling: Scaling) -> list[tuple[Any, list[Any]]]:
        """Launch, and note the kernels by device and in their order, so that no further step asks which they are.

        None are noted where one has to be looked up in every step, or is not compiled ahead.
        """
        noted: list[tuple[Any, Any]] = []
        for launch in self._launches:
            launch.noted = noted
        self._launch(scaling)
        for launch in self._launches:
            launch.noted = None
        if not all(kernel for _, kernel in noted):
            return []
        runs = [list(run) for _, run in groupby(noted, key=lambda pair: pair[0].device)]
        return [(run[0][0], [kernel for _, kernel in run]) for run in runs]

    def _launch(self, scaling: Scaling) -> None:
        for launch in self._launches:
            launch.compute_numbers(**_on_device(scaling, launch.device), kept=launch in self.early)
            if not launch.kind.dual:
                launch.measure_lookahead()
        for launch in self.late:
            launch.measure()
        for launch in self.early:
            launch.update(gather=True)
            launch.scale(reduce=True, blend=launch.one_pass)
        for launch in self.late:
            launch.scale(reduce=True, exact=True)
            launch.update(gather=False)

    @property
    def is_steady(self) -> bool:
        """Whether the next step can do the same launches.

        It does not where one-pass mode took its exact first step. A DTensor's local gradient is another object in every
        step, so those are looked up anew.
        """
        first_of_one_pass = any(work.items[0].options.fused_single_pass and not work.early for work in self._works)
        return not first_of_one_pass and all(param is local(param) for param in self.params)

    def written(self) -> list[tuple[Tensor, Written]]:
        """The weights that have a master, or may get one, as they were after our last write."""
        return [
            (param, weight if weight.versions[0] == version else weight._replace(versions=(version, version)))
            for (param, weight), version in zip(self._written, self._versions, strict=True)
        ]

    @property
    def saw_whole_nonfinite(self) -> bool:
        """Whether a gradient without any finite element is known to have come; the host learns of it with delay."""
        return self._watch.seen

    def nonfinite_counts(self) -> list[tuple[torch.device, Tensor]]:
        """Number of non-finite gradient elements seen by each launch, on its device."""
        return [(launch.device, launch.nonfinite_counts.sum()) for launch in self._launches]


class Watch:
    """Flags on devices, read by the host now and then without waiting: it looks at a copy ordered long before."""

    EVERY = 64  # steps between two looks, far more than the host can be ahead of the device

    def __init__(self, flags: list[Tensor]) -> None:
        self.seen = False
        self._steps = 0
        self._flags = flags
        self._copies = [
            torch.zeros(1, dtype=flag.dtype, device="cpu", pin_memory=flag.device.type != "cpu") for flag in flags
        ]

    def after_step(self) -> None:
        """Order a copy after the first step and every 64 steps from then on; look at it 32 steps later."""
        if self._steps % self.EVERY == 0:
            for copy, flag in zip(self._copies, self._flags, strict=True):
                copy.copy_(flag, non_blocking=True)
        elif self._steps % self.EVERY == self.EVERY // 2:
            self.seen = any(copy.item() for copy in self._copies)
        self._steps += 1


def _kind_of(scaling: Scaling) -> tuple[bool, bool]:
    """What the kernels are specialised for: whether gradients are scaled, and whether a step may be skipped."""
    return scaling.grad_scale is not None, scaling.found_inf is not None


def _on_device(scaling: Scaling, device: torch.device) -> dict[str, Tensor | None]:
    scale, found_inf = scaling.grad_scale, scaling.found_inf
    if isinstance(scale, float):
        scale = torch.tensor(scale, dtype=torch.float64)
    return {
        "grad_scale": None if scale is None else torch.as_tensor(scale, device=device),
        "found_inf": None if found_inf is None else found_inf.to(device),
    }


def _addresses(grads: Sequence[Tensor]) -> list[int]:
    addresses = list(map(Tensor.data_ptr, grads))
    return [address or NOT_NULL for address in addresses] if 0 in addresses else addresses


def _have_forms(tensors: Sequence[Tensor], forms: list[Any]) -> bool:
    """Whether these are tensors of these forms, and lie in memory as they read."""
    return list(map(_form, tensors)) == forms and lie_as_they_read(tensors)


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A test whether other tensors have these ones' types, dtypes, devices, layouts, shapes and strides, in one call.

    It is what torch.compile guards a graph's inputs with, and like all that is private in torch it may be gone one day:
    then, as for tensors that differ in their strides only, the test says False, and :func:`_have_forms` decides.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    maker = getattr(guards, "TensorGuards", None)
    if maker is None:
        return never_alike
    check: Callable[..., bool] = maker(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def never_alike(*tensors: Tensor) -> bool:
    """The test that knows of no likeness."""
    return False

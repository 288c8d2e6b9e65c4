"""What a kept step was built from, and whether that still holds.

Most steps differ from the one before in gradient addresses and learning rate only. Working through every option, state
tensor and table again would take longer on the host than the whole step on the device. So a step is compared with the
last one, quickly, and what was made for that serves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress, starmap, zip_longest
from operator import attrgetter, is_, itemgetter, mod
from typing import Any

import torch
from torch import Tensor

from luminav.custody import Custody
from luminav.distributed import held, is_dtensor
from luminav.engines.batch import ALIGNMENT, NOT_NULL, Batch, TensorStep, lie_as_they_read
from luminav.hyperparameters import OPTIONS
from luminav.pending import Pending
from luminav.state import ParamState, Written, versions
from luminav.works import Work

_values = itemgetter(*(name for name in OPTIONS if name != "lr"))
_form = attrgetter("dtype", "device", "layout", "shape")
_placement = attrgetter("device_mesh", "placements")


class Premises:
    """What a step was built from.

    Args:
        works: The works of a step that the Triton engine serves alone.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)
        pairs = [pair for work in works for pair in zip(work.items, work.batch.steps, strict=True)]
        self.items: list[Pending] = [item for item, _ in pairs]
        self.steps: list[TensorStep] = [step for _, step in pairs]
        self.params = [item.param for item in self.items]
        self.parts = [step.param for step in self.steps]
        """What of the parameters is here: of DTensors the local tensors."""
        self.grad_addresses = _addresses([step.present_grad for step in self.steps])
        """Of the gradients of the next step, 0 for none."""
        self.is_remembered = False

    def remember(
        self,
        groups: list[dict[str, Any]],
        custody: Custody,
        *,
        alone: bool,
        in_vectors: Sequence[TensorStep],
        tables: Sequence[Tensor],
    ) -> None:
        """Note what the step was built from, once it has been taken.

        Args:
            groups: The optimizer's groups.
            custody: The optimizer's state.
            alone: Whether these parameters are all that take a step, so that none of the others may have a gradient.
            in_vectors: The steps of tensors that are loaded in vectors: their addresses must be multiples of 16.
            tables: Of state that lies in tables, one tensor of each table.
        """
        served = {id(param) for param in self.params}
        self._group_params = [list(group["params"]) for group in groups]
        params = [param for group in self._group_params for param in group]
        self._idle = [param for param in params if id(param) not in served] if alone else []
        self._watches_all = alone
        self._group_values = [_values(group) for group in groups]
        self._group_sizes = list(map(len, groups))
        self._lrs = [group["lr"] for group in groups]
        self._batches: list[list[Batch]] = [
            [work.batch for work in self._works if work.items[0].group == number] for number in range(len(groups))
        ]
        vectors = set(map(id, in_vectors))
        self._alignment = [ALIGNMENT if id(step) in vectors else 1 for step in self.steps]
        self._note_forms()
        self._note_state(custody, tables)
        watched = [item for item in self.items if item.options.master_weights != "none"]
        self._written = [(item.param, Written.of(item.param)) for item in watched]
        self._masters = [number for number, item in enumerate(watched) if "master_param" in item.state]
        self.is_remembered = True
        self.note_writes()
        for item, step in zip(self.items, self.steps, strict=True):  # or these would stay in memory for good:
            item.grad = step.grad = None
            step.step = step.kept_scales = None  # in tables by now; each number was an allocation of its own

    def _note_forms(self) -> None:
        self._are_dtensors = list(map(is_dtensor, self.params))
        self._placements = list(map(_placement, compress(self.params, self._are_dtensors)))
        self._forms = Forms(self.parts)
        self._grad_forms = Forms([step.present_grad for step in self.steps])
        self._param_addresses = list(map(Tensor.data_ptr, self.parts))

    def _note_state(self, custody: Custody, tables: Sequence[Tensor]) -> None:
        """Note the state, which has not been looked at since."""
        kept = [tensor for step in self.steps for tensor in step.kept[1:] if tensor is not None]
        self._state_tensors = [*kept, *tables]
        self._state_addresses = list(map(Tensor.data_ptr, self._state_tensors))
        states = self._states(custody)
        self._state_names = list(self._names(custody, states))
        self._state_values = list(chain.from_iterable(map(dict.values, states)))
        custody.changed()
        self._events, self._looks, self._settled = custody.events, True, False

    # ---- does it still hold? -----------------------------------------------------------------------------------------

    def hold(self, groups: list[dict[str, Any]], custody: Custody) -> bool:
        """Whether all is as it was. Takes over new gradients and learning rates if so.

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
        )

    def _same_groups(self, groups: list[dict[str, Any]]) -> bool:
        if [_values(group) for group in groups] != self._group_values:
            return False
        if list(map(len, groups)) != self._group_sizes:
            return False  # a new key may be a misspelt option, which the step that follows refuses
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

    def _same_params(self) -> bool:
        """Whether the weights lie where they lay, in the same form: ``param.data = …`` leaves no other trace."""
        parts = self._placed(self.params)
        if parts is None or not self._forms.fit(parts):
            return False
        return list(map(Tensor.data_ptr, parts)) == self._param_addresses

    def _same_grads(self) -> bool:
        """Whether gradients of the same form are there; a parameter without one is inactive for this step."""
        if any(param.grad is not None for param in self._idle):
            return False
        present = [grad for param in self.params if (grad := param.grad) is not None]
        if len(present) == len(self.params):
            grads = self._placed(present)
            if grads is None or not self._grad_forms.fit(grads):
                return False
            addresses = _addresses(grads)
        else:
            has_grad = [param.grad is not None for param in self.params]
            if self._placements or not self._grad_forms.fit_some(present, has_grad):
                return False
            found = iter(_addresses(present))
            addresses = [next(found) if has else 0 for has in has_grad]
        if addresses != self.grad_addresses:
            if any(map(mod, addresses, self._alignment)):
                return False
            self.grad_addresses = addresses
        return True

    def _placed(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """What is here of all parameters or all gradients; None if any is not placed as its parameter was."""
        if not self._placements:
            return tensors
        ours = list(map(is_dtensor, tensors))
        if ours != self._are_dtensors or list(map(_placement, compress(tensors, ours))) != self._placements:
            return None
        return [part.wait() if hasattr(part, "wait") else part for part in map(held, tensors)]

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
        """The state of all parameters, or of those of these works."""
        return custody.of_params() if self._watches_all else list(filter(None, map(custody.state.get, self.params)))

    def _names(self, custody: Custody, states: list[ParamState]) -> Iterator[Any]:
        """Whose the states are, and what is called what in them: of equal objects two may have changed places."""
        return chain(custody.state if self._watches_all else (), chain.from_iterable(states))

    def _references(self) -> Iterator[Any]:
        """What holds state here: each object as often as it is held."""
        fields = chain.from_iterable(vars(step).values() for step in self.steps)
        return chain((item.state for item in self.items), fields, self._state_tensors, self._state_values)

    # ---- weights with masters ----------------------------------------------------------------------------------------

    def _masters_unedited(self) -> bool:
        """Whether nobody has written a weight that has a master, which would have to adopt the edit."""
        return all(versions(self._written[number][0]) == self._versions[number] for number in self._masters)

    def note_writes(self) -> None:
        """The step has written the weights: version counters differ from what they were."""
        if self.is_remembered:
            self._versions = [versions(param) for param, _ in self._written]

    def written(self) -> list[tuple[Tensor, Written]]:
        """The weights that have a master, or may get one, as they were after our last write."""
        return [
            (param, weight if weight.versions == now else weight._replace(versions=now))
            for (param, weight), now in zip(self._written, self._versions, strict=True)
        ]


def _addresses(grads: Sequence[Tensor]) -> list[int]:
    addresses = list(map(Tensor.data_ptr, grads))
    return [address or NOT_NULL for address in addresses] if 0 in addresses else addresses


class Forms:
    """The forms of tensors, with a quick test of others.

    Args:
        tensors: The tensors, of which none is kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._forms = list(map(_form, tensors))
        self._are_alike: Callable[..., bool] = never_alike

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these have the forms, one by one, and lie in memory as they read."""
        if not self._are_alike(*tensors):
            if not self.fit_some(tensors, [True] * len(tensors)):
                return False
            self._are_alike = likeness(tensors)
        return True

    def fit_some(self, tensors: Sequence[Tensor], which: Sequence[bool]) -> bool:
        """As :meth:`fit`, where there are tensors for some of the forms only."""
        return list(map(_form, tensors)) == list(compress(self._forms, which)) and lie_as_they_read(tensors)


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A test whether other tensors have these ones' types, dtypes, devices, layouts, shapes and strides, in one call.

    It is what torch.compile guards a graph's inputs with, and like all that is private in torch it may be gone one day:
    then, as for tensors that differ in their strides only, the test says False, and :class:`Forms` compares them.
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

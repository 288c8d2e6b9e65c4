"""Who may have changed an optimizer's state: only somebody who was handed it, or holds a part of it still.

A model has thousands of state tensors, and looking at each before every step takes longer than the rest of a kept step.
``optimizer.state`` is a property, so that it is known whether there is a reason to look.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import ne
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

HELD_ONCE = next(map(sys.getrefcount, [object()]))
"""What Python counts for an object that one list holds, seen through ``map``."""


class Custody:
    """Notes when an optimizer's state is handed out, and finds out whether it is still held.

    Args:
        optimizer: Whose state it is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handed_out = False
        self.events = 0
        """Rises whenever state was handed out, or changed other than by the launches of a kept step."""

    @property
    def state(self) -> Any:
        """The state, for the package's own use, which calls :meth:`changed` where it changes it."""
        return vars(self._optimizer)["state"]

    def of_params(self) -> list[dict[str, Any]]:
        """What is kept for each parameter. Under other keys anybody may keep anything, as in torch's optimizers."""
        return [kept for key, kept in self.state.items() if isinstance(key, Tensor)]

    def changed(self) -> None:
        """The package has changed state, or is about to."""
        self.events += 1

    def hand_out(self) -> None:
        """Somebody outside gets the state, or has given it."""
        self._handed_out = True
        self.events += 1

    def renew(self) -> None:
        """The state is a new one that nobody outside has seen."""
        self._handed_out = False
        self.events += 1

    def note(self) -> tuple[bool, int]:
        """What is known now, for :meth:`restore`."""
        return self._handed_out, self.events

    def restore(self, note: tuple[bool, int]) -> None:
        """Forget what came since: what was handed out is known to be gone."""
        self._handed_out, self.events = note

    def is_lent(self, states: Sequence[dict[str, Any]], ours: Iterable[Any]) -> bool:
        """Whether anybody outside may still hold the state, one of these parts of it, or anything in those.

        Python counts the references to each object: one more than our own is somebody's, who may use it at any time.
        If a count is off for another reason, the state only counts as lent. Who has a view of a tensor, and not the
        tensor, can write to its memory but cannot have it lie elsewhere, unless by resizing the storage of both, which
        nothing here notices.

        Args:
            states: State of parameters, in a list that holds each once.
            ours: Our further references to these, and to what is in them, those of the state itself left out; an object
                comes as often as it is held.
        """
        if not self._handed_out:
            return False
        if list(map(sys.getrefcount, [self.state])) != [HELD_ONCE + 1]:  # and by the optimizer's dict
            return True
        values = list(chain.from_iterable(map(dict.values, states)))
        own = Counter(map(id, chain(ours, self.state.values(), values)))
        expected = map(HELD_ONCE.__add__, map(own.__getitem__, map(id, chain(states, values))))
        return any(map(ne, map(sys.getrefcount, chain(states, values)), expected))

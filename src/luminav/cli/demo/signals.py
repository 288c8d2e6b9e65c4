"""Ctrl-C and polite kills: noted when they come, obeyed between two steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from luminav.cli.errors import Interrupted


class StopRequest:
    """Whether somebody asked the process to stop. :meth:`check` obeys, at a moment when everything can be saved."""

    def __init__(self) -> None:
        self._signal_number: int | None = None

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle the signal; a second one takes effect at once."""
        if self._signal_number is not None:
            raise KeyboardInterrupt
        self._signal_number = signal_number

    def check(self) -> None:
        """Leave if a stop was asked for.

        Raises:
            Interrupted: It was.
        """
        if self._signal_number is not None:
            raise Interrupted(self._signal_number)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take SIGINT and SIGTERM as requests to stop while the block runs."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

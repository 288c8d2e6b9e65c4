"""How a command ends early."""

from __future__ import annotations


class CommandError(Exception):
    """Something the user can mend. The message is one line; the program prints it and ends with status 2."""


class Interrupted(Exception):
    """Ctrl-C or a polite kill, seen at a moment when everything can be saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

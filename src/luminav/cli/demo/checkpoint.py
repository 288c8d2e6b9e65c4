"""A run's folder: its lock, its checkpoints, and files that are either whole or not there."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from luminav.cli.errors import CommandError

FORMAT = 1
_KEYS = frozenset({"format", "contender", "config", "step", "model", "optimizer", "scaler", "history", "result"})
_SET_ASIDE = "previous"

OUTPUT_FILES = ("report.html", "loss.png", "metrics.csv", "summary.json")
"""What a finished run leaves beside its checkpoints."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file such that a kill at any moment leaves either the old content or the new, whole and on the disk.

    Raises:
        CommandError: It cannot be written; the old content is still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}.") from error


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint for :func:`load_checkpoint`, atomically."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, on the CPU.

    Raises:
        CommandError: The file is damaged, or no checkpoint of this demo.
    """
    advice = "Restore it, or start anew with --overwrite (the folder's files are kept under previous/)."
    try:
        # torch.load itself does not look at the checksums, and would take flipped bits for weights.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() is not None
        checkpoint = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CommandError(f"cannot read the checkpoint {path}: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CommandError(f"the checkpoint {path} is damaged or cut short. {advice}") from error
    if checkpoint is None:
        raise CommandError(f"the checkpoint {path} is damaged: its checksums do not fit. {advice}")
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _KEYS or checkpoint["format"] != FORMAT:
        raise CommandError(f"{path} is not a checkpoint of this version of the demo. {advice}")
    return checkpoint


class RunFolder:
    """The folder of one run. What a run is, is in its checkpoints alone; every other file is made from them.

    Args:
        path: The folder; made by :meth:`locked` if it is not there.
        keys: Names of the contenders, in the order in which they train.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        self.path = path
        self.keys = keys

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other demos out of it. The lock goes with the process, however that ends.

        Raises:
            CommandError: The folder cannot be written, or another demo has it.
        """
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            stream = (self.path / ".lock").open("a+b")
        except OSError as error:
            raise CommandError(
                f"cannot write to {self.path}: {error.strerror}. Try another folder with --out."
            ) from error
        with stream:
            if not _try_lock(stream):
                raise CommandError(f"another demo is writing to {self.path}. Wait for it, or choose another --out.")
            yield

    def checkpoint_path(self, key: str) -> Path:
        """Return where a contender's checkpoint lies."""
        return self.path / "checkpoints" / f"{key}.pt"

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Load the checkpoints that are there, by contender."""
        found = {key: self.checkpoint_path(key) for key in self.keys}
        return {key: load_checkpoint(path) for key, path in found.items() if os.path.lexists(path)}

    def set_aside(self) -> bool:
        """Move the run that lies here to ``previous/``, in place of what was there. Other files are left alone.

        Returns:
            Whether there was one.
        """
        previous = self.path / _SET_ASIDE
        found = [self.path / name for name in OUTPUT_FILES] + [self.checkpoint_path(key) for key in self.keys]
        found = [path for path in found if path.exists()]
        if not found:
            return False
        previous.mkdir(exist_ok=True)
        for name in (*OUTPUT_FILES, *(self.checkpoint_path(key).name for key in self.keys)):
            (previous / name).unlink(missing_ok=True)
        for path in found:
            os.replace(path, previous / path.name)
        _sync_folder(self.path)
        return True


def _sync_folder(folder: Path) -> None:
    """Put a rename on the disk. Windows has no such call, and there a rename needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(stream: IO[bytes]) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

"""The demo's text: which files are read, which bytes are held out, and which windows a step sees."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from luminav.cli.errors import CommandError

MAX_BYTES = 32 * 2**20
"""Text beyond this is left unread: a demo of some hundred steps sees a few MiB, and memory stays small."""

BLOCK_BYTES = 16 * 2**10
HELD_OUT_EVERY = 16
"""Of every so many blocks one is held out. Small blocks spread the validation text over the whole corpus."""

_MIN_BLOCK_WINDOWS = 4
_SNIFF_BYTES = 8192

# Left out of the standard library: what is installed beside it, tests, and tables (character maps, the interpreter's
# build variables, topics of pydoc) that are easy to predict and would flatter both contenders.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_STDLIB_SKIPPED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split into training segments and held-out windows.

    The split depends on the text and the context length alone, never on the seed: runs with different seeds are
    judged on the same bytes. No byte of a held-out block is ever trained on.
    """

    name: str
    num_files: int
    num_bytes: int
    sha256: str
    context: int
    train: Tensor
    """All training bytes, uint8; windows never cross from one segment into the next."""
    segment_starts: Tensor
    """Where each segment begins in `train`, int64."""
    window_counts: Tensor
    """Cumulative number of windows up to and including each segment, int64."""
    held_out: Tensor
    """(windows, context + 1) uint8. Consecutive windows share one byte, so each byte is predicted once."""

    def batch(self, seed: int, step: int, batch_size: int) -> Tensor:
        """Return the windows of one training step, (batch_size, context + 1) int64 on the CPU.

        A pure function of its arguments: a resumed run needs no generator state to go on with the same data.
        """
        digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        total = int(self.window_counts[-1])
        window = torch.randint(total, (batch_size,), generator=generator)
        segment = torch.searchsorted(self.window_counts, window, right=True)
        windows_before = torch.where(segment > 0, self.window_counts[(segment - 1).clamp(min=0)], 0)
        start = self.segment_starts[segment] + window - windows_before
        return self.train[start[:, None] + torch.arange(self.context + 1)].long()

    def validation(self, max_bytes: int) -> Tensor:
        """Return held-out windows of about `max_bytes` predicted bytes, evenly spread, (windows, context + 1) int64."""
        available = len(self.held_out)
        count = max(1, min(available, max_bytes // self.context))
        return self.held_out[torch.arange(count) * available // count].long()


def load_corpus(path: Path | None, context: int) -> Corpus:
    """Read and split the demo's text.

    Args:
        path: A file, or a folder whose text files are read in the order of their names; None takes the source of the
            running Python's standard library.
        context: Bytes a window predicts.

    Returns:
        The corpus, of at most :data:`MAX_BYTES`.

    Raises:
        CommandError: There is no such path, it cannot be read, or it holds too little text.
    """
    name = "Python's standard library" if path is None else str(path)
    try:
        text, num_files = _join(_read_files(path))
    except OSError as error:
        raise CommandError(f"cannot read {error.filename or name}: {error.strerror}.") from error
    if not text:
        raise CommandError(f"no text in {name}: the demo needs a text file, or a folder with text files in it.")
    return split(text, context, name=name, num_files=num_files)


def split(text: bytes, context: int, *, name: str, num_files: int) -> Corpus:
    """Hold out every :data:`HELD_OUT_EVERY`-th block of `text` and lay the rest out for sampling."""
    window = context + 1
    block = max(_MIN_BLOCK_WINDOWS * window, min(BLOCK_BYTES, len(text) // (4 * HELD_OUT_EVERY)))
    needed = block * HELD_OUT_EVERY
    if len(text) < needed:
        raise CommandError(f"too little text in {name}: {len(text)} bytes, and a context of {context} needs {needed}.")
    content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    segments: list[Tensor] = []
    held_out: list[Tensor] = []
    for period in content.split(block * HELD_OUT_EVERY):
        # The held-out block comes last in its period; an incomplete last period is training text only.
        segment, rest = period[: block * (HELD_OUT_EVERY - 1)], period[block * (HELD_OUT_EVERY - 1) :]
        if len(segment) >= window:
            segments.append(segment)
        if len(rest) == block:
            held_out.append(rest.unfold(0, window, context))
    lengths = torch.tensor([len(segment) for segment in segments])
    return Corpus(
        name=name,
        num_files=num_files,
        num_bytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        context=context,
        train=torch.cat(segments),
        segment_starts=lengths.cumsum(0) - lengths,
        window_counts=(lengths - context).cumsum(0),
        held_out=torch.cat(held_out),
    )


def _read_files(path: Path | None) -> Iterator[bytes]:
    if path is None:
        for source in _walk(Path(sysconfig.get_paths()["stdlib"]), skipped=_STDLIB_SKIPPED):
            if source.suffix == ".py" and not source.name.startswith(_STDLIB_SKIPPED_PREFIX):
                yield _read(source)
    elif path.is_dir():
        for source in _walk(path):
            content = _read(source)
            if b"\0" not in content[:_SNIFF_BYTES]:  # git's own test for a binary file
                yield content
    elif path.exists() and not path.is_file():
        raise CommandError(f"--data {path} is neither a file nor a folder.")
    else:
        yield _read(path)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files under `root` in one order on every file system, hidden and skipped folders left out."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, names, files in os.walk(root, onerror=refuse):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skipped)
        for name in sorted(files):
            source = Path(folder, name)
            if not name.startswith(".") and source.is_file():
                yield source


def _read(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(MAX_BYTES)


def _join(contents: Iterator[bytes]) -> tuple[bytes, int]:
    """Join the files' text up to the limit; a file that came before is left out, or it could be on both sides."""
    seen: set[bytes] = set()
    joined = bytearray()
    for content in contents:
        digest = hashlib.sha256(content).digest()
        if content.strip() and digest not in seen:
            seen.add(digest)
            joined += content if content.endswith(b"\n") else content + b"\n"
        if len(joined) >= MAX_BYTES:
            break
    return bytes(joined[:MAX_BYTES]), len(seen)

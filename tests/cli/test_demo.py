"""What a demo prints and leaves, and how it refuses: one line, status 2, nothing overwritten."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import processes
import pytest
import torch
from processes import TINY, SignalAt

RUN = Path("runs/demo")
UNFINISHED = SignalAt("luminav.cli.demo.training", "Run.take_step", 6)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but what the test's own child writes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("stdout", "stderr", ".lock")
    }


def refused(folder: Path, *arguments: str | Path) -> str:
    """Run, check that it was refused in one line with nothing changed, and return the line."""
    before = content(folder)
    ended = processes.luminav(*arguments, folder=folder)
    assert ended.status == 2, ended
    assert re.fullmatch(r"luminav: [^\n]+\n", ended.err), ended.err
    assert "Traceback" not in ended.out
    assert content(folder) == before
    return ended.err


# ---- what it leaves --------------------------------------------------------------------------------------------------


def test_output(finished_once: tuple[Path, processes.Ended]) -> None:
    out = finished_once[1].out
    assert "\x1b" not in out
    assert "step 12/12" in out
    for words in (
        "bits/byte",
        "tokens/s",
        "left",
        "│ LuminaV, BF16 ",
        "│ AdamW, FP32 ",
        "A sample",
        "Report: runs/demo",
    ):
        assert words in out
    assert finished_once[1].err == ""


def test_the_report_needs_nothing_else(finished_once: tuple[Path, processes.Ended]) -> None:
    page = (finished_once[0] / RUN / "report.html").read_text(encoding="utf-8")
    found: list[tuple[str, str | None]] = []

    class Collect(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((tag, value) for name, value in attrs if name in ("src", "href", "data", "srcset"))

    Collect().feed(page)
    assert [tag for tag, _ in found] == ["img"]
    assert str(found[0][1]).startswith("data:image/png;base64,iVBOR")
    assert not re.search(r"https?:|url\(|@import|<script", page)
    for words in ("LuminaV, BF16", "AdamW, FP32", "torch", str(torch.__version__), "sha256", "steps", "betas"):
        assert words in page


def test_the_figures_agree(finished_once: tuple[Path, processes.Ended]) -> None:
    run = finished_once[0] / RUN
    summary = json.loads((run / "summary.json").read_text())
    rows = list(csv.DictReader(io.StringIO((run / "metrics.csv").read_text())))
    for key in ("luminav", "adamw"):
        saved = torch.load(run / f"checkpoints/{key}.pt", weights_only=True)
        mine = [row for row in rows if row["contender"] == key]
        assert [int(row["step"]) for row in mine] == list(range(13))
        assert [float(row["training_bits_per_byte"]) for row in mine[1:]] == saved["history"]["loss"]
        assert summary["results"][key]["bits_per_byte"] == saved["result"]["bits_per_byte"]
        assert f"{saved['result']['bits_per_byte']:.4f}" in finished_once[1].out
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_makes_room_and_is_kept(finished: Path) -> None:
    before = (finished / RUN / "checkpoints/luminav.pt").read_bytes()
    ended = processes.luminav(*TINY, "--seed", "7", folder=finished)
    assert ended.status == 0
    assert "is now in runs/demo/previous" in ended.out
    assert (finished / RUN / "previous/luminav.pt").read_bytes() == before
    assert (finished / RUN / "checkpoints/luminav.pt").read_bytes() != before


def test_other_files_in_the_folder_are_left_alone(folder: Path) -> None:
    (folder / RUN).mkdir(parents=True)
    (folder / RUN / "notes.txt").write_text("mine")
    (folder / RUN / "report.html").write_text("mine")
    assert processes.luminav(*TINY, folder=folder).status == 0
    assert (folder / RUN / "notes.txt").read_text() == "mine"
    assert (folder / RUN / "previous/report.html").read_text() == "mine"


# ---- an unfinished run -----------------------------------------------------------------------------------------------


def test_an_unfinished_run_is_not_buried(folder: Path) -> None:
    processes.luminav(*TINY, folder=folder, signal_at=UNFINISHED)
    line = refused(folder, *TINY)
    assert "--resume" in line
    assert "--overwrite" in line
    before = (folder / RUN / "checkpoints/luminav.pt").read_bytes()
    assert processes.luminav(*TINY, "--overwrite", folder=folder).status == 0
    assert (folder / RUN / "previous/luminav.pt").read_bytes() == before


def test_a_resumed_run_keeps_its_settings(folder: Path) -> None:
    processes.luminav(*TINY, "--lr", "0.002", "--no-cautious", folder=folder, signal_at=UNFINISHED)
    assert "--steps is 13 now and was 12" in refused(folder, "demo", "--resume", "--steps", "13")
    assert "--cautious is True now and was False" in refused(folder, "demo", "--resume", "--cautious")
    assert "exclude each other" in refused(folder, "demo", "--resume", "--overwrite")
    text = (folder / "text.txt").read_bytes()
    (folder / "text.txt").write_bytes(text + b"more")
    assert "is not what the run" in refused(folder, "demo", "--resume")
    (folder / "elsewhere.txt").write_bytes(text)
    assert processes.luminav("demo", "--resume", "--data", "elsewhere.txt", folder=folder).status == 0
    assert json.loads((folder / RUN / "summary.json").read_text())["config"]["settings"]["lr"] == 0.002


def test_one_demo_at_a_time(folder: Path) -> None:
    first = processes.start(*TINY, "--steps", "100000", folder=folder)
    try:
        deadline = time.monotonic() + 60
        while not (folder / RUN / "checkpoints/luminav.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (folder / "second").mkdir()
        for option in ("--resume", "--overwrite"):
            second = processes.luminav("demo", "--out", folder / RUN, option, folder=folder / "second")
            assert second.status == 2
            assert "another demo is writing" in second.err
    finally:
        first.kill()
        first.join()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], "cannot read .*nowhere: No such file"),
        (["--data", "empty.txt"], "no text in"),
        (["--data", "short.txt"], "too little text in .*: 30 bytes"),
        (["--data", ""], "--data is empty"),
        (["--device", "cuda:99"], "--device cuda:99 is not there"),
        (["--device", "teapot"], "--device must be auto"),
        (["--device", "meta"], "no use here"),
        (["--dtype", "int8"], "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (["--steps", "0"], "steps must be >= 1, got 0"),
        (["--steps", "many"], "--steps"),
        (["--lr", "-1"], "lr must be >= 0"),
        (["--lr", "nan"], "lr must be >= 0"),
        (["--adamw-lr", "inf"], "adamw_lr must be >= 0"),
        (["--betas", "0.9", "1.5"], r"betas\[1\] must be in \[0, 1\)"),
        (["--adamw-betas", "0.9", "1.5"], "AdamW"),
        (["--buffer", "3"], "buffer must be one of 1, 2, got 3"),
        (["--buffer", "1", "--fused-single-pass"], "buffer=1 cannot be combined"),
        (["--master-weights", "some"], "master_weights must be one of"),
        (["--execution", "triton"], "not .* there yet|needs Triton|triton"),
        (["--seed", "-1"], "seed"),
        (["--width", "30"], "width must be a multiple"),
        (["--warmup", "2"], "warmup must be in"),
        (["--checkpoint-every", "0"], "checkpoint-every"),
        (["--no-such-option"], "no-such-option"),
        (["--out", "text.txt"], "cannot write to text.txt"),
        (["--out", "text.txt/below"], "cannot write to text.txt/below"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments: list[str], words: str, folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_bytes(b"a line of text\n" * 2)
    assert re.search(words, refused(folder, *TINY, *arguments))
    assert not (folder / "runs").exists() or "--out" in arguments


def test_an_unknown_command_is_one_line(folder: Path) -> None:
    assert "dmo" in refused(folder, "dmo")


def flip_a_bit(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    damaged[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(damaged)


class Payload:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return sys.exit, ("the checkpoint ran code",)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "a bit flipped": flip_a_bit,
    "no checkpoint": lambda path: path.write_text("text"),
    "a checkpoint of something else": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a bare pickle": lambda path: path.write_bytes(pickle.dumps(Payload())),
    "code within": lambda path: torch.save({"model": Payload()}, path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint(damage: Callable[[Path], object], finished: Path) -> None:
    damage(finished / RUN / "checkpoints/luminav.pt")
    for arguments in (["demo", "--resume"], TINY):
        assert "luminav.pt" in refused(finished, *arguments)


def test_checkpoints_of_different_runs(finished: Path, folder: Path) -> None:
    shutil.move(finished / RUN / "checkpoints/adamw.pt", finished / "adamw.pt")
    assert processes.luminav(*TINY, "--overwrite", "--seed", "3", folder=finished).status == 0
    shutil.move(finished / "adamw.pt", finished / RUN / "checkpoints/adamw.pt")
    assert "different runs" in refused(finished, "demo", "--resume")

"""The demo's text: what is read, what is held out, and which windows a step sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luminav.cli.demo.data import Corpus, load_corpus, split
from luminav.cli.errors import CommandError


def numbered(length: int) -> bytes:
    """Text in which every four aligned bytes are their own address."""
    return b"".join(number.to_bytes(4, "big") for number in range(length // 4))


def windows_of(text: bytes, windows: torch.Tensor) -> list[int]:
    """Where each window lies in `text`."""
    places = [text.find(bytes(window.tolist())) for window in windows]
    assert -1 not in places, "a window is not a piece of the text"
    return places


def corpus_of(text: bytes, context: int = 16) -> Corpus:
    return split(text, context, name="text", num_files=1)


def test_no_held_out_byte_is_trained_on() -> None:
    text = numbered(200_000)
    corpus = corpus_of(text)
    held_out = {place + i for place in windows_of(text, corpus.held_out) for i in range(17)}
    trained: set[int] = set()
    for step in range(40):
        for place in windows_of(text, corpus.batch(0, step, 64)):
            trained |= set(range(place, place + 17))
    assert len(trained) > 20_000
    assert not trained & held_out
    assert len(held_out) == pytest.approx(len(text) / 16, rel=0.1)


def test_every_training_window_can_come_up() -> None:
    text = numbered(16 * 68 * 3)
    corpus = corpus_of(text)
    assert len(corpus.segment_starts) > 1
    seen = {place for step in range(400) for place in windows_of(text, corpus.batch(3, step, 64))}
    assert len(seen) == int(corpus.window_counts[-1])


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    corpus = corpus_of(numbered(50_000))
    torch.manual_seed(1)
    first = corpus.batch(5, 7, 8)
    torch.manual_seed(2)
    assert torch.equal(first, corpus.batch(5, 7, 8))
    assert not torch.equal(first, corpus.batch(5, 8, 8))
    assert not torch.equal(first, corpus.batch(6, 7, 8))


def test_validation_predicts_each_held_out_byte_once() -> None:
    text = numbered(100_000)
    corpus = corpus_of(text)
    predicted = [place + 1 + i for place in windows_of(text, corpus.held_out) for i in range(16)]
    assert len(predicted) == len(set(predicted))
    part = corpus.validation(20 * 16)
    assert len(part) == 20
    assert torch.equal(corpus.validation(10**9), corpus.held_out.long())


def test_folder_is_read_in_order_without_binaries_duplicates_and_hidden_files(tmp_path: Path) -> None:
    for name, content in {
        "b/late.txt": b"second",
        "a.txt": b"first\n",
        "copy.txt": b"first\n",
        "image.png": b"\x89PNG\0\0",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
        "blank.txt": b" \n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content * 2000 if content.strip() else content)
    corpus = load_corpus(tmp_path, 4)
    assert corpus.num_files == 2
    assert corpus.num_bytes == len(b"first\n" * 2000 + b"second" * 2000 + b"\n")


def test_the_default_text_is_the_standard_library() -> None:
    corpus = load_corpus(None, 256)
    assert corpus.num_bytes > 3_000_000
    assert corpus.num_files > 100


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(CommandError, match="no text"):
        load_corpus(tmp_path / "text", 16)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CommandError, match="too little text"):
        corpus_of(b"x" * 1000)
    assert len(corpus_of(b"x" * 4 * 17 * 16).held_out) == 4

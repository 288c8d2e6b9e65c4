"""Text of the convergence benchmark: what is installed with Python, tokenised once and kept as 16-bit numbers.

No download: the documents are Python sources and documentation under site-packages ("packages"), the standard library
("stdlib"), or a folder. A byte-level BPE is trained on the documents themselves with the `tokenizers` package; without
it, or with ``vocabulary=0``, tokens are bytes.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = frozenset({".py", ".rst", ".md", ".txt"})
SMALLEST, LARGEST = 200, 1_000_000
"""Bytes of a document; larger files are tables and word lists rather than text."""

END = 0
"""The token between documents."""
BYTES = 257
"""Vocabulary without a tokenizer: END and the 256 bytes."""
VALIDATION_SHARE = 1 / 40
TOKENIZER_SAMPLE = 16_000_000
"""Bytes that the tokenizer is trained on: more changes its merges little and costs seconds."""
DOCUMENTS_AT_ONCE = 2_000


@dataclass(frozen=True)
class Corpus:
    """Tokenised text on the disk."""

    train: str
    """File of uint16 tokens; likewise `validation`."""
    validation: str
    vocabulary: int
    manifest: str
    """Hash over every document's name and content, and over the tokenizer."""
    train_tokens: int
    validation_tokens: int
    documents: int
    megabytes: float

    def tokens(self, part: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Tokens of "train" or "validation"."""
        return np.fromfile(getattr(self, part), dtype=np.uint16)


def folders_of(source: str) -> list[Path]:
    """The folders that a source stands for.

    Args:
        source: "packages", "stdlib" or the path of a folder.
    """
    paths = sysconfig.get_paths()
    if source == "packages":
        return sorted({Path(paths[name]) for name in ("purelib", "platlib")})
    if source == "stdlib":
        return [Path(paths["stdlib"])]
    folder = Path(source)
    if not folder.is_dir():
        raise SystemExit(f"--data must be packages, stdlib or a folder, got {source!r}.")
    return [folder]


def _documents(source: str) -> list[tuple[str, Path]]:
    """Name and path of every document, in the order of the hash of its name: an even mix, the same on every call."""
    apart = {"site-packages", "dist-packages"} if source == "stdlib" else set()
    found = {}
    for folder in folders_of(source):
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.suffix in SUFFIXES and not apart & set(path.relative_to(folder).parts) and path.is_file():
                found[name] = path
    return sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())


def _texts(documents: Sequence[tuple[str, Path]], limit: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, text and content hash of the documents that are text and no copies, up to `limit` bytes."""
    seen: set[bytes] = set()
    total = 0
    for name, path in documents:
        if not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # not a text of ours
            continue
        seen.add(digest)
        yield name, text, digest
        total += len(content)
        if total >= limit:
            return


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE of `vocabulary` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, total = [], 0
    for text in texts:
        sample.append(text)
        total += len(text)
        if total >= TOKENIZER_SAMPLE:
            break
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _encode(texts: Sequence[str], tokenizer: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """All texts in a row, each followed by END."""
    pieces = []
    encode = getattr(tokenizer, "encode_batch_fast", getattr(tokenizer, "encode_batch", None))  # fast: no offsets
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        chunk = texts[start : start + DOCUMENTS_AT_ONCE]
        if encode is None:
            numbers = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1 for text in chunk]
        else:
            numbers = [np.asarray(encoding.ids, np.uint16) for encoding in encode(list(chunk))]
        for document in numbers:
            pieces += [document, np.asarray([END], np.uint16)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint16)


def _tokenizer(texts: Sequence[str], vocabulary: int, path: Path | None) -> Any:
    """The tokenizer at `path`, or one trained on `texts` and kept there; None for bytes."""
    if not vocabulary or find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    if path is not None and path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = _train_tokenizer(texts, vocabulary)
    if path is not None:
        tokenizer.save(str(path), pretty=False)
    return tokenizer


def prepare(source: str, cache: Path, *, vocabulary: int, megabytes: float, tokenizer_path: Path | None) -> Corpus:
    """Read, split and tokenise a source, or find that done.

    A document goes to the validation part by the hash of its content, so a file is wholly in one part or the other.

    Args:
        source: As for :func:`folders_of`.
        cache: Folder of the token files.
        vocabulary: Size of the BPE, below 65536; 0 for bytes.
        megabytes: Stop reading after so much text.
        tokenizer_path: Where the tokenizer is kept; one that is there is used, so that all sources share it.

    Raises:
        SystemExit: There is no text.
    """
    documents = _documents(source)
    listing = "\n".join(f"{name} {path.stat().st_size}" for name, path in documents)
    own = tokenizer_path.read_bytes() if tokenizer_path is not None and tokenizer_path.exists() else b""
    settings = f"{source} {vocabulary if find_spec('tokenizers') else 0} {megabytes}\n{listing}".encode()
    key = hashlib.sha256(settings + own).hexdigest()[:16]
    described = cache / f"corpus-{key}.json"
    if described.exists():
        return Corpus(**json.loads(described.read_text(encoding="utf-8")))
    corpus = _build(documents, cache / key, vocabulary, int(megabytes * 1e6), tokenizer_path)
    if not own and tokenizer_path is not None and tokenizer_path.exists():  # made just now: found again next time
        key = hashlib.sha256(settings + tokenizer_path.read_bytes()).hexdigest()[:16]
        described = cache / f"corpus-{key}.json"
    described.write_text(json.dumps(asdict(corpus)), encoding="utf-8")
    return corpus


def _build(
    documents: Sequence[tuple[str, Path]], stem: Path, vocabulary: int, limit: int, tokenizer_path: Path | None
) -> Corpus:
    train: list[str] = []
    validation: list[str] = []
    manifest = hashlib.sha256()
    total = 0
    for name, text, digest in _texts(documents, limit):
        held_out = int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32
        (validation if held_out else train).append(text)
        manifest.update(name.encode() + b"\0" + digest)
        total += len(text)
    if not train or not validation:
        raise SystemExit(f"found {len(train) + len(validation)} documents only: name a folder with more text.")
    tokenizer = _tokenizer(train, vocabulary, tokenizer_path)
    manifest.update(b"bytes" if tokenizer is None else tokenizer.to_str().encode())
    stem.parent.mkdir(parents=True, exist_ok=True)
    counts = {}
    for part, texts in (("train", train), ("validation", validation)):
        tokens = _encode(texts, tokenizer)
        tokens.tofile(f"{stem}-{part}.bin")
        counts[part] = len(tokens)
    return Corpus(
        train=f"{stem}-train.bin",
        validation=f"{stem}-validation.bin",
        vocabulary=BYTES if tokenizer is None else vocabulary,
        manifest=manifest.hexdigest()[:12],
        train_tokens=counts["train"],
        validation_tokens=counts["validation"],
        documents=len(train) + len(validation),
        megabytes=total / 1e6,
    )

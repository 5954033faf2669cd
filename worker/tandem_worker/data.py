"""Training data: a fixed array of tokens, from which each step draws its batch by (seed, step) alone."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from tandem.errors import DataError
from tandem_worker.files import SIZE_LIMIT, read_file
from tandem_worker.tokenizer import Tokenizer, open_tokenizer

STDLIB_LIMIT = 4 << 20
"""Bytes of the standard library's source that make the default data."""
STDLIB_PACKAGES = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging")
CHUNK = 1 << 16
"""Characters of text per call of the tokenizer, more or less: chunks end with a line."""


class Stream(Protocol):
    """Where a step's batch comes from: a function of the data, a seed and the step alone."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex); part of parity."""

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of one step, int32 ``[rows, sequence]`` each."""

    def reseeded(self, seed: int) -> Stream:
        """The same data in another order."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """All tokens of the data, and the rule that makes batches of them.

    Row ``b`` of step ``t`` starts at ``blake2b(seed, t, b) mod (tokens - sequence)``: no state, hence the same after a
    restart, and independent of numpy's generators, whose streams may change between versions.
    """

    tokens: np.ndarray
    """``[N]`` uint8 (bytes) or uint32."""
    seed: int
    rows: int
    sequence: int
    digest: str
    """SHA-256 (hex) of the contents in order and of the tokenizer; part of parity."""
    description: str
    """One line for people: the source, the tokens, how many."""

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and next tokens of one step, int32 ``[rows, sequence]`` each."""
        starts = np.array([self._start(step, row) for row in range(self.rows)])
        window = self.tokens[starts[:, None] + np.arange(self.sequence + 1)].astype(np.int32)
        return np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])

    def reseeded(self, seed: int) -> TokenStream:
        """The same data in another order."""
        return replace(self, seed=seed)

    def _start(self, step: int, row: int) -> int:
        key = hashlib.blake2b(f"{self.seed}/{step}/{row}".encode(), digest_size=16).digest()
        return int.from_bytes(key, "little") % (len(self.tokens) - self.sequence)


def open_data(
    paths: Sequence[Path], tokenizer: Path | None, *, seed: int, batch: int, sequence: int, vocab: int
) -> TokenStream:
    """Read the data of a run.

    Args:
        paths: text files, joined in this order; none: the source text of Python's standard library.
        tokenizer: a ``tokenizer.json`` or SentencePiece model; none: each byte is a token.
        seed: of the run.
        batch: rows per step.
        sequence: tokens per row.
        vocab: of the model; every token must be less.

    Raises:
        DataError: missing, unreadable, empty, binary or too short files, or tokens that the model does not have.
    """
    if paths:
        texts = [(path, read_file(path)) for path in paths]
        source = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
        if sum(len(text) for _, text in texts) > SIZE_LIMIT:
            raise DataError(f"the data files hold more than {SIZE_LIMIT >> 30} GiB: give a smaller sample")
    else:
        texts = _standard_library()
        source = f"source text of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    digest = hashlib.sha256()
    for _, text in texts:
        digest.update(hashlib.sha256(text).digest())
    if tokenizer is None:
        kind = "bytes"
        tokens = np.frombuffer(b"".join(text for _, text in texts), np.uint8)
    else:
        opened = open_tokenizer(tokenizer)
        kind = opened.name
        digest.update(b"tokenizer" + opened.digest)
        tokens = _tokenize(texts, opened)
    if len(tokens) <= sequence:
        raise DataError(
            f"{source}: {len(tokens)} {kind} are too few for one sequence of {sequence} and its next token: "
            "give more text or a smaller --sequence"
        )
    if (largest := int(tokens.max())) >= vocab:
        raise DataError(
            f"{source}: token {largest} is outside the model's vocabulary of {vocab}: give the model's own --tokenizer"
        )
    description = f"{source}, {len(tokens):,} {kind}"
    return TokenStream(tokens, seed, batch, sequence, digest.hexdigest(), description)


def _standard_library() -> list[tuple[Path, bytes]]:
    """Source files of the standard library by name, until ``STDLIB_LIMIT`` is reached.

    Only modules that Python itself lists: a distribution's ``sitecustomize`` and the build's ``_sysconfigdata``
    differ between machines that run the same Python. A file that cannot be read is left out; parity shows it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.glob("*.py") if path.stem in sys.stdlib_module_names]
    for package in STDLIB_PACKAGES:
        paths += (root / package).rglob("*.py")
    texts: list[tuple[Path, bytes]] = []
    total = 0
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        try:
            text = read_file(path)
        except DataError:
            continue
        texts.append((path, text[: STDLIB_LIMIT - total]))
        total += len(texts[-1][1])
        if total >= STDLIB_LIMIT:
            break
    if not texts:
        raise DataError(f"{root} holds no source of Python's standard library: give text files with --data")
    return texts


def _tokenize(texts: Iterable[tuple[Path, bytes]], tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of all files, ``[N]`` uint32, without special tokens."""
    parts = [np.zeros(0, np.uint32)]
    for path, text in texts:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8 text (byte {error.start}): convert it, or use bytes") from None
        parts.extend(np.asarray(ids, np.uint32) for ids in tokenizer.encode(_chunks(decoded)))
    return np.concatenate(parts)


def _chunks(text: str) -> list[str]:
    """Pieces of about ``CHUNK`` characters that end with a line: tokenizers slow down on very long texts."""
    chunks, start = [], 0
    while start < len(text):
        end = text.find("\n", start + CHUNK) + 1 or len(text)
        chunks.append(text[start:end])
        start = end
    return chunks

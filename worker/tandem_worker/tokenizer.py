"""Tokenizers behind one small protocol: Hugging Face's ``tokenizer.json``, SentencePiece's ``tokenizer.model``, bytes.

A file whose name ends with ``.json`` is read by the library tokenizers, any other by SentencePiece: published files
carry endings such as ``.model.v3``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Definition

from tandem.errors import DataError
from tandem_worker.files import read_file

PADDED = 8
"""Publishers pad a model's vocabulary to a round number, or give a tokenizer tokens that the model lacks: by a few
percent. One that differs by more than one token in so many is another model's.
"""


class Tokenizer(Protocol):
    """From text to the model's tokens."""

    @property
    def name(self) -> str:
        """What its tokens are called: ``bytes``, or ``tokens of <file>``."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of its definition; empty for bytes, which need none."""

    @property
    def size(self) -> int:
        """One more than its largest token."""

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens that its model expects before a text; often one, or none."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, without `begin` or any other special token."""


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token."""

    name = "bytes"
    digest = b""
    size = 256
    begin: tuple[int, ...] = ()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class JsonTokenizer:
    """A ``tokenizer.json``. `begin` is what its own post-processor puts before a text."""

    def __init__(self, path: Path) -> None:
        definition = read_file(path)
        try:
            self._tokenizer = Definition.from_str(definition.decode())
        except Exception as error:  # the library raises bare exceptions
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{path} is no tokenizer.json ({reason}): take it from the model's directory") from None
        # A file may carry the limits of the model that it was made for; here every token counts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"tokens of {path.name}"
        self.digest = hashlib.sha256(definition).digest()
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        encoding = self._tokenizer.encode("a")
        special = encoding.special_tokens_mask
        self.begin = tuple(encoding.ids[: special.index(0) if 0 in special else 0])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class SentencePieceTokenizer:
    """A SentencePiece model such as Mistral's ``tokenizer.model``. `begin` is its beginning-of-sequence token."""

    def __init__(self, path: Path) -> None:
        definition = read_file(path, what="SentencePiece model", binary=True)
        try:
            self._processor = SentencePieceProcessor(model_proto=definition)
        except RuntimeError:
            raise DataError(
                f"{path} is no SentencePiece model: take tokenizer.model or tokenizer.json from the model's directory"
            ) from None
        self.name = f"tokens of {path.name}"
        self.digest = hashlib.sha256(definition).digest()
        self.size = self._processor.get_piece_size()
        begin = self._processor.bos_id()
        self.begin: tuple[int, ...] = (begin,) if begin >= 0 else ()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self._processor.encode(list(texts), out_type=int)]


def open_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a file; bytes for none.

    Raises:
        DataError: the file cannot be read or is no tokenizer.
    """
    if path is None:
        return ByteTokenizer()
    return JsonTokenizer(path) if path.suffix.lower() == ".json" else SentencePieceTokenizer(path)


def _own(folder: Path) -> list[tuple[str, int]]:
    """Name and size of every tokenizer in a folder; a file of that name that is none of these formats is left out."""
    found = []
    for path in sorted({*folder.glob("tokenizer.json"), *folder.glob("tokenizer.model*")}):
        with suppress(DataError):
            found.append((path.name, open_tokenizer(path).size))
    return found


def check_tokenizer(path: Path, vocab: int, begin: int | None, weights: Path | None = None) -> None:
    """Whether a tokenizer is that of a model's weights, as far as sizes and the beginning tell. A token that the model
    does not have is found with the data; one that it has may mean something else.

    Args:
        path: of the tokenizer.
        vocab: of the model.
        begin: token with which the weights' configuration says that a text begins; None: it does not say.
        weights: their folder: where it holds tokenizers of its own, the size must be that of one of them.

    Raises:
        DataError: the file cannot be read or is no tokenizer, or it is another model's.
    """
    tokenizer = open_tokenizer(path)
    mend = "give the tokenizer that was published with the weights"
    if abs(vocab - tokenizer.size) * PADDED > vocab:
        raise DataError(f"{path} has {tokenizer.size:,} tokens, the weights have {vocab:,}: {mend}")
    own = _own(weights) if weights is not None else []
    if own and tokenizer.size not in (size for _, size in own):
        name, size = own[0]
        raise DataError(f"{path} has {tokenizer.size:,} tokens, {name} beside the weights has {size:,}: {mend}")
    if begin is not None and tokenizer.begin and tokenizer.begin[0] != begin:
        raise DataError(
            f"{path} begins a text with token {tokenizer.begin[0]}, the weights' config.json with {begin}: {mend}"
        )

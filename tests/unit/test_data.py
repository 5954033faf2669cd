"""Batches are a pure function of (contents, seed, step), and files that are no text are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.errors import DataError
from tandem_worker import data
from tandem_worker.data import TokenStream, open_data

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune\n" * 40


def opened(paths: list[Path], tokenizer: Path | None = None, **changes: Any) -> TokenStream:
    options = {"seed": 1, "batch": 3, "sequence": 16, "vocab": 256} | changes
    return open_data(paths, tokenizer, **options)


def refused(paths: list[Path], *words: str, tokenizer: Path | None = None, **changes: Any) -> None:
    with pytest.raises(DataError) as error:
        opened(paths, tokenizer, **changes)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "austen.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with the limits that published files often carry."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    trained.enable_truncation(8)
    trained.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return path


@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**9))
def test_targets_are_the_next_tokens_and_come_from_the_text(seed: int, step: int) -> None:
    stream = TokenStream(np.frombuffer(TEXT.encode(), np.uint8), seed, 4, 16, "", "")
    tokens, targets = stream.batch(step)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.shape == targets.shape == (4, 16)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    for row, last in zip(tokens, targets[:, -1:], strict=True):
        assert bytes([*row, *last]).decode() in TEXT
    again = TokenStream(stream.tokens, seed, 4, 16, "", "").batch(step)
    np.testing.assert_array_equal(tokens, again[0])


def test_steps_seeds_and_rows_draw_differently(text: Path) -> None:
    stream, other = opened([text], sequence=8), opened([text], sequence=8, seed=2)
    starts = [stream._start(step, row) for step in range(50) for row in range(3)]
    assert len(set(starts)) > 100
    assert any(not np.array_equal(stream.batch(step)[0], other.batch(step)[0]) for step in range(3))


def test_every_place_of_the_text_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(range(1, 8)))
    stream = opened([tmp_path / "short"], sequence=4, batch=1)
    firsts = {int(stream.batch(step)[0][0, 0]) for step in range(100)}
    assert firsts == {1, 2, 3}


def test_batches_are_pinned(text: Path) -> None:
    """The rule is part of a run's meaning: changing it changes every run that is repeated."""
    assert [opened([text])._start(step, row) for step in (0, 1, 10**6) for row in (0, 2)] == [
        2403,
        3267,
        2745,
        355,
        2497,
        2152,
    ]


def test_digest_follows_contents_order_and_tokenizer(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT.upper())
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    inputs = [([text], None), ([other], None), ([text, other], None), ([other, text], None), ([text], tokenizer)]
    digests = [opened(paths, tok, vocab=512).digest for paths, tok in inputs]
    assert len(set(digests)) == len(digests)
    assert opened([copy]).digest == opened([text]).digest
    assert opened([text], seed=9, batch=1, sequence=4).digest == opened([text]).digest


def test_tokenised_text_is_the_whole_text(text: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CHUNK", 200)
    stream = opened([text], tokenizer, vocab=300)
    ids = stream.tokens.tolist()
    assert len(ids) < len(TEXT)
    assert Tokenizer.from_file(str(tokenizer)).decode(ids) == TEXT
    assert "tokens of tokenizer.json" in stream.description


@given(text=st.text(alphabet="ab\n", max_size=300), chunk=st.integers(1, 50))
def test_chunks_put_together_are_the_text(text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CHUNK", chunk)
        pieces = data._chunks(text)
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_default_is_the_standard_library_and_always_the_same() -> None:
    one, two = opened([]), opened([])
    assert one.digest == two.digest
    assert "standard library" in one.description
    assert 1 << 20 < len(one.tokens) <= data.STDLIB_LIMIT
    assert b"_sysconfigdata" not in bytes(one.tokens[:1000])


def test_default_leaves_out_what_python_does_not_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("abc.py", "sitecustomize.py", "_sysconfigdata_x.py"):
        (tmp_path / name).write_text(f"# {name}\n" * 10)
    (tmp_path / "ast.py").symlink_to("nowhere")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    assert bytes(opened([]).tokens) == b"# abc.py\n" * 10
    (tmp_path / "abc.py").unlink()
    refused([], "--data")


def test_files_that_are_no_text(tmp_path: Path, tokenizer: Path, text: Path) -> None:
    refused([tmp_path / "none.txt"], "none.txt is missing")
    refused([tmp_path], "is a directory")
    (tmp_path / "empty").touch()
    refused([text, tmp_path / "empty"], "empty is empty")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0" * 100)
    refused([tmp_path / "binary"], "binary is binary", "zero byte at 4")
    (tmp_path / "latin").write_bytes("é".encode("latin-1") * 100)
    refused([tmp_path / "latin"], "no UTF-8", tokenizer=tokenizer, vocab=512)
    assert opened([tmp_path / "latin"]).batch(0)[0].max() == 0xE9


def test_too_short_for_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a" * 16)
    refused([tmp_path / "x"], "16 bytes are too few", "--sequence")
    (tmp_path / "x").write_text("a" * 17)
    tokens, targets = opened([tmp_path / "x"]).batch(5)
    assert (tokens == ord("a")).all()
    assert (targets == ord("a")).all()


def test_tokens_outside_the_vocabulary(text: Path, tokenizer: Path) -> None:
    refused([text], "vocabulary of 100", "--tokenizer", vocab=100)
    refused([text], "vocabulary of 256", tokenizer=tokenizer, vocab=256)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b"\0"])
def test_a_broken_tokenizer_is_refused(text: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    refused([text], "tokenizer.json", tokenizer=tmp_path / "tokenizer.json")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    refused([loop], "loop.txt cannot be read")

"""The three tokenizers behind one protocol: text survives, beginnings are their own, rubbish is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tandem.errors import DataError
from tandem_worker.data import open_data
from tandem_worker.tokenizer import check_tokenizer, open_tokenizer
from tiny_tokenizers import TEXTS, byte_level_json, sentencepiece_model


def test_bytes_need_no_file() -> None:
    opened = open_tokenizer(None)
    assert opened.encode(["aé", ""]) == [[97, 195, 169], []]
    assert (opened.begin, opened.digest, opened.name) == ((), b"", "bytes")


def test_json_texts_are_whole_and_carry_no_limits(tmp_path: Path) -> None:
    path = byte_level_json(tmp_path)
    limited = Tokenizer.from_file(str(path))
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    limited.save(str(path))
    opened = open_tokenizer(path)
    ids = opened.encode(TEXTS)
    assert [Tokenizer.from_file(str(path)).decode(row) for row in ids] == list(TEXTS)
    assert (opened.begin, opened.name) == ((), "tokens of tokenizer.json")


def test_json_begins_as_its_post_processor_does(tmp_path: Path) -> None:
    path = byte_level_json(tmp_path)
    with_begin = Tokenizer.from_file(str(path))
    with_begin.add_special_tokens(["<s>", "</s>"])
    ids = [(name, with_begin.token_to_id(name)) for name in ("<s>", "</s>")]
    with_begin.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    plain = open_tokenizer(path).encode(TEXTS)
    with_begin.save(str(path))
    opened = open_tokenizer(path)
    assert opened.begin == (with_begin.token_to_id("<s>"),)
    assert opened.encode(TEXTS) == plain, "special tokens are the caller's to add"


def test_a_json_that_knows_no_letters_begins_with_nothing(tmp_path: Path) -> None:
    empty = Tokenizer(models.BPE())
    empty.pre_tokenizer = pre_tokenizers.Whitespace()
    empty.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    assert (opened.begin, opened.encode(["abc"])) == ((), [[]])


def test_sentencepiece_texts_are_whole_and_begin_with_its_own_token(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    path = sentencepiece_model(tmp_path)
    opened = open_tokenizer(path)
    processor = SentencePieceProcessor(model_file=str(path))
    assert [processor.decode(row) for row in opened.encode(TEXTS)] == list(TEXTS)
    assert opened.begin == (processor.bos_id(),) == (1,)
    assert all(1 not in row for row in opened.encode(TEXTS))
    assert opened.name == "tokens of tokenizer.model"


def test_sentencepiece_without_a_beginning(tmp_path: Path) -> None:
    assert open_tokenizer(sentencepiece_model(tmp_path, bos_id=-1)).begin == ()


def test_digests_tell_definitions_apart(tmp_path: Path) -> None:
    paths = [byte_level_json(tmp_path), sentencepiece_model(tmp_path), sentencepiece_model(tmp_path / "b", bos_id=-1)]
    digests = {open_tokenizer(path).digest for path in paths}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


def test_training_text_can_be_read_by_sentencepiece_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS) * 20)
    stream = open_data([text], sentencepiece_model(tmp_path), seed=0, batch=2, sequence=8, vocab=400)
    assert "tokens of tokenizer.model" in stream.description
    assert 0 < int(stream.tokens.max()) < 400


@pytest.mark.parametrize("content", [b"{}", b"\0", b"\xff\xfe", b"\x0a\x05ab", b"not a model\n"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "tokenizer.json"])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        open_tokenizer(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_missing_or_empty_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="is missing"):
        open_tokenizer(tmp_path / name)
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty"):
        open_tokenizer(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="is a directory"):
        open_tokenizer(tmp_path / name)


@pytest.mark.parametrize("make", [byte_level_json, sentencepiece_model])
@pytest.mark.parametrize(
    ("vocab", "fits"), [(400, True), (448, True), (380, True), (512, False), (600, False), (256, False)]
)
def test_a_tokenizer_of_another_size_is_another_models(
    tmp_path: Path, make: Callable[[Path], Path], vocab: int, fits: bool
) -> None:
    """A vocabulary may be padded, and a tokenizer may have a few tokens more; a smaller one gives tokens that the model
    has, with another meaning: nothing else would tell.
    """
    path = make(tmp_path)
    assert open_tokenizer(path).size == 400
    if fits:
        check_tokenizer(path, vocab, None)
        return
    with pytest.raises(DataError, match=rf"has 400 tokens, the weights have {vocab}: give the tokenizer that was"):
        check_tokenizer(path, vocab, None)


@pytest.mark.parametrize("make", [byte_level_json, sentencepiece_model])
def test_beside_weights_that_have_their_own_tokenizer_the_slack_of_padding_is_none(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """32,000 tokens are within an eighth of 32,768 weights, and may be another model's all the same."""
    weights = tmp_path / "weights"
    own = make(weights)
    more = Tokenizer.from_file(str(byte_level_json(tmp_path / "other")))
    more.add_tokens(["<one>"])
    more.save(str(tmp_path / "other.json"))
    other = tmp_path / "other.json"
    check_tokenizer(own, 410, None, weights)
    check_tokenizer(make(tmp_path / "copy"), 410, None, weights)
    check_tokenizer(other, 410, None)
    with pytest.raises(DataError, match=rf"other.json has 401 tokens, {own.name} beside the weights has 400: give"):
        check_tokenizer(other, 410, None, weights)
    # One of several is enough, and what is no tokenizer is none.
    (weights / "tokenizer.model.v3").write_bytes(b"version https://git-lfs")
    with pytest.raises(DataError, match="beside the weights has 400"):
        check_tokenizer(other, 410, None, weights)
    (weights / "tokenizer.json").write_bytes(other.read_bytes())
    check_tokenizer(other, 410, None, weights)


def test_a_tokenizer_that_begins_otherwise_is_another_models(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path)
    check_tokenizer(path, 400, 1)
    with pytest.raises(DataError, match=r"begins a text with token 1, the weights' config.json with 0"):
        check_tokenizer(path, 400, 0)
    without = byte_level_json(tmp_path)
    check_tokenizer(without, 400, 0)


def test_tokens_that_were_added_count(tmp_path: Path) -> None:
    path = byte_level_json(tmp_path)
    more = Tokenizer.from_file(str(path))
    more.add_special_tokens(["<s>", "</s>"])
    more.save(str(path))
    assert open_tokenizer(path).size == 402

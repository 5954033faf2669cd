"""Small tokenizers, trained in the test that needs one."""

from __future__ import annotations

import io
import json
from pathlib import Path

from quiz import quiz

TEXTS = tuple(
    f"{q['context']} {q['question']}\nAnswer: {q['choices'][q['answer']]}".strip()
    for questions in quiz(20).values()
    for q in questions
)


def byte_level_json(folder: Path) -> Path:
    """A byte-level BPE as a ``tokenizer.json``, 400 tokens, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def sentencepiece_model(folder: Path, *, bos_id: int = 1) -> Path:
    """A BPE with byte fallback as in Llama and Mistral: text is kept as it is, a space put before it; 400 tokens."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, bos_id=bos_id, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder / "tokenizer.model"


def write_task(path: Path, lines: list[object]) -> Path:
    """A task file of these lines; bytes are written as they are."""
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path

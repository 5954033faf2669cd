"""Simple multiple-choice questions that the project writes itself: six tasks that a small model can learn.

The same on every machine: each question is drawn by a generator seeded with its own id.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

CHOICES = 4
OPPOSITES = (
    "hot cold, big small, up down, left right, open closed, full empty, fast slow, old new, light dark, wet dry, "
    "early late, hard soft, high low, long short, near far, rich poor, strong weak, thick thin, day night, true false, "
    "begin end, buy sell, laugh cry, love hate, win lose, push pull, question answer, friend enemy, war peace, "
    "north south, east west, always never, inside outside, clean dirty, loud quiet, sweet sour, rough smooth, "
    "sharp blunt, deep shallow, wide narrow"
)
KINDS = {
    "animal": "dog cat horse cow sheep lion tiger rabbit mouse wolf goat bear",
    "fruit": "apple pear plum grape lemon cherry peach banana orange melon mango fig",
    "colour": "red blue green yellow purple brown black white pink grey violet crimson",
    "tool": "hammer saw drill chisel wrench pliers spade axe rake screwdriver shovel file",
    "vehicle": "car bus train ship lorry tram bicycle van boat aeroplane ferry truck",
    "piece of furniture": "chair table bed desk shelf sofa wardrobe bench stool cupboard cradle dresser",
}
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo"]
THINGS = ["ball", "kite", "hat", "bag", "cup", "book", "coat", "bell", "box", "lamp", "ring", "scarf"]
COLOURS = ["red", "blue", "green", "yellow", "purple", "brown", "black", "white"]


def quiz(per_task: int = 60) -> dict[str, list[dict[str, Any]]]:
    """Task -> questions in the format of the task files."""
    return {task: [_line(task, number, draw) for number in range(per_task)] for task, draw in TASKS.items()}


def write_quiz(folder: Path, per_task: int = 60) -> list[Path]:
    """One file a task."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for task, questions in quiz(per_task).items():
        paths.append(folder / f"{task}.jsonl")
        paths[-1].write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    return paths


Drawn = tuple[str, str, str, list[str]]
"""Context, question, right choice, wrong choices."""


def _line(task: str, number: int, draw: Callable[[Random], Drawn]) -> dict[str, Any]:
    random = Random(f"{task}-{number}")
    context, question, right, wrong = draw(random)
    choices = [right, *random.sample(wrong, CHOICES - 1)]
    random.shuffle(choices)
    return {
        "id": f"{task}-{number}",
        "context": context,
        "question": question,
        "choices": choices,
        "answer": choices.index(right),
    }


def _sums(random: Random) -> Drawn:
    a, b = random.randint(1, 9), random.randint(1, 9)
    return "", f"What is {a} plus {b}?", str(a + b), [str(n) for n in range(2, 19) if n != a + b]


def _largest(random: Random) -> Drawn:
    numbers = random.sample(range(1, 100), CHOICES)
    largest = max(numbers)
    listed = ", ".join(str(n) for n in numbers)
    return "", f"Which is the largest of the numbers {listed}?", str(largest), [str(n) for n in numbers if n != largest]


def _opposites(random: Random) -> Drawn:
    pairs = [pair.split() for pair in OPPOSITES.split(", ")]
    mine = random.choice(pairs)
    word, right = random.sample(mine, 2)
    return "", f"What is the opposite of {word}?", right, [w for pair in pairs if pair != mine for w in pair]


def _kinds(random: Random) -> Drawn:
    kind = random.choice(sorted(KINDS))
    wrong = [random.choice(words.split()) for other, words in KINDS.items() if other != kind]
    article = "an" if kind[0] == "a" else "a"
    return "", f"Which of these is {article} {kind}?", random.choice(KINDS[kind].split()), wrong


def _letters(random: Random) -> Drawn:
    words = sorted({word for words in KINDS.values() for word in words.split()})
    right = random.choice(words)
    others = [word for word in words if word[0] != right[0]]
    return "", f"Which of these words begins with the letter {right[0]}?", right, others


def _owners(random: Random) -> Drawn:
    names, things, colours = (random.sample(words, CHOICES) for words in (NAMES, THINGS, COLOURS))
    context = " ".join(f"{n} has a {c} {t}." for n, c, t in zip(names, colours, things, strict=True))
    at = random.randrange(CHOICES)
    return context, f"What colour is the {things[at]} of {names[at]}?", colours[at], colours[:at] + colours[at + 1 :]


TASKS: dict[str, Callable[[Random], Drawn]] = {
    "sums": _sums,
    "largest": _largest,
    "opposites": _opposites,
    "kinds": _kinds,
    "letters": _letters,
    "owners": _owners,
}

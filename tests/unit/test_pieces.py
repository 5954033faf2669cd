"""Differing tensors in pieces: all of them arrive, in order, whatever is sent again, within the bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import LinkError
from tandem.sites import Site
from tandem.vocabulary import Module, Phase
from tandem_worker.chain import Op
from tandem_worker.link import frames as f
from tandem_worker.lockstep import pieces
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.pieces import Exchange
from tandem_worker.lockstep.reference import TRIES, Reference
from tandem_worker.lockstep.transfer import WORDS, piece_digest

Changed = Callable[[tuple[int, int, int], int], bool]
"""Whether an answer about (output, rank, start) arrives changed, and which time it is."""
DTYPES = ("float32", "bfloat16")


class Pair:
    """The reference as `Exchange` sees it, and a suspect that answers at once, in order."""

    def __init__(self, sizes: list[int], exchange_bytes: int, changed: Changed) -> None:
        rng = np.random.default_rng(len(sizes))
        sites = tuple(
            Site(i, Phase.BWD, Module.ATTN, i, "dw.wq", (size,), DTYPES[i % 2]) for i, size in enumerate(sizes)
        )
        op = Op(0, "step", (), (), tuple(f"grad.{i}" for i in range(len(sizes))), sites)
        values = [
            [rng.standard_normal((2, n)).astype(s.dtype) for n, s in zip(sizes, sites, strict=True)] for _ in "12"
        ]
        self.own, self.theirs = values
        self.run = Execution(op, 1, 0, (), tuple(self.own), None, None)
        self.settings = SimpleNamespace(exchange_bytes=exchange_bytes)
        self.machine = SimpleNamespace(shard=lambda array, rank: array[rank])
        self.channel = SimpleNamespace(send=self._answer)
        self.ledger = SimpleNamespace(transport=lambda *_, repaired: self.transport.append(repaired))
        self.generation = 0
        self.transport: list[bool] = []
        self.most = 0
        self._changed, self._times = changed, dict[tuple[int, int, int], int]()
        self._queue: deque[tuple[f.Tensor, np.ndarray]] = deque()

    def _answer(self, want: f.Want) -> None:
        index, rank, start, _ = want.parts[0]
        place = (index, rank, start)
        self._times[place] = self._times.get(place, 0) + 1
        raw = [self.theirs[o][r][begin : begin + count].tobytes() for o, r, begin, count in want.parts]
        value = np.frombuffer(b"".join(raw), np.uint8)
        digest = piece_digest(value)
        if self._changed(place, self._times[place]):
            value = value.copy()
            value[0] ^= 1
        frame = f.Tensor(1, 0, 0, "piece", index, rank, "uint8", [value.size], digest, start)
        self._queue.append((frame, value))
        self.most = max(self.most, sum(v.nbytes for _, v in self._queue))

    def expect(self, kind: type[f.Tensor], matches: Callable[[f.Tensor], bool]) -> tuple[f.Tensor, np.ndarray]:
        frame, value = self._queue.popleft()
        assert isinstance(frame, kind)
        assert matches(frame), "a piece came that nobody waits for"
        return frame, value

    def fetch(self) -> None:
        """Everything, compared with what the suspect has."""
        places = [(output, rank) for output in range(len(self.own)) for rank in range(2)]
        exchange = Exchange(cast("Reference", self), self.run, places)
        for output, rank in places:
            parts = list(exchange.pieces(output, rank))
            got, mine = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            assert got.tobytes() == self.theirs[output][rank].tobytes()
            assert mine.tobytes() == self.own[output][rank].tobytes()
        assert not self._queue


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(8, 200),
    st.integers(4, 64), st.integers(1, 200), st.integers(1, 64),
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 9))),
)  # fmt: skip
def test_pieces_are_the_tensors(
    sizes: list[int], exchange_bytes: int, piece: int, apart: int, first: int, bad: set[tuple[int, int, int]]
) -> None:
    """Some pieces arrive changed the first time, while later ones are under way already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", piece)
        patch.setattr(pieces, "APART", apart)
        patch.setattr(pieces, "FIRST", first)
        pair = Pair(sizes, exchange_bytes, lambda place, time: time == 1 and place in bad)
        pair.fetch()
    assert pair.transport == [True] * len(pair.transport)
    assert pair.most <= exchange_bytes


def test_what_arrives_changed_every_time_ends_the_pair() -> None:
    pair = Pair([10], 64, lambda place, _: place == (0, 1, 6))
    with pytest.raises(LinkError, match=f"changed {TRIES} times"):
        pair.fetch()
    assert pair.transport == [False]


def test_small_tensors_share_a_piece_and_several_are_under_way() -> None:
    pair = Pair([8] * 10, 96, lambda *_: False)
    exchange = Exchange(cast("Reference", pair), pair.run, [(output, 0) for output in range(10)])
    list(exchange.pieces(0, 0))
    (waiting, _), *more = cast("Any", pair)._queue
    assert (waiting.index, waiting.start, more) == (2, 0, [])
    for output in range(1, 10):
        list(exchange.pieces(output, 0))


def test_a_large_tensor_is_sent_from_where_it_lies() -> None:
    """Its pieces have one part each: nothing is copied beside anything."""
    sizes = [8, pieces.APART // 2, 8, pieces.PIECE // 2 + 1, 8]  # of bfloat16, the large ones
    pair = Pair(sizes, 64 << 20, lambda *_: False)
    wants: list[f.Want] = []
    answer = pair.channel.send
    pair.channel.send = lambda want: (wants.append(want), answer(want))
    pair.fetch()
    large = [want for want in wants if any(sizes[output] > 8 for output, *_ in want.parts)]
    assert {len(want.parts) for want in large} == {1}
    assert len(wants) == len(large) + 3


def test_the_first_pieces_are_small_so_that_all_soon_have_something_to_do() -> None:
    pair = Pair([2 * pieces.PIECE], 256 << 20, lambda *_: False)
    wants: list[f.Want] = []
    answer = pair.channel.send
    pair.channel.send = lambda want: (wants.append(want), answer(want))
    pair.fetch()
    sizes = [4 * want.parts[0][3] for want in wants if want.parts[0][1] == 0]
    assert sizes[:5] == [pieces.FIRST << n for n in range(5)]
    assert sizes[4] == pieces.PIECE == max(sizes)


def test_digests_of_pieces_tell_any_changed_byte() -> None:
    value = np.random.default_rng(0).integers(0, 256, 3 * 8 * WORDS + 11, np.uint8)
    told = {piece_digest(value), piece_digest(value[:-1])}
    for place in range(0, value.size, 999):
        value[place] ^= 64
        told.add(piece_digest(value))
        value[place] ^= 64
    assert len(told) == 2 + len(range(0, value.size, 999))


def test_a_piece_of_another_size_is_refused() -> None:
    pair = Pair([10], 64, lambda *_: False)
    pair.theirs[0] = pair.theirs[0][:, :5]
    with pytest.raises(LinkError, match="another size"):
        pair.fetch()

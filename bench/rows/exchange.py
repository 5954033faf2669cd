"""What a gradient that differs everywhere costs to fetch, piece by piece, against ZeroMQ alone.

The bound is on the tensors of the paper's model; of smaller models most tensors are smaller than a piece, and a message
costs as much as a megabyte does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from bench.devices import use_devices
from bench.gradients import CURVE, LEAVE, ORDERS, PAPER, PLAIN, SERVE, Setup, engine, execution, places
from bench.options import Options
from bench.results import ROOT, Row, row
from bench.stats import quantile, ratios
from bench.turns import State, Step, take_turns, walls
from tandem.vocabulary import Role
from tandem_worker.link.channel import new_keys

MEASURED_BLOCKS = 5
"""Of the exchange with its statistics, which takes many times as long."""


def measure(options: Options) -> list[Row]:
    """Of tensors as large as the paper's, and of small ones."""
    use_devices(options.tp)
    return [*_measure(replace(options, preset=PAPER), ""), *_measure(options, "_small")]


def _measure(options: Options, size: str) -> list[Row]:
    """Between the same two processes, in turns: by the engine's pieces, and as bare messages of the same bytes."""
    from tandem.statistics.mismatch import Pieces
    from tandem_worker.link import frames as f
    from tandem_worker.lockstep.norms import Norms
    from tandem_worker.lockstep.pieces import PIECE, Exchange
    from tandem_worker.lockstep.whole import WholeReference

    keys = new_keys()
    side = engine(WholeReference, Role.REFERENCE, options, "tcp://127.0.0.1:0", keys.reference)
    assert isinstance(side, WholeReference)
    run = execution(side, seed=1)
    wanted = places(run, options.tp)
    total = sum(side.machine.shard(run.outputs[o], r).nbytes for o, r in wanted)
    with _sockets(keys.reference_public, keys.reference_secret) as (sockets, endpoints):
        setup = Setup(
            options=options, link=side.channel.endpoint,
            keys=(keys.suspect.public, keys.suspect.secret, keys.suspect.peer_public), sockets=endpoints,
        )  # fmt: skip
        command = [sys.executable, "-m", "bench.peer", msgspec.json.encode(setup).decode()]
        with subprocess.Popen(command, cwd=ROOT) as peer:
            orders = sockets[ORDERS]
            orders.recv()

            def fetch(take: Callable[[int, np.ndarray, np.ndarray], None]) -> None:
                orders.send(SERVE)
                exchange = Exchange(side, run, wanted)
                for output, rank in wanted:
                    for suspect, own in exchange.pieces(output, rank):
                        take(output, suspect, own)
                side.channel.send(f.Finish())

            def exchanged(state: State, _: int) -> State:
                fetch(lambda *_: None)
                return state

            def measured(state: State, _: int) -> State:
                norms = Norms()
                found: dict[int, Pieces] = {}

                def take(output: int, suspect: np.ndarray, own: np.ndarray) -> None:
                    site = run.op.sites[output]
                    pieces = found.get(output)
                    if pieces is None or pieces.seen == site.elements:
                        pieces = found[output] = Pieces(site.shape, own.dtype)
                    pieces.add(suspect, own)
                    norms.add(suspect, own)

                fetch(take)
                return state

            def raw(name: str) -> Step:
                def received(state: State, _: int) -> State:
                    orders.send(name.encode())
                    left = total
                    while left:
                        left -= len(sockets[name].recv(copy=False))
                    return state

                return received

            kinds: dict[str, Step] = {"exchange": exchanged, CURVE: raw(CURVE), PLAIN: raw(PLAIN)}
            states: dict[str, State] = {kind: {} for kind in (*kinds, "measured")}
            wall = walls(take_turns(kinds, states, options.blocks, options.seed))
            slow = walls(take_turns({"measured": measured, CURVE: raw(CURVE)}, states, MEASURED_BLOCKS, options.seed))
            orders.send(LEAVE)
            peer.wait(30)
    side.channel.close()
    setting = options.setting(workload="gradient", mib=round(total / 2**20, 1), piece_kib=PIECE >> 10)
    return [
        row(
            f"exchange.pieces{size}",
            "a gradient that differs everywhere, fetched in pieces / the same bytes by ZeroMQ alone",
            quantile(ratios(wall, "exchange", CURVE)), setting, bound=None if size else 1.3,
        ),
        row(
            f"exchange.plain{size}", "the same / by ZeroMQ without the link's encryption",
            quantile(ratios(wall, "exchange", PLAIN)), setting,
        ),
        row(
            f"exchange.measured{size}", "fetched and measured: rows and exact norms / by ZeroMQ alone",
            quantile(ratios(slow, "measured", CURVE)), setting,
        ),
        row(
            f"exchange.rate{size}", "fetched in pieces",
            quantile([total / 2**20 / block["exchange"] for block in wall]), setting, unit="MiB/s",
        ),
    ]  # fmt: skip


@contextmanager
def _sockets(public: str, secret: str) -> Iterator[tuple[dict[str, zmq.Socket[bytes]], dict[str, str]]]:
    """The sockets beside the link, bound, with their endpoints."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = {name: context.socket(zmq.PAIR if name == ORDERS else zmq.PULL) for name in (ORDERS, CURVE, PLAIN)}
    raw = sockets[CURVE]
    raw.curve_server = 1
    raw.curve_publickey, raw.curve_secretkey = public.encode(), secret.encode()
    endpoints = {}
    for name, socket in sockets.items():
        socket.bind("tcp://127.0.0.1:0")
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        endpoints[name] = endpoint.rstrip(b"\0").decode()
    try:
        yield sockets, endpoints
    finally:
        context.destroy(0)

"""One side of an exchange of gradients: the product's own engine over a real link, with gradients out of thin air."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from bench.options import Options
from tandem.spec import resolve
from tandem.vocabulary import Role, Workload
from tandem_worker.chain import Chain
from tandem_worker.link.channel import Channel, OwnKeys, PeerState, Progress
from tandem_worker.link.frames import CHUNK
from tandem_worker.link.tensors import pack
from tandem_worker.lockstep.inbox import Inbox
from tandem_worker.lockstep.machine import Execution, Machine
from tandem_worker.lockstep.side import Settings, Side

STEP = 1
"""Number of the step that the gradients are of."""
RUN = "0" * 32
ORDERS, CURVE, PLAIN = "orders", "curve", "plain"
"""Names of the sockets beside the link: what the peer shall send next; the bytes as they are, encrypted and not."""
PAPER = "paper-16l"
"""Of this preset, the paper's model, one layer with a vocabulary of 512: the whole gradient is 9 GiB."""
SERVE, LEAVE = b"serve", b"leave"
"""Orders: answer over the link until it says `Finish`; end. The name of a socket: send all bytes there."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the peer's process is told."""

    options: Options
    link: str
    """Endpoint."""
    keys: tuple[str, str, str]
    """Public and secret of its own, and the other's public."""
    sockets: dict[str, str]
    """Name -> endpoint."""


def engine(kind: type[Side], role: Role, options: Options, link: str, keys: OwnKeys) -> Side:
    """A side whose machine has the gradient workload's plan and no programs: nothing is computed."""
    from tandem_worker.model.build import make_mesh
    from tandem_worker.model.plan import make_plan
    from tandem_worker.model.whole import make_whole_plan

    model, training = resolve(options.spec(workload="gradient"))
    if options.preset == PAPER:
        model = model.model_copy(update={"layers": 1, "vocab": 512})
    submodules = make_plan(model, training, options.tp)
    plan = make_whole_plan(submodules, model, Workload.GRADIENT)
    machine = Machine(Chain(plan, {}, False, {}, make_mesh(options.tp), {}, submodules))
    inbox, progress = Inbox(), Progress()
    channel = Channel(role, link, keys, RUN, 1, inbox.queue, progress, PeerState()).start()
    spec = options.spec()
    settings = Settings(
        window=spec.window, replays=0, replay_budget=0, self_replays=0, seed=spec.seed, row_cap=0,
        exchange_bytes=spec.exchange_mib << 20,
    )  # fmt: skip
    return kind(machine, channel, inbox, progress, settings, time.monotonic)


def execution(side: Side, seed: int) -> Execution:
    """A step whose gradients are random; its other outputs are not there. Another seed differs in every element."""
    (op,) = side.plan.ops
    rng = np.random.default_rng(seed)
    outputs: list[Any] = []
    for site in op.sites:
        if site.family != "dw":
            outputs.append(None)
            continue
        values = rng.standard_normal((side.plan.tp, *site.shape), np.float32) * np.float32(1e-3)
        outputs.append(side.machine.put(values.astype(site.dtype)))
    return Execution(op, STEP, 0, (), tuple(outputs), None, None)


def places(run: Execution, ranks: int) -> list[tuple[int, int]]:
    """(output, rank) of every gradient."""
    return [(o, r) for o, site in enumerate(run.op.sites) if site.family == "dw" for r in range(ranks)]


def messages(side: Side, run: Execution) -> Iterator[memoryview]:
    """The gradients' bytes as messages of at most the link's size."""
    for output, rank in places(run, side.plan.tp):
        whole = pack(side.machine.shard(run.outputs[output], rank))
        for start in range(0, len(whole), CHUNK):
            yield whole[start : start + CHUNK]

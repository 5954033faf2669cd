"""The suspect's process of the exchange bench: ``python -m bench.peer SETUP`` does as it is ordered."""

from __future__ import annotations

import sys

import msgspec
import zmq

from bench.devices import use_devices
from bench.gradients import CURVE, LEAVE, ORDERS, PLAIN, SERVE, Setup, engine, execution, messages
from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.channel import OwnKeys


def main() -> None:
    """Serve until told to leave."""
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    use_devices(setup.options.tp)
    from tandem_worker.lockstep.suspect import Suspect
    from tandem_worker.lockstep.transfer import send_piece

    keys = OwnKeys(*setup.keys)
    side = engine(Suspect, Role.SUSPECT, setup.options, setup.link, keys)
    run = execution(side, seed=2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = {name: context.socket(zmq.PAIR if name == ORDERS else zmq.PUSH) for name in (ORDERS, CURVE, PLAIN)}
    raw = sockets[CURVE]
    raw.curve_serverkey = keys.peer_public.encode()
    raw.curve_publickey, raw.curve_secretkey = keys.public.encode(), keys.secret.encode()
    for name, socket in sockets.items():
        socket.connect(setup.sockets[name])
    orders = sockets[ORDERS]
    orders.send(b"ready")
    while (order := orders.recv()) != LEAVE:
        if order != SERVE:
            for message in messages(side, run):
                sockets[order.decode()].send(message, copy=False)
            continue
        while True:
            frame, _ = side.expect_any(f.Want, f.Finish)
            if isinstance(frame, f.Finish):
                break
            send_piece(side, run, frame)
    side.channel.close()
    context.destroy(0)


if __name__ == "__main__":
    main()

"""Measures the links of a run and nothing else; rank 0 prints the cluster's links as JSON.

Started by test_probe.py: on every host of an emulated network, without a framework. With the argument "torch" it goes
over torch's process groups in place of sockets.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict

from nearlinear.measure.islands import islands_of
from nearlinear.measure.links import measure_links
from nearlinear.runtime.environment import world_from
from nearlinear.runtime.interface import address_to
from nearlinear.runtime.meeting import Meeting, Star

world = world_from()
meeting: Meeting
if sys.argv[1:] == ["torch"]:
    import torch

    from nearlinear.torch.probe import DeviceWires
    from nearlinear.torch.session import start

    meeting = session = start(torch.device("cpu"))
    wire = DeviceWires(session, torch.device("cpu"))
else:
    meeting, wire = Star(world, deadline_s=60.0), None
hosts = meeting.all_gather_json(socket.gethostname())
pairs, at_once = measure_links(meeting, hosts, address=address_to(world.address), deadline_s=60.0, wire=wire)
islands, between, others = islands_of({pair: both.link for pair, both in pairs.items()}, hosts)
if world.rank == 0:
    found = {
        "islands": [island.devices for island in islands],
        "between": asdict(between),
        "others": len(others),
        "directions": [asdict(each.link) for both in pairs.values() for each in (both.there, both.back)],
        "duplex": [both.duplex for both in pairs.values()],
        "streams": [both.streams for both in pairs.values()],
        "at_once": [rate / pairs[pair].there.link.bandwidth for pair, rate in at_once.items()],
    }
    json.dump(found, sys.stdout)

"""One rank of a probe: joining the others, measuring with them, and handing the result on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from nearlinear import events
from nearlinear.errors import NearlinearError
from nearlinear.measure import cache
from nearlinear.measure.hardware import Hardware, here
from nearlinear.measure.probe import Measured, probe
from nearlinear.measure.speed import NumpyComputer
from nearlinear.runtime.environment import World, deadline_s, world_from
from nearlinear.runtime.interface import address_to
from nearlinear.runtime.meeting import Star


def measure_as_rank(world: World, *, fresh: bool, say: Callable[[str], None]) -> tuple[Measured, bool]:
    """Return what all ranks measured together, and whether it was measured before; all ranks call it.

    Args:
        world: Who this process is.
        fresh: Measure, even if rank 0 finds a file of the same hardware.
        say: Called with what is measured next, on rank 0.

    Raises:
        PeerLostError: A rank died, or did not answer within ``NEARLINEAR_DEADLINE``.
    """
    if world.rank != 0:
        say = _nothing
    measure = _by_torch if find_spec("torch") is not None else _by_sockets
    return measure(world, deadline_s(), fresh, say)


def _by_torch(world: World, deadline_s: float, fresh: bool, say: Callable[[str], None]) -> tuple[Measured, bool]:
    """Meet and measure as training will: by torch.distributed."""
    from nearlinear.torch.probe import DeviceWires, TorchCollectives, TorchComputer, own_device
    from nearlinear.torch.session import start

    device, hardware = own_device(), here()
    session = start(device)
    kept = _kept(session.all_gather_json, hardware, world, fresh)
    if kept is not None:
        return kept, True
    several = session.size > 1
    measured = probe(
        session,
        TorchComputer(device, hardware.memory / world.local_size),
        hardware,
        address=address_to(world.address),
        deadline_s=deadline_s,
        collectives=TorchCollectives(session, device) if several else None,
        wire=DeviceWires(session, device) if several and device.type == "cuda" else None,
        say=say,
    )
    session.barrier("the end of the probe")
    return measured, False


def _by_sockets(world: World, deadline_s: float, fresh: bool, say: Callable[[str], None]) -> tuple[Measured, bool]:
    """Meet and measure without a framework; collective operations are not measured, for there are none."""
    meeting, hardware = Star(world, deadline_s), here()
    try:
        kept = _kept(meeting.all_gather_json, hardware, world, fresh)
        if kept is not None:
            return kept, True
        computer = NumpyComputer(hardware.memory / world.local_size)
        address = address_to(world.address)
        return probe(meeting, computer, hardware, address=address, deadline_s=deadline_s, say=say), False
    finally:
        meeting.close()


def _kept(
    all_gather_json: Callable[[object, str], list[object]], hardware: Hardware, world: World, fresh: bool
) -> Measured | None:
    """Return what rank 0 has kept of this hardware, the same on all ranks."""
    what = "looking for an earlier probe"
    everyone = all_gather_json(hardware.to_dict(), what)
    found = None
    if world.rank == 0 and not fresh:
        found = cache.find([Hardware.from_dict(each) for each in everyone if isinstance(each, dict)])
    text = all_gather_json(found.to_json() if found is not None else None, what)[0]
    return Measured.from_json(text) if isinstance(text, str) else None


def _nothing(_: str) -> None:
    """Say nothing: rank 0 does."""


def main() -> int:
    """Measure as a rank that `nearlinear probe` has started; rank 0 writes the result to the file that is named."""
    world = world_from()
    try:
        measured, _ = measure_as_rank(world, fresh=True, say=lambda what: events.send_to_launcher("probe", what=what))
        if world.rank == 0:
            cache.write(Path(sys.argv[1]), measured.to_json())
    except NearlinearError as error:
        print(f"nearlinear: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

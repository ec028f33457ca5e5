"""The same loop under other libraries that train apart for some steps, where they are installed.

    pip install torchft hivemind

Both are given what they ask for and no more: equal members that are all there from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIGHTHOUSE, STORE = 29510, 29511  # ports
LIMIT = timedelta(seconds=120)
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # of DiLoCo's paper


@contextlib.contextmanager
def torchft(
    model: nn.Module, optimizer: torch.optim.Optimizer, members: int, number: int, every: int, *, outer: bool
) -> Iterator[Any]:
    """Average over a torchft quorum after every so many steps; what it yields makes a step.

    Args:
        model: To be trained.
        optimizer: Of the steps between.
        members: How many there are.
        number: Which of them this is.
        every: Steps.
        outer: With DiLoCo's outer optimizer; else plain averages (local SGD).
    """
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    here, first = os.environ["HERE"], os.environ["FIRST"]
    lighthouse = LighthouseServer(bind=f"[::]:{LIGHTHOUSE}", min_replicas=members) if number == 0 else None
    store = TCPStore("0.0.0.0", STORE, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=members,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=STORE,
        lighthouse_addr=f"http://{first}:{LIGHTHOUSE}",
        replica_id=f"replica_{number}",
        hostname=here,
        init_sync=False,
    )
    try:
        if outer:
            across = torch.optim.SGD(model.parameters(), **OUTER)
            training: Any = DiLoCo(manager, [model], optimizer, across, sync_every=every)
        else:
            training = LocalSGD(manager, model, optimizer, sync_every=every)
        with training:
            yield optimizer
    finally:
        time.sleep(1.0)  # others may still ask this one's store
        manager.shutdown(wait=False)
        del store, lighthouse


@contextlib.contextmanager
def hivemind(
    optimizer: torch.optim.Optimizer, members: int, number: int, every: int, batch: int, folder: Path
) -> Iterator[Any]:
    """Average by hivemind's optimizer with local updates; what it yields makes a step.

    Args:
        optimizer: Of the steps.
        members: How many there are.
        number: Which of them this is.
        every: Steps between averages.
        batch: Samples of a step, over all members.
        folder: Where the first leaves its address.
    """
    import hivemind as library

    address = folder / "peers"
    known: list[str] = []
    until = time.monotonic() + LIMIT.total_seconds()
    while number and time.monotonic() < until and not known:
        known = address.read_text().split() if address.exists() else []
        time.sleep(0.1)
    dht = library.DHT(initial_peers=known, host_maddrs=[f"/ip4/{os.environ['HERE']}/tcp/0"], start=True)
    if not number:
        partial = address.with_suffix(".new")
        partial.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        partial.rename(address)
    training = library.Optimizer(
        dht=dht,
        run_id="run",
        batch_size_per_step=batch // members,
        target_batch_size=batch * every,
        optimizer=optimizer,
        use_local_updates=True,
        matchmaking_time=2.0,
        averaging_timeout=20.0,
    )
    try:
        yield training
    finally:
        training.shutdown()
        dht.shutdown()

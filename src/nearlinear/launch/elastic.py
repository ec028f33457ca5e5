"""Turning `nearlinear run --nnodes ...` into torch's elastic agent, which starts the ranks of several machines."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from nearlinear.errors import InputError
from nearlinear.launch.environment import gpus_for, threads
from nearlinear.runtime.environment import usable_cores
from nearlinear.runtime.interface import address_to, interface_to


def run_elastic(
    script: Sequence[str], n: int, nnodes: int, rdzv: str, node_rank: int | None, env: Mapping[str, str]
) -> NoReturn:
    """Replace this process by the elastic agent.

    Args:
        script: The script and its arguments.
        n: Processes on this machine.
        nnodes: Number of machines.
        rdzv: ``HOST:PORT`` at which the machines meet; HOST is one of them.
        node_rank: This machine's number; 0 is HOST. None: the agent compares HOST with its own name and addresses.
        env: Variables added to this process's own.

    Raises:
        InputError: torch is missing, ``rdzv`` is not an endpoint or cannot be reached, or this machine has fewer GPUs
            than processes.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("--nnodes needs torch, which is not installed; pip install 'nearlinear[torch]'")
    host, _ = parse_endpoint(rdzv)
    command = elastic_command(script, n, nnodes, rdzv, node_rank, address_to(host))
    environment = {**os.environ, **env}
    gpus_for(n, environment)
    environment |= threads(n, usable_cores(), environment)
    interface = interface_to(host)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def elastic_command(
    script: Sequence[str], n: int, nnodes: int, rdzv: str, node_rank: int | None, local_address: str
) -> list[str]:
    """Return the elastic agent's command line; ``local_address`` is where the other machines reach this one.

    Example:
        >>> elastic_command(["train.py"], 4, 2, "a:29500", None, "10.0.0.2")[3:]
        ['--nnodes=2', '--nproc-per-node=4', '--rdzv-backend=c10d', '--rdzv-endpoint=a:29500', \
'--rdzv-id=nearlinear', '--local-addr=10.0.0.2', '-m', 'nearlinear.launch.one_gpu', 'train.py']
    """
    # The agent's own --node-rank is for its static rendezvous alone. Here a node's number decides who opens the port:
    # by itself the agent compares names, which fails where they do not resolve.
    who_hosts = [] if node_rank is None else [f"--rdzv-conf=is_host={'true' if node_rank == 0 else 'false'}"]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nnodes}",
        f"--nproc-per-node={n}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rdzv}",
        "--rdzv-id=nearlinear",
        *who_hosts,
        f"--local-addr={local_address}",
        "-m",
        "nearlinear.launch.one_gpu",
        *script,
    ]


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return the host and port in ``HOST:PORT``.

    Raises:
        InputError: ``text`` is not of that form.

    Example:
        >>> parse_endpoint("[::1]:29500")
        ('::1', 29500)
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{text!r} is not HOST:PORT; write it like 10.0.0.1:29500")
    return host[1:-1] if bracketed else host, int(port)

"""Testing a script under many processes, faults and slow links.

from nearlinear.testing import Network, equivalent, run_processes

assert equivalent("train.py", n=3, float64=True).equal                      # the numbers of one process
results = run_processes("train.py", 3, fault="kill:1@3")                    # rank 1 dies after step 3
with Network(hosts=2, rate="100 Mbit/s", delay="40 ms") as network:         # over a slow link (Linux, root)
    results = run_processes("train.py", 2, network=network)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearlinear.testing.comparison import Comparison, Parting, Reason, Row
    from nearlinear.testing.equivalence import RunError, compare, equivalent
    from nearlinear.testing.faults import Fault, InjectedFault
    from nearlinear.testing.links import Host, Network, can_emulate
    from nearlinear.testing.processes import Result, run_processes
    from nearlinear.testing.record import Record, Recorder, Step

# Imported when asked for: `python -m nearlinear.testing.record` must not find the module there already.
_HOMES = {
    "comparison": ("Comparison", "Parting", "Reason", "Row"),
    "equivalence": ("RunError", "compare", "equivalent"),
    "faults": ("Fault", "InjectedFault"),
    "links": ("Host", "Network", "can_emulate"),
    "processes": ("Result", "run_processes"),
    "record": ("Record", "Recorder", "Step"),
}

__all__ = [
    "Comparison",
    "Fault",
    "Host",
    "InjectedFault",
    "Network",
    "Parting",
    "Reason",
    "Record",
    "Recorder",
    "Result",
    "Row",
    "RunError",
    "Step",
    "can_emulate",
    "compare",
    "equivalent",
    "run_processes",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"nearlinear.testing.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Claims about the forecasts of benchmarks/forecast/here.py, which are made from a profile and a cluster file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nearlinear.core.cluster import Cluster, Crowd, Device, Exchange, Island, Link

HERE = Path(__file__).parents[1] / "benchmarks" / "forecast" / "here.py"


@pytest.fixture(scope="module")
def here() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("forecast_here", HERE)
    assert spec is not None
    assert spec.loader is not None
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path[:] = path


def cluster(*crowds: Crowd) -> Cluster:
    """Return four processors whose messages take no time."""
    link = Link(0.0, 1e15)
    free = tuple(Exchange(kind, "gloo ring", ranks, link) for kind in ("all_reduce", "broadcast") for ranks in (2, 4))
    cpu = Device("cpu", 8e9, {"float32": 50e9}, 1e10)
    return Cluster((cpu,) * 4, (Island((0, 1, 2, 3), link),), link, crowds=crowds, exchanges=free)


def test_a_cache_that_four_processes_share_does_not_make_them_faster_than_two(here: ModuleType) -> None:
    def profile(seconds: float) -> object:
        return here.Profile(seconds / 3, seconds * 2 / 3, 0.0, (seconds / 2,), (4,), 1e9, 0)

    # A quarter of the batch alone takes less than a quarter of the time: it fits the cache.
    profiles = {1: profile(0.4), 2: profile(0.2), 4: profile(0.08)}
    shared = cluster(Crowd(2, 1.0, 1.0), Crowd(4, 0.5, 0.5))
    one, two, four = (here.forecast(profiles, shared, processes, "plain") for processes in (1, 2, 4))
    assert (one, two, four) == pytest.approx((0.4, 0.2, 0.2))
    assert here.forecast(profiles, shared, 4, "ddp") == pytest.approx(0.2, rel=1e-3)
    # Four that have a cache each keep what it brings.
    assert here.forecast(profiles, cluster(), 4, "plain") == pytest.approx(0.08)


def test_the_number_to_stop_at_is_judged_by_what_was_measured_over_the_same_link(here: ModuleType) -> None:
    def row(link: str, processes: int, forecast: float, measured: float) -> dict[str, object]:
        rival = "ddp" if processes > 1 else here.ALONE
        found = {"model": "m", "link": link, "processes": processes, "rival": rival}
        return {**found, "forecast": forecast, "blocks": [measured]}

    rows = [row("a", 1, 1.0, 1.0), row("a", 2, 0.6, 0.5), row("b", 1, 1.0, 0.4), row("b", 2, 0.6, 0.5)]
    stops = [(cell["stop"], cell["fastest"], round(cell["lost"], 3)) for cell in here.best_numbers(rows)]
    assert stops == [(2, 2, 0.0), (2, 1, 0.2)]

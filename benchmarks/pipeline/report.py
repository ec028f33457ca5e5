"""Turning what was measured into tables and into what meets its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from nearlinear.units import seconds, size

BOUND, FORECAST, OVERHEAD, MEMORY = 0.9, 0.1, 0.02, 1.15  # the targets


def markdown(record: Mapping[str, Any]) -> str:
    """Return the tables of the parts that were measured, and which targets they meet."""
    texts, met = [_caption(record)], list[str]()
    for part, write in _PARTS.items():
        if part in record:
            text, verdicts = write(record[part])
            texts.append(text)
            met += verdicts
    return "\n\n".join([*texts, "\n".join(met)]) + "\n"


def _speed(cases: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    rows, met = [], list[str]()
    limit = _median(cases[0], "halves/8")
    for case in cases:
        one = _median(case, "one")
        for way in case["blocks"]:
            pieces = _pieces(way)
            cells = [way, _range(case, way), f"{one / _median(case, way):.3f}"]
            if way.startswith(("one", "halves")):
                rows.append([*cells, "", "", ""])
                continue
            bound = 2 * pieces / (pieces + 1)
            share, reached = one / _median(case, way) / bound, limit * (pieces + 1) / pieces / _median(case, way)
            rows.append([*cells, f"{bound:.3f}", f"{share:.3f}", f"{reached:.3f}" if pieces == 8 else ""])
            if way in ("nearlinear/8", "step/8"):
                text = f"{way}, two stages, 8 microbatches: {share:.3f} of the bubble bound"
                met.append(_verdict(share >= BOUND, text, BOUND))
    case = cases[0]
    for rival in ("gpipe/8", "1f1b/8"):
        ratio = _ratio(case, rival, "nearlinear/8")
        met.append(f"- nearlinear/8 is {ratio} times as fast as torch's {rival} on the balanced model")
    header = ["way", "step", "speed-up over one", "bubble bound", "of it", "of what these two cores allow"]
    return _table(header, rows) + "\n\n" + _processor(case) + _cut(case), met


def _split(cases: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    rows, met, notes = [], [], []
    for case in cases:
        own = [plan for plan in case["plans"] if plan["way"] == "nearlinear/8"]
        loads = median(max(each["alike"]["loads"]) / max(each["run"]["loads"]) for each in own)
        step = median(each["alike"]["step"] / each["run"]["step"] for each in own)
        for way in case["blocks"]:
            gain = "" if way == "nearlinear/8" else _ratio(case, way, "nearlinear/8")
            rows.append(
                [case["case"], way, _range(case, way), f"{_median(case, 'one') / _median(case, way):.3f}", gain]
            )
        measured = _median(case, "alike/8") / _median(case, "nearlinear/8")
        rows.append([case["case"], "forecast: loads", "", "", f"{loads:.3f}"])
        rows.append([case["case"], "forecast: step of 8", "", "", f"{step:.3f}"])
        for what, said in (("loads", loads), ("step", step)):
            off = measured / said - 1
            text = f"{case['case']}: gain {measured:.3f}, by the forecast of the {what} {said:.3f}: {off:+.1%}"
            met.append(_verdict(abs(off) <= FORECAST, text, "within 10%"))
        notes.append(f"{case['case']}: " + _cut(case))
    header = ["model", "way", "step", "speed-up over one", "step over nearlinear's own split"]
    return _table(header, rows) + "\n\n" + "\n".join(notes), met


def _graph(models: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    rows, met = [], []
    for each in models:
        pairs = [graph / model for graph, model in zip(each["graph"]["seconds"], each["model"]["seconds"], strict=True)]
        processor = median(each["graph"]["processor"]) / median(each["model"]["processor"])
        ratio = median(each["graph"]["seconds"]) / median(each["model"]["seconds"])
        quartiles = sorted(pairs)[len(pairs) // 4], sorted(pairs)[3 * len(pairs) // 4]
        rows.append(
            [each["of"], str(each["samples"]), str(len(pairs)), seconds(median(each["model"]["seconds"])),
             f"{ratio:.3f}", f"{median(pairs):.3f} [{quartiles[0]:.3f} .. {quartiles[1]:.3f}]", f"{processor:.3f}"]
        )  # fmt: skip
        text = f"captured graph of {each['of']} in one process: {median(pairs) - 1:+.1%} of a step"
        met.append(_verdict(median(pairs) - 1 <= OVERHEAD, text, f"{OVERHEAD:.0%}"))
    header = ["model", "samples", "pairs", "step of the model", "ratio of medians", "of pairs [quartiles]", "processor"]
    return _table(header, rows), met


def _memory(runs: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> tuple[str, list[str]]:
    rows, met = [], []
    for ranks in runs:
        shares = ranks[0][0]["shares"]
        worst = 0.0
        for [rank] in ranks:
            share = shares[rank["rank"]]
            worst = max(worst, rank["held"] / share)
            rows.append(
                [str(len(ranks)), str(rank["rank"]), size(share), size(rank["held"]), f"{rank['held'] / share:.3f}",
                 size(rank["everything"]), size(rank["resident"]), size(rank["whole"])]
            )  # fmt: skip
        met.append(_verdict(worst <= MEMORY, f"{len(ranks)} stages: at most {worst:.3f} of the plan's share", MEMORY))
    header = ["stages", "rank", "share", "held", "of the share", "all tensors alive", "resident, peak", "one process"]
    return _table(header, rows), met


def _fit(found: Mapping[str, Any]) -> tuple[str, list[str]]:
    alone, four = found["1"], found["4"]
    text = (
        f"Parameters, gradients and Adam's moments: {size(found['whole'])}; addresses of a rank with a tiny model: "
        f"{size(found['bare'])}, of a process before it trains: {size(found['alone'])}; `ulimit -v`: "
        f"{size(found['limit'])}. One process: {alone if isinstance(alone, str) else 'fits'}. Four: "
        + (four if isinstance(four, str) else ", ".join(size(rank["peak"]) for rank in four) + " at their peaks")
        + "."
    )
    good = isinstance(alone, str) and not isinstance(four, str)
    return text, [_verdict(good, "a model that does not fit one process's ulimit -v trains in four", "yes")]


_PARTS: dict[str, Callable[[Any], tuple[str, list[str]]]] = {
    "speed": _speed,
    "split": _split,
    "graph": _graph,
    "memory": _memory,
    "fit": _fit,
}


def _times(case: Mapping[str, Any], way: str) -> list[float]:
    blocks = [each["seconds"] for each in case["blocks"][way]]
    return [each[0] if way.startswith("one") else max(each) for each in blocks]


def _median(case: Mapping[str, Any], way: str) -> float:
    return median(_times(case, way))


def _range(case: Mapping[str, Any], way: str) -> str:
    times = _times(case, way)
    return f"{seconds(median(times))} [{1e3 * min(times):.0f} .. {1e3 * max(times):.0f}]"


def _ratio(case: Mapping[str, Any], way: str, ours: str) -> str:
    rounds = [a / b for a, b in zip(_times(case, way), _times(case, ours), strict=True)]
    return f"{_median(case, way) / _median(case, ours):.3f} [{min(rounds):.2f} .. {max(rounds):.2f}]"


def _pieces(way: str) -> int:
    return int(way.partition("/")[2] or 0)


def _processor(case: Mapping[str, Any]) -> str:
    def each() -> Iterator[str]:
        for way in ("halves/8", "nearlinear/8", "step/8", "gpipe/8", "1f1b/8"):
            ranks = zip(*(block["processor"] for block in case["blocks"][way]), strict=True)
            yield f"{way} {' + '.join(f'{1e3 * median(rank):.0f}' for rank in ranks)}"

    others = [block["others"] for blocks in case["blocks"].values() for block in blocks]
    taken = f"Others took {median(others):.0%} of the cores, at most {max(others):.0%}."
    return f"Processor milliseconds per step, rank 0 + rank 1: {', '.join(each())}. {taken} "


def _cut(case: Mapping[str, Any]) -> str:
    def layers(plan: Mapping[str, Any]) -> str:
        return " + ".join("1" if share == 1 else f"{share:.2f}" for share in plan["first stage"].values())

    def cuts(way: str) -> str:
        return "; ".join(sorted({layers(plan) for plan in case["plans"] if plan["way"] == way}))

    return f"Layers on stage 0 in the plans made: {cuts('nearlinear/8')}; for step/8, {cuts('step/8')}."


def _verdict(good: bool, text: str, target: Any) -> str:
    return f"- {'met' if good else '**missed**'}: {text} (target {target})"


def _caption(record: Mapping[str, Any]) -> str:
    machine, options = record["machine"], record["options"]
    return (
        f"{machine['date']}: {machine['processor']}, {machine['cores']} cores (load of others before the start "
        f"{machine['load']}), {machine['system']}, Python {machine['python']}, torch {machine['torch']}, nearlinear "
        f"{machine['nearlinear']}. Seed {options['seed']}; {options['placements']} times {options['blocks']} rounds of "
        f"blocks of {options['seconds']:g} s, the models made anew each time; medians, and in brackets the ranges over "
        "the blocks."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)

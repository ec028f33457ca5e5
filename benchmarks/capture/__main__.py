"""Capturing many models: which rung of the ladder each takes, and why not a higher one.

    python benchmarks/capture                     all of them, a few minutes; needs transformers 5
    python benchmarks/capture --only Llama MoE    those with these words in their names
    python benchmarks/capture --markdown          the table as it stands in README.md

A model that cannot be captured, or whose graph lacks a parameter, is reported as such and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from difficult import DIFFICULT
from handwritten import HANDWRITTEN
from torch import nn

from nearlinear.errors import InputError
from nearlinear.torch.capture import NON_STRICT, Captured, capture

COLUMNS = ("model", "rung", "operators", "tensors", "s", "mix the batch", "why not higher, and what else is said")


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    name: str
    seconds: float
    captured: Captured | None
    failure: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row's cells."""
        if self.captured is None:
            return (self.name, "NONE", "", "", f"{self.seconds:.1f}", "", self.failure)
        graph = self.captured.graph
        mixing = [operator.name for operator in graph.operators if operator.mixes_batch]
        shown = ", ".join(mixing[:3]) + (f" and {len(mixing) - 3} more" if len(mixing) > 3 else "")
        said = "; ".join(_short(note) for note in self.captured.notes)
        counts = (str(len(graph.operators)), str(len(graph.tensors)))
        return (self.name, self.captured.rung, *counts, f"{self.seconds:.1f}", shown, said)


def main() -> int:
    """Capture every model, print the table, and the model of a billion parameters below it."""
    args = _arguments()
    if args.large:
        return _large()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cases: dict[str, Callable[[], Any]] = {**_families(), **HANDWRITTEN, **DIFFICULT}
    wanted = [name for name in cases if not args.only or any(word.lower() in name.lower() for word in args.only)]
    rows = []
    for name in wanted:
        print(f"{len(rows) + 1}/{len(wanted)} {name}", file=sys.stderr, flush=True)
        rows.append(_row(name, cases[name]))
    print(_machine())
    print(_table([COLUMNS, *(row.cells() for row in rows)], markdown=args.markdown))
    rungs: dict[str, int] = {}
    for row in rows:
        rung = row.captured.rung if row.captured else "none"
        rungs[rung] = rungs.get(rung, 0) + 1
    print(f"\n{len(rows)} models: " + ", ".join(f"{count} by {rung}" for rung, count in rungs.items()))
    failed = [f"{row.name} ({row.failure})" for row in rows if row.failure]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    if not args.only:
        child = subprocess.run(
            [sys.executable, __file__, "--large"], capture_output=True, text=True, timeout=600, check=True
        )
        print(json.loads(child.stdout.splitlines()[-1])["text"])
    return 1 if failed else 0


def _row(name: str, make: Callable[[], Any]) -> Row:
    torch.manual_seed(0)
    model, args, kwargs = make()
    model.train()
    start = time.perf_counter()
    try:
        captured = capture(model, args, kwargs, name=name)
    except InputError as error:
        return Row(name, time.perf_counter() - start, None, str(error))
    return Row(name, time.perf_counter() - start, captured, _lack(model, captured))


def _lack(model: nn.Module, captured: Captured) -> str:
    have, want = captured.graph.parameter_bytes, sum(each.numel() * each.element_size() for each in model.parameters())
    told = any(note.startswith("used by no operator") for note in captured.notes)
    return "" if have == want or told else f"{want - have:.0f} bytes of its parameters are in no operator"


def _families() -> dict[str, Callable[[], Any]]:
    from families import FAMILIES  # here, for without transformers the rest can be asked for with --only

    return dict(FAMILIES)


def _large() -> int:
    """Capture a Llama of 1.1 billion parameters on the meta device; print seconds and the process's peak memory."""
    import transformers as hf

    logging.disable(logging.WARNING)
    config = hf.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
        tokens = torch.zeros(4, 2048, dtype=torch.long)
    before = _peak()
    start, processor = time.perf_counter(), time.process_time()
    captured = capture(model, (), {"input_ids": tokens, "labels": tokens})
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    assert captured.rung == NON_STRICT, captured
    flop = sum(operator.flop for operator in captured.graph.operators)
    text = (
        f"\nLlama of {captured.graph.parameter_bytes / 4e9:.2f} billion parameters on the meta device, "
        f"4 x 2048 tokens: {len(captured.graph.operators)} operators, {flop:.3g} FLOP, "
        f"{seconds:.1f} s ({processor:.1f} s of a processor), "
        f"peak memory {_peak() / 2**30:.2f} GiB (before: {before / 2**30:.2f})"
    )
    print(json.dumps({"text": text}))
    return 0


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _short(note: str, most: int = 150) -> str:
    note = note.replace("|", "/")
    return note if len(note) <= most else note[: most - 3] + "..."


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {packages}, seed 0, one run\n"


def _table(rows: list[tuple[str, ...]], *, markdown: bool) -> str:
    if markdown:
        lines = [" | ".join(row) for row in rows]
        return "\n".join(f"| {line} |" for line in [lines[0], " | ".join("---" for _ in COLUMNS), *lines[1:]])
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/capture", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models with one of these words in their names")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--large", action="store_true", help="only the model of a billion parameters, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

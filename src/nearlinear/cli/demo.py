"""The command `nearlinear demo`: two real trainings, each on one process and on several, and what that gained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nearlinear import units
from nearlinear.cli.comparison import Comparison, Example, Limits, compare
from nearlinear.errors import InputError
from nearlinear.observe.curves import Series, draw, svg
from nearlinear.runtime.environment import usable_cores

SCRIPTS = Path(__file__).parent.parent / "examples"
EXAMPLES = (
    Example(
        name="digits",
        title="Digits: a CNN on 1,500 scans",
        script=SCRIPTS / "digits.py",
        batch=64,
        whole=("--epochs", "8"),
        quick=("--epochs", "1"),
        timed=("--epochs", "1"),
    ),
    Example(
        name="gpt",
        title="GPT: 0.86 million parameters on Python's manual",
        script=SCRIPTS / "gpt.py",
        batch=8,
        whole=("--steps", "320"),
        quick=("--steps", "8"),
        timed=("--steps", "20"),
    ),
)
KERAS_EXAMPLES = (
    Example(
        name="digits-keras",
        title="Digits: a CNN in Keras on 1,500 scans",
        script=SCRIPTS / "digits_keras.py",
        batch=64,
        whole=("--epochs", "8"),
        quick=("--epochs", "1"),
        timed=("--epochs", "1"),
    ),
)
_PYTORCH = {"torch": "torch", "sklearn": "scikit-learn"}, "'nearlinear[demo]'"
_KERAS = {"tensorflow": "tensorflow", "keras": "keras", "sklearn": "scikit-learn"}, "tensorflow keras scikit-learn"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "demo",
        help="train on real data, on one process and on two",
        description="Train two small models on real data, on one process and on several, and show what that gained. "
        "Takes about two minutes on two cores.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="processes of the second run (default: 2)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="for curves and records")
    parser.add_argument("--keras", action="store_true", help="a model in Keras, on TensorFlow, in place of PyTorch's")
    parser.add_argument("--quick", action="store_true", help="a few steps, curves and speeds only: half a minute")
    parser.set_defaults(call=demo)


def demo(options: argparse.Namespace) -> int:
    """Train, show curves and tables, and return the exit code.

    Raises:
        InputError: A package is missing, or an option cannot be.
        NearlinearError: A training failed.
    """
    n: int = options.processes
    examples = KERAS_EXAMPLES if options.keras else EXAMPLES
    _check(n, options.out, examples, _KERAS if options.keras else _PYTORCH)
    print(
        f"nearlinear: every process has one thread, on the CPU; this machine has {usable_cores()} core(s)",
        file=sys.stderr,
    )
    console = Console(highlight=False)
    comparisons = []
    for example in examples:
        comparisons.append(compare(example, n, options.out, quick=options.quick))
        _show_curves(comparisons[-1], options.out, console)
    _show_speed(comparisons, console)
    limits = {each.example.name: each.limits for each in comparisons if each.limits is not None}
    if limits:
        _show_limits(limits, n, console)
    sys.stdout.flush()
    print(f"nearlinear: the curves (SVG) and the records of all runs are in {options.out}", file=sys.stderr)
    print("hint: nearlinear run -n 2 your_script.py", file=sys.stderr)
    return 0


def _check(n: int, out: Path, examples: Sequence[Example], needed: tuple[dict[str, str], str]) -> None:
    packages, install = needed
    missing = [name for module, name in packages.items() if find_spec(module) is None]
    if missing:
        raise InputError(f"the demo needs {' and '.join(missing)}: pip install {install}")
    most = min(example.batch for example in examples)
    if not 2 <= n <= most:
        raise InputError(f"--processes is {n}; the demo compares one process with 2 to {most}")
    if n > usable_cores():
        print(f"nearlinear: {n} processes take turns on {usable_cores()} core(s): expect no speed-up", file=sys.stderr)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from None


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"


def _show_curves(comparison: Comparison, out: Path, console: Console) -> None:
    series = [
        Series(_processes(1), comparison.steps, comparison.losses_one),
        Series(_processes(comparison.n), comparison.steps, comparison.losses_many),
    ]
    title = comparison.example.title
    (out / f"{comparison.example.name}.svg").write_text(svg(series, title=title, x="step", y="loss"), encoding="utf-8")
    width, ascii_only = max(30, min(console.width, 100)), console.options.ascii_only
    console.print(draw(series, width=width, title=title, x="step", y="loss", ascii_only=ascii_only), soft_wrap=True)
    console.print(
        f"largest difference of the two losses in {len(comparison.steps)} steps: {comparison.difference:.1e}\n",
        soft_wrap=True,
    )


def _show_speed(comparisons: Sequence[Comparison], console: Console) -> None:
    n = comparisons[0].n
    table = Table(title="Samples per second (median step, one thread per process)", title_justify="left")
    table.add_column("")
    for heading in (_processes(1), _processes(n), "speed-up", "efficiency"):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        batch, one, many = comparison.example.batch, comparison.step_one, comparison.step_many
        table.add_row(
            comparison.example.name,
            f"{batch / one:,.4g}",
            f"{batch / many:,.4g}",
            f"{one / many:.2f}",
            f"{one / many / n:.0%}".replace("%", " %"),
        )
    console.print(table)


def _show_limits(limits: Mapping[str, Limits], n: int, console: Console) -> None:
    table = Table(title=f"What a step on {n} processes is made of", title_justify="left")
    table.add_column("")
    for name in limits:
        table.add_column(name, justify="right")
    rows = {
        f"ideal: a step of one process / {n}": [each.ideal for each in limits.values()],
        "compute that does not shrink with the batch": [each.fixed for each in limits.values()],
        f"{n} processes side by side on one machine": [each.crowding for each in limits.values()],
        "exchange of gradients, waiting": [each.exchange for each in limits.values()],
    }
    for what, parts in rows.items():
        table.add_row(what, *map(units.seconds, parts))
    table.add_section()
    table.add_row("measured step", *(units.seconds(each.step) for each in limits.values()))
    console.print(table)
    for name, each in limits.items():
        console.print(f"{name}: {limit_text(each)}", soft_wrap=True)


def limit_text(limits: Limits) -> str:
    """Return a sentence on what keeps the speed-up from N.

    Example:
        >>> limit_text(Limits(ideal=0.04, fixed=0.005, crowding=0.002, exchange=0.003))
        'limited most by compute that does not shrink with the batch (10 % of a step); a larger batch helps'
    """
    causes = (
        (limits.fixed, "compute that does not shrink with the batch", "a larger batch helps"),
        (limits.crowding, "processes side by side on one machine (cache, memory, clock)", "a second machine helps"),
        (limits.exchange, "exchange and waiting", "a larger batch helps: as much to exchange, in fewer steps"),
    )
    least, (seconds, cause, remedy) = min(causes), max(causes)
    if least[0] < -0.1 * limits.step:
        return (
            f"these parts do not add up ({least[1]}: {units.seconds(least[0])}); "
            "something else used the cores meanwhile: run it again on an idle machine"
        )
    share = seconds / limits.step
    if share < 0.02:
        return "no part beyond the ideal takes 2 % of a step"
    return f"limited most by {cause} ({share:.0%} of a step); {remedy}".replace("%", " %")

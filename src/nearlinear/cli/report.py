"""The command `nearlinear report`: turning a run's record into one HTML file, and saying in short what is in it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from nearlinear.errors import InputError
from nearlinear.measure.cache import write
from nearlinear.observe import kept
from nearlinear.observe.page import page
from nearlinear.observe.page.content import Content
from nearlinear.observe.page.recorded import report as content_of
from nearlinear.observe.record import Run, read_run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "report",
        help="draw a run: its speed, where its time went, forecast against measurement",
        description="Write one HTML file about a run, from the record that `nearlinear run` left.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a record, or `last` for the newest")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to (default: the record's name, here)")
    parser.set_defaults(call=report)


def report(options: argparse.Namespace) -> int:
    """Write the page, print its path, and return the exit code.

    Raises:
        InputError: There is no such record, it is damaged, or the page cannot be written.
    """
    path = kept.last_run() if options.run == "last" else Path(options.run)
    run = read_run(path)
    content = content_of(run, _others(run))
    out: Path = Path(f"{path.stem}.html") if options.out is None else options.out
    with contextlib.suppress(OSError):
        if out.exists() and out.samefile(path):
            raise InputError(f"{out} is the record itself; name another file for the page")
    if not out.parent.is_dir():
        raise InputError(f"cannot write the page {out}: No such file or directory {str(out.parent)!r}")
    write(out, page(content))
    for line in _in_short(run, content):
        print(line, file=sys.stderr)
    print(out)
    return 0


def _others(run: Run) -> list[Run]:
    """Return the other runs of the same script with the same arguments that ended well, the newest first."""
    found = []
    for path in kept.kept_runs():
        with contextlib.suppress(InputError, OSError):  # damaged, or removed meanwhile: it is not what was asked for
            if run.same and not path.samefile(run.path):
                other = read_run(path)
                if other.same == run.same and other.exit_code == 0:
                    found.append(other)
    return found


def _in_short(run: Run, content: Content) -> list[str]:
    lines = [content.title + ": " + ", ".join(f"{each.label} {each.value}" for each in content.figures)]
    lines += [
        f"{each.what}: predicted {each.predicted}, measured {each.measured}"
        + (f", {each.remark}" if each.remark else "")
        for each in content.compared
    ]
    if run.exit_code is None or run.message:
        lines += content.notes[:1]
    if content.forecast is not None:
        lines.append(f"stop at {content.forecast.stop}: {content.forecast.reason}")
    return lines

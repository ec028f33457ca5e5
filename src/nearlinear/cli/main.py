"""The command `nearlinear`: turning a command line into a call, and an error into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nearlinear.errors import InputError, NearlinearError

COMMANDS = {
    "run": "run",
    "join": "join",
    "check": "check",
    "plan": "plan",
    "probe": "probe",
    "report": "report",
    "demo": "demo",
}  # the command and its module, in the order of the help


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (this process's own by default) and return the exit code."""
    try:
        options = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
        code: int = options.call(options)
    except NearlinearError as error:
        print(f"nearlinear: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version  # takes longer than all else here

        try:
            print(f"nearlinear {version('nearlinear')}")
        except PackageNotFoundError:
            print("nearlinear, run from its source without being installed")
        parser.exit()


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="nearlinear", description="Train one script on one process or many.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = [name for name in COMMANDS if name in argv[:1]]
    for name in asked or COMMANDS:  # only what is asked for is imported: NumPy and the like take their time
        importlib.import_module(f"nearlinear.cli.{COMMANDS[name]}").register(commands)
    return parser

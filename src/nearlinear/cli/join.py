"""The command `nearlinear join`: the same script on another machine, as a member of a run over the Internet."""

from __future__ import annotations

import argparse

from nearlinear.cli.run import add_machines, positive, run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "join",
        help="train with a run on another machine",
        description="Start the same script as a member of a run that `nearlinear run --listen` began elsewhere.",
        usage="nearlinear join [-n N] [options] TICKET script.py [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("ticket", metavar="TICKET", help="what the run printed, nl1:...; or @FILE that holds it")
    parser.add_argument("-n", type=positive, metavar="N", help="processes of this member on this machine (default: 1)")
    add_machines(parser)
    parser.add_argument(
        "--record",
        metavar="FILE|none",
        help="the run's record for `nearlinear report` (default: kept among the last 50)",
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="passed on as it is")
    parser.set_defaults(call=join, strategy="local")
    parser.set_defaults(listen=None, address=None, stages=None, microbatches=None, shards=None)


def join(options: argparse.Namespace) -> int:
    """Run the script as a member and return the exit code.

    Raises:
        InputError: That is no ticket, or there is no such script.
    """
    return run(options)

"""`hwgrpo doctor`: what this machine can do, what was chosen, why not the rest, and what to type to repair it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from hwgrpo_backends import registry
from hwgrpo_backends.decide import AUTO

from hwgrpo.errors import ConfigError, choice_error

HELP = "examine this machine: what works, what was chosen and why, and what to type to repair the rest"
SOUND, FAILED = 0, 1
WIDTH = 100
"""Columns where there is no terminal to ask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo doctor`."""
    parser.add_argument("--backend", metavar="NAME", default=AUTO, help="examine for this backend, not the chosen one")
    parser.add_argument(
        "--run", action="store_true", dest="try_devices", help="also compute on every device, and compare"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of --run, per device (default 300)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON (schema hwgrpo.doctor/1)")
    form.add_argument("--github", action="store_true", help="print Markdown for an issue, without secrets and names")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 1 when something stands in the way of the chosen or the asked-for backend.

    Raises:
        ConfigError: the backend is not known, or options do not go together.
    """
    _check(args)
    from hwgrpo.doctor.diagnosis import diagnose
    from hwgrpo.doctor.diagnosis_markdown import markdown
    from hwgrpo.doctor.diagnosis_text import colored, plain, show

    report = diagnose(args.backend, run=args.try_devices, limit=args.timeout)
    if args.json:
        text = json.dumps(report.to_json(), indent=1)
    elif args.github:
        text = markdown(report)
    else:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        paint = colored if terminal and not os.environ.get("NO_COLOR") else plain
        text = show(report, shutil.get_terminal_size((WIDTH, 24)).columns if terminal else WIDTH, paint)
    _print(text)
    return FAILED if report.failures else SOUND


def _check(args: argparse.Namespace) -> None:
    try:
        known = (AUTO, *registry.names())
    except Exception:  # metadata in pieces, which the report tells
        known = (AUTO, *registry.BUILTIN)
    if args.backend not in known:
        raise choice_error("--backend", args.backend, known)
    if args.timeout is not None and not args.try_devices:
        raise ConfigError("--timeout is the time for --run, so it does not go without")
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout:g}: give more than 0 seconds")


def _print(text: str) -> None:
    """Print in whatever the output can take; the exit status counts even where nobody listens."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, errors="backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:  # the reader has gone, or the disk is full
        if not isinstance(error, BrokenPipeError):
            print(f"hwgrpo doctor: the report could not be written: {error}", file=sys.stderr)
        # what is left in the buffer must not fail again when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

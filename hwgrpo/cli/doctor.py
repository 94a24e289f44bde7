"""`hwgrpo doctor`: diagnose this machine: what works, which backend is selected and why, how to repair the rest."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys

from hwgrpo_backends import registry
from hwgrpo_backends.decide import AUTO

from hwgrpo.errors import ConfigError, choice_error

HELP = "diagnose this machine: what works, which backend is selected and why, how to repair the rest"
SOUND, FAILED = 0, 1
WIDTH = 100
"""Columns without a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo doctor`."""
    parser.add_argument(
        "--backend", metavar="NAME", default=AUTO, help="diagnose for this backend instead of the selected one"
    )
    parser.add_argument("--run", action="store_true", dest="try_devices", help="also run self-tests on every device")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="timeout of --run per device (default 300)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON (schema hwgrpo.doctor/1)")
    form.add_argument("--github", action="store_true", help="print Markdown for an issue, without secrets and names")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 1 when a check of the selected or requested backend failed.

    Raises:
        ConfigError: the backend is not known, or options conflict.
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
    except Exception:  # damaged metadata, which the report names
        known = (AUTO, *registry.BUILTIN)
    if args.backend not in known:
        raise choice_error("--backend", args.backend, known)
    if args.timeout is not None and not args.try_devices:
        raise ConfigError("--timeout is the timeout of --run; add --run")
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout:g}: use more than 0 seconds")


def _print(text: str) -> None:
    """Print in the output's encoding; the exit status is right even where the output is closed."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, errors="backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:  # the reader is gone, or the disk is full
        if not isinstance(error, BrokenPipeError):
            print(f"hwgrpo doctor: the report could not be written: {error}", file=sys.stderr)
        # flushing the rest of the buffer at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

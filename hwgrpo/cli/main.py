"""`hwgrpo COMMAND ...`: import the command, parse, run, and report errors of the user in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from types import TracebackType
from typing import NoReturn, TextIO

from hwgrpo_backends.backend import BackendError

import hwgrpo
from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError, nearest
from hwgrpo.support.paths import with_home
from hwgrpo.support.text import terminal_lines

COMMANDS = (
    "train",
    "recipes",
    "import",
    "sft",
    "reward-model",
    "plan",
    "launch",
    "eval",
    "chat",
    "export",
    "report",
    "compare-runs",
    "bench",
    "parity",
    "replay",
    "kernels",
    "data",
    "config",
    "detect",
    "doctor",
    "env",
)
"""Commands: each is a module of this package with `HELP`, `add_arguments(parser)` and `run(args) -> exit code`."""
TRAINING = ("train", "sft", "reward-model")
"""Commands whose results are in a folder; standard output shows their progress."""
MODULES = {"import": "import_settings"}
"""Commands whose module has another name."""

ELSEWHERE = {"dpo": "hwgrpo has no DPO: train preference pairs with TRL's DPOTrainer, which loads RUN/final"}
"""Commands that people look for here -> where to go."""

EXIT_CODES = (
    "exit codes: 0 done, or stopped by a signal with everything saved; 1 the run, its data or this host failed; "
    "2 an error in the command or the configuration; 130 stopped at once by Ctrl-C; 141 the reader of the output "
    "closed it"
)
INTERRUPTED, OUTPUT_CLOSED = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program's name; None uses those of the process.

    Returns:
        The exit code; see `EXIT_CODES`.
    """
    if sys.stdout is None:  # a process can be started without one
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    code: int | None = None
    try:
        try:
            code = _run(argv)
        except SystemExit:  # argparse has printed help or an error
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, 2)
    except (DataError, RewardError, CheckpointError, BackendError, RunError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("hwgrpo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        _drop_output()
        return OUTPUT_CLOSED
    except OSError as error:
        if not _output_fails():
            raise
        _drop_output()
        try:
            print(f"hwgrpo: standard output could not be written: {error.strerror}", file=sys.stderr, flush=True)
        except OSError:  # the same file
            _drop_output(sys.stderr)
        # what training leaves is in its folder, and complete; the results of other commands are lost
        return code if code is not None and _command(argv) in TRAINING else 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(
        prog="hwgrpo",
        description="GRPO post-training of language models on CUDA, ROCm, Ascend NPU and CPU.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"hwgrpo {hwgrpo.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    first = _command(argv)
    for name in [first] if first in COMMANDS else COMMANDS:  # import one command alone
        module = importlib.import_module(f"hwgrpo.cli.{MODULES.get(name, name.replace('-', '_'))}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, epilog=EXIT_CODES)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in args or any(each.startswith("-") for each in rest)):
        settings = [each.lstrip("-") for each in rest if each.startswith("--") and "=" in each]
        hint = f" (a setting is written without dashes: {_as_setting(settings[0])})" if settings else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        args.overrides += rest  # argparse stops collecting at an option: `train RECIPE --dry-run key=value`
    for name, value in vars(args).items():
        setattr(args, name, with_home(value))
    try:
        return args.run(args)
    except SystemExit as error:  # no command calls sys.exit; user code may
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"sys.exit({error.code!r}) was called at {place.filename}:{place.lineno}, before the end"
        raise RunError(message) from error


def _command(argv: Sequence[str] | None) -> str | None:
    """Return the first argument; None if there is none."""
    return next(iter(sys.argv[1:] if argv is None else argv), None)


def _as_setting(text: str) -> str:
    """Return `key=value`, and this project's name of a key of verl or TRL."""
    from hwgrpo.migrate.names_here import name_here

    here = name_here(text.partition("=")[0])
    return f"{text}; {here}" if here else text


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the nearest command or choice for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        match = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = nearest(match[1].lower(), re.findall(r"[\w-]+", match[2])) if match else None
        hint = ELSEWHERE.get(match[1], "") if match else ""
        super().error(hint or (f"{message}. Did you mean {near}?" if near else message))


def report_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected exception and where to report it; for `sys.excepthook`."""
    traceback.print_exception(kind, error, trace)
    links = metadata.metadata("hwgrpo").get_all("Project-URL") or []
    where = next((link.partition(", ")[2] for link in links if link.lower().startswith(("issue", "bug"))), "")
    print(
        f"hwgrpo: this is a bug in hwgrpo: report it{f' at {where}' if where else ''} with the lines above and the "
        "output of `hwgrpo doctor`",
        file=sys.stderr,
    )


def _output_is_closed() -> bool:
    """Return whether the reader of standard output is gone; other broken pipes are errors of their own."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is not a file descriptor
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _output_fails() -> bool:
    """Return whether standard output cannot be written, as on a full disk, which need not be so for other files."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _drop_output(stream: TextIO | None = None) -> None:
    """Discard the buffer of standard output, or another stream, so that flushing does not fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


def _fail(error: Exception | str, code: int) -> int:
    print(f"hwgrpo: error: {terminal_lines(str(error))}", file=sys.stderr)
    return code

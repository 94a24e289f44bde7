"""`hwgrpo COMMAND ...`: find the command's file, parse, run, and turn users' mistakes into one line."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

from hwgrpo_backends.backend import BackendError

import hwgrpo
from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError

COMMANDS = (
    "train",
    "plan",
    "launch",
    "eval",
    "export",
    "report",
    "bench",
    "kernels",
    "data",
    "config",
    "detect",
    "doctor",
    "env",
)
"""Each is a file of this folder with `HELP`, `add_arguments(parser)` and `run(args) -> exit code`."""


EXIT_CODES = (
    "exit codes: 0 done, or stopped by a signal with everything saved; 1 the run, its data or this host failed; "
    "2 a mistake in the command or the configuration; 130 stopped at once by Ctrl-C"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: words after the program's name; None takes those of the process.

    Returns:
        What `EXIT_CODES` says.
    """
    parser = argparse.ArgumentParser(
        prog="hwgrpo",
        description="GRPO post-training of language models on CUDA, ROCm, Ascend NPU and CPU.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"hwgrpo {hwgrpo.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:  # one command waits for no other's imports
        module = importlib.import_module(f"hwgrpo.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, epilog=EXIT_CODES)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in args or any(word.startswith("-") for word in rest)):
        settings = [word.lstrip("-") for word in rest if word.startswith("--") and "=" in word]
        hint = f" (a setting is written without dashes: {settings[0]})" if settings else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        args.overrides += rest  # argparse stops collecting at an option: `train RECIPE --dry-run key=value`
    try:
        return args.run(args)
    except ConfigError as error:
        return _fail(error, 2)
    except (DataError, RewardError, CheckpointError, BackendError, RunError) as error:
        return _fail(error, 1)
    except SystemExit as error:  # no command exits by itself: its success would be none
        place = traceback.extract_tb(error.__traceback__)[-1]
        return _fail(f"sys.exit({error.code!r}) was called at {place.filename}:{place.lineno}, before the end", 1)
    except KeyboardInterrupt:
        print("hwgrpo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output (head, less) has gone: that is no error
        sys.stderr.close()
        return 0


def _fail(error: Exception | str, code: int) -> int:
    print(f"hwgrpo: error: {error}", file=sys.stderr)
    return code

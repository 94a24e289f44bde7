"""Start SGLang's server with its key in no command line and no log, and end it when the run that started it is gone.

Runs in the environment that has SGLang; its arguments are those of `python -m sglang.launch_server`.
"""

import importlib
import os
import runpy
import signal
import sys
import threading
from typing import Any

TOKEN_VARIABLE = "HWGRPO_SERVER_TOKEN"
"""Environment variable with the key that requests must bring."""


class Key(str):
    """A key that is not shown where an object that holds it is: SGLang logs all its arguments at the start."""

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)  # SGLang's own processes need not know this class


def _give_key(key: str) -> None:
    """Have SGLang's reading of its command line, which others can see and which it keeps, add the key."""
    module: Any = importlib.import_module("sglang.srt.server_args")
    read = module.prepare_server_args

    def with_key(argv: list[str]) -> object:
        arguments = read(argv)
        arguments.api_key = Key(key)
        return arguments

    module.prepare_server_args = with_key


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":  # SGLang's own processes import this file again
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    _give_key(os.environ.pop(TOKEN_VARIABLE))
    runpy.run_module("sglang.launch_server", run_name="__main__")

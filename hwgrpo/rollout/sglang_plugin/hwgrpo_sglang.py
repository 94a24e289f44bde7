"""Start SGLang's server with its API key in no command line or log; end it when the run that started it ends.

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
"""Environment variable with the key that requests must carry."""


class ApiKey(str):
    """API key that its repr masks: SGLang logs all its arguments at the start."""

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)  # SGLang's own processes need not know this class


def _add_api_key(key: str) -> None:
    """Patch SGLang's argument parser to add the key, which must not be in the visible command line."""
    module: Any = importlib.import_module("sglang.srt.server_args")
    parse = module.prepare_server_args

    def with_key(argv: list[str]) -> object:
        arguments = parse(argv)
        arguments.api_key = ApiKey(key)
        return arguments

    module.prepare_server_args = with_key


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":  # SGLang's own processes import this file again
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    _add_api_key(os.environ.pop(TOKEN_VARIABLE))
    runpy.run_module("sglang.launch_server", run_name="__main__")

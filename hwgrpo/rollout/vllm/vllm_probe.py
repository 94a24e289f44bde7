"""Runs as a script in the environment of a vLLM: imports it as an engine does, prints a line of JSON about it.

It stands alone (that environment may have neither this project nor its Python version) and reports every exception.
"""

import importlib
import json
import os
import sys

MARKER = "hwgrpo.vllm_probe/1 "


def main() -> dict:
    """Return what vLLM says of itself: version, device type of its platform, problem."""
    facts: dict = {"version": None, "device_type": "", "with_hip": False, "problem": None}
    try:
        vllm = importlib.import_module("vllm")
        facts["version"] = str(getattr(vllm, "__version__", "") or "unknown")
        platform = importlib.import_module("vllm.platforms").current_platform
        facts["device_type"] = str(platform.device_type or "")
        getattr(vllm, "LLM")  # noqa: B009 - imports the engine
    except (Exception, SystemExit) as error:
        text = str(error).strip().split("\n")[0]
        facts["problem"] = f"{type(error).__name__}: {text}".strip()[:500]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        facts["with_hip"] = bool(torch.version.hip)
    return facts


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    print("\n" + MARKER + json.dumps(main()), flush=True)

"""Runs as a script in a child process: what torch, the kernels and transformers say of one backend.

Its question: {"backend": name, "devices": whether there are some to ask, "arch": of the first one where it is known,
"path": folders of this project's packages}.
Every exception is an answer, too.
"""

import json
import sys
from typing import Any

VOCAB = 151936
"""Qwen's; choices hardly depend on it."""


def answer(part: str, value: Any) -> None:
    """Print one line of the answer."""
    print("\nhwgrpo.doctor " + json.dumps({part: value}), flush=True)


def kernels(name: str, devices: bool) -> dict[str, Any]:
    """Return, per op, what every implementation would do on the backend `name`, as `hwgrpo kernels` shows it."""
    from dataclasses import asdict

    import hwgrpo_kernels
    import torch
    from hwgrpo_backends import get
    from hwgrpo_kernels.overview import survey

    backend = get(name)
    dtype = backend.compute_dtypes(0)[0] if devices or backend.is_host else torch.bfloat16
    hwgrpo_kernels.configure(preference=backend.kernels)
    ops = [{**asdict(op), "chosen": op.chosen} for op in survey(backend.device_type, dtype, VOCAB)]
    plugins = hwgrpo_kernels.choices()["plugins"]
    return {"dtype": str(dtype).removeprefix("torch."), "vocab": VOCAB, "ops": ops, "plugins": plugins}


def attention(name: str, arch: str | None) -> list[dict[str, Any]]:
    """Return the attention implementations the backend prefers, best first, and why one cannot be used."""
    from hwgrpo_backends import get

    from hwgrpo.models.attention_implementations import reason_against

    backend = get(name)
    return [{"name": each, "reason": reason_against(each, backend, arch, None)} for each in backend.attention]


def main(question: dict[str, Any]) -> None:
    """Answer, part by part."""
    sys.path[:0] = [folder for folder in question["path"] if folder not in sys.path]
    parts = {
        "kernels": lambda: kernels(question["backend"], question["devices"]),
        "attention": lambda: attention(question["backend"], question["arch"]),
    }
    for part, find in parts.items():
        try:
            answer(part, find())
        except (Exception, SystemExit) as error:
            answer(part, {"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

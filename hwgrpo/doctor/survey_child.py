"""Script of a child process: prints kernels and attention implementations of one backend, as JSON lines.

Its request: {"backend": name, "devices": whether there are usable ones, "arch": architecture of the first one or null,
"path": folders of this project's packages}. An exception becomes an error in the output.
"""

import json
import sys
from typing import Any

VOCAB = 151936
"""Vocabulary of Qwen; the selection hardly depends on it."""


def print_part(part: str, value: Any) -> None:
    """Print one part of the result as a line."""
    print("\nhwgrpo.doctor " + json.dumps({part: value}), flush=True)


def kernels(name: str, devices: bool) -> dict[str, Any]:
    """Return the verdict on each implementation of each op on the backend `name`, as `hwgrpo kernels` shows it."""
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
    """Return the attention implementations that the backend prefers, best first, with reasons against each.

    With sdpa: the kernels that a training process lets it choose from.
    """
    from hwgrpo_backends import get
    from hwgrpo_backends.environment import apply

    from hwgrpo.models.attention_implementations import reason_against

    backend = get(name)
    apply(backend, "train")
    if backend.prepare is not None:
        backend.prepare()
    kernels = {} if backend.sdpa_kernels is None else {"sdpa": list(backend.sdpa_kernels())}
    return [
        {"name": each, "reason": reason_against(each, backend, arch, None), "kernels": kernels.get(each, [])}
        for each in backend.attention
    ]


def main(request: dict[str, Any]) -> None:
    """Print the result, part by part."""
    sys.path[:0] = [folder for folder in request["path"] if folder not in sys.path]
    parts = {
        "kernels": lambda: kernels(request["backend"], request["devices"]),
        "attention": lambda: attention(request["backend"], request["arch"]),
    }
    for part, find in parts.items():
        try:
            print_part(part, find())
        except (Exception, SystemExit) as error:
            print_part(part, {"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

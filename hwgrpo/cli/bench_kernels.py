"""`hwgrpo bench kernels` and `hwgrpo bench compare`: kernels next to other projects', and chips side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.support.launched_ranks import launched_rank

if TYPE_CHECKING:
    from hwgrpo_kernels import Shape

    from hwgrpo.bench.kernels.cases import Case

KERNELS_HELP = "measure the log-prob and loss kernels on this machine, next to eager torch and other projects' kernels"
COMPARE_HELP = "put two to four files of `hwgrpo bench kernels --json` side by side"
DTYPES = ("float32", "bfloat16", "float16")
DONE, WRONG = 0, 1
Writable = Callable[[str, str | None], Path | None]
"""(option, file or None) -> the file, after a check that it is writable."""


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench kernels`."""
    parser.add_argument(
        "--shape",
        metavar="SHAPES",
        action="append",
        help="rows, hidden size and vocabulary, e.g. 8192,896,151936, or names: A, B, C (8192,896 / 8192,3584 / "
        "32768,4096, each with 151936), small (128,256,151936); may be repeated (default: A, B and C on an "
        "accelerator, small on a CPU)",
    )
    parser.add_argument("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)} (default: the device's first)")
    parser.add_argument("--device", metavar="NAME", default="auto", help="the backend to run on (default auto)")
    parser.add_argument("--only", metavar="CASES", help="cases to measure, e.g. linear_logprob,row_stats (default all)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds to time (default 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory on a CPU (halves the time)")
    parser.add_argument("--json", metavar="FILE", help="also write all samples as JSON (schema hwgrpo.bench.kernels/1)")


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench compare`."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="A.json B.json, and up to two more")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON (schema hwgrpo.bench.compare/1)")
    parser.add_argument(
        "--svg",
        metavar="FILE",
        help="also draw a picture: a group of bars per case, a colour per file; FILE must be new",
    )


def run_kernels(args: argparse.Namespace, writable: Writable, report: Callable[[str], None]) -> int:
    """Measure and print; return 1 when a result differs from fp64's."""
    for option, value in (("--repeat", args.repeat), ("--threads", args.threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: use 1 or more")
    if args.dtype is not None and args.dtype not in DTYPES:
        raise choice_error("--dtype", args.dtype, DTYPES)
    file = writable("--json", args.json)
    if (processes := launched_rank().world_size) > 1:
        raise ConfigError(f"hwgrpo bench needs one process, but a launcher started {processes}")
    texts = [_numbers(text) for text in args.shape or ()]

    from hwgrpo_backends import choose
    from hwgrpo_backends.environment import apply

    backend = choose(args.device).backend
    apply(backend, "train")

    import hwgrpo_kernels
    import torch
    from hwgrpo_backends.device import Device

    from hwgrpo.bench.kernels.kernel_tables import show_kernels
    from hwgrpo.bench.kernels.measure import measure_kernels

    shapes = _shapes(texts or (["small"] if backend.is_host else ["A", "B", "C"]))
    cases = _cases(args.only)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = Device(backend)
    device.set_device()
    dtype = getattr(torch, args.dtype) if args.dtype else device.compute_dtypes[0]
    cases = [case for case in cases if case.applies(dtype)]
    if not cases:
        raise ConfigError(f"--only {args.only}: there is no such case in {dtype}")
    hwgrpo_kernels.configure(preference=backend.kernels)
    try:
        for op in hwgrpo_kernels.default_registry.ops():
            hwgrpo_kernels.resolve(op.name, backend.device_type, dtype, max(shape.V for shape in shapes.values()))
    except ValueError as error:  # a pin that is unknown or cannot run
        raise ConfigError(str(error)) from error
    try:
        result = measure_kernels(device, shapes, dtype, cases, args.repeat, memory=not args.no_memory, report=report)
    finally:
        report("")
    show_kernels(result)
    if file is not None:
        file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    return WRONG if result.wrong else DONE


def run_compare(args: argparse.Namespace, writable: Writable) -> int:
    """Print documents side by side; draw them with `--svg`."""
    from hwgrpo.bench.kernels.compare import LETTERS, compare_documents, read_document, show_comparison

    names: list[str] = args.files
    if not 2 <= len(names) <= len(LETTERS):
        raise ConfigError(f"hwgrpo bench compare {' '.join(names)}: use two to four files, not {len(names)}")
    file, picture = writable("--json", args.json), writable("--svg", args.svg)
    if picture is not None and picture.exists():
        raise ConfigError(f"--svg {picture} already exists; use another file, or remove it first")
    if picture is not None and file is not None and picture.resolve() == file.resolve():
        raise ConfigError(f"--svg {picture} is also the file of --json; use two different files")
    documents = [read_document(Path(name)) for name in names]
    rows = compare_documents(*documents)
    show_comparison(names, documents, rows)
    if file is not None:
        document = {"schema": "hwgrpo.bench.compare/1", **dict(zip(LETTERS.lower(), names))}
        document |= {"machines": [each["machine"] for each in documents], "rows": [row.to_json() for row in rows]}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from hwgrpo.bench.kernels.bar_chart import draw_comparison

        drawn = draw_comparison(names, documents, rows)
        if drawn is None:
            raise ConfigError(
                f"--svg {picture}: no case was timed in two of these files at one shape, so nothing is drawn"
            )
        picture.write_text(drawn, encoding="utf-8")
        print(f"wrote {picture}")
    return DONE


def _numbers(text: str) -> str | tuple[int, ...]:
    """Return N, H and V, or the name of a shape."""
    if "," not in text:
        return text
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--shape {text}: use rows, hidden size and vocabulary, e.g. --shape 8192,896,151936")
    return tuple(map(int, parts))


def _shapes(wanted: list[str | tuple[int, ...]] | list[str]) -> dict[str, Shape]:
    from hwgrpo_kernels import Shape

    from hwgrpo.bench.kernels.problem import SHAPES

    shapes = {}
    for each in wanted:
        if isinstance(each, str):
            if each not in SHAPES:
                raise choice_error("--shape", each, SHAPES)
            shapes[each] = SHAPES[each]
        else:
            shapes["x".join(map(str, each))] = Shape(*each)
    return shapes


def _cases(text: str | None) -> list[Case]:
    from hwgrpo.bench.kernels.cases import CASES

    if text is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    names = [name for name in text.split(",") if name]
    if not names:
        raise ConfigError(f"--only {text!r}: use names separated by commas: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise choice_error("--only", name, known)
    return [case for name, case in known.items() if name in names]

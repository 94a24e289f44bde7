"""`hwgrpo kernels`: the selected implementation of each kernel and reasons against the others; here or in a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError, choice_error

if TYPE_CHECKING:
    from hwgrpo_kernels.overview import OpSurvey

HELP = "show which implementation of each kernel runs here or ran in a run, and why not the others"
SCHEMA = "hwgrpo.kernels.survey/1"
RUN_SCHEMA = "hwgrpo.kernels/1"
DTYPES = ("float32", "bfloat16", "float16", "float64")
DRIVERS = ("token_logprob", "linear_logprob")
VOCAB = 151936
"""Default vocabulary, Qwen's; the selection hardly depends on it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", metavar="DIR", dest="run_folder", help="show the selection of a run (kernels.json)")
    parser.add_argument("--device", metavar="NAME", help="backend (default: the one selected on this host)")
    parser.add_argument("--dtype", metavar="NAME", help=f"dtype of logits or hidden states: {', '.join(DTYPES)}")
    parser.add_argument("--vocab", type=int, metavar="V", help=f"size of the vocabulary (default {VOCAB})")
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA}, of a run {RUN_SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the selection; return the exit code."""
    if args.run_folder is not None:
        for option in ("device", "dtype", "vocab"):
            if getattr(args, option) is not None:
                raise ConfigError(f"--{option} cannot be combined with --run, which shows the selection of a run")
        return _show_run_folder(Path(args.run_folder), args.json)
    return _survey_host(args)


def _survey_host(args: argparse.Namespace) -> int:
    if args.dtype is not None and args.dtype not in DTYPES:
        raise choice_error("--dtype", args.dtype, DTYPES)
    if args.vocab is not None and args.vocab < 1:
        raise ConfigError(f"--vocab {args.vocab}: use 1 or more")
    from hwgrpo_backends import choose, registry

    if args.device is None:
        backend = choose().backend
    elif args.device in registry.names():
        backend = registry.get(args.device)
    else:
        raise choice_error("--device", args.device, registry.names())

    import hwgrpo_kernels
    import torch
    from hwgrpo_kernels.head import reason_against_fp32_products
    from hwgrpo_kernels.overview import survey

    # The dtypes of a device on another host are not known; accelerators train in bf16.
    is_here = backend.is_host or args.device is None
    dtype = getattr(torch, args.dtype) if args.dtype else backend.compute_dtypes(0)[0] if is_here else torch.bfloat16
    vocab = args.vocab or VOCAB
    hwgrpo_kernels.configure(preference=backend.kernels)
    try:
        settings = hwgrpo_kernels.choices()
        surveys = survey(backend.device_type, dtype, vocab)
    except ValueError as error:  # a pin that names no implementation
        raise ConfigError(str(error)) from error
    header: dict[str, Any] = {"backend": backend.name, "dtype": str(dtype).removeprefix("torch."), "vocab": vocab}
    if is_here and dtype.itemsize == 2:
        header["reason_against_fp32_products"] = reason_against_fp32_products(backend.device_type, dtype)
    if args.json:
        ops = [{**asdict(each), "chosen": each.chosen} for each in surveys]
        selection = {name: settings[name] for name in ("pins", "preference", "strict", "plugins")}
        print(json.dumps({"schema": SCHEMA, **header, **selection, "ops": ops}, indent=1))
    else:
        _show_host(header, surveys, settings)
    errors = [each.error for each in surveys if each.error]
    if errors:
        raise ConfigError("; ".join(dict.fromkeys(errors)))
    return 0


def _show_run_folder(folder: Path, as_json: bool) -> int:
    file = folder / "kernels.json"
    if not folder.is_dir():
        raise ConfigError(f"--run {folder}: there is no such folder; name a run's trainer.output_dir")
    if not file.is_file():
        raise ConfigError(
            f"--run {folder}: no kernels.json, which a run writes with its first step; "
            "name the trainer.output_dir of a run that has started"
        )
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); a restart of the run rewrites it") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != RUN_SCHEMA:
        raise ConfigError(f"{file} has the schema {schema!r}; this version reads {RUN_SCHEMA!r}")
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _show_run(folder, document)
    return 0


def _show_host(header: dict[str, Any], surveys: tuple[OpSurvey, ...], settings: dict[str, Any]) -> None:
    from hwgrpo_kernels.registry import NONE_OF_THAT_NAME
    from rich.text import Text

    from hwgrpo.bench.terminal import make_console, print_part

    console = make_console()
    console.print(Text(f"{header['backend']}, {header['dtype']}, vocabulary of {header['vocab']:,}"))
    styles = {"chosen": "green", "usable": "", "impossible": "dim"}
    labels = {"chosen": "runs", "usable": "not selected", "impossible": "cannot run"}
    table = _text_table("op", "kernel", "", "why")
    for op in surveys:
        for number, each in enumerate(op.verdicts):
            mark = "*" if each.state == "chosen" else " "
            origin = "" if each.origin == "built in" else f" ({each.origin})"
            label = "absent" if each.reason == NONE_OF_THAT_NAME else labels[each.state]
            table.add_row(
                op.op if number == 0 else "",
                Text(f"{mark} {each.name}", style=styles[each.state]),
                Text(label, style=styles[each.state]),
                Text(each.reason + origin, style=styles[each.state]),
            )
    console.print()
    print_part(console, table)
    _print_driver_note(console, [(op.op, op.chosen) for op in surveys])
    if reason := header.get("reason_against_fp32_products"):
        console.print(Text(f"fp32 products of {header['dtype']} are not available: {reason}.", style="dim"))
    console.print()
    _show_settings(console, settings)


def _show_run(folder: Path, document: dict[str, Any]) -> None:
    from rich.text import Text

    from hwgrpo.bench.terminal import make_console, print_part

    console = make_console()
    console.print(Text(f"selected in {folder}"))
    table = _text_table("op", "kernel", "for", "why")
    for each in document["choices"]:
        why = [f"pinned by {each['pinned_by']}"] if each["pinned_by"] else []
        why += [f"not {name}: {reason}" for name, reason in each["skipped"].items()]
        if not why and each["implementation"] in document["preference"]:
            why = ["preferred"]
        declined = each.get("declined", {})  # runs written before calls could be declined have none
        why += [f"declined {calls} calls: {reason}" for reason, calls in declined.items()]
        kind = f"{each['device_type']}, {each['dtype']}, V <= {each['shape_class']:,}"
        table.add_row(each["op"], Text(f"* {each['implementation']}", style="green"), kind, Text("; ".join(why)))
    console.print()
    print_part(console, table)
    if not document["choices"]:
        console.print(Text("no kernel was used before this was written", style="yellow"))
    _print_driver_note(console, [(each["op"], each["implementation"]) for each in document["choices"]])
    console.print()
    _show_settings(console, document)


def _print_driver_note(console: Any, chosen: list[tuple[str, str | None]]) -> None:
    """Print a note on ops that only call the row ops: their implementation "torch" is not a slow path."""
    from rich.text import Text

    drivers = [op for op, name in chosen if op in DRIVERS and name == "torch"]
    if drivers:
        verb = "runs" if len(set(drivers)) == 1 else "run"
        names = " and ".join(dict.fromkeys(drivers))
        console.print(Text(f"{names} in torch {verb} row_stats and row_grad as selected above.", style="dim"))


def _show_settings(console: Any, settings: dict[str, Any]) -> None:
    """Print pins, preference, strictness and plug-ins."""
    from rich.text import Text

    from hwgrpo.bench.terminal import fact_grid, print_part

    pins = ", ".join(f"{op}={name}" for op, name in settings["pins"].items())
    lines = {
        "pins": pins or "none (HWGRPO_KERNELS=op=kernel,... or the setting kernels.pins)",
        "preferred": ", ".join(settings["preference"]) or "none",
        "strict": "on: falling back is an error" if settings["strict"] else "off (HWGRPO_STRICT=1 or kernels.strict)",
    }
    grid = fact_grid(lines)
    for plugin in settings["plugins"]:
        failed = Text(f"{plugin['name']} failed: {plugin['error']}", style="bold red")
        brought = Text(f"{plugin['name']} ({plugin['value']}): {', '.join(plugin['implementations'])}")
        grid.add_row("plug-in", failed if plugin["error"] else brought)
    if not settings["plugins"]:
        grid.add_row("plug-ins", "none")
    print_part(console, grid)


def _text_table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table

"""`hwgrpo config`: every setting with its type, default, allowed values and description."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hwgrpo.config.recipe_files import Preset

HELP = "print every setting with its default, allowed values and description"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "keys",
        nargs="*",
        metavar="KEY",
        help="sections or settings to print, e.g. rollout optim.lr; or presets; or combinations",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    from hwgrpo.config.document import entries
    from hwgrpo.config.recipe_files import presets

    if args.keys == ["presets"]:
        found = presets()
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1) if args.json else _listed(found))
        return 0
    if args.keys == ["combinations"]:
        _print_combinations(as_json=args.json)
        return 0
    selected = list(entries())
    for key in args.keys:
        if not any(_under(e.key, key) for e in selected):
            sections = {e.key.rsplit(".", i)[0] for e in selected for i in range(e.key.count(".") + 1)}
            near = nearest(key, {*sections, *(e.key for e in selected)})
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(f"no setting {key!r}.{hint} {_alternatives(key, [e.key for e in selected])}")
    if args.keys:
        selected = [e for e in selected if any(_under(e.key, key) for key in args.keys)]
    if args.json:
        print(json.dumps([dataclasses.asdict(e) for e in selected], indent=1))
        return 0
    width, (bold, dim, plain) = _width(), _styles()
    section = ""
    for e in selected:
        head = e.key.split(".", 1)[0]
        if head != section:
            print(f"{'' if not section else chr(10)}{bold}[{head}]{plain}")
            section = head
        print(f"{bold}{e.key}{plain} = {e.default}  {dim}{e.type}{'; ' + e.allowed if e.allowed else ''}{plain}")
        doc = f"{e.doc} Used with {e.used_by} only." if e.used_by else e.doc
        print(textwrap.fill(doc, width, initial_indent="    ", subsequent_indent="    "))
    return 0


def _print_combinations(*, as_json: bool) -> None:
    """Print which settings of the algorithm exclude each other, each with the message that refuses it."""
    from hwgrpo.config.combinations import exclusions, refused_values, summary

    found = exclusions()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
        return
    width, (bold, dim, plain) = _width(), _styles()
    print(textwrap.fill(f"{summary()} These settings exclude each other:", width))
    for each in found:
        print(f"{bold}{each.setting}{plain} not with {refused_values(each)}")
        print(f"{dim}{textwrap.fill(each.refusal, width, initial_indent='    ', subsequent_indent='    ')}{plain}")


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _styles() -> tuple[str, str, str]:
    """Return what switches to bold, to dim and back to plain text."""
    return ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def _listed(presets: list[Preset]) -> str:
    """Return presets as text: what each is, then its settings."""
    width, (bold, dim, plain) = _width(), _styles()
    lines = []
    for each in presets:
        lines += [f"{bold}algorithm.preset={each.name}{plain}"]
        lines += [textwrap.fill(each.source, width, initial_indent="    ", subsequent_indent="    ")]
        settings = textwrap.fill(" ".join(each.settings), width, initial_indent="    ", subsequent_indent="    ")
        lines += [f"{dim}{settings}{plain}"]
    return "\n".join(lines)


def _alternatives(key: str, settings: list[str]) -> str:
    """List the sections, or the settings of the section that `key` begins with."""
    section = key.rpartition(".")[0]
    while section and not any(setting.startswith(section + ".") for setting in settings):
        section = section.rpartition(".")[0]
    inside = section + "." if section else ""
    names = dict.fromkeys(s.removeprefix(inside).split(".")[0] for s in settings if s.startswith(inside))
    return f"{section} has: {', '.join(names)}." if section else f"The sections are: {', '.join(names)}."


def _under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith((prefix + ".", prefix + "[]"))

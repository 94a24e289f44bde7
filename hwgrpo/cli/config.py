"""`hwgrpo config`: every setting with its type, default, allowed values and description."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap

from hwgrpo.errors import ConfigError, nearest

HELP = "print every setting with its default, allowed values and description"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("keys", nargs="*", metavar="KEY", help="sections or settings to print, e.g. rollout optim.lr")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    from hwgrpo.config.document import entries

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
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    bold, dim, plain = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
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

"""`hwgrpo detect`: the backend selected on this host, and reasons against the others."""

import argparse
import json
import sys

from hwgrpo_backends import registry
from hwgrpo_backends.decide import AUTO, Decision, decide
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

from hwgrpo.support.terminal_width import fold, terminal_columns

HELP = "show which backend is selected on this machine, and why not the others"
SCHEMA = "hwgrpo.detect/1"
SELECTED, NONE_SELECTED, USAGE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo detect`."""
    parser.add_argument("--backend", metavar="NAME", default=AUTO, help="judge this backend, select none")
    parser.add_argument(
        "--probe", action="store_true", help="also import torch in a child process and query its devices"
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the decision. Returns 0 when a backend was selected, 1 when none was, 2 for an unknown name."""
    backends, problems = registry.load_all()
    facts = gather_tier0(backends=backends.values())
    if args.probe:
        facts = gather_tier1(facts, backends=backends.values())
    decision = decide(facts, args.backend, backends, problems)
    if args.backend != AUTO and args.backend not in decision.verdicts:
        print(f"hwgrpo detect: {decision.error}", file=sys.stderr)
        return USAGE
    shown = (
        json.dumps(report(decision, facts), indent=2) if args.json else table(decision, args.probe, terminal_columns())
    )
    print(shown)
    return NONE_SELECTED if decision.selected is None else SELECTED


def report(decision: Decision, facts: Facts) -> dict[str, object]:
    """Return the decision as the JSON document of `SCHEMA`."""
    return {
        "schema": SCHEMA,
        "requested": decision.requested,
        "selected": decision.selected,
        "error": decision.error,
        "warnings": list(decision.warnings),
        "candidates": [
            {"name": name, "verdict": v.state, "reason": v.reason, "fix": v.fix, "devices": v.devices}
            for name, v in decision.verdicts.items()
        ],
        "facts": facts.to_json(),
    }


LABELS = {"ok": "works", "unverified": "found", "unusable": "unusable"}
"""Verdict -> its label in the text; JSON has the verdict itself."""


def table(decision: Decision, probed: bool, columns: int | None = None) -> str:
    """Return the decision as aligned text: one line per backend, its fix below it, then the selection.

    Args:
        decision: the decision.
        probed: whether torch was imported.
        columns: width at which lines are wrapped; None: not at all.
    """
    width = max(map(len, decision.verdicts))
    indent = " " * (2 + width + 2 + 8 + 2)
    room = None if columns is None else columns - len(indent)
    lines = []
    for name, verdict in decision.verdicts.items():
        mark = "*" if name == decision.selected else " "
        first, *rest = fold(verdict.reason, room)
        lines.append(f"{mark} {name:<{width}}  {LABELS[verdict.state]:<8}  {first}")
        below = [*rest, *fold(f"fix: {verdict.fix}", room, "     ")] if verdict.fix else rest
        lines += [indent + line for line in below]
    lines.append("")
    for warning in decision.warnings:
        lines += fold(f"warning: {warning}", columns, "  ")
    if decision.selected is None:
        lines += fold(f"no backend (requested: {decision.requested}): {decision.error}", columns, "  ")
        return "\n".join(lines)
    origin = "inherited from the launcher" if decision.inherited else f"requested: {decision.requested}"
    lines += fold(f"backend: {decision.selected} ({origin})", columns)
    if not probed and not decision.inherited:
        lines += fold(
            "found: judged by files and packages alone; --probe imports torch and queries the devices", columns, "  "
        )
    return "\n".join(lines)

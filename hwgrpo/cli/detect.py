"""`hwgrpo detect`: which backend this host runs on, and why not the others."""

import argparse
import json
import sys

from hwgrpo_backends import registry
from hwgrpo_backends.backend import BackendError
from hwgrpo_backends.decide import AUTO, Decision, decide
from hwgrpo_backends.facts import Facts, gather_tier0
from hwgrpo_backends.tier1 import gather_tier1

HELP = "say which backend this machine runs on, and why not the others"
SCHEMA = "hwgrpo.detect/1"
CHOSEN, REFUSED, USAGE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo detect`."""
    parser.add_argument("--backend", metavar="NAME", default=AUTO, help="judge this backend instead of choosing one")
    parser.add_argument("--probe", action="store_true", help="also import torch, in a child process, and ask it")
    parser.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the decision. Returns 0 when a backend was chosen, 1 when none was, 2 for an unknown name."""
    try:
        backends, problems = registry.load_all()
    except BackendError as error:
        print(f"hwgrpo detect: {error}", file=sys.stderr)
        return REFUSED
    facts = gather_tier0(backends=backends.values())
    if args.probe:
        facts = gather_tier1(facts, backends=backends.values())
    decision = decide(facts, args.backend, backends, problems)
    if args.backend != AUTO and args.backend not in decision.verdicts:
        print(f"hwgrpo detect: {decision.error}", file=sys.stderr)
        return USAGE
    print(json.dumps(report(decision, facts), indent=2) if args.json else table(decision, args.probe))
    return REFUSED if decision.selected is None else CHOSEN


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


WORDS = {"ok": "works", "unverified": "found", "unusable": "unusable"}
"""What a verdict is called where a person reads it; JSON has the verdict itself."""


def table(decision: Decision, probed: bool) -> str:
    """Return the decision as aligned text: one line per backend, its fix below it, then what was decided."""
    width = max(map(len, decision.verdicts))
    lines = []
    for name, verdict in decision.verdicts.items():
        mark = "*" if name == decision.selected else " "
        lines.append(f"{mark} {name:<{width}}  {WORDS[verdict.state]:<8}  {verdict.reason}")
        if verdict.fix:
            lines.append(f"  {'':<{width}}  {'':<8}  fix: {verdict.fix}")
    lines.append("")
    lines += [f"warning: {warning}" for warning in decision.warnings]
    if decision.selected is None:
        lines.append(f"no backend (requested: {decision.requested}): {decision.error}")
        return "\n".join(lines)
    origin = "inherited from the launcher" if decision.inherited else f"requested: {decision.requested}"
    lines.append(f"backend: {decision.selected} ({origin})")
    if not probed and not decision.inherited:
        lines.append("found: it is there, by files and packages alone; --probe imports torch and tries it")
    return "\n".join(lines)

"""`hwgrpo env`: the variables a backend wants set, why, and what of the user's own is kept."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hwgrpo_backends import registry
from hwgrpo_backends.backend import Backend, BackendError, Purpose
from hwgrpo_backends.decide import AUTO, decide
from hwgrpo_backends.environment import APPLIED_VARIABLE, apply
from hwgrpo_backends.tier0 import gather_tier0

from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.terminal_width import fold, terminal_columns

HELP = "print the environment variables a backend wants, each with its reason; for a shell with --shell"
SCHEMA = "hwgrpo.env/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo env`."""
    parser.add_argument(
        "--backend", metavar="NAME", default=AUTO, help="whose variables; auto: the backend selected on this host"
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("train", "rollout"),
        default="train",
        help="the trainer's process, or that of a rollout engine",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="with what trainer.deterministic=true needs (for train)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--shell", action="store_true", help='print shell lines: eval "$(hwgrpo env --shell)"')
    form.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the variables; return the exit code."""
    if args.deterministic and args.purpose == "rollout":
        raise ConfigError("--deterministic does not go with --for rollout: deterministic settings are for training")
    backend = _backend(args.backend)
    variables, removed, applied = wanted(backend, args.purpose, os.environ, args.deterministic)
    if args.shell:
        print("\n".join(shell_lines(variables, removed, applied)))
    elif args.json:
        print(json.dumps(report(backend.name, args.purpose, variables, removed), indent=2))
    else:
        print(table(backend.name, args.purpose, variables, removed, terminal_columns()))
    return 0


@dataclass(frozen=True)
class Variable:
    """One variable of a profile against the environment of this process."""

    name: str
    value: str
    """What is to be in force: the user's value where it is kept."""
    wanted: str
    """What the profile says."""
    why: str
    until: str
    kept: bool
    """The user had set it, and that wins."""


def wanted(
    backend: Backend, purpose: Purpose, environ: Mapping[str, str], deterministic: bool = False
) -> tuple[list[Variable], list[str], str]:
    """Return a backend's variables, what another profile set that this one does not want, and the names set by us.

    Args:
        backend: whose profile.
        purpose: "train" or "rollout".
        environ: the environment it is held against; left as it is.
        deterministic: whether training is to repeat its numbers.
    """
    after = dict(environ)
    settings = apply(backend, purpose, after, deterministic)
    profile = backend.environment(purpose, deterministic)
    variables = [
        Variable(s.name, s.value, profile[s.name].value, s.why, profile[s.name].until, s.kept) for s in settings
    ]
    return variables, sorted(environ.keys() - after.keys()), after[APPLIED_VARIABLE]


def shell_lines(variables: Sequence[Variable], removed: Sequence[str], applied: str) -> list[str]:
    """Return lines for a POSIX shell that put the profile in force, as `hwgrpo train` does for itself.

    The last line tells later commands which values are not the user's own.
    """
    lines = []
    for v in variables:
        lines.append(_comment(v.why + _until(v)))
        if v.kept:
            lines.append(_comment(f"{v.name} keeps your own value; wanted: {_quoted(v.wanted)}"))
        else:
            lines.append(f"export {v.name}={_quoted(v.value)}")
    for name in removed:
        lines += [_comment("another profile set it, and this one does not want it"), f"unset {name}"]
    return [*lines, _comment("which of these are not your own"), f"export {APPLIED_VARIABLE}={_quoted(applied)}"]


def report(backend: str, purpose: str, variables: Sequence[Variable], removed: Sequence[str]) -> dict[str, object]:
    """Return the variables as the JSON document of `SCHEMA`."""
    return {
        "schema": SCHEMA,
        "backend": backend,
        "for": purpose,
        "variables": [asdict(variable) for variable in variables],
        "unset": list(removed),
    }


def table(
    backend: str, purpose: str, variables: Sequence[Variable], removed: Sequence[str], columns: int | None = None
) -> str:
    """Return the variables as text: one per line, the reason below it, folded where it is longer than `columns`."""
    room = None if columns is None else columns - 4
    lines = []
    for v in variables:
        lines.append(f"{v.name}={_quoted(v.value)}{f'  (yours, kept; wanted {_quoted(v.wanted)})' if v.kept else ''}")
        lines += [f"    {line}" for line in fold(f"{v.why}{_until(v)}", room)]
    lines += [f"{name} is unset: another profile set it" for name in removed]
    return "\n".join(lines) or f"{backend} wants no variables set for {purpose}"


def _backend(requested: str) -> Backend:
    """Return the backend named, here or not, or the one this host gets, by files and packages alone."""
    names = (AUTO, *registry.names())
    if requested not in names:
        raise choice_error("--backend", requested, names)
    if requested != AUTO:
        return registry.get(requested)
    backends, problems = registry.load_all()
    decision = decide(gather_tier0(backends=backends.values()), AUTO, backends, problems)
    if decision.selected is None:
        raise BackendError(decision.error)
    return backends[decision.selected]


def _until(variable: Variable) -> str:
    return f" (until {variable.until})" if variable.until else ""


def _comment(text: str) -> str:
    """Return a shell comment of one line, whatever a plug-in wrote as its reason."""
    return "# " + " ".join(text.split())


def _quoted(value: str) -> str:
    """Quote for a POSIX shell, always, so that every line reads alike."""
    return "'" + value.replace("'", "'\"'\"'") + "'"

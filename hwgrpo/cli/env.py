"""`hwgrpo env`: the environment variables of a backend, with reasons; values set by the user are kept."""

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
from hwgrpo.support.terminal_width import fold, terminal_columns

HELP = "print the environment variables of a backend, each with its reason; --shell: for a shell"
SCHEMA = "hwgrpo.env/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo env`."""
    parser.add_argument(
        "--backend", metavar="NAME", default=AUTO, help="the backend; auto: the one selected on this host"
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("train", "rollout"),
        default="train",
        help="for the trainer's process, or a rollout engine's",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="include the variables of trainer.deterministic=true (for train)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--shell", action="store_true", help='print shell lines: eval "$(hwgrpo env --shell)"')
    form.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Print the variables; return the exit code."""
    if args.deterministic and args.purpose == "rollout":
        raise ConfigError("--deterministic cannot be combined with --for rollout: it is for training")
    backend = _backend(args.backend)
    variables, removed, applied = profile_variables(backend, args.purpose, os.environ, args.deterministic)
    optional = optional_variables(backend, os.environ)
    if args.shell:
        print("\n".join(shell_lines(variables, removed, applied)))
    elif args.json:
        print(json.dumps(report(backend.name, args.purpose, variables, removed, optional), indent=2))
    else:
        print(table(backend.name, args.purpose, variables, removed, optional, terminal_columns()))
    return 0


@dataclass(frozen=True)
class Variable:
    """One variable of a profile against the environment of this process."""

    name: str
    value: str
    """Resulting value: the user's where it is kept."""
    wanted: str
    """Value of the profile."""
    why: str
    until: str
    source: str
    kept: bool
    """Whether the user's value is kept."""


@dataclass(frozen=True)
class OptionalVariable:
    """One variable that is left to the user."""

    name: str
    example: str
    """A value that others use."""
    value: str | None
    """Value in the environment; None where it is not set."""
    why: str
    source: str


def profile_variables(
    backend: Backend, purpose: Purpose, environ: Mapping[str, str], deterministic: bool = False
) -> tuple[list[Variable], list[str], str]:
    """Return a backend's variables, names to unset that another profile had set, and the names set by us.

    Args:
        backend: the backend.
        purpose: "train" or "rollout".
        environ: current environment; not changed.
        deterministic: whether to include the variables of deterministic training.
    """
    after = dict(environ)
    settings = apply(backend, purpose, after, deterministic)
    profile = backend.environment(purpose, deterministic)
    variables = [
        Variable(s.name, s.value, profile[s.name].value, s.why, profile[s.name].until, profile[s.name].source, s.kept)
        for s in settings
    ]
    return variables, sorted(environ.keys() - after.keys()), after[APPLIED_VARIABLE]


def optional_variables(backend: Backend, environ: Mapping[str, str]) -> list[OptionalVariable]:
    """Return the variables that a backend leaves to the user, with their values in the environment."""
    return [
        OptionalVariable(name, variable.value, environ.get(name), variable.why, variable.source)
        for name, variable in backend.env_optional.items()
    ]


def shell_lines(variables: Sequence[Variable], removed: Sequence[str], applied: str) -> list[str]:
    """Return lines for a POSIX shell that set the profile, as `hwgrpo train` does for itself.

    The last line tells later commands which values the user did not set.
    """
    lines = []
    for v in variables:
        lines.append(_comment(v.why + _until(v)))
        if v.kept:
            lines.append(_comment(f"{v.name} keeps your value; profile: {_quoted(v.wanted)}"))
        else:
            lines.append(f"export {v.name}={_quoted(v.value)}")
    for name in removed:
        lines += [_comment("set by another profile, not part of this one"), f"unset {name}"]
    return [*lines, _comment("the variables that you did not set"), f"export {APPLIED_VARIABLE}={_quoted(applied)}"]


def report(
    backend: str,
    purpose: str,
    variables: Sequence[Variable],
    removed: Sequence[str],
    optional: Sequence[OptionalVariable],
) -> dict[str, object]:
    """Return the variables as the JSON document of `SCHEMA`."""
    return {
        "schema": SCHEMA,
        "backend": backend,
        "for": purpose,
        "variables": [asdict(variable) for variable in variables],
        "unset": list(removed),
        "optional": [asdict(variable) for variable in optional],
    }


def table(
    backend: str,
    purpose: str,
    variables: Sequence[Variable],
    removed: Sequence[str],
    optional: Sequence[OptionalVariable],
    columns: int | None = None,
) -> str:
    """Return the variables as text: one per line, reason and source below it, wrapped at `columns`."""
    room = None if columns is None else columns - 4
    lines = []
    for v in variables:
        lines.append(
            f"{v.name}={_quoted(v.value)}{f'  (your value is kept; profile: {_quoted(v.wanted)})' if v.kept else ''}"
        )
        lines += [f"    {line}" for line in fold(f"{v.why}{_until(v)}{_source(v)}", room)]
    lines += [f"{name} is unset: it was set by another profile" for name in removed]
    lines = lines or [f"{backend} needs no variables for {purpose}"]
    if optional:
        lines += ["", "left to you, not set by hwgrpo:"]
    for each in optional:
        state = "" if each.value is None else f"  (you have {_quoted(each.value)})"
        lines.append(f"{each.name}, e.g. {_quoted(each.example)}{state}")
        lines += [f"    {line}" for line in fold(f"{each.why}{_source(each)}", room)]
    return "\n".join(lines)


def _backend(requested: str) -> Backend:
    """Return the named backend, or the one selected on this host by files and packages alone."""
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


def _source(variable: Variable | OptionalVariable) -> str:
    return f" [{variable.source}]" if variable.source else ""


def _comment(text: str) -> str:
    """Return a shell comment of one line, whatever a plug-in wrote as its reason."""
    return "# " + " ".join(text.split())


def _quoted(value: str) -> str:
    """Quote for a POSIX shell, even where not needed."""
    return "'" + value.replace("'", "'\"'\"'") + "'"

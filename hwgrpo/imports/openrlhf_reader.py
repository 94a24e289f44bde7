"""Flags of `python -m openrlhf.cli.train_ppo_ray`, alone or in a run script -> the settings of an OpenRLHF run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.imports.core_reader import settings_of, text_of
from hwgrpo.imports.peer_settings import PeerSettings
from hwgrpo.imports.reading_budget import MOST_DIGITS
from hwgrpo.imports.script_command import KEPT, MARK, VerlCommand, without_marks
from hwgrpo.imports.shell_script import read_script
from hwgrpo.peer_tables.openrlhf_mapped import OPENRLHF

PROGRAM = "openrlhf.cli.train_ppo_ray"
_MODULE = re.compile(r"(?:.*/)?openrlhf[./]cli[./]train_ppo_ray(?:\.py)?")
DEVICES = ("actor.num_gpus_per_node", "actor.num_nodes")
_NAMES = ("observe.run_name", "observe.project", "observe.loggers", "trainer.output_dir")
"""Settings whose unknown pieces are left out with a notice: they name a run."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def read_openrlhf(
    file: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
) -> tuple[PeerSettings, list[str]]:
    """Return the settings of an OpenRLHF run, and notices about what was read.

    Args:
        file: a run script, which is read and never run, or `-` for one on standard input; None: arguments alone.
        arguments: `--key value`, `--key=value`, `--flag`, or `key=value`; they override the script's.
        environment: variables.
        variables: those of the script whose value is this one, whatever it sets.

    Raises:
        ConfigError: the file has no command of OpenRLHF, an argument is none, or a value that counts is not known.
    """
    given = _without_key(flag_values(arguments))
    if file is None:
        return settings_of(OPENRLHF, given), []
    name = "standard input" if file == "-" else Path(file).name
    text = text_of(file, "a run script of OpenRLHF")
    path = None if file == "-" else file
    command = read_script(text, name, [], environment, program=PROGRAM, module=_MODULE, path=path, fixed=variables)
    overridden = {OPENRLHF.current_name(key)[0] for key in given}
    values, notices, unknown = {}, list(command.notices), set[str]()
    for key, value in _without_key(flag_values(command.marked, command)).items():
        current = OPENRLHF.current_name(key)[0]
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        reasons = command.reasons(f"{key} {text}")
        if current in overridden:
            continue
        if reasons and current in DEVICES:
            unknown.add(current)
            notices.append(f"{key}: {reasons[0]}; left out, since the command that starts the recipe says it")
            continue
        if reasons and OPENRLHF.rows.get(current, OPENRLHF.rows["*"]).here not in ("", *_NAMES):
            known = shown(without_marks(text) or "?")
            raise ConfigError(
                f"{key}={known} is not known: {reasons[0]}. Give it as {key}=value behind the file, or a "
                "variable of the script as --set NAME=VALUE"
            )
        values[key] = "(unknown)" if reasons else value
        notices += [f"{key}: {reasons[0]}"] if reasons else []
    settings = settings_of(OPENRLHF, {**values, **given})
    settings.unknown = frozenset(unknown)
    return settings, notices


def flag_values(arguments: Sequence[str], command: VerlCommand | None = None) -> dict[str, Any]:
    """Return the value of each flag: true without one, a list of several, numbers as numbers.

    Args:
        arguments: flags and values.
        command: that of a script, whose variables they have; None: they have none.

    Raises:
        ConfigError: an argument belongs to no flag, or may be one that is not known.
    """
    values: dict[str, list[str]] = {}
    key, command = None, command or VerlCommand([])
    for each in arguments:
        name, equals, value = each.partition("=")
        _refuse_unknown_flag(each, name, command, begins=key is None or bool(values[key]))
        if each.startswith("--") or (equals and re.fullmatch(r"[A-Za-z_][\w.]*", name)):
            key = command.named(name.removeprefix("--"))
            values[key] = [command.as_text(value)] if equals else []
        elif key is None:
            raise ConfigError(f"{shown(command.named(each))} belongs to no flag: write --key value, or key=value")
        else:
            values[key].append(command.as_text(each))
    return {key: _value(listed) for key, listed in values.items()}


def _refuse_unknown_flag(argument: str, name: str, command: VerlCommand, *, begins: bool) -> None:
    """Raise ConfigError if an argument is, or may be, a flag that is not known.

    Args:
        argument: with marks.
        name: what of it is before `=`.
        command: what they stand for.
        begins: whether the flag before it has all that it needs.
    """
    unknown = name if argument.startswith("--") else argument if begins and MARK.fullmatch(argument) else ""
    if reasons := command.reasons(unknown):
        raise ConfigError("; ".join(reasons))
    flag = next((each for each in command.kept_in(argument)[:1] if KEPT.match(argument)), None)
    if flag is not None and flag.value.startswith("--"):
        raise ConfigError(
            f"${flag.name} is a flag that may hold a secret, so that it is not read; write the flag in the script, "
            "with the variable as its value"
        )


def _without_key(values: dict[str, Any]) -> dict[str, Any]:
    """Return values without the secret key of wandb, which no table or recipe should show."""
    secret = "logger.wandb.key"
    return {key: "***" if OPENRLHF.current_name(key)[0] == secret else value for key, value in values.items()}


def _value(listed: Sequence[str]) -> Any:
    single = [float(each) if _NUMBER.fullmatch(each) and len(each) <= MOST_DIGITS else each for each in listed]
    if not single:
        return True
    return single[0] if len(single) == 1 else single

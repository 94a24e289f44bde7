"""A verl run script, a resolved Hydra file or a list of overrides -> the settings of a verl run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.hydra_values import Override, flattened, parse_override, read_resolved, resolve
from hwgrpo.migrate.imports.input_text import read_text, text_of
from hwgrpo.migrate.imports.script_command import KEPT, VerlCommand, without_marks
from hwgrpo.migrate.imports.shell_script import ANY_ENTRY, ENTRY, read_script
from hwgrpo.migrate.imports.verl_settings import DEVICES, VerlSettings, verl_settings
from hwgrpo.migrate.tables.peer_row import UNSET
from hwgrpo.migrate.tables.verl_names import ROWS, current_name, row_of
from hwgrpo.migrate.tables.verl_refused import WRITTEN_BY_HYDRA
from hwgrpo.support.paths import did_you_mean

_VALUE = re.compile(rf"(?:^|[\[{{,:])\s*{KEPT.pattern}")
"""A variable of the environment where a value begins."""
_NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
"""Settings whose unknown pieces are left out with a notice: they name a run."""
_PATHS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_adapter_path",
    "reward.custom_reward_function.path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
)
"""Settings in which a variable that is not set is read when the recipe runs, as the script reads it."""
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*=")
_GROUPS = {
    "ref": "the reference has the engine of the actor",
    "critic": "there is no critic here",
    "rollout": "the engine is actor_rollout_ref.rollout.name",
    "model": "models are those of the hub",
}
"""Groups of verl's config that decide nothing here."""
_ACTORS = tuple(f"{engine}_actor" for engine in ROWS["model_engine"].values)
_ENGINES = {
    "ppo_trainer": None,
    "dapo_trainer": None,
    "ppo_megatron_trainer": "megatron",
    "dapo_megatron_trainer": "megatron",
}
"""verl's own configs -> the training engine that they stand for."""


def read_verl(
    file: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    *,
    any_entry: bool = False,
) -> tuple[VerlSettings, list[str]]:
    """Return the settings of a verl run, and notices about what was read.

    Args:
        file: a bash script, a YAML file that Hydra wrote, `-` for a script on standard input; None: arguments alone.
        arguments: `key=value` overrides, for a script its arguments.
        environment: variables.
        variables: those of the script whose value is this one, whatever it sets.
        any_entry: read the settings of any program of verl as those of main_ppo.

    Raises:
        ConfigError: the file is missing or cannot be read as one; an unknown key; an illegal value; a value that
            depends on what is not known, with the line.
    """
    base: dict[str, Any] = {}
    command = VerlCommand([*arguments])
    if variables and (file is None or file.endswith((".yaml", ".yml"))):
        raise ConfigError("--set NAME=VALUE is for the variables of a run script, and none is named; write key=value")
    if file is not None and file.endswith((".yaml", ".yml")):
        base = _of_file(Path(file))
    elif file is not None:
        text = text_of("-", "a run script") if file == "-" else _text_of(Path(file))
        name, path = ("standard input", None) if file == "-" else (Path(file).name, file)
        command = read_script(
            text,
            name,
            arguments,
            environment,
            path=path,
            fixed=variables,
            module=ANY_ENTRY if any_entry else ENTRY,
        )
        unread = [each for each in variables or {} if not re.search(rf"\b{each}\b", text)]
        command.notices += [f"left out: --set {each}, since the script has no such variable" for each in unread]
        command.marked, words = _without_words(command.marked, arguments)
        command.notices += [f"left out: {each}, which is no setting; Hydra would refuse it" for each in words]
    base |= _of_config(command, Path(file or ".").parent)
    overrides = [_override(each, command) for each in command.marked]
    values = {**base, **_values([*_without_groups(overrides, command.notices)])}
    _refuse_passed_settings(values, arguments)
    values, notices = _without_unknown(values, command)
    deleted = {each.key for each in overrides if each.deletes and "@" not in each.key}
    defaults = {key: None if row.default is UNSET else row.default for key, row in ROWS.items()}
    values = {key: value for key, value in values.items() if key not in deleted}
    resolved = resolve(values, defaults, dict.fromkeys(command.unset.values(), "") | dict(environment))
    added = {key for each in overrides if each.adds for key in values if f"{key}.".startswith(f"{each.key}.")}
    settings = verl_settings(resolved, deleted=sorted(deleted), added=added)
    settings.unknown = frozenset(each.key for each in overrides if each.key in DEVICES and each.key not in values)
    return settings, [*command.notices, *notices]


def _without_groups(overrides: Sequence[Override], notices: list[str]) -> Iterator[Override]:
    """Yield overrides without those of Hydra's groups, `group@package=name`: a part of verl's config by its name.

    Raises:
        ConfigError: a group has no counterpart here.
    """
    for each in overrides:
        group, at, _ = each.key.partition("@")
        if not at:
            yield each
        elif group in _GROUPS:
            written = f"~{each.key}" if each.deletes else f"{each.key}={each.value}"
            notices.append(f"left out: {written}, {_GROUPS[group]}")
        elif each.deletes:
            raise ConfigError(f"~{each.key} deletes a part of verl's config, which a run needs; leave it out")
        elif group == "actor" and str(each.value) in _ACTORS:
            yield Override("model_engine", str(each.value).removesuffix("_actor"))
        else:
            known = f" (verl's are {', '.join(_ACTORS)})" if group == "actor" else ""
            raise ConfigError(
                f"{each.key}={shown(each.value)} chooses a part of verl's config by its name{known}; run the script "
                "with --cfg job --resolve under verl, and name the file that has the output"
            )


def _refuse_passed_settings(values: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raise ConfigError if a script passes a setting behind its name as the value of another, by its `$1`."""
    for key, value in values.items():
        if isinstance(value, str) and _SETTING.match(value) and value in arguments:
            raise ConfigError(
                f"{key}={value}: the script has its first arguments as values, as in bash; give these before {value}"
            )


def _without_words(passed: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command without those of its script that are no settings, and these.

    A script that reads `$1` often passes it in `"$@"`, too.
    """
    words = [each for each in arguments if "=" not in each and each[:1] != "~" and each in passed]
    return [each for each in passed if each not in words], words


def _override(text: str, command: VerlCommand) -> Override:
    reasons = command.reasons(text.partition("=")[0])
    if reasons:
        raise ConfigError("; ".join(reasons))
    key, equals, value = text.partition("=")
    if command.has_secret(key):
        raise ConfigError(f"{shown(command.named(key))} names a setting by a variable; write its name")
    _refuse_structure(key, value, command)
    try:
        return parse_override(command.in_bash(key) + equals + command.written(value))
    except ConfigError:
        if reasons := command.reasons(text):
            raise ConfigError("; ".join(reasons)) from None
        raise


def _refuse_structure(key: str, value: str, command: VerlCommand) -> None:
    """Raise ConfigError if a variable that may be secret is a list, a mapping or a quoted text of Hydra."""
    for found in _VALUE.finditer(value):
        variable = command.kept[int(found[1])]
        if variable.value.lstrip()[:1] in ("[", "{", "'", '"'):
            raise ConfigError(
                f"{command.named(key)}=${variable.name}: the value of {variable.name} is a list, a mapping or a quoted "
                "text that may hold a secret, so that it is not read; write it in the script, with its secret as "
                "${oc.env:NAME}"
            )


def _values(overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the values by key, the last of each; a mapping is that of the keys below it."""
    values: dict[str, Any] = {}
    for each in overrides:
        below = dict(flattened({each.key: each.value})) if isinstance(each.value, Mapping) else {each.key: each.value}
        for key, value in below.items():
            values.pop(key, None)
            values[key] = value
    return values


def _text_of(file: Path) -> str:
    try:
        return read_text(file, "a run script, or a YAML file that Hydra wrote")
    except FileNotFoundError:
        hint = did_you_mean(file, lambda other: other.suffix in (".sh", ".yaml"))
        examples = (
            f" If {file.name} is one of verl's examples: they are not part of hwgrpo, name it in your copy of verl."
            if file.name.startswith("run_")
            else ""
        )
        raise ConfigError(f"there is no file {file}.{hint}{examples}") from None


def _of_file(file: Path) -> dict[str, Any]:
    """Return the settings of a resolved Hydra file without what it has in any run."""
    settings = read_resolved(_text_of(file), file.name)
    return {
        key: value for key, value in settings.items() if value != "???" and WRITTEN_BY_HYDRA.get(key, object()) != value
    }


def _of_config(command: VerlCommand, folder: Path) -> dict[str, Any]:
    """Return the settings of the config that a command names."""
    name = command.config_name
    if name is None or name in _ENGINES:
        engine = _ENGINES.get(name or "")
        return {"model_engine": engine} if engine else {}
    if reasons := command.reasons(name + (command.config_path or "")):
        raise ConfigError(f"--config-name is not known: {'; '.join(reasons)}")
    path = command.in_bash(command.config_path or ".")
    read = f"{command.in_bash(name)}.yaml"
    file = next((place / read for place in (Path(path), folder / path) if (place / read).is_file()), None)
    if file is None:
        name, path = command.named(name), command.named(command.config_path or ".")
        raise ConfigError(
            f"--config-name={name} with --config-path={path}: there is no {name}.yaml here; run it with "
            "--cfg job --resolve under verl, and name the file that has the output"
        )
    return _of_file(file)


def _without_unknown(values: dict[str, Any], command: VerlCommand) -> tuple[dict[str, Any], list[str]]:
    """Return the values without unknown pieces, and notices about them.

    Raises:
        ConfigError: a setting that counts has such a piece.
    """
    kept, notices, wrong = {}, [], []
    for key, value in values.items():
        reasons = [reason for text in (key, *_texts(value)) for reason in command.reasons(text)]
        row = row_of(current_name(key)[0])
        if not reasons:
            kept[key] = value
        elif key in _PATHS and command.is_unset(_texts(value)):
            kept[key] = command.with_unset(value)
            notices.append(
                f"{key}: {reasons[0]} here; the recipe reads it when it runs, unless --set NAME=VALUE says it"
            )
        elif key in DEVICES:
            notices.append(f"{key}: {reasons[0]}; left out, since the command that starts the recipe says it")
        elif key in _NAMES or (row is not None and row.kind == "ignored"):
            rest = ", ".join(without_marks(text) for text in _texts(value))
            if rest and key in _NAMES:
                kept[key] = rest
            elif key not in _NAMES:
                kept[key] = "(unknown)"
            left = f", {key}={rest} is left" if rest and key in _NAMES else ""
            notices.append(f"{key}: {reasons[0]}{left}")
        else:
            rest = ", ".join(without_marks(text) for text in _texts(value))
            wrong.append(f"{without_marks(key)}={shown(rest or '?')} is not known: {reasons[0]}")
    if wrong:
        raise ConfigError(
            "; ".join(wrong) + ". Give these settings as key=value behind the file, or the variables of the script as "
            "--set NAME=VALUE"
        )
    return kept, notices


def _texts(value: Any) -> Iterator[str]:
    """Yield the single values in a value as text, with the names of mappings."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    else:
        yield str(value)

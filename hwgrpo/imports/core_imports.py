"""Imports of the core settings of OpenRLHF, ROLL and NeMo-RL by the name of the system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hwgrpo.imports.core_reader import read_yaml_settings
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.nemo_rl_import import import_nemo_rl
from hwgrpo.imports.openrlhf_import import import_openrlhf
from hwgrpo.imports.openrlhf_reader import read_openrlhf
from hwgrpo.imports.roll_import import import_roll
from hwgrpo.peer_tables.nemo_rl_mapped import NEMO_RL
from hwgrpo.peer_tables.roll_mapped import ROLL

_OF_YAML = {"roll": (ROLL, import_roll), "nemo-rl": (NEMO_RL, import_nemo_rl)}


def import_core(
    system: str,
    file: str | None,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
) -> tuple[Imported, list[str]]:
    """Return an import, and notices about what was read.

    Args:
        system: openrlhf, roll or nemo-rl.
        file: a run script of OpenRLHF, a YAML file of the others, `-` for standard input; None: arguments alone.
        arguments: settings that override it.
        environment: variables.
        variables: those of a run script, whatever it sets them to.

    Raises:
        ConfigError: the file cannot be read, a value is illegal, or batch sizes have no counterpart.
    """
    if system == "openrlhf":
        flags, notices = read_openrlhf(file, arguments, environment, variables)
        imported = import_openrlhf(flags)
    else:
        names, imports = _OF_YAML[system]
        settings, notices = read_yaml_settings(names, file, arguments, environment)
        imported = imports(settings)
    for key in ("data.train", "reward.functions"):
        if key not in imported.settings:
            notices.append(f"{key} does not follow from these settings: set it, as a run needs it")
    return imported, notices

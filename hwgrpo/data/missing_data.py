"""Check, before anything is loaded, that what `data.train` and `data.validation` name is here."""

from __future__ import annotations

from hwgrpo.config.schema import Settings
from hwgrpo.data.sources import find_data, sources_of
from hwgrpo.data.tasks import PREFIX, parse_task
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import PREFIX as REASONING_GYM
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import PackageMissing, check_address
from hwgrpo.support.given_objects import find_object, is_object


def missing_data(config: Settings) -> list[str]:
    """Return problems with the files, folders and packages of `data.train` and `data.validation`; hub names pass.

    Raises:
        ConfigError: a task is unknown.
    """
    missing = []
    for key, named in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for spec in sources_of(named):
            if spec.startswith(PREFIX):
                parse_task(spec)
                continue
            if spec.startswith(REASONING_GYM):
                try:
                    check_address(spec, key)
                except PackageMissing as error:
                    missing.append(str(error))
                continue
            try:
                (find_object if is_object(spec) else find_data)(spec, key)
            except (ConfigError, DataError) as error:
                missing.append(str(error))
    return missing

"""Settings of a verl run -> settings here."""

from __future__ import annotations

from hwgrpo.migrate.imports import verl_agents, verl_algorithm, verl_batches, verl_devices, verl_images
from hwgrpo.migrate.imports.import_result import Imported
from hwgrpo.migrate.imports.peer_import import Conversion, import_peer
from hwgrpo.migrate.imports.verl_settings import ACTOR, VerlSettings

CONVERSIONS: tuple[Conversion, ...] = (
    verl_batches.data,
    verl_batches.model,
    verl_images.images,
    verl_batches.batches,
    verl_batches.optimizer,
    verl_algorithm.advantage,
    verl_algorithm.loss,
    verl_algorithm.kl,
    verl_algorithm.correction,
    verl_algorithm.filtered_groups,
    verl_algorithm.rewards,
    verl_agents.agents,
    verl_devices.engine,
    verl_devices.sampling,
    verl_devices.parallelism,
    verl_devices.validation,
    verl_devices.run,
)


def import_verl(v: VerlSettings) -> Imported:
    """Return the recipe of a verl run.

    Raises:
        ConfigError: batch sizes or bounds that verl refuses, too.
    """
    return import_peer(v, CONVERSIONS, notices=_notices(v))


def _notices(v: VerlSettings) -> list[str]:
    notices = []
    if not v.is_given("data.val_files"):
        notices.append(
            "data.val_files is not given, so nothing is validated; verl would read ~/data/rlhf/gsm8k/test.parquet"
        )
    devices = v.launch().processes or 1
    uneven = (key for key in ("data.train_batch_size", ACTOR + "ppo_mini_batch_size") if v[key] % devices)
    remedy = f"prompts cannot be divided among {devices} devices; start fewer, or change it"
    return [*notices, *(f"{key}={v[key]} {remedy}" for key in uneven)]

"""Faults to plant into the sources, one at a time, each with the tests that must fail then: a file per folder."""

from tests.planted_faults import (
    algorithms,
    cli,
    config,
    data,
    imports,
    models,
    observe,
    outside,
    planning,
    rewards,
    rollout,
    trainer,
    training,
    training_feed,
    training_strategies,
    training_update,
    trl,
)

FAULTS = tuple(
    fault
    for folder in (
        *(algorithms, cli, config, data, imports, models, observe, outside, planning, rewards, rollout, trainer),
        *(training, training_feed, training_strategies, training_update, trl),
    )
    for fault in folder.FAULTS
)

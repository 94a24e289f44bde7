"""Null and choices without a counterpart, in the imports of TRL and of core settings."""

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.peer_tables.trl_names import ROWS
from tests.imports import core_runs
from tests.trl.trl_runs import imported


@pytest.mark.parametrize("key", ["max_steps", "loss_type", "scale_rewards", "save_steps", "num_generations"])
def test_null_is_an_error_that_names_the_default(key: str):
    with pytest.raises(ConfigError) as error:
        imported(f"{key}=null")
    default = ROWS[key].default
    assert f"{key}=null: TRL needs a value; leave the key out for the default {default!r}" in str(error.value)


@pytest.mark.parametrize(
    ("system", "key"),
    [
        ("nemo-rl", "grpo.num_prompts_per_step"),
        ("roll", "rollout_batch_size"),
        ("openrlhf", "rollout.n_samples_per_prompt"),
    ],
)
def test_null_of_core_settings_is_an_error(system: str, key: str):
    with pytest.raises(ConfigError, match=rf"{key}=null: .* needs a value; leave the key out"):
        core_runs.imported(system, f"{key}=null")


@pytest.mark.parametrize("choice", [choice for choice, here in ROWS["optim"].values.items() if not here])
def test_an_optimizer_without_a_counterpart_is_refused_with_those_that_have_one(choice: str):
    [refused] = imported(f"optim={choice}").refused()
    assert refused.key == "optim"
    assert "nearest: adamw_torch" in refused.note
    assert choice not in refused.note.partition("nearest: ")[2].split(", ")

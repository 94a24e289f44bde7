"""Null and choices without a counterpart, in the imports of TRL."""

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.tables.trl_names import ROWS
from tests.trl.trl_runs import imported


@pytest.mark.parametrize("key", ["max_steps", "loss_type", "scale_rewards", "save_steps", "num_generations"])
def test_null_is_an_error_that_names_the_default(key: str):
    with pytest.raises(ConfigError) as error:
        imported(f"{key}=null")
    default = ROWS[key].default
    assert f"{key}=null: TRL needs a value; leave the key out for the default {default!r}" in str(error.value)


@pytest.mark.parametrize("choice", [choice for choice, here in ROWS["optim"].values.items() if not here])
def test_an_optimizer_without_a_counterpart_is_refused_with_those_that_have_one(choice: str):
    [refused] = imported(f"optim={choice}").refused()
    assert refused.key == "optim"
    assert "nearest: adamw_torch" in refused.note
    assert choice not in refused.note.partition("nearest: ")[2].split(", ")


@pytest.mark.parametrize("name", ["save", "eval", "logging"])
def test_no_updates_between_two_are_refused_with_the_strategy(name: str):
    on = ("eval_strategy=steps",) if name == "eval" else ()
    [refused] = imported(f"{name}_steps=0", *on).refused()
    assert refused.key == f"{name}_steps"
    assert f"nearest: {name}_strategy=no" in refused.note
    assert imported(f"{name}_steps=0", f"{name}_strategy=no").refused() == []


def test_vespo_is_refused_with_the_correction_that_trl_puts_into_its_weights():
    on, vespo = "vllm_importance_sampling_correction", ("loss_type=vespo", "use_vllm=true")
    for mode in ((), ("vllm_importance_sampling_mode=token_mask",)):
        [refused] = imported(*vespo, *mode).refused()
        assert (refused.key, refused.value) == (on, True)
        assert "multiplies the ratio of the sequence by its weights" in refused.note
    assert imported(*vespo, f"{on}=false").refused() == []
    assert imported("loss_type=vespo").refused() == []


def test_the_cap_of_cispo_without_epsilon_high_is_explained():
    def note(*settings: str) -> str:
        [found] = [each for each in imported("loss_type=cispo", *settings).entries if "clip_high" in each.becomes]
        return found.note

    assert "ratios up to 0.2; TRL caps by epsilon where epsilon_high is not set" in note()
    assert "ratios up to 0.3; TRL caps by epsilon where epsilon_high is not set" in note("epsilon=0.3")
    assert "epsilon_high" not in note("epsilon_high=5")

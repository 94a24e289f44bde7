"""Names and values of verl and TRL are answered with those here, and what stands there exists."""

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.document import entries
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.names_here import HABITS, TRL, VALUES, VERL

BASE = ("model.path=builtin://tiny", "data.train=task://sort?digits=2", "reward.functions=[exact_match]")


def refusal(override: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, [*BASE, override])
    return str(error.value)


@pytest.mark.parametrize("table", [VERL, TRL, HABITS], ids=["verl", "TRL", "habits"])
def test_every_setting_that_is_named_exists_and_every_name_is_foreign(table: dict[str, str]):
    known = {entry.key for entry in entries()}
    named = {key for here in table.values() for key in here.partition(" | ")[0].split(", ")}
    assert named <= known
    assert not known & table.keys()


def test_every_value_that_is_named_is_one_of_the_setting():
    allowed = {entry.key: entry.allowed.removeprefix("one of: ").split(", ") for entry in entries()}
    for key, values in VALUES.items():
        assert {here.partition(" | ")[0] for here in values.values()} <= {*allowed[key]}, key
        assert not values.keys() & {*allowed[key]}, f"{key}: a value from here needs no translation"


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("num_generations=4", "num_generations: that is rollout.n here"),
        ("trainer.num_generations=4", "trainer.num_generations: that is rollout.n here"),
        ("beta=0.1", "that is algorithm.kl.coef here"),
        ("data.train_batch_size=256", "data.train_batch_size: that is trainer.prompts_per_step here"),
        ("train_batch_size=256", "that is trainer.prompts_per_step here"),
        ("algorithm.adv_estimator=grpo", "that is algorithm.advantage.name here"),
        ("ppo_mini_batch_size=4", "that is trainer.prompts_per_update here"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n: that is rollout.n here"),
        ("+actor_rollout_ref.actor.clip_ratio=0.2", "algorithm.loss.clip_low and algorithm.loss.clip_high here"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "use_kl_loss: that is algorithm.kl.coef here (0 is off)"),
        ("max_completion_length=9", "that is rollout.max_response_tokens here"),
        ("epsilon=0.2", "algorithm.loss.clip_low and"),
        ("learning_rate=1", "that is optim.lr here"),
        ("optim.learning_rate=1", "that is optim.lr here"),
        ("per_device_train_batch_size=8", "trainer.prompts_per_step here (it counts prompts over all ranks"),
        ("algorithm.kl.estimator=low_var_kl", "algorithm.kl.estimator='low_var_kl' is not known: that is k3 here"),
        ("algorithm.kl.estimator=low_var_kl+", "that is k3+ here"),
        ("algorithm.loss.name=vanilla", "that is ppo_clip here"),
        ("algorithm.aggregation.name=dr_grpo", "that is seq-mean-token-sum-norm here"),
        ("data.overlong=left", "that is truncate_left here"),
        ("trainer.strategy=fsdp", "that is fsdp2 here"),
        ("algorithm.name=dapo", "unknown key algorithm.name: that is algorithm.preset here (a published method"),
        ("trainer.name=mine", "unknown key trainer.name. trainer has: output_dir"),
        (
            "algorithm.loss.name=dapo",
            "ppo_clip here (with algorithm.aggregation.name=token-mean). algorithm.preset=dapo",
        ),
        ("algorithm.loss.name=dppo", "Did you mean 'dppo_kl'? algorithm.preset=dppo sets all settings of that method"),
        ("algorithm.loss.name=ppo", "Did you mean 'ppo_clip'?"),
        ("algorithm.advantage.name=GRPO", "Did you mean 'grpo'?"),
        ("algorithm.preset=DAPO", "Did you mean 'dapo'?"),
        ("model.dtype=BF16", "that is bfloat16 here"),
        ("rollout.engine=VLLM", "Did you mean 'vllm'?"),
        ("backend.name=gpu", "backend.name='gpu' is not known; use cuda (NVIDIA) or rocm (AMD)"),
        ("backend.name=nvidia", "Did you mean 'cuda'?"),
        ("backend.name=CUDA", "Did you mean 'cuda'?"),
        # a name from here that is only misspelt stays one
        ("trainer.lr=1", "Did you mean optim.lr?"),
        ("rollout.temprature=1", "Did you mean rollout.temperature?"),
        ("optim.beta=[0.9, 0.99]", "Did you mean optim.betas?"),
        ("ROLLOUT.n=3", "Did you mean rollout?"),
    ],
)
def test_a_name_or_value_of_a_peer_is_answered_with_the_one_here(override: str, here: str):
    assert here in refusal(override)

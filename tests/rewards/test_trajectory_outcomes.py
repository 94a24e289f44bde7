"""Outcomes of trajectories: the reward `environment`, failed environments, and what functions of each form get."""

from dataclasses import replace

import pytest
import torch

from hwgrpo.config.load import load_config
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.trajectory_outcomes import EnvironmentReward, TurnFinder, state_number
from hwgrpo.training.feed.scored_groups import join, split
from hwgrpo.training.update.step_metrics import failure_notes, sample_metrics

GROUPS = [["ab=c", "d"], ["e=", "f=g"]]
MASKS = [[True, True, False, True], [True], [True, False], [True, False, True]]


def outcome(*rewards: float, failure: str = "", states=None) -> dict:
    return {"reward": sum(rewards), "turn_rewards": [*rewards], "states": states or [], "failure": failure}


OUTCOMES = (outcome(0.5, 1.0, states=["s", "t"]), outcome(2.0), outcome(0.25, states=["s"]), outcome(1.0, -1.0))
FAILED = (*OUTCOMES[:2], outcome(9.0, failure="step raised ValueError: no board"), OUTCOMES[3])


@pytest.fixture
def trajectories(make_batch):
    """Return a function: outcomes -> prompts and the trajectories of GROUPS, whose observed tokens are `=`."""

    def make(outcomes=OUTCOMES, **options):
        prompts, completions = make_batch(GROUPS, **options)
        mask = torch.tensor([flag for mask in MASKS for flag in mask])
        return prompts, replace(completions, loss_mask=mask, outcomes=tuple(outcomes))

    return make


@pytest.fixture
def scored(reward_config):
    """Return a function: batch, reward settings -> the rewards."""

    def score(batch, *functions, **options):
        with RewardPipeline(reward_config(*(functions or [{"name": "environment"}])), **options) as pipeline:
            return pipeline.score(*batch)

    return score


def test_the_reward_is_the_sum_over_turns_or_a_list_where_the_estimator_reads_turns(trajectories, scored):
    whole = scored(trajectories(), {"name": "environment", "weight": 2})
    assert whole.total.tolist() == [3.0, 4.0, 0.5, 0.0]
    assert whole.steps is None
    by_turn = scored(trajectories(), {"name": "environment", "weight": 2}, steps=TurnFinder(True))
    assert by_turn.total.tolist() == [3.0, 4.0, 0.5, 0.0]
    assert by_turn.steps.rewards.tolist() == [1.0, 2.0, 4.0, 0.5, 2.0, -2.0]
    assert by_turn.steps.ends.tolist() == [1, 3, 0, 0, 0, 2]
    assert by_turn.steps.offsets.tolist() == [0, 2, 3, 4, 6]
    s, t = state_number("s"), state_number("t")
    assert by_turn.steps.states.tolist() == [s, t, -1, s, -1, -1]


def test_one_number_is_the_reward_of_the_last_turn(trajectories, scored, reward_file):
    own = f"{reward_file('def f(solution_str): return float(len(solution_str))')}:f"
    rewards = scored(trajectories(), {"name": "environment"}, {"name": own}, steps=TurnFinder(True))
    assert rewards.steps.rewards.tolist() == [0.5, 1.0 + 4, 2.0 + 1, 0.25 + 2, 1.0, -1.0 + 3]
    alone = scored(trajectories(), {"name": own}, steps=TurnFinder(False))
    assert alone.steps.rewards.tolist() == [0.0, 4.0, 1.0, 2.0, 0.0, 3.0]
    with pytest.raises(RewardError, match="every reward function returned one number per response"):
        scored(trajectories(), {"name": own}, steps=TurnFinder(True))


def test_a_reward_model_of_text_steps_gets_no_turns(scored, trajectories, reward_file):
    source = """
    class Model:
        def __init__(self, steps):
            assert steps is None
        def __call__(self, batch, completions):
            return [1.0] * len(completions)
    """
    rewards = scored(trajectories(), {"name": f"{reward_file(source)}:Model"}, steps=TurnFinder(False))
    assert rewards.total.tolist() == [1.0] * 4


def test_a_response_without_an_outcome_is_refused(trajectories, scored, reward_file):
    with pytest.raises(ConfigError, match=r"response to prompt 0:0 has no outcome .*set rollout\.workflow to"):
        scored(trajectories(({}, *OUTCOMES[1:])))
    with pytest.raises(ConfigError, match=r"functions\.0\.name=environment with rollout\.workflow=single_turn"):
        load_config("tiny_sort", ["reward.functions=[environment]"])
    workflow = f"{reward_file('async def run(prompt, sampler): return []')}:run"  # one of your own may have outcomes
    words = ["reward.functions=[environment]", f"rollout.workflow={workflow}"]
    assert load_config("tiny_sort", words).reward.functions[0].name == "environment"


def test_the_trainer_passes_whether_it_reads_turns(scored, trajectories):
    with pytest.raises(ConfigError, match=r"kwargs\.turn_rewards: the trainer passes 'turn_rewards'"):
        scored(trajectories(), {"name": "environment", "kwargs": {"turn_rewards": True}})


def test_other_numbers_of_rewards_or_states_than_turns_are_named(trajectories, scored):
    three = (outcome(1.0, 1.0, 1.0), *OUTCOMES[1:])
    with pytest.raises(RewardError, match="returned 3 rewards of steps for a response of 2"):
        scored(trajectories(three), steps=TurnFinder(True))
    states = (*OUTCOMES[:3], outcome(1.0, -1.0, states=["s"]))
    with pytest.raises(RewardError, match="has 1 states for 2 turns"):
        scored(trajectories(states), steps=TurnFinder(True))


@pytest.mark.parametrize(
    ("policy", "valid", "turns"),
    [
        ("mask_sample", [True, True, False, True], [0.5, 1.0, 2.0, 0.0, 1.0, -1.0]),
        ("value", [True, True, True, True], [0.5, 1.0, 2.0, 0.0, 1.0, -1.0]),
        ("drop_group", [True, True, False, False], [0.5, 1.0, 2.0, 0.0, 0.0, 0.0]),
    ],
)
def test_a_failed_environment_is_treated_as_its_policy_says(policy, valid, turns, trajectories, scored):
    batch = trajectories(FAILED)
    rewards = scored(batch, on_failure=policy, steps=TurnFinder(True))
    assert rewards.valid.tolist() == valid
    assert rewards.steps.rewards.tolist() == turns
    assert rewards.total[2] == 0.0
    assert rewards.per_function["environment"].isnan().tolist() == [False, False, True, False]
    assert rewards.failures == {"errors/environment": 1}
    said = rewards.first_failures["errors/environment"]
    assert (
        said
        == "the environment of prompt 0:1 of tests, sample 0 of its group, failed: step raised ValueError: no board"
    )
    metrics = sample_metrics(*batch, rewards, torch.zeros(4), lambda own: [own])
    assert metrics["reward_failures/errors/environment"] == 1.0
    [note] = failure_notes(metrics, [], rewards, 3, set())
    assert note.startswith("reward errors/environment: 1 samples in step 3 (the environment of prompt 0:1")


def test_under_raise_a_failed_environment_ends_the_run(trajectories, scored):
    with pytest.raises(RewardError, match=r"sample 0 of its group, failed: .*no board; .*on_failure to value, mask"):
        scored(trajectories(FAILED), on_failure="raise")


FAILS_ON_FAILED = """
def f(completions, log_extra=None, **kwargs):
    assert len(completions) == 3, completions
    log_extra("read", completions)
    return [float(len(text)) for text in completions]
def g(solution_str):
    return float("e" not in solution_str) and 1 / (solution_str != "f=g")
def h(batch, completions):
    return [{"score": 1.0, "seen": text} for text in completions.texts]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_no_function_is_called_with_a_failed_trajectory(workers, trajectories, scored, reward_file):
    """So a function's failures are its own, and are reported with the samples of the whole batch."""
    path = reward_file(FAILS_ON_FAILED)
    functions = [{"name": f"{path}:{name}", "workers": workers, "on_error": "mask_sample"} for name in "fgh"]
    rewards = scored(trajectories(FAILED), *functions)
    assert rewards.per_function["f"].nan_to_num(-1).tolist() == [4.0, 1.0, -1.0, 3.0]
    assert rewards.per_function["h"].nan_to_num(-1).tolist() == [1.0, 1.0, -1.0, 1.0]
    assert rewards.valid.tolist() == [True, True, False, False]
    assert rewards.failures == {"errors/environment": 1, "errors/g": 1}
    assert "sample 1 of its group" in rewards.first_failures["errors/g"]
    seen = ({"read": "ab=c", "seen": "ab=c"}, {"read": "d", "seen": "d"}, {}, {"read": "f=g", "seen": "f=g"})
    assert rewards.extras == seen
    raising = {"name": f"{path}:g", "workers": workers}
    with pytest.raises(RewardError, match="sample 1 of its group"):
        scored(trajectories(FAILED), raising)


def test_where_all_environments_failed_no_function_is_called(trajectories, scored, reward_file):
    path = reward_file("def f(batch, completions): raise AssertionError('called')")
    everything = tuple(outcome(failure="reset timed out") for _ in range(4))
    rewards = scored(trajectories(everything), {"name": f"{path}:f"}, steps=TurnFinder(True))
    assert rewards.valid.tolist() == [False] * 4
    assert rewards.failures == {"errors/environment": 4}


def test_the_reward_has_no_value_for_a_failed_trajectory(trajectories):
    assert EnvironmentReward(turn_rewards=False)(*trajectories(FAILED)) == [1.5, 2.0, None, 0.0]


MESSAGES = [
    {"role": "assistant", "content": "ab"},
    {"role": "tool", "content": "=", "name": "add"},
    {"role": "assistant", "content": "c"},
]


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_in_trls_form_get_the_messages_of_a_trajectory(workers, trajectories, scored, reward_file):
    source = """
    def f(completions, log_extra=None, **kwargs):
        log_extra("roles", [[each["role"] for each in messages] for messages in completions])
        completions[0].clear()
        return [1.0] * len(completions)
    """
    first = {**OUTCOMES[0], "messages": MESSAGES}
    messages = ({"role": "user", "content": "?"},)
    batch = trajectories((first, {}, *OUTCOMES[2:]), messages=messages)
    rewards = scored(batch, {"name": f"{reward_file(source)}:f", "workers": workers})
    roles = [each["roles"] for each in rewards.extras]
    assert roles == [["assistant", "tool", "assistant"], *[["assistant"]] * 3]
    assert first["messages"] == MESSAGES
    assert len(MESSAGES) == 3, "a function changes a copy"


def test_a_function_may_get_what_the_policy_wrote_last(trajectories, scored, reward_file):
    source = "def f(solution_str): return {'score': 1.0, 'read': solution_str}"
    path = reward_file(source)
    first = {**OUTCOMES[0], "messages": MESSAGES}
    ended = [{**each, "messages": MESSAGES[:2]} for each in OUTCOMES[2:]]  # with an observation
    batch = trajectories((first, {}, *ended))
    whole = scored(batch, {"name": f"{path}:f"})
    assert [each["read"] for each in whole.extras] == ["ab=c", "d", "e=", "f=g"]
    rewards = scored(batch, {"name": f"{path}:f", "text": "last_turn"})
    assert [each["read"] for each in rewards.extras] == ["c", "d", "", ""]


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_in_verls_form_get_the_number_of_turns(workers, trajectories, scored, reward_file):
    """As verl counts: the prompt, each turn of the policy, and each reply to one."""
    source = """
    def f(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1.0, "info": extra_info}
    """
    entry = {"name": f"{reward_file(source)}:f", "workers": workers}
    columns = [{"extra_info": {"index": 7}}, {}]
    info = [each["info"] for each in scored(trajectories((*OUTCOMES[:3], {}), columns=columns), entry).extras]
    assert info == [{"index": 7, "num_turns": 4}, {"index": 7, "num_turns": 2}, {"num_turns": 3}, None]
    none = [each["info"] for each in scored(trajectories((), columns=columns), entry).extras]
    assert none == [{"index": 7}, {"index": 7}, None, None]


def test_groups_keep_their_outcomes_when_steps_are_filled_with_those_of_others(trajectories, scored):
    prompts, completions = trajectories()
    rewards = scored((prompts, completions), steps=TurnFinder(True))
    joined_prompts, joined, joined_rewards = join([*reversed(split(prompts, completions, rewards))])
    assert joined.outcomes == (*OUTCOMES[2:], *OUTCOMES[:2])
    again = scored((joined_prompts, joined), steps=TurnFinder(True))
    assert torch.equal(again.steps.states, joined_rewards.steps.states)
    assert torch.equal(again.steps.rewards, joined_rewards.steps.rewards)

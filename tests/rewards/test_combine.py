import math

import pytest
import torch
from omegaconf import OmegaConf

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rewards.combine import RewardPipeline

GROUPS = [["a", "bad", "c"], ["d"], ["e", "f"]]  # ragged: 3, 1 and 2 samples
"""The functions below give 1 for every response but `bad`."""
RAISES = """
def f(solution_str):
    if solution_str == "bad":
        raise KeyError("no luck")
    return 1
"""
NANS = {
    "nan": 'def f(solution_str): return float("nan") if solution_str == "bad" else 1',
    "none": 'def f(completions, **kwargs): return [None if text == "bad" else 1.0 for text in completions]',
    "infinite": 'def f(batch, completions): return [float("-inf") if t == "bad" else 1 for t in completions.texts]',
}


def test_the_total_is_the_weighted_sum_in_fp64_and_each_function_is_told(make_batch, reward_config, reward_file):
    path = reward_file(
        """
        import numpy, torch
        def length(solution_str): return len(solution_str)
        def third(completions, **kwargs): return numpy.full(len(completions), 1 / 3)
        def truth(batch, completions): return torch.tensor([True] * len(completions))
        """
    )
    config = reward_config(
        {"name": f"{path}:length", "weight": 0.1},
        {"name": f"{path}:third", "weight": -2.0},
        {"name": f"{path}:truth"},
    )
    rewards = RewardPipeline(config).score(*make_batch([["ab", "c"], ["def"]]))
    assert rewards.total.dtype == torch.float64
    assert rewards.total.tolist() == pytest.approx([0.1 * n - 2 / 3 + 1 for n in (2, 1, 3)], abs=1e-15)
    assert {name: values.tolist() for name, values in rewards.per_function.items()} == {
        "length": [2.0, 1.0, 3.0],
        "third": [1 / 3] * 3,
        "truth": [1.0] * 3,
    }
    assert rewards.valid.all()
    assert rewards.failures == {}
    assert rewards.extras == ()


def test_registered_rewards_get_ground_truth_and_context(make_batch, reward_config):
    config = reward_config({"name": "exact_match"}, {"name": "length", "weight": 10.0, "kwargs": {"buffer": 2}})
    pipeline = RewardPipeline(config, context={"max_response_tokens": 4})
    rewards = pipeline.score(*make_batch([["ab", "abcd"], ["xyz"]], ["ab", "xyz"]))
    assert pipeline.names == ("exact_match", "length")
    assert rewards.total.tolist() == [1.0, -10.0, -4.0]


def test_settings_from_omegaconf_work(make_batch):
    entry = RewardFunctionConfig(name="format", weight=2.0, kwargs={"tags": ["a"]})
    config = OmegaConf.create({"functions": [OmegaConf.structured(entry)]})
    assert RewardPipeline(config).score(*make_batch([["<a></a>", "b"]])).total.tolist() == [2.0, 0.0]


def test_the_same_function_twice_gets_two_names(make_batch, reward_config):
    config = reward_config({"name": "exact_match"}, {"name": "exact_match", "weight": 2.0})
    rewards = RewardPipeline(config).score(*make_batch([["a"]], ["a"]))
    assert list(rewards.per_function) == ["exact_match", "exact_match_2"]
    assert rewards.total.tolist() == [3.0]


def test_further_fields_of_dicts_are_kept(make_batch, reward_config, reward_file):
    path = reward_file(
        """
        def f(solution_str): return {"score": 2.0, "kind": solution_str.upper()}
        def g(solution_str): return 1.0
        """
    )
    rewards = RewardPipeline(reward_config({"name": f"{path}:f"}, {"name": f"{path}:g"})).score(
        *make_batch([["a", "b"]])
    )
    assert rewards.total.tolist() == [3.0, 3.0]
    assert rewards.extras == ({"kind": "A"}, {"kind": "B"})


def failing(kind, policy, reward_file, reward_config):
    path = reward_file(RAISES if kind == "errors" else NANS[kind])
    setting = "on_error" if kind == "errors" else "on_nan"
    return reward_config({"name": f"{path}:f", "weight": 2.0, setting: policy, "failure_value": -3.0})


@pytest.mark.parametrize("kind", ["errors", *NANS])
@pytest.mark.parametrize(
    ("policy", "valid", "total"),
    [
        ("value", [1, 1, 1, 1, 1, 1], [2, -6, 2, 2, 2, 2]),
        ("mask_sample", [1, 0, 1, 1, 1, 1], [2, 0, 2, 2, 2, 2]),
        ("drop_group", [0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 2, 2]),
    ],
)
def test_a_failing_sample_costs_what_the_policy_says(
    kind, policy, valid, total, make_batch, reward_config, reward_file
):
    rewards = RewardPipeline(failing(kind, policy, reward_file, reward_config)).score(*make_batch(GROUPS))
    assert rewards.valid.tolist() == [bool(flag) for flag in valid]
    assert rewards.total.tolist() == total
    assert [math.isnan(value) for value in rewards.per_function["f"]] == [False, True, False, False, False, False]
    assert rewards.failures == {"errors/f" if kind == "errors" else "nans/f": 1}


def test_under_raise_the_error_names_function_and_prompt_and_keeps_its_cause(make_batch, reward_config, reward_file):
    pipeline = RewardPipeline(failing("errors", "raise", reward_file, reward_config))
    said = r"reward f, prompt 0:0 of tests, sample 1 of its group raised KeyError: 'no luck' at .*:\d+, `.*raise .*`"
    with pytest.raises(RewardError, match=said) as caught:
        pipeline.score(*make_batch(GROUPS))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("kind", "shown"), [("nan", "nan"), ("none", "None"), ("infinite", "-inf")])
def test_under_raise_a_value_that_is_no_finite_number_is_told(kind, shown, make_batch, reward_config, reward_file):
    pipeline = RewardPipeline(failing(kind, "raise", reward_file, reward_config))
    with pytest.raises(
        RewardError, match=rf"reward f, prompt 0:0 of tests, sample 1 of its group returned {shown}.*on_n"
    ):
        pipeline.score(*make_batch(GROUPS))


def test_error_and_nan_policies_are_apart(make_batch, reward_config, reward_file):
    path = reward_file(NANS["nan"])
    config = reward_config({"name": f"{path}:f", "on_error": "mask_sample"})
    with pytest.raises(RewardError):
        RewardPipeline(config).score(*make_batch(GROUPS))


def test_a_batch_function_that_raises_fails_every_sample(make_batch, reward_config, reward_file):
    path = reward_file("def f(completions, **kwargs): raise OSError('gone')\n")
    config = reward_config({"name": f"{path}:f", "on_error": "value", "failure_value": 0.5}, {"name": "format"})
    rewards = RewardPipeline(config).score(*make_batch(GROUPS))
    assert rewards.total.tolist() == [0.5] * 6
    assert rewards.failures == {"errors/f": 6}


def test_failures_of_two_functions_add_up(make_batch, reward_config, reward_file):
    path = reward_file(
        """
        def f(solution_str): return 1 / (solution_str != "a")
        def g(solution_str): return None if solution_str == "d" else 1
        """
    )
    config = reward_config(
        {"name": f"{path}:f", "on_error": "mask_sample"}, {"name": f"{path}:g", "on_nan": "drop_group"}
    )
    rewards = RewardPipeline(config).score(*make_batch([["a", "b"], ["c"], ["d", "e"], ["f", "a"]]))
    assert rewards.valid.tolist() == [False, True, True, False, False, True, False]
    assert rewards.failures == {"errors/f": 2, "nans/g": 1}


@pytest.mark.parametrize("policy", ["value", "raise"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(completions, **kwargs): return [1.0]", "reward f returned 1 values for 6 responses"),
        ("def f(completions, **kwargs): return 1.0", "must return a list .* it returned float"),
        ("def f(completions, **kwargs): return 'abcdef'", "must return a list .* it returned str"),
        (
            "def f(solution_str): return 'good'",
            r"reward f, prompt 0:0 .* returned 'good' \(str\), which is not a number",
        ),
        ("def f(solution_str): return {'value': 1}", r"returned a dict without 'score'; it has: \['value'\]"),
        ("import torch\ndef f(solution_str): return torch.ones(2)", "which is not a number"),
    ],
)
def test_what_is_no_reward_at_all_stops_the_run_under_every_policy(
    source, words, policy, make_batch, reward_config, reward_file
):
    config = reward_config({"name": f"{reward_file(source)}:f", "on_error": policy, "on_nan": policy})
    with pytest.raises(RewardError, match=words):
        RewardPipeline(config).score(*make_batch(GROUPS))


def test_a_wrong_setting_of_a_reward_is_no_failure_of_a_sample(make_batch, reward_config):
    config = reward_config({"name": "gsm8k", "kwargs": {"method": "strikt"}, "on_error": "value"})
    with pytest.raises(ConfigError, match="Did you mean 'strict'"):
        RewardPipeline(config).score(*make_batch([["1"]], ["1"]))


def test_a_column_that_a_reward_needs_and_the_data_lacks_is_told_before_and_during_a_run(
    make_batch, reward_config, reward_file
):
    path = reward_file("def f(completions, level): return level")
    config = reward_config({"name": f"{path}:f"})
    words = r"reward.functions\[0\]: f needs a data column .*'level'; columns are: levle.*Did you mean 'levle'"
    with pytest.raises(ConfigError, match=words):
        RewardPipeline(config, columns=["levle"])
    with pytest.raises(ConfigError, match=words):
        RewardPipeline(config).score(*make_batch([["a"]], columns=[{"levle": 1}]))
    rewards = RewardPipeline(config, columns=["level"]).score(*make_batch([["a"]], columns=[{"level": 4}]))
    assert rewards.total.tolist() == [4.0]


def test_no_functions_is_refused(reward_config):
    with pytest.raises(ConfigError, match=r"reward.functions is empty.*exact_match"):
        RewardPipeline(reward_config())


def test_no_responses_give_no_rewards(make_batch, reward_config):
    rewards = RewardPipeline(reward_config({"name": "exact_match"})).score(*make_batch([[]], ["a"]))
    assert rewards.total.shape == rewards.valid.shape == (0,)

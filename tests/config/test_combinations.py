"""Settings of the algorithm that mean nothing together are refused, and the list of them covers every setting."""

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.combinations import NAMES, VALUES, Checker, Exclusion, exclusions, refused_values
from hwgrpo.config.document import entries
from hwgrpo.errors import ConfigError

NOT_LISTED = {
    "algorithm.process.function": "takes the place of delimiter and pattern, and is a file",
    "algorithm.preset": "sets the others",
    "algorithm.advantage.kwargs": "of a function of one's own",
    "algorithm.kl.kwargs": "of a function of one's own",
    "algorithm.correction.kwargs": "of a function of one's own",
}


@pytest.mark.parametrize(
    ("settings", "named", "legal"),
    [
        (
            ["algorithm.kl.coef=0.1", "algorithm.kl.times_ratio=true", "algorithm.kl.estimator=k1+"],
            ["algorithm.kl.times_ratio=true", "'k1+'", "use algorithm.kl.estimator=k1,"],
            "algorithm.kl.estimator=k1",
        ),
        (
            ["algorithm.kl.coef=0.1", "algorithm.kl.times_ratio=true", "algorithm.kl.estimator=k3+"],
            ["algorithm.kl.times_ratio=true", "'k3+'", "use algorithm.kl.estimator=k3,"],
            "algorithm.kl.estimator=k2",
        ),
        (
            ["algorithm.m2po_threshold=0.04", "algorithm.old_logprobs=rollout"],
            ["m2po_threshold=0.04", "old_logprobs=rollout", "leave one of them out"],
            "algorithm.old_logprobs=trainer",
        ),
        (
            ["algorithm.advantage.name=grpo_passk", "algorithm.advantage.singleton=raw"],
            ["singleton=raw", "'grpo_passk'", "use zero or error"],
            "algorithm.advantage.singleton=error",
        ),
        (
            ["algorithm.loss.delta=3"],
            ["algorithm.loss.delta=3", "dual_clip=3", "use less than 3"],
            "algorithm.loss.delta=2.9",
        ),
        (
            ["algorithm.loss.delta=4"],
            ["algorithm.loss.delta=4", "dual_clip=3", "or algorithm.loss.dual_clip=null"],
            "algorithm.loss.dual_clip=null",
        ),
    ],
)
def test_a_pair_without_meaning_is_refused_with_the_remedy(settings: list[str], named: list[str], legal: str):
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_sort", settings)
    for text in named:
        assert text in str(refused.value)
    load_config("tiny_sort", [*settings, legal])


def test_a_cap_above_the_dual_clip_has_an_effect_where_the_upper_clip_is_higher_still():
    load_config("tiny_sort", ["algorithm.loss.delta=4", "algorithm.loss.clip_high=5"])


def test_an_estimator_without_groups_takes_groups_of_one():
    load_config("tiny_sort", ["rollout.n=1", "algorithm.advantage.name=reinforce_plus_plus"])
    with pytest.raises(ConfigError, match="no baseline"):
        load_config("tiny_sort", ["rollout.n=1", "algorithm.advantage.name=reinforce_plus_plus_baseline"])


def test_every_setting_of_the_algorithm_is_compared_with_the_others():
    listed = {*NAMES, *(key for key, *_ in VALUES)}
    settings = {entry.key for entry in entries() if entry.key.startswith("algorithm.")}
    missing = settings - listed - NOT_LISTED.keys()
    assert not missing, f"give {sorted(missing)} a value in VALUES of hwgrpo/config/combinations.py"


def test_values_are_shown_by_what_is_shorter():
    short = Exclusion("a=1", "b", ("x",), ("y", "z"), "")
    long = Exclusion("a=1", "b", ("x", "w", "v"), ("y",), "")
    assert [refused_values(each) for each in (short, long)] == ["b=x", "b other than y"]


def test_values_are_listed_with_their_own_reason():
    rows = {each.values: each.reason for each in exclusions() if each.setting == "algorithm.kl.times_ratio=true"}
    assert "gradient of its value once more" in rows["k1+", "k3+"]
    assert "ratio of the sampled token is not a part of it" in rows["exact",]
    assert {each.reason for each in exclusions() if each.setting == "algorithm.loss.tau_pos=2"} == {"no effect"}


def test_the_check_is_asked_about_later_settings_last():
    checker = Checker()
    sapo, gpg = {"algorithm.loss.name": "sapo"}, {"algorithm.loss.name": "gpg"}
    assert checker.refusal(sapo, {"algorithm.loss.tau_pos": 2.0}) is None
    assert "no effect" in str(checker.refusal(sapo, {"algorithm.loss.tau_pos": 2.0}, gpg))

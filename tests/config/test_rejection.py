"""`algorithm.correction.reject` and `algorithm.old_logprobs`: what is refused, with the remedy."""

import pytest

from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError


@pytest.mark.parametrize(
    ("reject", "message"),
    [
        ("{seq_max_k1: [0.5, 2]}", r"reject.seq_max_k1=\[0.5, 2\]: there is no such statistic; use one of: token_k1, "),
        ("{token_k1: 2.0}", r"reject.token_k1=2.0: give the least and the largest ratio .*, e.g. \[0.5, 2.0\]"),
        ("{token_k1: [2.0, 0.5]}", "give the least and the largest ratio"),
        ("{token_k3: [0.1, 0.2]}", r"reject.token_k3=\[0.1, 0.2\]: give one number above 0, e.g. 0.01"),
        ("{veto: 0}", "reject.veto=0: give one number above 0 and below 1, e.g. 1e-4"),
        ("{veto: 1}", "reject.veto=1: give one number above 0 and below 1"),
        ("{veto: 2.5}", "give one number above 0 and below 1"),
        ("{veto: true}", "give one number above 0"),
        ("{veto: .nan}", "give one number above 0"),
        ("{token_k1: [1.5, 2.0]}", r"token_k1=\[1.5, 2.0\] leaves out what engine and trainer agree on"),
        ("{seq_mean_k1: [0.2, 0.9]}", "leaves out what engine and trainer agree on"),
        ("{token_k1: [1e-9, 1e9]}", r"leaves nothing out: .* is between 2.06115e-09 and 4.85165e\+08; use closer"),
        ("{seq_mean_k2: 200}", "leaves nothing out: .* at most 200; use less"),
        ("{seq_max_k3: 4.9e8}", "leaves nothing out"),
        ("{token_k3: text}", "give one number above 0"),
        ("{token_k1: [a, b]}", "give the least and the largest ratio"),
        ("{token_k1: ab}", "give the least and the largest ratio"),
        ("{token_k1: [0.5, .inf]}", "give the least and the largest ratio"),
    ],
)
def test_bounds_that_a_statistic_does_not_take_are_refused(reject, message):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_sort", [f"algorithm.correction.reject={reject}"])


def test_what_each_statistic_takes_is_accepted():
    words = ["algorithm.correction.reject={token_k1: [0.5, 2], seq_mean_k3: 0.01, veto: 1e-12, seq_sum_k2: 300}"]
    reject = load_config("tiny_sort", words).algorithm.correction.reject
    assert reject == {"token_k1": [0.5, 2], "seq_mean_k3": 0.01, "veto": 1e-12, "seq_sum_k2": 300}


@pytest.mark.parametrize("bounds", [[0.5, 1e10], [1e-10, 2]])
def test_one_bound_of_two_may_leave_nothing_out(bounds):
    reject = load_config("tiny_sort", [f"algorithm.correction.reject={{seq_mean_k1: {bounds}}}"])
    assert reject.algorithm.correction.reject == {"seq_mean_k1": bounds}


@pytest.mark.parametrize(
    "correction", ["algorithm.correction.name=token_mask", "algorithm.correction.reject={token_k3: 0.1}"]
)
def test_with_the_engines_log_probs_as_the_old_ones_there_is_nothing_to_correct(correction):
    with pytest.raises(ConfigError, match=r"old_logprobs=rollout: .* leaves no gap to correct; leave out"):
        load_config("tiny_sort", ["algorithm.old_logprobs=rollout", correction])
    config = load_config("tiny_sort", ["algorithm.old_logprobs=rollout", "rollout.max_staleness=1"])
    assert config.algorithm.correction.name == "none"

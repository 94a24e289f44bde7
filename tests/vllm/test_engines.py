"""Engines on vLLM beside the local engine on the same policy: equal tokens, log-probs and endings after every update.

What is compared is collected by tests/vllm/vllm_worker.py, once per engine.
"""

import json
import re

import pytest
import torch

from tests.vllm import vllm_environment

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
ENGINES = ("vllm", "vllm_server")


@pytest.fixture(scope="module", params=ENGINES)
def found(request, tmp_path_factory):
    return vllm_environment.findings(request.param, tmp_path_factory.mktemp(request.param))


def assert_equal(row) -> None:
    assert row["tokens"]
    assert row["texts"]
    assert row["finished"]
    assert row["logprobs"] <= TOLERANCE


def test_a_new_engine_has_the_weights_of_the_policy(found):
    assert_equal(found["at the start"])


def test_after_every_update_greedy_responses_are_those_of_the_local_engine(found):
    for version, row in enumerate(found["updates"], start=1):
        assert row["changed"], "the update must show in the responses"
        assert_equal(row)
        assert row["version"] == version


def test_an_update_that_is_forgotten_is_seen(found):
    assert not found["forgotten"]["tokens"]


def test_after_every_update_of_an_adapter_greedy_responses_are_those_of_the_local_engine(found):
    for version, row in enumerate(found["adapters"]["updates"], start=1):
        assert row["changed"], "the update must show in the responses"
        assert_equal(row)
        assert row["version"] == version


@pytest.mark.parametrize("trained", ["weights", "adapter"])
def test_probes_find_equal_log_probs_after_updates_and_an_update_that_was_not_applied(found, trained: str):
    probes = found["probes"] if trained == "weights" else found["adapters"]["probes"]
    assert max(probes["gaps"]) <= TOLERANCE
    assert f"does not sample with the policy's {trained} of version" in probes["error"]


def test_responses_end_and_read_as_those_of_the_local_engine(found):
    for row in found["stops"]:
        assert row["shorter"], "the stop must have an effect"
        assert row["ended"] > 0
        assert_equal(row)


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    """Return the p-value of counts under probabilities; what is expected less than five times counts as one."""
    observed, expected = torch.tensor(counts).double(), torch.tensor(probabilities).double() * sum(counts)
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    assert observed[~kept].sum() == 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = (kept.sum() - 1).double() / 2
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("case", ["plain", "filtered"])
def test_tokens_are_drawn_with_the_probabilities_of_the_model(found, case: str):
    counts, probabilities = found[case]["counts"], found[case]["probabilities"]
    assert sum(counts) > 1000
    assert chi_square(counts, probabilities) > 1e-3
    shifted = [*probabilities[1:], probabilities[0]]
    assert sum(p == 0 and c > 0 for c, p in zip(counts, shifted, strict=True)) or chi_square(counts, shifted) < 1e-9


@pytest.mark.parametrize("case", ["plain", "filtered"])
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(found, case: str):
    assert found[case]["logprobs"] <= TOLERANCE


def test_a_seed_repeats_its_responses_whatever_else_is_in_the_batch(found):
    assert found["repeats"] == {"same": True, "alone": True, "other": False, "distinct": True}


def test_groups_that_miss_their_deadlines_are_dropped_and_leave_nothing_behind(found):
    late = found["late"]
    assert_equal(late["in time"])
    assert (late["in time"]["late"], late["in time"]["groups"]) == (0, 0)
    assert late["late"] >= len(late["dropped"]) > 3
    assert sorted(late["dropped"] + late["kept"]) == [*range(6)]
    assert_equal(late["after"])


def test_weights_that_are_not_finite_are_an_error_and_the_next_ones_work(found):
    assert "not finite" in found["failures"]["nan"]
    assert_equal(json.loads(found["failures"]["after"]))


def test_a_response_that_does_not_fit_the_model_is_refused(found):
    assert "rollout.max_response_tokens=5000" in found["failures"]["too long"]


def test_making_an_engine_disturbs_neither_generators_nor_threads(found):
    assert found["undisturbed"]


def test_an_engine_sleeps_wakes_and_closes(found):
    assert not found["asleep"]
    assert_equal(found["awake"])
    assert not found["closed"]


def test_a_note_says_what_sleep_does_not_do(found):
    assert any("its sleep frees nothing" in note for note in found["notes"])


def test_the_benchmark_of_the_local_engine_has_vllm_on_the_other_side():
    words = ("benchmarks/local_engine.py", "--peer", "vllm", "--smoke")
    done = vllm_environment.run_there(*words, variables=vllm_environment.NOT_COMPILED)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"\| smoke \| float32 \| vllm \| [\d,]+ \|", done.stdout)
    assert re.search(r"\| \| \| of vllm \| [\d.]+x \|", done.stdout)

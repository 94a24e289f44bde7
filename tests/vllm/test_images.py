"""vLLM after images beside the local engine on the same policy: equal tokens and log-probs after every update.

What is compared is collected by tests/vllm/vision_worker.py, once per engine.
"""

import json

import pytest

from tests.vllm.vision_environment import vision_python
from tests.vllm.vllm_environment import NOT_COMPILED, run_there

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
CASES = [("vllm", "frozen"), ("vllm", "trained"), ("vllm", "adapter"), ("vllm_server", "trained")]
every_case = pytest.mark.parametrize(("kind", "case"), CASES)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    python, made = vision_python(folder), {}
    for kind in ("vllm", "vllm_server"):
        result, cases = folder / f"{kind}.json", [case for each, case in CASES if each == kind]
        words = ("tests/vllm/vision_worker.py", kind, str(result), *cases)
        done = run_there(*words, variables=NOT_COMPILED, python=python)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        made[kind] = json.loads(result.read_text())
    return made


@every_case
def test_after_every_update_greedy_responses_are_those_of_the_local_engine(found, kind, case):
    first, *later = rows = found[kind][case]["rows"]
    for version, row in enumerate(rows):
        assert row["tokens"]
        assert row["texts"]
        assert row["finished"]
        assert row["logprobs"] <= TOLERANCE
        assert row["version"] == version
    assert all(row["sums"] != first["sums"] for row in later)  # the updates show


@every_case
def test_weights_of_the_same_version_may_be_loaded_again(found, kind, case):
    again = found[kind][case]["again"]
    assert again == found[kind][case]["rows"][-1]


@every_case
def test_responses_depend_on_which_images_stand_where(found, kind, case):
    for row in found[kind][case]["rows"]:
        text, first, second, both, swapped, four = row["sums"]
        assert len({text, first, second, both, swapped, four}) == 6


@every_case
def test_no_response_has_a_token_of_images_and_logprobs_are_without_them(found, kind, case):
    drawn = found[kind][case]["drawn"]
    assert drawn["expected"] > 10
    assert (drawn["images"], drawn["distinct"] > 5) == (0, True)
    assert drawn["logprobs"] <= TOLERANCE


def test_probes_after_an_image_find_equal_log_probs_and_an_update_that_was_not_applied(found):
    probes = found["vllm"]["trained"]["probes"]
    assert max(probes["gaps"]) <= TOLERANCE
    assert "does not sample with the policy's weights of version" in probes["error"]

"""The reward `code`: programs in responses, the forms of tests, scores and reasons."""

import json

import pytest
import torch

from hwgrpo.errors import ConfigError, DataError, RewardError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.sandbox import code_reward
from hwgrpo.sandbox.unit_tests import extract_program, read_tests, same_output
from tests.support.runs import runs
from tests.support.runs.published_rows import write_jsonl


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    code_reward.close_pools()


@pytest.fixture
def score(make_batch, reward_config):
    """Return a function: tests, programs, kwargs -> (scores, extras) of the programs in fenced blocks."""

    def run(tests, programs, columns=None, **kwargs):
        texts = [f"Here it is:\n```python\n{program}\n```\nDone." for program in programs]
        batch, completions = make_batch([texts], ground_truths=[tests], columns=columns and [columns])
        kwargs = {"workers": 2, "seconds": 2.0, "memory_mib": 256, **kwargs}
        with RewardPipeline(reward_config({"name": "code", "kwargs": kwargs})) as rewards:
            scored = rewards.score(batch, completions)
        return scored.total.tolist(), scored.extras

    return run


ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a + b if a < 3 else 0"
CALLS = {"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}


@pytest.mark.parametrize(
    ("tests", "columns"),
    [
        (["assert add(1, 2) == 3", "assert add(3, 4) == 7"], None),
        (json.dumps(["assert add(1, 2) == 3", "assert add(3, 4) == 7"]), None),
        (CALLS, None),
        (json.dumps(CALLS), None),
        ("def test_small():\n    assert add(1, 2) == 3\ndef test_large():\n    assert add(3, 4) == 7", None),
        ({"test_list": ["assert add(one, 2) == 3", "assert add(3, 4) == 7"], "test_setup_code": "one = 1"}, None),
        (None, {"test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(3, 4), 7)"], "prompt": ""}),
    ],
)
def test_every_form_of_tests_scores_the_share_that_passes(score, tests, columns):
    scores, extras = score(tests, [ADD, WRONG, "raise ValueError"], columns, score="share")
    assert scores == [1, 0.5, 0]
    assert [each["code_reason"] for each in extras] == ["passed", "failed", "error"]
    assert [(each["code_passed"], each["code_tests"]) for each in extras] == [(2, 2), (1, 2), (0, 2)]


def test_all_or_nothing_is_the_default_and_check_is_one_test(score):
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7"
    columns = {"entry_point": "add"}
    assert score(check, [ADD, WRONG], columns)[0] == [1, 0]
    assert score(CALLS, [ADD, WRONG, f"class Solution:\n    def add(self, a, b): return a + b"])[0] == [1, 0, 1]  # noqa: F541


def test_scripts_are_scored_by_their_output(score):
    tests = {"inputs": ["1\n2\n", "3\n4\n"], "outputs": ["3\n0.5", "7\n0.5\n"]}
    programs = [
        "print(int(input()) + int(input()), '\\n0.50000001')",
        "print(int(input()) + int(input())); print(0.5); raise SystemExit(1)",
        "print(3); print(.5)",
    ]
    scores, extras = score(tests, programs, score="share")
    assert scores == [1, 0, 0.5]
    assert [each["code_reason"] for each in extras] == ["passed", "error", "failed"]


def test_the_expected_outputs_of_scripts_are_not_sent_to_the_sandbox():
    request = read_tests({"inputs": ["1"], "outputs": ["secret"]}, {}).request
    assert "secret" not in json.dumps(request)


def test_every_end_of_a_program_is_a_reason_and_the_others_are_scored(score):
    tests = {"inputs": ["1"], "outputs": ["1"]}
    programs = {
        "print(input())": "passed",
        "print(2)": "failed",
        "while True: pass": "timeout",
        "x = [0] * (1 << 30)": "memory",
        "while True: print('x' * 9999)": "output",
        "import os; os.abort()": "killed",
        "import absent": "error",
    }
    scores, extras = score(tests, list(programs), seconds=1.0)
    assert [each["code_reason"] for each in extras] == list(programs.values())
    assert scores == [1, *[0] * 6]
    assert "ModuleNotFoundError" in extras[-1]["code_detail"]


def test_a_response_without_a_program_gets_nothing_unless_plain_ones_are_accepted(make_batch, reward_config):
    batch, completions = make_batch([["print(1)"]], ground_truths=[{"inputs": [""], "outputs": ["1"]}])
    for plain, expected in ((False, (0.0, "no_code")), (True, (1.0, "passed"))):
        rewards = RewardPipeline(reward_config({"name": "code", "kwargs": {"plain": plain, "workers": 1}}))
        scored = rewards.score(batch, completions)
        assert (scored.total.item(), scored.extras[0]["code_reason"]) == expected


def test_the_last_block_of_python_is_the_program():
    text = "```python\nfirst\n```\n```py\nsecond\n```\n```bash\nls\n```\nand ```inline```"
    assert extract_program(text) == "second\n"
    assert extract_program("````\n```\ninner\n```\n````") == "```\ninner\n```\n"
    assert extract_program("no block") is None
    assert extract_program("```python\nunfinished") is None


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("1\n\n2", "1\n2", False),
        ("0.3333333333", "0.3333333", True),
        ("0.334", "0.333", False),
        ("1000001", "1000000", False),
        ("nan", "1.5", False),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(output, expected, same):
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("tests", "columns", "message"),
    [
        (None, {"other": 1}, r"found no tests .*columns are: other.*kwargs.tests_key"),
        ({"inputs": ["1"], "outputs": []}, {}, "1 inputs and 0 outputs"),
        ([], {}, "has no tests"),
        ("def check(candidate): pass", {}, "no entry point"),
        ("assert (", {}, "no Python"),
        (7, {}, "is no tests"),
    ],
)
def test_a_row_without_usable_tests_is_refused(score, tests, columns, message):
    with pytest.raises((DataError, RewardError), match=message):
        score(tests, [ADD], columns)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"score": "most"}, "kwargs.score of reward code"),
        ({"workers": 0}, "workers"),
        ({"seconds": 0}, "kwargs.seconds=0 of the sandbox"),
        ({"memory_mib": 1}, "kwargs.memory_mib=1"),
        ({"site_packages": "numpy"}, "kwargs.site_packages=.*numpy.* must be true or false"),
        ({"sandbox_level": "strong"}, "reward.sandbox.level"),
    ],
)
def test_wrong_arguments_are_refused_when_a_run_starts(reward_config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        RewardPipeline(reward_config({"name": "code", "kwargs": {"workers": 1, **kwargs}}))


def test_the_level_is_printed_when_a_run_starts(reward_config, capsys):
    RewardPipeline(reward_config({"name": "code", "kwargs": {"workers": 1}}))
    assert "reward.sandbox.level=" in capsys.readouterr().out


def test_programs_import_installed_packages_where_that_is_allowed(score):
    program = "import numpy\ndef total(n): return int(numpy.arange(n).sum())"
    for allowed, expected in ((True, 1.0), (False, 0.0)):
        assert score(["assert total(4) == 6"], [program], site_packages=allowed)[0] == [expected]


def test_responses_to_several_prompts_are_scored_by_their_own_tests(make_batch, reward_config):
    texts = [[f"```\nprint({number})\n```" for number in (1, 2)] for _ in range(2)]
    truths = [{"inputs": [""], "outputs": [str(number)]} for number in (1, 2)]
    batch, completions = make_batch(texts, ground_truths=truths)
    with RewardPipeline(reward_config({"name": "code", "kwargs": {"workers": 2}})) as rewards:
        assert torch.equal(rewards.score(batch, completions).total, torch.tensor([1.0, 0, 0, 1], dtype=torch.float64))


def test_a_run_goes_on_although_programs_hang_and_counts_the_reasons(tmp_path):
    rows = [
        {"prompt": f"{digits}=", "ground_truth": {"inputs": [""], "outputs": [digits]}} for digits in ("321", "213")
    ]
    hangs = {"prompt": "132=", "ground_truth": "while True: pass\nassert f(1)"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (*rows, hangs)), encoding="utf-8")
    reward = {"name": "code", "kwargs": {"plain": True, "workers": 2, "seconds": 0.3}}
    settings = [f"reward.functions=[{json.dumps(reward)}]", f"data.train={file}", "data.validation=null"]
    status = runs.run(
        tmp_path / "run", *settings, "trainer.max_steps=2", "trainer.prompts_per_step=3", "observe.metrics=[code]"
    )
    assert status == "completed"
    for metrics in runs.metrics(tmp_path / "run")[:2]:
        shares = [metrics[f"code/{reason}/mean"] for reason in code_reward.REASONS]
        assert sum(shares) == pytest.approx(1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert {line["extras"]["code_reason"] for line in lines} <= set(code_reward.REASONS)


def test_a_row_whose_tests_prove_nothing_stops_a_run_when_its_data_is_read(tmp_path):
    rows = [{"prompt": "1=", "ground_truth": "assert f(1)"}, {"prompt": "2=", "ground_truth": "f(2) == 3"}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    for reward in ({"name": "code"}, {"name": "code", "timeout": 60.0}):
        settings = [f"reward.functions=[{json.dumps(reward)}]", f"data.train={file}", "data.validation=null"]
        with pytest.raises(DataError, match=r"rows.jsonl, line 2: reward code: .*f\(2\) == 3 is a comparison"):
            runs.run(tmp_path / "run", *settings, "trainer.max_steps=1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_equals_everything_or_exits_forges_no_verdict(score):
    equal = "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()"
    programs = [equal, "import os\ndef add(a, b): os._exit(0)", "def add(a, b): return None\ndef all(x): return True"]
    assert score(["assert add(1, 2) == 3", "assert all([add(3, 4) == 7])"], programs, score="share")[0] == [0, 0, 0]

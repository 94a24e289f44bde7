"""A reward function in a process of its own: whatever it does to one sample costs that sample what the policy says."""

import math
import time

import pytest

from hwgrpo.errors import ConfigError, RewardError

GROUPS = [["a", "bad", "c"], ["d"], ["e", "f"]]
PATIENT = 120.0
"""A timeout that nothing here reaches."""
SHORT = 1.0
HANGS_LONGER = 600
"""Seconds that hanging functions would take: a test that waited for one would never end in time."""

HANGS = {
    "in Python": "while True: pass",
    "asleep": f"time.sleep({HANGS_LONGER})",
    "in a regular expression, which holds the interpreter": "re.match('(a+)+$', 'a' * 64 + 'b')",
    "in C code that holds the interpreter": f"ctypes.PyDLL(None).sleep({HANGS_LONGER})",
    "deaf to signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 10, 15)]; ctypes.PyDLL(None).pause()",
}
ERRORS = {
    "raises": ("raise KeyError('no luck')", "raised KeyError: 'no luck' at .*my_rewards.py:6, `.*raise KeyError"),
    "exits": ("raise SystemExit(3)", "raised SystemExit: 3 at .*my_rewards.py:6"),
    "segfaults": ("ctypes.string_at(0)", "lost its process, which was killed by SIGSEGV, a segmentation fault"),
    "leaves": ("os._exit(3)", "lost its process, which ended with exit code 3"),
    "is killed": ("os.kill(os.getpid(), 9)", "lost its process, which was killed by SIGKILL; .*memory runs out"),
    "interrupts": ("raise KeyboardInterrupt", "raised KeyboardInterrupt at .*my_rewards.py:6"),
    "leaves with success": ("os._exit(0)", "lost its process, which ended with exit code 0"),
    "closes its pipes": ("os.closerange(3, 64)", "lost its process"),
    "returns a huge thing": ("return {'score': 1, 'x': 'x' * (65 << 20)}", "ValueError: it returned 65 MiB; .*64 MiB"),
    "returns a circle": ("x = {'score': 1}; x['x'] = x; return x", "ValueError: Circular reference"),
    "returns keys that JSON has not": ("return {'score': 1, 'x': {(1, 2): 3}}", "TypeError: keys must be str"),
    "sends a pickle": (
        "import pickle; import my_pickle; body = pickle.dumps(my_pickle.Evil()); "
        "[write(n, len(body).to_bytes(8, 'big') + body) for n in range(3, 64)]",
        "lost its process, which sent an invalid reply",
    ),
    "sends gibberish": ("[write(n, b'x' * 64) for n in range(3, 64)]", "which sent an invalid reply"),
    "sends an answer to nothing": (
        """body = b'{"number": 77}'; [write(n, len(body).to_bytes(8, 'big') + body) for n in range(3, 64)]; """
        "time.sleep(60)",
        "which sent an invalid reply",
    ),
}
NANS = {"returns nan": "return float('nan')", "returns none": "return None", "returns inf": "return float('inf')"}


def source(does):
    """A function that gives 1 for every response, and for `bad` does something."""
    return f"""\
import contextlib, ctypes, os, re, signal, time
def write(n, data):
    with contextlib.suppress(OSError): os.write(n, data)
def f(solution_str):
    if solution_str == "bad":
        {does}
    return 1
"""


POLICIES = pytest.mark.parametrize(
    ("policy", "valid", "total"),
    [
        ("value", [1, 1, 1, 1, 1, 1], [2, -6, 2, 2, 2, 2]),
        ("mask_sample", [1, 0, 1, 1, 1, 1], [2, 0, 2, 2, 2, 2]),
        ("drop_group", [0, 0, 0, 1, 1, 1], [0, 0, 0, 2, 2, 2]),
    ],
)


def cost(rewards, kind, valid, total):
    """Assert that the sample `bad`, and it alone, failed, and what that cost."""
    assert rewards.failures == {f"{kind}/f": 1}
    assert [math.isnan(value) for value in rewards.per_function["f"]] == [False, True, False, False, False, False]
    assert rewards.valid.tolist() == [bool(flag) for flag in valid]
    assert rewards.total.tolist() == total


@POLICIES
@pytest.mark.parametrize("hang", HANGS)
def test_a_sample_that_hangs_costs_what_the_policy_says(hang, policy, valid, total, pipeline, make_batch):
    rewards = pipeline(source(HANGS[hang]), weight=2.0, timeout=SHORT, on_timeout=policy, failure_value=-3.0)
    cost(rewards.score(*make_batch(GROUPS)), "timeouts", valid, total)


@POLICIES
@pytest.mark.parametrize("error", ERRORS)
def test_a_sample_that_fails_costs_what_the_policy_says(
    error, policy, valid, total, pipeline, make_batch, reward_file, tmp_path
):
    reward_file(f"class Evil:\n    def __reduce__(self): return open, ('{tmp_path}/run', 'w')\n", "my_pickle.py")
    does = f"import sys; sys.path.append('{tmp_path}'); {ERRORS[error][0]}"
    rewards = pipeline(source(does), weight=2.0, timeout=PATIENT, on_error=policy, failure_value=-3.0)
    cost(rewards.score(*make_batch(GROUPS)), "errors", valid, total)
    assert not (tmp_path / "run").exists()  # a pickle that the function sent was not loaded


@POLICIES
@pytest.mark.parametrize("nan", NANS)
def test_a_sample_without_a_number_costs_what_the_policy_says(nan, policy, valid, total, pipeline, make_batch):
    rewards = pipeline(source(NANS[nan]), weight=2.0, timeout=PATIENT, on_nan=policy, failure_value=-3.0)
    cost(rewards.score(*make_batch(GROUPS)), "nans", valid, total)


@pytest.mark.parametrize("hang", ["in Python", "in C code that holds the interpreter"])
def test_under_raise_a_timeout_names_the_sample_and_the_line_and_ends_at_once(hang, pipeline, make_batch):
    rewards = pipeline(source(HANGS[hang]), timeout=SHORT)
    started = time.monotonic()
    said = (
        r"^reward f, prompt 0:0 of tests, sample 1 of its group took longer than its timeout of 1 s "
        r"at .*my_rewards.py:6 and was stopped; mend it, give it more time with timeout or, .* on_timeout to value"
    )
    with pytest.raises(RewardError, match=said):
        rewards.score(*make_batch([["a", *["bad"] * 200]]))
    assert time.monotonic() - started < 100  # not 200 timeouts


@pytest.mark.parametrize("error", [name for name in ERRORS if "pickle" not in name])
def test_under_raise_an_error_says_what_happened(error, pipeline, make_batch):
    does, said = ERRORS[error]
    rewards = pipeline(source(does), timeout=PATIENT)
    with pytest.raises(RewardError, match=rf"^reward f, prompt 0:0 of tests, sample 1 of its group .*{said}.*on_error"):
        rewards.score(*make_batch(GROUPS))


def test_under_raise_a_nan_is_told(pipeline, make_batch):
    rewards = pipeline(source("return float('nan')"), timeout=PATIENT)
    with pytest.raises(RewardError, match=r"sample 1 of its group returned nan; mend it or, .* on_nan"):
        rewards.score(*make_batch(GROUPS))


def test_timeouts_and_errors_have_policies_of_their_own(pipeline, make_batch):
    rewards = pipeline(source("while True: pass"), timeout=SHORT, on_error="mask_sample", on_nan="mask_sample")
    with pytest.raises(RewardError, match="took longer"):
        rewards.score(*make_batch(GROUPS))
    rewards = pipeline(source("os._exit(1)"), timeout=PATIENT, on_timeout="mask_sample", on_nan="mask_sample")
    with pytest.raises(RewardError, match="lost its process"):
        rewards.score(*make_batch(GROUPS))


def test_after_each_failure_the_next_batches_are_scored(pipeline, make_batch):
    rewards = pipeline(
        source("os.kill(os.getpid(), 11) if len(seen) else seen.append(1) or time.sleep(600)").replace(
            "def f", "seen = []\ndef f"
        ),
        timeout=SHORT,
        on_timeout="mask_sample",
        on_error="mask_sample",
    )
    for _ in range(3):
        assert rewards.score(*make_batch(GROUPS)).failures == {"timeouts/f": 1}  # a fresh process each time
        assert rewards.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]


def test_what_a_failing_sample_did_is_told_beside_the_count(pipeline, make_batch):
    rewards = pipeline(source("while True: pass"), timeout=SHORT, on_timeout="mask_sample")
    told = rewards.score(*make_batch(GROUPS)).first_failures
    assert list(told) == ["timeouts/f"]
    assert "sample 1 of its group took longer than its timeout of 1 s at" in told["timeouts/f"]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("return object()", r"returned <object object at .*> \(object\), which is not a number"),
        ("return 'good'", r"returned 'good' \(str\), which is not a number"),
        ("return [1]", r"returned \[1.0\] \(list\), which is not a number"),
        ("return {'value': 1}", r"returned a dict without 'score'; it has: \['value'\]"),
        ("import torch; return torch.ones(2)", r"returned \[1.0, 1.0\] \(list\), which is not a number"),
    ],
)
@pytest.mark.parametrize("policy", ["value", "raise"])
def test_what_is_no_reward_stops_the_run_under_every_policy(does, said, policy, pipeline, make_batch):
    rewards = pipeline(source(does), timeout=PATIENT, on_error=policy, on_nan=policy, on_timeout=policy)
    with pytest.raises(RewardError, match=f"^reward f, prompt 0:0 .* {said}"):
        rewards.score(*make_batch(GROUPS))


def test_a_wrong_setting_that_a_call_finds_is_no_failure_of_a_sample(make_batch, reward_config):
    from hwgrpo.rewards.combine import RewardPipeline

    config = reward_config(
        {"name": "gsm8k", "kwargs": {"method": "strikt"}, "timeout": PATIENT, "on_error": "mask_sample"}
    )
    with RewardPipeline(config) as rewards, pytest.raises(ConfigError, match="Did you mean 'strict'"):
        rewards.score(*make_batch([["1"]], ["1"]))


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("import no_such_module_here", "running the file failed: ModuleNotFoundError"),
        ("def g(solution_str): return 1", "no function 'f'; it has: g"),
        ("def f(solution): return 1", "none of the accepted signatures"),
        ("def f(solution_str, scale): return 1", r"needs scale; set reward.functions\[0\].kwargs.scale"),
        (
            "import os; os._exit(4)",
            r"\.name='.*my_rewards.py:f': its process ended with exit code 4 while it ran the f",
        ),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV.* while it ran the file"),
    ],
)
def test_a_file_that_does_not_load_is_a_wrong_setting(does, said, pipeline, processes, soon):
    with pytest.raises(ConfigError, match=said):
        pipeline(does, timeout=PATIENT)
    soon(lambda: processes() == [])


def test_a_file_that_hangs_when_it_is_run_is_a_wrong_setting(pipeline, processes, soon, monkeypatch):
    monkeypatch.setattr("hwgrpo.rewards.processes.worker_pool.START_SECONDS", 2.0)
    monkeypatch.setattr("hwgrpo.rewards.processes.worker_handle.START_SECONDS", 2.0)
    with pytest.raises(ConfigError, match=r"running the file at .*my_rewards.py:2 took longer than 2 s"):
        pipeline("import time\ntime.sleep(600)\ndef f(solution_str): return 1", timeout=SHORT)
    soon(lambda: processes() == [])


def test_a_file_that_stops_loading_in_mid_run_stops_the_run(pipeline, make_batch, reward_file):
    rewards = pipeline(source("os._exit(1)"), timeout=PATIENT, on_error="mask_sample")
    reward_file("import os; os._exit(9)")
    with pytest.raises(RewardError, match="reward f: a new process ended with exit code 9 before it was ready"):
        rewards.score(*make_batch(GROUPS))


def test_imports_do_not_count_as_time_of_a_sample(pipeline, make_batch):
    rewards = pipeline(
        "import time; time.sleep(1.5)\ndef f(solution_str): return 1 if solution_str == 'a' else time.sleep(600)",
        timeout=SHORT,
        on_timeout="mask_sample",
    )
    assert rewards.score(*make_batch([["bad", "a", "bad", "a"]])).valid.tolist() == [False, True, False, True]

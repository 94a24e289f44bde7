"""A reward function in processes of its own gives what it gives in the trainer, and leaves nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError, RewardError

PATIENT = 120.0
SHORT = 1.0
BATCH = ([["ab", "c", ""], ["def"]], ["AB", "D"], [{"extra_info": {"index": 5}, "level": 1}, {"level": 2, "hint": "h"}])

FUNCTIONS = {
    "verl": """
        def f(data_source, solution_str, ground_truth, extra_info=None, scale=1, limit=0, **kwargs):
            print(data_source, ground_truth, extra_info, sorted(kwargs))
            return {"score": len(solution_str) * scale + limit + len(ground_truth), "info": extra_info, "kw": kwargs}
    """,
    "a part of verl's": "def f(solution_str): return len(solution_str) / 3",
    "async verl": """
        import asyncio
        async def f(solution_str, ground_truth):
            await asyncio.sleep(0.01 * (3 - len(solution_str)))
            return {"score": 1 / len(solution_str) if solution_str != "c" else None, "text": solution_str}
    """,
    "TRL": """
        def f(prompts, completions, completion_ids, level, hint, ground_truth, trainer_state, log_extra, log_metric,
              scale=1, **columns):
            log_extra("seen", [f"{p}|{c}|{g}" for p, c, g in zip(prompts, completions, ground_truth)])
            log_metric("share", trainer_state.global_step / 2)
            return [len(ids) * scale + l + (h == "h") for ids, l, h in zip(completion_ids, level, hint)]
    """,
    "async TRL": """
        import asyncio
        async def f(completions, **columns):
            await asyncio.sleep(0)
            return [float(len(c)) if c else None for c in completions]
    """,
    "batch": """
        import torch
        def f(batch, completions, scale=1):
            return [{"score": n * scale, "n": n} for n in completions.lengths]
    """,
    "arrays": "import numpy\ndef f(completions, **kwargs): return numpy.arange(len(completions)) / 7",
    "tensors": "import torch\ndef f(completions, **kwargs): return torch.tensor([True, False, True, True])",
    "many kinds": """
        import decimal, fractions, numpy
        def f(solution_str):
            score = {"ab": numpy.float32(0.1), "c": fractions.Fraction(1, 3), "": True}.get(solution_str, 1 << 60)
            fields = {"nan": float("nan"), "set": {1}, "array": numpy.ones(2), "text": "\\u00e9\\ud800", 3: None}
            return {"score": score, **fields}
    """,
}


def same(left, right):
    """Whether two rewards agree in every number and field, as completions.jsonl would show them."""
    from hwgrpo.support.jsonlines import jsonable

    def shown(rewards):
        return [
            jsonable(value)
            for value in (rewards.total, rewards.valid, rewards.per_function, rewards.failures, rewards.extras)
        ]

    assert shown(left) == shown(right)
    assert left.first_failures == right.first_failures


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_the_rewards_are_those_that_the_trainer_itself_would_get(form, workers, pipeline, make_batch, tmp_path):
    takes = {"scale": 2} if "scale" in FUNCTIONS[form] else {}
    settings = {"kwargs": takes, "on_nan": "mask_sample", "on_error": "mask_sample", "context": {"limit": 7}}
    if workers > 1 and form not in ("verl", "a part of verl's", "async verl", "many kinds"):
        workers = 1
    here = pipeline(FUNCTIONS[form], **settings).score(*make_batch(*BATCH), step=3)
    there = pipeline(FUNCTIONS[form], **settings, timeout=PATIENT, workers=workers)
    same(there.score(*make_batch(*BATCH), step=3), here)
    same(there.score(*make_batch(*BATCH), step=3), here)  # the processes are used again


def test_an_error_is_told_in_the_same_words(pipeline, make_batch):
    source = 'def f(solution_str):\n    return [1][len(solution_str)] if solution_str != "c" else open("no file")\n'
    messages = []
    for settings in ({}, {"timeout": PATIENT}):
        for text in ("ab", "c"):
            with pytest.raises(RewardError) as caught:
                pipeline(source, **settings).score(*make_batch([["", text]]))
            messages.append(str(caught.value))
    assert messages[:2] == messages[2:]


def test_registered_rewards_run_in_processes_with_the_context(make_batch, reward_config):
    from hwgrpo.rewards.combine import RewardPipeline

    entries = [{"name": name, "timeout": PATIENT} for name in ("exact_match", "length", "math", "exact_match")]
    with RewardPipeline(reward_config(*entries), context={"max_response_tokens": 4}) as rewards:
        scored = rewards.score(*make_batch([["12", "12.0", "1"]], ["12"]))
    assert rewards.names == ("exact_match", "length", "math", "exact_match_2")
    assert {name: values.tolist() for name, values in scored.per_function.items()} == {
        "exact_match": [1, 0, 0],
        "length": [0, -1, 0],
        "math": [1, 1, 0],
        "exact_match_2": [1, 0, 0],
    }


def test_the_trainer_does_not_run_the_file_and_the_process_does_not_load_torch(pipeline, make_batch, tmp_path):
    rewards = pipeline(
        """
        import os, sys
        def f(solution_str): return {"score": 1, "pid": os.getpid(), "torch": "torch" in sys.modules}
        """,
        timeout=PATIENT,
    )
    (extra,) = rewards.score(*make_batch([["a"]])).extras
    assert extra["pid"] != os.getpid()
    assert extra["torch"] is False
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    assert str(tmp_path / "my_rewards.py") not in files


WHO = """
import os, time
seen = []
def f(solution_str):
    seen.append(1)
    time.sleep({seconds})
    if solution_str == "bad": os._exit(1)
    return {{"score": float(solution_str) if solution_str != "bad" else 0, "pid": os.getpid(), "count": len(seen)}}
"""


def test_a_process_is_used_for_all_batches(pipeline, make_batch):
    rewards = pipeline(WHO.format(seconds=0), timeout=PATIENT)
    extras = [extra for _ in range(3) for extra in rewards.score(*make_batch([["1", "2"]])).extras]
    assert len({extra["pid"] for extra in extras}) == 1
    assert [extra["count"] for extra in extras] == [1, 2, 3, 4, 5, 6]


def test_workers_score_at_the_same_time_and_the_order_is_kept(pipeline, make_batch, tmp_path):
    # each call waits until another one is under way, too: one process would wait for ever
    source = f"""
        import os, time
        def f(solution_str):
            open(f"{tmp_path}/{{os.getpid()}}.here", "w").close()
            while len([name for name in os.listdir("{tmp_path}") if name.endswith(".here")]) < 3: time.sleep(0.01)
            time.sleep(0.01 * (int(solution_str) % 3))
            return {{"score": int(solution_str), "pid": os.getpid()}}
    """
    rewards = pipeline(source, timeout=PATIENT, workers=3).score(*make_batch([[str(n) for n in range(12)]]))
    assert rewards.total.tolist() == list(range(12))
    assert len({extra["pid"] for extra in rewards.extras}) == 3


def test_workers_without_a_timeout_outlive_a_crash(pipeline, make_batch):
    rewards = pipeline(WHO.format(seconds=0), workers=2, on_error="mask_sample")
    assert rewards.score(*make_batch([["1", "bad", "3", "bad", "5"]])).total.tolist() == [1, 0, 3, 0, 5]


def test_only_one_worker_is_replaced_when_one_of_three_hangs(pipeline, make_batch, processes, soon):
    source = """
        import os, time
        def f(solution_str):
            time.sleep(600 if solution_str == "bad" else 0.02)
            return {"score": 1, "pid": os.getpid()}
    """
    rewards = pipeline(source, timeout=SHORT, workers=3, on_timeout="mask_sample")
    texts = ["a"] * 20
    scored = rewards.score(*make_batch([["bad", *texts]]))
    assert scored.valid.tolist() == [False] + [True] * 20
    survived = {extra["pid"] for extra in scored.extras[1:]}
    assert survived & {extra["pid"] for extra in rewards.score(*make_batch([texts])).extras}
    soon(lambda: len(processes()) == 6)  # three, and a guard of each


def test_async_samples_wait_at_the_same_time_and_only_the_late_ones_are_lost(pipeline, make_batch):
    source = """
        import asyncio
        running = []
        async def f(solution_str):
            running.append(1)
            while len(running) < 40: await asyncio.sleep(0.01)  # all are under way
            if solution_str == "bad": await asyncio.sleep(600)
            if solution_str == "own": raise TimeoutError("of its own")
            return 1
    """
    rewards = pipeline(source, timeout=5.0, on_timeout="mask_sample", on_error="mask_sample")
    scored = rewards.score(*make_batch([["a"] * 19 + ["bad"] + ["b"] * 18 + ["own", "bad"]]))
    assert scored.failures == {"timeouts/f": 2, "errors/f": 1}
    assert scored.total.tolist() == [1] * 19 + [0] + [1] * 18 + [0, 0]


@pytest.mark.parametrize(
    ("does", "kind"),
    [("while True: pass", "timeouts"), ("os._exit(1)", "errors"), ("raise KeyboardInterrupt", "errors")],
)
def test_an_async_sample_that_takes_the_others_down_is_found_and_the_others_are_not_lost(
    does, kind, pipeline, make_batch
):
    source = f"""
        import asyncio, os
        async def f(solution_str):
            await asyncio.sleep(0.05)
            if solution_str == "bad":
                {does}
            await asyncio.sleep(0.05)
            return 1
    """
    rewards = pipeline(source, timeout=SHORT, workers=2, on_timeout="mask_sample", on_error="mask_sample")
    scored = rewards.score(*make_batch([["a", "b", "bad", "c", "d"]]))
    assert scored.total.tolist() == [1, 1, 0, 1, 1]
    assert scored.failures == {f"{kind}/f": 1}


@pytest.mark.parametrize(
    ("form", "does"),
    [
        ("completions, **columns", "while True: pass"),
        ("batch, completions", "time.sleep(600)"),
        ("completions, **columns", "import os; os._exit(1)"),
    ],
)
def test_a_function_called_for_the_whole_batch_fails_for_all_of_it(form, does, pipeline, make_batch):
    source = f"""
        import time
        def f({form}):
            if "bad" in getattr(completions, "texts", completions):
                {does}
            return [1] * len(completions)
    """
    kind = "errors" if "_exit" in does else "timeouts"
    rewards = pipeline(source, timeout=SHORT, on_timeout="value", on_error="value", failure_value=0.5)
    scored = rewards.score(*make_batch([["a", "bad"], ["c"]]))
    assert scored.failures == {f"{kind}/f": 3}
    assert scored.total.tolist() == [0.5] * 3
    assert scored.first_failures[f"{kind}/f"].startswith("reward f, called with all 3 responses, ")
    assert rewards.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]


def test_no_list_of_rewards_is_refused_in_the_same_words(pipeline, make_batch):
    for returned, said in (("1.0", "it returned float"), ("'ab'", "it returned str"), ("[1]", "1 values for 2 resp")):
        with pytest.raises(RewardError, match=said):
            pipeline(f"def f(completions, **c): return {returned}", timeout=PATIENT).score(*make_batch([["a", "b"]]))


def test_more_workers_than_a_function_can_use_are_refused(pipeline, processes, soon):
    with pytest.raises(ConfigError, match=r"reward.functions\[0\].workers=2: f is called once .* leave workers out"):
        pipeline("def f(completions): return [1]", workers=2)
    soon(lambda: processes() == [])


def test_columns_that_are_missing_are_told_before_a_run(reward_config, reward_file):
    from hwgrpo.rewards.combine import RewardPipeline

    config = reward_config({"name": f"{reward_file('def f(completions, level): ...')}:f", "timeout": PATIENT})
    with pytest.raises(ConfigError, match=r"f needs a data column .*'level'"):
        RewardPipeline(config, columns=["prompt"])


def test_data_that_cannot_be_sent_is_told(pipeline, make_batch):
    rewards = pipeline("def f(completions, **columns): return [1]", timeout=PATIENT)
    with pytest.raises(RewardError, match=r"reward f: its arguments cannot be sent to its process: .*lambda"):
        rewards.score(*make_batch([["a"]], columns=[{"level": lambda: 0}]))


def test_no_responses_give_no_rewards(pipeline, make_batch):
    rewards = pipeline("def f(solution_str): return 1", timeout=PATIENT)
    assert rewards.score(*make_batch([[]])).total.shape == (0,)


def test_what_a_function_prints_reaches_the_terminal_also_before_it_hangs(pipeline, make_batch, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    source = """
        import sys, time
        def f(solution_str):
            print("out", solution_str)
            print("err", solution_str, file=sys.stderr)
            return 1 if solution_str == "a" else time.sleep(600)
    """
    pipeline(source, timeout=SHORT, on_timeout="mask_sample").score(*make_batch([["a", "bad"]]))
    shown = capfd.readouterr()
    assert shown.out == "out a\nout bad\n"
    assert "err a\nerr bad\n" in shown.err


@pytest.mark.parametrize(
    "does",
    ["sys.stdout.close()", "os.close(1); os.close(2)", "sys.stdout = None", "print('x' * 200_000)", "sys.stdin.read()"],
)
def test_what_a_function_does_to_its_streams_costs_nothing(does, pipeline, make_batch):
    source = f"import os, sys\ndef f(solution_str):\n    if solution_str == 'bad': {does}\n    return 1\n"
    rewards = pipeline(source, timeout=PATIENT)
    assert rewards.score(*make_batch([["a", "bad", "b"]])).total.tolist() == [1, 1, 1]


FORKS = {
    "a command": "subprocess.Popen(['sh', '-c', 'sleep 600; :', '{folder}'])",
    "a command it waits for": "subprocess.run(['sh', '-c', 'sleep 600; :', '{folder}'])",
    "a session": "subprocess.Popen(['sh', '-c', 'sleep 600; :', '{folder}'], start_new_session=True)",
    "a daemon": "subprocess.run(['sh', '-c', 'setsid sh -c \"sleep 600; :\" {folder} &'])",
    "a copy": "os.fork() or time.sleep(600)",
    "a pool": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)).start()",
}


@pytest.mark.parametrize("then", ["hang", "exit", "return"])
@pytest.mark.parametrize("forks", FORKS)
def test_what_a_function_started_ends_with_it(forks, then, pipeline, make_batch, processes, soon, tmp_path):
    does = {"hang": "time.sleep(600)", "exit": "os._exit(1)", "return": "return 1"}[then]
    source = f"""
        import multiprocessing, os, subprocess, time
        def f(solution_str):
            if solution_str == "bad":
                {FORKS[forks].format(folder=tmp_path)}
                {does}
            return 1
    """
    rewards = pipeline(source, timeout=SHORT, on_timeout="mask_sample", on_error="mask_sample")
    scored = rewards.score(*make_batch([["a", "bad", "b"]]))
    assert scored.valid.tolist() == [True, then == "return" and "waits" not in forks, True]
    if not scored.valid.all():
        soon(lambda: len(processes()) == 2)  # the new process and its guard; nothing of the old one
    rewards.close()
    soon(lambda: processes() == [])


def test_what_a_late_async_sample_started_ends_with_its_batch(pipeline, make_batch, processes, soon, tmp_path):
    source = f"""
        import asyncio, os, subprocess
        async def f(solution_str):
            if solution_str == "bad":
                subprocess.Popen(["sh", "-c", "sleep 600; :", "{tmp_path}"], start_new_session=True)
            await asyncio.sleep(600 if solution_str in ("bad", "late") else 0)
            return {{"score": 1, "pid": os.getpid()}}
    """
    rewards = pipeline(source, timeout=SHORT, on_timeout="mask_sample")
    before, _ = rewards.score(*make_batch([["a", "late"]])).extras
    after, _ = rewards.score(*make_batch([["a", "bad"]])).extras
    assert before["pid"] == after["pid"]  # a late sample that left nothing costs no new process
    soon(lambda: len(processes()) == 2)
    assert rewards.score(*make_batch([["a", "b"]])).total.tolist() == [1, 1]


def test_a_copy_that_comes_back_from_the_function_does_not_answer(pipeline, make_batch):
    rewards = pipeline("import os\ndef f(solution_str):\n    os.fork()\n    return len(solution_str)", timeout=PATIENT)
    for _ in range(3):
        assert rewards.score(*make_batch([["a", "ab", "abc"]])).total.tolist() == [1, 2, 3]


def test_a_process_that_was_killed_between_batches_is_replaced_and_costs_nothing(pipeline, make_batch, soon):
    rewards = pipeline(WHO.format(seconds=0), timeout=PATIENT)
    (extra,) = rewards.score(*make_batch([["1"]])).extras
    os.kill(extra["pid"], signal.SIGKILL)
    soon(lambda: not Path(f"/proc/{extra['pid']}").exists())
    scored = rewards.score(*make_batch([["1", "2"]]))
    assert scored.total.tolist() == [1, 2]
    assert scored.failures == {}


def test_an_interrupted_batch_leaves_nothing_for_the_next(pipeline, make_batch):
    rewards = pipeline(WHO.format(seconds=0.3), timeout=PATIENT, workers=2)

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        rewards.score(*make_batch([["1", "2"]]))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            rewards.score(*make_batch([["1", "2", "3"]]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert rewards.score(*make_batch([["4"]])).total.tolist() == [4]  # and not what was asked for before


def test_closing_ends_idle_processes_in_good_order_and_twice_is_once(pipeline, make_batch, processes, soon, tmp_path):
    source = f"import atexit\natexit.register(open, '{tmp_path}/left', 'w')\ndef f(solution_str): return 1"
    rewards = pipeline(source, timeout=PATIENT)
    rewards.score(*make_batch([["a"]]))
    assert len(processes()) == 2
    rewards.close()
    rewards.close()
    soon(lambda: processes() == [])
    assert (tmp_path / "left").exists()


def test_a_pipeline_that_nobody_holds_any_more_has_no_processes(reward_config, reward_file, processes, soon):
    from hwgrpo.rewards.combine import RewardPipeline

    rewards = RewardPipeline(
        reward_config({"name": f"{reward_file('def f(solution_str): return 1')}:f", "timeout": PATIENT})
    )
    assert len(processes()) == 2
    del rewards
    gc.collect()
    soon(lambda: processes() == [])


def test_a_forked_copy_of_the_trainer_leaves_the_processes_alone(pipeline, make_batch):
    rewards = pipeline(WHO.format(seconds=0), timeout=PATIENT)
    (before,) = rewards.score(*make_batch([["1"]])).extras
    child = os.fork()
    if child == 0:
        rewards.close()
        os._exit(0)
    os.waitpid(child, 0)
    (extra,) = rewards.score(*make_batch([["1"]])).extras
    assert (extra["pid"], extra["count"]) == (before["pid"], 2)


def test_a_set_has_the_same_order_in_every_process_and_after_a_restart(pipeline, make_batch, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    source = "def f(solution_str): return {'score': 0, 'order': list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})}"
    orders = [pipeline(source, workers=1).score(*make_batch([["1"]])).extras[0]["order"] for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]


TRAINER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background ignores it

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.rewards.processes.reward_process import open_reward
from hwgrpo.values import Prompt

reward = open_reward(RewardFunctionConfig("FILE:f", timeout=100.0, workers=2), {}, "reward")
reward.per_sample([Prompt("0", "p", (1,), None, {})] * 2, ["a", "bad"])
END
"""


@pytest.mark.parametrize(
    ("number", "does"),
    [
        (signal.SIGKILL, "while True: pass"),
        (signal.SIGKILL, "ctypes.PyDLL(None).sleep(600)"),
        (signal.SIGKILL, "subprocess.run(['sleep', '600'])"),
        (signal.SIGKILL, "subprocess.run(['sh', '-c', 'sleep 600; :', '{folder}'], start_new_session=True)"),
        (signal.SIGKILL, "os.fork() or os.setsid() or os.fork() or time.sleep(600)"),
        (signal.SIGINT, "while True: pass"),
        (signal.SIGTERM, "ctypes.PyDLL(None).sleep(600)"),
    ],
)
def test_however_the_trainer_ends_in_a_call_no_process_is_left(number, does, reward_file, processes, soon, tmp_path):
    path = reward_file(
        f"""
        import ctypes, os, subprocess, time
        def f(solution_str):
            if solution_str == "bad":
                open("{tmp_path}/under way", "w").close()
                {does.replace("{folder}", str(tmp_path))}
                time.sleep(600)
            return 1
        """
    )
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER).replace("FILE", str(path)).replace("END", "pass"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, script], env=environment, stderr=subprocess.DEVNULL) as trainer:
        try:
            soon((tmp_path / "under way").exists)
            trainer.send_signal(number)
            assert trainer.wait(60) != 0
        finally:
            trainer.kill()
    soon(lambda: processes() == [])


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(4)", "raise KeyError", "pass"])
def test_however_the_trainer_ends_between_calls_no_process_is_left(end, reward_file, processes, soon, tmp_path):
    path = reward_file("def f(solution_str): return 1")
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER).replace("FILE", str(path)).replace("END", end))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([sys.executable, script], env=environment, stderr=subprocess.DEVNULL).returncode
        == ({"sys.exit(3)": 3, "os._exit(4)": 4, "raise KeyError": 1, "pass": 0}[end])
    )
    soon(lambda: processes() == [])


def test_random_numbers_of_a_call_are_the_same_in_this_process_and_in_any_other(pipeline, make_batch):
    source = """
    import random

    def f(solution_str):
        import numpy
        return random.random() + numpy.random.rand()
    """
    batch = make_batch([["a", "b", "c"], ["d", "e", "f"]])
    here, there = pipeline(source), pipeline(source, workers=2)
    totals = [rewards.score(*batch, step).total.tolist() for rewards in (here, there) for step in (1, 2)]
    assert totals[:2] == totals[2:]
    assert len({*totals[0], *totals[1]}) == 12, "each call of each step draws its own"


def test_a_call_in_a_process_of_its_own_draws_the_same_from_torch_again(pipeline, make_batch):
    source = "def f(solution_str):\n    import torch\n    return torch.rand(()).item()"
    scored, batch = pipeline(source, workers=1), make_batch([["a", "b"]])
    first, second, again = (scored.score(*batch, step).total.tolist() for step in (1, 2, 1))
    assert first == again
    assert len({*first, *second}) == 4, "each call of each step draws its own"

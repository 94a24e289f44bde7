import asyncio
import functools

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.signatures import load_function, make_reward_function
from hwgrpo.sandbox.code_reward import code

CHAT = ({"role": "user", "content": "hi"},)


def adapted(call, **kwargs):
    return make_reward_function("f", call, kwargs, {}, "reward.functions[0]")


def values(call, batch, step=None, **kwargs):
    return adapted(call, **kwargs).values(*batch, step)[0]


def test_verls_signature_is_called_per_sample_with_the_prompts_columns(make_batch):
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return len(seen)

    batch = make_batch([["a", "b"], ["c"]], ["A", "C"], [{"extra_info": {"index": 5}}, {"prompt": "x"}])
    assert values(compute_score, batch, bonus=2) == [1, 2, 3]
    assert seen == [
        ("tests", "a", "A", {"index": 5}, {"bonus": 2}),
        ("tests", "b", "A", {"index": 5}, {"bonus": 2}),
        ("tests", "c", "C", None, {"bonus": 2}),
    ]


def test_a_part_of_verls_signature_will_do(make_batch):
    assert values(lambda solution_str: solution_str + "!", make_batch([["a"], ["b"]])) == ["a!", "b!"]


def test_checks_that_a_users_function_has_as_attributes_are_not_called():
    def checked(solution_str):
        return 1.0

    functools.update_wrapper(checked, code, assigned=())
    vars(checked).pop("__wrapped__")
    vars(checked)["check_arguments"] = lambda **_: 1 / 0
    function = adapted(checked)
    assert vars(checked)["check_prompt"] is vars(code)["check_prompt"]
    assert function.prompt_check is None
    assert make_reward_function("code", load_function("code", "key")[1], {}, {}, "key").prompt_check is not None


def test_trls_signature_gets_lists_with_one_item_per_sample(make_batch):
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [1.0, None, 3.0]

    columns = [{"prompt": "p0", "level": 1}, {"prompt": "p1", "level": 2, "hint": "h"}]
    assert values(reward, make_batch([["ab", "c"], ["d"]], ["A", "D"], columns), step=7, bonus=2) == [1.0, None, 3.0]
    assert seen["prompts"] == ["prompt 0", "prompt 0", "prompt 1"]
    assert seen["completions"] == ["ab", "c", "d"]
    assert seen["completion_ids"] == [[97, 98], [99], [100]]
    assert seen["level"] == [1, 1, 2]
    assert seen["hint"] == [None, None, "h"]
    assert seen["ground_truth"] == ["A", "A", "D"]
    assert seen["trainer_state"].global_step == 7
    assert seen["bonus"] == 2
    assert "prompt" in seen


def test_a_ground_truth_column_of_the_data_is_passed_untouched(make_batch):
    batch = make_batch([["a"]], ["looked up"], [{"ground_truth": "own"}])
    assert values(lambda completions, ground_truth: ground_truth, batch) == ["own"]


def test_trls_functions_get_messages_when_the_prompt_is_a_conversation(make_batch):
    batch = make_batch([["a"]], messages=CHAT)
    assert values(lambda completions, **kwargs: completions, batch) == [[{"role": "assistant", "content": "a"}]]
    assert values(lambda prompts: prompts, batch) == [list(CHAT)]


def test_trls_functions_can_log(make_batch):
    def reward(completions, log_extra, log_metric):
        log_extra("seen", ["x", "y"])
        log_metric("share", 0.5)
        return [1, 2]

    given, extras = adapted(reward).values(*make_batch([["a", "b"]]), None)
    assert given == [1, 2]
    assert extras == [{"seen": "x", "share": 0.5}, {"seen": "y", "share": 0.5}]


def test_the_batch_form_gets_prompts_and_completions(make_batch):
    prompts, completions = make_batch([["a"]])
    [given] = values(
        lambda batch, completions, *, extra=0: [(batch, completions, extra)], (prompts, completions), extra=3
    )
    assert (given[0], given[2]) == (prompts, 3)
    assert repr(given[1]) == repr(completions)


def test_async_functions_of_every_form_are_waited_for(make_batch):
    async def verl(solution_str, ground_truth):
        await asyncio.sleep(0)
        if solution_str == "bad":
            raise ZeroDivisionError
        return solution_str

    async def trl(completions, **kwargs):
        await asyncio.sleep(0)
        return completions

    async def whole(batch, completions):
        return list(completions.texts)

    batch = make_batch([["a", "b"]])
    assert [values(call, batch) for call in (verl, trl, whole)] == [["a", "b"]] * 3
    good, bad = values(verl, make_batch([["a", "bad"]]))
    assert good == "a"
    assert isinstance(bad, ZeroDivisionError)


def test_async_samples_wait_at_the_same_time(make_batch):
    running = []

    async def meet(solution_str):
        running.append(solution_str)
        while len(running) < 2:  # only goes on when the other sample's call has started too
            await asyncio.sleep(0)
        return 1

    assert values(meet, make_batch([["a", "b"]])) == [1, 1]


def test_async_functions_work_inside_a_running_loop(make_batch):
    async def trl(completions, **kwargs):
        return completions

    async def notebook():
        return values(trl, make_batch([["a"]]))

    assert asyncio.run(notebook()) == ["a"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda solution, truth: 0,
            ["has none of the accepted signatures", "solution, truth", "as in verl", "as in TRL"],
        ),
        (lambda solution_st, ground_truth: 0, ["none of the accepted", "did you mean 'solution_str'?"]),
        (lambda **kwargs: 0, ["none of the accepted", "its parameters are: none"]),
        (lambda solution_str, completions: 0, ["mixes two signatures", "as in verl"]),
        (lambda solution_str, /: 0, ["accepted"]),
        (lambda solution_str, scale: 0, ["needs scale", "reward.functions[0].kwargs.scale"]),
    ],
)
def test_a_signature_that_tells_no_form_is_refused_with_the_accepted_ones(call, words):
    with pytest.raises(ConfigError) as caught:
        adapted(call)
    assert all(word in str(caught.value) for word in ["reward.functions[0]", *words]), caught.value


@pytest.mark.parametrize(
    ("call", "kwargs", "words"),
    [
        (lambda solution_str, scale=1: 0, {"scael": 2}, ["'scael'", "Did you mean 'scale'?"]),
        (lambda solution_str: 0, {"scale": 2}, ["kwargs.scale", "accepts no further arguments"]),
        (lambda solution_str, ground_truth: 0, {"ground_truth": 2}, ["kwargs.ground_truth", "remove it"]),
    ],
)
def test_kwargs_that_the_function_does_not_take_are_refused(call, kwargs, words):
    with pytest.raises(ConfigError) as caught:
        adapted(call, **kwargs)
    assert all(word in str(caught.value) for word in words), caught.value


def test_context_values_go_to_functions_that_name_them_and_kwargs_win():
    def call(solution_str, limit):
        return limit

    assert make_reward_function("f", call, {}, {"limit": 5, "other": 1}, "k").kwargs == {"limit": 5}
    assert make_reward_function("f", call, {"limit": 6}, {"limit": 5}, "k").kwargs == {"limit": 6}


def test_a_function_is_loaded_from_a_file_by_name_or_as_compute_score(reward_file):
    path = reward_file("def compute_score(solution_str): return 1\ndef other(solution_str): return 2\n")
    name, call = load_function(f"{path}:other", "k")
    assert (name, call("x")) == ("other", 2)
    name, call = load_function(str(path), "k")
    assert (name, call("x")) == ("compute_score", 1)


def test_two_functions_of_one_file_share_its_state(reward_file):
    path = reward_file("seen = []\ndef put(solution_str): seen.append(1)\ndef count(solution_str): return len(seen)\n")
    load_function(f"{path}:put", "k")[1]("x")
    assert load_function(f"{path}:count", "k")[1]("x") == 1


def test_registered_names_are_loaded():
    assert load_function("exact_match", "k")[1]("a", "a") == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "exact_mach",
            ["reward.functions[0].name='exact_mach'", "gsm8k", "Did you mean 'exact_match'?", "path/to/file.py"],
        ),
        ("{file}:sorce", ["no function 'sorce'", "score, helper", "Did you mean 'score'?"]),
        ("{file}", ["no function 'compute_score'", "score, helper"]),
        ("{folder}/my_reward.py:f", ["no file", "working directory", "Did you mean 'my_rewards.py'?"]),
    ],
)
def test_a_reward_that_is_not_there_is_refused_with_what_is(name, words, reward_file):
    path = reward_file("from os.path import join\nimport json\ndef score(solution_str): return 1\ndef helper(): ...\n")
    with pytest.raises(ConfigError) as caught:
        load_function(name.format(file=path, folder=path.parent), "reward.functions[0].name")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_file_that_fails_to_run_is_refused_with_its_error(reward_file):
    path = reward_file("import no_such_module_here\n")
    for _ in range(2):  # the half-made module is not kept
        with pytest.raises(ConfigError, match="running the file failed: ModuleNotFoundError: No module named 'no_such"):
            load_function(str(path), "k")

"""The reward `code`: the share of a row's unit tests that the program in the response passes."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.errors import ConfigError, DataError, choice_error, quoted
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.sandbox_pool import SandboxPool
from hwgrpo.sandbox.unit_tests import UnitTests, extract_program, read_tests, same_output
from hwgrpo.support.launched_ranks import local_world_size
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards

SCORES = ("share", "all")
REASONS = ("passed", "failed", "error", "no_assertion", "skipped", "timeout", "memory", "output", "killed", "no_code")
COLUMNS = ("tests", "test_list", "test", "input_output")
"""Columns that may hold the tests, in this order, where `tests_key` is None and there is no ground truth."""

_pools: dict[tuple[Any, ...], SandboxPool] = {}


def code(
    batch: PromptBatch,
    completions: Completions,
    *,
    sandbox_level: str = "auto",
    score: str = "all",
    tests_key: str | None = None,
    entry_point_key: str = "entry_point",
    plain: bool = False,
    workers: int | None = None,
    seconds: float = 6.0,
    memory_mib: int = 1024,
    site_packages: bool = False,
) -> list[dict[str, Any]]:
    """Score the programs in responses by unit tests, in a sandbox.

    Args:
        batch: the prompts, with the tests in a column or as the ground truth (`unit_tests` has the forms).
        completions: the responses; the last fenced block of Python is the program.
        sandbox_level: protection level, `reward.sandbox.level` unless stated.
        score: "all": 1 where every test passes, else 0; "share": the share of tests that pass.
        tests_key: column with the tests; None: the ground truth, or else one of `COLUMNS`.
        entry_point_key: column with the name of the function that `check(candidate)` is called with.
        plain: use a response without a fenced block as a program itself.
        workers: programs that run at the same time, per rank; None: one per core of this process.
        seconds: limit on the time of a run: one input, or all asserts of a row.
        memory_mib: limit on the memory of a run, in MiB.
        site_packages: programs may import the packages of this Python, e.g. numpy, and read their files.

    Returns:
        Per response `score`; `code_reason`: one of `REASONS`; `code_passed` and `code_tests`, numbers of tests;
        `code_detail`, e.g. the exception; `code_workers_replaced`, in this call.

    Raises:
        ConfigError: an argument is out of range, or this host does not allow the level.
        DataError: a row has no tests.
    """
    pool = _pool(sandbox_level, workers, Limits(seconds=seconds, memory_mib=memory_mib), site_packages)
    tests = [_tests_of(prompt, tests_key, entry_point_key) for prompt in batch.prompts]
    of_samples = [tests[index] for index in completions.prompt_index.tolist()]
    programs = [extract_program(text) or (text if plain else None) for text in completions.texts]
    jobs = [
        {"source": program, **each.request}
        for program, each in zip(programs, of_samples, strict=True)
        if program is not None
    ]
    replaced = pool.replaced
    results = iter(pool.run(jobs))
    judged = [
        {"code_reason": "no_code", "code_passed": 0, "code_tests": each.count}
        if program is None
        else judge(each, next(results))
        for program, each in zip(programs, of_samples, strict=True)
    ]
    return [
        {**each, "score": _score(each, score), "code_workers_replaced": pool.replaced - replaced} for each in judged
    ]


def check_arguments(
    *,
    sandbox_level: str = "auto",
    score: str = "all",
    workers: int | None = None,
    seconds: float = 6.0,
    memory_mib: int = 1024,
    site_packages: bool = False,
    **_: Any,
) -> None:
    """Start the sandbox when a run starts, and print its level; arguments and errors as of `code`."""
    if score not in SCORES:
        raise choice_error("kwargs.score of reward code", score, SCORES)
    print(
        _pool(sandbox_level, workers, Limits(seconds=seconds, memory_mib=memory_mib), site_packages).description,
        flush=True,
    )


def check_prompt(
    prompt: Prompt, *, tests_key: str | None = None, entry_point_key: str = "entry_point", **_: Any
) -> None:
    """Read a row's tests when its data is read; raise DataError for a row that `code` cannot score."""
    _tests_of(prompt, tests_key, entry_point_key)


setattr(code, "check_arguments", check_arguments)  # noqa: B010 - a function's attribute has no type
setattr(code, "check_prompt", check_prompt)  # noqa: B010


def reason_shares(
    prompts: PromptBatch, completions: Completions, rewards: Rewards, advantages: Any
) -> dict[str, list[float]]:
    """Return 1 or 0 per response for each reason, a metric of `observe.metrics`: its mean is the reason's share."""
    reasons = [each.get("code_reason") for each in rewards.extras] or [None] * len(completions)
    return {f"code/{reason}": [float(each == reason) for each in reasons] for reason in REASONS}


def judge(tests: UnitTests, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a program's result.

    Args:
        tests: the tests of its row.
        runs: the results of its runs, as `SandboxPool.run` returns them.
    """
    if "tests" in tests.request:
        outcomes = list(runs[0]["outcomes"])
        reasons = [runs[0]["reason"], *(each for each in outcomes if each != "passed")]
        passed = outcomes.count("passed")
    else:
        verdicts = [
            run["reason"] or ("passed" if same_output(run["stdout"], expected) else "failed")
            for run, expected in zip(runs, tests.outputs, strict=False)
        ]
        passed = verdicts.count("passed")
        reasons = [each for each in verdicts if each != "passed"]
    reason = "passed" if passed == tests.count else next(filter(None, reasons), "failed")
    detail = next((run["detail"] for run in runs if run["detail"]), "")
    fields = {"code_reason": reason, "code_passed": passed, "code_tests": tests.count}
    return {**fields, "code_detail": detail} if detail else fields


def _score(judged: Mapping[str, Any], score: str) -> float:
    share = judged["code_passed"] / judged["code_tests"]
    return share if score == "share" else float(share == 1)


def _tests_of(prompt: Prompt, tests_key: str | None, entry_point_key: str) -> UnitTests:
    where = prompt.place or f"prompt {prompt.uid}"
    if tests_key is not None:
        value = prompt.columns.get(tests_key)
    else:
        value = prompt.ground_truth
        if value is None:
            value = next((prompt.columns[name] for name in COLUMNS if prompt.columns.get(name) is not None), None)
    if value is None:
        names = [tests_key] if tests_key is not None else ["a ground truth", *COLUMNS]
        raise DataError(
            f"{where}: reward code found no tests ({', '.join(names)}); columns are: "
            f"{', '.join(sorted(prompt.columns))}; name their column with kwargs.tests_key"
        )
    try:
        return read_tests(value, prompt.columns, entry_point_key)
    except DataError as error:
        raise DataError(f"{where}: reward code: {error}") from error


def _pool(level: str, workers: int | None, limits: Limits, site_packages: bool) -> SandboxPool:
    """Return the pool with these settings, which lives as long as this process."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ConfigError(f"kwargs.workers={quoted(workers)} of reward code must be at least 1, or null")
    if not isinstance(site_packages, bool):
        raise ConfigError(f"kwargs.site_packages={quoted(site_packages)} of reward code must be true or false")
    size = workers or max(1, len(os.sched_getaffinity(0)) // local_world_size(1))
    key = (os.getpid(), level, size, limits, site_packages)
    if key not in _pools:
        _pools[key] = SandboxPool(level, limits, size, site_packages=site_packages)
    return _pools[key]


@atexit.register
def close_pools() -> None:
    """End the workers of this process's pools."""
    for key in [key for key in _pools if key[0] == os.getpid()]:
        _pools.pop(key).close()

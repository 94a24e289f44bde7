"""docs/rewards.md lists the built-in rewards and their arguments; its rows score what they say and its examples run."""

import inspect
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hwgrpo.catalog import REWARDS
from hwgrpo.cli.main import main
from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.data.reward_check import COMPARING
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.services.concurrent_requests import InvalidReply
from hwgrpo.rewards.services.judge_replies import ScoreReader
from hwgrpo.values import Completions, Prompt, PromptBatch
from tests.docs.pages import blocks, code, page, section, table

PAGE = page("rewards.md")
MOST_TOKENS = 10
ELSEWHERE = {"code": "sandbox.md", "reasoning_gym": "own-data.md"}
FUNCTIONS = sorted(n for n in REWARDS.names() if n not in ELSEWHERE and not inspect.isclass(REWARDS.load(n)))
"""Those that are classes are on reward-models.md."""


def score(name: str, response: str, ground_truth: Any, arguments: dict[str, Any]) -> float:
    """Score one response, whose words are its tokens."""
    numbers: dict[str, int] = {}
    tokens = [numbers.setdefault(word, len(numbers)) for word in response.split()]
    completions = Completions(
        prompt_index=torch.tensor([0]),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        offsets=torch.tensor([0, len(tokens)]),
        logprobs=torch.zeros(len(tokens)),
        finished=torch.ones(1, dtype=torch.bool),
        texts=(response,),
    )
    prompt = Prompt(uid="0", text="", token_ids=(1,), ground_truth=ground_truth, columns={}, source="page")
    config = SimpleNamespace(functions=[RewardFunctionConfig(name=name, kwargs=arguments)])
    pipeline = RewardPipeline(config, context={"max_response_tokens": MOST_TOKENS})
    return pipeline.score(PromptBatch((prompt,)), completions).total.item()


def text(cell: str) -> str:
    """Return the text of a cell in code, "" of an empty one."""
    return code(cell)[0].replace("⏎", "\n") if cell else ""


def test_every_reward_and_its_arguments_are_on_the_page():
    given = {"batch", "completions", "data_source", "solution_str", "ground_truth", "opened_markers"}
    rows = {code(row["reward"])[0]: row for row in table(PAGE, "reward", "`kwargs`")}
    assert sorted(rows) == FUNCTIONS
    for name, row in rows.items():
        arguments = [argument for argument in inspect.signature(REWARDS.load(name)).parameters if argument not in given]
        assert code(row["`kwargs`"]) == arguments


# math-verify's timer is a signal; where it strikes in a weak reference's callback, Python reports it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_scores_the_rows_of_the_page_as_it_says(name: str):
    part = section(PAGE, name)
    of_all = yaml.safe_load((re.findall(r"All rows have `(.*)`", part) or ["{}"])[0])
    rows = table(part, "response", "reward")
    assert len(rows) >= 10
    for row in rows:
        truth = text(row.get("ground truth", ""))
        truths = yaml.safe_load(truth) if re.fullmatch(r"\[.+, .+\]", truth) else truth
        arguments = of_all | (yaml.safe_load(text(row.get("arguments", "")) or "{}"))
        expected = pytest.approx(float(row["reward"]), abs=5.1e-4)
        found = score(name, text(row["response"]), truths, arguments)
        if name == "math" and found != expected:  # its timer is a clock: beside other work a comparison needs longer
            found = score(name, text(row["response"]), truths, arguments | {"timeout": 60})
        assert found == expected, row


def test_ground_truths_are_read_as_the_page_says():
    rows = table(PAGE, "reward", "ground truth", "score")
    assert {code(row["reward"])[0] for row in rows} == {*COMPARING, "regex"}
    for row in rows:
        [name], truth = code(row["reward"]), json.loads(text(row["ground truth"]))
        assert score(name, text(row["response"]), truth, {}) == pytest.approx(float(row["score"]), abs=5.1e-4), row
    assert len(rows) >= 10


def test_a_judges_score_is_read_as_its_page_says():
    reader = ScoreReader(Kwargs("judge"), None, None, None)
    rows = table(page("reward-models.md"), "reply", "score")
    for row in rows:
        reply = code(row["reply"])[0]
        if row["score"] == "none":
            with pytest.raises(InvalidReply):
                reader.score(reply)
        else:
            assert reader.score(reply) == float(row["score"]), reply
    assert len(rows) >= 10


@pytest.mark.parametrize("block", blocks(PAGE, "bash"), ids=lambda block: re.findall(r"runs/(\w+)", block)[0])
def test_an_example_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, source in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE):
        Path(name).write_text(source)
    command = block[block.index("hwgrpo ") :]
    _, *arguments = shlex.split(command)
    fewer = ("trainer.prompts_per_step=8", "data.validation_max_rows=8")
    assert main([*arguments, *fewer, "backend.name=cpu", "observe.progress=none"]) == 0
    [output] = re.findall(r"output_dir=(\S+)", command)
    lines = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2]
    named = next(each for each in arguments if each.startswith("reward.functions="))
    for entry in yaml.safe_load(named.partition("=")[2]):
        name = entry if isinstance(entry, str) else entry["name"].rpartition(":")[2]
        assert 0 <= steps[0][f"rewards/{name}/frac_zero_std"] <= 1


def test_the_recipe_of_the_page_is_valid():
    [recipe] = blocks(PAGE, "yaml")
    functions = [RewardFunctionConfig(**each) for each in yaml.safe_load(recipe)["reward"]["functions"]]
    assert [each.gate for each in functions] == [True, False]
    RewardPipeline(SimpleNamespace(functions=functions))

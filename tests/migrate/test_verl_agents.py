"""verl's tools: their settings, and the classes and functions of tool files, without verl."""

import base64
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from hwgrpo.agents.action import Action, ParsedTurn, ToolCall
from hwgrpo.cli.main import main
from hwgrpo.config.schema import EnvironmentConfig, ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.migrate import verl_tools
from hwgrpo.migrate.verl_tools import VerlTools
from hwgrpo.models.loading import load_model
from hwgrpo.values import Sampling
from tests.agents.scripted import TEMPLATE, agent_engine, agent_rows, chat_tokenizer, prompts_of
from tests.migrate.verl_runs import config_of, imported

CLASSES = """
import asyncio
from typing import Any, Optional
from uuid import uuid4

from PIL import Image
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

EVENTS = []


class Guess(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._told = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        assert kwargs["create_kwargs"] == {"ground_truth": ground_truth}
        self._told[instance_id] = {"truth": ground_truth, "right": False}
        EVENTS.append(("create", ground_truth))
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        state = self._told[instance_id]
        if parameters["answer"] == "slow":
            await asyncio.sleep(60)
        if parameters["answer"] == "image":
            images = [Image.new("RGB", (size, 2), "red") for size in (3, 4)]
            return ToolResponse(text="seen " * 99, image=[None, *images]), 0.5, {}
        if parameters["answer"] == "video":
            return ToolResponse(text="a", video=["a.mp4"]), 0.0, {}
        if parameters["answer"] == "no image":
            return ToolResponse(image=[3]), 0.0, {}
        state["right"] = parameters["answer"] == state["truth"]
        assert "agent_data" in kwargs
        return ToolResponse(text=self.config["says"][state["right"]]), 0.0 if state["right"] else -0.05, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self._told[instance_id]["right"])

    async def release(self, instance_id: str, **kwargs) -> None:
        EVENTS.append(("release", self._told.pop(instance_id)["truth"]))


class Own(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "own", "description": "Own.", "parameters": {
                "type": "object", "properties": {}, "required": []}}})

    async def create(self, instance_id: Optional[str] = None) -> str:
        return "only"

    async def execute(self, instance_id: str, parameters: dict) -> tuple:
        return f"{instance_id} " + "long" * 100, None, {}
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def double(number: int):
    """Double a number.

    Args:
        number: Any.
    """
    return {"twice": 2 * number}, 0.5


@function_tool("later", schema={"type": "function", "function": {"name": "later", "description": "Wait.",
                                "parameters": {"type": "object", "properties": {}, "required": []}}})
async def wait():
    return "waited"
'''
SCHEMA = """
    tool_schema:
      type: function
      function:
        name: guess
        description: Guess the number.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The guess.}
          required: [answer]
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The working directory with tool files; its values are those of the module of classes."""
    torch.set_num_threads(1)
    name = f"my_tools_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CLASSES)
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n  - class_name: {name}.Guess\n    config: {{type: native, says: [cold, yes it is]}}{SCHEMA}"
        f"  - class_name: {name}.Own\n    config: {{type: native}}\n"
    )
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    verl_tools.load_tools.cache_clear()
    yield SimpleNamespace(folder=tmp_path, name=name, events=lambda: sys.modules[name].EVENTS)  # type: ignore[attr-defined]
    sys.modules.pop(name, None)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def row(truth: str, **extra: Any) -> dict[str, Any]:
    kwargs = {"guess": {"create_kwargs": {"ground_truth": truth}}, "own": None}
    return {"prompt": [{"role": "user", "content": "Guess."}], "extra_info": {"tools_kwargs": kwargs, **extra}}


def play(turns: list[str], rows: list[dict[str, Any]], n: int = 1, **agent: Any) -> Any:
    kwargs = {"tool_config": "tools.yaml", "function_tools": "functions.py"} | agent.pop("kwargs", {})
    agent["environments"] = [EnvironmentConfig("verl_tools", kwargs)]
    engine = agent_engine(lambda text: turns[text.count("<assistant>") - 1], call_format="hermes", **agent)
    batch = prompts_of(agent_rows(rows, environments=agent["environments"]))
    try:
        return engine.generate(batch, Sampling(n=n, max_response_tokens=1500)), batch
    finally:
        engine.close()


def test_an_instance_per_trajectory_is_created_called_scored_and_released(tools):
    turns = [call("guess", answer="3"), "hm" + call("guess", answer="4"), "done"]
    done, batch = play(turns, [row("4"), row("5")], n=2)
    assert [each["turn_rewards"] for each in done.outcomes] == 2 * [[-0.05, 0.0, 1.0]] + 2 * [[-0.05, -0.05, 0.0]]
    assert [each["reward"] for each in done.outcomes] == pytest.approx([0.95, 0.95, -0.1, -0.1])
    assert done.outcomes[0]["messages"] == [
        {"role": "assistant", "content": "", "tool_calls": [called("guess", answer="3")]},
        {"role": "tool", "content": "cold"},
        {"role": "assistant", "content": "hm", "tool_calls": [called("guess", answer="4")]},
        {"role": "tool", "content": "yes it is"},
        {"role": "assistant", "content": "done"},
    ]
    assert batch.prompts[0].text.startswith("[tools guess own double later ]")
    assert sorted(tools.events()) == sorted([(each, truth) for each in ("create", "release") for truth in "4455"])


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_last_turns_calls_are_not_made_and_only_so_many_of_a_turn(tools):
    twice = call("guess", answer="4") + call("double", number=2)
    done, _ = play([twice, twice], [row("4")], max_turns=2)
    assert done.outcomes[0]["stop"] == "max_turns"
    assert done.outcomes[0]["calls"] == {"guess": 1}
    assert done.outcomes[0]["turn_rewards"] == [0.0, 1.0]
    done, _ = play([twice, "end"], [row("4")], kwargs={"max_parallel_calls": 2})
    assert done.outcomes[0]["turn_rewards"] == [0.5, 1.0]
    assert [m["content"] for m in done.outcomes[0]["messages"] if m["role"] == "tool"] == ["yes it is", '{"twice": 4}']


def test_rows_select_tools(tools):
    _, batch = play(["end"], [row("4", tool_selection=["own", "gone"]), row("4")])
    assert batch.prompts[0].text.startswith("[tools own ]")
    assert batch.prompts[1].text.startswith("[tools guess own double later ]")


RESULTS = {
    "a long one": (call("own"), "only lo...", ""),
    "a coroutine": (call("later"), "waited", ""),
    "an unknown tool": (call("gess"), "there is no tool 'gess'; the tools are: guess, own", "unknown"),
    "wrong arguments of a class": (call("guess", word="4"), "Error: guess: KeyError", "error"),
    "wrong arguments of a function": (call("double", number="x"), "Error: number", "malformed"),
    "a video": (call("guess", answer="video"), "videos are not supported", "error"),
    "no image": (
        call("guess", answer="no image"),
        "the tool's result, block 0 has an image of type int",
        "error",
    ),
    "a late one": (call("guess", answer="slow"), "guess took longer than 0.3 s", "timeout"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_and_failures_are_text_for_the_model(tools, case):
    turn, said, failure = RESULTS[case]
    kwargs = {"timeout": 0.3, "tool_response_truncate_side": "right"}
    length = {"max_tool_response_length": 7 if case == "a long one" else 400}
    done, _ = play([turn, "end"], [row("4")], kwargs=kwargs | length)
    (result,) = [each["content"] for each in done.outcomes[0]["messages"] if each["role"] == "tool"]
    assert said in result
    assert done.outcomes[0]["failed_calls"] == ({failure: 1} if failure else {})
    assert done.outcomes[0]["failure"] == ""


def test_images_of_a_response_stand_before_its_text(tools):
    environment = VerlTools("tools.yaml", max_tool_response_length=7, tool_response_truncate_side="right")
    environment.reset(row("4"))
    calls = (ToolCall("guess", {"answer": "image"}),)
    step = environment.step(Action("x", (1,), True, 0, ParsedTurn("", calls)))
    [message] = step.messages
    *images, said = message["content"]
    assert [Image.open(io.BytesIO(base64.b64decode(each["base64"]))).size for each in images] == [(3, 2), (4, 2)]
    assert said == {"type": "text", "text": "seen se...[488 characters left out]..."}
    assert (message["role"], step.reward, step.results[0][1].failure) == ("tool", 0.5, "")


def test_a_tool_that_cannot_be_created_says_so_and_the_trajectory_goes_on(tools):
    plain = {"prompt": [{"role": "user", "content": "Guess."}], "extra_info": None}
    (tools.folder / f"{tools.name}.py").write_text(CLASSES.replace("assert kwargs", "raise OSError('full') #"))
    done, _ = play([call("guess", answer="3"), "end"], [plain])
    assert "Error: guess: OSError: full" in done.outcomes[0]["messages"][1]["content"]
    assert done.outcomes[0]["turn_rewards"] == [0.0, 0.0]


def test_the_stand_ins_are_named_and_gone_after_the_import(tools, capsys):
    VerlTools("tools.yaml", "functions.py")
    said = capsys.readouterr().err
    assert (
        "verl is not installed; stand-ins of verl.tools.base_tool, verl.tools.schemas, verl.utils.rollout_trace" in said
    )
    assert "stand-ins of verl.tools.function_tool" in said
    assert not [each for each in sys.modules if each.partition(".")[0] == "verl"]
    assert importlib.util.find_spec("verl") is None
    assert str(tools.folder) not in sys.path


def test_a_turn_without_calls_ends_and_finish_without_instances_is_nothing(tools):
    environment = VerlTools("tools.yaml")
    environment.reset(row("4"))
    assert environment.step(Action("x", (1,), True, 0, ParsedTurn("x"))).done
    last = Action("x", (1,), True, 0, ParsedTurn("", (ToolCall("own", {}),)), last=True)
    assert not environment.step(last).done
    assert environment.finish() == 0.0


WRONG = {
    "no file": ({"tool_config": "gone.yaml"}, r"tool_config='gone.yaml' cannot be read"),
    "no list": ({"tool_config": "list.yaml"}, "has no list `tools`"),
    "no class": ({"tool_config": "class.yaml"}, r"tools\[0\] has no class_name of the form module.Class"),
    "another type": ({"tool_config": "mcp.yaml"}, r"tools\[0\].config.type='mcp' is not supported; native is"),
    "no module": ({"tool_config": "module.yaml"}, "no module 'nowhere'; start in the folder"),
    "verl's own tool": ({"tool_config": "verl.yaml"}, r"no module 'verl.tools.gsm8k_tool'; install verl"),
    "one name": ({"tool_config": "tools.yaml", "function_tools": "same.py"}, "two tools of .* are called 'own'"),
    "no functions": ({"function_tools": "none.py"}, "has no function with @function_tool"),
    "no function file": ({"function_tools": "gone.py"}, "there is no such file"),
    "no hints": ({"function_tools": "untyped.py"}, "has no JSON schema.*give each argument a type hint"),
    "nothing": ({}, "has no tools; set kwargs.tool_config or kwargs.function_tools"),
    "no side": ({"tool_response_truncate_side": "up"}, "one of left, middle, right"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tool_files_are_named(tools, case):
    kwargs, said = WRONG[case]
    for name, text in {
        "list.yaml": "a: 1",
        "class.yaml": "tools: [{class_name: Guess}]",
        "mcp.yaml": "tools: [{class_name: a.B, config: {type: mcp}}]",
        "module.yaml": "tools: [{class_name: nowhere.B}]",
        "verl.yaml": "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool}]",
        "same.py": FUNCTIONS.replace("@function_tool\n", '@function_tool("own")\n'),
        "none.py": "x = 1",
        "untyped.py": FUNCTIONS.replace("number: int", "number"),
    }.items():
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        VerlTools(**kwargs)


MULTI = "actor_rollout_ref.rollout.multi_turn."
ON = (f"{MULTI}enable=True", f"{MULTI}tool_config_path=tools.yaml")


def test_settings_of_agents_become_those_here(tmp_path):
    config = config_of(imported(*ON), tmp_path).rollout
    assert config.workflow == "environment"
    assert config.agent.call_format == "hermes"
    assert config.agent.max_turns is None
    (environment,) = config.agent.environments
    assert environment.name == "verl_tools"
    assert environment.kwargs == {
        "tool_config": "tools.yaml",
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
    }
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    more = (f"{MULTI}max_assistant_turns=5", f"{MULTI}max_user_turns=2", f"{MULTI}format=gpt-oss")
    config = config_of(imported(loop, f"{MULTI}function_tool_path=f.py", *more), tmp_path).rollout
    assert config.agent.max_turns == 3
    assert config.agent.call_format == "gpt_oss"
    assert config.agent.environments[0].kwargs["function_tools"] == "f.py"


@pytest.mark.parametrize(
    "given", [(f"{MULTI}enable=True",), (f"{MULTI}tool_config_path=tools.yaml",), (f"{MULTI}max_assistant_turns=4",)]
)
def test_without_tools_or_turned_off_a_response_is_one_turn(tmp_path, given):
    result = imported(*given)
    assert config_of(result, tmp_path).rollout.workflow == "single_turn"
    assert not result.refused()


@pytest.mark.parametrize(
    "given",
    [
        "actor_rollout_ref.rollout.agent.default_agent_loop=my_loop",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=a.yaml",
        f"{MULTI}interaction_config_path=a.yaml",
        f"{MULTI}num_repeat_rollouts=2",
        f"{MULTI}format=gemma4",
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given):
    (refused,) = imported(*ON, given).refused()
    assert f"{refused.key}={refused.value}" == given


def test_a_verl_command_line_with_tools_trains(tools, monkeypatch, capsys):
    load_model(ModelConfig(path="builtin://tiny?hidden=32&layers=1"), attention="sdpa").save_pretrained("model")
    chat_tokenizer(TEMPLATE).save_pretrained("model")
    (tools.folder / "reward.py").write_text("def compute_score(solution_str, **_):\n    return len(solution_str)\n")
    rows = [row(truth) | {"data_source": "guesses", "reward_model": {"ground_truth": truth}} for truth in "45"]
    Path("train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    settings = (
        *("algorithm.adv_estimator=grpo", "data.train_files=train.jsonl", "data.train_batch_size=2"),
        *("data.max_prompt_length=64", "data.max_response_length=24", "actor_rollout_ref.model.path=model"),
        *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        *("actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1", "trainer.save_freq=-1"),
        *(f"{MULTI}function_tool_path=functions.py", *ON, "custom_reward_function.path=reward.py"),
        "trainer.default_local_dir=out",
    )
    ours = ("observe.loggers=[jsonl]", "trainer.threads=1", "observe.metrics=[]")
    command = ["train", "--from", "verl", *settings, *(part for each in ours for part in ("--set", each))]
    assert main(command) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in Path("out/completions.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert {each["outcome"]["environment"] for each in lines} == {"verl_tools"}
    assert all(each["prompt"].startswith("[tools guess own double later ]<user>Guess.") for each in lines)

"""An engine whose turns are written in a test, over a character tokenizer with a chat template."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from hwgrpo.agents.agent_rows import AgentRows, tool_schemas
from hwgrpo.agents.episode import EnvironmentWorkflow
from hwgrpo.config.schema import AgentConfig, DataConfig, RewardConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.formats import Part
from hwgrpo.data.sources import Rows
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import WorkflowParts
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling

TEMPLATE = (
    "{% if tools %}[tools {% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Turn = Callable[[str], str]
"""Text that the model reads -> its turn; a turn that ends with ... is cut at the limit of tokens."""


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = character_tokenizer("")
    tokenizer.chat_template = template
    return tokenizer


class ScriptedEngine:
    """Responds to each input with the turn of a function."""

    notes: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, turn: Turn) -> None:
        self.metrics: dict[str, float] = {}
        self.tokenizer, self.turn = tokenizer, turn
        self.inputs: list[list[int]] = []

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        parts, finished, texts = [], [], []
        for prompt in batch.prompts:
            self.inputs.append([*prompt.token_ids])
            said = self.turn(self.tokenizer.decode(prompt.token_ids))
            tokens = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
            tokens = tokens[: sampling.max_response_tokens]
            parts.append(tokens)
            finished.append(tokens[-1] == self.tokenizer.eos_token_id)
            texts.append(self.tokenizer.decode(tokens).removesuffix(self.tokenizer.eos_token))
        counts = [len(part) for part in parts]
        return Completions(
            prompt_index=torch.arange(len(parts)),
            tokens=torch.tensor([token for part in parts for token in part]),
            offsets=torch.tensor([0, *counts]).cumsum(0),
            logprobs=torch.full((sum(counts),), -0.5),
            finished=torch.tensor(finished),
            texts=tuple(texts),
        )

    def close(self) -> None: ...


def agent_engine(
    turn: Turn, tokenizer: Any = None, workflow: str = "environment", images: Any = None, **agent: Any
) -> Any:
    """Return the engine of the workflow `environment` over a scripted one.

    Args:
        turn: writes the turns.
        tokenizer: has the chat template.
        workflow: `environment` or `tools`.
        images: reads those that are observed (`ObservedImages`); None: the model reads text alone.
        agent: settings of `rollout.agent`.
    """
    tokenizer = tokenizer or chat_tokenizer()
    render = partial(apply_template, config=DataConfig(), tokenizer=tokenizer, place="here")
    turns = TurnTemplate(render, tokenizer, [tokenizer.eos_token_id], images)
    rollout = SimpleNamespace(workflow=workflow, agent=AgentConfig(**agent))
    config = SimpleNamespace(rollout=rollout, data=DataConfig(), reward=RewardConfig())
    parts = WorkflowParts(config, tokenizer, turns)
    return WorkflowEngine(ScriptedEngine(tokenizer, turn), EnvironmentWorkflow(parts), workflow, tokenizer, 20.0, turns)


def agent_rows(rows: Sequence[dict[str, Any]], **agent: Any) -> AgentRows:
    """Return rows with the prompts of their environments."""
    rollout = SimpleNamespace(workflow="environment", agent=AgentConfig(**agent))
    config = SimpleNamespace(rollout=rollout, data=DataConfig())
    return AgentRows(
        Rows([Part("rows", rows, tuple(rows[0]), "rows")]),
        len(rows),
        config=config,
        schemas=tool_schemas(config.rollout.agent),
    )


def prompts_of(rows: Any, tokenizer: Any = None, data: DataConfig | None = None) -> PromptBatch:
    """Return the prompts of rows."""
    tokenizer, data = tokenizer or chat_tokenizer(), data or DataConfig()
    prompts = []
    for i in range(len(rows)):
        text = apply_template(
            rows[i]["prompt"], data, tokenizer, "here", add_generation_prompt=True, tools=rows.tools(i)
        )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        messages = tuple(rows[i]["prompt"])
        prompts.append(Prompt(f"0:{i}", text, ids, None, rows[i], messages=messages, tools=tuple(rows.tools(i))))
    return PromptBatch(tuple(prompts))

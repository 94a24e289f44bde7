"""Batches of given texts, and reward settings with the schema's defaults."""

import os
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.values import Completions, Prompt, PromptBatch


@pytest.fixture
def make_batch():
    """Return a function: groups of response texts (one group per prompt), data columns -> (batch, completions)."""

    def make(groups, ground_truths=None, columns=None, messages=None):
        prompts = tuple(
            Prompt(
                uid=f"0:{index}",
                text=f"prompt {index}",
                token_ids=(1, 2),
                ground_truth=ground_truths[index] if ground_truths else None,
                columns=columns[index] if columns else {"prompt": f"prompt {index}"},
                source="tests",
                messages=messages,
            )
            for index in range(len(groups))
        )
        texts = [text for group in groups for text in group]
        lengths = torch.tensor([len(text) for text in texts])
        completions = Completions(
            prompt_index=torch.tensor([index for index, group in enumerate(groups) for _ in group]),
            tokens=torch.tensor([ord(letter) for text in texts for letter in text], dtype=torch.int64),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            logprobs=torch.zeros(int(lengths.sum())),
            finished=torch.ones(len(texts), dtype=torch.bool),
            texts=tuple(texts),
        )
        return PromptBatch(prompts), completions

    return make


@pytest.fixture
def reward_config():
    """Return a function: dicts of function settings -> the reward settings."""

    def make(*functions):
        return SimpleNamespace(functions=[RewardFunctionConfig(**function) for function in functions])

    return make


@pytest.fixture
def reward_file(tmp_path):
    """Return a function that writes Python source to a file and returns its path."""

    def write(source, name="my_rewards.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    return write


@pytest.fixture
def pipeline(reward_config, reward_file):
    """Return a function: source of a reward `f`, its settings -> a pipeline; its processes end with the test."""
    opened = []

    def make(source, context=None, name="f", **settings):
        path = reward_file(source)
        opened.append(RewardPipeline(reward_config({"name": f"{path}:{name}", **settings}), context=context))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def processes(tmp_path):
    """Return a function that lists the living processes whose command names a file of this test, by number."""

    def living():
        found = []
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
                dead = b"Z" in (folder / "stat").read_bytes().rpartition(b")")[2][:3] if command else True
            except OSError:  # it ended meanwhile
                continue
            if not dead and str(tmp_path).encode() in command and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        return sorted(found)

    return living


@pytest.fixture
def one_thread():
    """Compute with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

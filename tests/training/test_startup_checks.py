"""A dry run accepts nothing that the run would refuse: both go through one list of checks."""

import ast
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin
from hwgrpo.models.loading import check_embeddings
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning import dry_run as plan
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.training import setup
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

MISTAKES = {
    "model.lora.target_modules": ("model.lora.rank=2", "model.lora.target_modules=[q_prok]"),
    "model.lora.adapter": ("model.lora.adapter={folder}",),
    "model.router_loss_coef": ("model.router_loss_coef=0.1",),
    "model.fused_modules": ("model.fused_modules=[rms_norm]",),
    "model.dtype": ("model.dtype=float32", "model.attention=flash_attention_2"),
    "kernels.pins": ("kernels.pins={{row_stats: tritonn}}",),
    "rollout.max_response_tokens": ("rollout.max_response_tokens=4000000",),
    "bytes; copy or download it again": ("model.path={folder}/truncated",),
    "has no tokens": ("model.path={folder}/without_tokenizer",),
    "data column": ("reward.functions=[exact_match]", "data.train={folder}/no_answers.jsonl"),
    "trainer.resume": ("trainer.resume=never",),
    "algorithm.advantage.kwargs": (
        "algorithm.advantage.name=online_rft",
        "algorithm.advantage.kwargs={{treshold: 0.5}}",
    ),
    "algorithm.loss.kwargs.beta=-1 is out of range": (
        "algorithm.loss.name=dro",
        "algorithm.loss.kwargs={{beta: -1}}",
    ),
    "algorithm.advantage.kwargs.greedy_S": (
        "algorithm.advantage.name={folder}/own.py:own",
        "algorithm.advantage.kwargs={{greedy_S: 1}}",
    ),
}
OWN = """
def own(rewards_S, group_S, valid_S, config, lengths_S=None, *, greedy_S):
    return (rewards_S - greedy_S).float()
"""
HEADS = "model.path=builtin://tiny?steps=1&head=32"
"""A model that vLLM can compute on a CPU."""
LACKING = {
    "rollout.engine='vllm'": ("rollout.engine=vllm", HEADS),
    "rollout.engine='vllm_server'": ("rollout.engine=vllm_server", HEADS),
    "rollout.engine='sglang_server'": ("rollout.engine=sglang_server",),
    "rollout.server.python": ("rollout.engine=vllm_server", "rollout.server.python=/no/such/python", HEADS),
    "rollout.server.url": ("rollout.engine=vllm_server", "rollout.server.url=http://127.0.0.1:9", HEADS),
    "trainer.strategy='ddp'": ("trainer.strategy=ddp",),
    "trainer.fsdp2.offload": ("trainer.strategy=fsdp2", "trainer.fsdp2.offload=true"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "no_answers.jsonl").write_text('{"prompt": "sort 21="}\n' * 8)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "file").touch()
    for name in ("truncated", "without_tokenizer"):
        shutil.copytree(builtin.resolve("builtin://tiny?task=sort"), tmp_path / name)
    weights = tmp_path / "truncated/model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    (tmp_path / "without_tokenizer/tokenizer.json").unlink()
    (tmp_path / "without_tokenizer/tokenizer_config.json").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    return tmp_path


def config_of(folder: Path, words: tuple[str, ...]):
    return runs.small(folder / "run", *(word.format(folder=folder) for word in words))


def refused_by_run(config) -> str:
    with pytest.raises(ValueError) as error:
        build_run(config, BACKEND, 0, 1)
    return str(error.value)


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused_by_the_dry_run_in_the_words_of_the_run(folder, what):
    config = config_of(folder, MISTAKES[what])
    with pytest.raises(ValueError) as error:
        make_plan(config, BACKEND, 1)
    assert str(error.value) == refused_by_run(config)


@pytest.mark.parametrize("what", LACKING)
def test_what_this_machine_lacks_is_said_beside_the_plan_and_refused_by_the_run(folder, what, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    if "ddp" in what:
        monkeypatch.delenv("RANK")
    else:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("hwgrpo.rollout.vllm.engine._installed", lambda: iter(()))
    monkeypatch.setattr("hwgrpo.rollout.server.server_environment.SOURCES", folder)  # without rollout environments
    monkeypatch.chdir(folder)
    config = config_of(folder, LACKING[what])
    plan = make_plan(config, BACKEND, 1)
    (problem,) = plan.problems
    assert what in problem
    assert "memory" in plan.text
    assert refused_by_run(config) == problem
    assert make_plan(config, BACKEND, 1, no_device="no device").problems == ("no device",), "that of another machine"


def test_a_folder_in_use_is_said_beside_the_plan(folder):
    (folder / "run/.lock").write_text("123")
    with (folder / "run/.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (problem,) = make_plan(config_of(folder, ()), BACKEND, 1).problems
    assert "is in use by another run (process 123)" in problem
    assert make_plan(config_of(folder, ()), BACKEND, 1).problems == ()


def test_a_folder_in_which_nothing_can_be_made_is_said_beside_the_plan(folder):
    config = config_of(folder, ())
    config.trainer.output_dir = "/proc/hwgrpo"  # which the access rights of root allow
    (problem,) = make_plan(config, BACKEND, 1).problems
    assert problem.startswith("trainer.output_dir='/proc/hwgrpo' cannot be written: ")


def test_more_prompts_per_step_than_rows_are_said(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "sort 21=", "answer": "12"}\n{"prompt": "1=", "answer": "1"}\n')
    rows = f"data.train={folder}/rows.jsonl"
    plan = make_plan(config_of(folder, (rows, "trainer.prompts_per_step=4")), BACKEND, 1)
    assert "prompts_per_step=4 is more than the 2 training prompts" in plan.text
    assert "is more than" not in make_plan(config_of(folder, (rows, "trainer.prompts_per_step=2")), BACKEND, 1).text


def test_a_tokenizer_with_more_ids_than_the_model_has_embeddings_is_refused_before_the_model_is_loaded():
    tokenizer = character_tokenizer("")
    check_embeddings(len(tokenizer), tokenizer)
    check_embeddings(None, tokenizer)
    with pytest.raises(ConfigError, match=r"model\.tokenizer does not belong"):
        check_embeddings(len(tokenizer) - 1, tokenizer)


@pytest.mark.parametrize("module", [setup, plan])
def test_neither_the_run_nor_the_dry_run_has_checks_of_its_own(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    called = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {"check_start", "missing_requirements", "open_data"} <= called
    own = {name for name in called if name.startswith(("check_", "choose_"))} - {"check_start", "choose_strategy"}
    assert own == set(), "it belongs into startup_checks, so that the other does it too"

"""What is said against an engine before the model is loaded."""

import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hwgrpo_backends.cpu import BACKEND as CPU
from transformers import Qwen3Config

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.server import server_connection
from hwgrpo.rollout.server.vllm import PLUGIN, VllmServer
from hwgrpo.rollout.vllm.vllm_settings import check_head_size
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import TOKEN_VARIABLE
from hwgrpo.training import setup
from tests.support.models.tiny import settings
from tests.support.runs import runs
from tests.support.servers.fake_server import TOKEN, FakeServer

ENGINES = ("rollout.engine=vllm", "rollout.engine=vllm_server")


def shape(head: int, **more: int) -> Qwen3Config:
    return Qwen3Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=head, **more)


def check(engine: str, head: int, path: str = "builtin://tiny?task=sort", *, on_host: bool = True) -> None:
    check_head_size(settings(engine).rollout, path, shape(head), on_host=on_host)


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused_with_a_model_that_works(engine):
    with pytest.raises(ConfigError, match=r"heads of size 16, only of 32, 64") as error:
        check(engine, 16)
    assert "'model.path=builtin://tiny?task=sort&head=32'" in str(error.value)
    check(engine, 32)
    check(engine, 16, on_host=False)
    check("rollout.engine=local", 16)


def test_the_model_that_is_recommended_keeps_its_other_options_and_one_of_ones_own_gets_another_engine():
    with pytest.raises(ConfigError, match=r"'model\.path=builtin://tiny\?digits=5&head=32'"):
        check(ENGINES[0], 16, "builtin://tiny?head=16&digits=5")
    with pytest.raises(ConfigError, match=r"use rollout\.engine=local, or a vLLM server on a device"):
        check(ENGINES[0], 40, "owner/model")


def test_a_dry_run_says_so_too(capsys, tmp_path):
    words = ("tiny_sort", *runs.SMALL, "rollout.engine=vllm", "backend.name=cpu", f"trainer.output_dir={tmp_path}")
    assert main(["train", "--dry-run", *words]) == 2
    assert "heads of size 16" in capsys.readouterr().err


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*arguments) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(setup, "build_models", refuse)
    monkeypatch.setattr(server_connection, "REFUSAL_TIMEOUT", 0.2)


@pytest.mark.parametrize(
    "token, told",
    [("wrong", r"refuses the token.*rollout\.server\.token_variable"), ("", rf"needs a token: set {TOKEN_VARIABLE}")],
)
def test_a_wrong_token_is_reported_before_the_model_is_loaded(no_model, tmp_path, monkeypatch, token, told):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    server = FakeServer()
    with pytest.raises(ConfigError, match=told):
        runs.run(tmp_path / "run", "rollout.engine=vllm_server", f"rollout.server.url={server.url}")
    server.close()
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_reported_before_the_model_is_loaded(no_model, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(ConfigError, match=r"no SGLang server answers there"):
        runs.run(tmp_path / "run", "rollout.engine=sglang_server", "rollout.server.url=http://127.0.0.1:1")


def test_trainer_and_server_read_the_token_from_one_variable():
    assert settings().rollout.server.token_variable == TOKEN_VARIABLE


@pytest.fixture
def by_hand(monkeypatch):
    """Run what is started by hand, with a vLLM that is not there; return what it was given."""
    given: list[list[str]] = []

    def run_module(name: str, **how) -> dict:
        if name != "vllm.entrypoints.openai.api_server":
            return plain(name, **how)
        given.append(sys.argv[1:])
        return {}

    plain = runpy.run_module
    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.syspath_prepend(str(PLUGIN))
    for name in [name for name in sys.modules if name.startswith("hwgrpo_vllm")]:
        monkeypatch.delitem(sys.modules, name)

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["hwgrpo_vllm", *words])
        plain("hwgrpo_vllm", run_name="__main__")
        return given.pop()

    return run


def test_the_command_for_a_server_by_hand_starts_one_that_a_trainer_can_use(by_hand, monkeypatch):
    command = VllmServer.start_command_hint.split("`")[1]
    variables, _, words = command.partition(" python -m hwgrpo_vllm ")
    names = dict(word.split("=", 1) for word in variables.split())
    assert names.keys() == {TOKEN_VARIABLE, "PYTHONPATH"}
    assert os.path.isfile(os.path.join(names["PYTHONPATH"], "hwgrpo_vllm", "__main__.py"))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    found = by_hand(*words.split())
    assert found[-2:] == ["--model", "MODEL"]
    assert found[found.index("--middleware") + 1] == "hwgrpo_vllm.Guard"
    assert found[found.index("--worker-extension-cls") + 1] == "hwgrpo_vllm.WorkerExtension"
    parts: Any = _parts()
    ours = VllmServer().command(parts, None, "127.0.0.1", 1)
    for name in ("--middleware", "--worker-extension-cls", "--logprobs-mode", "--generation-config"):
        assert found[found.index(name) + 1] == ours[ours.index(name) + 1]


def test_a_server_by_hand_without_a_token_ends_before_vllm_is_imported(by_hand, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=f"{TOKEN_VARIABLE} is empty"):
        by_hand("--model", "x")


def _parts():
    python = f"rollout.server.python={sys.executable}"
    config = settings("rollout.engine=vllm_server", "model.path=builtin://tiny?task=sort&head=32&steps=0", python)
    same = lambda *, adapted: {}  # noqa: E731
    device = SimpleNamespace(torch_device=SimpleNamespace(type="cpu"), backend=CPU)
    return SimpleNamespace(
        config=config, device=device, compute_dtype="torch.float32", different_settings=same, image_sample=None
    )

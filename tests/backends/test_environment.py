"""Environment profiles: the user's own values win, and training and rollout keep apart."""

import dataclasses

import pytest
from hwgrpo_backends import environment, registry
from hwgrpo_backends.backend import EnvVar

BACKENDS = [registry.get(name) for name in registry.BUILTIN]
NPU = registry.get("npu")


def profiles(backend):
    """Return a backend's variables as they are written, whatever this host has."""
    return backend.env_train, backend.env_rollout, backend.env_deterministic, backend.env_optional


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_variable_says_why_and_where_that_comes_from(backend):
    for name, variable in [pair for profile in profiles(backend) for pair in profile.items()]:
        assert name.isupper()
        assert len(variable.why) > 20
        assert len(variable.source) > 10


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_variable_that_is_left_to_the_user_is_set_by_no_profile(backend):
    *ours, optional = profiles(backend)
    assert not optional.keys() & {name for profile in ours for name in profile}
    environ: dict[str, str] = {}
    environment.apply(backend, "train", environ, deterministic=True)
    environment.apply(backend, "rollout", environ)
    assert not optional.keys() & environ.keys()


def test_a_variable_of_files_names_the_first_that_is_there_and_is_left_out_without_one(tmp_path):
    first, second = (tmp_path / name for name in ("first.so", "second.so"))
    library = EnvVar(value="any.so", files=(str(first), str(second)), why="a faster malloc")
    backend = dataclasses.replace(NPU, env_train={"LD_PRELOAD": library}, env_rollout={"LD_PRELOAD": library})
    environ: dict[str, str] = {}
    assert environment.apply(backend, "train", environ) == []
    assert "LD_PRELOAD" not in environ
    second.touch()
    environment.apply(backend, "train", environ)
    assert environ["LD_PRELOAD"] == str(second)
    first.touch()
    environment.apply(backend, "rollout", environ)
    assert environ["LD_PRELOAD"] == str(first)
    mine = {"LD_PRELOAD": "mine.so"}
    (setting,) = environment.apply(backend, "train", mine)
    assert (setting.kept, mine["LD_PRELOAD"]) == (True, "mine.so")


def test_a_profile_is_put_in_force_with_the_decision_for_child_processes():
    environ = {}
    environment.apply(NPU, "train", environ)
    assert environ["TASK_QUEUE_ENABLE"] == "2"
    assert environ["HWGRPO_BACKEND_SELECTED"] == "npu"


def test_the_users_own_value_is_kept_and_said_to_be():
    environ = {"TASK_QUEUE_ENABLE": "0", "HCCL_EXEC_TIMEOUT": ""}
    settings = {setting.name: setting for setting in environment.apply(NPU, "train", environ)}
    assert environ["TASK_QUEUE_ENABLE"] == "0"
    assert environ["HCCL_EXEC_TIMEOUT"] == ""
    assert settings["TASK_QUEUE_ENABLE"].kept
    assert settings["TASK_QUEUE_ENABLE"].value == "0"
    assert not settings["HCCL_CONNECT_TIMEOUT"].kept


def test_showing_a_profile_changes_nothing():
    environ = {"HOME": "/root"}
    assert {setting.name for setting in environment.profile(NPU, "rollout", environ)} == set(NPU.environment("rollout"))
    assert environ == {"HOME": "/root"}


def test_a_rollout_process_started_by_the_trainer_gets_the_rollout_values():
    environ = {}
    environment.apply(NPU, "train", environ)
    environment.apply(NPU, "rollout", environ)
    assert environ["TASK_QUEUE_ENABLE"] == "1"
    assert "PYTORCH_NPU_ALLOC_CONF" not in environ, "vllm-ascend has its own, and sleep mode refuses the trainer's"
    assert environ["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert "CPU_AFFINITY_CONF" not in environ


def test_a_rollout_process_keeps_what_the_user_set_before_training():
    environ = {"TASK_QUEUE_ENABLE": "0", "CPU_AFFINITY_CONF": "2"}
    environment.apply(NPU, "train", environ)
    environment.apply(NPU, "rollout", environ)
    assert environ["TASK_QUEUE_ENABLE"] == "0"
    assert environ["CPU_AFFINITY_CONF"] == "2"


def test_applying_twice_is_applying_once():
    environ = {"TASK_QUEUE_ENABLE": "0"}
    environment.apply(NPU, "train", environ)
    once = dict(environ)
    environment.apply(NPU, "train", environ)
    assert environ == once


def test_a_value_that_the_user_changed_after_it_was_applied_is_the_users():
    environ: dict[str, str] = {}
    environment.apply(NPU, "train", environ)
    environ["TASK_QUEUE_ENABLE"] = "0"
    (setting,) = [each for each in environment.apply(NPU, "rollout", environ) if each.name == "TASK_QUEUE_ENABLE"]
    assert (setting.value, setting.kept) == ("0", True)
    assert environ["TASK_QUEUE_ENABLE"] == "0"


@pytest.mark.parametrize("broken", ["TASK_QUEUE_ENABLE", "[1]", "{"])
def test_a_record_that_is_not_ours_makes_every_value_the_users(broken):
    environ = {"HWGRPO_ENV_APPLIED": broken, "TASK_QUEUE_ENABLE": "0"}
    environment.apply(NPU, "train", environ)
    assert environ["TASK_QUEUE_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("cuda", "FLASH_ATTENTION_DETERMINISTIC", "1"),
        ("rocm", "FLASH_ATTENTION_DETERMINISTIC", "1"),
        ("npu", "HCCL_DETERMINISTIC", "true"),
    ],
)
def test_what_repeats_the_numbers_is_set_for_training_alone_and_taken_out_again(name, variable, value):
    backend, environ = registry.get(name), {}
    environment.apply(backend, "train", environ)
    assert variable not in environ
    environment.apply(backend, "train", environ, deterministic=True)
    assert environ[variable] == value
    assert environ.keys() >= backend.environment("train").keys()
    environment.apply(backend, "train", environ)
    assert variable not in environ
    environment.apply(backend, "rollout", environ, deterministic=True)
    assert variable not in environ
    kept = {variable: "mine"}
    environment.apply(backend, "train", kept, deterministic=True)
    assert kept[variable] == "mine"

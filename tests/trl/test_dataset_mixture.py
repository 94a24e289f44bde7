"""A mixture of datasets, read as TRL's own script does, and the names of `trl` without a counterpart."""

import importlib
import json
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.trl import DatasetMixtureConfig, GRPOConfig, GRPOTrainer, TrlParser, get_dataset
from tests.trl.small_trainer import SMALL, reward


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of 6 and of 4 rows."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    written = []
    for name, count in (("a", 6), ("b", 4)):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{name}{i}", "solution": str(i), "more": 1} for i in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        written.append(str(file))
    return written


def entries(files: list[str], *shares: float) -> list[dict]:
    made = [{"path": "json", "data_files": file, "columns": ["prompt", "solution"]} for file in files]
    return [{**each, "fraction": share} for each, share in zip(made, shares, strict=True)] if shares else made


def test_the_datasets_of_a_file_follow_each_other(files: list[str], tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"datasets": entries(files)}))
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config(["--config", str(config)])  # pyright: ignore[reportArgumentType]
    rows = get_dataset(mixture)["train"]
    assert rows.column_names == ["prompt", "solution"]
    assert rows["prompt"][:] == [f"a{i}" for i in range(6)] + [f"b{i}" for i in range(4)]


def test_shares_and_a_test_split(files: list[str]):
    rows = get_dataset(DatasetMixtureConfig(datasets=entries(files, 1, 3)))["train"]  # type: ignore[arg-type]
    assert rows["prompt"][:] == ["a0", "b0", "b1", "b2", "b3"]  # 4 rows are three quarters of 5.3
    split = get_dataset(DatasetMixtureConfig(datasets=entries(files), test_split_size=0.2))  # type: ignore[arg-type]
    assert {name: len(part) for name, part in split.items()} == {"train": 8, "test": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streaming": True}, "streaming=true"),
        ({"datasets": [{"path": "a", "subset": "b"}]}, "unknown fields subset"),
        ({"datasets": []}, "datasets is empty"),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        get_dataset(DatasetMixtureConfig(**arguments))


def test_shares_of_some_datasets_alone_are_refused(files: list[str]):
    mixture = DatasetMixtureConfig(datasets=[*entries(files[:1]), *entries(files[1:], 0.5)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fraction=\[None, 0.5\]"):
        get_dataset(mixture)


def check_missing(module: str, name: str, *texts: str):
    """Check that a name is no attribute of a module, and that its errors have the texts."""
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    with pytest.raises(AttributeError) as read:
        getattr(found, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from {module} import {name}")
    for error in (read.value, imported.value):
        assert all(text in str(error) for text in texts)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("experimental.async_grpo", "AsyncGRPOTrainer", "rollout.source=prefetch"),
        ("experimental", "AsyncGRPOConfig", "rollout.source=prefetch"),
        ("experimental.gmpo", "GMPOConfig", "algorithm.loss.name=gmpo"),
        ("experimental.gspo_token", "GRPOTrainer", 'importance_sampling_level="sequence"'),
        ("experimental.grpo_with_replay_buffer", "ReplayBuffer", "replay_groups"),
        ("experimental.harbor", "HarborSpec", "there are no environments here"),
        ("experimental.sdpo", "SDPOTrainer", "GRPOTrainer of hwgrpo.trl is what there is"),
    ],
)
def test_a_name_of_trls_experimental_modules_names_its_counterpart(module: str, name: str, instead: str):
    check_missing(f"hwgrpo.trl.{module}", name, instead)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("", "SFTConfig", "or import it from trl"),
        ("", "RLOOTrainer", "algorithm.advantage.name=rloo"),
        ("", "LogCompletionsCallback", "leave it out"),
        (".data_utils", "maybe_apply_chat_template", "or import it from trl"),
        (".trainer.utils", "pad", "pad of trl.trainer.utils has no counterpart"),
    ],
)
def test_a_name_of_trl_without_a_counterpart_says_what_to_do(module: str, name: str, instead: str):
    check_missing(f"hwgrpo.trl{module}", name, "has no counterpart in hwgrpo.trl", instead)


def test_names_are_found_where_trl_has_them():
    trl = importlib.import_module("hwgrpo.trl")
    assert importlib.import_module("hwgrpo.trl.trainer.grpo_trainer").GRPOTrainer is GRPOTrainer
    assert trl.rewards.think_format_reward(["<think>a</think>b"]) == [1.0]
    assert not hasattr(trl, "no_such_name")
    assert importlib.import_module("hwgrpo.trl.trainer.utils").GRPOTrainer is trl.trainer.GRPOTrainer
    found: dict = {}
    exec("import hwgrpo.trl.trainer.grpo_config as a; from hwgrpo.trl.trainer import grpo_config as b", found)
    assert found["a"] is found["b"] is importlib.import_module("hwgrpo.trl.trainer.grpo_config")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hwgrpo.trl.no_such_module")


def test_the_callback_that_shows_progress_has_no_effect(folder: Path, capsys: pytest.CaptureFixture[str]):
    trl = importlib.import_module("hwgrpo.trl")
    callbacks = [trl.RichProgressCallback]
    run = GRPOTrainer("model", reward, GRPOConfig("o", **SMALL), [{"prompt": "a"}], callbacks=callbacks)
    assert "RichProgressCallback has no effect: the run prints its progress" in capsys.readouterr().err
    assert run.pop_callback(trl.RichProgressCallback) is not None


def test_the_folder_without_arguments_is_named_for_the_model(folder: Path):
    run = GRPOTrainer("model", reward, train_dataset=[{"prompt": "a"}] * 8)
    assert run.args.output_dir == "model-GRPO"
    assert GRPOTrainer("model", reward, GRPOConfig("o", **SMALL), [{"prompt": "a"}]).args.output_dir == "o"

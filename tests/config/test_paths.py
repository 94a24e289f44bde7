"""Paths that settings name are looked for before anything heavy is imported, and a misspelt one is corrected."""

import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.document import entries
from hwgrpo.config.named_files import function_settings, with_absolute_paths
from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.config.validate import check_resume
from hwgrpo.errors import ConfigError
from hwgrpo.support.paths import did_you_mean

BASE = ("model.path=builtin://tiny", "data.train=task://sort", "reward.functions=[exact_match]")
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody's project, entered."""
    for folder in ("data", "my-model", "adapter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "my-model/config.json").write_text("{}")
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    for file in ("data/train.jsonl", "rewards.py", "template.jinja", "notes.txt"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("data.train=data/trian.jsonl", ["data.train='data/trian.jsonl'", "Did you mean data/train.jsonl?"]),
        ("data.validation=/nope", ["data.validation='/nope'", "no such file", "looked for /nope"]),
        ("data.train=notes.txt", ["data.train='notes.txt'", ".txt is not a data file", ".parquet"]),
        ("data.train=[data/train.jsonl,data/trian.jsonl]", ["data.train='data/trian.jsonl'", "mean data/train.jsonl?"]),
        ("data.validation=[task://sort,/nope]", ["data.validation='/nope'", "no such file"]),
        ("data.train=[]", ["data.train=[] must be a path or name, or a list of them"]),
        ("data.train={a: b}", ["data.train={'a': 'b'} has the wrong type; it must be str or list[str]"]),
        (
            "data.validation=[data/train.jsonl,[gsm8k]]",
            ["data.validation.1=['gsm8k'] has the wrong type; it must be str"],
        ),
        ("reward.functions=[reward.py:score]", ["reward.functions.0.name", "no file reward.py", "mean rewards.py?"]),
        ("reward.functions=[nowhere/at/all.py]", ["no file nowhere/at/all.py"]),
        ("model.path=my_model", ["model.path='my_model'", "Did you mean my-model?"]),
        ("model.path=./my-modle", ["model.path='./my-modle'", "Did you mean my-model?"]),
        ("model.path=adapter", ["contains a LoRA adapter", "model.lora.adapter"]),
        ("model.path=data", ["the folder has no config.json"]),
        ("model.path=rewards.py", ["is a file"]),
        ("model.tokenizer=./my-model", ["model.tokenizer='./my-model'", "no tokenizer_config.json"]),
        ("model.lora.adapter=adaptor", ["model.lora.adapter='adaptor'", "Did you mean adapter?"]),
        ("model.chat_template=templat.jinja", ["no such file", "Did you mean template.jinja?"]),
    ],
)
def test_a_path_that_is_not_there_is_refused_with_the_one_that_is(project: Path, word: str, parts: list[str]):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*BASE, word])
    for part in parts:
        assert part in str(error.value)


def test_what_is_there_and_names_of_the_hub_are_accepted(project: Path):
    for words in (
        ("model.path=my-model", "data.train=data/train.jsonl", "reward.functions=[rewards.py:score]"),
        ("model.path=Qwen/Qwen3-0.6B", "data.train=openai/gsm8k:main", f"reward.functions=['{project}/rewards.py']"),
        ("model.path=gpt2", "data.train=[gsm8k,data/train.jsonl,task://sort]", "data.validation=[data]"),
        ("model.path=gpt2", "data.train=gsm8k", "data.validation=data", "model.lora.adapter=adapter"),
    ):
        load_config(None, [*BASE, *words])


def test_a_checkpoint_to_resume_from_that_is_not_there_is_corrected(project: Path):
    (project / "step-00000002").mkdir()
    with pytest.raises(ConfigError, match=r"neither auto, never nor a folder.*Did you mean step-00000002\?"):
        check_resume(load_config(None, [*BASE, "trainer.resume=step-0000002"]))


@pytest.mark.parametrize("word", ["data.train=/nope", "reward.functions=[nope.py]", "model.path=./nope"])
def test_a_wrong_path_is_told_without_importing_torch(word: str, tmp_path: Path):
    code = (
        "import sys; from hwgrpo.cli.main import main\n"
        f"assert main(['train', 'tiny_sort', {word!r}]) == 2\n"
        "print(*{'torch', 'transformers', 'datasets'} & sys.modules.keys(), 'loaded')\n"
    )
    path = ":".join(str(REPO / folder) for folder in (".", "backends", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": "/usr/bin"}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "loaded\n"
    assert "nope" in done.stderr


def test_no_hint_is_given_where_nothing_resembles_or_nothing_may_be_read(project: Path):
    assert did_you_mean(Path("zzz.jsonl"), Path.is_dir) == ""
    assert did_you_mean(Path("/nope/nope/nope")) == ""
    assert did_you_mean(Path("data/train.jsonl/below.jsonl")) == ""


def test_going_below_a_single_setting_is_refused_with_that_setting():
    with pytest.raises(
        ConfigError, match=r"unknown key data\.train\.path: data\.train is a list, so a number comes after it"
    ):
        load_config(None, [*BASE, "data.train.path=/nope"])
    with pytest.raises(ConfigError, match=r"reward\.functions\.0\.name is a single setting"):
        load_config(None, [*BASE, "reward.functions.0.name.file=x"])
    words = ["kernels.pins.row_stats=torch", "data.chat_template_kwargs.a.b=1", "reward.functions.0.kwargs.x=1"]
    assert load_config(None, [*BASE, *words]).data.chat_template_kwargs == {"a": {"b": 1}}


def test_files_of_all_functions_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.py").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [*BASE])
    config.reward.functions.append(RewardFunctionConfig("online_reward_model", kwargs={"verifier": "math"}))
    config.observe.metrics = config.trainer.stages = config.plugins = ["a"]
    for setting in [*function_settings(config)]:
        setting.set("own.py:f")
    config.reward.functions[1].name = "online_reward_model"
    found = {setting.key: setting.name for setting in function_settings(with_absolute_paths(config))}
    assert found.pop("reward.functions.1.name") == "online_reward_model"
    assert {"plugins.0", "reward.functions.1.kwargs.verifier", "rollout.workflow"} <= found.keys()
    assert set(found.values()) == {f"{tmp_path}/own.py:f"}
    assert config.rollout.workflow == "own.py:f", "a copy is changed"


def test_every_setting_that_takes_a_function_of_a_file_is_among_them():
    keys = {entry.key for entry in entries() if "file.py:function" in entry.allowed}
    assert {"algorithm.loss.name", "rollout.workflow"} <= keys
    assert keys <= {setting.key for setting in function_settings(load_config(None, [*BASE]))}

"""Values nobody should type, and recipes nobody should write: each is refused with its key and a remedy."""

import os
from pathlib import Path

import pytest
import torch

from hwgrpo.cli.eval import UNUSED
from hwgrpo.config import load_config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.recipe_files import find_recipe
from hwgrpo.config.supervised import supervised_settings
from hwgrpo.errors import ConfigError, shown
from hwgrpo.models.builtin import TinySpec
from hwgrpo.training.resume import _rank_seed
from hwgrpo.training.update.advantage_inputs import shuffle_rewards
from hwgrpo.values import Rewards

BASE = ("model.path=builtin://tiny", "data.train=task://sort?digits=2", "reward.functions=[exact_match]")
LONG = "x" * 300
LARGEST_SEED = 2**32 - 1


def load(*overrides: str):
    return load_config(None, (*BASE, *overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        # indices
        ("reward.functions.3.weight=1", ["reward.functions has no entry 3: it has 1", "set reward.functions=[...]"]),
        ("rollout.stop.0=x", ["rollout.stop has no entry 0: it is empty"]),
        ("reward.functions.²=1", ["reward.functions is a list, so a number comes after it"]),
        ("reward.functions.weight=1", ["a number comes after it: reward.functions.0.weight=..."]),
        ("rollout.0=1", ["unknown key rollout.0", "rollout has: engine"]),
        ("~optim.lr", ["'~optim.lr' deletes a setting", "write section.key=value"]),
        # numbers
        ("rollout.n=1:30", ["rollout.n='1:30'", "must be int, in decimal digits"]),
        ("rollout.n=010", ["rollout.n='010'", "must be int"]),
        ("rollout.n=0x10", ["rollout.n='0x10'", "must be int"]),
        ("rollout.n=５", ["rollout.n='５'", "must be int"]),
        ("rollout.n='5'", ["rollout.n='5'", "must be int"]),
        ("rollout.n=5.0", ["rollout.n=5.0", "must be int, e.g. 5"]),
        ("rollout.n=true", ["rollout.n=true", "must be int"]),
        (f"rollout.n={'9' * 5000}", ["rollout.n=", "a number of 5000 digits"]),
        (f"rollout.n={'9' * 390}", ["rollout.n=999", "(390 characters)", "at most 2147483647"]),
        (f"optim.lr={'9' * 390}", ["optim.lr=999", "out of range", "finite"]),
        ("optim.lr=1e39", ["optim.lr=1e+39", "at most 3e+38"]),
        ("optim.eps=1e-300", ["optim.eps=1e-300", "1e-30 <= x <= 1"]),
        ("optim.eps=1e23", ["optim.eps=1e+23", "1e-30 <= x <= 1"]),
        ("algorithm.advantage.eps=1e23", ["algorithm.advantage.eps=1e+23", "0 <= x <= 1"]),
        ("rollout.top_k=1", ["rollout.top_k=1", "the 8 responses to a prompt are the same", "use 2 or more, or 0"]),
        ("rollout.temperature=1e-300", ["rollout.temperature=1e-300", "0.01 <= x <= 100"]),
        ("rollout.server.request_timeout=1e300", ["rollout.server.request_timeout", "0 < x <= 1e+07"]),
        ("rollout.stop_token_ids=[5, -1]", ["rollout.stop_token_ids.1=-1", "at least 0"]),
        ("rollout.stop_token_ids=[99999999999999999999]", ["rollout.stop_token_ids.0=9", "at most 2147483647"]),
        ("optim.betas=[0.9, 1.0]", ["optim.betas.1=1.0", "0 <= x < 1"]),
        (f"trainer.seed={2**64}", [f"trainer.seed={2**64}", f"0 <= x <= {LARGEST_SEED}"]),
        # bools and text
        ("data.shuffle=5", ["data.shuffle=5", "must be bool: true or false"]),
        ("data.shuffle=1", ["data.shuffle=1", "must be bool"]),
        ("data.shuffle=null", ["data.shuffle=null", "must be bool"]),
        ("data.system_prompt=a: b", ["data.system_prompt={'a': 'b'}", "in quotes, e.g.", "'\"a: b\"'"]),
        ("data.system_prompt=a\udc80b", ["data.system_prompt=", "U+DC80", "UTF-8"]),
        ("data.system_prompt=a\0b", ["data.system_prompt=", "U+0000", "remove it"]),
        ('data.system_prompt="a\\0b"', ["data.system_prompt='a\\x00b' contains a NUL"]),
        ('rollout.engine_kwargs={a: ["\\ud800"]}', ["rollout.engine_kwargs.a.0", "not valid Unicode"]),
        ("rollout.n=???", ["rollout.n=??? marks a value that is still to be set", "the default 8"]),
        ("rollout.stop=['???']", ["rollout.stop.0=???"]),
        ("optim=???", ["optim=??? marks a value that is still to be set; give it one"]),
        ("optim.betas=???", ["optim.betas=??? marks", "the default [0.9, 0.999]"]),
        ("rollout.server.env=???", ["rollout.server.env=??? marks", "the default {}"]),
        ("data.system_prompt=!!binary aGk=", ["data.system_prompt=", "the tag", "not for settings"]),
        # interpolations
        ("rollout.n=${rollout.n}", ["rollout.n='${rollout.n}' cannot be resolved", "oc.env"]),
        ("rollout.n=${nope.at.all}", ["rollout.n=", "'nope.at.all' not found"]),
        ("rollout.stop=['${']", ["rollout.stop.0='${' cannot be resolved", "write \\${"]),
        ("rollout.n=${oc.env:HWGRPO_NOT_SET}", ["rollout.n=", "HWGRPO_NOT_SET"]),
        ("rollout.n=${data.prompt_key}", ["rollout.n='${data.prompt_key}'", "must be int"]),
        # YAML
        ("rollout.stop=&a [*a]", ["rollout.stop=", "an anchor contains itself"]),
        ("rollout.engine_kwargs={a: 1, a: 2}", ["rollout.engine_kwargs=", "the key 'a' is there twice"]),
        (f"rollout.stop={'[' * 2000}", ["rollout.stop=", "more than 50 levels deep"]),
        ("rollout.stop=\t- a", ["rollout.stop=", "indent with spaces"]),
        # paths
        ("data.train=~no-such-user-here/x", ["data.train='~no-such-user-here/x'", "no such user's home"]),
        ("trainer.output_dir={file}/below/it", ["trainer.output_dir=", "is below the file", "name a folder"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key_and_a_remedy(override: str, parts: list[str], tmp_path: Path):
    (tmp_path / "file").touch()
    message = refusal(override.replace("{file}", str(tmp_path / "file")))
    for part in parts:
        assert part in message
    assert "_MISSING_TYPE" not in message


def test_commands_that_compare_no_responses_accept_the_likeliest_token_alone():
    overrides = ["rollout.top_k=1"]
    assert load_config("tiny_sort", overrides, unread=UNUSED).rollout.top_k == 1
    assert load_config("tiny_sort", overrides, used=supervised_settings).rollout.top_k == 1


PATHS = (
    "model.path=", "model.tokenizer=", "model.chat_template=", "model.lora.adapter=", "data.train=", "data.validation=",
    "trainer.output_dir=", "trainer.resume=", "reward.functions.0.name=",
)  # fmt: skip


@pytest.mark.parametrize("setting", PATHS)
def test_a_name_that_no_file_can_have_is_refused(setting: str, tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    assert "File name too long; name another file or folder" in refusal(setting + LONG)
    assert "Too many levels of symbolic links" in refusal(f"{setting}{tmp_path}/loop")


def test_an_index_goes_into_the_default_where_the_recipe_has_no_list():
    assert load("optim.betas.0=0.8").optim.betas == [0.8, 0.999]
    assert load().optim.betas == [0.9, 0.999]


def test_text_is_taken_as_it_is_written():
    written = {"007": "007", "1.10": "1.10", "no": "no", "1:30": "1:30", "2024-01-01": "2024-01-01", "null": None}
    for text, value in written.items():
        assert load(f"data.system_prompt={text}").data.system_prompt == value
        assert load(f"rollout.stop=[a{text}, {text}]").rollout.stop[1] == value if value else True
    options = load(
        "rollout.engine=vllm", "rollout.engine_kwargs={a: no, b: 1_000, c: 010, on: 2e3}"
    ).rollout.engine_kwargs
    assert options == {"a": False, "b": 1000, "c": "010", "on": 2000.0}


def test_an_interpolation_may_name_any_setting_or_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HWGRPO_TEST_N", "12")
    config = load(
        "rollout.n=${oc.env:HWGRPO_TEST_N}", "trainer.prompts_per_step=${rollout.n}", "data.max_rows=${rollout.top_k}",
        "data.system_prompt=n is ${rollout.n}", "rollout.stop=['\\${x}']",
    )  # fmt: skip
    assert (config.rollout.n, config.trainer.prompts_per_step, config.data.max_rows) == (12, 12, 0)
    assert (config.data.system_prompt, config.rollout.stop) == ("n is 12", ["${x}"])


@pytest.mark.parametrize("text", ["${x}", "\\${x}", "a\\b ${", "???x", "yes", "0o17", "1e5", " ", "é🦥", "a: b", "- a"])
def test_the_printed_configuration_gives_back_any_text(text: str, tmp_path: Path):
    config = load()
    config.data.system_prompt, config.rollout.stop = text, [text]
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "printed.yaml") == config


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["model.path is required"]),
        (b"- a\n- b\n", ["mapping of sections"]),
        (b"just text", ["mapping of sections"]),
        (b"rollout: {n: \xff}\n", ["not UTF-8 text (byte 13)"]),
        (b"rollout:\n\tn: 4\n", ["line 2", "indent with spaces"]),
        (b"rollout: {n: 4}\nrollout: {n: 5}\n", ["the key 'rollout' is there twice (line 2"]),
        (b"rollout: {n: 4, n: 5}\n", ["the key 'n' is there twice"]),
        (b"model.path: a\nmodel: {path: b}\n", ["the key 'path' is there twice (line 2"]),
        (b"model: {lora: {rank: 4}, lora.rank: 8}\n", ["the key 'rank' is there twice (line 1"]),
        (b"rollout.n: 4\nrollout: 5\n", ["the key 'rollout' is there twice (line 2"]),
        (b"model.pth: a\n", ["unknown key model.pth. Did you mean model.path?"]),
        (b"model." + b"a." * 60 + b"b: 1\n", ["unknown key", "The sections are: model"]),
        (b"? [a, b]\n: 1\n", ["a key must be a name"]),
        (b"1: 2\n", ["unknown key 1"]),
        (b"model: null\n", ["model=null must be a mapping with the keys: path"]),
        (b"rollout: {engine_kwargs: {a: " + b"[" * 60 + b"]" * 60 + b"}}", ["more than 50 levels deep"]),
        (
            b"x: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + b"".join(
                b"x%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 9)
            ),
            ["anchors make more than 100000 values"],
        ),
        (b"# " + b"x" * 2**20 + b"\nrollout: {n: 4}\n", ["larger than 1048576 bytes"]),
        (b"actor_rollout_ref:\n  rollout: {n: 5}\n", ["actor_rollout_ref.rollout.n: that is rollout.n here"]),
    ],
)  # fmt: skip
def test_a_recipe_that_is_none_is_refused(content: bytes, parts: list[str], tmp_path: Path):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "r.yaml")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm=dapo", "algorithm.preset=dapo"),
        ("algorithm.kl=0.01", "algorithm.kl.coef=0.01"),
        ("algorithm.filter_groups=true", "algorithm.filter_groups.enable=true"),
        ("reward=gsm8k", "reward.functions=[gsm8k]"),
        ("model=/path", "model.path=/path"),
        ("model.lora=16", "model.lora.rank=16"),
        ("model.lora=runs/a/final", "model.lora.adapter=runs/a/final"),
        ("rollout=vllm", "rollout.engine=vllm"),
        ("rollout=8", "rollout.n=8"),
        ("data=train.jsonl", "data.train=train.jsonl"),
        ("trainer=fsdp2", "trainer.strategy=fsdp2"),
        ("optim=2.0e-6", "optim.lr=2e-06"),
        ("backend=npu", "backend.name=npu"),
        ("observe=wandb", "observe.loggers=[wandb]"),
        ("observe=[wandb, console]", "observe.loggers=[wandb,console]"),
        ("data=[a.jsonl, b.jsonl]", "data.train=[a.jsonl,b.jsonl]"),
        ("data=a b.jsonl", "'data.train=a b.jsonl'"),
        ("data=$D/a&b.jsonl", "'data.train=$D/a&b.jsonl'"),
        ("data=['a,b.jsonl']", """'data.train=["a,b.jsonl"]'"""),
        ("reward=[math]", "reward.functions=[math]"),
        ("reward=own.py:reward", "reward.functions=[own.py:reward]"),
    ],
)
def test_a_value_in_place_of_a_section_is_an_error_with_the_setting_that_is_meant(
    override: str, meant: str, tmp_path: Path
):
    expected = f"must be a mapping; did you mean {meant}? Its keys are: "
    assert expected in refusal(override)
    key, _, value = override.partition("=")
    lines = [each.replace("=", ": ", 1) for each in BASE if each.partition(".")[0] != key]
    (tmp_path / "r.yaml").write_text("\n".join([*lines, f"{key}: {value}"]))
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "r.yaml")
    assert expected in str(error.value)


@pytest.mark.parametrize("override", ["algorithm=grpo2", "rollout=vlm", "rollout=-5", "reward=[[math]]", "data=[]"])
def test_a_value_that_no_setting_of_the_section_allows_gets_no_suggestion(override: str):
    assert "must be a mapping with the keys: " in refusal(override)


def test_anchors_and_merge_keys_are_read(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "model: {path: 'builtin://tiny'}\ndata: {train: 'task://sort?digits=2'}\n"
        "reward:\n  functions:\n  - &one {name: exact_match, weight: 2}\n  - {<<: *one, name: length}\n"
    )
    functions = load_config(tmp_path / "r.yaml").reward.functions
    assert [(f.name, f.weight) for f in functions] == [("exact_match", 2.0), ("length", 2.0)]


def test_dotted_keys_of_a_recipe_are_sections(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "model.path: owner/name\nmodel: {lora.rank: 4, lora: {alpha: 8}}\nmodel.revision: 007\n"
        "data.train: 'task://sort?digits=2'\nrollout: {engine: vllm}\nrollout.engine_kwargs: {a.b: 1}\n"
        "reward.functions: [exact_match]\n"
        "data.chat_template_kwargs.thinking: true\n"
    )
    config = load_config(tmp_path / "r.yaml")
    assert (config.model.path, config.model.lora.rank, config.model.lora.alpha) == ("owner/name", 4, 8.0)
    assert config.model.revision == "007"
    assert config.data.chat_template_kwargs == {"thinking": True}
    assert config.rollout.engine_kwargs == {"a.b": 1}


def test_a_recipe_is_found_under_either_suffix_and_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert find_recipe("tiny_sort.yml").name == "tiny_sort.yaml"
    assert find_recipe("configs/tiny_sort.yml").name == "tiny_sort.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").touch()
    (tmp_path / "other.yaml").touch()
    assert (find_recipe("mine.yaml"), find_recipe("other.yml")) == (Path("mine.yml"), Path("other.yaml"))
    for name, part in ((".", "that is a folder"), (LONG, "File name too long"), ("a\0b", "is not a file name")):
        with pytest.raises(ConfigError, match=part):
            find_recipe(name)


def test_the_largest_seed_is_one_that_every_generator_accepts():
    config = load(f"trainer.seed={LARGEST_SEED}")
    rewards = Rewards(total=torch.zeros(2, dtype=torch.float64), valid=torch.ones(2, dtype=torch.bool), per_function={})
    shuffle_rewards(rewards, config.trainer.seed, step=2**31 - 1, rank=99_999)
    torch.Generator().manual_seed(_rank_seed(config.trainer, rank=99_999, step=2**31 - 1))
    assert TinySpec(seed=LARGEST_SEED).seed == LARGEST_SEED
    with pytest.raises(ConfigError, match="at most 4294967295"):
        TinySpec(seed=LARGEST_SEED + 1)


def test_a_shown_value_is_cut_and_never_fails():
    assert shown("x" * 200) == "'" + "x" * 119 + "... (202 characters)"
    assert shown(10**5000) == "int of more than 4300 digits"
    assert [shown(True), shown(None), shown("a")] == ["true", "null", "'a'"]


def test_a_recipe_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "r.yaml").touch()

    def refused(self, *_):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ConfigError, match=r"r\.yaml: the recipe cannot be read: Permission denied"):
        load_config(tmp_path / "r.yaml")

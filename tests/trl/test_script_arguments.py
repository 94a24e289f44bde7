"""What scripts of TRL import beside the trainer."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.trl import (
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from hwgrpo.trl.peft_settings import lora_settings, quantize_setting
from tests.trl.write_fields import FILE


def test_the_fields_and_defaults_are_trls():
    lines = [line.split(" ", 2) for line in FILE.read_text().splitlines()]
    for ours, name in ((ModelConfig, "ModelConfig"), (ScriptArguments, "GRPOScriptArguments")):
        trls = {key: json.loads(text) for kind, key, text in lines if kind == name}
        own = {field.name: field.default for field in dataclasses.fields(ours)}
        assert own == {key: trls[key] for key in own}
        assert trls.keys() - own.keys() <= {"reward_funcs", "reward_model_name_or_path"}


def test_a_file_and_arguments_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_VARIABLE", "before")
    file = tmp_path / "c.yaml"
    file.write_text(
        "learning_rate: 1e-5\nnum_generations: 4\ndataset_name: d\nuse_peft: true\nenv: {A_VARIABLE: after}\n"
    )
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    script, args, model = parser.parse_args_and_config(["--config", str(file), "--num_generations", "8"])
    assert (script.dataset_name, args.learning_rate, args.num_generations, model.use_peft) == ("d", 1e-5, 8, True)
    assert os.environ["A_VARIABLE"] == "after"
    file.write_text("nothing: 1\n")
    with pytest.raises(ConfigError, match=r"unknown keys nothing"):
        parser.parse_args_and_config(["--config", str(file)])
    *_, rest = parser.parse_args_and_config(
        ["--config", str(file), "--other", "2"], return_remaining_strings=True, fail_with_unknown_args=False
    )
    assert rest == ["--nothing", "1", "--other", "2"]
    *_, of_file, of_line = parser.parse_args_and_config(
        ["--config", str(file), "--other", "2"], return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, of_line) == (["--nothing", "1"], ["--other", "2"])
    with pytest.raises(ValueError, match="--other"):  # an unknown key of the file may be left out, no argument
        parser.parse_args_and_config(["--config", str(file), "--other", "2"], fail_with_unknown_args=False)


def test_the_parser_reads_older_names_as_the_config_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "c.yaml"
    file.write_text(
        "torch_dtype: bfloat16\nwarmup_ratio: 0.1\noverwrite_output_dir: true\nevaluation_strategy: steps\n"
    )
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))  # pyright: ignore[reportArgumentType]
    _, args, model = parser.parse_args_and_config(["--config", str(file), "--kl_coef", "0.2", "--max-new-tokens=9"])
    assert (model.dtype, args.warmup_steps, args.eval_strategy) == ("bfloat16", 0.1, "steps")
    assert (args.beta, args.max_completion_length) == (0.2, 9)
    noted = capsys.readouterr().err
    for text in ("torch_dtype=", "warmup_ratio=0.1", "overwrite_output_dir=true has no meaning here", "--kl_coef: "):
        assert text in noted
    _, _, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(["--torch_dtype", "auto"])  # pyright: ignore[reportArgumentType]
    assert model.dtype == "auto"
    file.write_text("torch_dtype: bfloat16\ndtype: auto\n")
    with pytest.raises(ConfigError, match=r"torch_dtype and dtype are one argument"):
        TrlParser(ModelConfig).parse_args_and_config(["--config", str(file)])  # pyright: ignore[reportArgumentType]


def test_a_script_reads_attributes_of_older_trl():
    parser = TrlParser((ModelConfig, GRPOConfig))  # pyright: ignore[reportArgumentType]
    model, _ = parser.parse_args_and_config(["--dtype", "bfloat16", "--trust_remote_code"])
    assert (model.torch_dtype, model.trust_remote_code) == ("bfloat16", True)
    assert ModelConfig().trust_remote_code is False


def test_the_helpers_give_what_the_trainer_reads():
    assert (get_peft_config(ModelConfig()), get_quantization_config(ModelConfig())) == (None, None)
    config = ModelConfig(use_peft=True, lora_target_modules=["all-linear"], load_in_4bit=True)
    settings = lora_settings(get_peft_config(config), None)
    assert settings["model.lora.rank"] == 16
    assert settings["model.lora.target_modules"] == ["all-linear"]
    assert quantize_setting(get_quantization_config(config), adapters=True) == {"model.quantize": "nf4"}
    assert get_kbit_device_map() is None

"""What scripts of TRL import beside the trainer: ScriptArguments, ModelConfig, TrlParser and their helpers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import BitsAndBytesConfig, HfArgumentParser

from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.tables.trl_names import TRL
from hwgrpo.trl.grpo_config import GRPOConfig, argument, note


@dataclass
class ScriptArguments:
    """The dataset of a script."""

    dataset_name: str | None = argument("dataset_name", None)
    dataset_config: str | None = argument("dataset_config", None)
    dataset_train_split: str = argument("dataset_train_split", "train")
    dataset_test_split: str = argument("dataset_test_split", "test")
    dataset_streaming: bool = argument("dataset_streaming", False)
    ignore_bias_buffers: bool = argument("ignore_bias_buffers", False)


@dataclass
class ModelConfig:
    """The model of a script, its adapters and its quantization."""

    model_name_or_path: str | None = argument("model_name_or_path", None)
    model_revision: str = argument("model_revision", "main")
    dtype: str | None = argument("dtype", "float32")
    attn_implementation: str | None = argument("attn_implementation", None)
    use_peft: bool = argument("use_peft", False)
    lora_r: int = argument("lora_r", 16)
    lora_alpha: int = argument("lora_alpha", 32)
    lora_dropout: float = argument("lora_dropout", 0.05)
    lora_target_modules: list[str] | None = argument("lora_target_modules", None)
    lora_target_parameters: list[str] | None = argument("lora_target_parameters", None)
    lora_modules_to_save: list[str] | None = argument("lora_modules_to_save", None)
    lora_task_type: str = argument("lora_task_type", "CAUSAL_LM")
    use_rslora: bool = argument("use_rslora", False)
    use_dora: bool = argument("use_dora", False)
    load_in_8bit: bool = argument("load_in_8bit", False)
    load_in_4bit: bool = argument("load_in_4bit", False)
    bnb_4bit_quant_type: str = argument("bnb_4bit_quant_type", "nf4")
    use_bnb_nested_quant: bool = argument("use_bnb_nested_quant", False)
    bnb_4bit_quant_storage: str | None = argument("bnb_4bit_quant_storage", None)

    trust_remote_code: ClassVar[bool] = False
    """An attribute of older TRL; GRPOConfig has the argument, and `TrlParser` copies it."""

    @property
    def torch_dtype(self) -> str | None:
        """Return `dtype`, under its name in older TRL."""
        return self.dtype


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return the LoraConfig of a script's arguments; None without use_peft."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    targets = model_args.lora_target_modules
    return LoraConfig(
        task_type=model_args.lora_task_type,  # pyright: ignore[reportArgumentType]
        r=model_args.lora_r,
        target_modules=targets[0] if targets is not None and len(targets) == 1 else targets,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        target_parameters=model_args.lora_target_parameters,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the quantization of a script's arguments; None without load_in_4bit and load_in_8bit."""
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=model_args.bnb_4bit_quant_type)
    return BitsAndBytesConfig(load_in_8bit=True) if model_args.load_in_8bit else None


def get_kbit_device_map() -> None:
    """Return None: the trainer places the model."""
    return


class TrlParser(HfArgumentParser):
    """HfArgumentParser that also reads a YAML file, `--config FILE`, which command-line arguments override.

    Older names and those that only tutorials use are read with a notice, as by `GRPOConfig`.
    """

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return an object of each dataclass, and with `return_remaining_strings` what was not read.

        Args:
            args: command-line arguments; None: those of the process.
            return_remaining_strings: whether to return unknown keys of the file and unknown arguments.
            fail_with_unknown_args: whether unknown keys of the file that are not returned are an error.
            separate_remaining_strings: whether to return those of the file and the arguments as two lists.

        Raises:
            ConfigError: the file cannot be read, or has unknown keys.
            ValueError: unknown arguments.
        """
        listed = [self._current(each) for each in (sys.argv[1:] if args is None else args)]
        remaining: list[str] = []
        if "--config" in listed:
            place = listed.index("--config")
            file = listed[place + 1] if place + 1 < len(listed) else ""
            del listed[place : place + 2]
            remaining = self._read(file, fail=fail_with_unknown_args and not return_remaining_strings)
        result = self.parse_args_into_dataclasses(
            listed, return_remaining_strings=return_remaining_strings, look_for_args_file=False
        )
        configs = [each for each in result if isinstance(each, GRPOConfig)]
        for each in result:
            if isinstance(each, ModelConfig) and configs:
                each.trust_remote_code = configs[0].trust_remote_code  # type: ignore[misc]
        if not return_remaining_strings:
            return tuple(result)
        *made, rest = result
        return (*made, remaining, rest) if separate_remaining_strings else (*made, [*remaining, *rest])

    def _read(self, file: str, *, fail: bool) -> list[str]:
        """Set the values of a file as defaults; return its unknown keys as arguments."""
        try:
            values = read_yaml(Path(file).read_text(encoding="utf-8"), file, None) or {}
        except OSError as error:
            raise ConfigError(f"--config {file} cannot be read: {error}") from error
        os.environ.update({name: str(value) for name, value in (values.pop("env", None) or {}).items()})
        known = {action.dest: action for action in self._actions}
        values = self._renamed(values, file)
        unknown = [name for name in values if name not in known]
        if unknown and fail:
            raise ConfigError(f"--config {file}: unknown keys {', '.join(unknown)}")
        for name in values.keys() & known.keys():
            known[name].required = False
        self.set_defaults(**{name: value for name, value in values.items() if name in known})
        return [text for name in unknown for text in (f"--{name}", str(values[name]))]

    def _renamed(self, values: Mapping[str, Any], file: str) -> dict[str, Any]:
        """Return the values of a file under the names of the arguments; those without meaning here are dropped.

        Raises:
            ConfigError: a value is given by two names.
        """
        known, result = {action.dest for action in self._actions}, {}
        for name, value in values.items():
            key, why = TRL.current_name(name)
            row = TRL.row_of(key)
            if name in known or (key not in known and (row is None or row.kind != "ignored")):
                result[name] = value
            elif key not in known:
                assert row is not None
                note(f"--config {file}: {name}={shown(value)} has no meaning here: {row.note}")
            elif key in values:
                raise ConfigError(f"--config {file}: {name} and {key} are one argument; leave one of them out")
            else:
                result[key] = value
                note(f"--config {file}: {name}={shown(value)}: {why} {key}")
        return result

    def _current(self, text: str) -> str:
        """Return an argument of the command line, `--name` or `--name=value`, under the name that there is."""
        name, equals, value = text.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        key, why = TRL.current_name(name)
        known = {action.dest for action in self._actions}
        if not text.startswith("--") or not why or name in known or key not in known:
            return text
        note(f"--{name}: {why} {key}")
        return f"--{key}{equals}{value}"

"""Run one program written for TRL, with a tiny model and a few rows in place of those of the hub.

`scripts/run_trl_scripts.py` calls `run` in a process of its own. These are replaced in it:

    datasets.load_dataset          rows with the columns of the data set, of `ROWS`; a slice of a split is all of it
    GRPOConfig                     max_steps: 2 updates; at most 8 tokens a completion; no vLLM; no logger
    a login and a push             nothing is sent to the hub
    attn_implementation            an implementation that is not installed: the model's default
    torch.cuda.get_device_properties  of the CPU where there is no CUDA device
    GRPOTrainer of an excerpt      the model, the rows and the reward that a page leaves out
    trl.SFTConfig                  TrainingArguments, which is what open-r1 reads of it
    packages that are not here     stand-ins without meaning; unsloth's loads the model and adds the adapter by PEFT

result.json has the updates and the loss of `train()`, the exception that ended the program, and what was replaced.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import datasets
import huggingface_hub
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

import hwgrpo.trl  # before torch
from hwgrpo.errors import RewardError
from hwgrpo.trl import GRPOConfig, GRPOTrainer

UPDATES = 2
TOKENS = 8
_ROW_COUNT = 128
_TEXT = {"problem": "What is 1 + {n}?", "solution": "${m}$", "answer": "{m}", "question": "What is 1 + {n}?"}
_IMAGES = "lmms-lab/multimodal-open-r1-8k-verified"
"""Data set with a column of images."""
ROWS: dict[str, Mapping[str, Any]] = {
    "AI-MO/NuminaMath-TIR": {**_TEXT, "messages": [{"role": "user", "content": "What is 1 + {n}?"}]},
    _IMAGES: {**_TEXT, "original_question": "What is 1 + {n}?", "original_answer": "{m}"},
    "openai/gsm8k": {"question": "What is 1 + {n}?", "answer": "It is {m}.\n#### {m}"},
    "mlabonne/smoltldr": {"prompt": "Story {n}", "completion": "Short {n}"},
    "HuggingFaceH4/OpenR1-Math-220k-default-verified": {"prompt": "What is 1 + {n}?", "solution": "${m}$"},
    "open-r1/OpenR1-Math-220k": {**_TEXT, "messages": [{"role": "user", "content": "What is 1 + {n}?"}]},
    "open-r1/codeforces": {"prompt": "Print {m}.", "accepted_solutions": ["{m}"]},
    "open-r1/verifiable-coding-problems-python": {
        **_TEXT,
        "problem_statement": "Print {m}.",
        "verification_info": {"language": "python", "test_cases": [{"input": "", "output": "{m}"}]},
    },
}
"""Data set of the hub -> its row `n`; every other has the columns of `_OTHER`."""
_OTHER = {**_TEXT, "prompt": [{"role": "user", "content": "What is 1 + {n}?"}]}
_NO_STAND_IN = {"vllm", "torch_npu", "deepspeed"}
"""Packages that hwgrpo looks for itself."""


def filled(value: Any, number: int) -> Any:
    """Return a value of `ROWS` for row `number`."""
    if isinstance(value, str):
        return value.replace("{n}", str(number)).replace("{m}", str(number + 1))
    if isinstance(value, list):
        return [filled(each, number) for each in value]
    return {key: filled(each, number) for key, each in value.items()}


class Result:
    """What became of a program; `write` keeps it."""

    def __init__(self, file: Path) -> None:
        self.file, self.values = file, {"changed": [], "updates": None, "loss": None, "error": None, "refused": False}
        self.stand_ins: list[str] = []

    def changed(self, text: str) -> None:
        """Note what was replaced, once."""
        if text not in self.values["changed"]:
            self.values["changed"].append(text)

    def write(self, **values: Any) -> None:
        """Add values, and write the file."""
        self.values |= {"stand_ins": self.stand_ins, **values}
        self.file.write_text(json.dumps(self.values), encoding="utf-8")


def replace_datasets(result: Result) -> None:
    """Give `datasets.load_dataset` rows that are made here."""
    read_files = datasets.load_dataset

    def load_dataset(path: str, name: Any = None, *, split: Any = None, streaming: bool = False, **more: Any) -> Any:
        if path in ("json", "csv", "parquet", "text") or Path(path).exists():
            return read_files(path, name, split=split, streaming=streaming, **more)
        result.changed("rows")
        row = ROWS.get(path, _OTHER)
        added = {"image": Image.new("RGB", (8, 8))} if path == _IMAGES else {}
        rows = datasets.Dataset.from_list([{**filled(row, number), **added} for number in range(_ROW_COUNT)])
        given: Any = rows.to_iterable_dataset() if streaming else rows
        kind: Any = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
        if split is None:
            return kind(train=given, test=given)
        return [given for _ in split] if isinstance(split, list) else given

    datasets.load_dataset = load_dataset


def replace_arguments(result: Result) -> None:
    """Let GRPOConfig and its subclasses ask for two updates, short completions, no vLLM and no logger."""
    check = GRPOConfig.__post_init__

    def short(self: Any) -> None:
        for name, value in (("use_vllm", False), ("report_to", "none")):
            if getattr(self, name) not in (value, None, [], ["none"]):
                result.changed(f"`{name}`")
                setattr(self, name, value)
        self.max_completion_length = min(self.max_completion_length or TOKENS, TOKENS)
        self.max_steps, self.push_to_hub = UPDATES, False
        check(self)
        per_step = self.settings().batches().updates_per_step
        self.max_steps = -(-UPDATES // per_step) * per_step

    GRPOConfig.__post_init__ = short


def watch_training(result: Result) -> None:
    """Keep the updates and the loss of `train()`."""
    train = GRPOTrainer.train

    @functools.wraps(train)
    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        output = train(self, *arguments, **options)
        result.write(updates=output.global_step, loss=output.training_loss)
        return output

    GRPOTrainer.train = watched


def complete_trainer(result: Result) -> None:
    """Give GRPOTrainer the model, the rows and the reward that a program leaves out."""
    make = GRPOTrainer.__init__
    rows = [filled({"prompt": "What is 1 + {n}?", "solution": "${m}$"}, number) for number in range(_ROW_COUNT)]
    defaults = {"model": "org/tiny", "train_dataset": rows, "reward_funcs": _length}

    @functools.wraps(make)
    def completed(self: Any, *arguments: Any, **options: Any) -> None:
        added = {name: value for name, value in defaults.items() if name not in options}
        for name in added:
            result.changed(f"`{name}`")
        make(self, *arguments, **added, **options)

    GRPOTrainer.__init__ = completed


def _length(completions: Iterable[Any], **_: Any) -> list[float]:
    return [float(len(str(each))) for each in completions]


def replace_hub(result: Result) -> None:
    """Leave out logins and pushes, and attention that is not installed."""
    for name in ("login", "notebook_login"):
        setattr(huggingface_hub, name, lambda *_, **__: None)
    for kind in (PreTrainedModel, PreTrainedTokenizerBase):
        setattr(kind, "push_to_hub", lambda *_, **__: None)  # noqa: B010
    load = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*arguments: Any, **options: Any) -> Any:
        asked = str(options.get("attn_implementation") or "")
        if asked.startswith("flash") and importlib.util.find_spec("flash_attn") is None:
            del options["attn_implementation"]
            result.changed("`attn_implementation`")
        return load(*arguments, **options)

    AutoModelForCausalLM.from_pretrained = from_pretrained
    if not torch.cuda.is_available():
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(name="CPU", total_memory=2**30)


class StandIn(ModuleType):
    """A package that is not here: each of its names is a class of objects without meaning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (MagicMock,), {})
        setattr(self, name, made)
        return made


class FastLanguageModel:
    """unsloth's class, with transformers and PEFT in its place."""

    @staticmethod
    def from_pretrained(model_name: str, **_: Any) -> tuple[Any, Any]:
        """Return a model and its tokenizer."""
        from transformers import AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model: Any, r: int, target_modules: list[str], lora_alpha: int, **_: Any) -> Any:
        """Return the model with an adapter."""
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=r, target_modules=target_modules, lora_alpha=lora_alpha))


def imported_names(text: str) -> set[str]:
    """Return the modules that a program imports, with their packages."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {".".join(name.split(".")[: end + 1]) for name in names for end in range(name.count(".") + 1)}


def add_stand_ins(files: Iterable[Path], result: Result) -> None:
    """Make packages that programs import and that are not here."""
    for name in sorted({name for file in files for name in imported_names(file.read_text(encoding="utf-8"))}):
        package = name.partition(".")[0]
        if package in _NO_STAND_IN or (package not in result.stand_ins and importlib.util.find_spec(package)):
            continue
        module = StandIn(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        if name == "unsloth":
            vars(module)["FastLanguageModel"] = FastLanguageModel
        sys.modules[name] = module
        if package not in result.stand_ins:
            result.stand_ins.append(package)


def add_other_trainers(files: Iterable[Path], result: Result) -> None:
    """Give open-r1's module of arguments the SFTConfig that it derives one from."""
    if any("trl.SFTConfig" in file.read_text(encoding="utf-8") for file in files):
        setattr(hwgrpo.trl, "SFTConfig", TrainingArguments)  # noqa: B010
        result.stand_ins.append("trl.SFTConfig")


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is one of hwgrpo's for users; a RewardError is the program's own."""
    return type(error).__module__.startswith("hwgrpo") and not isinstance(error, RewardError)


def run(folder: str, arguments: Sequence[str], is_excerpt: bool) -> None:
    """Run `program.py` of a folder in this process; its output goes to output.txt, what became of it to result.json.

    Args:
        folder: has the program and its files, and becomes the working directory.
        arguments: of the program.
        is_excerpt: whether it leaves a model, rows or a reward to the reader.
    """
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    result, files = Result(Path("result.json").absolute()), sorted(Path(folder).rglob("*.py"))
    sys.path.insert(0, folder)
    sys.argv = ["program.py", *arguments]
    try:
        replace_datasets(result)
        replace_arguments(result)
        replace_hub(result)
        watch_training(result)
        if is_excerpt:
            complete_trainer(result)
        add_stand_ins(files, result)
        add_other_trainers(files, result)
        runpy.run_path("program.py", run_name="__main__")
        result.write()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        result.write(error=f"{type(error).__name__}: {text}", refused=is_refusal(error))

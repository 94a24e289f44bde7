"""GRPOTrainer's arguments, refusals and methods, and GRPOConfig as a dataclass."""

import copy
import dataclasses
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    HfArgumentParser,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)

from hwgrpo.errors import ConfigError, DataError, RewardError
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.rewards.functions import wait_for
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from hwgrpo.trl.peft_settings import lora_settings, quantize_setting
from hwgrpo.trl.reward_callables import RewardCallables
from hwgrpo.trl.trl_datasets import SPECIAL_TOKENS, longest_prompt
from hwgrpo.trl.trl_errors import in_trl_names
from hwgrpo.trl.trl_metrics import LogWindow, named, named_validation
from tests.support.models.reward_models import character_tokenizer, save_reward_model
from tests.trl.small_trainer import SMALL, reward

ROWS = [{"prompt": f"say {i}"} for i in range(4)]


def trainer(**changed: Any) -> GRPOTrainer:
    arguments = {
        "model": "model",
        "reward_funcs": reward,
        "args": GRPOConfig("out", **SMALL),
        "train_dataset": Dataset.from_list(ROWS),
    }
    return GRPOTrainer(**(arguments | changed))


TUTORIALS: list[dict[str, Any]] = [
    {
        "output_dir": "one",
        "num_generations": 4,
        "temperature": 0.7,
        "kl_coef": 0.05,
        "max_new_tokens": 256,
        "max_prompt_length": 512,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "bf16": True,
    },
    {
        "num_generations": 6,
        "temperature": 0.8,
        "kl_coef": 0.05,
        "max_new_tokens": 300,
        "learning_rate": 5e-7,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True,
        "bf16": True,
        "logging_steps": 10,
    },
    {
        "num_generations": 8,
        "temperature": 0.9,
        "max_new_tokens": 512,
        "kl_coef": 0.03,
        "learning_rate": 1e-6,
        "num_train_epochs": 5,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True,
        "bf16": True,
    },
]
"""The configurations of a tutorial, as they are written there."""


@pytest.mark.parametrize("number", range(3))
def test_a_tutorials_configuration_runs(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    arguments: dict[str, Any] = TUTORIALS[number]
    if number == 1:  # 16 completions are no whole groups of 6
        with pytest.raises(ValueError, match=r"use num_generations=8, or gradient_accumulation_steps=18"):
            GRPOConfig(**arguments)
        arguments = arguments | {"gradient_accumulation_steps": 18}
    args = GRPOConfig(**arguments)
    noted = capsys.readouterr().err
    assert "kl_coef=" in noted
    assert "read as beta" in noted
    assert (args.beta, args.max_completion_length) == (arguments["kl_coef"], arguments["max_new_tokens"])
    args.max_completion_length = 4  # on a random model that rarely stops; everything else as written
    rows = [{"query": "1+1=", "ground_truth": "2"}] * 3

    def reward_fn(prompts: list[str], responses: list[str]) -> list[float]:
        assert len(prompts) == len(responses)
        return [float(len(each)) for each in responses]

    run = GRPOTrainer(
        model="model",
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_function=reward_fn,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    noted = capsys.readouterr().err
    for text in ("reward_function", "column query", "responses"):
        assert text in noted
    assert run.train().global_step == arguments["num_train_epochs"]  # one step of 2 or 3 prompts an epoch
    assert run.settings["algorithm.kl.coef"] == arguments["kl_coef"]
    assert run.settings["rollout.temperature"] == arguments["temperature"]
    assert run.settings.get("rollout.n", 8) == arguments["num_generations"]


def test_hf_argument_parser_parses_the_config():
    parser = HfArgumentParser(GRPOConfig)  # pyright: ignore[reportArgumentType]
    assert "algorithm.kl.coef" in parser.format_help()
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", "o", "--beta", "0.1", "--report_to", "tensorboard", "--model_init_kwargs", '{"dtype": "auto"}']
    )
    assert isinstance(args, GRPOConfig)
    assert import_trl(args.settings()).settings["algorithm.kl.coef"] == 0.1
    assert args.report_to == ["tensorboard"]


def test_the_config_is_a_dataclass_with_trls_derived_values():
    args = GRPOConfig("o", scale_rewards=False, eval_strategy="steps", lr_scheduler_type="cosine")
    assert isinstance(args, TrainingArguments)
    assert (args.scale_rewards, args.bf16, args.do_eval, args.report_to) == ("none", True, True, [])
    assert GRPOConfig("o", fp16=True).bf16 is False
    assert GRPOConfig().output_dir == "trainer_output"
    assert dataclasses.replace(args, beta=0.2).beta == 0.2
    for other in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert other.to_dict() == args.to_dict()
    assert not hasattr(GRPOConfig("o", overwrite_output_dir=True), "overwrite_output_dir")
    args.beta = 0.3  # set later, it counts
    assert import_trl(args.settings()).settings["algorithm.kl.coef"] == 0.3


@dataclasses.dataclass
class OwnConfig(GRPOConfig):
    system_prompt: str | None = None


def test_a_dataclass_may_extend_the_config():
    args = OwnConfig(output_dir="o", system_prompt="be brief", beta=0.2)
    assert (args.system_prompt, args.given_names()) == ("be brief", ["output_dir", "beta"])
    assert import_trl(args.settings()).settings["algorithm.kl.coef"] == 0.2
    with pytest.raises(ConfigError, match=r"num_generations=4"):
        OwnConfig(output_dir="o", num_generations=3)


def test_a_parsed_default_is_not_given():
    parser = HfArgumentParser(GRPOConfig)  # pyright: ignore[reportArgumentType]
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "o", "--use_vllm", "--epsilon", "0.1"])
    assert args.given_names() == ["output_dir", "use_vllm", "epsilon"]
    capped = GRPOConfig("o", vllm_importance_sampling_cap=2.0)
    assert capped.settings()["vllm_importance_sampling_clip_max"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generaton": 4}, "unknown argument num_generaton: did you mean num_generations?"),
        ({"kl_coef": 0.1, "beta": 0.2}, "are one argument"),
        ({"lr_scheduler_type": "curved"}, "cosine"),
        ({"num_generations": 3}, "num_generations=4"),
        ({"loss_type": "ppo"}, "dapo"),
        *(
            ({name: 0}, f"{name}=0 must be at least 1")
            for name in ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
        ),
        ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1"),
        ({"warmup_steps": None}, "warmup_steps=None must be a number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"beta": None}, "beta=None must be a number"),
        ({"vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 4.0}, "are one argument"),
    ],
)
def test_an_illegal_argument_of_the_config_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        GRPOConfig("o", **arguments)
    assert message in str(error.value)


class CallableProcessor(ProcessorMixin):
    """As that of a vision-language model."""

    def __init__(self) -> None:
        """Do without a tokenizer."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Fail: its first argument is an image."""
        raise AssertionError


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [print]}, "tools[0]: print takes *args"),
    ({"rollout_func": print}, "rollout.workflow"),
    ({"environment_factory": print}, "environment_factory() made null, which has no reset"),
    ({"optimizers": (object(), None)}, "optimizers"),
    ({"reward_funcs": lambda environments, **_: [each.score for each in environments]}, "needs environments"),
    ({"reward_funcs": None}, "reward_funcs is missing"),
    ({"reward_funcs": [reward, 3]}, "reward_funcs[1]=3"),
    ({"reward_funcs": "some/model", "reward_processing_classes": object()}, "reward_processing_classes[0]"),
    ({"train_dataset": None}, "train_dataset is missing"),
    ({"train_dataset": {"train": 1}}, "dataset['train']"),
    ({"model": None}, "model is missing"),
    ({"reward_func": reward}, "did you mean reward_funcs?"),
    ({"args": TrainingArguments("o", use_cpu=True)}, "import it from hwgrpo.trl"),
    ({"callbacks": TrainerCallback()}, "give callbacks=[...]"),
    ({"processing_class": "x"}, "processing_class='x' is no tokenizer"),
    ({"processing_class": CallableProcessor()}, "is a processor without a tokenizer and an image processor"),
    ({"train_dataset": Dataset.from_list(ROWS).to_pandas()}, "datasets.Dataset.from_pandas(train_dataset)"),
    ({"callbacks": [object()]}, "no transformers.TrainerCallback"),
    ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, "peft_config=LoraConfig"),
    ({"args": GRPOConfig("o", **SMALL, repetition_penalty=1.2)}, "the reward repetition"),
    ({"args": GRPOConfig("o", **SMALL, eval_strategy="steps", eval_steps=1)}, "needs eval_dataset"),
    ({"args": GRPOConfig("o", **SMALL, reward_weights=[1.0, 2.0])}, "reward_weights has 2 entries"),
    *(
        ({"args": GRPOConfig("o", **SMALL, **{name: -1})}, f"{name}=-1")
        for name in ("adam_beta1", "adam_beta2", "logging_steps", "ddp_timeout", "beta", "epsilon", "epsilon_high")
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_argument_without_counterpart_is_refused_by_name(arguments: dict[str, Any], message: str, folder: Path):
    with pytest.raises(ConfigError) as error:
        trainer(**arguments)
    assert message in str(error.value)


def test_rows_without_prompts_are_an_error(folder: Path):
    with pytest.raises(DataError, match=r"no column prompt"):
        trainer(train_dataset=Dataset.from_list([{"text": "x"}]))


def test_a_model_in_4_bits_is_refused_with_the_remedy(folder: Path):
    model = AutoModelForCausalLM.from_pretrained("model")
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    setattr(model, "is_loaded_in_4bit", True)  # noqa: B010
    with pytest.raises(ConfigError, match=r"wrapped by LoRA is quantized .* give its name: model="):
        trainer(model=wrapped)


def test_adapters_become_settings():
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=".*q_proj", use_rslora=True)
    settings = lora_settings(config, None)
    assert settings["model.lora.target_modules"] == ["re:.*q_proj"]
    assert (settings["model.lora.rank"], settings["model.lora.alpha"]) == (8, 16.0)
    assert (settings["model.lora.dropout"], settings["model.lora.rslora"]) == (0.1, True)
    assert lora_settings(LoraConfig(target_modules="all-linear"), None)["model.lora.target_modules"] == ["all-linear"]
    assert lora_settings(LoraConfig(), "qwen2")["model.lora.target_modules"] == ["q_proj", "v_proj"]
    refused: list[dict[str, Any]] = [
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}},
        {"init_lora_weights": False},
    ]
    assert lora_settings(LoraConfig(modules_to_save=[], init_lora_weights=True), None)
    for field in refused:
        with pytest.raises(ConfigError, match=next(iter(field))):
            lora_settings(LoraConfig(**field), None)


def test_quantization_becomes_a_setting(capsys: pytest.CaptureFixture[str]):
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert quantize_setting(nf4, adapters=True) == {"model.quantize": "nf4"}
    assert capsys.readouterr().err == ""
    assert quantize_setting(BitsAndBytesConfig(load_in_4bit=True), adapters=True) == {"model.quantize": "nf4"}
    assert "fp4" in capsys.readouterr().err
    assert quantize_setting(BitsAndBytesConfig(load_in_8bit=True), adapters=True) == {"model.quantize": "int8"}
    with pytest.raises(ConfigError, match=r"4 and 8 bits"):
        quantize_setting({"quant_method": "gptq"}, adapters=True)


def test_a_run_is_resumed_and_a_used_folder_is_not_overwritten(folder: Path):
    args = {**SMALL, "max_steps": 2, "save_steps": 1}
    first = trainer(args=GRPOConfig("out", **args), callbacks=[StopAfterOne])
    assert first.train().global_step == 1
    with pytest.raises(ConfigError, match=r"train\(resume_from_checkpoint=True\)"):
        trainer(args=GRPOConfig("out", **args)).train()
    second = trainer(args=GRPOConfig("out", **args))
    assert second.train(resume_from_checkpoint=True).global_step == 2
    assert [entry["step"] for entry in second.state.log_history] == [2, 2]  # nothing was logged at step 1


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_an_iterable_dataset_and_a_sequence_classifier(folder: Path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    save_reward_model(folder / "judge", "decoder", chat=True)
    judge = AutoModelForSequenceClassification.from_pretrained("judge")
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}] * 5
    run = trainer(
        reward_funcs=[judge, reward_of_messages],
        reward_processing_classes=[AutoTokenizer.from_pretrained("judge"), None],
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
    )
    assert len(run.train_dataset) == 1  # one prompt is what max_steps=1 needs
    run.train()
    first = run.state.log_history[0]
    assert first["reward"] == pytest.approx(first["rewards/judge/mean"] + first["rewards/reward_of_messages/mean"])
    endless = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ConfigError, match=r"set max_steps"):
        trainer(args=GRPOConfig("o", **{**SMALL, "max_steps": -1}), train_dataset=endless)


def reward_of_messages(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(each[0]["content"])) for each in completions]


def test_rewards_are_called_as_in_trl():
    state = SimpleNamespace(global_step=7)

    def everything(**given: Any) -> list[float | None]:
        assert {"prompts", "completions", "completion_ids", "trainer_state", "column"} <= {*given}
        assert given["trainer_state"] is state
        given["log_metric"]("extra", 2)
        return torch.tensor([1.0, 2.0])  # type: ignore[return-value]

    def some(completions: list[str]) -> list[float | None]:
        return [None, 3.0]

    rewards = RewardCallables([everything, some, lambda completions, **_: [None, None]], None, lambda: state)
    assert [each["as"] for each in rewards.entries] == ["everything", "some", "lambda", "_scored"]
    call = rewards.entries[0]["name"]
    given = {"prompts": 0, "completions": 0, "completion_ids": 0, "trainer_state": 0, "log_metric": 0, "column": 0}
    assert call(**given) == [1.0, 2.0]
    assert rewards.pop_logged() == {"extra": [2.0]}
    rewards.entries[1]["name"](completions=["", ""])
    rewards.entries[2]["name"](completions=["", ""])
    assert rewards.entries[3]["name"](completions=["", ""]) == [0.0, 0.0]
    without = RewardCallables([some, lambda completions: [None, 1.0]], None, lambda: state)
    for entry in without.entries[:2]:
        entry["name"](completions=["", ""])
    assert without.entries[2]["name"](completions=["", ""]) == [None, 0.0]
    twice = RewardCallables([reward, reward], None, lambda: state)
    assert [each["as"] for each in twice.entries] == ["reward", "reward_2", "_scored"]


def test_a_folder_given_to_train_counts_after_the_model_was_looked_at(folder: Path):
    args = {**SMALL, "max_steps": 2, "save_steps": 1}
    trainer(args=GRPOConfig("first", **args), callbacks=[StopAfterOne]).train()
    run = trainer(args=GRPOConfig("out", **args))
    assert run.model is not None
    [checkpoint] = (folder / "first" / "checkpoints").iterdir()
    assert run.train(resume_from_checkpoint=str(checkpoint)).global_step == 2
    assert run.state.log_history[0]["step"] == 2
    again = trainer(args=GRPOConfig("first", **args))
    for use in (lambda: again.model, lambda: again.evaluate(ROWS)):
        with pytest.raises(ConfigError, match=r"train\(resume_from_checkpoint=True\)"):
            use()
    assert again.train(resume_from_checkpoint=True).global_step == 2
    finished = trainer(args=GRPOConfig("first", **args)).train(resume_from_checkpoint=True)
    assert (finished.global_step, finished.training_loss) == (2, 0.0)


class StopEpoch(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


def test_an_end_of_an_epoch_is_ignored_with_one_note(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert trainer(args=GRPOConfig("out", **{**SMALL, "max_steps": 2}), callbacks=[StopEpoch]).train().global_step == 2
    assert capsys.readouterr().err.count("should_epoch_stop is ignored") == 1


def test_early_stopping_stops(folder: Path):
    more = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward"}
    run = trainer(
        args=GRPOConfig("out", **{**SMALL, **more}),
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        eval_dataset=ROWS[:1],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )
    assert run.args.greater_is_better is True
    assert run.train().global_step == 2
    assert (run.state.best_metric, run.state.best_global_step) == (1.0, 1)


@pytest.mark.parametrize(
    "method",
    ["compute_loss", "_generate_and_score_completions", "get_train_dataloader", "_generate_single_turn", "_log_metric"],
)
def test_a_subclass_of_methods_that_nothing_calls_is_refused(method: str):
    kind = type("Mine", (GRPOTrainer,), {method: lambda self: None})
    with pytest.raises(ConfigError, match=rf"Mine\.{method} would never be called"):
        kind("model", reward)


def test_a_subclass_of_methods_that_the_script_alone_calls_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]):
    kind = type("Mine", (GRPOTrainer,), {"evaluate": lambda self: {}})
    kind("model", reward, GRPOConfig("out", **SMALL), ROWS)
    notes = capsys.readouterr().err
    assert "note: Mine.evaluate is called by the script alone" in notes
    assert "save_model" not in notes


def test_errors_of_the_engine_name_the_argument():
    assert in_trl_names("rollout.engine='vllm': no; rollout.engine=vllm_server") == (
        "use_vllm=True: no; vllm_mode='server'"
    )
    assert in_trl_names("set model.lora.rank to train adapters; rollout.n=2; backend.name=cpu") == (
        "set peft_config to train adapters; num_generations=2; use_cpu=True"
    )


def test_what_is_set_after_the_constructor_is_refused(folder: Path):
    run = trainer()
    assert (run.num_generations, run.beta) == (4, 0.0)
    run.beta = 0.0
    with pytest.raises(ConfigError, match=r"GRPOTrainer\.beta=0\.5.*beta=0\.0 of args"):
        run.beta = 0.5
    run.args.max_steps = 9
    with pytest.raises(ConfigError, match=r"args\.max_steps=9 was set after GRPOTrainer had read 1"):
        run.train()
    run.args.max_steps, run.train_dataset = 1, ROWS[:1]
    with pytest.raises(ConfigError, match=r"train_dataset was replaced"):
        run.train()


def test_a_learning_rate_may_be_text_and_a_checkpoint_that_is_not_there_is_named(folder: Path):
    assert trainer(args=GRPOConfig("out", **SMALL, learning_rate="1e-5")).settings["optim.lr"] == 1e-5
    (folder / "out" / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='out/checkpoint-7' is no folder.*checkpoint-2"):
        trainer().train(resume_from_checkpoint="out/checkpoint-7")


@pytest.mark.parametrize("columns", ["solution, **kwargs", "solution"])
def test_a_missing_column_of_a_reward_fails_at_once(folder: Path, columns: str):
    made: dict[str, Any] = {}
    exec(f"def correct(completions, {columns}): return [0.0] * len(completions)", made)
    with pytest.raises(ConfigError, match=r"correct needs the column 'solution'.*columns: prompt, solutions.*'solut"):
        trainer(reward_funcs=[reward, made["correct"]], train_dataset=[{"prompt": "a", "solutions": "b"}])
    assert trainer(reward_funcs=made["correct"], train_dataset=[{"prompt": "a", "solution": "b"}])


def test_the_tokenizer_of_a_model_made_by_its_name(folder: Path):
    run = trainer(model="builtin://tiny?task=sort&hidden=32&layers=1&steps=30&batch=32&digits=3")
    assert run.processing_class("1 2")["input_ids"]
    assert run.settings["data.max_prompt_tokens"] < 30  # the prompts are measured


def test_the_longest_prompt_as_it_is_rendered():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}"
        + "." * 9
        + "{% endif %}"
    )
    user, assistant = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
    for messages, length in (([user], 4 + 9), ([user, assistant], 4 + 2)):
        assert longest_prompt([[{"prompt": messages}]], tokenizer, {}) == length + SPECIAL_TOKENS


def test_an_open_run_does_not_stop_the_next_one(folder: Path):
    first = trainer(args=GRPOConfig("first", **SMALL))
    assert first.evaluate(ROWS[:1])["eval_reward"] >= 0
    assert first.processing_class is not None
    kept = None
    try:
        trainer(args=GRPOConfig("second", **SMALL), callbacks=[Raises]).train()
    except ValueError as error:
        kept = error
    assert kept is not None
    third = trainer(args=GRPOConfig("third", **SMALL))
    assert third.train().global_step == 1
    third.close()


class Raises(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise ValueError("of a callback")


def test_evaluate_samples_as_many_responses_as_the_arguments_say(folder: Path):
    counts: list[int] = []

    def counting(completions: list[str], **_: Any) -> list[float]:
        counts.append(len(completions))
        return [0.0] * len(completions)

    run = trainer(args=GRPOConfig("out", **SMALL, num_generations_eval=7, max_prompt_length=64), reward_funcs=counting)
    assert run.processing_class is not None
    run.evaluate(ROWS[:1])
    run.close()
    assert sum(counts) == 7 + 1  # and a greedy one


def test_a_row_without_text_is_named(folder: Path):
    with pytest.raises(DataError, match=r"row 1 of the dataset has prompt=None"):
        trainer(train_dataset=[{"prompt": "a"}, {"prompt": None}])


class Judges:
    async def method(self, completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None]

    def together(self, completions: list[str], **_: Any) -> tuple[float | None, ...]:
        return (1.0, None)

    def lazily(self, completions: list[str], **_: Any) -> Any:
        return (value for value in (1.0, None))

    def one(self, solution_str: str) -> float | None:
        return 1.0 if solution_str == "a" else None


@pytest.mark.parametrize("kind", ["method", "partial", "tuple", "generator", "verl", "lambda"])
def test_the_scores_of_every_kind_of_function_are_counted(kind: str):
    judges = Judges()
    functions: dict[str, Any] = {
        "method": judges.method,
        "partial": functools.partial(judges.method, column=1),
        "tuple": judges.together,
        "generator": judges.lazily,
        "verl": judges.one,
        "lambda": lambda completions, **_: judges.method(completions),
    }

    def second_only(completions: list[str]) -> list[float | None]:
        return [None, None]

    rewards = RewardCallables([second_only, functions[kind]], None, lambda: None)
    calls = [each["name"] for each in rewards.entries]
    for _ in range(2):  # a step leaves nothing to the next
        calls[0](completions=["a", "b"])
        if kind == "verl":
            assert [calls[1](solution_str=each) for each in "ab"] == [1.0, None]
        else:
            assert wait_for(calls[1](completions=["a", "b"])) == [1.0, None]
        assert calls[2](completions=["a", "b"]) == [0.0, None]


def test_the_remedy_of_a_failing_function_is_one_of_a_script(folder: Path):
    def failing(completions: list[str], **_: Any) -> list[float]:
        raise ValueError("no server")

    with pytest.raises(
        RewardError, match=r"ValueError: no server at .*; mend it; a reward of None leaves a response out$"
    ):
        trainer(reward_funcs=failing).train()


def test_a_decorated_function_needs_no_column(folder: Path):
    def decorated(*args: Any, **kwargs: Any) -> list[float]:
        return reward(*args, **kwargs)

    run = trainer(reward_funcs=decorated)
    run.train()
    assert run.state.log_history[0]["rewards/decorated/mean"] > 0


def test_a_function_may_be_named_scored(folder: Path):
    def scored(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    run = trainer(reward_funcs=[scored, reward])
    run.train()
    assert run.state.log_history[0]["rewards/scored/mean"] == 1.0


def test_methods_of_scripts(folder: Path):
    run = trainer()
    assert run.accelerator.is_main_process
    run.log({"mine": 1.0})
    assert run.state.log_history == [{"mine": 1.0, "epoch": 0, "step": 0}]
    out = run.train()
    run.save_state()
    run.log_metrics("train", out.metrics)
    run.save_metrics("train", out.metrics)
    assert {"trainer_state.json", "train_results.json"} <= {each.name for each in (folder / "out").iterdir()}
    with pytest.raises(AttributeError, match=r"hyperparameter_search of TRL has no counterpart"):
        run.hyperparameter_search()
    with pytest.raises(ConfigError, match=r"give eval_dataset"):
        run.evaluate()


def test_metrics_of_a_window_and_of_validations():
    window = LogWindow()
    window.add({"loss": 1.0, "learning_rate": 3.0, "kl": float("nan")})
    window.add({"loss": 2.0, "learning_rate": 4.0})
    assert window.take() == {"loss": 1.5, "learning_rate": 4.0}
    assert window.take() == {}
    values = {"val-core/a/reward/mean@2": 1.0, "val-core/b/reward/mean@2": 3.0, "val-core/a/reward/greedy": 5.0}
    assert named_validation(values, {}, by_name=False) == {
        "eval_reward": 2.0,
        "eval_reward_greedy": 5.0,
        "eval_a_reward": 1.0,
        "eval_b_reward": 3.0,
    }
    one = {"val-core/a/reward/greedy": 5.0, "val-aux/a/rewards/reward_model/mean": 4.0}
    means = {"eval_reward": 5.0, "eval_reward_greedy": 5.0, "eval_rewards/judge/mean": 4.0}
    assert named_validation(one, {"reward_model": "judge"}, by_name=False) == means
    of_a = {name.replace("eval_", "eval_a_"): value for name, value in means.items()}
    assert named_validation(one, {"reward_model": "judge"}, by_name=True) == means | of_a


def test_clip_ratios_have_trls_names_and_are_0_on_policy(folder: Path):
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    run = trainer()
    run.train()
    assert [run.state.log_history[0][name] for name in names] == [0.0] * 3
    of_step = {"actor/pg_loss": 1.0, **{name: 0.1 * i for i, name in enumerate(names, 1)}}
    assert named(of_step, {}, "gspo") == {"policy_loss": 1.0, **{name: of_step[name] for name in names}}
    assert named({"actor/pg_loss": 1.0}, {}, "vespo") == {"policy_loss": 1.0}
    assert named({"actor/pg_loss": 1.0}, {}, "cispo") == {"policy_loss": 1.0, "cispo_clip_ratio": 0.0}
    assert named({"reward": 1.0}, {}, "ppo_clip") == {"reward": 1.0}  # a step without an update


def test_evaluations_have_the_names_of_datasets_and_functions(folder: Path):
    def shorter(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(each)) for each in completions]

    args = GRPOConfig("out", **SMALL, eval_strategy="steps", eval_steps=1, num_generations_eval=2)
    run = trainer(args=args, reward_funcs=[reward, shorter], eval_dataset={"math": ROWS[:1]})
    run.train()
    [logged] = [entry for entry in run.state.log_history if "eval_reward" in entry]
    for values in (logged, run.evaluate(), run.evaluate({"math": ROWS[:2]})):
        assert values["eval_math_reward"] == values["eval_reward"] == 0
        assert values["eval_rewards/reward/mean"] == values["eval_math_rewards/reward/mean"] > 0
        assert values["eval_rewards/shorter/mean"] == -values["eval_rewards/reward/mean"]
        assert not any("scored" in name for name in values)
    plain = run.evaluate(ROWS[:1], metric_key_prefix="test")
    assert {"test_reward", "test_rewards/shorter/mean"} <= {*plain}
    assert not any("math" in name or "eval" in name for name in plain)

"""Prompts, reward functions, a model and a tokenizer given to `hwgrpo.Trainer` as objects."""

import functools
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo import Config, Trainer
from hwgrpo.cli.main import main
from hwgrpo.data.tasks import parse_task
from hwgrpo.errors import CheckpointError, ConfigError, DataError
from hwgrpo.models.builtin import resolve
from tests.support.runs.dense_reward import share_right
from tests.support.runs.runs import SMALL, metrics

MODEL = next(each.removeprefix("model.path=") for each in SMALL if each.startswith("model.path="))
OF_VALIDATION = ("data.validation_max_rows", "trainer.validation_n")
OWN = ("data.train", "model.path", "reward.functions", "trainer.max_steps", *OF_VALIDATION)
ROWS = [dict(row) for row in parse_task("task://sort?digits=3").splits["train"][:40]]


def settings(output: Path, *more: str, without: tuple[str, ...] = (), steps: int = 2) -> list[str]:
    """Return the settings of a small run without those that objects take the place of."""
    defaults = {
        "data.train": "task://sort?digits=3",
        "model.path": MODEL,
        "reward.functions": f"['{Path(share_right.__code__.co_filename)}:share_right']",
    }
    kept = [each for each in SMALL if each.partition("=")[0] not in OWN]
    kept += [f"{key}={value}" for key, value in defaults.items() if key not in without]
    where = ("backend.name=cpu", f"trainer.output_dir={output}", f"trainer.max_steps={steps}")
    if "data.train" not in without or any("data.validation=" in each for each in more):
        more = ("trainer.validate_at_start=false", *more)
    return [*kept, *where, *more]


def trained(output: Path, *more: str, without: tuple[str, ...] = (), steps: int = 2, **objects) -> Trainer:
    trainer = Trainer({}, [*settings(output, *more, without=without, steps=steps)], **objects)
    assert trainer.train() == "completed"
    return trainer


def weights(output: Path) -> bytes:
    return (output / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a file of prompts and a file of rewards."""
    folder = tmp_path_factory.mktemp("files")
    datasets.Dataset.from_list(ROWS).to_json(folder / "train.jsonl")
    more = (f"data.train={folder}/train.jsonl", f"data.validation={folder}/train.jsonl", "data.validation_max_rows=4")
    trained(folder / "run", *more, without=("data.train",))
    return folder / "run"


class Indexed:
    """A sequence without a base class, as torch's map-style datasets are."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int):
        return ROWS[index]


KINDS = {
    "a list": lambda: ROWS,
    "a tuple": lambda: tuple(ROWS),
    "a dataset": lambda: datasets.Dataset.from_list(ROWS),
    "a dataset of tensors": lambda: datasets.Dataset.from_list(ROWS).with_format("torch"),
    "an indexed object": Indexed,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_memory_train_as_those_of_a_file(kind: str, files: Path, tmp_path: Path):
    objects = {"train_data": KINDS[kind](), "validation_data": KINDS[kind](), "rewards": share_right}
    more = ("data.validation_max_rows=4", "trainer.validate_at_start=false")
    trained(tmp_path, *more, without=("data.train", "reward.functions"), **objects)
    renamed = [
        {name.replace("train.jsonl", "validation"): value for name, value in line.items()} for line in metrics(files)
    ]
    assert metrics(tmp_path) == renamed
    assert weights(tmp_path) == weights(files)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (iter(ROWS), r"data.train: a builtins list_iterator is no sequence of rows.* give a datasets.Dataset, a list"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "IterableDataset is no sequence of rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), r"\(train\), not rows; give one split"),
        (datasets.Dataset.from_list(ROWS).to_pandas(), r"has columns; give its rows: to_dict\('records'\)"),
        ([], "data.train: a builtins list has no rows"),
        ("train.jsonl", "data.train: a builtins str is no sequence of rows"),
        ([ROWS[0], "sort 1:"], r"object://train, row 1: a row must be a mapping .* this is 'sort 1:'"),
        ([{"question": "sort 1:"}], r"object://train: no column 'prompt' \(data.prompt_key\); there are: question"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_the_constructor(rows, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        Trainer({}, settings(tmp_path, without=("data.train",)), train_data=rows)


def test_other_rows_are_noticed_when_a_run_resumes(tmp_path: Path, capsys):
    trained(tmp_path, "observe.progress=plain", without=("data.train",), train_data=ROWS)
    others = [*ROWS[:-1], {**ROWS[-1], "prompt": "sort 999:"}]
    with pytest.raises(ConfigError, match=r"data.train='object://train' has changed since the checkpoint: 40 rows"):
        Trainer({}, settings(tmp_path, without=("data.train",)), train_data=others).train()
    capsys.readouterr()
    trained(tmp_path, "observe.progress=plain", without=("data.train",), train_data=others, steps=3)
    assert "data.train='object://train' has changed" in " ".join(capsys.readouterr().out.split())


def short(completions, limit=100, **_):
    return [float(len(text) <= limit) for text in completions]


async def patient(solution_str, ground_truth):
    return float(solution_str == ground_truth)


class Scorer:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, solution_str, ground_truth):
        return self.value

    def method(self, solution_str, ground_truth):
        return 2 * self.value


class Counter:
    """A reward with state: a class, which the run makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch, completions):
        self.calls += 1
        return [float(self.calls)] * len(completions)


FORMS = {
    "short": short,
    "patient": patient,
    "Scorer": Scorer(0.5),
    "method": Scorer(0.25).method,
    "Counter": Counter,
}


def test_reward_functions_of_every_form_are_called_and_weighed(tmp_path: Path):
    partial = functools.partial(share_right, extra_info=None)
    entry = {"name": short, "weight": 3, "kwargs": {"limit": -1}}
    rewards = [*FORMS.values(), partial, entry, "exact_match"]
    trainer = Trainer(
        {},
        settings(tmp_path, without=("reward.functions",), steps=2),
        rewards=rewards,
        reward_weights=[1, 1, 1, 2, 0.5, 1, 3, 4],
    )
    names = [*FORMS, "share_right", "short_2", "exact_match"]
    for step in trainer:
        means = [step.metrics[f"rewards/{name}/mean"] for name in names]
        assert means[0] == 1.0, "short"
        assert means[2:5] == [0.5, 0.5, float(step.step)], "the object, its method, the class"
        assert means[6] == 0.0, "with its own arguments"
        assert means[1] == means[7], "the async function compares as exact_match does"
        total = sum(mean * weight for mean, weight in zip(means, [1, 1, 1, 2, 0.5, 1, 3, 4], strict=True))
        assert step.metrics["reward"] == pytest.approx(total, abs=1e-12)
        assert set(step.completions[0]["rewards"]) == set(names)


def test_a_mapping_names_the_functions(tmp_path: Path):
    rewards = {"right": lambda solution_str, ground_truth: 1.0, "length": short}
    trainer = Trainer({}, settings(tmp_path, without=("reward.functions",), steps=1), rewards=rewards)
    [step] = trainer
    assert set(step.completions[0]["rewards"]) == {"right", "length"}


def wrong(text):
    return 0.0


def named(name: str):
    def function(solution_str):
        return 0.0

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (lambda solution_str: 0.0, r"rewards\[0\] is a lambda, which has no name; give it one by a mapping"),
        ([named("a"), named("a")], "two functions have the name 'a'; name them by a mapping"),
        ({"a b": short}, "the name 'a b' is used in metrics"),
        ([3], r"rewards\[0\]=3 is neither a function nor a name"),
        ([], "reward.functions is empty"),
        ("no_such", "reward.functions.0.name='no_such' is not known"),
        (wrong, r"reward.functions\[0\]: wrong has none of the accepted signatures; its parameters are: text"),
        (math.hypot, "hypot has no signature that Python can read"),
        ({"name": short, "timeout": 3}, "rewards.1.=3 is neither"),
        ([{"name": short, "timeout": 3}], r"timeout=3.0: short is a Python object, .* name it path/to/file.py:short"),
        ([{"name": short, "workers": 2}], r"reward.functions\[0\].workers=2: short is a Python object"),
        ([{"name": short, "wieght": 2}], "unknown key reward.functions.0.wieght"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused_by_the_constructor(rewards, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        Trainer({}, settings(tmp_path, without=("reward.functions",)), rewards=rewards)


def test_weights_are_one_for_each_function(tmp_path: Path):
    with pytest.raises(ConfigError, match="reward_weights has 2 weights for 1 functions; give one each"):
        Trainer({}, settings(tmp_path, without=("reward.functions",)), rewards=short, reward_weights=[1, 2])


def ones(solution_str, ground_truth):
    return 1.0


def twos(solution_str, ground_truth):
    return 2.0


def test_the_code_of_a_function_is_kept_and_compared(tmp_path: Path, capsys):
    without = ("reward.functions",)
    trained(tmp_path, without=without, rewards={"score": functools.partial(ones)}, steps=1)
    [copy] = (tmp_path / "code").iterdir()
    assert copy.name.endswith("-score.py")
    assert copy.read_text() == "def ones(solution_str, ground_truth):\n    return 1.0\n"
    capsys.readouterr()
    trained(tmp_path, "observe.progress=plain", without=without, rewards={"score": twos}, steps=2)
    assert "reward.functions.0.name has changed since the checkpoint" in " ".join(capsys.readouterr().out.split())


def test_an_override_of_what_is_given_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data.train='task://sort\?digits=3' is set, and an object is given, too"):
        Trainer({}, settings(tmp_path), train_data=ROWS)


def test_the_command_says_that_a_run_was_given_objects(tmp_path: Path, capsys):
    trained(tmp_path, without=("data.train", "reward.functions"), train_data=ROWS, rewards=share_right)
    assert main(["train", f"{tmp_path}/config.yaml"]) == 2
    assert "is a Python object, and none of that name was given to hwgrpo.Trainer" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "exported")]) == 0
    files = ["data.validation=task://sort?digits=3", "data.validation_max_rows=4", "reward.functions=[exact_match]"]
    assert main(["eval", str(tmp_path)]) == 2
    assert "reward.functions.0.name='object://share_right' is a Python object" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), *files, "backend.name=cpu", "--n", "1"]) == 0, "it reads no training prompts"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0


@pytest.fixture(scope="module")
def model_and_tokenizer():
    folder = resolve(MODEL)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def fresh() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve(MODEL))


def test_a_model_object_trains_as_its_files_and_gets_the_weights(files: Path, tmp_path: Path, capsys):
    model = fresh()
    data = f"data.train={files.parent}/train.jsonl"
    more = (data, f"data.validation={files.parent}/train.jsonl", "data.validation_max_rows=4", "observe.progress=plain")
    without = ("model.path", "data.train")
    trainer = trained(tmp_path / "run", *more, without=without, model=model)
    assert weights(tmp_path / "run") == weights(files)
    assert metrics(tmp_path / "run") == metrics(files)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    [folder] = (tmp_path / "run" / "objects").glob("model-*")
    assert f"was written to {folder}" in "".join(capsys.readouterr().out.splitlines()).replace("  ", " ")
    # the same object resumes; a changed one is another model
    later = Trainer({}, settings(tmp_path / "run", *more, without=without, steps=3), model=fresh())
    assert [step.step for step in later] == [3]
    with pytest.raises(CheckpointError, match=r"model.path=.*model-.*but .* was saved with"):
        Trainer({}, settings(tmp_path / "run", *more, without=without, steps=4), model=model).train()
    assert [*(tmp_path / "run" / "objects").glob("model-*")] == [folder], "what a failed start wrote is removed"


def test_with_lora_the_given_model_stays_as_it_is(tmp_path: Path):
    model = fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained(tmp_path, "model.lora.rank=2", without=("model.path",), model=model, steps=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_given_tokenizer_takes_the_place_of_the_models_own(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(resolve(MODEL))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    trainer = trained(tmp_path, without=("model.path",), model=fresh(), tokenizer=tokenizer, steps=1)
    assert trainer.tokenizer.chat_template == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == tokenizer.chat_template


def test_a_model_in_bfloat16_keeps_its_dtype(tmp_path: Path):
    model = fresh().to(torch.bfloat16)
    trainer = trained(tmp_path, without=("model.path",), model=model, steps=1)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(torch.bfloat16)), name


def classifier():
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    return Qwen3ForSequenceClassification(
        Qwen3Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    )


def adapted():
    import peft

    return peft.get_peft_model(fresh(), peft.LoraConfig(target_modules=["q_proj"]))


def quantized():
    model = fresh()
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (classifier, "Qwen3ForSequenceClassification is not a causal language model"),
        (adapted, r"has adapters already: give the base model and set model.lora.rank"),
        (quantized, "is quantized: give the unquantized model, and set model.quantize"),
        (lambda: torch.nn.Linear(1, 1), "model=Linear is no transformers PreTrainedModel"),
        (lambda: fresh().to("meta"), "has no weights for model.embed_tokens.weight, which is on the meta device"),
    ],
)
def test_models_that_cannot_be_used_are_refused_by_the_constructor(make, message: str, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(resolve(MODEL))
    with pytest.raises(ConfigError, match=message):
        Trainer({}, settings(tmp_path, without=("model.path",)), model=make(), tokenizer=tokenizer)


def test_a_model_without_a_name_needs_a_tokenizer(tmp_path: Path):
    model = fresh()
    model.config._name_or_path = model.name_or_path = ""
    with pytest.raises(ConfigError, match="does not say where its tokenizer is; give tokenizer=, too"):
        Trainer({}, settings(tmp_path, without=("model.path",)), model=model)


def test_a_failed_start_leaves_no_folder(tmp_path: Path):
    trainer = Trainer(
        {}, settings(tmp_path / "run", "data.max_prompt_tokens=1", without=("model.path",)), model=fresh()
    )
    with pytest.raises(DataError, match="longer than"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_settings_of_a_recipe_that_objects_leave_unused_are_noted(tmp_path: Path, capsys):
    Trainer(Config.load(None, settings(tmp_path)), train_data=ROWS)
    assert "hwgrpo: note: trainer.validate_at_start=false has no effect" in capsys.readouterr().err


def test_a_partly_frozen_model_is_refused_without_adapters(tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(resolve(MODEL))
    next(model.parameters()).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(resolve(MODEL))
    with pytest.raises(ConfigError, match=r"requires_grad=False on .* model.lora.rank .*requires_grad_\(True\)"):
        Trainer({}, settings(tmp_path, without=("model.path",)), model=model, tokenizer=tokenizer)

"""Published datasets that `hwgrpo data` converts: source, columns, instruction and reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hwgrpo.data import raw_rows
from hwgrpo.data.formats import Row
from hwgrpo.data.raw_rows import Example, column_of


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How rows become rows of verl's schema."""

    title: str
    columns: tuple[str, ...]
    """Columns that every file must have; `a|b` is either."""
    example: Callable[[Row], Example]
    """Row -> example; raises DataError for one that cannot be converted."""
    data_source: str
    """What rows carry as `data_source`: verl chooses its scorer by it."""
    reward: str | None
    """The reward that scores it; None where rows have no ground truth."""
    ability: str
    instruction: str = ""
    """Text after every question, so that a response has its answer where the reward expects it."""
    separator: str = "\n\n"
    """Text between question and instruction."""

    def missing(self, columns: Sequence[str] | Mapping[str, object]) -> str | None:
        """Return the first required column that is not there, or None."""
        return next((names for names in self.columns if column_of(columns, names) is None), None)


@dataclass(frozen=True, kw_only=True)
class Published(Conversion):
    """A dataset on the hub, and its conversion."""

    hub: str
    """Its name on the hub."""
    files: tuple[str, ...]
    """Files to download by hand."""
    subset: str | None = None
    """The hub's subset; None is its default one."""
    revision: str | None = None
    """The hub's branch; None is its default one."""
    folders: tuple[str, ...] = ()
    """Folders of this subset in a copy with several subsets."""
    other_versions: tuple[str, ...] = ()
    """Parts of file names that mark other versions of the same rows."""
    splits: tuple[str, ...] = ("train", "test")
    """Splits with answers; a file that names none is of the first."""

    @property
    def page(self) -> str:
        """Web page of the dataset."""
        return f"https://huggingface.co/datasets/{self.hub}"


STEP_BY_STEP = "Let's think step by step"
THINK_AND_BOX = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
"""verl's instruction for Geometry3K."""
LETTER = f'{STEP_BY_STEP} and end with "The answer is (X)", where X is the letter of the right option.'
PROGRAM = "Write the full program, with the imports and helper functions that it needs, in one ```python block."
PARQUET_BRANCH = "refs/convert/parquet"
"""Branch with the hub's own conversion of a dataset that is published as a script, which `datasets` 4 does not run."""

PUBLISHED = {
    "gsm8k": Published(
        title="GSM8K",
        hub="openai/gsm8k",
        data_source="openai/gsm8k",
        subset="main",
        folders=("main",),
        other_versions=("socratic",),
        files=("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        columns=("question", "answer"),
        example=raw_rows.gsm8k,
        instruction=f'{STEP_BY_STEP} and output the final answer after "####".',
        separator=" ",
        reward="gsm8k",
        ability="math",
    ),
    "math": Published(
        title="MATH",
        hub="DigitalLearningGmbH/MATH-lighteval",
        data_source="DigitalLearningGmbH/MATH-lighteval",
        folders=("data", "default"),
        files=("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        columns=("problem", "solution"),
        example=raw_rows.math,
        instruction=f"{STEP_BY_STEP} and output the final answer within \\boxed{{}}.",
        separator=" ",
        reward="math",
        ability="math",
    ),
    "dapo_math": Published(
        title="DAPO-Math-17k",
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        data_source="math_dapo",
        files=("data/dapo-math-17k.parquet",),
        splits=("train",),
        columns=("prompt", "reward_model"),  # the prompts have their instruction
        example=raw_rows.own_columns("prompt", "reward_model.ground_truth"),
        reward="math",
        ability="math",
    ),
    "dapo_math_processed": Published(
        title="DAPO-Math-17k, processed",
        hub="open-r1/DAPO-Math-17k-Processed",
        data_source="math_dapo",
        subset="all",
        folders=("all",),
        files=("all/train-00000-of-00001.parquet",),
        splits=("train",),
        columns=("prompt", "solution"),
        example=raw_rows.short_solution,
        instruction='Solve the problem step by step, and end with a line "Answer: " followed by the answer alone.',
        reward="math",
        ability="math",
    ),
    "hh_rlhf": Published(
        title="HH-RLHF",
        hub="Anthropic/hh-rlhf",
        data_source="Anthropic/hh-rlhf",
        folders=("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"),
        files=("helpful-base/train.jsonl.gz", "helpful-base/test.jsonl.gz"),
        columns=("chosen", "rejected"),
        example=raw_rows.preference,
        reward=None,
        ability="alignment",
    ),
    "reclor": Published(
        title="ReClor",
        hub="metaeval/reclor",
        data_source="metaeval/reclor",
        revision=PARQUET_BRANCH,
        folders=("default",),
        files=("default/train/0000.parquet", "default/validation/0000.parquet"),
        splits=("train", "validation"),
        columns=("context", "question", "answers|options", "label"),
        example=raw_rows.options,
        instruction=LETTER,
        reward="multiple_choice",
        ability="logic",
    ),
    "logiqa": Published(
        title="LogiQA",
        hub="lucasmccabe/logiqa",
        data_source="lucasmccabe/logiqa",
        revision=PARQUET_BRANCH,
        folders=("default",),
        files=("default/train/0000.parquet", "default/validation/0000.parquet", "default/test/0000.parquet"),
        splits=("train", "validation", "test"),
        columns=("context", "query|question", "options|answers", "correct_option|label"),
        example=raw_rows.options,
        instruction=LETTER,
        reward="multiple_choice",
        ability="logic",
    ),
    "trivia_qa": Published(
        title="TriviaQA",
        hub="mandarjoshi/trivia_qa",
        data_source="mandarjoshi/trivia_qa",
        subset="rc.nocontext",
        folders=("rc.nocontext",),
        files=("rc.nocontext/train-00000-of-00001.parquet", "rc.nocontext/validation-00000-of-00001.parquet"),
        splits=("train", "validation"),
        columns=("question", "answer", "question_id|question_source"),
        example=raw_rows.accepted_answers,
        instruction="Answer in a few words, within <answer> and </answer>.",
        reward="question_f1",
        ability="questions",
    ),
    "humaneval": Published(
        title="HumanEval",
        hub="openai/openai_humaneval",
        data_source="openai/openai_humaneval",
        folders=("openai_humaneval",),
        files=("openai_humaneval/test-00000-of-00001.parquet",),
        splits=("test",),
        columns=("prompt", "test", "entry_point"),
        example=raw_rows.function_to_complete,
        instruction=f"Complete this function. {PROGRAM}",
        reward="code",
        ability="code",
    ),
    "mbpp": Published(
        title="MBPP",
        hub="google-research-datasets/mbpp",
        data_source="google-research-datasets/mbpp",
        subset="full",
        folders=("full",),
        other_versions=("sanitized",),
        files=tuple(f"full/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")),
        splits=("train", "validation", "test"),
        columns=("text|prompt", "test_list"),
        example=raw_rows.function_with_asserts,
        instruction=PROGRAM,
        reward="code",
        ability="code",
    ),
    "geo3k": Published(
        title="Geometry3K",
        hub="hiyouga/geometry3k",
        data_source="hiyouga/geometry3k",
        folders=("data", "default"),
        files=tuple(f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")),
        splits=("train", "validation", "test"),
        columns=("problem", "answer", "images"),
        example=raw_rows.geo3k,
        instruction=THINK_AND_BOX,
        separator=" ",
        reward="geo3k",
        ability="math",
    ),
}
"""Name in `hwgrpo data` -> dataset."""


def published_with(columns: tuple[str, ...]) -> str | None:
    """Return the name of the published dataset that has these columns, the most of them, or None."""
    if "reward_model" in columns:  # verl's schema, to which many have been converted
        return None
    found = [name for name, each in PUBLISHED.items() if each.missing(columns) is None]
    return max(found, key=lambda name: len(PUBLISHED[name].columns), default=None)


def reward_of(data_source: str) -> str | None:
    """Return the built-in reward that scores rows of a published dataset, or None for any other."""
    return next((each.reward for each in PUBLISHED.values() if each.data_source == data_source), None)

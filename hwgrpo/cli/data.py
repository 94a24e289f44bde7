"""`hwgrpo data`: conversion of published datasets to Parquet, and inspection of data files."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.data.published import PUBLISHED, Published
from hwgrpo.errors import ConfigError
from hwgrpo.support.paths import check_path

if TYPE_CHECKING:
    from hwgrpo.data.inspection import Settings

HELP = "convert published datasets or your files for training, or inspect data files"
INSPECT_HELP = "show a data file as the trainer reads it: columns, lengths, duplicates, bad rows, rewards"
OWN_HELP = "convert files of your own, whose columns you name"
OWN_DESCRIPTION = (
    "Convert files of your own. The split of a file is that in its name, as in train.jsonl and test.jsonl; where it "
    "has none, the split is train."
)
CONVERSION = (
    "The rows get the schema that verl uses: data_source, prompt, ability, reward_model, extra_info. Rows that cannot "
    "be converted are dropped and reported, as are rows that repeat a prompt, and training rows with a prompt of "
    "another split."
)
SCHEMA = "hwgrpo.data.inspect/1"
ROWS_TO_SCORE = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    for name, each in PUBLISHED.items():
        text = _published_help(each)
        published = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {CONVERSION}",
            epilog=parser.epilog,
        )
        published.add_argument(
            "--source",
            metavar="PATH | HUB_NAME",
            help="a file or folder (.parquet, .jsonl, .json, as the hub stores them, or of save_to_disk), or "
            f"owner/name or owner/name:subset of a hub dataset with the same columns (default: {_on_hub(each)})",
        )
        published.add_argument("--out", metavar="FOLDER", help=f"output folder (default data/{name})")
        _add_conversion_arguments(published, "the dataset's own sentence")
    own = actions.add_parser(
        "convert", help=OWN_HELP, description=f"{OWN_DESCRIPTION} {CONVERSION}", epilog=parser.epilog
    )
    own.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .jsonl.gz, .json, .parquet, .csv or .tsv")
    own.add_argument("--prompt-key", default="prompt", metavar="COLUMN", help="text or chat messages (default prompt)")
    own.add_argument(
        "--answer-key",
        metavar="COLUMN",
        help="the ground truth, with dots for a nested one: text, a number, a list of accepted answers, or JSON "
        "(default: the first of the usual columns; '' where rewards need none)",
    )
    own.add_argument(
        "--reward", metavar="NAME", help="the reward that scores the rows, for the settings that are printed"
    )
    own.add_argument("--source-name", metavar="NAME", help="data_source of the rows (default: the file's name)")
    own.add_argument(
        "--validation",
        metavar="N | SHARE",
        help="move so many prompts of train, or such a share, to validation.parquet; a prompt's hash decides which",
    )
    own.add_argument("--out", metavar="FOLDER", help="output folder (default data/ and the file's name)")
    _add_conversion_arguments(own, "none")
    inspect = actions.add_parser(
        "inspect",
        help=INSPECT_HELP,
        description=f"{INSPECT_HELP[0].upper()}{INSPECT_HELP[1:]}. With several files also: prompts in more "
        "than one. The exit code is 1 when rows are bad.",
        epilog=parser.epilog,
    )
    inspect.add_argument(
        "files", nargs="+", metavar="FILE", help=".parquet, .jsonl or .json, or a folder of such files"
    )
    inspect.add_argument(
        "--tokenizer", metavar="FOLDER", help="count tokens too, with this model's or tokenizer's folder"
    )
    inspect.add_argument(
        "--reward",
        action="append",
        metavar="NAME",
        help="try this reward (built in, or path/to/file.py:function); may be repeated. Default: the recipe's, "
        "else the reward of the rows' data_source",
    )
    inspect.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="use data.* and reward.functions of this recipe, and the prompts and tools of its environments",
    )
    inspect.add_argument(
        "--score-rows",
        type=int,
        default=ROWS_TO_SCORE,
        metavar="N",
        help=f"rows of a file to score, spread evenly (default {ROWS_TO_SCORE}; 0 for all)",
    )
    inspect.add_argument("--json", action="store_true", help=f"print JSON (schema {SCHEMA})")


def _published_help(dataset: Published) -> str:
    files = [f"{split}.parquet" for split in dataset.splits]
    return f"convert {dataset.title} into {' and '.join(filter(None, (', '.join(files[:-1]), files[-1])))}"


def _on_hub(dataset: Published) -> str:
    return dataset.hub + (f", subset {dataset.subset}" if dataset.subset else "")


def _add_conversion_arguments(parser: argparse.ArgumentParser, instruction: str) -> None:
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help=f"text appended to every question, e.g. how to mark the answer (default: {instruction}; '' for none)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    parser.add_argument("--strict", action="store_true", help="a row that cannot be converted is an error")
    parser.add_argument("--keep-duplicates", action="store_true", help="keep rows that repeat a prompt")


def run(args: argparse.Namespace) -> int:
    """Convert or inspect; return the exit code."""
    actions = {"inspect": _inspect, "convert": _convert_own}
    return actions.get(args.action, _convert)(args)


def _convert(args: argparse.Namespace) -> int:
    from hwgrpo.cli.data_conversion_text import show_converted
    from hwgrpo.data.convert import convert, output_files, write
    from hwgrpo.data.dataset_files import open_copy

    dataset = PUBLISHED[args.action]
    check_path(args.out, "--out")
    copy = open_copy(dataset, args.source)
    files = output_files(Path(args.out or f"data/{args.action}").expanduser(), copy, args.force)
    converted = convert(dataset, copy, args.instruction, args.strict, args.keep_duplicates)
    write(files, converted)
    show_converted(dataset, copy, files, converted)
    return 0


def _convert_own(args: argparse.Namespace) -> int:
    from hwgrpo.catalog import REWARDS
    from hwgrpo.cli.data_conversion_text import show_converted
    from hwgrpo.data.convert import convert, output_files, write
    from hwgrpo.data.own_files import open_files, own_conversion, split_off, validation_size
    from hwgrpo.user_code import names_a_file

    if args.reward is not None and not names_a_file(args.reward):
        REWARDS.check(args.reward, "--reward")
    size = None if args.validation is None else validation_size(args.validation)
    check_path(args.out, "--out")
    copy = open_files(args.files)
    name = args.source_name or Path(args.files[0]).name.partition(".")[0]
    dataset = own_conversion(name, args.prompt_key, args.answer_key, args.reward, name)
    further = () if size is None else ("validation",)
    out = Path(args.out or f"data/{name.rpartition('/')[2]}").expanduser()
    files = output_files(out, copy, args.force, further)
    converted = convert(dataset, copy, args.instruction, args.strict, args.keep_duplicates)
    if size is not None:
        converted = split_off(converted, size)
    write(files, converted)
    show_converted(dataset, copy, files, converted)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    for name in args.files:
        check_path(name, "FILE")
    check_path(args.tokenizer, "--tokenizer")
    if args.score_rows < 0:
        raise ConfigError(f"--score-rows {args.score_rows}: use 0 or more")
    from hwgrpo.cli.data_inspection_text import show_inspection, to_json
    from hwgrpo.data.inspection import inspect_files

    settings = _settings(args)
    inspection = inspect_files(args.files, settings)
    for reward in settings.rewards or ():
        reward.close()
    if args.json:
        print(to_json(inspection, SCHEMA))
    else:
        show_inspection(inspection)
    return int(any(file.bad for file in inspection.files))


def _settings(args: argparse.Namespace) -> Settings:
    from hwgrpo.config.load import load_config
    from hwgrpo.config.named_files import with_absolute_file
    from hwgrpo.config.schema import DataConfig, ModelConfig, RewardFunctionConfig, RolloutConfig
    from hwgrpo.data.inspection import Settings
    from hwgrpo.rewards.processes.reward_process import open_reward

    config = None if args.recipe is None else load_config(args.recipe)
    wanted = None if args.reward is None else [(RewardFunctionConfig(name), "--reward") for name in args.reward]
    if config is not None and wanted is None:
        entries = enumerate(config.reward.functions)
        wanted = [(each, f"reward.functions[{number}]") for number, each in entries]
    rollout = RolloutConfig() if config is None else config.rollout
    context = {"max_response_tokens": rollout.max_response_tokens}
    rewards = None
    if wanted is not None:
        wanted = [(replace(entry, name=with_absolute_file(entry.name)), key) for entry, key in wanted]
        args.files = [str(Path(name).expanduser().absolute()) for name in args.files]
    tokenizer = None
    if args.tokenizer is not None:
        if not Path(args.tokenizer).expanduser().is_dir():
            raise ConfigError(f"--tokenizer {args.tokenizer}: no such folder")
        from hwgrpo.models.loading import load_tokenizer

        model = ModelConfig(path=args.tokenizer) if config is None else config.model
        model.tokenizer = args.tokenizer
        tokenizer = load_tokenizer(model)
    path = args.tokenizer if config is None else config.model.path
    with_images = _may_read_images(path)
    images = None
    if tokenizer is not None and path is not None and with_images and _config_file(path).is_file():
        from hwgrpo.models.loading import load_image_prompts

        images = load_image_prompts(ModelConfig(path=path) if config is None else config.model, tokenizer)
    if wanted is not None:  # the last, as a reward may change the directory
        folder = os.getcwd()
        rewards = [open_reward(entry, context, key, folder=folder) for entry, key in wanted]
    change = None
    if config is not None:
        from hwgrpo.agents.agent_rows import rows_of_agents

        change = rows_of_agents(config)
    data = DataConfig(train="") if config is None else config.data
    return Settings(data, rewards, tokenizer, args.score_rows, change, with_images, images)


def _may_read_images(path: str | None) -> bool:
    """Return whether a model reads images, or is not known."""
    if path is None:
        return True
    file = _config_file(path)
    if not file.is_file():
        return "://" not in path  # a tokenizer's folder, or a hub name; built-in models read text
    try:
        return "vision_config" in json.loads(file.read_bytes())
    except ValueError:
        return True


def _config_file(path: str) -> Path:
    return Path(path).expanduser() / "config.json"

"""`hwgrpo data` from the shell: conversion, its mistakes, inspection."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2VLConfig

from hwgrpo.cli.main import main
from hwgrpo.data.published import PUBLISHED
from tests.data.conftest import make_tokenizer
from tests.support.models.tiny_image_prompts import image_config, image_processor, image_tokenizer, picture
from tests.support.runs.published_rows import GSM8K, MATH, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))


@pytest.fixture
def copy(tmp_path):
    """A folder with GSM8K's files, one of which has three bad rows."""
    bad = ["{broken", {"question": "Why?", "answer": "no mark"}, {"question": "", "answer": "#### 1"}]
    write_jsonl(tmp_path / "copy" / "train.jsonl", [*GSM8K[:6], *bad])
    write_jsonl(tmp_path / "copy" / "test.jsonl", GSM8K[5:])
    return tmp_path / "copy"


def test_help_of_data_imports_neither_torch_nor_datasets():
    for words in (["--help"], ["gsm8k", "--help"], ["convert", "--help"], ["inspect", "--help"]):
        code = (
            f"import sys; sys.argv = ['hwgrpo', 'data', *{words!r}]\n"
            "from hwgrpo.cli.main import main\n"
            "try: main()\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'datasets', 'transformers', 'pyarrow', 'numpy', 'rich'} & sys.modules.keys()\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": PATHS}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "usage: hwgrpo data" in done.stdout


def test_gsm8k_is_converted_with_counts_reasons_and_a_preview(hwgrpo, copy, tmp_path):
    done = hwgrpo("data", "gsm8k", "--source", "copy")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "train 9 5 3 1 data/gsm8k/train.parquet" in lines
    assert "test 5 5 0 0 data/gsm8k/test.parquet" in lines
    for line, reason in ((7, "not valid JSON"), (8, "no ####"), (9, "'question' is empty")):
        assert any(told.startswith(f"1 {reason}") and told.endswith(f"train.jsonl, line {line}") for told in lines), (
            line
        )
    assert "reward_model.ground_truth 360" in lines
    assert "reward.functions [gsm8k]" in lines
    assert "\033" not in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    table = pyarrow.parquet.read_table(tmp_path / "data/gsm8k/train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.num_rows == 5
    assert any(line.startswith("1 has a prompt of test ") and line.endswith("train.jsonl, line 6") for line in lines)


def test_every_published_dataset_has_a_command_that_names_its_splits(hwgrpo):
    shown = " ".join(hwgrpo("data", "--help").stdout.split())
    for name, dataset in PUBLISHED.items():
        assert f"{name} convert {dataset.title} into {dataset.splits[0]}.parquet" in shown
    assert "train.parquet, validation.parquet and test.parquet" in shown
    assert "default: openai/gsm8k, subset main" in " ".join(hwgrpo("data", "gsm8k", "--help").stdout.split())


def test_a_dataset_of_images_is_converted_and_inspected(hwgrpo, tmp_path):
    rows = [
        {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": picture(8, 8 + number), "path": None}]}
        for number in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    done = hwgrpo("data", "geo3k", "--source", "train.parquet")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "train 3 3 0 0 data/geo3k/train.parquet" in lines
    assert f"images {len(rows[0]['images'][0]['bytes'])} bytes" in lines
    done = hwgrpo("data", "inspect", "data/geo3k/train.parquet")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "data/geo3k/train.parquet: 3 rows, none bad" in lines
    assert "images 1 in 3 prompts; widths 8, heights 8 to 10 pixels" in lines


def test_own_files_are_converted_with_a_validation_split_and_a_preview(hwgrpo, tmp_path):
    rows = [{"q": f"Sort {n}", "a": str(n)} for n in range(10)] + [
        {"q": "Sort  3", "a": "3"},
        {"q": "Sort 4", "a": "5"},
    ]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    words = ("data", "convert", "mine.jsonl", "--prompt-key", "q", "--answer-key", "a", "--reward", "exact_match")
    done = hwgrpo(*words, "--validation", "2", "--instruction", "Digits only.", "--source-name", "me/sorting")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "train 12 8 0 2 data/sorting/train.parquet" in lines
    assert "validation 2 2 0 0 data/sorting/validation.parquet" in lines
    assert "1 repeats an earlier row mine.jsonl, line 11" in lines
    assert any(line.startswith("1 repeats the prompt of an earlier row, with another ground truth") for line in lines)
    for line in (
        "data_source me/sorting",
        "data.validation data/sorting/validation.parquet",
        "reward.functions [exact_match]",
    ):
        assert line in lines
    assert re.search(r"prompt user: Sort \d Digits only\.", "\n".join(lines))
    inspected = hwgrpo("data", "inspect", "data/sorting", "--reward", "exact_match")
    assert inspected.returncode == 0, inspected.stdout
    assert "in both" not in inspected.stdout
    again = hwgrpo(*words, "--source-name", "me/sorting", "--validation", "2")
    assert (again.returncode, "--force writes over" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--reward", "gsm9k"], 2, "Did you mean 'gsm8k'?"),
        (["--validation", "all"], 2, "--validation all: use a number of prompts"),
        (["--validation", "1"], 2, "train has 1 prompts; leave some"),
        (["--prompt-key", "promt"], 1, "Did you mean 'prompt'?"),
        (["--out", "mine.jsonl"], 1, "is a file; name a folder"),
    ],
)
def test_mistakes_in_converting_own_files_are_named_and_write_nothing(words, code, part, hwgrpo, tmp_path):
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "a", "answer": "1"}])
    done = hwgrpo("data", "convert", "mine.jsonl", *words)
    assert done.returncode == code
    assert part in done.stderr
    assert not (tmp_path / "data").exists()


def test_conversion_refuses_to_write_over_files_and_strict_refuses_bad_rows(hwgrpo, copy, tmp_path):
    strict = hwgrpo("data", "gsm8k", "--source", "copy", "--strict", "--out", "here")
    assert (strict.returncode, strict.stdout) == (1, "")
    assert "train.jsonl, line 7: not valid JSON" in strict.stderr
    assert not (tmp_path / "here").exists()
    assert hwgrpo("data", "gsm8k", "--source", "copy/test.jsonl", "--out", "here").returncode == 0
    again = hwgrpo("data", "gsm8k", "--source", "copy/test.jsonl", "--out", "here")
    assert again.returncode == 1
    assert "here/test.parquet exists; --force writes over" in again.stderr
    forced = hwgrpo("data", "gsm8k", "--source", "copy/test.jsonl", "--out", "here", "--force")
    assert forced.returncode == 0
    assert "no train.parquet was written" in forced.stdout


def test_without_a_network_the_remedy_is_named(hwgrpo):
    done = hwgrpo("data", "math", HF_HUB_OFFLINE="1", HF_HOME="empty")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    for part in (
        "hwgrpo: error: 'DigitalLearningGmbH/MATH-lighteval'",
        "train-00000-of-00001.parquet",
        "--source FOLDER",
    ):
        assert part in done.stderr
    typo = hwgrpo("data", "math", "--source", "./missing.parquet")
    assert (typo.returncode, "no such file or folder" in typo.stderr) == (1, True)


def test_math_is_converted_and_inspected_with_its_own_reward(hwgrpo, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", MATH)
    assert hwgrpo("data", "math", "--source", "train.jsonl").returncode == 0
    done = hwgrpo("data", "inspect", "data/math")
    assert done.returncode == 0, done.stderr
    assert "data/math/train.parquet: 10 rows, none bad" in done.stdout
    assert "math: scores 10 of the 10 answers tried" in done.stdout


def test_inspection_shows_overlaps_and_repeats_and_fails_where_rows_are_bad(hwgrpo, copy, tmp_path):
    assert hwgrpo("data", "gsm8k", "--source", "copy", "--keep-duplicates").returncode == 0
    good = hwgrpo("data", "inspect", "data/gsm8k")
    assert good.returncode == 0, good.stderr
    assert "1 prompt is in both data/gsm8k/train.parquet and data/gsm8k/test.parquet" in " ".join(good.stdout.split())
    rows = [{"prompt": "a", "answer": str(n)} for n in range(15)] + [
        {"prompt": "b", "answer": f"none {n}"} for n in "xyz"
    ]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    bad = hwgrpo("data", "inspect", "mine.jsonl", "--reward", "gsm8k")
    assert bad.returncode == 1
    told = " ".join(bad.stdout.split())
    assert "mine.jsonl: 18 rows, 3 bad" in told
    assert "16 rows have the prompt of an earlier row line 2 repeats line 1 line 3 repeats line 1" in told
    assert "and 6 more" in told
    assert "3 e.g. reward gsm8k fails: the ground truth 'none x' contains no" in told
    assert "line 16, line 17, line 18" in told


def test_json_of_an_inspection_has_every_bad_row_under_a_versioned_schema(hwgrpo, tmp_path):
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "é", "answer": "1"}, *["{"] * 30])
    done = hwgrpo("data", "inspect", "mine.jsonl", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["schema"], set(found)) == (
        "hwgrpo.data.inspect/1", {"schema", "files", "overlaps", "max_prompt_tokens", "score_rows"},
    )  # fmt: skip
    (file,) = found["files"]
    assert [bad["index"] for bad in file["bad"]] == list(range(1, 31))
    assert (file["prompts"], file["sources"], file["ground_truths"]) == ({"text": 1}, {"mine.jsonl": 1}, {"answer": 1})
    assert file["characters"] == {"min": 1, "median": 1, "p95": 1, "max": 1}


def test_a_recipe_says_what_columns_and_rewards_are(hwgrpo, tmp_path):
    write_jsonl(tmp_path / "mine.jsonl", [{"q": "1+1", "a": "2"}, {"q": "1+2", "a": "three"}])
    (tmp_path / "mine.yaml").write_text(
        "model: {path: builtin/tiny}\ndata: {train: mine.jsonl, prompt_key: q, ground_truth_key: a}\n"
        "reward: {functions: [{name: gsm8k, kwargs: {method: lenient}}, length]}\n"
    )
    done = hwgrpo("data", "inspect", "mine.jsonl", "--recipe", "mine.yaml")
    assert done.returncode == 1, done.stderr
    assert "gsm8k: scores 1 of the 2 answers tried, fails on 1" in done.stdout
    assert "length: not run" in done.stdout
    without = hwgrpo("data", "inspect", "mine.jsonl")
    assert (without.returncode, "no column 'prompt'" in without.stderr) == (1, True)


def test_a_recipe_with_environments_has_their_prompts_and_tools(hwgrpo, tmp_path):
    (tmp_path / "game.py").write_text(
        "class Game:\n    tools = [{'type': 'function', 'function': {'name': 'look', 'parameters': {}}}]\n"
        "    def reset(self, row):\n        return 'Which number' if row['number'] else None\n"
        "    def step(self, action):\n        return '', 1.0, True\n"
    )
    write_jsonl(tmp_path / "mine.jsonl", [{"number": 1}, {"number": 2}])
    (tmp_path / "mine.yaml").write_text(
        "model: {path: builtin/tiny, chat_template: chat.jinja}\ndata: {train: mine.jsonl}\n"
        "reward: {functions: [length]}\n"
        "rollout: {workflow: environment, agent: {environments: ['game.py:Game']}}\n"
    )
    (tmp_path / "chat.jinja").write_text("{% for t in tools or [] %}one {% endfor %}{{ messages[0].content }}")
    words = Tokenizer(models.WordLevel({"?": 0, "$": 1, "one": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="$")
    tokenizer.save_pretrained(str(tmp_path / "words"))
    done = hwgrpo("data", "inspect", "mine.jsonl", "--recipe", "mine.yaml", "--tokenizer", "words", "--json")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert file["prompts"] == {"messages: user": 2}
    assert file["tokens"] == {"min": 3, "median": 3, "p95": 3, "max": 3}
    write_jsonl(tmp_path / "mine.jsonl", [{"number": 1}, {"number": 0}])
    done = hwgrpo("data", "inspect", "mine.jsonl", "--recipe", "mine.yaml")
    assert done.returncode == 1
    assert "mine.jsonl, line 2" in done.stderr


def test_tokens_are_counted_with_a_tokenizers_folder(hwgrpo, tmp_path):
    words = Tokenizer(models.WordLevel({"?": 0, "$": 1, "one": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="$")
    tokenizer.save_pretrained(str(tmp_path / "words"))
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": text} for text in ("one one", "one", "one two one two one")])
    done = hwgrpo("data", "inspect", "mine.jsonl", "--tokenizer", "words")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["tokens,", "as", "the", "model", "gets", "it", "1", "2", "5", "5"] in lines


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--score-rows", "-1"], "--score-rows -1: use 0 or more"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: no such folder"),
        (["--reward", "gsm9k"], "Did you mean 'gsm8k'?"),
        (["--recipe", "tiny_srot"], "Did you mean tiny_sort?"),
    ],
)
def test_mistakes_in_words_are_named(words, part, hwgrpo, tmp_path):
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    done = hwgrpo("data", "inspect", "mine.jsonl", *words)
    assert done.returncode == 2
    assert part in done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_no_line_is_wider_than_it(width, copy, tmp_path):
    def on_terminal(*words):
        parent, child = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": PATHS, "COLUMNS": str(width), "TERM": "xterm"}
        command = [sys.executable, "-m", "hwgrpo", "data", *words]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=child, stderr=child) as process:
            os.close(child)
            parts = []
            while True:
                try:
                    part = os.read(parent, 65536)
                except OSError:  # Linux's way to say that the other end is closed
                    break
                if not part:
                    break
                parts.append(part)
        os.close(parent)
        text = b"".join(parts).decode()
        assert "\033[" in text
        return process.returncode, re.sub(r"\033\[[0-9;]*m", "", text).replace("\r", "").splitlines()

    code, lines = on_terminal("gsm8k", "--source", "copy")
    assert code == 0
    assert max(map(len, lines)) <= width
    assert any("data/gsm8k/train.parquet" in line for line in lines)
    code, lines = on_terminal("inspect", "data/gsm8k", "copy/../data/gsm8k/train.parquet", "--reward", "exact_match")
    assert code == 0
    assert max(map(len, lines)) <= width


def test_the_folder_of_a_model_decides_whether_images_are_read_and_their_tokens_counted(tmp_path, capsys):
    image_tokenizer(make_tokenizer()).save_pretrained(tmp_path / "model")
    image_processor().save_pretrained(tmp_path / "model")
    tokenizer = image_tokenizer(make_tokenizer())
    seeing = image_config(tokenizer)
    vision = {"spatial_merge_size": seeing.vision_config.spatial_merge_size, "patch_size": 4}
    config = Qwen2VLConfig(image_token_id=seeing.image_token_id, vision_config=vision)
    config.save_pretrained(tmp_path / "model")
    row = {
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": picture(16, 24), "path": None}],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    command = ["data", "inspect", str(tmp_path / "a.parquet"), "--tokenizer", str(tmp_path / "model"), "--json"]
    assert main(command) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    around = len("<user>Find x.\n<assistant>")
    assert (file["tokens"]["max"], file["images"]["per_row"]) == (around + 2 + 6, {"1": 1})
    Qwen2Config().save_pretrained(tmp_path / "model")
    assert main(command) == 1
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert "column 'images' holds images" in file["bad"][0]["reason"]

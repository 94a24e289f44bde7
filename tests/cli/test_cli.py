"""`hwgrpo config`, `--print-config`, `--dry-run`, mistakes, `train` and `eval` from the shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import runs

EIGHT = ["--max-rows", "8"]  # of the 100 of its data
TINY = [word for word in runs.SMALL if not word.startswith(("observe.", "reward."))]


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['hwgrpo', '--help']\n"
        "from hwgrpo.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'omegaconf', 'yaml'} & sys.modules.keys(), 'imported'\n"
    )
    root = Path(__file__).resolve().parents[2]
    path = ":".join(str(root / folder) for folder in (".", "backends", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    for command in ("train", "eval", "config", "detect"):
        assert command in done.stdout


def test_print_config_is_yaml_with_every_section_and_the_override(hwgrpo):
    done = hwgrpo("train", "tiny_sort", "rollout.n=16", "--print-config")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["rollout"]["n"] == 16
    assert set(shown) == {
        "model", "data", "rollout", "reward", "reward_model", "algorithm", "optim", "trainer", "backend", "kernels",
        "observe", "plugins",
    }  # fmt: skip


def test_config_prints_the_settings_asked_for(hwgrpo):
    done = hwgrpo("config", "rollout", "optim.lr")
    assert done.returncode == 0, done.stderr
    assert "rollout.temperature = 1.0" in done.stdout
    assert "optim.lr = 1e-06" in done.stdout
    assert not any(line.startswith("trainer.") for line in done.stdout.splitlines())
    everything = json.loads(hwgrpo("config", "--json").stdout)
    assert len(everything) > 80
    assert all(entry["doc"] for entry in everything)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "tiny_sort", "rollout.temprature=1"], ["rollout.temprature", "Did you mean rollout.temperature?"]),
        (["train", "tiny_srot"], ["tiny_srot", "Did you mean tiny_sort?"]),
        (["config", "rolout"], ["Did you mean rollout?"]),
        (
            ["config", "nonsense"],
            ["no setting 'nonsense'", "The sections are: model, data, rollout, reward,"],
        ),
        (["config", "algorithm.kl.nonsense"], ["algorithm.kl has: coef, estimator,"]),
        (["config", "optim.larningrate"], ["optim has: name, lr, vision_lr, betas,"]),
        (["config", "rollout.temprature"], ["Did you mean rollout.temperature?"]),
        (["eval", "tiny_sort", "--k", "99"], ["--k '99'", "--n 8"]),
        (["eval", "."], ["not the folder of a run"]),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(hwgrpo, words: list[str], parts: list[str]):
    done = hwgrpo(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    for part in parts:
        assert part in done.stderr


def test_a_backend_that_this_host_does_not_have_is_refused_with_the_reason(hwgrpo):
    done = hwgrpo("train", "tiny_sort", "backend.name=npu")  # hw: the word under test
    assert done.returncode == 1
    assert "npu" in done.stderr  # hw: the word under test
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_describes_the_run_and_trains_nothing(hwgrpo, tmp_path: Path):
    done = hwgrpo("train", "tiny_sort", *TINY, "--dry-run", "trainer.output_dir=out", "algorithm.kl.coef=0.1")
    assert done.returncode == 0, done.stderr
    for part in ("backend    cpu", "Qwen3ForCausalLM", "6 steps of 4 prompts x 4 samples", "reference model", "MiB"):
        assert part in done.stdout
    assert not (tmp_path / "out").exists()


def test_dry_run_refuses_a_reward_that_raises_and_says_what_a_right_one_gives(hwgrpo, tmp_path: Path):
    (tmp_path / "broken.py").write_text("def score(solution_str, ground_truth):\n    return ground_truth.missing\n")
    done = hwgrpo("train", "tiny_sort", *TINY, "--dry-run", "reward.functions=[broken.py:score]")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "reward score, task://sort?digits=3, row 0, sample 0" in done.stderr
    assert "AttributeError: 'str' object has no attribute 'missing' at" in done.stderr
    done = hwgrpo("train", "tiny_sort", *TINY, "--dry-run", "reward.functions=[exact_match]")
    assert "rewards    exact_match: 1 for the answer itself, 0 for an empty response\n" in done.stdout


def test_train_then_eval_from_the_shell(hwgrpo, tmp_path: Path):
    done = hwgrpo("train", "tiny_sort", *TINY, "trainer.output_dir=out", "trainer.save_every=3")
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout
    assert "completed: 6 of 6 steps" in done.stdout
    out = tmp_path / "out"
    for name in (
        "config.yaml",
        "environment.json",
        "kernels.json",
        "metrics.jsonl",
        "completions.jsonl",
        "summary.json",
    ):
        assert (out / name).is_file(), name
    assert list((out / "tensorboard").iterdir())
    assert (out / "final/model.safetensors").is_file()
    assert yaml.safe_load((out / "config.yaml").read_text())["trainer"]["max_steps"] == 6

    measured = hwgrpo("eval", "out", *EIGHT, "--n", "4", "--k", "1,2,4", "--json", "--completions", "samples.jsonl")
    assert measured.returncode == 0, measured.stderr
    result = json.loads(measured.stdout)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for kind, count, reward in (("greedy", 8, result["greedy_reward"]), ("sampled", 32, result["mean_reward"])):
        rewards = [sample["reward"] for sample in samples if sample["kind"] == kind]
        assert len(rewards) == count
        assert sum(rewards) / count == pytest.approx(reward)
    assert {"uid", "prompt", "response", "rewards", "length", "finished", "ground_truth", "source"} <= set(samples[0])
    assert (result["prompts"], result["rows"]) == (8, 100)
    assert "validation: 8 of 100 rows are read" in measured.stderr
    assert "8 of 100 rows" in done.stdout
    assert 0 <= result["pass@1"] <= result["pass@2"] <= result["pass@4"] <= 1
    assert result["pass@1"] == pytest.approx(result["mean_reward"])
    summary = json.loads((out / "summary.json").read_text())
    assert "greedy" in json.dumps(summary)
    last = [line for line in runs.metrics(out) if "val-core/task://sort/reward/greedy" in line][-1]
    assert result["greedy_reward"] == pytest.approx(last["val-core/task://sort/reward/greedy"])

    def of_checkpoint(step: int) -> dict:
        done = hwgrpo("eval", f"out/checkpoints/step-{step:08}", *EIGHT, "--n", "4", "--k", "1,2,4", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def content() -> dict[Path, bytes]:
        """Return every file but the lock, which names the process that held the folder last."""
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}

    before = content()
    for words in ([], ["--dry-run"]):
        again = hwgrpo("train", "tiny_sort", *TINY, "trainer.output_dir=out", "trainer.save_every=3", *words)
        assert again.returncode == 0, again.stderr
        assert "out is finished: 6 of 6 steps are done, the model is in out/final. Nothing was trained." in again.stdout
        assert "set trainer.max_steps to more than 6" in again.stdout
        assert words or len(again.stdout.splitlines()) == 2
    assert content() == before

    finished = of_checkpoint(6)
    assert finished.pop("checkpoint") == "out/checkpoints/step-00000006"
    assert finished == {**result, "model": finished["model"]}
    refused = hwgrpo("eval", "out/checkpoints/step-00000003", "--model", "elsewhere")
    assert refused.returncode == 2
    assert "has its own weights" in refused.stderr
    (out / "checkpoints/step-00000003/weights-rank0.safetensors").write_bytes(b"cut")
    refused = hwgrpo("eval", "out/checkpoints/step-00000003")
    assert refused.returncode == 1
    assert "weights-rank0.safetensors is damaged" in refused.stderr


def test_eval_measures_an_adapter_as_it_does_the_model_it_was_merged_into(hwgrpo, tmp_path: Path):
    dense = next(word for word in runs.SMALL if word.startswith("reward."))
    lora = ("model.lora.rank=2", "model.lora.alpha=64", "model.lora.dropout=0.1", "optim.lr=1e-2", dense)
    done = hwgrpo("train", "tiny_sort", *TINY, *lora, "trainer.output_dir=out", "trainer.save_every=3")
    assert done.returncode == 0, done.stderr

    def responses(*words: str) -> list[str]:
        measured = hwgrpo("eval", *words, *EIGHT, "--n", "4", "--completions", "samples.jsonl")
        assert measured.returncode == 0, measured.stderr
        return [json.loads(line)["response"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]

    merged, adapter = responses("out"), responses("out/final-adapter")
    assert responses("out/checkpoints/step-00000006") == adapter != responses("out/checkpoints/step-00000003")
    base = responses("out", "--model", runs.SMALL[0].removeprefix("model.path="))
    assert len(adapter) == 8 + 32
    same = sum(a == b for a, b in zip(adapter, merged, strict=True))
    assert same >= 38, "merging rounds, which may turn a draw or two"
    assert sum(a == b for a, b in zip(adapter, base, strict=True)) < 30, "otherwise the adapter did nothing"


def test_exit_codes_are_told_by_help(hwgrpo):
    for words in ([], ["train"]):
        shown = " ".join(hwgrpo(*words, "--help").stdout.split())
        for part in ("0 done, or stopped by a signal with everything saved", "1 the run, its data", "2 an error"):
            assert part in shown


def test_detect_says_in_plain_words_that_the_cpu_is_there(hwgrpo):
    shown = hwgrpo("detect", "--backend", "cpu").stdout
    assert "unverified" not in shown
    assert "* cpu   found " in shown
    assert "* cpu   works " in hwgrpo("detect", "--backend", "cpu", "--probe").stdout


def test_a_file_for_completions_that_cannot_be_written_is_refused_before_anything_runs(hwgrpo):
    done = hwgrpo("eval", "tiny_sort", "--completions", "no/such/folder/x.jsonl")
    assert done.returncode == 2
    assert "--completions no/such/folder/x.jsonl cannot be written: No such file" in done.stderr


def test_a_dry_run_without_hub_data_or_device_shows_the_plan_and_what_is_missing(fresh, hwgrpo):
    words = ("train", "qwen2_5_0_5b_gsm8k", "--dry-run", "backend.name=npu")  # hw: a backend that is not here
    done = fresh(*words, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "494,032,768 parameters" in done.stdout
    assert "200 steps of 128 prompts x 8 samples, 1 update each" in done.stdout
    told = done.stderr.strip().splitlines()
    assert [line.partition(": ")[2].partition("=")[0] for line in told] == [
        "not ready here: backend",
        "not ready here: data.train",
        "not ready here: data.validation",
    ]
    assert "Traceback" not in done.stderr
    assert hwgrpo(*words[:2], HF_HUB_OFFLINE="1").returncode == 2, "without --dry-run missing data is an error"


def test_a_dry_run_with_data_but_no_hub_names_the_tokenizer_that_it_lacks(hwgrpo, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ("train", "qwen2_5_0_5b_gsm8k", "--dry-run", "data.train=rows.jsonl", "data.validation=rows.jsonl")
    done = hwgrpo(*words, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "rewards    not tried: that needs the tokenizer" in done.stdout
    assert "hwgrpo: not ready here: model.path='Qwen/Qwen2.5-0.5B-Instruct'" in done.stderr
    unknown = hwgrpo(*words, "model.path=Qwen/none-such", HF_HUB_OFFLINE="1")
    assert unknown.returncode == 2, "a model of unknown shape cannot be planned"
    assert unknown.stdout == ""


@pytest.mark.slow
def test_a_dry_run_of_a_hub_model_with_a_local_tokenizer_checks_data_and_rewards(
    fresh, hwgrpo, tmp_path: Path, cache: Path
):
    assert hwgrpo("train", "tiny_sort", *TINY, "--dry-run").returncode == 0
    folder = next(cache.rglob("tokenizer_config.json")).parent
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12=", "answer": "#### 12"}\n' * 300)
    words = ("train", "qwen2_5_0_5b_gsm8k", "--dry-run", "data.train=rows.jsonl", "data.validation=rows.jsonl")
    done = fresh(*words, f"model.tokenizer={folder}", "trainer.max_steps=0", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "data       rows.jsonl: 300 prompts, longest" in done.stdout
    assert "2 steps of 128 prompts x 8 samples" in done.stdout
    assert "in all 256 prompts and 2,048 samples, 0.85 passes over the data" in done.stdout
    too_long = hwgrpo(*words, f"model.tokenizer={folder}", "rollout.max_response_tokens=40000", HF_HUB_OFFLINE="1")
    assert too_long.returncode == 2
    assert "has 32768 positions" in too_long.stderr

"""Graders of GSM8K compared on the same responses: hwgrpo's reward `gsm8k`, verl's and TRL's.

A model answers test questions greedily, after its chat template and with the sentence of `hwgrpo data gsm8k`, which
asks for the answer after `####`. The responses are saved; where the file exists, they are graded without sampling.

    python benchmarks/graders.py --model FOLDER --source gsm8k_test.jsonl --responses responses.jsonl \\
        --verl CHECKOUT_OF_VERL --trl-python /path/to/venv-with-trl/bin/python --output results.json

verl's function is its `verl/utils/reward_score/gsm8k.py`. TRL's is `trl.rewards.accuracy_reward`, which reads LaTeX
answers such as `\\boxed{18}` alone; `math_verify`, which it calls, is also asked with its own defaults. What is missing
is reported as not run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "backends"), str(REPO / "kernels")]

from hwgrpo.bench.machine import processor  # noqa: E402  (the paths come first)
from hwgrpo.rewards.verifiers.gsm8k import METHODS, gsm8k  # noqa: E402

RECIPE = "smollm2_135m_gsm8k"
SMOKE_MODEL = "builtin://tiny?task=copy&hidden=32&layers=1&steps=1"
SMOKE_ROWS = [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in range(4)]
PROMPTS_AT_ONCE = 64
VERL_FILE = "verl/utils/reward_score/gsm8k.py"
VERL_METHODS = ("strict", "flexible")
TRL_GRADERS = """
import json, sys
from math_verify import parse, verify
from trl.rewards import accuracy_reward

responses, truths = json.load(open(sys.argv[1]))
conversations = [[{"role": "assistant", "content": response}] for response in responses]
trl = [value or 0.0 for value in accuracy_reward(conversations, solution=truths)]
own = [float(verify(parse(truth), parse(response))) for response, truth in zip(responses, truths)]
json.dump({"trl accuracy_reward": trl, "math_verify": own}, open(sys.argv[2], "w"))
"""
COUNTERPARTS = {f"verl {method}": f"hwgrpo {method}" for method in VERL_METHODS}
"""Grader -> the one of hwgrpo with the same rule; the others are compared with the default."""
DEFAULT = f"hwgrpo {METHODS[0]}"
SHOWN = 5
Row = Mapping[str, Any]
Graded = dict[str, list[float] | str]
"""Grader -> the value of each response, or the reason why it did not run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Sample or read the responses, grade them, and print the table and the first disagreements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="a chat model in Hugging Face format")
    parser.add_argument("--source", help="as of `hwgrpo data gsm8k`: a file or folder, or a name on the hub (default)")
    parser.add_argument("--rows", type=int, default=0, help="first test questions; 0: all (default)")
    parser.add_argument("--response-tokens", type=int, default=256, help="at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--responses", type=Path, metavar="FILE", help="JSONL to write, or to grade if it exists")
    parser.add_argument("--verl", type=Path, metavar="FOLDER", help="a checkout of verl")
    parser.add_argument("--trl-python", metavar="PYTHON", help="an interpreter with TRL and math_verify")
    parser.add_argument("--output", help="write the results as JSON to this file")
    parser.add_argument("--smoke", action="store_true", help="four questions and a tiny model, if none is named")
    args = parser.parse_args(argv)
    if args.responses is not None and args.responses.exists():
        rows = [json.loads(line) for line in args.responses.read_text(encoding="utf-8").splitlines()]
    else:
        rows = _sampled(args)
    if not rows:
        raise SystemExit(f"{args.responses} has no response: remove it, and responses are sampled")
    graded = grade(rows, args.verl, args.trl_python)
    unequal = disagreements(rows, graded)
    print(table(graded, len(rows), len(unequal)))
    for row in unequal[:SHOWN]:
        values = ", ".join(f"{name} {value:g}" for name, value in row["values"].items())
        print(f"\nrow {row['row']}, answer {row['ground_truth']}: {values}\n  ...{row['response'][-120:]!r}")
    if args.output:
        results = {
            "date": datetime.date.today().isoformat(),
            "cpu": processor(),
            "settings": {key: str(value) for key, value in vars(args).items() if value is not None},
            "responses": len(rows),
            "truncated": sum(not row["finished"] for row in rows),
            "correct": {name: sum(v) if isinstance(v, list) else f"not run: {v}" for name, v in graded.items()},
            "disagreements": unequal,
        }
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _sampled(args: argparse.Namespace) -> list[Row]:
    """Sample the responses, and save them if a file is named."""
    if args.model is None and not args.smoke:
        remedy = "python scripts/fetch_smollm2.py FOLDER makes one"
        raise SystemExit(f"--model is not set, and there is no file of --responses to grade: name a model; {remedy}")
    if args.smoke:
        args.model, args.rows, args.response_tokens = args.model or SMOKE_MODEL, len(SMOKE_ROWS), 4
    with tempfile.TemporaryDirectory() as folder:
        rows: list[Row] = []
        for part in sample(args, Path(folder)):
            rows += part
            print(f"{len(rows)} responses", file=sys.stderr)
    if args.responses is not None:
        args.responses.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def sample(args: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """Yield greedy responses `{row, ground_truth, response, finished}`, some at a time."""
    from hwgrpo_backends.cpu import BACKEND

    from hwgrpo.config import load_config
    from hwgrpo.data.convert import convert
    from hwgrpo.data.dataset_files import open_copy
    from hwgrpo.data.published import PUBLISHED
    from hwgrpo.training.evaluate import build_evaluation
    from hwgrpo.values import PromptBatch, Sampling

    source = args.source
    if args.smoke:
        source = folder / "gsm8k_test.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in SMOKE_ROWS))
    dataset = PUBLISHED["gsm8k"]
    copy = open_copy(dataset, source and str(source))
    converted = convert(dataset, copy, instruction=None, strict=True, keep_duplicates=True)
    if "test" not in converted:
        raise SystemExit(f"--source {source} has no file of the split test: name one, such as gsm8k_test.jsonl")
    rows = converted["test"].rows[: args.rows or None]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.path": args.model,
        "model.dtype": args.dtype,
        "data.train": questions,
        "data.validation": questions,
        "data.validation_max_rows": 0,
        "data.chat": "always",
        "rollout.engine": "local",
        "rollout.max_response_tokens": args.response_tokens,
        "trainer.threads": args.threads,
    }
    config = load_config(RECIPE, [f"{key}={value}" for key, value in settings.items()])
    evaluation = build_evaluation(config, BACKEND, 0)
    greedy = Sampling(1, args.response_tokens, greedy=True)
    for start in range(0, len(evaluation.dataset), PROMPTS_AT_ONCE):
        numbers = range(start, min(start + PROMPTS_AT_ONCE, len(evaluation.dataset)))
        prompts = [evaluation.dataset.prompt(number, 0) for number in numbers]
        done = evaluation.engine.generate(PromptBatch(tuple(prompts)), greedy)
        answered = zip(numbers, prompts, done.texts, done.finished.tolist(), strict=True)
        yield [
            {"row": number, "ground_truth": prompt.ground_truth, "response": text, "finished": finished}
            for number, prompt, text, finished in answered
        ]


def grade(rows: Sequence[Row], verl: Path | None, trl_python: str | None) -> Graded:
    """Return what each grader gives the responses, or why it did not run."""
    graded: Graded = {f"hwgrpo {method}": _values(rows, gsm8k, method) for method in METHODS}
    compute_score = _verl_function(verl)
    for method in VERL_METHODS:
        ran = not isinstance(compute_score, str)
        graded[f"verl {method}"] = _values(rows, compute_score, method) if ran else compute_score
    return graded | _by_trl(rows, trl_python)


def _values(rows: Sequence[Row], function: Callable[..., float], method: str) -> list[float]:
    return [float(function(row["response"], row["ground_truth"], method=method)) for row in rows]


def _verl_function(folder: Path | None) -> Callable[..., float] | str:
    """Return verl's function, from its file alone, or why there is none."""
    if folder is None:
        return "--verl is not given"
    file = folder / VERL_FILE
    if not file.exists():
        return f"{folder} has no {VERL_FILE}"
    spec = importlib.util.spec_from_file_location("verl_gsm8k", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


def _by_trl(rows: Sequence[Row], python: str | None) -> Graded:
    """Return what TRL's function and math_verify give, in an interpreter that has them."""
    names = ("trl accuracy_reward", "math_verify")
    if python is None:
        return dict.fromkeys(names, "--trl-python is not given")
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "responses.json"), Path(folder, "values.json")
        asked.write_text(json.dumps([[row["response"] for row in rows], [row["ground_truth"] for row in rows]]))
        command = [python, "-c", TRL_GRADERS, str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return dict.fromkeys(names, (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
        return json.loads(answered.read_text())


def disagreements(rows: Sequence[Row], graded: Graded) -> list[dict[str, Any]]:
    """Return the responses that graders value differently, with their values."""
    ran = {name: values for name, values in graded.items() if isinstance(values, list)}
    valued = [{**row, "values": {name: values[i] for name, values in ran.items()}} for i, row in enumerate(rows)]
    return [row for row in valued if len(set(row["values"].values())) > 1]


def table(graded: Graded, responses: int, unequal: int) -> str:
    """Return accuracies, and how many responses each grader values differently from one of hwgrpo's."""
    lines = [
        f"| grader, of {responses:,} responses | correct | accuracy | graded differently by |",
        "|---|---|---|---|",
    ]
    for name, values in graded.items():
        if isinstance(values, str):
            lines.append(f"| {name} | not run: {values} | | |")
            continue
        other = COUNTERPARTS.get(name, DEFAULT)
        reference = graded[other]
        assert isinstance(reference, list)
        different = sum(a != b for a, b in zip(values, reference, strict=True))
        compared = "" if name == other else f"{other}: {different:,}"
        lines.append(f"| {name} | {sum(values):,.0f} | {sum(values) / responses:.1%} | {compared} |")
    return "\n".join([*lines, f"| any two | | | {unequal:,} |"])


if __name__ == "__main__":
    raise SystemExit(main())

"""Run the project on this machine's device and write down how that went, as a record of `hwgrpo.doctor.hardware`.

    python scripts/record_hardware.py                        all parts, on the backend that `hwgrpo detect` chooses
    python scripts/record_hardware.py --backend cpu --parts doctor,kernels,tiny_sort

Put the file it names into benchmarks/results/hardware/ and commit it: the README's table and `hwgrpo doctor` then say
so. It exits with 1 when a part failed; the record is written all the same, since that is a result, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / part) for part in (".", "backends", "kernels")]

from hwgrpo.doctor import hardware  # noqa: E402

LIMIT = 1800
"""Seconds a part may take."""
ABOUT = """
import json, sys
from hwgrpo_backends import choose
choice = choose(sys.argv[1])
from hwgrpo_backends.device import Device
from hwgrpo.bench.machine import machine_facts
print("\\n" + json.dumps(machine_facts(Device(choice.backend)) | {"type": choice.backend.device_type}))
"""
SHAPED = """
import json, sys
import torch, transformers
from hwgrpo.data import tasks
from hwgrpo.models.tiny import character_tokenizer
shape, folder = sys.argv[1:]
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(shape))
tokenizer = character_tokenizer(tasks.parse_task("task://sort").alphabet)
tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), model.config.vocab_size)])  # whatever it says is text
model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""
"""Makes a model of random weights and a shape of configs/models/, with a tokenizer of characters."""
REWARD = """
def noise(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 11 / 10
"""
"""Right answers are nothing that random weights would give, and where all rewards are equal nothing is trained."""


class Run:
    """Runs commands in this repository, with their output on the way, and keeps what became of each."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.what: list[dict[str, Any]] = []

    def python(self, *words: str) -> tuple[int, str]:
        """Return exit code and output of a Python command; the code is 124 when it took too long."""
        path = ":".join(str(REPO / part) for part in (".", "backends", "kernels"))
        try:
            done = subprocess.run(
                [sys.executable, *words], cwd=REPO, env=_environ(path), stdout=subprocess.PIPE, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired as late:
            return 124, str(late.stdout or "")
        return done.returncode, done.stdout

    def note(self, name: str, command: str, began: float, passed: bool, figures: dict[str, Any]) -> None:
        """Keep how a part went."""
        seconds = round(time.monotonic() - began, 1)
        outcome = "passed" if passed else "failed"
        print(f"{name}: {outcome} in {seconds} s {json.dumps(figures)}", flush=True)
        self.what.append({"name": name, "command": command, "outcome": outcome, "seconds": seconds, "figures": figures})


def doctor(run: Run, options: argparse.Namespace) -> None:
    """Try every device: memory, bf16 products, each kernel, and an all-reduce where there are two."""
    began = time.monotonic()
    words = ["doctor", "--run", "--json", "--backend", run.backend]
    code, said = run.python("-m", "hwgrpo", *words)
    states = [trial["state"] for trial in (_last_json(said) or {}).get("run") or []]
    figures = {state.lower(): states.count(state) for state in ("PASS", "FAIL", "SKIP")}
    run.note("doctor --run", f"hwgrpo {' '.join(words)}", began, code == 0 and figures["pass"] > 0, figures)


def kernels(run: Run, options: argparse.Namespace) -> None:
    """Hold every kernel that can run here to its definition: all cases, shapes and dtypes."""
    began = time.monotonic()
    words = ["-m", "hwgrpo_kernels.testing", options.device_type]
    code, said = run.python(*words)
    figures = {state.lower(): len(re.findall(rf"(?m)^{state}  ", said)) for state in ("PASS", "FAIL", "SKIP")}
    print(said)
    run.note("kernels", f"python {' '.join(words)}", began, code == 0 and figures["pass"] > 0, figures)


def tiny_sort(run: Run, options: argparse.Namespace) -> None:
    """Train the recipe tiny_sort to its end: it has to learn."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["tiny_sort", f"backend.name={run.backend}", *options.set]
        figures, passed = _train(run, "tiny_sort", words, Path(folder) / "run")
        run.what[-1]["outcome"] = (
            "passed" if passed and figures.get("after", 0) > figures.get("before", 0) else "failed"
        )


def shaped(run: Run, options: argparse.Namespace) -> None:
    """Train a model of random weights in the shape of a real one for a few steps: it has to run and move."""
    shape = Path(options.shape).resolve()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        code, _ = run.python("-c", SHAPED, str(shape), str(model))
        if code:
            run.note(f"{shape.stem}-shaped", "making the model", time.monotonic(), False, {"exit_code": code})
            return
        reward = Path(folder) / "reward.py"
        reward.write_text(REWARD)
        words = ["tiny_sort", f"backend.name={run.backend}", f"model.path={model}", "trainer.max_steps=5"]
        words += [f"reward.functions=['{reward}:noise']"]
        words += ["trainer.prompts_per_step=16", "data.validation_max_rows=16", "trainer.save_every=0", *options.set]
        _train(run, f"{shape.stem}-shaped", words, Path(folder) / "run")


def _train(run: Run, name: str, words: list[str], output: Path) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()
    settings = [*words, "observe.progress=none", "observe.loggers=[jsonl]"]
    code, _ = run.python("-m", "hwgrpo", "train", *settings, f"trainer.output_dir={output}")
    lines = []
    if (output / "metrics.jsonl").is_file():
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    figures: dict[str, Any] = {"exit_code": code, "steps": len(steps)}
    if code == 0 and steps:
        summary = json.loads((output / "summary.json").read_text())
        greedy = next((row for row in summary["validation"] if row["metric"] == "greedy"), None)
        figures |= {"before": greedy["before"], "after": greedy["after"]} if greedy else {}
        figures["last_grad_norm"] = steps[-1]["actor/grad_norm"]
        rates = sorted(line["perf/throughput"] for line in steps)
        figures["tokens_per_s"] = round(rates[len(rates) // 2])
        peaks = [line["perf/max_memory_allocated_gb"] for line in steps if "perf/max_memory_allocated_gb" in line]
        figures |= {"peak_gib": round(max(peaks), 2)} if peaks else {}
    passed = code == 0 and bool(steps) and all(0 < line["actor/grad_norm"] < float("inf") for line in steps)
    shown = " ".join(word.replace(str(output.parent), "FOLDER") for word in settings)
    run.note(name, f"hwgrpo train {shown}", began, passed, figures)
    return figures, passed


PARTS = {"doctor": doctor, "kernels": kernels, "tiny_sort": tiny_sort, "shaped": shaped}


def main(words: list[str] | None = None) -> int:
    """Run the parts and write the record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", metavar="NAME", help="the one to run on (default: as detected)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {','.join(PARTS)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=hardware.FOLDERS[1], help="folder for the record (default: its own)"
    )
    parser.add_argument("--commit", help="the commit this is a copy of, where it is not a git checkout")
    parser.add_argument("--shape", default=str(REPO / "configs/models/Qwen2.5-0.5B.json"), help="of the part shaped")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both trainings")
    options = parser.parse_args(words)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {options.parts}: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    commit = _commit(options.commit, parser)

    run = Run(options.backend)
    code, said = run.python("-c", ABOUT, options.backend)
    about = _last_json(said)
    if code or about is None:
        parser.error(f"no device to record: `hwgrpo detect --backend {options.backend} --probe` says why")
    run.backend, options.device_type = about["backend"], about["type"]
    code, said = run.python("-m", "hwgrpo", "doctor", "--json", "--backend", run.backend)
    told = _last_json(said)
    if told is None or not {"candidates", "facts"} <= told.keys():
        printed = said.strip()[-2000:] or "nothing"
        parser.error(f"`hwgrpo doctor --json` printed no report (exit code {code}), but:\n{printed}")
    for part in parts:
        PARTS[part](run, options)
    record = {
        "schema": hardware.SCHEMA,
        "backend": run.backend,
        "chip": about["device"],
        "arch": about["arch"],
        "devices": next((each["devices"] for each in told["candidates"] if each["name"] == run.backend), 1),
        "driver": _driver(told["facts"]),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": {"python": platform.python_version(), **told["facts"]["distributions"], "hwgrpo": about["hwgrpo"]},
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "what": run.what,
    }
    wrong = hardware.problems(record)
    assert not wrong, wrong
    options.out.mkdir(parents=True, exist_ok=True)
    chip = re.sub(r"[^a-z0-9]+", "_", record["chip"].lower()).strip("_")
    file = options.out / f"{run.backend}_{chip}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(file)
    return 0 if all(each["outcome"] == "passed" for each in run.what) else 1


def _commit(given: str | None, parser: argparse.ArgumentParser) -> str:
    """Return the commit that is run. What differs from every commit can be found by nobody, so it is refused."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True)
        except OSError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD") if (REPO / ".git").exists() else None
    if head is None:
        if not re.fullmatch(r"[0-9a-f]{40}", given or ""):
            parser.error("this is not a git checkout: give the commit it is a copy of, --commit and 40 digits")
        return str(given)
    if given and given != head:
        parser.error(f"--commit {given}: this checkout is at {head}")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        parser.error(f"files differ from commit {head}, so the record would name what was not run:\n{changed}")
    return head


def _driver(facts: dict[str, Any]) -> str:
    """Return what drives the device, in words."""
    amd = Path("/sys/module/amdgpu/version")
    found = {
        "NVIDIA driver": facts.get("nvidia_driver"),
        "Ascend driver": facts.get("npu_driver"),
        "CANN": facts.get("cann_version"),
        "amdgpu": amd.read_text().strip() if amd.is_file() else None,
    }
    named = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    return named or f"that of {platform.system()} {platform.release()}"


def _environ(path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))}


def _last_json(said: str) -> dict[str, Any] | None:
    """Return the object that an output ends with, whatever a plug-in printed before it."""
    starts = [0, *(match.end() for match in re.finditer(r"\n(?=\{)", said))]
    for start in reversed(starts):
        try:
            found = json.loads(said[start:])
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


if __name__ == "__main__":
    sys.exit(main())

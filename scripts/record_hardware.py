"""Run the project on this machine's device and write the results, a record of `hwgrpo.doctor.hardware`.

    python scripts/record_hardware.py                        all parts, on the detected backend (`hwgrpo detect`)
    python scripts/record_hardware.py --backend cpu --parts doctor,kernels,tiny_sort

Put the file that it prints into benchmarks/results/hardware/ and commit it: the README's table and `hwgrpo doctor`
then report it. The exit code is 1 if a part failed; the record is written all the same, since a failure is a result.
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
"""Time limit of a part, in seconds."""
ABOUT = """
import json, sys
from hwgrpo_backends import choose
choice = choose(sys.argv[1])
from hwgrpo_backends.device import Device
from hwgrpo.bench.machine import machine_facts
print("\\n" + json.dumps(machine_facts(Device(choice.backend)) | {"type": choice.backend.device_type}))
"""
SHAPED = """
import sys
from pathlib import Path
from hwgrpo_backends import choose
from hwgrpo_backends.device import Device
from hwgrpo.bench.shaped_model import save_shaped_model
shape, folder, backend = sys.argv[1:]
save_shaped_model(shape, Path(folder), Device(choose(backend).backend).torch_device)
"""


class Recorder:
    """Runner of commands in this repository, and their outcomes."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.outcomes: list[dict[str, Any]] = []
        self.has_parity = True
        """Whether all steps so far are those of fp64; without, no speed is recorded."""

    def python(self, *arguments: str) -> tuple[int, str]:
        """Run a Python command; return its exit code (124 after a timeout) and stdout."""
        path = ":".join(str(REPO / part) for part in (".", "backends", "kernels"))
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=REPO,
                env=_environ(path),
                stdout=subprocess.PIPE,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired as timeout:
            return 124, str(timeout.stdout or "")
        return done.returncode, done.stdout

    def add(self, name: str, command: str, began: float, passed: bool, figures: dict[str, Any]) -> None:
        """Print and keep the outcome of a part."""
        seconds = round(time.monotonic() - began, 1)
        outcome = "passed" if passed else "failed"
        print(f"{name}: {outcome} in {seconds} s {json.dumps(figures)}", flush=True)
        self.outcomes.append(
            {"name": name, "command": command, "outcome": outcome, "seconds": seconds, "figures": figures}
        )


def doctor(run: Recorder, options: argparse.Namespace) -> None:
    """Run the self-tests of every device: memory, bf16 matmul, each kernel, and an all-reduce if there are two."""
    began = time.monotonic()
    arguments = ["doctor", "--run", "--json", "--backend", run.backend]
    code, output = run.python("-m", "hwgrpo", *arguments)
    states = [test["state"] for test in (_last_json(output) or {}).get("run") or []]
    figures = {state.lower(): states.count(state) for state in ("PASS", "FAIL", "SKIP")}
    run.add("doctor --run", f"hwgrpo {' '.join(arguments)}", began, code == 0 and figures["pass"] > 0, figures)


def parity(run: Recorder, options: argparse.Namespace) -> None:
    """Compare a training step with fp64: of several families in fp32, and of the built-in model as it trains here."""
    for arguments in (["model.dtype=float32", "--families"], []):
        began = time.monotonic()
        command = ["parity", f"backend.name={run.backend}", *arguments]
        code, output = run.python("-m", "hwgrpo", *command, "--json")
        report = _last_json(output) or {}
        figures = {"comparisons": len(report.get("comparisons", [])), "largest_share": _largest_share(report)}
        run.has_parity &= code == 0
        run.add("parity", f"hwgrpo {' '.join(command)}", began, code == 0 and figures["comparisons"] > 0, figures)


def kernels(run: Recorder, options: argparse.Namespace) -> None:
    """Compare every kernel that can run here with its definition: all cases, shapes and dtypes."""
    began = time.monotonic()
    arguments = ["-m", "hwgrpo_kernels.testing", options.device_type]
    code, output = run.python(*arguments)
    figures = {state.lower(): len(re.findall(rf"(?m)^{state}  ", output)) for state in ("PASS", "FAIL", "SKIP")}
    print(output)
    run.add("kernels", f"python {' '.join(arguments)}", began, code == 0 and figures["pass"] > 0, figures)


def tiny_sort(run: Recorder, options: argparse.Namespace) -> None:
    """Train the recipe tiny_sort; it passes if the greedy validation reward has risen."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["tiny_sort", f"backend.name={run.backend}", *options.set]
        figures, passed = _train(run, "tiny_sort", arguments, Path(folder) / "run")
        run.outcomes[-1]["outcome"] = (
            "passed" if passed and figures.get("after", 0) > figures.get("before", 0) else "failed"
        )


def shaped(run: Recorder, options: argparse.Namespace) -> None:
    """Train a randomly initialized model of a real shape for 5 steps; gradients must be finite and above 0."""
    shape = Path(options.shape).resolve()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        code, _ = run.python("-c", SHAPED, str(shape), str(model), run.backend)
        if code:
            run.add(f"{shape.stem}-shaped", "making the model", time.monotonic(), False, {"exit_code": code})
            return
        arguments = ["tiny_sort", f"backend.name={run.backend}", f"model.path={model}", "trainer.max_steps=5"]
        arguments += [f"reward.functions=['{model}/reward.py:noise']"]
        arguments += [
            "trainer.prompts_per_step=16",
            "data.validation_max_rows=16",
            "trainer.save_every=0",
            *options.set,
        ]
        _train(run, f"{shape.stem}-shaped", arguments, Path(folder) / "run")


def _train(run: Recorder, name: str, arguments: list[str], output: Path) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()
    settings = [*arguments, "observe.progress=none", "observe.loggers=[jsonl]"]
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
        if run.has_parity:
            rates = sorted(line["perf/throughput"] for line in steps)
            figures["tokens_per_s"] = round(rates[len(rates) // 2])
        peaks = [line["perf/max_memory_allocated_gb"] for line in steps if "perf/max_memory_allocated_gb" in line]
        figures |= {"peak_gib": round(max(peaks), 2)} if peaks else {}
    passed = code == 0 and bool(steps) and all(0 < line["actor/grad_norm"] < float("inf") for line in steps)
    shown = " ".join(setting.replace(str(output.parent), "FOLDER") for setting in settings)
    run.add(name, f"hwgrpo train {shown}", began, passed, figures)
    return figures, passed


PARTS = {"parity": parity, "doctor": doctor, "kernels": kernels, "tiny_sort": tiny_sort, "shaped": shaped}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write the record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="the backend to run on (default: the detected one)"
    )
    help_of_parts = f"comma-separated, of {','.join(PARTS)} (default: all); parity always runs"
    parser.add_argument("--parts", default=",".join(PARTS), help=help_of_parts)
    parser.add_argument(
        "--out", type=Path, default=hardware.FOLDERS[1], help="folder for the record (default: %(default)s)"
    )
    parser.add_argument("--commit", help="the commit of this copy, if it is not a git checkout")
    parser.add_argument(
        "--shape", default=str(REPO / "configs/models/Qwen2.5-0.5B.json"), help="model config of the part shaped"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of tiny_sort and shaped"
    )
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {options.parts}: unknown part {', '.join(unknown)}; use {', '.join(PARTS)}")
    if "parity" not in parts:
        parts.insert(0, "parity")
    commit = _commit(options.commit, parser)

    run = Recorder(options.backend)
    code, output = run.python("-c", ABOUT, options.backend)
    about = _last_json(output)
    if code or about is None:
        parser.error(f"no device to record: `hwgrpo detect --backend {options.backend} --probe` prints the reason")
    run.backend, options.device_type = about["backend"], about["type"]
    code, output = run.python("-m", "hwgrpo", "doctor", "--json", "--backend", run.backend)
    report = _last_json(output)
    if report is None or not {"candidates", "facts"} <= report.keys():
        printed = output.strip()[-2000:] or "nothing"
        parser.error(f"`hwgrpo doctor --json` printed no report (exit code {code}):\n{printed}")
    for part in parts:
        PARTS[part](run, options)
    versions = {"python": platform.python_version(), **report["facts"]["distributions"], "hwgrpo": about["hwgrpo"]}
    record = {
        "schema": hardware.SCHEMA,
        "backend": run.backend,
        "chip": about["device"],
        "arch": about["arch"],
        "devices": next((each["devices"] for each in report["candidates"] if each["name"] == run.backend), 1),
        "driver": _driver(report["facts"]),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": versions,
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "what": run.outcomes,
    }
    wrong = hardware.problems(record)
    assert not wrong, wrong
    options.out.mkdir(parents=True, exist_ok=True)
    chip = re.sub(r"[^a-z0-9]+", "_", record["chip"].lower()).strip("_")
    file = options.out / f"{run.backend}_{chip}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(file)
    return 0 if all(each["outcome"] == "passed" for each in run.outcomes) else 1


def _commit(named: str | None, parser: argparse.ArgumentParser) -> str:
    """Return the commit of this checkout; uncommitted changes are an error, since nobody else could run them."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, text=True)
        except OSError:  # no git here
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD") if (REPO / ".git").exists() else None
    if head is None:
        if not re.fullmatch(r"[0-9a-f]{40}", named or ""):
            parser.error("this is not a git checkout: pass the commit of this copy as --commit, 40 digits")
        return str(named)
    if named and named != head:
        parser.error(f"--commit {named}: this checkout is at {head}")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        parser.error(f"files differ from commit {head}, which the record would name: commit these first:\n{changed}")
    return head


def _driver(facts: dict[str, Any]) -> str:
    """Return the names and versions of the device's drivers."""
    amd = Path("/sys/module/amdgpu/version")
    versions = {
        "NVIDIA driver": facts.get("nvidia_driver"),
        "Ascend driver": facts.get("npu_driver"),
        "CANN": facts.get("cann_version"),
        "amdgpu": amd.read_text().strip() if amd.is_file() else None,
    }
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    return named or f"that of {platform.system()} {platform.release()}"


def _environ(path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))}


def _largest_share(report: dict[str, Any]) -> float | None:
    """Return the largest error of a stage as a share of its tolerance; None: no report, or an error without one."""
    stages = [stage for each in report.get("comparisons", []) for stage in each["stages"] if stage["error"]]
    if not stages or any(not isinstance(stage["error"], float) or not stage["tolerance"] for stage in stages):
        return None
    return round(max(stage["error"] / stage["tolerance"] for stage in stages), 3)


def _last_json(output: str) -> dict[str, Any] | None:
    """Return the JSON object at the end of an output, whatever a plug-in printed before it."""
    starts = [0, *(match.end() for match in re.finditer(r"\n(?=\{)", output))]
    for start in reversed(starts):
        try:
            parsed = json.loads(output[start:])
        except ValueError:
            continue
        return parsed if isinstance(parsed, dict) else None
    return None


if __name__ == "__main__":
    sys.exit(main())

"""The items of `scripts/gpu_visit.sh`; gpu_visit_runner.py has their order, expected seconds and limits.

    python scripts/gpu_visit_items.py ITEM OUT WORK [--dry]

An item writes its files to OUT, and to WORK what no later visit needs, such as models. It prints `result: ...`, more
than once where it may be cut off by its time limit: the last one counts.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / part) for part in (".", "backends", "kernels", "scripts")]

from gpu_visit_runner import NOT_HERE, TIMED_OUT, end_fork  # noqa: E402

if TYPE_CHECKING:
    from hwgrpo_backends.device import Device

    from hwgrpo.training.run_parts import Run

SHAPE, LARGE_SHAPE = (REPO / "configs" / "models" / f"Qwen2.5-{size}.json" for size in ("0.5B", "7B"))
FUSED = ("rms_norm", "rotary", "swiglu")
SLOW_MATCH = """
import os
import time


def slow_match(solution_str, ground_truth):
    time.sleep(float(os.environ.get("VISIT_PAUSE", 0)))  # per response: time to kill the run in its next steps
    return float(solution_str.strip() == ground_truth)
"""
CUDNN_OFF = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
"""Makes torch's attention prefer every other implementation to cuDNN's; torch reads it once, at its first use."""
QUIET = (
    *("trainer.validate_at_start=false", "trainer.validation_n=0", "data.validation_max_rows=1"),
    *("observe.progress=none", "observe.loggers=[jsonl]", "observe.completions_per_step=0"),
)
LONGEST = 7200.0
"""Seconds after which a command is killed in any case; the limit of its item comes first."""
VERSIONS = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "trl", "verl")


class NotHereError(Exception):
    """The item cannot run on this machine; the text is the reason."""


class FailedError(Exception):
    """The item failed; the text is the reason."""


class Command:
    """A running command of Python: a process of its own, or a fork of this one in a dry run.

    Args:
        module: module to run, as with `python -m`.
        arguments: its arguments.
        env: further variables.
        forked: fork this process, which has imported what the command needs.
    """

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str], forked: bool) -> None:
        print(f"$ {' '.join([f'{k}={v}' for k, v in env.items()])} {module} {' '.join(arguments)}".strip(), flush=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        if not forked:
            self._process = subprocess.Popen([sys.executable, "-m", module, *arguments], env={**os.environ, **env})
            return
        self._child = os.fork()
        if self._child == 0:
            os.environ.update(env)
            end_fork(lambda: _main_of(module, list(arguments)))

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None: it is running."""
        if self._process is not None:
            return self._process.poll()
        if self._code is None:
            done, status = os.waitpid(self._child, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if done else None
        return self._code

    def kill(self) -> int:
        """End it at once; return the exit code, `TIMED_OUT` if it had not ended."""
        return self.exit_code(0.0)

    def exit_code(self, seconds: float = LONGEST) -> int:
        """Wait for the end and return the exit code; after so many seconds it is killed, with `TIMED_OUT`."""
        end = time.monotonic() + seconds
        killed = False
        while (code := self.poll()) is None:
            if time.monotonic() >= end and not killed:
                os.kill(self._process.pid if self._process is not None else self._child, signal.SIGKILL)
                killed = True
            time.sleep(0.005)
        return TIMED_OUT if killed else code


def _main_of(module: str, arguments: list[str]) -> int:
    """Run what `python -m module` runs."""
    if module == "pytest":
        return int(importlib.import_module("pytest").main(arguments))
    if module == "hwgrpo":
        return importlib.import_module("hwgrpo.cli.main").main(arguments)
    return importlib.import_module(module).main(arguments)


@dataclass
class Visit:
    """What an item needs."""

    out: Path
    """Folder of results."""
    work: Path
    """Folder of other files, which all items of a visit share."""
    dry: bool

    def start(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Command:
        """Start a command."""
        return Command(module, arguments, env or {}, forked=self.dry)

    def hwgrpo(self, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = LONGEST) -> int:
        """Run a command of hwgrpo; return its exit code."""
        return self.start("hwgrpo", *arguments, env=env).exit_code(seconds)

    def check(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Run a command of hwgrpo that must end well."""
        code = self.hwgrpo(*arguments, env=env)
        if code:
            raise FailedError(f"hwgrpo {' '.join(arguments[:2])} ended with {code}")

    def pytest(self, name: str, *arguments: str) -> str:
        """Run tests; return the result."""
        if find_missing("pytest"):
            raise NotHereError(f"{sys.executable} has no pytest: run `bash scripts/setup.sh --dev`")
        workers = [] if self.dry or find_missing("xdist") else ["-n", os.environ.get("WORKERS", "4")]
        file = self.out / f"{name}.xml"
        code = self.start(
            "pytest", "-q", "-p", "no:cacheprovider", *workers, f"--junitxml={file}", *arguments
        ).exit_code()
        if code == 5:  # pytest's own: nothing was collected
            raise NotHereError("no test to run here")
        if code:
            raise FailedError(f"pytest ended with {code}: {counts(file)}")
        return counts(file)

    def write(self, name: str, value: Any) -> None:
        """Write results as JSON, with the mark of a dry run."""
        text = json.dumps({"dry": self.dry, **value}, indent=1, default=str)
        (self.out / name).write_text(text + "\n", encoding="utf-8")

    def model(self) -> Path:
        """Return the folder of a random model of the shape of Qwen2.5-0.5B, with reward.py; made once a visit."""
        folder = self.work / "model"
        if not folder.exists():
            from hwgrpo.bench.shaped_model import save_shaped_model

            partial = self.work / "model.part"
            save_shaped_model(SHAPE, partial, device_here().torch_device, tiny=self.dry)
            partial.rename(folder)
        return folder

    def shaped(self, prompts: int, tokens: int) -> list[str]:
        """Return the settings of training on that model: 8 responses of some tokens to each of some prompts."""
        model = self.model()
        return [
            "tiny_sort",
            f"model.path={model}",
            f"reward.functions=['{model}/reward.py:noise']",
            f"trainer.prompts_per_step={2 if self.dry else prompts}",
            f"rollout.max_response_tokens={4 if self.dry else tokens}",
            *("algorithm.kl.coef=0.001", "optim.lr=1e-6", "rollout.probe_every=0", "trainer.save_every=0"),
            f"trainer.threads={1 if self.dry else 4}",
            *QUIET,
        ]


def find_missing(module: str) -> bool:
    """Return whether this interpreter lacks a module."""
    import importlib.util

    return importlib.util.find_spec(module) is None


def counts(file: Path) -> str:
    """Return how many tests of a JUnit file passed, failed and were skipped."""
    import xml.etree.ElementTree as xml

    if not file.exists():
        return "no report"
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in xml.parse(file).iter("testsuite"):
        for key in total:
            total[key] += int(suite.get(key, 0))
    bad = total["failures"] + total["errors"]
    return f"{total['tests'] - bad - total['skipped']} passed, {bad} failed, {total['skipped']} skipped"


def device_here() -> Device:
    """Return the device that hwgrpo selects, as the current one of this process."""
    from hwgrpo_backends import choose
    from hwgrpo_backends.environment import apply

    backend = choose().backend
    apply(backend, "train")

    from hwgrpo_backends.device import Device

    device = Device(backend)
    device.set_device()
    return device


def say(result: str) -> None:
    """Print the result, or the one so far."""
    print(f"result: {result}", flush=True)


def step_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that a run has ended."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if "actor/grad_norm" in line]


def step_seconds(folder: Path) -> str:
    """Return the seconds of each step, as text."""
    return ", ".join(f"{line['timing_s/step']:.2f}" for line in step_metrics(folder)) or "none ended"


# the items, in the order of gpu_visit_runner.ITEMS


def parity(visit: Visit) -> str:
    saved = str(visit.out / "parity.safetensors")
    runs = [("model.dtype=float32", "--save", saved), (), ("--families",)]
    runs = runs[:1] if visit.dry else runs
    failed = [" ".join(run) or "default" for run in runs if visit.hwgrpo("parity", *run)]
    if failed:
        raise FailedError(f"differs from fp64: {'; '.join(failed)}")
    return f"{len(runs)} of {len(runs)} comparisons with fp64 passed"


def facts(visit: Visit) -> str:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=REPO).stdout.strip()
    for tool in ("nvidia-smi", "rocm-smi", "compute-sanitizer"):
        subprocess.run(["sh", "-c", f"command -v {tool} || echo {tool}: not installed"])
    subprocess.run(["sh", "-c", "uname -a; if command -v nvidia-smi >/dev/null; then nvidia-smi; fi"])
    visit.hwgrpo("detect", "--probe")

    device = device_here()
    import torch
    from hwgrpo_backends import choose

    from hwgrpo.bench.machine import machine_facts

    host = choose().facts
    drivers = {"NVIDIA": host.nvidia_driver, "NPU": host.npu_driver}
    about = machine_facts(device)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or os.environ.get("COMMIT") or "unknown: not a git checkout, and COMMIT is not set",
        "chip": f"{about['device']} ({about['arch']}), backend {about['backend']}",
        "driver": ", ".join(f"{name} {value}" for name, value in drivers.items() if value) or "none found",
        "cuDNN": torch.backends.cudnn.version() or "none",
        "Python": sys.version.split()[0],
        "versions": ", ".join(f"{name} {version}" for name in VERSIONS if (version := version_of(name))),
    }
    (visit.out / "facts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return f"{found['chip']}; driver {found['driver']}; {found['versions']}; commit {found['commit'][:12]}"


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def decode(visit: Visit) -> str:
    return decode_of(visit, "decode", SHAPE, (64, 256), (64, 256, 512), prompt_tokens=9)


def lora(visit: Visit) -> str:
    return decode_of(visit, "lora", LARGE_SHAPE, (256,), (256, 512), prompt_tokens=128, rank=32)


def decode_of(
    visit: Visit,
    name: str,
    shape: Path,
    rows: Sequence[int],
    capacities: Sequence[int],
    *,
    prompt_tokens: int,
    rank: int = 0,
) -> str:
    """Profile the decode steps of a random model of a shape."""
    device = device_here()
    from hwgrpo.bench.decode_profile import PROFILED, DecodeProfile, profile_decode
    from hwgrpo.bench.shaped_model import random_model, shape_of
    from hwgrpo.observe.kernel_table import kernel_table

    model = random_model(shape_of(shape, tiny=visit.dry), device.torch_device).requires_grad_(False)
    if rank:
        import peft
        import torch

        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    recorder = device.recorder
    if visit.dry:
        rows, capacities, prompt_tokens, recorder = (8, 16), (4, 80), 5, HostRecording

    def line(found: DecodeProfile) -> str:
        steps = [
            f"{each.rows} rows x {each.capacity}: {each.launched_ms:.2f} ms, on the device {each.device_ms:.2f}"
            + ("" if each.replay_ms is None else f", as a graph {each.replay_ms:.2f}, recorded in {each.record_ms:.0f}")
            for each in found.steps
        ]
        draws = [f"{name} {value:.2f} ms" for name, value in found.draw_ms.items()]
        return "; ".join(steps) + (f"; sampling: {', '.join(draws)}" if draws else "")

    def report(found: DecodeProfile) -> None:
        visit.write(f"{name}.json", asdict(found))
        say(line(found))

    found = profile_decode(
        model, device, rows, capacities, prompt_tokens=prompt_tokens, repeat=2 if visit.dry else 20,
        recorder=recorder, report=report,
    )  # fmt: skip
    (visit.out / f"{name}_kernels.txt").write_text(kernel_table(found.kernels, times=PROFILED), encoding="utf-8")
    if not rank:
        return line(found)
    model.merge_adapter()
    merged = profile_decode(
        model, device, rows[-1:], capacities[-1:], prompt_tokens=prompt_tokens, repeat=2 if visit.dry else 20,
        recorder=recorder,
    )  # fmt: skip
    visit.write(f"{name}_merged.json", asdict(merged))
    return f"{line(found)}; adapters merged: {line(merged)}"


class HostRecording:
    """Stands for a device graph in a dry run: a replay runs the work again."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.output = work()

    def replay(self) -> None:
        self._work()

    def release(self) -> None: ...


@contextmanager
def opened_run(settings: Sequence[str], folder: Path) -> Iterator[tuple[Run, Device]]:
    """Make a run as `hwgrpo train` does, for measurements; nothing is trained."""
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.config import load_config

    config = load_config(settings[0], [*settings[1:], f"trainer.output_dir={folder}", "trainer.resume=never"])
    host = prepare_host(config)

    from hwgrpo_backends.device import Device

    from hwgrpo.training.setup import build_run

    run = build_run(config, host.backend, host.local_rank, host.local_world_size)
    try:
        yield run, Device(host.backend, host.local_rank)
    finally:
        run.close()
        run.strategy.close()


def update(visit: Visit) -> str:
    os.environ[CUDNN_OFF] = "0"  # before torch reads it: the item itself allows and forbids cuDNN
    from hwgrpo.bench.update_profile import PassTimes, profile_update
    from hwgrpo.errors import ConfigError, RunError
    from hwgrpo.observe.kernel_table import kernel_table

    kinds = {"own modules": ("none",), "fused modules": FUSED}
    results: dict[str, Any] = {}
    lines: dict[str, str] = {}

    def report(name: str, found: list[PassTimes]) -> None:
        results[name] = [asdict(each) for each in found]
        visit.write("update.json", results)
        shown = [
            f"{each.layout}{' cuDNN' if each.cudnn else ''} {each.first_ms:.0f}, then {each.steady_ms:.0f}, "
            f"scoring {each.score_ms:.0f}, new lengths {median(each.ragged_new_ms or [0]):.0f}, again "
            f"{median(each.ragged_again_ms or [0]):.0f} ms"
            for each in found
            if not each.reason
        ]
        shown += [f"{each.layout}{' cuDNN' if each.cudnn else ''}: {each.reason}" for each in found if each.reason]
        lines[name] = f"{name}: " + ("; ".join(shown) or "nothing measured")
        say(" | ".join(lines.values()))
        for each in found:
            if each.kernels:
                file = visit.out / f"update_{name.split()[0]}_{each.layout}_kernels.txt"
                file.write_text(kernel_table(each.kernels), encoding="utf-8")

    sizes: dict[str, Any] = {"groups": 2, "response_tokens": 12, "repeat": 1, "ragged": 1} if visit.dry else {}
    for name, modules in kinds.items():
        settings = [*visit.shaped(32, 512), "algorithm.kl.coef=0.0", "rollout.graphs=false"]
        settings.append(f"model.fused_modules=[{','.join(modules)}]")
        try:
            with opened_run(settings, visit.work / f"update_{name.split()[0]}") as (run, device):
                profile_update(
                    run.update, device, layouts=("grouped", "packed", "padded"),
                    report=lambda found, name=name: report(name, found), **sizes,
                )  # fmt: skip
            del run  # its weights are not the next one's memory
            device.empty_cache()
        except (ConfigError, RunError) as error:
            lines[name] = f"{name}: refused: {error}"
    return " | ".join(lines.values())


def step(visit: Visit) -> str:
    file = visit.out / "step.json"
    repeat = "1" if visit.dry else "3"
    visit.check("bench", "step", *visit.shaped(32, 512), "--layouts", "padded", "--repeat", repeat, "--json", str(file))
    found = json.loads(file.read_text())
    stages = {name: times["median_s"] for name, times in found["stages"].items()}
    layouts = {each["name"]: each["median_s"] for each in found["layouts"] if each["state"] == "timed"}
    parts = [f"{name} {seconds:.2f}" for name, seconds in stages.items() if seconds is not None]
    parts += [f"update {name} {seconds:.2f}" for name, seconds in layouts.items() if seconds is not None]
    return f"a step takes {found['step']['median_s']:.2f} s ({found['chosen']}): {', '.join(parts)} s"


def resume(visit: Visit) -> str:
    settings = [
        *("tiny_sort", "trainer.deterministic=true", "optim.schedule=constant", "trainer.max_steps=6"),
        *("trainer.save_every=2", "trainer.keep_checkpoints=10", f"trainer.prompts_per_step={2 if visit.dry else 16}"),
        *("trainer.threads=1", *QUIET),
    ]
    slow = visit.work / "slow_match.py"
    slow.write_text(SLOW_MATCH)
    settings.append(f"reward.functions=['{slow}:slow_match']")
    whole, cut = visit.work / "resume_whole", visit.work / "resume_cut"
    pause = {"VISIT_PAUSE": "0.01"}
    running = visit.start("hwgrpo", "train", *settings, f"trainer.output_dir={cut}", env=pause)
    while running.poll() is None and not (cut / "checkpoints" / "step-00000002" / "manifest.json").exists():
        time.sleep(0.005)
    if running.poll() is not None:
        raise FailedError(f"the run ended with {running.poll()} before it could be killed at its first checkpoint")
    running.kill()
    ended = len(step_metrics(cut))
    other = visit.start("hwgrpo", "train", *settings, f"trainer.output_dir={whole}")
    resumed = visit.hwgrpo("train", *settings, f"trainer.output_dir={cut}")
    if other.exit_code() or resumed:
        raise FailedError(f"the run that was not killed ended with {other.exit_code()}, the resumed one with {resumed}")
    start = json.loads((cut / "summary.json").read_text())["resumed_from"]
    if not start:
        raise FailedError("the run that was killed started again from step 0")
    return f"killed after step {ended} of 6, resumed from step {start}: {compare_checkpoints(whole, cut, 6)}"


def compare_checkpoints(one: Path, other: Path, step: int) -> str:
    """Return that the tensor files of two runs' checkpoints have the same bytes.

    Raises:
        FailedError: they differ, or there are none.
    """
    folders = [run / "checkpoints" / f"step-{step:08d}" for run in (one, other)]
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in folders]
    if not names[0] or names[0] != names[1]:
        raise FailedError(f"the checkpoints of step {step} have other files: {names[0]} and {names[1]}")
    unequal = [name for name in names[0] if (folders[0] / name).read_bytes() != (folders[1] / name).read_bytes()]
    if unequal:
        raise FailedError(f"the checkpoints of step {step} differ in {', '.join(unequal)} of {', '.join(names[0])}")
    return f"all {len(names[0])} files of the checkpoint of step {step} are equal bit by bit"


def fused(visit: Visit) -> str:
    return visit.pytest("fused", "tests/gpu", "-k", "test_modules or fused or fp32 or graphs")


def ragged(visit: Visit) -> str:
    steps, prompts = (1, 2) if visit.dry else (3, 16)
    settings = [
        *("tiny_sort", f"trainer.max_steps={steps}", f"trainer.prompts_per_step={prompts}", "trainer.threads=1"),
        *("trainer.save_every=0", *QUIET),
    ]
    results: list[str] = []
    for off in ("0", "1"):
        folder = visit.work / f"ragged_{off}"
        code = visit.hwgrpo("train", *settings, f"trainer.output_dir={folder}", env={CUDNN_OFF: off}, seconds=60)
        shown = {0: "", TIMED_OUT: ", stopped after 60 s"}.get(code, f", ended with {code}")
        results.append(f"cuDNN {'off' if off == '1' else 'on'}: steps of {step_seconds(folder)} s{shown}")
        say("; ".join(results))
        if code not in (0, TIMED_OUT):
            raise FailedError("; ".join(results))
    return "; ".join(results)


def trl(visit: Visit) -> str:
    tokens, steps = (4, 1) if visit.dry else (128, 2)
    settings = [*visit.shaped(32, tokens), f"trainer.max_steps={steps}"]
    missing = find_missing("trl")
    if missing and not visit.dry:
        raise NotHereError(f"{sys.executable} has no TRL: put it into the folder that PACKAGES names")
    results: list[str] = []
    seconds: dict[str, float] = {}
    for side, off, limit in (("ours", "1", 60), ("TRL", "1", 70), ("TRL", "0", 35), ("ours", "0", 35)):
        if missing and (side, off) != ("ours", "1"):
            continue
        name = f"{side} with cuDNN {'off' if off == '1' else 'on'}"
        folder = visit.work / f"trl_{side}_{off}"
        if side == "ours":
            code = visit.hwgrpo("train", *settings, f"trainer.output_dir={folder}", env={CUDNN_OFF: off}, seconds=limit)
            ended = [line["timing_s/step"] for line in step_metrics(folder)]
        else:
            folder.mkdir()
            arguments = [str(visit.work / "model"), str(folder), str(tokens), str(steps), "2" if visit.dry else "32"]
            code = visit.start("gpu_visit_trl", *arguments, env={CUDNN_OFF: off}).exit_code(limit)
            file = folder / "seconds.txt"
            ended = [float(each) for each in file.read_text().split()] if file.exists() else []
        if len(ended) == steps:  # of fewer, the last would be a first step with all that it prepares
            seconds[name] = ended[-1]
        shown = ", ".join(f"{each:.2f}" for each in ended) or "none ended"
        results.append(f"{name}: steps of {shown} s" + (f", stopped after {limit} s" if code == TIMED_OUT else ""))
        pair = [seconds.get(f"{each} with cuDNN off") for each in ("TRL", "ours")]
        if name == "TRL with cuDNN off" and pair[0] and pair[1]:
            results.append(f"TRL takes {pair[0] / pair[1]:.2f} times as long, with cuDNN off")
        say("; ".join(results))
        if code not in (0, TIMED_OUT):
            raise FailedError(f"{name} ended with {code}")
    if missing:
        raise NotHereError("; ".join([*results, "TRL is not installed"]))
    return "; ".join(results)


def head(visit: Visit) -> str:
    return bench_kernels(visit, "head", "B", "3", "--only", "linear_logprob,linear_token_loss")


def bench(visit: Visit, name: str) -> str:
    return bench_kernels(visit, name, name.removeprefix("bench-"), os.environ.get("REPEAT", "5"))


def bench_kernels(visit: Visit, name: str, shape: str, repeat: str, *options: str) -> str:
    file = visit.out / f"{name}.json"
    if visit.dry:
        shape, repeat, options = "16,32,300", "1", ("--only", "linear_logprob", "--no-memory")
    code = visit.hwgrpo("bench", "kernels", "--shape", shape, "--repeat", repeat, "--json", str(file), *options)
    if code:
        raise FailedError(f"hwgrpo bench kernels ended with {code}")
    cases = json.loads(file.read_text())["shapes"][0]["cases"]
    return (
        ", ".join(
            f"{case['name']} {side['median_s'] * 1e3:.2f} ms ({side['name']})"
            for case in cases
            for side in case["sides"]
            if side["state"] == "timed" and side["group"] == "ours"
        )
        or f"{len(cases)} cases, see {file.name}"
    )


def kernels(visit: Visit) -> str:
    visit.check("kernels")
    return "see the log"


def tests(visit: Visit) -> str:
    if visit.dry:
        return visit.pytest("tests", "tests/bench/test_times.py")
    return visit.pytest("tests", "tests/gpu", "-k", "not test_sanitizer")


def record(visit: Visit) -> str:
    commit = ["--commit", os.environ["COMMIT"]] if os.environ.get("COMMIT") else []
    if visit.dry:
        code = visit.start("record_hardware", "--help").exit_code()
    else:
        command = [sys.executable, "scripts/record_hardware.py", "--out", str(visit.out / "hardware"), *commit]
        code = subprocess.run(command, cwd=REPO).returncode
    if code:
        raise FailedError(f"scripts/record_hardware.py ended with {code}")
    return "only its options were printed" if visit.dry else "see hardware/"


def sanitizer(visit: Visit) -> str:
    import shutil

    # without it pytest would skip the tests and exit with 0
    if shutil.which("compute-sanitizer") is None:
        raise NotHereError("compute-sanitizer is not installed")
    return visit.pytest("sanitizer", "tests/gpu", "-k", "test_sanitizer")


def real(visit: Visit) -> str:
    model, rows = os.environ.get("SMOLLM2"), os.environ.get("GSM8K")
    folder = visit.out / "real"
    settings = [f"trainer.output_dir={visit.work / 'real'}"]
    if visit.dry:
        from hwgrpo.models.loading import resolve_model_path

        settings += [f"model.path={resolve_model_path('builtin://tiny?task=add&max=9&hidden=32&layers=1&steps=1')}"]
        settings += ["data.train=task://add?max=9", "data.validation=null", "data.chat=auto", "trainer.max_steps=1"]
        settings += ["trainer.prompts_per_step=2", "rollout.n=2", "rollout.max_response_tokens=4", *QUIET]
    elif not model or not rows:
        raise NotHereError(
            "set SMOLLM2 (the folder of scripts/fetch_smollm2.py) and GSM8K (that of `hwgrpo data gsm8k`)"
        )
    else:
        settings += [f"model.path={model}", f"data.train={rows}/train.parquet", f"data.validation={rows}/test.parquet"]
        settings += ["observe.progress=none", "observe.loggers=[jsonl]"]
    try:
        visit.check("train", "smollm2_135m_gsm8k", *settings)
    finally:
        folder.mkdir(exist_ok=True)
        for name in ("metrics.jsonl", "summary.json", "config.yaml", "completions.jsonl"):
            if (visit.work / "real" / name).exists():
                (folder / name).write_bytes((visit.work / "real" / name).read_bytes())
    steps = step_metrics(folder)
    ends = [f"{median(line['reward'] for line in part):.3f}" for part in (steps[:10], steps[-10:])]
    typical = median(line["timing_s/step"] for line in steps)
    validation = json.loads((folder / "summary.json").read_text())["validation"]
    greedy = [(row["before"], row["after"]) for row in validation if row["metric"] == "greedy"]
    solved = [f"greedy validation reward {before}, then {after}" for before, after in greedy]
    shown = f"median reward of the first and last ten {' and '.join(ends)}"
    return "; ".join([f"{len(steps)} steps, a step takes {typical:.2f} s", shown, *solved])


FUNCTIONS: dict[str, Callable[[Visit], str]] = {
    each.__name__: each
    for each in (
        *(parity, facts, decode, update, step, resume, fused, ragged, trl, head, lora, kernels, tests, record),
        *(sanitizer, real),
    )
}


def preload() -> None:
    """Import what items need, so that forks of this process need not; starts no thread and opens no device."""
    modules = (
        *("torch", "transformers", "peft", "pytest", "transformers.models.qwen2.modeling_qwen2"),
        *("transformers.models.qwen3.modeling_qwen3", "hwgrpo.cli.main", "hwgrpo.cli.train", "hwgrpo.cli.bench"),
        *("hwgrpo.cli.parity", "hwgrpo.cli.kernels", "hwgrpo.cli.detect", "hwgrpo.training.setup"),
        *("hwgrpo.training.finish", "hwgrpo.training.loop", "hwgrpo.training.strategies.single"),
        *("hwgrpo.rollout.local.engine", "hwgrpo.bench.decode_profile", "hwgrpo.bench.update_profile"),
        *("hwgrpo.bench.kernels.measure", "hwgrpo.parity.families", "torch.profiler", "hwgrpo_kernels.rows_torch"),
    )
    for name in modules:
        importlib.import_module(name)
    import gc

    gc.freeze()  # a collection in a fork would copy what is shared


def main(arguments: Sequence[str]) -> int:
    """Run one item; return its exit code."""
    name, out, work, *dry = arguments
    visit = Visit(Path(out), Path(work), dry == ["--dry"])
    try:
        say(bench(visit, name) if name.startswith("bench-") else FUNCTIONS[name](visit))
    except NotHereError as reason:
        say(f"not run here: {reason}")
        return NOT_HERE
    except FailedError as reason:
        say(f"failed: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

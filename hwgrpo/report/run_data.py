"""Contents of a run's folder: settings, environment, metrics and the run's status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.derived import largest_kl
from hwgrpo.config.schema import KlConfig
from hwgrpo.config.yaml_text import read_yaml
from hwgrpo.errors import ConfigError, error_text
from hwgrpo.observe import completions, summary, warnings
from hwgrpo.observe.history import RunHistory
from hwgrpo.observe.loggers import jsonl
from hwgrpo.observe.verdict import Verdict, judge
from hwgrpo.support.file_systems import lock as lock_file
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.support.run_files import open_to_read, read_whole

CONFIG = "config.yaml"


@dataclass
class RunRecord:
    """All of a run but its completions, which are read separately because they may be many."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    """environment.json, without `resumes`."""
    resumes: list[dict[str, Any]]
    """The records of the run's resumes, oldest first (`hwgrpo.training.resume_check`)."""
    kernels: dict[str, Any]
    metrics: dict[int, dict[str, float]]
    """step -> metrics; step 0 has the validation before training."""
    status: str
    """completed | interrupted | failed from its summary, else running | stopped."""
    summary: dict[str, Any]
    """As in summary.json; judged from the metrics if the run wrote none or has continued since."""
    verdict: Verdict
    warnings: list[dict[str, Any]]
    """{step, name, seen, meaning, remedies}, oldest first."""
    largest_kl: float | None
    """What a token's KL to the reference is clamped to; None: it is not."""
    problems: list[str] = field(default_factory=list)
    """Messages about files that could not be read."""


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder; the run may be finished, going on, or killed at any moment.

    Args:
        folder: `trainer.output_dir` of the run.

    Raises:
        ConfigError: there is no such folder, or it is not the folder of a run.
        DataError: metrics.jsonl or warnings.jsonl has a foreign line, other than a torn last one.
    """
    _check_folder(folder)
    problems: list[str] = []
    config = _read(folder / CONFIG, lambda text: read_yaml(text, CONFIG, Config), problems)
    environment = _read(folder / "environment.json", json.loads, problems)
    resumes = _resumes(environment.pop("resumes", []), problems)
    kernels = _read(folder / "kernels.json", json.loads, problems)
    closing = _read(folder / summary.FILE, json.loads, problems)
    metrics = jsonl.read_metrics(folder)
    history = RunHistory(_largest_kl(config))
    for step, values in sorted(metrics.items()):
        history.add(step, values)
    if not metrics:
        problems.append(_why_no_metrics(folder, config))
    # A summary of fewer steps than were logged is that of an earlier attempt: the run has gone on since.
    is_current = bool(closing) and (not metrics or closing.get("steps") == history.last_step)
    running = _is_held(folder / ".lock")
    status = "running" if running else str(closing.get("status")) if is_current else "stopped"
    if not is_current:
        closing = summary.build_summary(
            history,
            status=status,
            total_steps=int(environment.get("total_steps") or _planned(config)),
            resumed_from=0,
            wall_s=history.training_seconds,
            paths={
                what: folder / name
                for what, name in (("metrics", jsonl.FILE), ("completions", completions.FILE))
                if (folder / name).exists()
            },
        )
    recorded = list(read_lines(folder / warnings.FILE))
    verdict = judge(history, [warning["name"] for warning in recorded])
    return RunRecord(
        folder=folder,
        config=config,
        environment=environment,
        resumes=resumes,
        kernels=kernels,
        metrics=metrics,
        status=status,
        summary=closing,
        verdict=verdict,
        warnings=recorded,
        largest_kl=history.largest_kl,
        problems=problems,
    )


def _resumes(records: Any, problems: list[str]) -> list[dict[str, Any]]:
    if isinstance(records, list) and all(isinstance(record, dict) for record in records):
        return records
    problems.append("environment.json: its resumes are no list of records, so they are not shown")
    return []


def _largest_kl(config: Mapping[str, Any]) -> float | None:
    """Return the bound of a token's KL by the stored settings; those of another version may have other keys."""
    stored = (config.get("algorithm") or {}).get("kl") or {}
    known = {field.name for field in fields(KlConfig)}
    return largest_kl(KlConfig(**{name: value for name, value in stored.items() if name in known}))


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise ConfigError(f"{folder}: there is no such folder; name the folder of a run, its trainer.output_dir")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name the folder of a run, its trainer.output_dir")
    if (folder / CONFIG).is_file() or (folder / jsonl.FILE).is_file():
        return
    below = sorted({path.parent for path in folder.glob(f"*/{CONFIG}")})
    if below:
        remedy = "it contains the folders of runs, name one of them: " + ", ".join(map(str, below[:5]))
    else:
        remedy = "name the folder that a run wrote to, its trainer.output_dir"
    raise ConfigError(f"{folder} is not the folder of a run (it has neither {CONFIG} nor {jsonl.FILE}); {remedy}")


def _read(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    """Return a file's mapping, empty if it does not exist; an unreadable file adds a message to the problems.

    A report of the rest is worth more than none: a run may have been killed while it wrote this file.
    """
    if not path.exists():
        return {}
    try:
        value = parse(read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read: {error_text(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} has no mapping, so it is not shown")
        return {}
    return value


def _why_no_metrics(folder: Path, config: dict[str, Any]) -> str:
    loggers = (config.get("observe") or {}).get("loggers")
    if isinstance(loggers, list) and "jsonl" not in loggers:
        return f"no metrics: the curves need jsonl among observe.loggers, this run has {loggers}"
    return f"no metrics yet: {folder / jsonl.FILE} {'is empty' if (folder / jsonl.FILE).exists() else 'does not exist'}"


def _planned(config: dict[str, Any]) -> int:
    return int((config.get("trainer") or {}).get("max_steps") or 0)


def _is_held(lock: Path) -> bool:
    """Whether a run has locked its folder; checked with a shared lock, which is released at once."""
    if not lock.exists():
        return False
    try:
        with open_to_read(lock) as file:
            lock_file(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False  # an unreadable file: unknown, as on a file system without locks
    return False

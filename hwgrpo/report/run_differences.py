"""What differs between two runs besides their curves: settings, versions, machine, data, start and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hwgrpo.report.page import setting_rows
from hwgrpo.report.run_data import RunRecord

NOT_RECORDED = "not recorded"
NOT_COMPARED = ("trainer.output_dir", "trainer.resume", "observe")
"""Settings that name folders, logs and displays."""
WITHOUT_EFFECT = (
    *("trainer.save_every", "trainer.save_async", "trainer.keep_checkpoints", "trainer.save_final_model"),
    *("trainer.final_dtype", "trainer.validate_every", "trainer.validate_at_start", "trainer.resume_check"),
    *("trainer.capture_steps", "trainer.capture_weights", "trainer.profile_steps", "trainer.process_group_timeout"),
)
"""Settings that change no number of a training step."""
LENGTH = ("trainer.max_steps", "trainer.epochs")
"""Settings without an effect on the steps that two runs share, unless a schedule ends with the run."""
VERSIONS = ("hwgrpo", "source_sha256", "python", "torch", "transformers", "packages")
"""Keys of environment.json that are versions; those of no group are of the machine."""
_OTHER_GROUPS = ("data", "code", "template_date", "starts", "total_steps")


@dataclass(frozen=True)
class Difference:
    """A value that two runs do not share.

    Example:
        `Difference("settings", "optim.lr", "0.001", "0.002")`
    """

    group: str
    """settings | versions | machine | data | start."""
    name: str
    a: str
    b: str
    explains: bool = True
    """Whether it is a reason for results that are not equal to the bit."""


@dataclass(frozen=True)
class OneSidedWarning:
    """A warning that one of two runs reported."""

    name: str
    run: str
    """A | B."""
    step: int
    """Of its first report."""
    seen: str


def differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Return what differs, in the order of the groups."""
    return [*_settings(a, b), *_environments(a, b), *_data(a, b), *_starts(a, b)]


def reasons_against_equality(a: RunRecord, b: RunRecord, found: Iterable[Difference]) -> list[str]:
    """Return why two runs need not be equal to the bit; none: any difference between them is one.

    Args:
        a, b: the runs.
        found: their `differences`.
    """
    names: dict[str, list[str]] = {}
    for each in found:
        if each.explains:
            names.setdefault(each.group, []).append(each.name)
    reasons = [f"{group}: {', '.join(several[:3])}{', ...' * (len(several) > 3)}" for group, several in names.items()]
    for name, run in (("A", a), ("B", b)):
        rollout, trainer = _section(run.config, "rollout"), _section(run.config, "trainer")
        if run.environment.get("backend", "cpu") != "cpu" and not trainer.get("deterministic"):
            reasons.append(f"{name} ran on an accelerator without trainer.deterministic=true")
        if rollout.get("engine", "local") != "local":
            reasons.append(f"the engine of {name} does not promise equal bits")
        if rollout.get("partial") or _number(rollout.get("max_staleness")) > 1:
            reasons.append(f"which weights sample in {name} depends on its speed")
        if any(each.get("step") for each in _recorded_starts(run)) and run.environment.get("dtype") not in (
            None,
            "float32",
        ):
            reasons.append(f"{name} was resumed, which is exact in float32")
    return reasons


def one_sided_warnings(a: RunRecord, b: RunRecord) -> list[OneSidedWarning]:
    """Return the warnings that only one of the runs reported, by step."""
    first: list[dict[str, tuple[int, str]]] = []
    for run in (a, b):
        first.append({})
        for warning in run.warnings:
            first[-1].setdefault(str(warning.get("name")), (warning["step"], str(warning.get("seen", ""))))
    sides = (("A", first[0], first[1]), ("B", first[1], first[0]))
    only = [
        OneSidedWarning(name, run, *reported)
        for run, own, other in sides
        for name, reported in own.items()
        if name not in other
    ]
    return sorted(only, key=lambda each: (each.step, each.name))


def _settings(a: RunRecord, b: RunRecord) -> list[Difference]:
    rows = [{key: (value, default) for key, value, default, _ in setting_rows(run.config)} for run in (a, b)]
    ends_with_run = any(
        _section(run.config, "optim").get("schedule", "constant") != "constant"
        or _section(run.config, "rollout").get("final_temperature") is not None
        for run in (a, b)
    )
    no_effect = WITHOUT_EFFECT if ends_with_run else (*WITHOUT_EFFECT, *LENGTH)
    found = []
    for key in sorted(rows[0].keys() | rows[1].keys()):
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in NOT_COMPARED):
            continue
        default = next((row[key][1] for row in rows if key in row), None)
        values = [row[key][0] if key in row else default for row in rows]  # older runs lack newer settings
        if values[0] != values[1]:
            shown = [
                NOT_RECORDED if value is None else value if key in row else f"{value} (default)"
                for value, row in zip(values, rows, strict=True)
            ]
            found.append(Difference("settings", key, *shown, explains=key not in no_effect))
    return found


def _environments(a: RunRecord, b: RunRecord) -> list[Difference]:
    values = [
        _flat({key: value for key, value in run.environment.items() if key not in _OTHER_GROUPS}) | _kernels(run)
        for run in (a, b)
    ]
    versions = [{key: each[key] for key in each if key.split(".")[0] in VERSIONS} for each in values]
    machine = [{key: each[key] for key in each if key.split(".")[0] not in VERSIONS} for each in values]
    return [*_different("versions", *versions), *_different("machine", *machine)]


def _data(a: RunRecord, b: RunRecord) -> list[Difference]:
    found = []
    fingerprints = [run.environment.get("data") for run in (a, b)]
    both = [each if isinstance(each, Mapping) else {} for each in fingerprints]
    for name in sorted(both[0].keys() | both[1].keys()):
        shown = [_fingerprint(each.get(name)) for each in both]
        if both[0].get(name) != both[1].get(name):
            # validation data do not reach a training step
            explains = NOT_RECORDED not in shown and name != "validation"
            found.append(Difference("data", f"data.{name}", *shown, explains=explains))
    if None in fingerprints or any(each.group == "data" for each in found):
        dates = [str(run.environment.get("template_date", NOT_RECORDED)) for run in (a, b)]
        if dates[0] != dates[1]:
            found.append(Difference("data", "template_date", *dates, explains=False))
    code = [_flat(run.environment.get("code") or {}) for run in (a, b)]
    return [*found, *_different("data", *({f"sha256 of {key}": each[key] for key in each} for each in code))]


def _starts(a: RunRecord, b: RunRecord) -> list[Difference]:
    texts, notes, changed = [], [], False
    for run in (a, b):
        starts = _recorded_starts(run)
        several = len({_machine(each) for each in starts}) > 1
        texts.append("; ".join(_start(each) + _machine(each) * several for each in starts) or NOT_RECORDED)
        changed |= several
        notes.append([str(note) for each in starts for note in each.get("notes") or ()])
    found = [Difference("start", "starts", *texts, explains=changed)] if texts[0] != texts[1] else []
    for side, other, of in ((0, 1, "A"), (1, 0, "B")):
        # such as "changed since the checkpoint: optim.lr 0.001 -> 0.002"
        only = (note for note in notes[side] if note not in notes[other])
        found += [Difference("start", f"note of {of}", *((note, "-") if of == "A" else ("-", note))) for note in only]
    return found


def _recorded_starts(run: RunRecord) -> list[dict[str, Any]]:
    starts = run.environment.get("starts")
    if isinstance(starts, list):
        return [each for each in starts if isinstance(each, dict)]
    resumed = run.summary.get("resumed_from")
    return [{"step": 0}, {"step": resumed}] if resumed else []


def _start(start: Mapping[str, Any]) -> str:
    if not start.get("step"):
        return "from step 0"
    checkpoint = start.get("checkpoint")
    return f"resumed after step {start['step']}" + (f" from {checkpoint}" if checkpoint else "")


def _machine(start: Mapping[str, Any]) -> str:
    return f" on {start.get('device')} with {start.get('ranks')} ranks and torch {start.get('torch')}"


def _different(group: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the keys of two flat mappings whose values differ; one that is missing explains nothing."""
    return [
        Difference(group, key.removeprefix("packages."), _shown(key, a), _shown(key, b), key in a and key in b)
        for key in sorted(a.keys() | b.keys())
        if a.get(key, NOT_RECORDED) != b.get(key, NOT_RECORDED)
    ]


def _shown(key: str, values: Mapping[str, Any]) -> str:
    value = str(values.get(key, NOT_RECORDED))
    return value[:12] if "sha256" in key and key in values else value


def _kernels(run: RunRecord) -> dict[str, str]:
    chosen: dict[str, set[str]] = {}
    for each in run.kernels.get("choices") or ():
        chosen.setdefault(f"kernel {each.get('op')} ({each.get('dtype')})", set()).add(str(each.get("implementation")))
    return {key: ", ".join(sorted(names)) for key, names in chosen.items()}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {name: value} if name else {}
    flat: dict[str, Any] = {}
    for key, each in value.items():
        flat |= _flat(each, f"{name}.{key}" if name else str(key))
    return flat


def _fingerprint(value: Any) -> str:
    if not isinstance(value, Mapping):
        return NOT_RECORDED
    hashes = [
        f"{what} {str(value[key])[:12]}" for what, key in (("rows", "sha256"), ("text", "text_sha256")) if key in value
    ]
    return ", ".join([f"{value.get('rows')} rows", *hashes])


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

"""The page: a run's data and the assets in one HTML file, with texts of models escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.document import entries
from hwgrpo.config.written_config import shown_settings
from hwgrpo.errors import ConfigError, DataError, error_text
from hwgrpo.report.compact_completions import compact, read_completions
from hwgrpo.report.inlined_images import MOST_BYTES
from hwgrpo.report.resume_rows import resume_rows
from hwgrpo.report.run_data import CONFIG, RunRecord, read_run
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.support.run_files import write_whole

FILE = "report.html"
MOST_COMPLETIONS = 20_000
SCRIPTS = (
    "base.js",
    "scale.js",
    "view.js",
    "draw.js",
    "chart.js",
    "curves.js",
    "overview.js",
    "search.js",
    "pictures.js",
    "turns.js",
    "groups.js",
    "settings.js",
    "main.js",
)
"""In the order in which the page runs them, as one script."""


def write_report(
    run_dir: Path, output: Path, most_completions: int = MOST_COMPLETIONS, image_bytes: int = MOST_BYTES
) -> None:
    """Write the report of a run.

    Args:
        run_dir: folder of the run.
        output: the HTML file, written atomically.
        most_completions, image_bytes: see `read_completions`.

    Raises:
        ConfigError: `run_dir` is not the folder of a run, or the file cannot be written.
        DataError: one of its logs is damaged.
    """
    try:
        page = build_page(read_run(run_dir), read_completions(run_dir, most_completions, image_bytes))
    except (ConfigError, DataError):
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError) as error:
        raise DataError(
            f"{run_dir} has files that no run wrote, or that were changed: {error_text(error)}; move {CONFIG} and the "
            f"JSON files aside, one after another, to find which"
        ) from error
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, page)
    except OSError as error:
        raise ConfigError(f"the report {output} cannot be written: {error.strerror}; name another --output") from error


def build_page(record: RunRecord, completions: dict[str, Any]) -> bytes:
    """Return the page as UTF-8.

    Args:
        record: the run.
        completions: what `read_completions` returned.
    """
    style = _asset("page.css")
    script = "(() => {\n" + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    parts = {
        "title": html.escape(record.folder.resolve().name),
        # Only our own script and style may run, by their hashes, and nothing is loaded from anywhere: a second wall
        # behind the escaping of what models write.
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'",
        "style": style,
        "script": script,
        "run": embed(_run_data(record, completions)),
        "completions": embed(completions),
    }
    # One pass over the template alone: placeholders inside data are not replaced.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], _asset("page.html"))
    # Text that is not valid Unicode (a lone surrogate) turns into \udXXX, which is how JSON spells it.
    return page.encode("utf-8", "backslashreplace")


def embed(value: Any) -> str:
    """Return a value as JSON that is safe inside a `<script>` element.

    `<`, `>` and `&` are spelled as escapes, so that neither `</script>` nor `<!--` can occur in any text.
    """
    text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Outside strings JSON has none of these characters, so replacing them everywhere changes strings alone.
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found.group()):04x}", text)


def _run_data(record: RunRecord, completions: dict[str, Any]) -> dict[str, Any]:
    steps = sorted(record.metrics)
    names = sorted({name for values in record.metrics.values() for name in values})
    return {
        "name": record.folder.resolve().name,
        "folder": str(record.folder.resolve()),
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "status": record.status,
        "problems": record.problems,
        "warnings": record.warnings,
        "verdict": asdict(record.verdict),
        "kl_clamp": record.largest_kl,
        "summary": record.summary,
        "metrics": {
            "steps": steps,
            "series": {name: [compact(record.metrics[step].get(name)) for step in steps] for name in names},
        },
        "settings": setting_rows(record.config),
        "environment": record.environment,
        "resumes": resume_rows(record.resumes),
        "kernels": record.kernels,
        "completions": {
            "total": completions["total"],
            "kept": completions["kept"],
            "groups": len(completions["groups"]["uid"]),
            "images_left": completions["images_left"],
        },
    }


def _asset(name: str) -> str:
    return (resources.files("hwgrpo.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression by which a content security policy allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def setting_rows(config: Mapping[str, Any]) -> list[tuple[str, str, str | None, str]]:
    """Return (key, value, default, meaning) per setting in the order of the file.

    Args:
        config: the content of config.yaml.

    Returns:
        Values as YAML spells them, secrets hidden; the default is None where the schema has no such key (a run of
        another version).
    """
    known = {entry.key: entry for entry in entries()}
    rows = []
    for key, value in _leaves(shown_settings(config, Config), ""):
        entry = known.get(re.sub(r"\[\d+\]", "[]", key))
        rows.append((key, _show(value), entry.default if entry else None, entry.doc if entry else ""))
    return rows


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{key}[{i}]")
    else:
        yield key, value


def _show(value: Any) -> str:
    """Return a value as `hwgrpo.config.document` writes defaults, so that equal ones are equal texts."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if str(value).isprintable() else repr(value)

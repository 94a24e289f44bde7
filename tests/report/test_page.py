"""The page holds all of a run, loads nothing, and takes nothing a model wrote for markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.report.page import SCRIPTS, embed, write_report

HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "</SCRIPT ><img src=x onerror=alert(1)>",
    "<!-- <script> ]]> {{script}} {{completions}}",
    "a\u2028b\u2029c & &lt; \\u003c \x00 \ud800 é 漢 \U0001f600",
    "\\</script>\\\\",
]
STEPS = [{"step": step, "reward": 0.1 * step, "actor/grad_norm": "NaN"} for step in range(1, 8)]


class Elements(HTMLParser):
    """What a browser would see: tags with attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data

    def data(self, name: str):
        ids = [attrs.get("id") for tag, attrs in self.tags if tag == "script"]
        return json.loads(self.scripts[ids.index(name)])


def page_of(folder: Path) -> str:
    write_report(folder, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def line(response: str, **values):
    return {"step": 1, "uid": "0:1", "prompt": "p", "response": response, "reward": 1.0, "advantage": 0.5, **values}


def test_text_of_a_model_stays_text_wherever_it_stands(make_run):
    folder = make_run(
        STEPS, [line(text, prompt=text, ground_truth=text, source=text, extras={text: text}) for text in HOSTILE]
    )
    (folder / "environment.json").write_text(json.dumps({"device": HOSTILE[0]}))
    elements = Elements(page_of(folder))
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert not {"img", "iframe", "object", "base"} & {tag for tag, _ in elements.tags}
    completions = elements.data("completions-data")
    assert completions["rows"]["response"] == HOSTILE
    assert completions["texts"][completions["groups"]["prompt"][0]] == HOSTILE[0]
    assert elements.data("run-data")["environment"]["device"] == HOSTILE[0]


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_json_reads_back_the_same_and_holds_no_character_of_markup(text: str):
    embedded = embed({text: [text]})
    assert not set(embedded) & set("<>&\u2028\u2029")
    assert json.loads(embedded) == {text: [text]}


def test_the_name_of_the_folder_is_escaped_in_the_title(make_run):
    folder = make_run(STEPS)
    evil = folder.rename(folder.parent / "a<script>b&c")
    page = page_of(evil)
    assert "<title>a&lt;script&gt;b&amp;c · hwgrpo report</title>" in page
    assert [tag for tag, _ in Elements(page).tags].count("script") == 3


def test_the_page_names_no_address_and_its_policy_forbids_loading(make_run):
    page = page_of(make_run(STEPS))
    elements = Elements(page)
    assert not [(tag, attrs) for tag, attrs in elements.tags if {"src", "href", "srcset", "data"} & attrs.keys()]
    assert "@import" not in page
    assert "url(" not in page
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # a name space, not an address
    [policy] = [
        attrs["content"] for tag, attrs in elements.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_the_policy_allows_exactly_the_script_and_style_of_the_page(make_run):
    page = page_of(make_run(STEPS))
    for directive, element in (("script-src", "script"), ("style-src", "style")):
        text = page.rpartition(f"<{element}>")[2].partition(f"</{element}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in page


def test_no_script_of_the_page_turns_text_into_markup_or_code():
    folder = resources.files("hwgrpo.report") / "assets"
    assert {path.name for path in folder.iterdir() if path.name.endswith(".js")} == set(SCRIPTS)
    for name in SCRIPTS:
        text = (folder / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc|https?://(?!www\.w3\.org)",
            text,
        )


def test_the_page_holds_metrics_settings_environment_kernels_and_summary(trained: Path, tmp_path: Path):
    output = tmp_path / "new" / "page.html"
    write_report(trained, output)
    data = Elements(output.read_text(encoding="utf-8")).data("run-data")
    assert data["metrics"]["steps"] == list(range(7))
    rewards = data["metrics"]["series"]["reward"]
    assert rewards[0] is None
    assert all(isinstance(value, (int, float)) for value in rewards[1:])
    assert ["rollout.n", "4", "8"] in [row[:3] for row in data["settings"]]
    assert data["environment"]["total_steps"] == 6
    assert {choice["op"] for choice in data["kernels"]["choices"]} >= {"row_stats", "row_grad"}
    assert data["summary"]["status"] == "completed"
    assert data["completions"] == {"total": 96, "kept": 96, "groups": 24, "images_left": 0}


def test_settings_stand_beside_the_default_of_the_schema_and_unknown_ones_beside_none(make_run):
    folder = make_run(STEPS)
    (folder / "config.yaml").write_text(
        'algorithm: {process: {delimiter: "\\n"}}\noptim: {lr: 0.5, schedule: constant, old: null}\n'
        "reward:\n  functions:\n  - {weight: 2.0}\n"
    )
    settings = {
        key: (value, default) for key, value, default, _ in Elements(page_of(folder)).data("run-data")["settings"]
    }
    assert settings == {
        "algorithm.process.delimiter": ("'\\n'", "'\\n'"),
        "optim.lr": ("0.5", "1e-06"),
        "optim.schedule": ("constant", "constant"),
        "optim.old": ("null", None),
        "reward.functions[0].weight": ("2.0", "1.0"),
    }


def test_a_metric_that_is_not_finite_is_null(make_run):
    data = Elements(page_of(make_run(STEPS))).data("run-data")
    assert data["metrics"]["series"]["actor/grad_norm"] == [None] * 7


def test_a_report_that_cannot_be_written_leaves_the_old_one_and_names_the_file(make_run):
    folder = make_run(STEPS)
    (folder / "blocked").write_text("a file")
    with pytest.raises(ConfigError, match=r"blocked/report\.html cannot be written: .*--output"):
        write_report(folder, folder / "blocked" / "report.html")
    before = page_of(folder)
    (folder / "report.html.tmp").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(folder, folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8") == before

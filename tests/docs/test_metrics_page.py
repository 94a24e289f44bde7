"""docs/metrics.md lists what runs log: no more, no less, and when."""

import ast
import functools
import re

import pytest

from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.update.step_metrics import METRIC_NAMES
from tests.docs.pages import REPO, code, page, section, table
from tests.support.runs import reward_model_runs, runs, supervised_runs

PAGE = page("metrics.md")
ROWS = table(PAGE, "metric", "logged")
PARTS = {
    "<function>": ".+",
    "<kind>": "(errors|nans|timeouts)",
    "<source>": ".+",
    "<n>": r"\d+",
    "<metric>": ".+",
    "<stop>": "(done|max_turns|length|failed)",
    "<environment>": ".+",
    "<tool>": ".+",
    "<failure>": ".+",
}
FAMILIES = (
    "actor|agent|clip_ratio|critic|filter_groups|images|perf|prompt_length|response|response_length|reward|reward_failures|reward_model|rewards|rollout|rollout_corr|"
    "timing_s|tools|training|val|val-aux|val-core"
)
OFF_POLICY = ("trainer.prompts_per_update=2",)
RUNS = {
    "on policy": ("trainer.save_every=1",),
    "off policy": (*OFF_POLICY, "algorithm.kl.coef=0.1"),
    "stale": ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate", "rollout.group_timeout=1000"),
    "failing": ("reward.functions=[{name: FOLDER/failing.py:failing, on_error: value}, exact_match]",),
    "filtered": ("algorithm.filter_groups.enable=true", "data.difficulty.hard_threshold=0"),
    **{loss: (*OFF_POLICY, f"algorithm.loss.name={loss}") for loss in ("cispo", "gspo", "sapo", "gpg")},
    "agents": (
        *(
            "rollout.workflow=environment",
            "rollout.agent.environments=[FOLDER/failing.py:Echo, FOLDER/failing.py:Again]",
        ),
        *("rollout.agent.max_turns=2", "rollout.max_response_tokens=64", "data.max_prompt_tokens=200"),
        "reward.functions=[FOLDER/failing.py:even]",
    ),
    "images": (
        *("model.path=builtin://tiny?task=squares&steps=2&batch=8", "data.train=task://squares"),
        *("data.max_prompt_tokens=64", "rollout.max_response_tokens=4"),
    ),
    "online": (
        "reward.functions=[{name: online_reward_model, kwargs: {verifier: FOLDER/failing.py:even, verify: 1}}]",
    ),
}
FAILING = """
def failing(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("no score")


def even(solution_str):
    return float(len(solution_str) % 2 == 0)


class Echo:
    def reset(self, row):
        return None

    def step(self, action):
        return action.content, 0.5, False


class Again(Echo):
    pass
"""


def pattern(metric: str) -> str:
    """Return the pattern of the names that a metric of the page stands for."""
    return "".join(PARTS.get(part, re.escape(part)) for part in re.split(r"(<\w+>)", metric))


LISTED = {metric: row["logged"] for row in ROWS for metric in code(row["metric"])}
PATTERNS = {metric: re.compile(pattern(metric)) for metric in LISTED}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Return the lines of metrics.jsonl by run."""
    found = {}
    for name, overrides in RUNS.items():
        folder = tmp_path_factory.mktemp("runs")
        (folder / "failing.py").write_text(FAILING)
        given = [each.replace("FOLDER", str(folder)) for each in overrides]
        assert runs.run(folder / "run", "trainer.max_steps=3", *given) == "completed"
        found[name] = list(read_lines(folder / "run" / "metrics.jsonl"))
    return found


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the lines of metrics.jsonl of a supervised run."""
    folder = tmp_path_factory.mktemp("runs")
    assert supervised_runs.run(folder / "run", "trainer.max_steps=2") == "completed"
    return list(read_lines(folder / "run" / "metrics.jsonl"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the lines of metrics.jsonl of a reward model's training."""
    folder = tmp_path_factory.mktemp("runs")
    data = reward_model_runs.outcomes(folder / "rows.jsonl", 16)
    words = (f"data.train={data}", f"data.validation={data}", "trainer.max_steps=2")
    assert reward_model_runs.run(folder / "run", *words) == "completed"
    return list(read_lines(folder / "run" / "metrics.jsonl"))


@functools.cache
def strings() -> frozenset[str]:
    """Return the strings in the package's code, computed parts as <>."""
    found = set()
    for file in sorted((REPO / "hwgrpo").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "<>" for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def names_in_code() -> set[str]:
    """Return the strings that look like metrics; patterns of names do not."""
    return {name for name in strings() if re.fullmatch(rf"({FAMILIES})/[\w@<>/.-]*[^/*]", name)} - METRIC_NAMES.keys()


def test_every_metric_stands_once_on_the_page():
    metrics = [metric for row in ROWS for metric in code(row["metric"])]
    assert len(metrics) == len(set(metrics))


def test_every_metric_of_a_run_is_on_the_page(logged):
    names = {name for lines in logged.values() for line in lines for name in line}
    assert [name for name in sorted(names) if not any(each.fullmatch(name) for each in PATTERNS.values())] == []


def test_every_metric_of_supervised_training_is_on_the_page(supervised):
    names = {name for line in supervised for name in line}
    assert [name for name in sorted(names) if not any(each.fullmatch(name) for each in PATTERNS.values())] == []
    own = {metric for metric, when in LISTED.items() if when.startswith("`hwgrpo sft`")}
    assert len(own) == 3
    assert own <= names


def test_every_metric_of_a_reward_models_training_is_on_the_page(reward_model):
    names = {name for line in reward_model for name in line}
    assert [name for name in sorted(names) if not any(each.fullmatch(name) for each in PATTERNS.values())] == []
    own = {metric for metric, when in LISTED.items() if "`hwgrpo reward-model`" in when}
    assert len(own) == 9
    assert own <= names


def test_every_metric_that_the_code_names_is_on_the_page():
    listed = [re.sub(r"<\w+>", "<>", metric) for metric in LISTED]
    unknown = [
        name
        for name in names_in_code() - {"training/global_step"}  # the services' own axis
        if not any(re.match(rf"{re.escape(name).replace('<>', '.+')}(/|$)", metric) for metric in listed)
    ]
    assert sorted(unknown) == []


def test_every_metric_of_the_page_is_logged(logged, supervised, reward_model):
    names = {
        name for lines in (*logged.values(), supervised, reward_model) for line in lines for name in line
    } | names_in_code()
    names |= {f"actor/{name}" for name in strings() if name.isidentifier()}  # a loss's own, which get this prefix
    assert [metric for metric, each in PATTERNS.items() if not any(each.fullmatch(name) for name in names)] == []


def test_what_is_always_logged_is_in_every_step(logged):
    always = [each for metric, each in PATTERNS.items() if LISTED[metric] == "always" and metric != "step"]
    assert len(always) > 40
    for lines in logged.values():
        steps = [line for line in lines if "reward" in line]
        assert [line["step"] for line in steps] == [1, 2, 3]
        for each in always:
            assert all(any(each.fullmatch(name) for name in line) for line in steps), each.pattern


def test_what_depends_on_settings_is_logged_under_those_alone(logged):
    def has(run: str, name: str) -> bool:
        return any(name in line for line in logged[run])

    for name in ("actor/ppo_kl", "actor/ratio_mean", "actor/pg_clipfrac", "clip_ratio/low_mean", "kl"):
        assert (has("on policy", name), has("off policy", name)) == (False, True)
    clips = {
        loss: (has(loss, "actor/pg_clipfrac"), has(loss, "clip_ratio/low_mean"))
        for loss in ("cispo", "gspo", "sapo", "gpg")
    }
    assert clips == {"cispo": (True, False), "gspo": (True, True), "sapo": (False, False), "gpg": (False, False)}
    assert not has("gpg", "actor/ratio_mean")
    assert has("stale", "rollout/staleness_max")
    assert not has("on policy", "rollout/staleness_max")
    assert has("agents", "response_length/sampled/mean")
    assert not has("on policy", "response_length/sampled/mean")
    for name in ("rollout/groups_late", "rollout/groups_dropped", "val-aux/groups_dropped"):
        assert (has("on policy", name), has("stale", name)) == (False, True)
    steps = [line for line in logged["images"] if "reward" in line]
    assert [(line["perf/images_encoded"], line["perf/image_bytes_moved"]) for line in steps[1:2]] == [(4, 98_400)]
    assert ["timing_s/save" in line for line in logged["on policy"] if "reward" in line] == [False, True, True]


def test_a_validation_has_a_line_of_its_own(logged):
    lines = [line for line in logged["on policy"] if any(name.startswith("val-core/") for name in line)]
    assert [line["step"] for line in lines] == [0, 3]
    assert not any("reward" in line for line in lines)


def test_names_of_tutorials_point_at_metrics_of_the_page():
    rows = table(section(PAGE, "Names used elsewhere"), "name there", "here")
    there = {name for row in rows for name in code(row["name there"])}
    assert {"rewards/best", "rewards/worst", "objective/kl", "objective/entropy", "ppo_ratio_clipped"} <= there
    assert "advantage_std" in there
    for row in rows:
        assert all(name in LISTED for name in code(row["here"])), row

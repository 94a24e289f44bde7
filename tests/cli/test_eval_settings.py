"""Which settings `hwgrpo eval` measures with, and which of a run's it can do without."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.cli import eval, export
from hwgrpo.config import load_config
from hwgrpo.config.load import to_yaml
from hwgrpo.config.validate import check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.training.evaluate import build_evaluation
from tests.support.runs import runs

ROWS = Path(__file__).parents[1] / "support/runs/deepspeed.json"  # any file will do


@pytest.fixture
def run(tmp_path):
    """Return a function that writes the folder of a finished run with settings of its own, and its settings' text."""

    def write(*words: str, replaced: tuple[str, str] = ("", "")) -> Path:
        data = tmp_path / "train.jsonl"
        data.write_text("")
        base = ("model.path=builtin://tiny", f"data.train={data}", f"data.validation={ROWS}")
        text = to_yaml(load_config(None, [*base, "reward.functions=[exact_match]", *words]))
        assert replaced[0] in text
        (tmp_path / "config.yaml").write_text(text.replace(*replaced))
        (tmp_path / "final").mkdir()
        for name in ("config.json", "tokenizer_config.json"):
            (tmp_path / "final" / name).write_text("{}")
        data.unlink()
        return tmp_path

    return write


def settings(folder: Path, *words: str, max_rows: int | None = None):
    return eval.evaluation_settings(Namespace(recipe=str(folder), overrides=words, model=None, max_rows=max_rows))


@pytest.mark.parametrize(
    "key, replaced",
    [
        ("algorithm.advantage.name", ("  advantage:\n    name: grpo", "  advantage:\n    name: of_a_plug_in")),
        ("algorithm.loss.name", ("name: ppo_clip", "name: of_a_plug_in")),
        ("observe.loggers", ("- tensorboard", "- of_a_plug_in")),
        ("trainer.strategy", ("strategy: auto", "strategy: of_a_plug_in")),
        ("model.layout", ("layout: auto", "layout: of_a_plug_in")),
    ],
)
def test_what_a_plug_in_registered_for_training_need_not_be_here(run, key, replaced):
    folder = run(replaced=replaced)
    with pytest.raises(ConfigError, match=rf"{key}='of_a_plug_in' is not known"):
        load_config(folder / "config.yaml", data_may_be_missing=True)
    assert settings(folder).model.path == str(folder / "final")


def test_an_engine_that_is_not_known_is_an_error_as_before(run):
    with pytest.raises(ConfigError, match=r"rollout\.engine='of_a_plug_in' is not known"):
        settings(run(replaced=("engine: local", "engine: of_a_plug_in")))


def test_one_process_measures_what_several_have_trained_together(run):
    config = settings(run("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=4"))
    assert (config.trainer.strategy, config.trainer.tensor_parallel_size) == ("single", 1)


@pytest.mark.parametrize("recipe", [(), ("data.validation_max_rows=3",)])
@pytest.mark.parametrize(
    ("words", "max_rows", "expected"),
    [((), None, 0), ((), 7, 7), (("data.validation_max_rows=5",), None, 5), (("data.validation_max_rows=5",), 7, 7)],
)
def test_all_rows_are_measured_whatever_the_recipe_says_unless_the_command_limits_them(
    run, recipe, words, max_rows, expected
):
    assert settings(run(*recipe), *words, max_rows=max_rows).data.validation_max_rows == expected


def test_a_recipe_without_prompts_to_measure_on_is_not_blamed_for_their_number(run):
    assert settings(run(replaced=(f"validation: {ROWS}", "validation: null"))).data.validation is None


def test_a_measurement_says_which_rows_and_prompts_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"sort {'1' * n}=", "answer": "1"}) + "\n" for n in (3, 30, 4, 5)))
    words = ("data.max_prompt_tokens=16", f"data.validation={rows}", "data.validation_max_rows=3")
    config = runs.small(tmp_path / "run", *words, "reward.functions=[exact_match]")
    evaluation = build_evaluation(config, BACKEND, 0)
    evaluation.rewards.close()
    assert evaluation.notes[:2] == (
        "validation prompts longer than data.max_prompt_tokens=16: 1 dropped, 0 cut, 2 kept",
        "validation: 3 of 4 rows are read (data.validation_max_rows=3; 0 reads all)",
    )


def test_a_limit_of_rows_below_one_is_refused(run):
    with pytest.raises(ConfigError, match=r"--max-rows 0: use 1 or more, or leave it out for all rows"):
        settings(run(), max_rows=0)


def test_prompts_to_measure_on_that_are_not_there_are_an_error(run):
    with pytest.raises(ConfigError, match=r"data\.validation='gone\.jsonl'"):
        settings(run(), "data.validation=gone.jsonl")


def test_a_secret_that_is_not_set_is_null_and_named(run, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", "planted-8901")
    folder = run("reward.functions=[{name: exact_match, kwargs: {key: '${oc.env:JUDGE_KEY}'}}]")
    monkeypatch.delenv("JUDGE_KEY")
    assert settings(folder).reward.functions[0].kwargs == {"key": None}
    assert "reward.functions.0.kwargs.key is null: the environment variable JUDGE_KEY" in capsys.readouterr().err


def test_a_server_whose_address_is_not_known_is_not_asked(run, monkeypatch):
    monkeypatch.setenv("ADDRESS", "http://ada:planted@host")
    folder = run("rollout.engine=vllm_server", "rollout.server.url=${oc.env:ADDRESS}")
    monkeypatch.delenv("ADDRESS")
    with pytest.raises(ConfigError, match=r"rollout\.server\.url needs the environment variable ADDRESS"):
        settings(folder)


def test_one_process_evaluates_a_run_whose_ranks_shared_an_engine(run):
    folder = run("rollout.engine=vllm", "rollout.tensor_parallel_size=2")
    check_world_size(settings(folder), 1)
    assert settings(folder, "rollout.engine=vllm_server").rollout.tensor_parallel_size == 2


def test_an_evaluation_uses_a_server_that_is_named_and_else_takes_local_for_auto(run):
    folder = run("rollout.engine=auto")
    assert settings(folder).rollout.engine == "auto"
    assert settings(folder, "rollout.server.url=http://host:1").rollout.engine == "vllm_server"


TRUSTS = ("trust_remote_code: false", "trust_remote_code: true")
SCORE = "def score(completions, **_):\n    return [0.0 for _ in completions]\n"


def test_a_runs_folder_cannot_have_the_code_of_a_model_run(run):
    folder = run(replaced=TRUSTS)
    with pytest.raises(ConfigError, match=r"have model\.trust_remote_code=true, .* add model\.trust_remote_code=true"):
        settings(folder)
    assert settings(folder, "model.trust_remote_code=true").model.trust_remote_code
    assert not settings(folder, "model.trust_remote_code=false").model.trust_remote_code


def test_a_runs_folder_cannot_have_the_code_of_a_reward_model_run(run, tmp_path):
    (tmp_path / "mine.py").write_text(SCORE)
    functions = f"reward.functions=[{{name: '{tmp_path}/mine.py:score', kwargs: {{trust_remote_code: true}}}}]"
    folder = run(functions)
    with pytest.raises(ConfigError, match=r"reward\.functions\.0\.kwargs\.trust_remote_code=true"):
        settings(folder)
    assert settings(folder, functions)


def test_the_code_that_a_runs_folder_names_is_printed_before_it_runs(run, tmp_path, capsys):
    (tmp_path / "plug.py").write_text("import sys\nprint('plugged', file=sys.stderr)\n")
    (tmp_path / "mine.py").write_text(SCORE)
    folder = run(f"reward.functions=['{tmp_path}/mine.py:score']")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("plugins: []", f"plugins: ['{tmp_path}/plug.py']"))
    settings(folder)
    printed = capsys.readouterr().err
    assert f"names code, which is run as who made that folder wrote it: {tmp_path}/plug.py, {tmp_path}/mine" in printed
    assert printed.index("names code") < printed.index("plugged")


def test_an_export_runs_the_code_of_a_model_only_where_the_command_says_so(monkeypatch, tmp_path):
    recipe = {"model.path": "m", "data.train": "d", "reward.functions": ["exact_match"]}
    config = load_config(recipe, data_may_be_missing=True)
    config.model.trust_remote_code = True
    monkeypatch.setattr(export, "_checkpoint", lambda folder: SimpleNamespace(note=None, folder=folder))
    monkeypatch.setattr(export, "_settings", lambda checkpoint: config)
    with pytest.raises(ConfigError, match="add --trust-remote-code"):
        export.run(parsed("c", str(tmp_path / "out")))
    monkeypatch.setattr("hwgrpo.models.loading.load_tokenizer", lambda model: pytest.fail("loads"))
    with pytest.raises(pytest.fail.Exception, match="loads"):
        export.run(parsed("c", str(tmp_path / "out"), "--trust-remote-code"))


def parsed(*words: str) -> Namespace:
    parser = ArgumentParser()
    export.add_arguments(parser)
    return parser.parse_args(words)

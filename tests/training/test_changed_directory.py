"""A reward that changes the working directory breaks no relative path of a run."""

import sys
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.models.loading import resolve_model_path
from tests.support.runs import runs

WHEN = {
    "its file is run": "os.chdir({there!r})\ndef f(solution_str): return len(open('scale').read())",
    "it is called": "def f(solution_str):\n    os.chdir({there!r})\n    return len(open('scale').read())",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Change to a folder with a model, data and a folder for a reward to change to; return the words of a run."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "scale").write_text("x")
    not_here = ("model.path", "reward.", "data.train", "data.validation", "trainer.valid")
    small = [word for word in runs.SMALL if not word.startswith(not_here)]
    (tmp_path / "model").symlink_to(resolve_model_path(next(w for w in runs.SMALL if w.startswith("model.path"))[11:]))
    (tmp_path / "recipe.yaml").write_text("{}\n")
    rows = "".join(f'{{"prompt": "sort {n}=", "answer": "{n}"}}\n' for n in range(120, 128))
    (tmp_path / "train.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    functions = "[{name: 'rewards.py:f'}, {name: 'other.py:g', timeout: 60, on_error: mask_sample}]"
    (tmp_path / "more.csv").write_text("prompt,answer\nsort 130=,130\n")
    data = ["data.train=[train.jsonl,more.csv]", f"reward.functions={functions}"]
    return ["recipe.yaml", *small, *data, "model.path=model", "trainer.output_dir=run"]


@pytest.mark.parametrize("when", WHEN)
def test_a_reward_that_changes_the_directory_breaks_no_path(when, project, tmp_path, capsys, monkeypatch):
    there = str(tmp_path / "elsewhere")
    (tmp_path / "rewards.py").write_text(f"import os\n{WHEN[when].format(there=there)}\n")
    # the process of another reward ends with each call: a new one finds its file, and starts where the run did
    (tmp_path / "other.py").write_text("import os\nopen('recipe.yaml').close()\ndef g(solution_str): os._exit(0)\n")

    def command(*words):
        """Run a command as a process of its own would: in this folder, with no reward's file loaded."""
        monkeypatch.chdir(tmp_path)
        for name in [name for name in sys.modules if name.startswith("hwgrpo_user_")]:
            monkeypatch.delitem(sys.modules, name)
        assert main(list(words)) == 0, capsys.readouterr()

    words = ["train", *project, "trainer.max_steps=1", "trainer.prompts_per_step=1", "rollout.n=2"]
    command(*words, "--dry-run")
    assert Path.cwd() == tmp_path  # what else the plan looks at lies where it did
    command(*words)
    assert (tmp_path / "run" / "final").is_dir()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["scale"]
    assert "path: model\n" in (tmp_path / "run" / "config.yaml").read_text()  # as it was written
    command(*words, "trainer.max_steps=2")
    command("data", "inspect", "train.jsonl", "--reward", "rewards.py:f")

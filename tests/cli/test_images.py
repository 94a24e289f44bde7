"""What a person sees of a model that reads images: logs, chat, evaluation, plans and notes of one tiny run."""

import io
import json
import re
from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND
from PIL import Image

from hwgrpo.agents.action import ParsedTurn, ToolCall
from hwgrpo.catalog import CALL_FORMATS
from hwgrpo.cli.main import main
from hwgrpo.data.picture_tasks import LOOK
from hwgrpo.models.tiny_vision import CHAT_TEMPLATE
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.report.compact_completions import read_completions
from tests.support.runs import runs

MODEL = "builtin://tiny?task=squares&steps=40&batch=16&lr=1e-3"
SETTINGS = (
    f"model.path={MODEL}",
    "data.train=task://squares",
    "data.max_prompt_tokens=64",
    "reward.functions=[exact_match]",
    "trainer.max_steps=2",
    "observe.progress=plain",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run, with what it printed in printed.txt."""
    folder = tmp_path_factory.mktemp("squares") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed := io.StringIO())
        assert runs.run(folder, *SETTINGS) == "completed"
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs a command with lines of a person; it returns exit code, output and errors."""

    def call(*arguments: object, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        code = main([*map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_logs_the_images_of_its_prompts(run):
    for record in records(run / "completions.jsonl"):
        [image] = record["images"]
        assert Image.open(run / image["file"]).size == (image["width"], image["height"]) == (32, 32)
        assert _color(run / image["file"]) == record["ground_truth"][0]


def test_a_trajectory_is_logged_and_reported_with_the_images_that_it_observed(tmp_path):
    folder = tmp_path / "run"
    settings = (
        "model.path=builtin://tiny?task=look&steps=80&batch=16&lr=1e-3",
        "data.train=task://look",
        "data.max_prompt_tokens=32",
        "rollout.workflow=environment",
        "rollout.agent.environments=[looking]",
        "rollout.max_response_tokens=40",
        "reward.functions=[environment]",
        "trainer.max_steps=2",
    )
    assert runs.run(folder, *settings) == "completed"
    looked = [record for record in records(folder / "completions.jsonl") if record.get("observed_images")]
    assert looked
    for record in looked:
        [image] = record["observed_images"]
        assert _color(folder / image["file"]) == record["ground_truth"][0]
        assert "_pad|>" not in record["response"]
    data = read_completions(folder, 100)
    turns = [turn for outcome in data["rows"]["outcomes"].values() for turn in outcome["turns"]]
    shown = [index for turn in turns for index in turn.get("images", ())]
    assert len(shown) == len(looked)
    assert all((turn["role"] == "user") == ("images" in turn) for turn in turns)
    assert all(data["images"][index][0].startswith("data:image/png;base64,") for index in shown)


LOOKING = '''
from PIL import Image


def look():
    """Show a picture."""
    return [{"type": "text", "text": ""}, Image.new("RGB", (32, 32), (220, 40, 40))]
'''


def test_a_run_shows_and_logs_the_images_of_a_tool_and_resumes_bitwise(tmp_path, monkeypatch):
    """Of the model that asks with `look`, which is a call here; results are messages of the user."""

    def calls(text: str) -> ParsedTurn:
        return ParsedTurn("", (ToolCall("look", {}),)) if text == LOOK else ParsedTurn(text)

    monkeypatch.setitem(CALL_FORMATS._entries, "looks", calls)
    (tmp_path / "tool.py").write_text(LOOKING)
    role = "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{# tools #}"
    template = CHAT_TEMPLATE.replace("<|{{ message.role }}|>", role + "<|{{ message.role }}|>")
    (tmp_path / "template.jinja").write_text(template)
    settings = (
        "model.path=builtin://tiny?task=look&steps=80&batch=16&lr=1e-3",
        f"model.chat_template={tmp_path}/template.jinja",
        "data.train=task://look",
        "data.max_prompt_tokens=32",
        "rollout.workflow=tools",
        f"rollout.agent.tools=['{tmp_path}/tool.py:look']",
        "rollout.agent.call_format=looks",
        "rollout.max_response_tokens=40",
        "reward.functions=[{name: exact_match, text: last_turn}]",
        "trainer.validate_every=0",
        "trainer.validate_at_start=false",
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert runs.run(whole, *settings, "trainer.max_steps=2") == "completed"
    assert runs.run(resumed, *settings, "trainer.max_steps=1") == "completed"
    assert runs.run(resumed, *settings, "trainer.max_steps=2") == "completed"
    found = [runs.everything(folder) for folder in (whole, resumed)]
    for record in (record for each in found for record in each["completions"]):
        del record["outcome"]["seconds"]
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["completions"] == found[1]["completions"]
    looked = [record for record in records(whole / "completions.jsonl") if record["outcome"]["calls"]]
    assert looked
    for record in looked:
        assert record["outcome"]["messages"][1] == {"role": "user", "content": [{"type": "image"}]}
        [image] = record["observed_images"]
        assert _color(whole / image["file"]) == "r"
        assert "_pad|>" not in record["response"]
    data = read_completions(whole, 100)
    turns = [turn for outcome in data["rows"]["outcomes"].values() for turn in outcome["turns"]]
    assert len([index for turn in turns for index in turn.get("images", ())]) == len(looked)


def _color(file: Path) -> str:
    """Return the first letter of the color that squares in a picture have."""
    thumbnail = Image.open(file)
    pixels = [thumbnail.getpixel((x, y)) for x in range(2, 32, 4) for y in range(2, 32, 4)]
    shown = {
        tuple(int(value > 150) for value in pixel) for pixel in pixels if isinstance(pixel, tuple) and max(pixel) > 150
    }
    colors = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 0): "y"}
    [color] = shown
    return colors[color]


def test_a_dry_run_counts_what_is_trained_and_says_what_sees_images(run):
    plan = make_plan(runs.small(run, *SETTINGS, "trainer.max_steps=3"), BACKEND, 1, allow_finished=True).text
    printed = (run / "printed.txt").read_text()
    [trained] = re.findall(r"([\d,]+) trainable parameters", printed)
    assert f" parameters, {trained} trainable" in plan
    [parameters, seeing] = re.findall(r"([\d,]+) parameters(?: are|, [\d,]+ trainable)", plan)
    assert int(parameters.replace(",", "")) == sum(int(each.replace(",", "")) for each in (trained, seeing))
    assert "neither is trained (model.train_vision)" in plan
    assert "task://squares: 1,000 prompts with images of at most 16 tokens, longest" in plan
    assert "features of images, at most" in plan
    for each in (plan, printed):
        assert "rollout decodes with the model's own forward" not in each


@pytest.mark.parametrize(
    ("settings", "said", "all_trained"),
    [
        (("model.train_vision=projector",), "the projector is trained (model.train_vision)", False),
        (("model.train_vision=all",), "both are trained (model.train_vision)", True),
        (("model.lora.rank=2", "model.lora.vision=all"), "both are trained (model.lora.vision)", False),
    ],
)
def test_a_dry_run_says_which_parts_are_trained(tmp_path, settings, said, all_trained):
    plan = make_plan(runs.small(tmp_path / "run", *SETTINGS, *settings), BACKEND, 1).text
    assert said in plan
    [(parameters, trained)] = re.findall(r"([\d,]+) parameters, ([\d,]+) trainable", plan)
    assert (parameters == trained) == all_trained


def test_notes_name_no_token_that_shows_images(run):
    plan = make_plan(runs.small(run, *SETTINGS, "trainer.max_steps=3"), BACKEND, 1, allow_finished=True).text
    for text in (plan, (run / "printed.txt").read_text()):
        assert "_pad|>" not in text
        assert "<|vision" not in text


def test_a_plan_without_data_says_which_images_it_assumes(command, tmp_path):
    def plan(*more: str) -> str:
        code, shown, _ = command("plan", "tiny_squares", f"model.path={MODEL}", "--chip", "H100 SXM", *more)
        assert code == 0
        return " ".join(shown.split())

    shown = plan()
    assert "an image of 64 tokens in each prompt (--image-tokens), responses" in shown
    assert "fits images prefill" in shown
    assert "an image of 16 tokens in each prompt" in plan("--image-tokens", "16")
    shown = plan("--image-tokens", "0")
    assert "image" not in shown
    code, _, problem = command("plan", "tiny_squares", "--image-tokens", "-1")
    assert (code, "--image-tokens -1: use 0 or more" in problem) == (2, True)
    words = ("data.train=absent.jsonl", f"trainer.output_dir={tmp_path}/run", "trainer.max_steps=2")
    _, shown, _ = command("train", "tiny_squares", f"model.path={MODEL}", *words, "--dry-run")
    assert "assumed: an image of 64 tokens in each prompt, as many as data.max_prompt_tokens allows" in shown


def test_an_evaluation_writes_the_images_beside_its_completions(run, command, tmp_path):
    file = tmp_path / "out.jsonl"
    stale = tmp_path / "out-images" / f"{'0' * 24}.png"
    stale.parent.mkdir()
    stale.write_bytes(b"")
    code, shown, _ = command("eval", run, "--n", "2", "--max-rows", "3", "--completions", file, "--json")
    assert code == 0
    assert json.loads(shown)["prompts_with_images"] == 3
    written = records(file)
    assert len(written) == 9
    named = {image["file"] for record in written for image in record["images"]}
    assert {f"out-images/{each.name}" for each in stale.parent.iterdir()} == named
    assert len(named) == 3
    assert all(Image.open(tmp_path / name).size == (32, 32) for name in named)


def test_the_model_answers_what_is_asked_of_an_image_as_it_does_in_an_evaluation(run, command, tmp_path):
    file = tmp_path / "out.jsonl"
    assert command("eval", run, "--n", "1", "--max-rows", "8", "--completions", file)[0] == 0
    greedy = [record for record in records(file) if record["kind"] == "greedy"]
    assert len({record["response"] for record in greedy}) > 1, "the image matters"
    for row, record in enumerate(greedy[:3]):
        image = tmp_path / record["images"][0]["file"]
        code, shown, _ = command("chat", run, "--image", image, "--greedy", typed="what?\n")
        assert code == 0
        assert shown.splitlines()[0] == f"image {image}"
        assert _policy(shown) == [record["response"]]
        code, shown, _ = command("chat", run, "--row", row, "--greedy")
        assert "[image 32x32]" in shown
        assert _policy(shown) == [record["response"]]
        assert f"reward function exact_match: {record['reward']:g}" in shown


def _policy(shown: str) -> list[str]:
    turns = [line for line in shown.splitlines() if line.startswith("policy: ")]
    return [turn.removeprefix("policy: ").removesuffix(" (cut at the limit of tokens)") for turn in turns]


def test_several_images_are_shown_and_the_conversation_goes_on(run, command):
    [one, other] = sorted((run / "images").iterdir())[:2]
    images = ("--image", one, "--image", other)
    code, shown, errors = command("chat", run, *images, "--greedy", typed="what?\nwhat?\n")
    assert code == 0, errors
    assert len(_policy(shown)) == 2
    assert shown.count("\nuser: what?\n") == 2
    for limit, answered in ((40, 0), (44, 1)):  # the second prompt has the first turn, too
        setting = f"data.max_prompt_tokens={limit}"
        code, shown, errors = command("chat", run, *images, setting, "--greedy", typed="what?\nwhat?\n")
        assert (code, len(_policy(shown))) == (1, answered)
        assert setting in errors


def test_a_line_adds_an_image_to_the_next_message(run, command):
    [one, other] = sorted((run / "images").iterdir())[:2]
    first = command("chat", run, "--image", one, "--greedy", typed="what?\n")[1]
    code, shown, errors = command("chat", run, "--greedy", typed=f"/image {one}\nwhat?\n/image {other}\nwhat?\n")
    assert code == 0, errors
    assert "type your message; /image FILE shows an image with it;" in shown
    assert _policy(shown)[0] == _policy(first)[0]
    assert len(_policy(shown)) == 2
    assert [line for line in shown.splitlines() if line.startswith("image ")] == [f"image {one}", f"image {other}"]
    limit = "data.max_prompt_tokens=40"  # both images have 18 tokens with those around them
    assert command("chat", run, limit, "--greedy", typed=f"/image {one}\nwhat?\nwhat?\n")[0] == 0
    code, _, errors = command("chat", run, limit, "--greedy", typed=f"/image {one}\nwhat?\n/image {other}\nwhat?\n")
    assert (code, limit in errors) == (1, True), "the second message has its image, too"
    code, shown, _ = command("chat", run, "--greedy", typed="/image missing.png\nwhat?\n")
    assert (code, len(_policy(shown))) == (0, 1), "a mistake in a path ends no conversation"
    assert "/image missing.png: there is no such file" in shown


def test_a_model_that_reads_images_is_talked_to_without_one(run, command):
    code, shown, _ = command("chat", run, typed="what?\n")
    assert code == 0
    assert len(_policy(shown)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("RUN", "--image", "missing.png"), "--image missing.png: there is no such file"),
        (("RUN", "--image", "broken.png"), "--image broken.png: image 1 is of no known format"),
        (("RUN", "--image", "IMAGE", "--row", "1"), "a row has images of its own; leave out --image"),
        (("tiny_guess", "--image", "IMAGE"), "an environment shows what it has itself; leave out --image"),
        ((runs.SMALL[0][11:], "--image", "IMAGE"), "reads text alone; use a model that reads images"),
    ],
)
def test_images_that_cannot_be_shown_are_refused(run, command, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("broken.png").write_text("no image")
    names = {"RUN": run, "IMAGE": next((run / "images").iterdir())}
    code, _, errors = command("chat", *(names.get(each, each) for each in arguments), typed="what?\n")
    assert code == 2
    assert said in errors


def test_a_resumed_run_keeps_the_images_of_the_steps_that_it_keeps(run, tmp_path):
    folder = tmp_path / "run"
    settings = (*SETTINGS, "trainer.save_every=1", "observe.progress=none")
    assert runs.run(folder, *settings, "trainer.max_steps=1") == "completed"
    (folder / "images" / f"{'0' * 24}.png").write_bytes(b"")  # of a step after the checkpoint
    assert runs.run(folder, *settings) == "completed"
    assert records(folder / "completions.jsonl") == records(run / "completions.jsonl")
    names = [sorted(each.name for each in (each / "images").iterdir()) for each in (folder, run)]
    assert names[0] == names[1]

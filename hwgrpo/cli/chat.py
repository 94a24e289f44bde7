"""`hwgrpo chat`: play one episode in an environment, or talk to a model, turn by turn."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.support.text import terminal_line, terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hwgrpo.agents.action import Action, StepResult
    from hwgrpo.config import Config
    from hwgrpo.training.evaluate import Evaluation
    from hwgrpo.values import Prompt

HELP = "play one episode in an environment turn by turn, with a model or by hand, or talk to a model"
ROWS = "object://chat"
"""The row of a command without data."""
ADD_IMAGE = "/image "
"""Begins a line that adds an image to the next message, for a model that reads images."""
CUT = " (cut at the limit of tokens)"
WEEK = 7 * 24 * 3600.0
"""Seconds that a person may think."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="RUN | RECIPE | MODEL",
        help="a run's folder, an adapter or a checkpoint in it, a recipe, or a model (folder, hub name, builtin://...)."
        " Where its rollout.workflow is environment or tools, the episode of a row is played; else you are the user",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. rollout.temperature=0.7")
    parser.add_argument("--env", metavar="FILE.py:CLASS", help="play in this environment")
    parser.add_argument(
        "--row", type=int, help="row of the validation data, else of the training data, from 0 (default 0)"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show this image to the model with your first message; several, in their order, by several --image",
    )
    parser.add_argument(
        "--by-hand",
        action="store_true",
        help="you type the turns of the policy: no model is loaded, and none need be named. A \\ at the end of a line "
        "continues the turn",
    )
    parser.add_argument("--greedy", action="store_true", help="decode greedily")


def run(args: argparse.Namespace) -> int:
    """Play; return the exit code."""
    if args.target is not None and re.match(r"[\w.]+=", args.target) and not Path(args.target).exists():
        args.overrides, args.target = [args.target, *args.overrides], None
    if args.target is None and not args.by_hand:
        raise ConfigError("name a run, a recipe or a model, or type the turns yourself with --by-hand")
    if args.row is not None and args.row < 0:
        raise ConfigError(f"--row {args.row}: rows are counted from 0")
    with ExitStack() as stack:
        return _run(args, stack)


def _run(args: argparse.Namespace, stack: ExitStack) -> int:
    from hwgrpo.cli.backend_selection import prepare_host
    from hwgrpo.cli.eval import checkpoint_of
    from hwgrpo.config.schema import RewardFunctionConfig
    from hwgrpo.support.given_objects import given

    rows: list[dict[str, Any]] = [{}]
    stack.enter_context(given({ROWS: rows}))
    bytes_folder = None
    if args.target is None:
        args.target, bytes_folder = "builtin://tiny", stack.enter_context(tempfile.TemporaryDirectory())
    is_model = _is_model(args.target)
    args.recipe, args.model, args.max_rows = args.target, None, None
    config = _settings(args, is_model)
    talks = config.rollout.workflow not in ("environment", "tools")
    if talks and args.by_hand:
        raise ConfigError("--by-hand plays in an environment: name one with --env FILE.py:CLASS")
    if args.image and (not talks or args.row is not None):
        why = "a row has images of its own" if talks else "an environment shows what it has itself"
        raise ConfigError(f"--image is for a model that you talk to, and {why}; leave out --image")
    host = prepare_host(config)  # before torch is imported
    if bytes_folder is not None:
        from hwgrpo.models.tiny import byte_tokenizer

        byte_tokenizer().save_pretrained(bytes_folder)
        Path(bytes_folder, "config.json").write_text('{"model_type": "llama"}')  # of text alone
        config.model.path = config.model.tokenizer = bytes_folder
    display = Transcript(typed=args.by_hand)
    user, with_images = None, talks and _reads_images(config, args.image)
    if talks:
        if args.row is None:
            display.images(images := _images(config, args.image))
            adding = f"; {ADD_IMAGE}FILE shows an image with it" if with_images else ""
            display.say(f"type your message{adding}; end the input (Ctrl-D) to leave")
            content = _ask_message(config, display, images) if with_images else display.ask("user")
            if content is None:
                return 0
            rows[0] = {config.data.prompt_key: [{"role": "user", "content": content}]}
            config.data.images.key = None  # of the run's own rows
            config.reward.functions = [RewardFunctionConfig("length")]  # others may need an answer
        user = partial(display.ask, "user")
        config.rollout.workflow = "tools"  # of which there are none: turns follow one another
        if with_images:
            config.rollout.workflow = "single_turn"
    scores_rows = (not talks or (with_images and args.row is not None)) and not (is_model or args.env)
    config.trainer.process_group_timeout = WEEK

    from hwgrpo.agents.followed_episode import FollowedWorkflow, InputEnded, PersonEngine
    from hwgrpo.training.evaluate import build_evaluation

    evaluation = build_evaluation(
        config,
        host.backend,
        host.local_rank,
        None if is_model else checkpoint_of(args),
        workflow=None if with_images else partial(FollowedWorkflow, display=display, user=user),
        sampler=partial(PersonEngine, ask=partial(display.ask, "policy")) if args.by_hand else None,
    )
    stack.callback(evaluation.engine.close)
    stack.enter_context(evaluation.rewards)
    for note in (*evaluation.notes, *evaluation.engine.notes):
        if "validation" not in note:  # of all rows, of which one is played
            print(f"hwgrpo: {terminal_line(note)}", file=sys.stderr)
    try:
        if with_images and args.row is None:
            _talk(evaluation, config, rows, args, display)
        else:
            _play(evaluation, args, display, scores_rows=scores_rows)
    except InputEnded:
        display.say("\nended by you")
    return 0


def _is_model(target: str) -> bool:
    """Return whether the argument is a model, not a recipe, nor the folder of a run, an adapter or a checkpoint."""
    folder = Path(target)
    if folder.is_dir():
        of_run = ("config.yaml", "manifest.json", "adapter_config.json")
        return not any((folder / name).is_file() for name in of_run) and (
            (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file()
        )
    return target.startswith("builtin://") or ("/" in target and not target.endswith((".yaml", ".yml")))


def _settings(args: argparse.Namespace, is_model: bool) -> Config:
    """Return the settings, with a row at the end of the validation data that is read."""
    from hwgrpo.cli.eval import UNUSED, evaluation_settings
    from hwgrpo.config import load_config
    from hwgrpo.data.sources import validation_source

    given = {each.partition("=")[0] for each in args.overrides}
    own = []
    if args.env is not None:
        own += ["rollout.workflow=environment", f"rollout.agent.environments=[{{name: '{args.env}'}}]"]
    if is_model or args.env is not None:
        own.append("reward.functions=[length]")  # a reward is needed, and not shown
    if is_model:
        own += [f"model.path={args.target}", f"data.train={ROWS}", "rollout.max_response_tokens=2048"]
        own = [each for each in own if each.partition("=")[0] not in given]
        config = load_config(None, [*own, *args.overrides], data_may_be_missing=True, unread=UNUSED)
        config.trainer.strategy = "single"
    else:
        args.overrides = [*(each for each in own if each.partition("=")[0] not in given), *args.overrides]
        config = evaluation_settings(args, all_rows=False)
    if config.rollout.workflow not in ("environment", "tools") and args.row is None:
        config.data.validation = ROWS
    if validation_source(config.data) is None:
        config.data.validation, config.data.validation_split = config.data.train, config.data.split
    config.data.validation_max_rows = (args.row or 0) + 1
    return config


def _reads_images(config: Config, images: Sequence[str]) -> bool:
    """Return whether the model reads images.

    Raises:
        ConfigError: it does not, and there are some.
    """
    from hwgrpo.models.loading import load_model_config
    from hwgrpo.models.placeholders import reads_images

    if reads_images(load_model_config(config.model)):
        return True
    if images:
        raise ConfigError(
            f"--image {images[0]}: model.path={config.model.path!r} reads text alone; use a model that reads images, "
            "or leave out --image"
        )
    return False


def _images(config: Config, files: Sequence[str], option: str = "--image ") -> list[dict[str, str]]:
    """Return images as parts of a message.

    Args:
        config: the settings.
        files: their paths.
        option: what named them, for messages.

    Raises:
        ConfigError: a file is missing or broken.
    """
    from hwgrpo.data.images import ImageReader

    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{option}{file}: there is no such file")
        try:
            ImageReader(config.data.images).read_all([str(Path(file).absolute())], Path(), f"{option}{file}")
        except DataError as error:
            raise ConfigError(str(error)) from error
    return [{"type": "image", "path": str(Path(file).absolute())} for file in files]


def _ask_message(config: Config, display: Transcript, images: Sequence[Mapping[str, str]] = ()) -> Any:
    """Return the content of the person's next message, text or parts; None at the end of the input.

    Args:
        config: the settings of images.
        display: asks.
        images: parts that the message begins with; lines with `ADD_IMAGE` add more.
    """
    parts = [*images]
    while (said := display.ask("user")) is not None and said.startswith(ADD_IMAGE):
        try:
            added = _images(config, [said.removeprefix(ADD_IMAGE).strip()], ADD_IMAGE)
        except ConfigError as error:
            display.say(terminal_line(str(error)))
            continue
        display.images(added)
        parts += added
    return [*parts, {"type": "text", "text": said}] if parts and said is not None else said


def _talk(
    evaluation: Evaluation,
    config: Config,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
    display: Transcript,
) -> None:
    """Answer what the person says, turn by turn; each turn is a prompt with the conversation so far.

    Args:
        evaluation: its prompt is the first message.
        config: the settings of its data and model.
        rows: the row that it was made of, which is changed.
        args: the command's.
        display: shows and asks.
    """
    from hwgrpo.data.prompts import build_dataset
    from hwgrpo.models.loading import load_tokenizer

    tokenizer, dataset = load_tokenizer(config.model), evaluation.dataset
    while True:
        text = _respond(evaluation, dataset.prompt(0, -1), args, display)
        said = _ask_message(config, display)
        if said is None:
            return
        for mark in dataset.marks:  # a poor policy may write one, and no message may have it
            text = text.replace(mark, "")
        messages = [*rows[0][config.data.prompt_key], {"role": "assistant", "content": text}]
        rows[0] = {config.data.prompt_key: [*messages, {"role": "user", "content": said}]}
        dataset = build_dataset(config.data, tokenizer, "validation", images=dataset.images)
        assert dataset is not None


def _respond(evaluation: Evaluation, prompt: Prompt, args: argparse.Namespace, display: Transcript) -> str:
    """Show the model's response to a prompt, and return it."""
    from dataclasses import replace

    from hwgrpo.values import PromptBatch

    sampling = replace(evaluation.sampling, n=1, **({"greedy": True} if args.greedy else {}))
    completions = evaluation.engine.generate(PromptBatch((prompt,)), sampling)
    display.response(completions.texts[0], finished=bool(completions.finished[0]))
    return completions.texts[0]


def _play(evaluation: Evaluation, args: argparse.Namespace, display: Transcript, *, scores_rows: bool) -> None:
    """Play the episode of the row, and show how it ended."""
    from dataclasses import replace

    from hwgrpo.observe.completions import labelled_text
    from hwgrpo.values import PromptBatch

    dataset, row = evaluation.dataset, args.row or 0
    if row >= dataset.available:
        raise ConfigError(f"--row {row}: {dataset.name} has {dataset.available} rows, counted from 0")
    if row not in dataset.kept:
        raise ConfigError(
            f"--row {row}: its prompt has more tokens than data.max_prompt_tokens={dataset.config.max_prompt_tokens}; "
            "raise that, or use another row"
        )
    prompt = dataset.prompt([*dataset.kept].index(row), -1)
    if not display.has_asked:
        display.prompt(labelled_text(prompt))
    batch = PromptBatch((prompt,))
    sampling = replace(evaluation.sampling, n=1, **({"greedy": True} if args.greedy else {}))
    completions = evaluation.engine.generate(batch, sampling)
    if completions.outcomes:
        display.end(completions.outcomes[0], int(completions.lengths[0]))
    elif len(completions):
        display.response(completions.texts[0], finished=bool(completions.finished[0]))
    if len(completions) and scores_rows:
        rewards = evaluation.rewards.score(batch, completions, drawing=("chat", None, "sampled", 0))
        display.rewards({name: float(values[0]) for name, values in rewards.per_function.items()})


class Transcript:
    """Prints an episode, and asks for what a person says.

    Args:
        typed: the person types the policy's turns, and sees them already.
    """

    def __init__(self, *, typed: bool) -> None:
        from rich.console import Console

        self._typed = typed and sys.stdin.isatty()
        self.has_asked = False
        """Whether the person has said something."""
        self._console = Console(highlight=False, soft_wrap=True, emoji=False)

    def prompt(self, text: str) -> None:
        """Print the prompt as the model reads it."""
        self._line("prompt", "\n" + text.strip("\n"), "dim")

    def images(self, images: Sequence[Mapping[str, str]]) -> None:
        """Print which images are shown."""
        for image in images:
            self.say(f"image {terminal_line(image['path'])}")

    def response(self, text: str, *, finished: bool) -> None:
        """Print a response that is no turn of an episode."""
        self._line("policy", text + ("" if finished else CUT), "bold blue")

    def turn(self, action: Action) -> None:
        """Print a turn of the policy."""
        from hwgrpo.observe.trajectory_text import message_text

        if action.parsed.reasoning:
            self._line("reasoning", action.parsed.reasoning, "dim")
        if not self._typed or action.calls:
            cut = "" if action.finished else CUT
            self._line("policy", (message_text(action.message) or action.text) + cut, "bold blue")

    def answer(self, step: StepResult) -> None:
        """Print the reward of a turn, and what is observed."""
        from hwgrpo.observe.trajectory_text import message_text, speaker

        if step.reward:
            self.say(f"  reward {step.reward:+g}")
        for name, result in step.results:
            if result.failure:
                self.say(f"  {terminal_line(name) or 'a call'} failed: {result.failure}")
        if not step.done:
            for message in step.messages:
                self._line(speaker(message), message_text(message), "bold magenta")

    def end(self, outcome: Mapping[str, Any], tokens: int) -> None:
        """Print why the trajectory ended."""
        turns = len(outcome["turn_rewards"])
        calls = sum(outcome["calls"].values())
        parts = [f"{turns} turn{'s' * (turns != 1)}", f"{tokens} tokens", *([f"{calls} tool calls"] if calls else [])]
        self.say(f"\nended: {outcome['stop']} after {', '.join(parts)}; reward of the turns {outcome['reward']:g}")
        if outcome["failure"]:
            self._line("failure", outcome["failure"], "bold red")

    def rewards(self, values: Mapping[str, float]) -> None:
        """Print what reward functions gave."""
        for name, value in values.items():
            shown = "none" if math.isnan(value) else f"{value:g}"
            self.say(f"reward function {terminal_line(name)}: {shown}")

    def say(self, text: str) -> None:
        """Print a line of the command's own."""
        self._console.print(text, markup=False)

    def ask(self, who: str) -> str | None:
        r"""Return what the person types, with lines that end with \ continued; None at the end of the input.

        Raises:
            KeyboardInterrupt: by Ctrl-C, at once.
        """
        lines, prompt = [], f"{who}: "
        with interruptible():
            while True:
                try:
                    line = input(prompt if sys.stdin.isatty() else "")
                except EOFError:
                    return None
                lines.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    break
                prompt = "  "
        self.has_asked = True
        said = "\n".join(lines)
        if not sys.stdin.isatty() and who == "user":
            self._line(who, said, "bold magenta")
        return said

    def _line(self, who: str, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"{terminal_line(who)}: ", style), terminal_lines(text), sep="", markup=False)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise at once: an event loop otherwise waits for the line that is being typed."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not the main thread, which gets no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What an image costs in a step: sampling and update of groups that share it, against as many tokens of text.

    python benchmarks/image_steps.py
    python benchmarks/image_steps.py --tower all
    python benchmarks/image_steps.py --decoding

A Qwen2-VL of random weights with the proportions of the published 2B (width of the tower to that of the text model, and
their depths), groups of 8 responses to a prompt with one image. The other step has the same model, responses and length
of prompt, with tokens of text in place of the image's. Both ways alternate, and the first round is a warm-up; a round
has images of its own, so that none is known from the round before. Times are the processor's.

`--decoding` compares sampling alone, after images: by the lean step, and by the model's own forward as in earlier
versions. Both must draw the same tokens, or the benchmark ends. They alternate, and the first round is a warm-up.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

from local_engine import SAMPLES  # first: it sets variables that torch reads

import torch  # isort: skip
import transformers  # isort: skip

from hwgrpo.data.image_prompts import image_axes
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.models.vision import freeze_vision
from hwgrpo.rollout.local import engine as engine_module
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.layouts import GROUPED
from hwgrpo.training.policy.micro_batch import build_micro_batch, split_micro_batches
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Prompt, PromptBatch, PromptImages, Sampling

PATCH, MERGE = 14, 2
BEGIN, END, IMAGE, VIDEO = range(100, 104)
TEXT = 90
"""Tokens of text are below."""


@dataclass
class Step:
    """One way to make a step, and what it took."""

    name: str
    with_images: bool
    seconds: list[float]
    """Of the processor, per round: sampling and update."""
    encoded: int = 0
    moved_bytes: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192, help="width of the text model")
    parser.add_argument("--layers", type=int, default=7, help="of the text model")
    parser.add_argument("--side", type=int, default=224, metavar="PIXELS", help="of the image")
    parser.add_argument("--text-tokens", type=int, default=32, help="of a prompt, besides the image's")
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4, help="per step, with 8 responses each")
    parser.add_argument("--tower", choices=("none", "projector", "all"), default="none", help="what is trained of it")
    parser.add_argument("--decoding", action="store_true", help="compare two ways to sample, without updates")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="one round of a tiny model")
    args = parser.parse_args(argv)
    if args.smoke:
        args.hidden, args.layers, args.side, args.text_tokens = 48, 1, 56, 4
        args.response_tokens, args.prompts, args.repeat = 4, 2, 1
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    steps = Steps(args)
    if args.decoding:
        print(compare_decoding(steps, args))
        return 0
    ways = [Step("tokens of text", False, []), Step("an image", True, [])]
    for round_number in range(args.repeat + 1):
        for way in ways:
            steps.run(way, round_number)
    grid = args.side // PATCH
    print(
        f"{args.prompts} prompts of {args.text_tokens} tokens of text and {(grid // MERGE) ** 2} of an image of "
        f"{args.side} x {args.side} pixels, {SAMPLES} responses of {args.response_tokens} tokens each; tower trained: "
        f"{args.tower}; {args.threads} thread(s)\n"
    )
    print(
        "| in place of the image | CPU seconds per step | of text | images encoded | bytes of pixels moved | of one |"
    )
    print("|---|---|---|---|---|---|")
    text = median(ways[0].seconds[1:])
    for way in ways:
        took = median(way.seconds[1:])
        copy = steps.pixel_bytes * args.prompts * (args.repeat + 1)
        moved = f"{way.moved_bytes:,} | {way.moved_bytes / copy:.2f}"
        print(f"| {way.name} | {took:.2f} | {took / text:.2f} | {way.encoded} | {moved} |")
    return 0


def compare_decoding(steps: Steps, args: argparse.Namespace) -> str:
    """Return a table of the tokens per second of the processor by both ways to decode."""
    with patch.object(engine_module, "check_lean_step", lambda *_, **__: "it is the other side"):
        own = steps.new_engine(copied=True)
    sides = {"its own forward": own, "the lean step": steps.new_engine()}
    paths = [engine.decode_path for engine in sides.values()]
    if paths != ["model", "lean"]:
        raise SystemExit(f"the sides decode by {paths}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens = 0
    for round_number in range(args.repeat + 1):
        prompts = steps.prompts(round_number, with_images=True)
        sampled = []
        for name, engine in sides.items():
            began = time.process_time()
            sampled.append(engine.generate(prompts, Sampling(SAMPLES, args.response_tokens, seed=round_number)))
            seconds[name].append(time.process_time() - began)
        theirs, ours = sampled
        tokens = len(ours.tokens)
        if not torch.equal(theirs.tokens, ours.tokens):
            raise SystemExit("both sides must draw the same tokens")
        if float((theirs.logprobs - ours.logprobs).abs().max()) > 1e-4:
            raise SystemExit("log-probs differ by more than 1e-4")
    rates = {name: tokens / median(each[1:]) for name, each in seconds.items()}
    base = rates["its own forward"]
    lines = [f"| {name} | {rate:,.0f} | {rate / base:.2f} |" for name, rate in rates.items()]
    heading = (
        f"{args.prompts} prompts with an image, encoded by each side; {SAMPLES} responses of {args.response_tokens} "
        f"tokens each; text model of {args.layers} layers, {args.hidden} wide; {args.threads} thread(s)\n"
    )
    columns = ["| decoded by | tokens/s (CPU) | of its own forward |", "|---|---|---|"]
    return "\n".join([heading, *columns, *lines])


class Steps:
    """The model, and a step with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._grid = args, args.side // PATCH
        self._model = model = _model(args.hidden, args.layers)
        freeze_vision(model, args.tower)
        self._policy = PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
        self._engine = self.new_engine()
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
        self.pixel_bytes = self._prompt(0, 0, with_images=True).images.nbytes  # type: ignore[union-attr]

    def new_engine(self, *, copied: bool = False) -> LocalEngine:
        """Return an engine that samples with the model, or with a copy that has images encoded for itself."""
        return LocalEngine(
            copy.deepcopy(self._model) if copied else self._model,
            character_tokenizer(""),
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            max_sequences=self._args.prompts * SAMPLES,
        )

    def prompts(self, round_number: int, *, with_images: bool) -> PromptBatch:
        """Return the prompts of a round."""
        return PromptBatch(
            tuple(self._prompt(round_number, i, with_images=with_images) for i in range(self._args.prompts))
        )

    def run(self, way: Step, round_number: int) -> None:
        """Make one step, and add its time."""
        args, images = self._args, self._policy.images
        assert images is not None
        prompts = self.prompts(round_number, with_images=way.with_images)
        before, began = (images.encoded, images.moved_bytes), time.process_time()
        sampling = Sampling(SAMPLES, args.response_tokens, seed=round_number)
        completions = self._engine.generate(prompts, sampling)
        ones = torch.ones(len(completions))
        batch = assemble(prompts, completions, ones, ones.bool())
        self._policy.train()
        for rows in split_micro_batches(batch, range(len(batch)), 10**6, GROUPED, args.hidden):
            micro = build_micro_batch(batch, rows, {"advantage": "advantages"}, GROUPED)
            self._policy(micro, lambda stats, inputs: (-stats.logprob * inputs["advantage"], {})).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        way.seconds.append(time.process_time() - began)
        way.encoded += images.encoded - before[0]
        way.moved_bytes += images.moved_bytes - before[1]

    def _prompt(self, round_number: int, number: int, *, with_images: bool) -> Prompt:
        draw = torch.Generator().manual_seed(1000 * round_number + number)
        words = torch.randint(3, TEXT, (self._args.text_tokens - 2,), generator=draw).tolist()
        side = self._grid // MERGE
        uid = f"{round_number}:{number}"
        if not with_images:
            shown = torch.randint(3, TEXT, (side**2,), generator=draw).tolist()
            return Prompt(uid, "", (BEGIN, *shown, END, *words), None, {})
        ids = (BEGIN, *[IMAGE] * side**2, END, *words)
        pixels = torch.randn(self._grid**2, 3 * 2 * PATCH**2, generator=draw)
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, self._grid, self._grid]])}
        axes = image_axes(ids, IMAGE, [(side, side)])
        return Prompt(uid, "", ids, None, {}, images=PromptImages(inputs, uid, IMAGE, axes))


def _model(hidden: int, layers: int) -> Any:
    """Return a model whose tower has 5/6 of the text model's width and 8/7 of its layers, as the published 2B."""
    torch.manual_seed(0)
    heads = max(2, hidden // 32)
    text = {
        "vocab_size": 104,
        "hidden_size": hidden,
        "intermediate_size": 6 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 6),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": _sections(hidden // heads // 2),
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    width = 5 * hidden // 6 // 8 * 8
    vision = {
        "depth": -(-8 * layers // 7),
        "embed_dim": width,
        "num_heads": max(1, width // 80),
        "hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return transformers.Qwen2VLForConditionalGeneration(config).float()


def _sections(half: int) -> list[int]:
    return [half - 2 * (half // 3), half // 3, half // 3]


if __name__ == "__main__":
    raise SystemExit(main())

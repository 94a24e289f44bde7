"""`hwgrpo plan RECIPE key=value ...`: estimates of memory and step time per chip, with none of them present."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo.planning.memory import Memory
    from hwgrpo.planning.scale_plan import ChipPlan, ScalePlan

HELP = "estimate memory and step time of a recipe on chips, with none of them present"
COLUMN = 10
LABEL, WIDTH = 11, 123
NO_ROLLOUT = "none: sft trains on given responses"
PHASES = ("images", "prefill", "decode", "scoring", "update", "optimizer", "exchange", "sync")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recipe", help="recipe YAML, or the name of a shipped recipe (qwen3_8b_math)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="training devices per node (default 1)")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="number of nodes (default 1)")
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="single, ddp, fsdp2, zero1, zero2, zero3; fsdp2+offload, zero3+offload (default: the recipe's)",
    )
    parser.add_argument(
        "--for",
        choices=("train", "sft"),
        default="train",
        dest="planned",
        help="the command of the run: sft has no rollout and no reference model (default train)",
    )
    parser.add_argument(
        "--rollout",
        choices=("local", "colocated", "separate"),
        help="colocated: vLLM in the training process, rollout.tensor_parallel_size devices per engine; separate: "
        "rollout on separate devices, each with a shard of every weight (default: the recipe's engine; for auto the "
        "one that a run selects where it is installed)",
    )
    parser.add_argument(
        "--rollout-devices",
        type=int,
        metavar="N",
        help="devices for rollout (default: as few as weights and KV cache fit on)",
    )
    parser.add_argument(
        "--chip",
        action="append",
        metavar="NAME",
        help="a chip of the table (part of its name is enough), or name=TFLOP/s,GB/s,GiB; may be repeated",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        metavar="SHARE",
        help="model FLOPs utilisation: share of the matrix rate (default 0.4; 0.3 for mixtures of experts)",
    )
    parser.add_argument(
        "--mbu", type=float, metavar="SHARE", help="model bandwidth utilisation in decoding (default 0.6)"
    )
    parser.add_argument("--link", type=float, metavar="GB/S", help="bandwidth between devices (default 50)")
    parser.add_argument(
        "--host-link", type=float, metavar="GB/S", help="bandwidth between a device and its host (default 25)"
    )
    parser.add_argument(
        "--image-tokens",
        type=int,
        metavar="N",
        help="tokens of the image in each prompt, for a model that reads images; 0: there is none (default: as many as "
        "data.max_prompt_tokens and data.images.max_pixels allow)",
    )
    parser.add_argument("--usable", type=float, metavar="SHARE", help="usable share of a chip's memory (default 0.9)")
    parser.add_argument("--json", action="store_true", help="print JSON (schema hwgrpo.plan/1), bytes and seconds")


def run(args: argparse.Namespace) -> int:
    """Print the plan; return the exit code."""
    for option in ("devices", "nodes", "rollout_devices"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: use 1 or more")
    for option, most in (("mfu", 1.0), ("mbu", 1.0), ("usable", 1.0), ("link", math.inf), ("host_link", math.inf)):
        value = getattr(args, option)
        if value is not None and not 0 < value <= most:
            raise ConfigError(
                f"--{option.replace('_', '-')} {value}: use a number above 0{' and at most 1' if most == 1 else ''}"
            )
    if args.image_tokens is not None and args.image_tokens < 0:
        raise ConfigError(f"--image-tokens {args.image_tokens}: use 0 or more")
    supervised = args.planned == "sft"
    if supervised and (args.rollout or args.rollout_devices):
        raise ConfigError("--rollout and --rollout-devices have no effect with --for sft, which samples nothing")
    from hwgrpo.cli.chips import chosen_chips
    from hwgrpo.config import load_config
    from hwgrpo.config.supervised import supervised_settings

    used = supervised_settings if supervised else lambda config: config
    config = used(
        load_config(args.recipe, args.overrides, data_may_be_missing=True, variables_may_be_missing=True, used=used)
    )
    if args.rollout == "local":
        config.rollout.engine, config.rollout.tensor_parallel_size = "local", 1
    elif args.rollout == "colocated":
        config.rollout.engine = "vllm"
    chips = chosen_chips(args.chip, config)

    from hwgrpo.planning.planned_device import USABLE
    from hwgrpo.planning.scale_plan import Cluster, plan_at_scale
    from hwgrpo.planning.step_time import Rates
    from hwgrpo.rollout.engine_kind import engine_kind
    from hwgrpo.rollout.shared_devices import shares_device

    rates = {name: getattr(args, name) for name in ("mfu", "mbu") if getattr(args, name) is not None}
    rates |= {name: 1e9 * getattr(args, name) for name in ("link", "host_link") if getattr(args, name) is not None}
    own = engine_kind(config.rollout).samples_with_policy or shares_device(config.rollout)
    separate = args.rollout == "separate" or not own
    separate &= not supervised
    if args.rollout_devices and not separate:
        raise ConfigError(
            f"--rollout-devices {args.rollout_devices} needs rollout on separate devices; add --rollout separate"
        )
    cluster = Cluster(
        devices=args.devices * args.nodes,
        nodes=args.nodes,
        strategy=args.strategy,
        separate=separate,
        samplers=args.rollout_devices or 0,
        supervised=supervised,
        image_tokens=args.image_tokens,
        usable=USABLE if args.usable is None else args.usable,
        rates=Rates(**rates),
    )
    plan = plan_at_scale(config, cluster, chips)
    print(json.dumps(plan.to_json(), indent=1) if args.json else text(plan))
    return 0


def _places(plan: ScalePlan) -> list[str]:
    """Return where responses are sampled, by chip where that differs, as lines."""
    if plan.cluster.supervised:
        return [NO_ROLLOUT]
    places: dict[str, list[str]] = {}
    for chip in plan.chips:
        places.setdefault(_place(chip), []).append(chip.name)
    named = [f"{', '.join(chips)}: {place}" if len(places) > 1 else place for place, chips in places.items()]
    return [line for each in named for line in textwrap.wrap(each, WIDTH - LABEL, subsequent_indent="  ")]


def _place(chip: ChipPlan) -> str:
    from hwgrpo.rollout.engine_kind import engine_kind
    from hwgrpo.rollout.shared_devices import sleeps

    rollout = chip.config.rollout
    if chip.work.is_elsewhere:
        return "split: on devices of its own"
    name = f"rollout.engine=auto, planned as {rollout.engine}" if chip.engine_notes else rollout.engine
    if engine_kind(rollout).samples_with_policy:
        reasons = [f" ({note})" for note in chip.engine_notes[1:] if note.startswith("not ")]
        return f"{name}, with the policy itself{''.join(reasons)}"
    parts = [name, "which must be installed"] if chip.engine_notes else [name]
    if rollout.tensor_parallel_size > 1:
        parts.append(f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}")
    if chip.engine_share is not None:
        parts.append(f"rollout.gpu_memory_utilization={chip.engine_share:g}")
    awake = "sleeps" if sleeps(rollout, on_host=False) else "stays awake"
    return f"{', '.join(parts)}, shared: on the training devices, where it {awake} during updates"


def text(plan: ScalePlan) -> str:
    """Return a plan as text."""
    shape, cluster, first = plan.shape, plan.cluster, plan.chips[0]
    trained = "" if shape.trainable == shape.parameters else f", {_count(shape.trainable)} trained"
    nodes = "" if cluster.nodes == 1 else f" on {cluster.nodes:,} nodes"
    devices = f"{cluster.devices:,} device{'s' * (cluster.devices > 1)}{nodes}"
    sharding = "tensor parallel size" if plan.shards_layers else "sequence parallel size"
    shared = f", {sharding} {plan.shared_by}" if plan.shared_by > 1 else ""
    computes = f"{str(plan.work.dtype).removeprefix('torch.')}, {plan.layout} layout{shared}"
    lines = [
        f"model      {plan.model}: {shape.architecture}, {_count(shape.parameters)} parameters{trained}",
        f"devices    {devices}, {plan.strategy}; {computes}",
        *(f"{'' if number else 'rollout':<{LABEL}}{line}" for number, line in enumerate(_places(plan))),
        "",
        f"estimated memory of a device ({first.name})",
        *_components(first.memory),
        *(f"  {note}" for note in filter(None, (*plan.uncounted, plan.padding))),
        "",
        *_table(plan.chips),
    ]
    misfits = [chip for chip in plan.chips if chip.instead]
    if misfits:
        lines += ["", "configurations that fit", *(f"  {chip.name}: {chip.instead}" for chip in misfits)]
        sampling = "" if cluster.supervised else "rollout.max_sequences, "
        lines.append(f"  to save more: trainer.tokens_per_micro_batch, {sampling}model.lora.rank above 0")
    return "\n".join([*lines, "", *_assumptions(plan)])


def _components(memory: Memory) -> list[str]:
    phases = (
        ("always", memory.always),
        ("rollout", memory.rollout),
        ("rewards", memory.rewards),
        ("update", memory.update),
        ("optimizer", memory.step),
        ("host", memory.host),
        ("start", memory.loading),
    )
    lines = []
    for phase, parts in phases:
        for number, (name, size) in enumerate(parts.items()):
            lines.append(f"  {phase if number == 0 else '':<11}{name:<42}{_size(size):>12}")
    peaks = {"update": memory.update_peak, "rollout": memory.rollout_peak, "rewards": memory.rewards_peak}
    when = max(peaks, key=lambda phase: peaks[phase])
    return [*lines, f"  {'peak':<11}{'always and the largest of the others: ' + when:<42}{_size(memory.peak):>12}"]


def _table(chips: Sequence[ChipPlan]) -> list[str]:
    width = max(len("chip"), *(len(chip.name) for chip in chips))
    phases = [phase for phase in PHASES if any(phase in chip.seconds for chip in chips)]
    heads = "".join(f"{phase:>{COLUMN}}" for phase in phases)
    separate = any(chip.samplers for chip in chips)
    samplers = f"{'samplers':>{COLUMN}}" if separate else ""
    differ = len({chip.strategy for chip in chips}) > 1
    strategies = f"{'strategy':<10}" if differ else ""
    lines = [f"{'chip':<{width}}  {strategies}{'memory':>8}  {'needed':>9}  fits{samplers}{heads}{'step':>{COLUMN}}"]
    for chip in chips:
        fits = "?" if chip.fits is None else "yes" if chip.fits else "no"
        limit = "?" if chip.limit is None else _size(chip.limit, 0)
        times = "".join(f"{_time(chip.seconds.get(phase, 0.0)):>{COLUMN}}" for phase in phases)
        needed = _size(chip.memory.peak)
        count = f"{chip.samplers:>{COLUMN},}" if separate else ""
        name = f"{chip.name:<{width}}" + (f"  {chip.strategy:<8}" if differ else "")
        lines.append(f"{name}  {limit:>8}  {needed:>9}  {fits:<4}{count}{times}{_time(chip.step):>{COLUMN}}")
    if len({chip.samplers for chip in chips}) > 1:
        most = max(chip.samplers for chip in chips)
        lines.append(f"The rows differ in their number of samplers: compare their times with --rollout-devices {most}.")
    return lines


def _assumptions(plan: ScalePlan) -> list[str]:
    rates, cluster = plan.cluster.rates, plan.cluster
    images = next((chip.work.images for chip in plan.chips if chip.work.images), ())
    shown = f"an image of {sum(images):,} tokens in each prompt (--image-tokens), " if images else ""
    assumed = (
        f"Assumed: matrix products at {rates.mfu:.0%} of the peak (--mfu), decoding at {rates.mbu:.0%} of the memory "
        f"bandwidth (--mbu), {rates.link / 1e9:g} GB/s between devices (--link) and {rates.host_link / 1e9:g} GB/s to "
        f"their host (--host-link), {cluster.usable:.0%} of memory usable (--usable), {shown}responses of the maximum "
        "length. Not included: the time of rewards and other host work, overlap of communication and computation, "
        "allocator fragmentation, buffers of collectives, library workspaces. No figure was measured on such a chip."
    )
    lines = textwrap.wrap(assumed, 112)
    if plan.rollout_bytes:
        needs = ", ".join(f"{chip.samplers:,} x {chip.name}" for chip in plan.chips)
        lines[:0] = [
            f"Rollout on separate devices, one engine: weights and cache of {_size(plan.rollout_bytes)}, on "
            f"{'' if cluster.samplers else 'no fewer than '}{needs}.",
            "",
        ]
    if any(None in chip.seconds.values() for chip in plan.chips):
        lines.append("n/a: the rate of that chip in this dtype is not known.")
    return lines


def _size(count: float, digits: int = 1) -> str:
    if count >= 2**39:
        return f"{count / 2**40:.{max(digits, 1)}f} TiB"
    return f"{count / 2**30:.{digits}f} GiB" if count >= 2**29 else f"{count / 2**20:.{digits}f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "n/a"
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    return "-" if seconds == 0 else f"{seconds:.1f} s" if seconds >= 0.1 else "< 0.1 s"

"""The stages of a run's steps, in their order: those of a feature stand there where the settings ask for it."""

from __future__ import annotations

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.data.difficulty import DifficultySampler
from hwgrpo.training.online_rewards import trains_models
from hwgrpo.training.run_parts import Run
from hwgrpo.training.stages.capture import BeginCapture, EndCapture
from hwgrpo.training.stages.collect import Collect, GreedyResponses, ReportProbe, SetTemperature, SleepEngine
from hwgrpo.training.stages.log_probs import OldLogprobs, RefLogprobs, RolloutShares
from hwgrpo.training.stages.make_batch import Advantages, MakeBatch, MaskTruncated, ScoreBefore, TakeRewards
from hwgrpo.training.stages.observe import (
    MeasureAgents,
    MeasureCustom,
    MeasureImages,
    MeasureRewards,
    Report,
    SampleMetrics,
)
from hwgrpo.training.stages.own_stage import own_stages
from hwgrpo.training.stages.profile import BeginProfile, EndProfile
from hwgrpo.training.stages.score import GreedyRewards, ReportDifficulty, Score, ShuffleRewards
from hwgrpo.training.stages.stage import Slot, Stage, Stages
from hwgrpo.training.stages.update import (
    Guard,
    MoveReference,
    SendProbedWeights,
    SendWeights,
    TrainRewardModels,
    Update,
)


def build_stages(run: Run) -> Stages:
    """Return the stages of the run's steps."""
    config, strategy, watch, update = run.config, run.strategy, run.watch, run.update
    algorithm, reference, rewards, responses = config.algorithm, run.reference, run.rewards, run.responses
    reads_greedy = takes(algorithm.advantage, "greedy_S")

    # a device that both use: the engine frees it after its last responses
    collect: list[Stage] = [Collect(responses, strategy)]
    if reads_greedy:
        collect.append(GreedyResponses(responses, run.engine, run.sampling, strategy))
    if run.engine_sleeps:
        collect.append(SleepEngine(run.engine, strategy))
    if config.rollout.final_temperature is not None:
        collect.append(SetTemperature(config, run.total_steps))
    if run.probes is not None:
        collect.append(ReportProbe(run.probes))

    # greedy rewards are not permuted, and say nothing of the prompts' difficulty
    score: list[Stage] = [Score(rewards, strategy)]
    if config.reward.shuffle:
        score.append(ShuffleRewards(config.trainer.seed, strategy.rank))
    if isinstance(run.prompts.sampler, DifficultySampler):
        score.append(ReportDifficulty(run.prompts, strategy))
    if reads_greedy:
        score.append(GreedyRewards(rewards, strategy))

    # truncated responses count in their group's statistics
    scores_before = algorithm.kl.in_reward or takes(algorithm.advantage, "token_probs")
    advantages: list[Stage] = [ScoreBefore(update, reference, watch) if scores_before else TakeRewards()]
    advantages.append(Advantages(config, strategy))
    if algorithm.mask_truncated:
        advantages.append(MaskTruncated())
    advantages.append(MakeBatch())

    log_probs: list[Stage] = [OldLogprobs(update), RefLogprobs(update, reference)]
    if algorithm.old_logprobs == "interpolated":
        log_probs.insert(0, RolloutShares())

    # the guard may end the run before the reference moves and before weights are sent
    updates: list[Stage] = [Update(update, run.guard), Guard(run.guard)]
    if run.capture is not None:
        updates[:1] = [BeginCapture(run.capture), updates[0], EndCapture(run.capture)]
    if reference is not None and algorithm.kl.sync_every:
        updates.append(MoveReference(reference, update.policy, algorithm.kl))
    if trains_models(rewards):
        updates.append(TrainRewardModels(rewards, strategy, run.device.torch_device, watch))

    send: Stage = SendWeights(responses) if run.probes is None else SendProbedWeights(run.probes)

    # metrics of one's own may not have names of others
    observe: list[Stage] = [SampleMetrics(strategy)]
    if config.rollout.workflow in ("environment", "tools"):
        observe.append(MeasureAgents(strategy))
    own = update.policy.images
    if own is not None:
        encoders = {id(each): each for each in (own, getattr(run.engine, "images", None)) if each is not None}
        observe.append(MeasureImages([*encoders.values()], strategy))
    if run.metrics:
        observe.append(MeasureCustom(run.metrics, strategy))
    if rewards.metrics:
        observe.append(MeasureRewards(rewards, strategy))
    observe.append(
        Report(run.observer, strategy, update, watch, run.peak, run.machine, run.lock, run.reported_failures)
    )

    # the whole step, from its first stage to the new weights
    if run.profile is not None:
        collect.insert(0, BeginProfile(run.profile))
        observe.insert(0, EndProfile(run.profile))

    slots = (collect, score, advantages, log_probs, updates, [send], observe)
    stages = Stages(*(Slot(watch, [*each]) for each in slots))
    for slot, stage in own_stages(config.trainer.stages, run):
        into = getattr(stages, slot).stages
        into.insert(len(into) - (slot == "observe"), stage)  # before the report
    return stages

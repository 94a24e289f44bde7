"""Stages of the update, and of what follows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hwgrpo.config.schema import KlConfig
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.training.feed.response_source import ResponseSource
from hwgrpo.training.feed.weight_probes import EngineProbes
from hwgrpo.training.moving_reference import move_reference
from hwgrpo.training.online_rewards import train_reward_models
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.rollout_guard import RolloutGuard
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate


@dataclass
class Update:
    """Runs the step's optimizer updates, with the correction that the guard has put in force."""

    timed = "update_actor"
    update: PolicyUpdate
    guard: RolloutGuard

    def __call__(self, state: StepState) -> None:
        self.update.apply_correction(self.guard.correction)
        state.updated = self.update(state.batch)
        state.notes += self.update.pop_notes()


@dataclass
class Guard:
    """Judges the gap between trainer and rollout engine, before new weights are sent."""

    timed = "update_actor"
    guard: RolloutGuard

    def __call__(self, state: StepState) -> None:
        state.updated |= self.guard.judge(state.step, state.updated)
        state.notes += self.guard.pop_notes()


@dataclass
class MoveReference:
    """Moves the reference towards the policy, where it is due (`algorithm.kl.sync_every`)."""

    timed = "update_actor"
    reference: Reference
    policy: PolicyModel
    config: KlConfig

    def __call__(self, state: StepState) -> None:
        move_reference(self.reference, self.policy, self.config, state.step)


@dataclass
class TrainRewardModels:
    """Trains the reward models that are trained during the run."""

    timed = None  # it times itself as `reward`
    rewards: RewardPipeline
    strategy: Strategy
    device: torch.device
    watch: Stopwatch

    def __call__(self, state: StepState) -> None:
        train_reward_models(self.rewards, self.strategy, self.device, self.watch, state.step)


@dataclass
class SendProbedWeights:
    """Sends the new weights to the rollout engine, and probes it where that is due (`rollout.probe_every`)."""

    timed = "sync"
    probes: EngineProbes

    def __call__(self, state: StepState) -> None:
        self.probes.send_weights(state.step)


@dataclass
class SendWeights:
    """Sends the new weights to the rollout engine."""

    timed = "sync"
    responses: ResponseSource

    def __call__(self, state: StepState) -> None:
        self.responses.update_weights(state.step)

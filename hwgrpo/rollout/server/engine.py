"""Sampling by servers that all ranks share, over HTTP; `ServerApi` implements the kind of server.

Requests are spread over the servers that have the current weights. A request that fails goes to another server, or
waits for the only one; `RolloutServer` repairs a server meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from torch import distributed as dist

from hwgrpo.errors import RunError
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Request, Sample, check_batch, find_problem, make_completions
from hwgrpo.rollout.server.engine_state import EngineState
from hwgrpo.rollout.server.http_client import Cancellation, ServerInUse, TimedOut
from hwgrpo.rollout.server.request_router import RequestRouter
from hwgrpo.rollout.server.rollout_server import PAUSE, RolloutServer
from hwgrpo.rollout.server.server_api import ScoreRequest, ServerApi, ServerRequest
from hwgrpo.rollout.server.server_connection import connect_servers
from hwgrpo.rollout.server.server_session import ServerSession
from hwgrpo.rollout.server.weight_transfer import WeightTransfer
from hwgrpo.rollout.server.weights_folder import DamagedWeights
from hwgrpo.rollout.shared_devices import measured_sleep, shares_device, sleeps
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.vllm.vllm_settings import sent_weights, sleep_level
from hwgrpo.support.text import terminal_line
from hwgrpo.support.waits import Wait
from hwgrpo.values import Completions, PromptBatch, PromptImages, Sampling

T = TypeVar("T")

THREADS = 64
"""Requests that a rank has in flight at a time."""
LAG = 5.0
"""Seconds for which the other ranks wait for servers that get new weights later than the first, beside as long again as
that one took."""


class ServerEngine:
    """Engine that samples by servers of all ranks; rank 0 starts them, sends weights and repairs them.

    Args:
        parts: the factory's inputs.
        api: the kind of server.

    Raises:
        ConfigError: a server does not start, is of another kind or in use by another run, or the token is missing or
            rejected.
        RunError: weights cannot be sent.
    """

    def __init__(self, parts: EngineParts, api: ServerApi) -> None:
        self._parts = parts = replace(parts, weights=sent_weights(parts))
        self._api = api
        self._settings = parts.config.rollout.server
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._state = EngineState(parts.gate)
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens), rollout/servers_alive (servers that
        take requests), and since the start rollout/server_retries (requests sent again) and
        rollout/server_restarts."""
        adapter = parts.weights.adapter()
        self._sleep_level = sleep_level(parts.config.rollout, adapter is not None)
        parts.device.empty_cache()  # a server on this device allocates from it, not from torch's cache
        if self._ranks > 1:
            dist.barrier()
        free = parts.device.memory().free
        found = connect_servers(parts, api, adapter)
        self._owner, self._transfer = found.owner, found.transfer
        alone = len(found.servers) == 1
        self._servers = [
            RolloutServer(each, api, self._owner, self._transfer, self._settings, self._state, alone=alone)
            for each in found.servers
        ]
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._router = RequestRouter(self._servers, self._state, self._settings.retries, rank)
        if parts.gate is not None:
            parts.gate.on_stop(self._router.abort_requests)
        self._sleeps, self._sleep_note = True, ""
        try:
            if self._transfer is not None:
                self._try_sleep(free)
            self._send_weights(0, adapter)
        except BaseException:
            self.close()
            raise
        if self._transfer is not None:
            shared = self._ranks > 1
            for server in self._servers:
                threading.Thread(
                    target=server.keep_claim, args=(shared,), name="hwgrpo-server-watch", daemon=True
                ).start()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about how this engine runs here."""
        on_host = self._parts.device.torch_device.type == "cpu"
        asleep = sleeps(self._parts.config.rollout, on_host=on_host)
        memory = f"it {'frees' if asleep else 'keeps'} its memory during updates"
        memory = "on a CPU its sleep frees nothing" if asleep and on_host else memory
        memory = self._sleep_note or memory
        caveat = f"; {self._api.caveat}" if self._api.caveat else ""
        places = []
        for server in self._servers:
            process = server.connection.process
            origin = f"started here by {process.program}, its log is {process.log}" if process else "already running"
            places.append(f"rollout by the {self._api.name} server at {server.url} ({origin}); {memory}{caveat}")
        way = (f"weights go to the rollout server through {self._transfer.description}",) if self._transfer else ()
        return (*places, *way)

    @property
    def replicas(self) -> Sequence[ServerEngine | RolloutServer]:
        """What has weights of its own and can score by them: each server, or this engine with its only one."""
        return [self] if len(self._servers) == 1 else self._servers

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample; it raises as `generate_each`."""
        return self.generate_each(batch, [sampling] * len(batch))

    def generate_each(self, batch: PromptBatch, samplings: Sequence[Sampling]) -> Completions:
        """Return the responses to each prompt with its own settings, ordered by prompt, then by sample.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: no server is left and none recovers, or the same request keeps failing.
            Stopped: another thread has closed the engine, or stopped the gate.
        """
        assert len(batch) > 0
        with closing(self.open_session(group_timeout=samplings[0].group_timeout)) as session:
            session.submit([TurnRequest(*pair) for pair in zip(batch.prompts, samplings, strict=True)])
            while session.busy:
                session.advance()
            return session.take(range(len(batch)))

    def open_session(self, longest: int = 0, *, room: int = 0, group_timeout: float | None = None) -> ServerSession:
        """Return a session (`rollout.engine.Session`), whose requests are sent to the servers as they come.

        Args:
            longest: unused; a server has the length of its context.
            room: unused.
            group_timeout: seconds after which a request is late.
        """
        if not self._state.usable:
            raise RuntimeError("the rollout server is asleep or closed: call update_weights() before generate()")
        self._router.try_again()
        return ServerSession(
            self._sample,
            GroupDeadlines(0, group_timeout),
            threads=THREADS,
            check=lambda batch, samplings: check_batch(batch, samplings, self._parts.model.config),
            make=lambda samples, samplings: make_completions(
                samples, samplings, self._parts.tokenizer, self._end_ids(samplings[0]), self._state.version
            ),
            closed=self._report,
        )

    def _report(self, metrics: Mapping[str, float]) -> None:
        self.metrics = {
            **metrics,
            "rollout/server_retries": float(self._router.retries),
            "rollout/server_restarts": float(sum(server.restarts for server in self._servers)),
            "rollout/servers_alive": float(sum(server.ready for server in self._servers)),
        }

    def _end_ids(self, sampling: Sampling) -> tuple[int, ...]:
        """Return the tokens that end a response; they are the same for all requests of a run."""
        return end_token_ids(self._parts.tokenizer, self._parts.model.generation_config, sampling.stop_token_ids)

    def score(
        self, sequences: Sequence[Sequence[int]], *, adapter: bool = True, images: PromptImages | None = None
    ) -> list[list[float]] | None:
        """Return the log-probs of each sequence's tokens after the first at temperature 1, on rank 0 only.

        Args:
            sequences: token ids.
            adapter: with the adapter, if there is one.
            images: of each sequence.

        Returns:
            None on other ranks, which share the servers, and where their kind cannot score.

        Raises:
            RunError: no server recovers, or it keeps sending invalid responses.
        """
        if self._transfer is None or not self._api.can_score:
            return None
        self._router.try_again()
        requests = [ScoreRequest(tokens, images) for tokens in sequences]
        return [
            self._router.request(
                lambda server, each=each: server.request_scores(each, adapter=adapter), lambda _: None, failed=[]
            )
            for each in requests
        ]

    def update_weights(self, version: int) -> None:
        """Send the policy's current weights, or only its adapter where only that is trained. All ranks call it."""
        self._send_weights(version, self._parts.weights.adapter())

    def sleep(self) -> None:
        """Have the servers free their weights and cache, where that has been found to work, until they get new weights.

        Raises:
            RunError: the only one does not.
        """
        self._state.usable = False
        if self._transfer is not None and self._sleeps:
            _for_each(self._servers, lambda server: server.sleep(self._sleep_level))

    def health(self) -> bool:
        """Return whether a server responds and has the current weights."""
        try:
            return self._state.usable and any(server.has_current_weights() for server in self._servers)
        except ServerInUse:
            return False

    def close(self) -> None:
        """Stop the servers if the run started them, and remove weights in transfer."""
        self._state.usable = False
        self._state.closed.set()
        _for_each(self._servers, RolloutServer.close)
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _try_sleep(self, free: int | None) -> None:
        """Have servers on the training devices sleep once, and no more where that frees too little on this device.

        Args:
            free: bytes that were free on it before they started; None: it has no memory of its own.
        """
        rollout, device = self._parts.config.rollout, self._parts.device
        awake = device.memory().free
        if free is None or awake is None or not shares_device(rollout):
            return
        if sleeps(rollout, on_host=device.torch_device.type == "cpu"):
            self.sleep()
            self._sleeps, self._sleep_note = measured_sleep(free, awake, device.memory().free or 0)

    def _send_weights(self, version: int, adapter: AdapterWeights | None) -> None:
        """Send weights from rank 0; the other ranks take part in gathering them.

        Files that are damaged when a server loads them are written again, once: all ranks gather the weights again.

        Raises:
            RunError: rank 0 cannot write the weights, or their files are damaged once more.
        """
        state, transfer = self._state, self._transfer
        state.failure = None
        if not state.usable:
            self._parts.device.empty_cache()  # before the servers wake up
        if self._ranks > 1:
            dist.barrier()  # all ranks have their responses: none is sampled with weights that are too new
        if transfer is None:
            targets = self._expect(version)
            self._join_gathering(adapter)
            if self._broadcast_flag(False):
                self._join_gathering(adapter)
            self._wait_for_rank_0(targets)
            return
        self._prepare(transfer, version, adapter)
        targets = self._expect(version)
        damage = self._load(targets)
        transfer.finish()  # where there was no server to send to
        if self._broadcast_flag(damage is not None):
            print(terminal_line(f"hwgrpo: they are written again: {damage}"), file=sys.stderr, flush=True)
            self._prepare(transfer, version, adapter)
            damage = self._load([server for server in targets if not (server.ready or server.repairing)])
            if damage is not None:
                raise damage
        self._router.ready_servers()
        transfer.discard_old()

    def _join_gathering(self, adapter: AdapterWeights | None) -> None:
        """Take part in gathering the weights that rank 0 prepares; an adapter is gathered already."""
        if adapter is None:
            for _ in self._parts.weights.full():
                pass

    def _broadcast_flag(self, value: bool) -> bool:
        """Return rank 0's value on all ranks."""
        values = [value]
        if self._ranks > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def _prepare(self, transfer: WeightTransfer, version: int, adapter: AdapterWeights | None) -> None:
        """Prepare a version to be sent, on rank 0.

        Raises:
            RunError: it cannot be written.
        """
        try:
            transfer.prepare(version, self._parts.weights, adapter)
        except RunError:
            for server in self._servers:
                server.served_label()  # raises ServerInUse where another process of this run removed the files
            raise

    def _load(self, servers: Sequence[RolloutServer]) -> DamagedWeights | None:
        """Have servers load the prepared weights; return what is wrong with their files, if they are damaged."""
        try:
            _for_each(servers, RolloutServer.load_weights)
        except DamagedWeights as damage:
            return damage
        return None

    def _expect(self, version: int) -> list[RolloutServer]:
        """Set the version that the servers must have; return those that no repair brings it to."""
        with self._state.changed:
            self._state.version, self._state.usable = version, True
            expected = [server for server in self._servers if not server.repairing]
            for server in expected:
                server.ready = False
            return expected

    def _wait_for_rank_0(self, expected: list[RolloutServer]) -> None:
        """Wait until the servers have the weights that rank 0 sends; it does without those that get them too late.

        Raises:
            RunError: rank 0 did not send them in time.
        """
        s, version = self._settings, self._state.version
        seconds = (s.retries + 1) * (s.start_timeout + s.request_timeout)
        wait = Wait(f"weights {version}, which rank 0 sends to the rollout server", seconds)
        limit: float | None = None
        while True:
            expected = [server for server in expected if not server.accept()]
            if limit is None and any(server.ready for server in self._servers):
                limit = wait.left - (seconds - wait.left) - LAG
            if limit is not None and (not expected or wait.left < limit):
                for server in expected:
                    server.lose(f"it did not get weights {version} with the others")
                return
            if wait.over:
                raise RunError(f"the rollout server did not get weights {version} within {seconds:g} s")
            wait.pause(PAUSE / 10)

    def _sample(
        self, number: int, request: Request, deadlines: GroupDeadlines, cancellation: Cancellation
    ) -> list[Sample] | None:
        """Return the samples of a request; None where both dispatches missed the deadline."""
        end_ids = self._end_ids(request.sampling)
        vocabulary = self._parts.model.config.get_text_config().vocab_size
        group_timeout = request.sampling.group_timeout
        timeout = group_timeout or self._settings.request_timeout

        def sample(server: RolloutServer) -> tuple[list[Sample], str | None]:
            server_request = ServerRequest(server.model, self._state.version, request, end_ids)
            return self._api.sample(server.client.cancellable(cancellation), server_request, timeout)

        failed: list[RolloutServer] = []
        again = True
        while again:
            deadlines.dispatch(number)
            try:
                samples = self._router.request(
                    sample,
                    lambda samples: find_problem(samples, request, vocabulary),
                    failed,
                    group_timeout=group_timeout,
                    cancellation=cancellation,
                )
                deadlines.finish(number)
                return samples
            except TimedOut:  # the connection is closed: the server aborts the request
                again = deadlines.miss(number)
        return None


def _for_each(servers: Sequence[RolloutServer], work: Callable[[RolloutServer], None]) -> None:
    """Call a function with all servers at the same time, with the first one in this thread."""
    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            others = pool.map(work, servers[1:])
            work(servers[0])
            for _ in others:  # raises what one of them raised
                pass

"""Generation by vLLM in this process with deadlines of groups, which `vllm.LLM.generate` does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hwgrpo.rollout.deadlines import GroupDeadlines


def generate_in_time(
    engine: Any, prompts: Sequence[Mapping[str, Any]], settings: Sequence[Any], adapter: Any, deadlines: GroupDeadlines
) -> list[Any]:
    """Return vLLM's output for each prompt; None where the group was dropped.

    Args:
        engine: `vllm.LLM.llm_engine`.
        prompts: prompts of the G groups, as for `vllm.LLM.generate`.
        settings: their `SamplingParams`.
        adapter: `LoRARequest` of all; None: the model alone.
        deadlines: of the G groups; checked after each token.
    """
    outputs: list[Any] = [None] * len(prompts)
    ids: dict[int, str] = {}

    def dispatch(group: int) -> None:
        ids[group] = engine.add_request(str(group), {**prompts[group]}, settings[group], lora_request=adapter)
        deadlines.dispatch(group)

    for group in range(len(prompts)):
        dispatch(group)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
                deadlines.finish(int(output.request_id))
        for group, again in deadlines.misses():
            engine.abort_request([ids[group]], internal=True)
            if again:
                dispatch(group)
    return outputs

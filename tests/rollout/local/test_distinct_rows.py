"""Equal responses decoded once: the logits of rows of their own, from as few rows as there are distinct responses."""

import numpy as np
import pytest
import torch

from hwgrpo.rollout.local.decode_rows import DistinctRows, ModelRows
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.values import Sampling
from tests.rollout.decoders import CPU, PROMPTS, batch_of, begin, engine_of, keep, model_of
from tests.support.numbers.rounding import assert_values_close

RESPONSES = ([4, 5, 6, 7, 8], [9, 5, 6, 7, 8], [4, 5, 6, 7, 9], [4, 5, 9, 7, 8], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8])
PROMPT_OF = np.array([0, 0, 0, 0, 0, 1])


class Counted:
    """Rows that count those of each step."""

    def __init__(self, rows) -> None:
        self._rows = rows
        self.steps: list[int] = []

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def step(self, token_B):
        self.steps.append(len(token_B))
        return self._rows.step(token_B)


@pytest.mark.parametrize("make", [ModelRows, LeanRows], ids=["model", "lean"])
def test_logits_are_those_of_a_row_per_response(make):
    model = model_of("Qwen3")
    counted = Counted(make(model, CPU))
    plain, shared = ModelRows(model, CPU), DistinctRows(counted)  # pyright: ignore[reportArgumentType]
    tokens, kept = torch.tensor(RESPONSES).T, np.arange(len(RESPONSES))
    with torch.no_grad():
        assert_values_close(begin(shared, PROMPTS, PROMPT_OF), begin(plain, PROMPTS, PROMPT_OF))
        for step, token in enumerate(tokens):
            if step == 4:  # one of three equal responses, and all that have a row of their own but one
                kept = np.array([0, 2, 5])
                for rows in (plain, shared):
                    keep(rows, kept)
            assert_values_close(shared.step(token[kept]), plain.step(token[kept]))
    assert counted.steps == [3, 3, 4, 4, 3]


def test_samples_stay_those_of_rows_of_their_own(monkeypatch):
    sampling = Sampling(24, 20, seed=3, temperature=0.1, stop_token_ids=(5, 9, 30))
    engine = engine_of(model_of("Qwen3"), max_sequences=64)
    shared = engine.generate(batch_of(), sampling)
    monkeypatch.setattr("hwgrpo.rollout.local.engine.DistinctRows", lambda rows: rows)
    plain = engine.generate(batch_of(), sampling)
    assert torch.equal(shared.tokens, plain.tokens)
    assert_values_close(shared.logprobs, plain.logprobs)
    texts = set(zip(shared.prompt_index.tolist(), shared.texts, strict=True))
    assert len(texts) < len(shared.texts), "some responses are equal"

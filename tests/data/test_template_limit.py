"""A chat template that loops ends with an error that names the conversation; others are not interrupted."""

import os
import threading

import pytest

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.errors import DataError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.support import template_limit

LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = ({"role": "user", "content": "Hi"},)

pytestmark = pytest.mark.timeout(60)  # without the limit, a test would loop for hours


@pytest.fixture(autouse=True)
def _a_short_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_limit, "LIMIT", 0.2)


def rendered(template: str) -> str:
    tokenizer = character_tokenizer("Hi")
    tokenizer.chat_template = template
    return apply_template(MESSAGES, DataConfig(train="x"), tokenizer, "rows.jsonl:7", add_generation_prompt=True)


def test_a_looping_template_is_ended_and_the_next_one_is_rendered():
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows\.jsonl:7: the chat template takes more than 0\.2 s"):
            rendered(LOOPING)
        assert rendered("{{ messages[0]['content'] }}") == "Hi"


def test_a_looping_template_in_another_thread_ends_that_thread_alone():
    errors: list[BaseException] = []

    def body() -> None:
        try:
            rendered(LOOPING)
        except DataError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert len(errors) == 1


def test_an_error_of_a_template_keeps_its_words():
    with pytest.raises(DataError, match="refuses this conversation: no system"):
        rendered("{{ raise_exception('no system') }}")


def test_a_forked_process_has_a_limit_of_its_own():
    rendered("x")
    child = os.fork()
    if child == 0:
        try:
            rendered(LOOPING)
        except DataError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

"""Stop tokens and stop strings, token by token."""

import numpy as np
import tokenizers
from tokenizers import decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.stopping import StopDetector, end_token_ids

TOKENIZER = character_tokenizer("")
PAD, EOS = 0, 1


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def feed(watch: StopDetector, tokens: list[int]) -> int | None:
    """Return after how many tokens the response ended."""
    for count, token in enumerate(tokens, start=1):
        if watch.ended(np.array([0]), np.array([token]))[0]:
            return count
    return None


def test_end_tokens_come_from_tokenizer_generation_config_and_settings():
    assert end_token_ids(TOKENIZER, GenerationConfig(eos_token_id=[4, 9]), (7, 4)) == (EOS, 4, 7, 9)
    assert end_token_ids(TOKENIZER, GenerationConfig(eos_token_id=5), ()) == (EOS, 5)
    assert end_token_ids(TOKENIZER, None, ()) == (EOS,)


def test_each_row_ends_at_any_of_the_end_tokens_and_without_them_at_none():
    tokens = np.array([5, EOS, 7, 9, EOS, 3])
    for end_ids in ([], [EOS], [9, EOS, 3]):
        ended = StopDetector(TOKENIZER, end_ids, [], len(tokens)).ended(np.arange(len(tokens)), tokens)
        assert ended.tolist() == [token in end_ids for token in tokens.tolist()]


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it_and_is_cut_from_the_text():
    watch = StopDetector(TOKENIZER, [EOS], ["END", "STOP"], 1)
    tokens = ids("x ENSTO ENDSTOP")
    assert feed(watch, tokens) == 11
    assert watch.text(tokens[:11], finished=True) == "x ENSTO "


def test_the_text_is_cut_at_the_earliest_of_several_stop_strings_that_one_token_completes():
    watch = StopDetector(TOKENIZER, [EOS], ["c", "abc"], 1)
    tokens = ids("zzabc")
    assert feed(watch, tokens) == 5
    assert watch.text(tokens, finished=True) == "zz"


def test_special_tokens_have_no_text_so_a_stop_string_may_reach_over_any_number_of_them():
    watch = StopDetector(TOKENIZER, [EOS], ["ab"], 1)
    tokens = [*ids("xa"), *[PAD] * 50, *ids("b")]
    assert feed(watch, tokens) == len(tokens)
    assert watch.text(tokens, finished=True) == "x"


def test_a_stop_token_is_not_part_of_the_text_even_when_it_is_an_ordinary_character():
    watch = StopDetector(TOKENIZER, [EOS, *ids("\n")], [], 1)
    assert feed(watch, ids("ab\nc")) == 3
    assert watch.text(ids("ab\n"), finished=True) == "ab"
    assert watch.text(ids("ab"), finished=False) == "ab"


def test_rows_are_watched_apart():
    watch = StopDetector(TOKENIZER, [EOS], ["ab"], 3)
    a, b = ids("ab")
    assert watch.ended(np.array([0, 1, 2]), np.array([a, b, a])).tolist() == [False, False, False]
    assert watch.ended(np.array([0, 2]), np.array([a, b])).tolist() == [False, True]
    assert watch.ended(np.array([0]), np.array([b])).tolist() == [True]


def test_a_stop_string_made_of_three_bytes_a_character_is_found_when_its_last_byte_arrives():
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    watch = StopDetector(PreTrainedTokenizerFast(tokenizer_object=core), [], ["漢字漢字"], 1)
    tokens = list("a漢字漢字b".encode())
    assert feed(watch, tokens) == 13
    assert watch.text(tokens[:13], finished=True) == "a"

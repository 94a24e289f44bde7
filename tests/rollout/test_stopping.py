"""Stop tokens and stop strings, token by token."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.requests import Request, Sample, make_completions
from hwgrpo.rollout.server.server_api import ServerRequest
from hwgrpo.rollout.server.vllm import completion_body
from hwgrpo.rollout.stopping import StopDetector, end_token_ids
from hwgrpo.values import Sampling

TOKENIZER = character_tokenizer("")
PAD, EOS = 0, 1


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def tokenizer_with_markers() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters, of which beginning, padding, end and two markers are special tokens."""
    words = ["<pad>", "</s>", "<s>", "<unk>", "<think>", "</think>", *"abc "]
    core = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    ends = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


MARKED = tokenizer_with_markers()


def marked(*words: str) -> list[int]:
    return [MARKED.get_vocab()[word] for word in words]


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
        ended = StopDetector(TOKENIZER, end_ids, []).ended(np.arange(len(tokens)), tokens)
        assert ended.tolist() == [token in end_ids for token in tokens.tolist()]


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it_and_is_cut_from_the_text():
    watch = StopDetector(TOKENIZER, [EOS], ["END", "STOP"])
    tokens = ids("x ENSTO ENDSTOP")
    assert feed(watch, tokens) == 11
    assert watch.text(tokens[:11], finished=True) == "x ENSTO "


def test_the_text_is_cut_at_the_earliest_of_several_stop_strings_that_one_token_completes():
    watch = StopDetector(TOKENIZER, [EOS], ["c", "abc"])
    tokens = ids("zzabc")
    assert feed(watch, tokens) == 5
    assert watch.text(tokens, finished=True) == "zz"


def test_special_tokens_have_no_text_so_a_stop_string_may_reach_over_any_number_of_them():
    watch = StopDetector(TOKENIZER, [EOS], ["ab"])
    tokens = [*ids("xa"), *[PAD] * 50, *ids("b")]
    assert feed(watch, tokens) == len(tokens)
    assert watch.text(tokens, finished=True) == "x"


def test_a_stop_token_is_not_part_of_the_text_even_when_it_is_an_ordinary_character():
    watch = StopDetector(TOKENIZER, [EOS, *ids("\n")], [])
    assert feed(watch, ids("ab\nc")) == 3
    assert watch.text(ids("ab\n"), finished=True) == "ab"
    assert watch.text(ids("ab"), finished=False) == "ab"


def test_rows_are_watched_apart():
    watch = StopDetector(TOKENIZER, [EOS], ["ab"])
    a, b = ids("ab")
    assert watch.ended(np.array([0, 1, 2]), np.array([a, b, a])).tolist() == [False, False, False]
    assert watch.ended(np.array([0, 2]), np.array([a, b])).tolist() == [False, True]
    assert watch.ended(np.array([0]), np.array([b])).tolist() == [True]


def test_a_stop_string_made_of_three_bytes_a_character_is_found_when_its_last_byte_arrives():
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    watch = StopDetector(PreTrainedTokenizerFast(tokenizer_object=core), [], ["漢字漢字"])
    tokens = list("a漢字漢字b".encode())
    assert feed(watch, tokens) == 13
    assert watch.text(tokens[:13], finished=True) == "a"


def test_markers_that_are_special_tokens_stay_in_the_text_and_end_padding_beginning_and_unknown_do_not():
    tokens = marked("<s>", "<think>", "a", "<pad>", "<unk>", "</think>", "b", "</s>")
    for skips, text in ((False, "<think>a</think>b"), (True, "ab")):
        assert StopDetector(MARKED, marked("</s>"), [], skips).text(tokens, finished=True) == text


def test_a_stop_string_of_special_tokens_ends_a_response_unless_they_have_no_text():
    tokens = marked("a", "</think>", "b", "<pad>", "</think>", "c")
    assert feed(StopDetector(MARKED, [], ["</think>"]), tokens) == 2
    assert feed(StopDetector(MARKED, [], ["b</think>"]), tokens) == 5
    assert StopDetector(MARKED, [], ["</think>"]).text(tokens[:2], finished=True) == "a"
    assert feed(StopDetector(MARKED, [], ["</think>"], skip_special_tokens=True), tokens) is None
    over = [*marked("a"), *marked("<think>") * 50, *marked("b")]
    assert feed(StopDetector(MARKED, [], ["ab"], skip_special_tokens=True), over) == len(over)


def test_end_tokens_of_the_generation_config_have_no_text():
    watch = StopDetector(MARKED, marked("</think>"), [])
    assert watch.text(marked("a", "</think>", "b"), finished=False) == "ab"


@pytest.mark.parametrize(("skips", "text"), [(False, "<think>a"), (True, "a")])
def test_responses_of_an_engine_outside_are_decoded_as_the_settings_say(skips: bool, text: str):
    sample = Sample(marked("<think>", "a", "</think>"), [0.0] * 3, stopped=True)
    sampling = Sampling(n=1, max_response_tokens=9, stop=("</think>",), skip_special_tokens=skips)
    completions = make_completions([[sample]], [sampling], MARKED, marked("</s>"), 0)
    assert completions.texts == (text,)
    server_request = ServerRequest("m", 0, Request((1,), 1, 0, sampling), (1,))
    assert completion_body(server_request)["skip_special_tokens"] is skips


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words have their space in front, with bytes for what has no word, as SentencePiece's."""
    words = ["<unk>", "</s>", "▁", "▁a", "a", "▁b", "b", "c", ".", "▁."]
    words += [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0xC3, 0xA9, 0xA8)]
    core = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, some of which are a part of a character."""
    alphabet = tokenizers.Tokenizer(models.BPE({}, []))
    alphabet.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    marks = [mark for mark, _ in alphabet.pre_tokenizer.pre_tokenize_str("a b\néè.c")]
    characters = sorted(set("".join(marks)))
    words = ["<unk>", "</s>", *characters]
    core = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("make", [metaspace, byte_level])
@pytest.mark.parametrize("stop", [(" ",), ("a ",), ("é",), ("b\n", ". "), (" a.",), ("c", "èb")])
def test_tokens_that_are_not_decoded_complete_no_stop_string(make, stop: tuple[str, ...]):
    tokenizer = make()
    draw = np.random.default_rng(0)
    ended = 0
    looks_at_all = StopDetector(tokenizer, [1], stop)
    for tokens in draw.integers(2, len(tokenizer), (400, 12)).tolist():
        found = feed(StopDetector(tokenizer, [1], stop), tokens)
        expected = (n for n in range(1, 13) if looks_at_all._completes_stop_string(tokens[:n]))
        assert found == next(expected, None)
        ended += found is not None
    assert ended


def test_tokens_without_the_last_character_of_a_stop_string_are_decoded_once(monkeypatch: pytest.MonkeyPatch):
    watch = StopDetector(TOKENIZER, [EOS], ["END"])
    decoded: list[tuple[int, ...]] = []
    plain = watch._decode
    monkeypatch.setattr(watch, "_decode", lambda tokens: decoded.append(tuple(tokens)) or plain(tokens))
    monkeypatch.setattr(watch._decode, "hidden", plain.hidden, raising=False)
    assert feed(watch, ids("EN" * 100)) is None
    assert len(decoded) == 2
    assert feed(watch, ids("END")) == 3

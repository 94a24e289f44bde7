"""Language consistency: the share of a response's letters in the scripts of a language."""

from __future__ import annotations

import collections
import functools
import re
import unicodedata
from collections.abc import Sequence

from hwgrpo.errors import ConfigError, choice_error

LANGUAGES = {
    ("latin",): ("cs da de en es et fi fr hr hu id it lt lv ms nl no pl pt ro sk sl sv sw tl tr vi"),
    ("cyrillic",): "be bg kk mk mn ru uk",
    ("cyrillic", "latin"): "sr",
    ("han",): "zh",
    ("han", "hiragana", "katakana"): "ja",
    ("han", "hangul"): "ko",
    ("arabic",): "ar fa ur",
    ("devanagari",): "hi mr ne",
    ("armenian",): "hy",
    ("bengali",): "bn",
    ("ethiopic",): "am",
    ("georgian",): "ka",
    ("greek",): "el",
    ("gujarati",): "gu",
    ("gurmukhi",): "pa",
    ("hebrew",): "he",
    ("kannada",): "kn",
    ("khmer",): "km",
    ("lao",): "lo",
    ("malayalam",): "ml",
    ("myanmar",): "my",
    ("sinhala",): "si",
    ("tamil",): "ta",
    ("telugu",): "te",
    ("thai",): "th",
}
"""Scripts -> the languages that are written in them (ISO 639-1)."""
SCRIPTS = {language: scripts for scripts, languages in LANGUAGES.items() for language in languages.split()}
KNOWN = frozenset(script for scripts in LANGUAGES for script in scripts)
NAMED_OTHERWISE = {"cjk": "han", "ideographic": "han"}
"""First word of the names of letters -> their script, where it is another word."""
COMMON = ("modifier", "combining", "feminine", "masculine", "katakana-hiragana")
"""First words of the names of letters that belong to several scripts."""
MATH = (("```", "```"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
"""Where code and formulas begin and end, whose letters are not counted."""
COMMAND = re.compile(r"\\[A-Za-z]+")


def language(
    solution_str: str,
    language: str | None = None,
    scripts: Sequence[str] = (),
    ignore_math: bool = True,
    no_letters: float = 0.0,
) -> float:
    """Return the share of the response's letters that belong to the scripts of a language, 0 to 1.

    Two languages of one script count as the same.

    Args:
        solution_str: the response.
        language: a code of `SCRIPTS`, as in `en`, `zh`.
        scripts: names of scripts, as in `latin`, in its place or in addition.
        ignore_math: leave out fenced code, formulas between `$`, `\\(` or `\\[`, and LaTeX commands.
        no_letters: value of a response without letters.

    Raises:
        ConfigError: neither is given, or one is not known.

    Source: the language consistency reward of DeepSeek-R1 (arXiv 2501.12948), for letters in the place of words.
    """
    allowed = _allowed(language, tuple(scripts))
    text = _without_math(solution_str) if ignore_math else solution_str
    counts: collections.Counter[str] = collections.Counter()
    for character, count in collections.Counter(unicodedata.normalize("NFKC", text)).items():
        counts[script_of(character)] += count
    letters = counts.total() - counts[""]
    return sum(counts[script] for script in allowed) / letters if letters else no_letters


def script_of(character: str) -> str:
    """Return the script of a letter in lower case, "" for other characters and for letters of several scripts.

    Python has no table of scripts: it is the first word of the letter's Unicode name.
    """
    if not unicodedata.category(character).startswith("L"):
        return ""
    first = unicodedata.name(character, "unnamed").partition(" ")[0].lower()
    return "" if first in COMMON else NAMED_OTHERWISE.get(first, first)


def _without_math(text: str) -> str:
    for opening, closing in MATH:
        text = _without(text, opening, closing)
    return COMMAND.sub(" ", text)


def _without(text: str, opening: str, closing: str) -> str:
    """Return a text without what stands between two marks; one that does not close stays."""
    kept, start = [], 0
    while (begin := text.find(opening, start)) >= 0:
        end = text.find(closing, begin + len(opening))
        if end < 0:
            break
        kept.append(text[start:begin])
        start = end + len(closing)
    return " ".join([*kept, text[start:]])


@functools.lru_cache
def _allowed(language: str | None, scripts: tuple[str, ...]) -> frozenset[str]:
    if language is None and not scripts:
        raise ConfigError("reward language needs kwargs.language, as in {name: language, kwargs: {language: en}}")
    if language is not None and language not in SCRIPTS:
        raise choice_error("kwargs.language of reward language", language, SCRIPTS)
    for script in scripts:
        if script not in KNOWN:
            raise choice_error("kwargs.scripts of reward language", script, KNOWN)
    return frozenset((*scripts, *(SCRIPTS[language] if language else ())))

"""Colors of the page keep the contrast that WCAG 2.2 asks for, in both themes."""

import itertools
import re
from importlib import resources

import pytest

STYLE = (resources.files("hwgrpo.report") / "assets" / "page.css").read_text(encoding="utf-8")
COLORS = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", STYLE)}
THEMES = {"light": 0, "dark": 1}
SERIES = [f"s{i}" for i in range(1, 10)]


def luminance(color: str) -> float:
    """Relative luminance; WCAG 2.2, section "relative luminance"."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["text", "muted", "link", "good", "warn", "bad"])
def test_text_stands_out_from_every_surface(name: str, theme: str):
    for surface in ("page", "card", "sunk"):
        assert contrast(COLORS[name][THEMES[theme]], COLORS[surface][THEMES[theme]]) >= 4.5, surface


@pytest.mark.parametrize("theme", THEMES)
def test_found_words_are_legible_on_their_mark(theme: str):
    assert "mark { background: var(--mark); color: var(--text);" in STYLE
    assert contrast(COLORS["text"][THEMES[theme]], COLORS["mark"][THEMES[theme]]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", SERIES)
def test_curves_stand_out_from_their_card(name: str, theme: str):
    assert contrast(COLORS[name][THEMES[theme]], COLORS["card"][THEMES[theme]]) >= 3


@pytest.mark.parametrize("theme", THEMES)
def test_no_two_curves_have_nearly_the_same_color(theme: str):
    for a, b in itertools.combinations(SERIES, 2):
        first, second = (COLORS[name][THEMES[theme]] for name in (a, b))
        apart = sum(abs(int(first[i : i + 2], 16) - int(second[i : i + 2], 16)) for i in (1, 3, 5))
        assert apart >= 60, (a, b)


def test_every_color_in_use_is_one_of_the_palette():
    body = STYLE.partition("\n}\n")[2]
    assert re.findall(r"#[0-9a-f]{3,8}\b", body) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", STYLE)) <= COLORS.keys() | {"c", "sans", "mono"}

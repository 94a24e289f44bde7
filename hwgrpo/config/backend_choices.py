"""Choices of settings that the device backends declare; the backends are imported when a choice is checked."""

from __future__ import annotations


def backend_choices() -> tuple[str, ...]:
    """Return the values of `backend.name`."""
    from hwgrpo_backends.registry import names

    return ("auto", *names())


def attention_choices() -> tuple[str, ...]:
    """Return the values of `model.attention`."""
    from hwgrpo_backends.registry import load_all

    return tuple(
        dict.fromkeys(("auto", *(name for backend in load_all().backends.values() for name in backend.attention)))
    )

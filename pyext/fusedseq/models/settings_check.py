"""Checks of the settings of models."""

from typing import Any


def check_sizes(settings: Any, *names: str) -> None:
    """Checks that settings are at least 1, each of them where a setting is a tuple of sizes.

    settings: a dataclass such as LanguageModelSettings    names: of its fields
    Errors: ValueError that names the setting
    """
    for name in names:
        value = getattr(settings, name)
        if any(size < 1 for size in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{type(settings).__name__}: {name} must be at least 1, got {value}")


def check_probabilities(settings: Any, *names: str) -> None:
    """Checks that settings are probabilities of dropping, from 0 to 1; see `check_sizes`."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{type(settings).__name__}: {name} must be in [0, 1], got {value}")


def check_not_negative(settings: Any, *names: str) -> None:
    """Checks that settings are at least 0; see `check_sizes`."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise ValueError(f"{type(settings).__name__}: {name} must be at least 0, got {value}")


def check_heads(settings: Any) -> None:
    """Checks that the heads share the width of the embedding evenly."""
    embedding, heads = settings.embedding, settings.heads
    if embedding % heads:
        raise ValueError(
            f"{type(settings).__name__}: heads must divide embedding = {embedding}, got {heads}"
        )

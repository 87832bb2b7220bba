"""Renamed settings: the former names in checkpoints, results and on the command line."""

from typing import Any

# {former section.key: section.key}. No other setting of a preset has a former name as its key.
FORMER_NAMES = {"model.weight_dropout": "model.weight_drop"}


def current_key(key: str) -> str:
    """Returns the current name of `section.key`, or of `key` alone."""
    for former, current in FORMER_NAMES.items():
        if key == former:
            return current
        if key == former.partition(".")[2]:
            return current.partition(".")[2]
    return key


def with_current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings {section: {key: value}} of a checkpoint or result with current names."""
    return {
        section: {
            current_key(f"{section}.{key}").removeprefix(f"{section}."): value
            for key, value in part.items()
        }
        if isinstance(part, dict)
        else part
        for section, part in settings.items()
    }


def with_current_description(state: Any) -> Any:
    """Returns the state of a checkpoint; the settings in its description have current names."""
    if not isinstance(state, dict) or "settings" not in (state.get("description") or ()):
        return state
    description = state["description"]
    settings = with_current_names(description["settings"])
    return state | {"description": description | {"settings": settings}}

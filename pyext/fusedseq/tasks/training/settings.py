"""Settings are frozen dataclasses with sections: `section.key`.

This module converts them to and from JSON and applies changes from the command line.
"""

import ast
import dataclasses
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fusedseq.tasks.training.former_names import current_key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

# {the type of a setting: what its value must be}; a union of types that is not here is "A or B".
WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    types.NoneType: "none",
    tuple[int, ...]: "whole numbers separated by commas",
    int | tuple[int, ...]: "a whole number, or several separated by commas",
}


def as_dict(settings: Any) -> dict[str, Any]:
    """The settings as nested dicts, which JSON can represent (tuples become lists there)."""
    return dataclasses.asdict(settings)


def from_dict(kind: type[S], values: dict[str, Any]) -> S:
    """The dataclass `kind` from what `as_dict` returned, also after a round trip through JSON.

    Errors: ValueError for an unknown key or a value of the wrong type
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__}: must be a JSON object, got {values!r:.60}")
    fields = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{kind.__name__}: unknown key {name}; known are {', '.join(hints)}")
        nested = dataclasses.is_dataclass(hints[name])
        fields[name] = (
            from_dict(hints[name], value) if nested else _convert(value, hints[name], name)
        )
    return kind(**fields)


def _changed(section: str, part: Any, values: dict[str, Any]) -> Any:
    """A section with changed values. Errors: ValueError that names the setting, as section.key"""
    with named_settings(section, type(part)):
        return dataclasses.replace(part, **values)


@contextmanager
def named_settings(section: str, kind: type) -> Iterator[None]:
    """Names the setting in a ValueError of the block: "LanguageModel: cell must be ..." becomes
    "model.cell must be ...".

    section: of the settings    kind: its class, such as LanguageModelSettings
    """
    try:
        yield
    except ValueError as error:
        text, names = str(error), [field.name for field in dataclasses.fields(kind)]
        for owner in (kind.__name__, kind.__name__.removesuffix("Settings")):
            found = re.match(rf"{owner}: (?=({'|'.join(names)}) )", text)
            if found:
                raise ValueError(f"{section}.{text[found.end() :]}") from None
        raise


def varied(settings: S, **sections: dict[str, Any]) -> S:
    """A copy with changed values, e.g. varied(settings, model={"layers": 2})."""
    parts = {
        name: _changed(name, getattr(settings, name), values) for name, values in sections.items()
    }
    return dataclasses.replace(settings, **parts)


def override(settings: S, assignments: Iterable[str]) -> S:
    """A copy with every `section.key=value` of `assignments` applied.

    The section may be omitted where only one section has the key. Values that depend on each other
    are checked together, so their order does not matter; of two values of one key the last counts.
    Errors: ValueError for an unknown or ambiguous key, and for a value of the wrong type
    """
    sections: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set must be key=value, got {assignment!r}")
        section, name = full_key(settings, key).split(".")
        hint = typing.get_type_hints(type(getattr(settings, section)))[name]
        if hint is str:  # averaging=none is a string, not None
            value: Any = text
        elif hint == str | None:  # of which 7 is a file, too
            value = None if text.lower() == "none" else text
        else:
            value = _literal(text)
        sections.setdefault(section, {})[name] = _convert(value, hint, f"{section}.{name}")
    return varied(settings, **sections)


def full_key(settings: Any, key: str, option: str = "--set") -> str:
    """`section.key` of a key whose section may be omitted.

    option: the option of the command line that has the key, for the message
    Errors: ValueError where the key is unknown, or is in several sections
    """
    known = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(settings)
        for field in dataclasses.fields(getattr(settings, section.name))
    ]
    key = current_key(key)
    matches = [full for full in known if key in (full, full.partition(".")[2])]
    if len(matches) != 1:
        what = "unknown key" if not matches else f"key of several sections ({', '.join(matches)}),"
        raise ValueError(f"{option}: {what} {key!r}; known are {', '.join(known)}")
    return matches[0]


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: deep nesting
        return text


def _convert(value: Any, hint: Any, name: str) -> Any:
    """`value` as one of the types of `hint`: lists become tuples, an int may become a float.

    A value alone becomes a tuple where nothing but a tuple is allowed. A float must be finite.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple and (isinstance(value, (list, tuple)) or kind is hint):
            items = value if isinstance(value, (list, tuple)) else (value,)
            with suppress(ValueError):  # the message below names the whole type
                return tuple(_convert(item, typing.get_args(kind)[0], name) for item in items)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if kind is float and is_int and int not in kinds:
            with suppress(OverflowError):
                return float(value)
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        if isinstance(kind, type) and type(value) is kind and not is_infinite:
            return value
    wanted = WORDS.get(hint) or " or ".join(WORDS[kind] for kind in kinds)
    raise ValueError(f"{name} must be {wanted}, got {value!r:.200}")


def one_of(names: Collection[str]) -> str:
    """The known values of a setting in words, such as "none, nt-asgd or tail"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last

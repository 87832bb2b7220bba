"""Settings are frozen dataclasses, nested one deep: `section.key`. From the command line, to and from JSON."""

import ast
import dataclasses
import types
import typing


def as_dict(settings):
    return dataclasses.asdict(settings)


def from_dict(kind, values):
    """The dataclass `kind` from what `as_dict` gave, also after a journey through JSON."""
    hints = typing.get_type_hints(kind)
    fields = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{kind.__name__}: unknown key {name}; known are {', '.join(hints)}")
        nested = dataclasses.is_dataclass(hints[name])
        fields[name] = from_dict(hints[name], value) if nested else _convert(value, hints[name], name)
    return kind(**fields)


def varied(settings, **sections):
    """`settings` with other values in its sections: varied(settings, model={"layers": 2})"""
    parts = {name: dataclasses.replace(getattr(settings, name), **values) for name, values in sections.items()}
    return dataclasses.replace(settings, **parts)


def override(settings, assignments):
    """`settings` with each `section.key=value` of `assignments` applied; the section may be left out where the key
    alone is clear."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set: wanted key=value, got {assignment!r}")
        section, name = full_key(settings, key).split(".")
        hint = typing.get_type_hints(type(getattr(settings, section)))[name]
        value = text if hint is str else _literal(text)  # averaging=none is no None
        settings = varied(settings, **{section: {name: _convert(value, hint, f"{section}.{name}")}})
    return settings


def full_key(settings, key):
    """`section.key` of a key that may lack its section."""
    known = [f"{section.name}.{field.name}" for section in dataclasses.fields(settings)
             for field in dataclasses.fields(getattr(settings, section.name))]  # fmt: skip
    matches = [full for full in known if key in (full, full.partition(".")[2])]
    if len(matches) != 1:
        what = "unknown key" if not matches else f"key of several sections ({', '.join(matches)}),"
        raise ValueError(f"--set: {what} {key!r}; known are {', '.join(known)}")
    return matches[0]


def _literal(text):
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _convert(value, hint, name):
    """`value` as one of the types of `hint`; JSON's lists become tuples and an int may stand for a float."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(item, typing.get_args(kind)[0], name) for item in value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and int not in kinds:
            return float(value)
        if isinstance(kind, type) and type(value) is kind:
            return value
    wanted = hint if isinstance(hint, types.UnionType) else getattr(hint, "__name__", hint)
    raise ValueError(f"{name} must be {wanted}, got {value!r}")

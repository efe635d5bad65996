"""Rules that hold for every key of a configuration, and the errors that people see when one is broken.

Keys come as keyword arguments or from a flat JSON file. Words are stripped and lower-cased; ``none``, ``null`` and an
empty word mean unset; whoever breaks a rule is told the key, the value, what is allowed and the nearest match.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from lowtide.errors import ConfigError
from lowtide.units import UNITS, parse_bytes

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_UNSET = ("none", "null", "")
AUTO = "auto"
_LEAST_BUDGET = 2**20
_LONGEST_SHOWN = 80
_MOST_LISTED = 16


def is_unset(value: Any) -> bool:
    """Whether a value says that a key is not set: None, or the word none or null, or an empty one."""
    return value is None or (isinstance(value, str) and _word(value) in _UNSET)


def boolean_of(value: Any) -> bool | None:
    """True or False for a boolean or one of its spellings, None for anything else."""
    if isinstance(value, bool):
        return value
    word = _word(value) if isinstance(value, str) else str(value) if isinstance(value, int) else None
    return True if word in _TRUE else False if word in _FALSE else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of ``words``, or nothing where none is near."""
    return _nearest(word, {known: known for known in words})


@dataclass(frozen=True)
class Switch:
    """Validator of a boolean."""

    @property
    def allowed(self) -> str:
        return "true or false (also yes/no, on/off, 1/0)"

    def __call__(self, value: Any) -> bool:
        answer = boolean_of(value)
        if answer is None:
            near = did_you_mean(value, (*_TRUE[:3], *_FALSE[:3])) if isinstance(value, str) else ""
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.{near}")
        return answer


@dataclass(frozen=True)
class Choice:
    """Validator of one word out of several. hint: what to say to somebody who gives a boolean."""

    words: tuple[str, ...]
    hint: str = ""

    @property
    def allowed(self) -> str:
        return ", ".join(self.words)

    def __call__(self, value: Any) -> str:
        word = _word(value) if isinstance(value, str) else None
        if word in self.words:
            return word
        near = did_you_mean(value, self.words) if isinstance(value, str) else ""
        hint = f" {self.hint}" if self.hint and boolean_of(value) is not None else ""
        raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.{near}{hint}")


@dataclass(frozen=True)
class Text:
    """Validator of text. allowed: what it should say, for people."""

    allowed: str

    def __call__(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.")
        return value.strip()


@dataclass(frozen=True)
class WholeNumber:
    """Validator of a whole number; its digits as text are taken too ("2"), a boolean is not."""

    minimum: int

    @property
    def allowed(self) -> str:
        return f"a whole number, {self.minimum} or more"

    def __call__(self, value: Any) -> int:
        number = _whole(value)
        if number is None or number < self.minimum:
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.")
        return number


@dataclass(frozen=True)
class Size:
    """Validator of a size in bytes: a whole number, or text with a unit ("512 KiB")."""

    allowed = "a size, 0 bytes or more: a whole number of bytes, or one with a unit as in 512KiB or '1.5 MB'"

    def __call__(self, value: Any) -> int:
        number = _whole(value)
        if number is None and isinstance(value, str):
            with suppress(ConfigError):
                number = parse_bytes(value)
        if number is None or number < 0:
            near = _misspelt_unit(value) if isinstance(value, str) else ""
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.{near}")
        return number


_UNITS = ("GiB", "GB", "MiB", "MB")


@dataclass(frozen=True)
class Budget:
    """Validator of an amount of memory: a size, or one word. Less than a MiB is a forgotten unit."""

    word: str = AUTO

    @property
    def allowed(self) -> str:
        return f"a size such as 16GiB, or {self.word}"

    def __call__(self, value: Any) -> int | str:
        if isinstance(value, str) and _word(value) == self.word:
            return self.word
        try:
            number = Size()(value)
        except ConfigError:
            raise ConfigError(f"{shown(value)} is not allowed; allowed: {self.allowed}.{self._near(value)}") from None
        if number < _LEAST_BUDGET:
            hint = f" Did you mean {number}GiB?" if number and str(value).strip() == str(number) else ""
            raise ConfigError(f"{shown(value)} is {number} bytes, below 1MiB; allowed: {self.allowed}.{hint}")
        return number

    def _near(self, value: Any) -> str:
        """The nearest size, or the word, for a text that is none."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
        if found is None:
            return _nearest(value, {self.word: self.word}) if isinstance(value, str) else ""
        return _nearest(found[2].lower(), {unit.lower(): found[1] + unit for unit in _UNITS}, 0.5)


class Keys(BaseModel):
    """Base of a configuration. A field's alias is its key in JSON files; both names are taken, an unset one falls back.

    Every mistake is a ConfigError that names keys as they were given. In the text of a field's or model's validator,
    ``{field}`` stands for the name under which the caller knows that field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    def __init__(self, **given: Any) -> None:
        fields = _fields_of(type(self), given)
        names = _names_for(type(self), given)
        values = {field: given[key] for key, field in fields.items() if not is_unset(given[key])}
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_described(error, names))) from None

    @classmethod
    def from_json_file(cls, path: str | Path) -> Self:
        """From a flat JSON file. Raises ConfigError for a file that cannot be read, too."""
        try:
            return cls(**read_flat_json(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def as_flat_dict(self) -> dict[str, Any]:
        """Every key as a JSON file has it, false and null too. The class called with them gives an equal object."""
        return self.model_dump(mode="json", by_alias=True)


def key_of(name: str, field: FieldInfo) -> str:
    """The key of a field in JSON files."""
    return field.alias or name


def read_flat_json(path: str | Path) -> dict[str, Any]:
    """The keys of a flat JSON file. Raises ConfigError, without the path: missing, not JSON, no object, a key twice."""
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"), object_pairs_hook=_once_each)
    except FileNotFoundError:
        raise ConfigError("there is no such file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except ConfigError:  # a key twice
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f'must hold one JSON object, {{"key": value, …}}, but holds {shown(content)}')
    return content


def shown(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _word(text: str) -> str:
    return text.strip().lower()


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value) else None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    return int(value) if isinstance(value, Integral) else None


def _misspelt_unit(size: str) -> str:
    word, units = _word(size.strip(" +-.0123456789")), {unit.lower(): unit for unit in UNITS}
    return "" if word in units else _nearest(word, units)


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"has a key twice: {next(key for key in keys if keys.count(key) > 1)!r}")
    return content


def _fields_of(model: type[Keys], given: Mapping[str, Any]) -> dict[str, str]:
    """The field that each given key means."""
    aliases = _aliases(model)
    known = {alias: name for name, alias in aliases.items()} | {name: name for name in aliases}
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise ConfigError(_unknown_key(model, unknown, given))
    fields: dict[str, str] = {}
    for key in given:
        twin = next((other for other, field in fields.items() if field == known[key]), None)
        if twin is not None:
            raise ConfigError(f"{twin!r} and {key!r} are two names of one key: give one of them")
        fields[key] = known[key]
    return fields


def _names_for(model: type[Keys], given: Iterable[str]) -> dict[str, str]:
    """What to call each field towards a caller who used these keys: as given, else in the style of the others."""
    keys = set(given)
    aliases = _aliases(model)
    plain = any(name in keys for name, alias in aliases.items() if alias != name)
    return {name: name if name in keys or (plain and alias not in keys) else alias for name, alias in aliases.items()}


def _unknown_key(model: type[Keys], key: str, given: Iterable[str]) -> str:
    aliases = _aliases(model)
    prefixes = {alias.removesuffix(name) for name, alias in aliases.items() if alias != name}
    prefix = next((prefix for prefix in prefixes if prefix and key.startswith(prefix)), "")
    if prefix:  # what many keys begin with says nothing about which one is meant: compare their own parts
        parts = {name: alias for name, alias in aliases.items() if alias == prefix + name}
        near = _nearest(key.removeprefix(prefix), parts)
    else:
        near = _nearest(key, {alias: alias for alias in aliases.values()}, 0.85) or did_you_mean(key, aliases)
    flat = prefix or not set(given).isdisjoint(alias for name, alias in aliases.items() if alias != name)
    names = list(aliases.values() if flat else aliases)
    listed = f" Known keys: {', '.join(names)}." if len(names) <= _MOST_LISTED else ""
    return f"unknown key {key!r}.{near}{listed}"


def _nearest(word: str, meanings: Mapping[str, str], cutoff: float = 0.6) -> str:
    near = get_close_matches(_word(word), list(meanings), n=1, cutoff=cutoff)
    return f" Did you mean {meanings[near[0]]!r}?" if near else ""


def _aliases(model: type[Keys]) -> dict[str, str]:
    return {name: key_of(name, field) for name, field in model.model_fields.items()}


def _described(error: ValidationError, names: Mapping[str, str]) -> list[str]:
    messages = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        text = str(cause) if cause is not None else f"{shown(item['input'])} is not allowed: {item['msg'].lower()}."
        key = f"{names.get(str(item['loc'][0]), item['loc'][0])}: " if item["loc"] else ""
        messages.append(key + re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), text))
    return messages

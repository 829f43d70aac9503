"""Fields of a JSON request body: read once, with errors that name the field, what it expects and what it got."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from superfluid.api.http.errors import ApiError, invalid, wrong_type
from superfluid.codec.json_text import NestedTooDeep, check_nesting

T = TypeVar("T")
U32 = 2**32 - 1
U64 = 2**64 - 1
F32_MAX = 3.4028234663852886e38  # the wire's numbers are single precision; a larger one means the same
TOKEN_ID = re.compile(r"[0-9]{1,10}\Z", re.ASCII)


class Fields:
    """The members of a body. A null is the same as absence; unknown members are ignored."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members

    @classmethod
    def parse(cls, body: bytes) -> "Fields":
        """Raises ApiError 400 when the body is no JSON object."""
        try:
            members = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"invalid request: the body is not JSON: {error}") from None
        try:
            check_nesting(members)
        except NestedTooDeep as error:
            raise ApiError(400, f"invalid request: {error}") from None
        if not isinstance(members, dict):
            raise ApiError(400, f"invalid request: the body must be a JSON object, got {type(members).__name__}")
        return cls(members)

    def __contains__(self, name: str) -> bool:
        return self.members.get(name) is not None

    def raw(self, name: str) -> Any:
        return self.members.get(name)

    def first(self, *names: str) -> str:
        """The first of `names` that is given (the last of them when none is)."""
        for name in names:
            if name in self:
                return name
        return names[-1]

    def _typed(self, name: str, default: T, expected: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.members.get(name)
        if value is None:
            return default
        if not accepts(value):
            raise wrong_type(name, expected, value)
        return value

    def string(self, name: str, default: T = None) -> str | T:  # type: ignore[assignment]
        return self._typed(name, default, "a string", lambda v: isinstance(v, str))  # type: ignore[no-any-return]

    def boolean(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, default, "true or false", lambda v: isinstance(v, bool)))

    def integer(self, name: str, low: float, high: float, default: T = None) -> int | T:  # type: ignore[assignment]
        """An integer within [low, high]."""
        value = self._typed(name, default, "an integer", _is_integer)
        if value is not default and not low <= value <= high:
            raise invalid(f"{name} must be between {low} and {high}, got {value}", name)
        return value if value is default else int(value)

    def number(
        self,
        name: str,
        low: float,
        high: float,
        default: T = None,  # type: ignore[assignment]
        message: str | None = None,
    ) -> float | T:
        """A finite number within [low, high]."""
        value = self._typed(name, default, "a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool))
        if value is default:
            return default
        if not math.isfinite(value) or not low <= value <= high:
            limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise invalid(message or f"{name} must be {limit}, got {value}", name)
        return max(-F32_MAX, min(float(value), F32_MAX))

    def array(self, name: str) -> list[Any]:
        return list(self._typed(name, [], "an array", lambda v: isinstance(v, list)))

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._typed(name, {}, "an object", lambda v: isinstance(v, dict)))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def stop_strings(fields: Fields, most: int = 16) -> list[str]:
    """`stop`: a string or up to `most` of them; empty ones are dropped."""
    value = fields.raw("stop")
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(stops) > most:
        raise invalid(f"stop takes at most {most} strings, got {len(stops)}", "stop")
    return [stop for stop in stops if stop]


def logit_bias(fields: Fields) -> dict[int, float]:
    """`logit_bias`: token id (a decimal string) to number; keys that are no token ids are ignored."""
    biases: dict[int, float] = {}
    for key, value in fields.mapping("logit_bias").items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise wrong_type(f"logit_bias[{key}]", "a number", value)
        if TOKEN_ID.match(key):
            biases[int(key)] = max(-F32_MAX, min(float(value), F32_MAX))
    return biases

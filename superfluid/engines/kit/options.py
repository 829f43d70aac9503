"""Options a runtime declares, and the check of a value given on a command line."""

import math
import re
from typing import Any, Literal

import attrs

Kind = Literal["int", "float", "on-off", "choice", "text"]
Value = int | float | bool | str

NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
RESERVED = frozenset({"model", "max-context", "max-batch", "kv-bits", "frames-fd", "fd-channel-fd", "engine"})
_INT64 = range(-(2**63), 2**63)


class OptionError(ValueError):
    """A value an option does not take; the message says what it takes and what was given."""


@attrs.frozen
class Option:
    """One option of a runtime: `--<name>` on its worker, `--<id>-<name>` on the daemon.

    `default` is the value (as it would be written) or words for it; `least` and `most` bound an int, `least` a float.
    """

    name: str
    kind: Kind
    default: str
    about: str
    choices: tuple[str, ...] = ()
    least: int | float | None = None
    most: int | None = None

    def parse(self, text: str) -> Value:
        """The value of `text`: int, float, bool for on-off, else str. Raises OptionError."""
        match self.kind:
            case "int":
                return self._parse_int(text)
            case "float":
                return self._parse_float(text)
            case "on-off":
                if text not in ("on", "off"):
                    raise OptionError(f'on or off expected, got "{text}"')
                return text == "on"
            case "choice":
                if text not in self.choices:
                    raise OptionError(f'one of {", ".join(self.choices)} expected, got "{text}"')
            case "text":
                if not text:
                    raise OptionError("a value expected")
        return text

    def _parse_int(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text) or int(text) not in _INT64:
            raise OptionError(f'an integer expected, got "{text}"')
        value = int(text)
        if (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            raise OptionError(f"{self._range()} expected, got {value}")
        return value

    def _parse_float(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or "_" in text:
            raise OptionError(f'a number expected, got "{text}"')
        if self.least is not None and value < self.least:
            raise OptionError(f"{self._range()} expected, got {value:g}")
        return value

    def _range(self) -> str:
        if self.least is None:
            return f"at most {self.most}"
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"

    def report(self) -> dict[str, Any]:
        """The declaration as the check report shows it."""
        found: dict[str, Any] = {"name": self.name, "kind": self.kind, "default": self.default, "about": self.about}
        if self.choices:
            found["choices"] = list(self.choices)
        for key in ("least", "most"):
            if getattr(self, key) is not None:
                found[key] = getattr(self, key)
        return found

    @classmethod
    def from_report(cls, entry: dict[str, Any]) -> "Option":
        """Read a declaration back."""
        return cls(
            entry["name"],
            entry["kind"],
            entry["default"],
            entry["about"],
            tuple(entry.get("choices", ())),
            entry.get("least"),
            entry.get("most"),
        )


@attrs.frozen
class PullOption:
    """An option of `pull`; `value`: it takes one."""

    name: str
    value: bool
    about: str

    def report(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "about": self.about}

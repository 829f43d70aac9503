"""`--tool-call-parser`: an operator's word on how calls are read and held."""

from superfluid.codec.dialects.dialect import DialectRefused
from superfluid.codec.toolcalls.wires import GlmWire, Wire

PARSERS = ("auto", "json", "atem", "gemma", "harmony", "glm")
GLM_MARKS = "<arg_key>", "<arg_value>"


class UnknownParser(ValueError):
    """`--tool-call-parser` names none (exit 2)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown --tool-call-parser {name!r} (have: {', '.join(PARSERS)})")


def parser_wire(name: str, own: Wire, template: str) -> Wire:
    """The wire that `name` stands for on a model whose dialect writes `own`.

    The model is told how to write calls by its template, so another wire than its own would read nothing; only `glm`
    can be seen in the template's source. Raises UnknownParser, DialectRefused.
    """
    if name not in PARSERS:
        raise UnknownParser(name)
    if name in ("auto", own.name):
        return own
    if name == "glm" and all(mark in template for mark in GLM_MARKS):
        return GlmWire()
    raise DialectRefused(
        f"--tool-call-parser {name} refused: this model's dialect writes calls on the wire {own.name}, not {name}"
    )

"""Proof that a library's parameter structs lie as declared, before a call through a wrong layout corrupts the heap.

The default-parameter getters fill a buffer of our own, which is then read at the declared offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from superfluid._native import ffi as native_ffi, lib as native
from superfluid.llama.declaration import EXPECTED_CONTEXT, EXPECTED_MODEL, Layout

RESULT_BYTES = 1024  # far more than any build's parameters
FILL = 0xAA  # no default consists of it, and it is neither a boolean nor a null pointer


class LayoutError(Exception):
    """The library's structs are not those of a declared layout; the text names the wrong fields."""


def call_getter(address: int) -> bytearray:
    """What the struct getter at `address` writes, in a buffer of RESULT_BYTES that held FILL."""
    result = bytearray([FILL]) * RESULT_BYTES
    native.sf_call_with_result(address, native_ffi.from_buffer(result))
    return result


def field_value(ffi: Any, result: bytes | bytearray, struct: str, field: str) -> int:
    """A field of `result` as the declaration places it; pointers as addresses, booleans as their byte."""
    declared = dict(ffi.typeof(struct).fields)[field]
    size = ffi.sizeof(declared.type)
    raw = bytes(result[declared.offset : declared.offset + size])
    signed = declared.type.kind == "primitive" and not declared.type.cname.startswith(("uint", "size_t", "_Bool"))
    return int.from_bytes(raw, "little", signed=signed)


def wrong_fields(ffi: Any, result: bytes | bytearray, struct: str, expected: Mapping[str, int]) -> list[str]:
    """One text for each field of `result` that has not its expected value."""
    found = {field: field_value(ffi, result, struct, field) for field in expected}
    return [f"{field} is {found[field]}, tested {value}" for field, value in expected.items() if found[field] != value]


def _written_past(ffi: Any, result: bytes | bytearray, struct: str) -> bool:
    return any(byte != FILL for byte in result[ffi.sizeof(struct) :])


def prove(build: str, getters: Callable[[str], int], layouts: Sequence[Layout]) -> tuple[Layout, Any]:
    """The first layout that fits the library, and its FFI.

    `getters` gives the address of the getter of a struct, named "model" or "context". Raises LayoutError.
    """
    model, context = call_getter(getters("model")), call_getter(getters("context"))
    builds = "; ".join(layout.builds for layout in layouts)
    refusal = ""
    for layout in layouts:
        ffi = layout.declare()
        wrong = [
            *(
                f"context.{text}"
                for text in wrong_fields(ffi, context, "struct llama_context_params", EXPECTED_CONTEXT)
            ),
            *(f"model.{text}" for text in wrong_fields(ffi, model, "struct llama_model_params", EXPECTED_MODEL)),
        ]
        longer = [
            name
            for name, result in (("context", context), ("model", model))
            if _written_past(ffi, result, f"struct llama_{name}_params")
        ]
        if not wrong and not longer:
            return layout, ffi
        if not refusal:
            texts = wrong + [f"the {name} parameters are longer than the tested builds'" for name in longer]
            refusal = f"{build} has another layout than the tested builds ({builds}): {', '.join(texts)}"
        if not wrong:  # the fields fit, so this is the layout that the library outgrew
            texts = [f"the {name} parameters are longer than the tested builds'" for name in longer]
            raise LayoutError(f"{build} does not fit the tested builds ({builds}): {', '.join(texts)}")
    raise LayoutError(refusal)

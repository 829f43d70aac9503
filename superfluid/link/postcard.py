"""Postcard 1.x payloads for attrs classes: encoders, decoders and JSON forms, generated once per class.

A message is declared once, with `message`; a variant of a tagged union with `variant`, in declaration order, as a
subclass of its `Choice`. The annotations below give each field its wire type (spec: the public postcard 1.x wire
specification).
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

import attrs

U8 = Annotated[int, "u8"]
U16 = Annotated[int, "u16"]
U32 = Annotated[int, "u32"]
U64 = Annotated[int, "u64"]
I16 = Annotated[int, "i16"]
I32 = Annotated[int, "i32"]
I64 = Annotated[int, "i64"]
F32 = Annotated[float, "f32"]
F64 = Annotated[float, "f64"]
Bytes32 = Annotated[bytes, "[u8; 32]"]
Bytes16 = Annotated[bytes, "[u8; 16]"]
Tokens = Annotated[list[int], "vec u32"]  # decoded and encoded natively, in one call

C = TypeVar("C")


@dataclass_transform(field_specifiers=(attrs.field,))
def message(cls: type[C]) -> type[C]:
    """Declare a struct: an attrs class whose fields are on the wire in the order they are written."""
    return attrs.define(slots=True)(cls)


class Choice:
    """Base of a tagged union; its variants register themselves in declaration order."""

    __slots__ = ()
    variants: ClassVar[list[type[Any]]]
    variant_name: ClassVar[str]


@dataclass_transform(field_specifiers=(attrs.field,))
def variant(name: str) -> Callable[[type[C]], type[C]]:
    """Declare the next variant of the `Choice` that the class derives from; `name` is its JSON key."""

    def declare(cls: type[C]) -> type[C]:
        made = attrs.define(slots=True)(cls)
        union: Any = made.__mro__[1]
        if "variants" not in union.__dict__:
            union.variants = []
        made.variant_name = name  # type: ignore[attr-defined]
        union.variants.append(made)
        return made

    return declare

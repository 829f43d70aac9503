"""How message classes are declared, and the wire types that their annotations stand for."""

import functools
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, dataclass_transform

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

MAY_BE_MISSING = "may be missing"
"""Marks a last field, an option, without which a payload still decodes: Annotated[U64 | None, MAY_BE_MISSING]."""

C = TypeVar("C")
R = TypeVar("R")


@dataclass_transform(field_specifiers=(attrs.field,))
def message(cls: type[C]) -> type[C]:
    """Declare a struct: an attrs class whose fields are on the wire in the order they are written."""
    return attrs.define(slots=True)(cls)


class Choice:
    """Base of a tagged union; its variants register themselves in declaration order."""

    __slots__ = ()
    variants: ClassVar[list[type[Any]]]
    variant_name: ClassVar[str]
    newtype: ClassVar[bool]


@dataclass_transform(field_specifiers=(attrs.field,))
def variant(name: str, *, newtype: bool = False) -> Callable[[type[C]], type[C]]:
    """Declare the next variant of the `Choice` that the class derives from; `name` is its JSON key.

    The JSON of a `newtype` variant, which has one field, is `{name: field}` instead of `{name: {key: field}}`.
    """

    def declare(cls: type[C]) -> type[C]:
        made: Any = attrs.define(slots=True)(cls)
        union: Any = made.__mro__[1]
        if "variants" not in union.__dict__:
            union.variants = []
        made.variant_name = name
        made.newtype = newtype
        union.variants.append(made)
        return made  # type: ignore[no-any-return]

    return declare


# ---- wire types ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Int:
    """A varint (zigzag when signed); of 8 bits, one byte. `values`: what its values mean, for who writes another."""

    bits: int
    signed: bool = False
    values: str = attrs.field(default="", eq=False)

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest."""
        return (-(1 << self.bits - 1), (1 << self.bits - 1) - 1) if self.signed else (0, (1 << self.bits) - 1)


@attrs.frozen
class Float:
    bits: int


@attrs.frozen
class Bool:
    pass


@attrs.frozen
class Text:
    pass


@attrs.frozen
class Blob:
    """A byte vector, or a byte array without a count when `size` is given."""

    size: int | None = None


@attrs.frozen
class Span:
    """A vector of u32."""


@attrs.frozen
class Many:
    item: "Wire"


@attrs.frozen
class Option:
    item: "Wire"
    may_be_missing: bool = False


@attrs.frozen
class Pair:
    """A tuple, of any length."""

    items: tuple["Wire", ...]


@attrs.frozen
class Named:
    """An enum of units; its members are the variant indexes."""

    members: type[IntEnum]


@attrs.frozen
class Struct:
    cls: type[Any]


@attrs.frozen
class Union:
    cls: type[Any]


Wire: TypeAlias = Int | Float | Bool | Text | Blob | Span | Many | Option | Pair | Named | Struct | Union

_TAGGED: dict[str, Wire] = {
    "[u8; 32]": Blob(32),
    "[u8; 16]": Blob(16),
    "vec u32": Span(),
    "f32": Float(32),
    "f64": Float(64),
    **{f"u{bits}": Int(bits) for bits in (8, 16, 32, 64)},
    **{f"i{bits}": Int(bits, signed=True) for bits in (8, 16, 32, 64)},
}


def wire_type(annotation: Any) -> Wire:
    """The wire type of an annotation. Raises TypeError for one that has none."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        if args[1] == MAY_BE_MISSING:
            inner = wire_type(args[0])
            assert isinstance(inner, Option), f"{annotation} must be an option"
            return Option(inner.item, may_be_missing=True)
        wire = _TAGGED[args[1]]
        if len(args) > 2:
            assert isinstance(wire, Int), f"{annotation}: only integers have words for their values"
            return attrs.evolve(wire, values=args[2])
        return wire
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and args[1] is types.NoneType:
        return Option(wire_type(args[0]))
    if origin is list:
        item = wire_type(args[0])
        return Span() if item == Int(32) else Many(item)
    if origin is tuple:
        return Pair(tuple(wire_type(arg) for arg in args))
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, IntEnum):
        return Named(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        return Union(annotation) if is_union(annotation) else Struct(annotation)
    if attrs.has(annotation):
        return Struct(annotation)
    raise TypeError(f"{annotation!r} has no wire type")


_PLAIN: dict[Any, Wire] = {bool: Bool(), str: Text(), bytes: Blob()}


def is_union(cls: type[Any]) -> bool:
    """Whether a class is a tagged union itself, not one of its variants."""
    return issubclass(cls, Choice) and "variant_name" not in cls.__dict__


def union_of(cls: type[Any]) -> type[Any]:
    """The class that a message travels as: a variant's union, else the class itself."""
    return cls.__mro__[1] if issubclass(cls, Choice) and not is_union(cls) else cls


@attrs.frozen
class Field:
    """`name` of the attribute, `key` in JSON."""

    name: str
    key: str
    wire: Wire


def once_per_class(function: Callable[[type[Any]], R]) -> Callable[[type[Any]], R]:
    """Remember what a function made of a class."""
    return functools.cache(function)  # type: ignore[return-value]  # a class is hashable


@once_per_class
def fields_of(cls: type[Any]) -> tuple[Field, ...]:
    """The fields of a message or variant class, in wire order."""
    return tuple(Field(f.name, f.name.removesuffix("_"), wire_type(f.type)) for f in attrs.fields(cls))

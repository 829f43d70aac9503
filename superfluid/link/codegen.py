"""Postcard encoders and decoders, written out as Python source once per class.

Structs are inlined into the message that holds them, so that a message is one function without a call per field;
unions are called through a table. A decoder reads past the end by IndexError, which `postcard.decode` translates.
"""

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from superfluid._native import ffi, lib
from superfluid.link.errors import PostcardError
from superfluid.link.ids import AT_ONCE, Ids, listed
from superfluid.link.schema import (
    Blob,
    Bool,
    Field,
    Float,
    Int,
    Many,
    Named,
    Option,
    Pair,
    Span,
    Struct,
    Text,
    Union,
    Wire,
    fields_of,
    is_union,
    union_of,
)

Encoder = Callable[[Any, bytearray], None]
Decoder = Callable[[bytes, int], tuple[Any, int]]

ENDS_EARLY = "it ends early"
BOOLS = {False: 0, True: 1}  # a truthy value of another type is a mistake
_SHORT_SPAN = 4  # ids up to which a loop here is quicker than two native calls

# ---- what generated code calls -------------------------------------------------------------------------------------


def put_big(out: bytearray, value: int, bits: int) -> None:
    """Append a varint of two bytes or more."""
    if value >> bits:
        raise PostcardError(f"{value} does not fit u{bits}")
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def get_big(data: bytes, at: int, value: int, bits: int) -> tuple[int, int]:
    """The rest of a varint whose first byte was `value`."""
    value &= 127
    for shift in range(7, bits, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> bits:
                raise PostcardError(f"a varint holds bits past u{bits}")
            return value, at
    raise PostcardError(f"a varint is longer than u{bits} allows")


def put_span(out: bytearray, ids: Sequence[int]) -> None:
    """Append a vector of u32; a list, an array, or a numpy array of any integers."""
    words: Any = ids if getattr(ids, "dtype", None) == "uint32" else array("I", ids)
    count = len(words)
    room = bytearray(5 * count + 10)
    written = lib.sf_tokens_encode(ffi.from_buffer("uint32_t[]", words), count, ffi.from_buffer(room))
    out += memoryview(room)[:written]


_SPAN_ERRORS = {
    -1: ENDS_EARLY,
    -2: "a count exceeds the bytes left",
    -3: "a varint is too long or holds bits past u32",
}


def get_span(data: bytes, at: int) -> tuple[list[int], int]:
    """Read a vector of u32; very many of them are an `Ids`."""
    found = ffi.new("size_t *")
    view, size = ffi.from_buffer(data), len(data)
    at = lib.sf_tokens_count(view, size, at, found)
    if at >= 0:
        count = found[0]
        ids = ffi.new("uint32_t[]", count)
        at = lib.sf_tokens_decode(view, size, at, ids, count)
    if at < 0:
        raise PostcardError(_SPAN_ERRORS[at])
    if count <= AT_ONCE:
        return ffi.unpack(ids, count), at
    many = Ids("I")
    many.frombytes(ffi.buffer(ids))
    return listed(many), at


def pack_floats(*values: float) -> bytes:
    """f32 each; a NaN keeps its bits, which the conversion of the hardware would quiet."""
    return b"".join(struct.pack("<f", v) if v == v else _nan32(v) for v in values)


def unpack_floats(data: bytes, at: int, count: int) -> tuple[float, ...]:
    return tuple(_float32(data[i : i + 4]) for i in range(at, at + 4 * count, 4))


def _nan32(value: float) -> bytes:
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return struct.pack("<I", bits >> 32 & 0x80000000 | 0x7F800000 | bits >> 29 & 0x7FFFFF)


def _float32(data: bytes) -> float:
    (bits,) = struct.unpack("<I", data)
    value: float
    if bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF:
        wide = (bits & 0x80000000) << 32 | 0x7FF0000000000000 | (bits & 0x7FFFFF) << 29
        (value,) = struct.unpack("<d", struct.pack("<Q", wide))
    else:
        (value,) = struct.unpack("<f", data)
    return value


def bad(what: str) -> PostcardError:
    return PostcardError(what)


# ---- tables --------------------------------------------------------------------------------------------------------


class EncoderTable(dict[type[Any], Encoder]):
    """Class (or variant) to its encoder, made when first asked for."""

    def __missing__(self, cls: type[Any]) -> Encoder:
        if not hasattr(cls, "__attrs_attrs__"):
            raise PostcardError(f"{cls.__name__} is no message")
        self[cls] = made = _encoder(cls)
        return made


class DecoderTable(dict[type[Any], Decoder]):
    """Class (or union) to its decoder, made when first asked for."""

    def __missing__(self, cls: type[Any]) -> Decoder:
        self[cls] = made = _union_decoder(cls) if is_union(cls) else _decoder(cls)
        return made


ENCODERS = EncoderTable()
DECODERS = DecoderTable()


def _union_decoder(cls: type[Any]) -> Decoder:
    variants = [_decoder(v) for v in cls.variants]

    def decode(data: bytes, at: int) -> tuple[Any, int]:
        index = data[at]
        at += 1
        if index > 127:
            index, at = get_big(data, at, index, 32)
        if index >= len(variants):
            raise PostcardError(f"{cls.__name__} has no variant {index}")
        return variants[index](data, at)

    return decode


# ---- source --------------------------------------------------------------------------------------------------------


class _Source:
    """Lines of one function under construction, and the names they use."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.names = names
        self._depth = 1
        self._count = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self._depth + line)

    def indent(self, steps: int = 1) -> None:
        self._depth += steps

    def fresh(self) -> str:
        """A new local name."""
        self._count += 1
        return f"v{self._count}"

    def bind(self, value: Any) -> str:
        """A name for a constant."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def compile(self, title: str, head: str) -> Any:
        exec(compile("\n".join([head, *self.lines]), f"<postcard of {title}>", "exec"), self.names)
        return self.names["run"]


def _float_run(fields: Sequence[Field], start: int) -> int:
    """How many f32 fields stand together from `start`."""
    end = start
    while end < len(fields) and fields[end].wire == Float(32):
        end += 1
    return end - start


def _encoder(cls: type[Any]) -> Encoder:
    src = _Source({"put_big": put_big, "put_span": put_span, "pack_floats": pack_floats, "bad": bad})
    src("put = out.append")
    union = union_of(cls)
    if union is not cls:
        src(f"out += {bytes(_varint(union.variants.index(cls)))!r}")
    _encode_fields(src, cls, "message")
    encoder: Encoder = src.compile(cls.__name__, "def run(message, out):")
    return encoder


def _varint(value: int) -> bytearray:
    out = bytearray()
    put_big(out, value, 32)
    return out


def _encode_fields(src: _Source, cls: type[Any], value: str) -> None:
    fields = fields_of(cls)
    at = 0
    while at < len(fields):
        run = _float_run(fields, at)
        if run:
            names = [src.fresh() for _ in range(run)]
            src(f"{', '.join(names)} = {', '.join(f'{value}.{f.name}' for f in fields[at : at + run])}")
            total = src.fresh()
            src(f"{total} = {' + '.join(names)}")  # not equal to itself when one is NaN (or infinities cancel)
            packer = src.bind(struct.Struct(f"<{run}f").pack)
            args = ", ".join(names)
            src(f"out += {packer}({args}) if {total} == {total} else pack_floats({args})")
            at += run
        else:
            _encode(src, fields[at].wire, f"{value}.{fields[at].name}")
            at += 1


def _encode(src: _Source, wire: Wire, value: str) -> None:
    match wire:
        case Bool():
            src(f"put({src.bind(BOOLS)}[{value}])")
        case Int(8, False):
            src(f"put({value})")
        case Int(8, True):
            src(f"out += {src.bind(struct.Struct('<b').pack)}({value})")
        case Int(bits, signed):
            v = src.fresh()
            src(f"{v} = {value}")
            if signed:
                src(f"if not {-(1 << bits - 1)} <= {v} < {1 << bits - 1}:")
                src(f"    raise bad(f'{{{v}}} does not fit i{bits}')")
                src(f"{v} = {v} << 1 if {v} >= 0 else ~({v} << 1)")
            _put_varint(src, v, bits)
        case Float(64):
            src(f"out += {src.bind(struct.Struct('<d').pack)}({value})")
        case Float():
            src(f"out += pack_floats({value})")
        case Text() | Blob(None):
            v = src.fresh()
            src(f"{v} = {value}.encode()" if wire == Text() else f"{v} = {value}")
            _put_count(src, v)
            src(f"out += {v}")
        case Blob(size):
            v = src.fresh()
            src(f"{v} = {value}")
            src(f"if len({v}) != {size}:")
            src(f"    raise bad(f'{{len({v})}} bytes in a field of {size}')")
            src(f"out += {v}")
        case Span():
            _encode_span(src, value)
        case Many(item):
            v, each = src.fresh(), src.fresh()
            src(f"{v} = {value}")
            _put_count(src, v)
            src(f"for {each} in {v}:")
            _indented(src, lambda: _encode(src, item, each))
        case Option(item):
            v = src.fresh()
            src(f"{v} = {value}")
            src(f"if {v} is None:")
            src("    put(0)")
            src("else:")
            src("    put(1)")
            _indented(src, lambda: _encode(src, item, v))
        case Pair(items):
            parts = [src.fresh() for _ in items]
            src(f"{', '.join(parts)} = {value}")
            for item, part in zip(items, parts, strict=True):
                _encode(src, item, part)
        case Named(members):
            v = src.bind(members)
            src(f"put({v}({value}))")
        case Struct(cls):
            if fields_of(cls):
                v = src.fresh()
                src(f"{v} = {value}")
                _encode_fields(src, cls, v)
        case Union(cls):
            v = src.fresh()
            src(f"{v} = {value}")
            src(f"if not isinstance({v}, {src.bind(cls)}):")
            src(f"    raise bad(f'{{type({v}).__name__}} is no {cls.__name__}')")
            src(f"{src.bind(ENCODERS)}[type({v})]({v}, out)")


def _encode_span(src: _Source, value: str) -> None:
    v, each = src.fresh(), src.fresh()
    src(f"{v} = {value}")
    src(f"if type({v}) is list and len({v}) <= {_SHORT_SPAN}:")
    src(f"    put(len({v}))")
    src(f"    for {each} in {v}:")
    _indented(src, lambda: _put_varint(src, each, 32), 2)
    src("else:")
    src(f"    put_span(out, {v})")


def _put_varint(src: _Source, v: str, bits: int) -> None:
    src(f"if {v} < 128:")  # a negative one is refused by bytearray.append
    src(f"    put({v})")
    src("else:")
    src(f"    put_big(out, {v}, {bits})")


def _put_count(src: _Source, v: str) -> None:
    count = src.fresh()
    src(f"{count} = len({v})")
    _put_varint(src, count, 64)


def _indented(src: _Source, emit: Callable[[], None], steps: int = 1) -> None:
    src.indent(steps)
    before = len(src.lines)
    emit()
    if len(src.lines) == before:
        src("pass")
    src.indent(-steps)


def _decoder(cls: type[Any]) -> Decoder:
    src = _Source({"get_big": get_big, "get_span": get_span, "unpack_floats": unpack_floats, "bad": bad})
    result = _decode_struct(src, cls)
    src(f"return {result}, at")
    decoder: Decoder = src.compile(cls.__name__, "def run(data, at):")
    return decoder


def _decode_struct(src: _Source, cls: type[Any]) -> str:
    """Emit the reading of a struct; returns the expression that makes it."""
    fields = fields_of(cls)
    values: list[str] = []
    at = 0
    while at < len(fields):
        run = _float_run(fields, at)
        if run:
            names = [src.fresh() for _ in range(run)]
            src(f"if len(data) - at < {4 * run}:")
            src(f"    raise bad('{ENDS_EARLY}')")
            src(f"{', '.join(names)}, = {src.bind(struct.Struct(f'<{run}f').unpack_from)}(data, at)")
            total = src.fresh()
            src(f"{total} = {' + '.join(names)}")
            src(f"if {total} != {total}:")
            src(f"    {', '.join(names)}, = unpack_floats(data, at, {run})")
            src(f"at += {4 * run}")
            values += names
            at += run
        else:
            values.append(_decode(src, fields[at].wire))
            at += 1
    return f"{src.bind(cls)}({', '.join(values)})"


def _decode(src: _Source, wire: Wire) -> str:
    """Emit the reading of one value; returns the local it is in."""
    v = src.fresh()
    match wire:
        case Bool():
            src(f"{v} = data[at]")
            src(f"if {v} > 1:")
            src(f"    raise bad(f'{{{v}}} is no bool')")
            src(f"{v} = {v} == 1")
            src("at += 1")
        case Int(8, False):
            src(f"{v} = data[at]")
            src("at += 1")
        case Int(8, True):
            src(f"{v} = data[at]")
            src(f"{v} = {v} - 256 if {v} > 127 else {v}")
            src("at += 1")
        case Int(bits, signed):
            _get_varint(src, v, bits)
            if signed:
                src(f"{v} = ~({v} >> 1) if {v} & 1 else {v} >> 1")
        case Float(bits):
            src(f"if len(data) - at < {bits // 8}:")
            src(f"    raise bad('{ENDS_EARLY}')")
            src(
                f"{v}, = unpack_floats(data, at, 1)"
                if bits == 32
                else f"{v}, = {src.bind(struct.Struct('<d').unpack_from)}(data, at)"
            )
            src(f"at += {bits // 8}")
        case Text() | Blob(None):
            count = _get_count(src)
            src(f"{v} = data[at : at + {count}]" + (".decode()" if wire == Text() else ""))
            src(f"at += {count}")
        case Blob(size):
            src(f"{v} = data[at : at + {size}]")
            src(f"if len({v}) != {size}:")
            src(f"    raise bad('{ENDS_EARLY}')")
            src(f"at += {size}")
        case Span():
            _decode_span(src, v)
        case Many(item):
            count = _get_count(src)
            src(f"{v} = []")
            src(f"for _ in range({count}):")
            _indented(src, lambda: src(f"{v}.append({_decode(src, item)})"))
        case Option(item, may_be_missing):
            tag = src.fresh()
            src(f"{v} = None")
            if may_be_missing:
                src(f"{tag} = data[at] if at < len(data) else None")
                src(f"at += {tag} is not None")
            else:
                src(f"{tag} = data[at]")
                src("at += 1")
            src(f"if {tag} == 1:")
            _indented(src, lambda: src(f"{v} = {_decode(src, item)}"))
            src(f"elif {tag}:")
            src(f"    raise bad(f'{{{tag}}} is no option')")
        case Pair(items):
            src(f"{v} = {', '.join([_decode(src, item) for item in items])},")
        case Named(members):
            _get_varint(src, v, 32)
            src(f"if {v} >= {len(members)}:")
            src(f"    raise bad(f'{members.__name__} has no variant {{{v}}}')")
            src(f"{v} = {src.bind(tuple(members))}[{v}]")
        case Struct(cls):
            src(f"{v} = {_decode_struct(src, cls)}")
        case Union(cls):
            src(f"{v}, at = {src.bind(DECODERS)}[{src.bind(cls)}](data, at)")
    return v


def _decode_span(src: _Source, v: str) -> None:
    each = src.fresh()
    src(f"{v} = data[at]")
    src(f"if {v} <= {_SHORT_SPAN}:")
    src("    at += 1")
    src(f"    if {v} > len(data) - at:")
    src(f"        raise bad('{_SPAN_ERRORS[-2]}')")
    left = src.fresh()
    src(f"    {left} = {v}")
    src(f"    {v} = []")
    src(f"    for _ in range({left}):")
    _indented(src, lambda: _get_varint(src, each, 32), 2)
    src(f"        {v}.append({each})")
    src("else:")
    src(f"    {v}, at = get_span(data, at)")


def _get_varint(src: _Source, v: str, bits: int) -> None:
    src(f"{v} = data[at]")
    src("at += 1")
    second = src.fresh()
    src(f"if {v} > 127:")
    src(f"    {second} = data[at]")
    src(f"    if {second} < 128:")
    src(f"        {v} = {v} & 127 | {second} << 7")
    src("        at += 1")
    src("    else:")
    src(f"        {v}, at = get_big(data, at, {v}, {bits})")


def _get_count(src: _Source) -> str:
    count = src.fresh()
    _get_varint(src, count, 64)
    src(f"if {count} > len(data) - at:")
    src(f"    raise bad('{_SPAN_ERRORS[-2]}')")
    return count

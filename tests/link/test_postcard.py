"""The rules of the payload encoding, and every message class there and back."""

import json
import math
import struct
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from superfluid.link import events, linkw, session_api
from superfluid.link.ids import packed
from superfluid.link.postcard import (
    F32,
    F64,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bytes32,
    PostcardError,
    decode,
    decode_prefix,
    decode_tokens,
    encode,
    encode_tokens,
    from_json,
    message,
    to_json,
)
from tests.link.catalog import CLASSES, messages

U64_MAX = 0xFFFFFFFFFFFFFFFF


@message
class Numbers:
    a: U8
    b: U16
    c: U32
    d: U64
    e: I16
    f: I32
    g: I64
    h: F64
    i: bool


@message
class Floats:
    a: F32
    b: F32


@message
class Hash:
    digest: Bytes32


@message
class Names:
    names: list[str]
    note: bytes | None


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_message_there_and_back(cls: type[Any], data: st.DataObject) -> None:
    value = data.draw(messages(cls))
    payload = encode(value)
    assert decode_prefix(cls, payload + b"\xff", 0) == (value, len(payload))
    assert decode(cls, memoryview(b"\0\0" + payload), 2) == value
    assert from_json(cls, json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_payload_cut_short_is_refused_or_is_an_older_form(cls: type[Any], data: st.DataObject) -> None:
    payload = encode(data.draw(messages(cls)))
    cut = payload[: data.draw(st.integers(0, max(len(payload) - 1, 0)))]
    try:
        value = decode(cls, cut)
    except PostcardError:
        return
    # only a message that may end before its last field gets here; what it means is then the form with that field none
    assert payload == cut or encode(value) == cut + b"\0"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.binary(max_size=80))
def test_any_bytes_decode_or_are_refused(cls: type[Any], data: bytes) -> None:
    try:
        value, end = decode_prefix(cls, data)
    except PostcardError:
        return
    assert end <= len(data)
    assert encode(decode(cls, encode(value))) == encode(value)


def test_numbers() -> None:
    value = Numbers(255, 300, 70_000, U64_MAX, -1, -106, -(1 << 63), 1.5, True)
    payload = bytes.fromhex("ff ac02 f0a204 ffffffffffffffffff01 01 d301 ffffffffffffffffff01 000000000000f83f 01")
    assert encode(value) == payload
    assert decode(Numbers, payload) == value


@pytest.mark.parametrize(
    ("field", "data", "value"),
    [
        ("b", "8000", 0),
        ("b", "808000", 0),
        ("b", "ffff03", 65_535),
        ("b", "ffff04", None),  # bits past the width
        ("b", "80808000", None),  # too long
        ("c", "8080808000", 0),
        ("c", "ffffffff0f", 0xFFFFFFFF),
        ("c", "ffffffff10", None),
        ("c", "808080808000", None),
        ("d", "80808080808080808000", 0),
        ("d", "ffffffffffffffffff01", U64_MAX),
        ("d", "ffffffffffffffffff02", None),
        ("d", "8080808080808080808000", None),
        ("i", "00", False),
        ("i", "02", None),
    ],
)
def test_varints_are_read_to_the_width_of_their_type(field: str, data: str, value: int | None) -> None:
    plain = {"a": "00", "b": "00", "c": "00", "d": "00", "e": "00", "f": "00", "g": "00", "h": "00" * 8, "i": "00"}
    payload = bytes.fromhex("".join((plain | {field: data}).values()))
    if value is None:
        with pytest.raises(PostcardError):
            decode(Numbers, payload)
    else:
        assert getattr(decode(Numbers, payload), field) == value


@pytest.mark.parametrize("data", ["8000", "ffffffff10", "808080808000", "80"])
def test_varints_of_a_span_likewise(data: str) -> None:
    ids = [0] * 8
    payload = b"\x09" + bytes(8) + bytes.fromhex(data)
    for short in (payload, b"\x01" + bytes.fromhex(data)):
        if data == "8000":
            assert decode_tokens(short)[0] == ([*ids, 0] if short is payload else [0])
            assert decode(events.Body, b"\x03" + short).span == decode_tokens(short)[0]
        else:
            with pytest.raises(PostcardError):
                decode_tokens(short)
            with pytest.raises(PostcardError):
                decode(events.Body, b"\x03" + short)


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800001, 0xFFBFFFFF, 0x80000000, 0x7F800000, 0xFF800000, 1])
def test_float_bits_are_kept(bits: int) -> None:
    payload = struct.pack("<II", bits, 0x3F000000)
    value = decode(Floats, payload)
    assert encode(value) == payload
    assert value.b == 0.5
    wide = decode(Numbers, bytes(7) + struct.pack("<Q", bits << 32 | 7) + b"\0")
    assert encode(wide)[7:15] == struct.pack("<Q", bits << 32 | 7)


@pytest.mark.parametrize(
    ("cls", "data"),
    [
        (Names, "ffffffff0f"),  # four billion strings
        (Names, "ffffffffffffffffff01"),
        (Names, "01ffffffff0f61"),  # a string of four billion bytes
        (Names, "0001ffffffff0f61"),
        (events.Body, "03ffffffff0f00"),  # a span of four billion ids
        (events.Body, "030301"),
        (linkw.TickEvents, "0000ffffffff0f"),
    ],
)
def test_a_count_over_the_bytes_left_is_refused(cls: type[Any], data: str) -> None:
    with pytest.raises(PostcardError, match="count exceeds the bytes left"):
        decode(cls, bytes.fromhex(data))


@pytest.mark.parametrize(
    ("cls", "data", "why"),
    [
        (Names, "0102c328", "utf-8"),
        (Names, "0002", "2 is no option"),
        (Hash, "00" * 31, "ends early"),
        (events.Body, "19", "Body has no variant 25"),
        (events.Body, "ffffffff0f", "Body has no variant 4294967295"),
        (linkw.RingSpec, "01020000", "RingKind has no variant 2"),
        (events.Body, "", "ends early"),
    ],
)
def test_what_is_wrong_is_said(cls: type[Any], data: str, why: str) -> None:
    with pytest.raises(PostcardError, match=why):
        decode(cls, bytes.fromhex(data))


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(PostcardError, match="nested"):
        decode(events.Body, b"\x0f\x00\x01\x00" * 20_000)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (linkw.LaneCommit(1, -1, 0), "token_id.*-1"),
        (linkw.LaneCommit(1, 1 << 32, 0), "token_id.*4294967296"),
        (linkw.LaneDecode(1, 70_000), "max_new_tokens.*70000"),
        (linkw.LaneDecode(None, 1), "LaneDecode"),  # type: ignore[arg-type]
        (linkw.LaneAdmit(1, linkw.TokenRef(), top_logprobs=256), "top_logprobs.*256"),
        (linkw.LaneAdmit(1, linkw.TokenRef(), host_sampler_identity=b"short"), "host_sampler_identity"),
        (linkw.TickRejected(-(1 << 31) - 1), "-2147483649"),
        (linkw.TickEmit(1, [1, -1]), "tokens.*-1"),
        (linkw.TickEmit(1, [1 << 32] * 20), "tokens.*4294967296"),
        (linkw.RingAttach(1, linkw.RingSpec(1, 2, 24, 1)), "RingAttach"),  # type: ignore[arg-type]
        (linkw.SamplingParams(temperature=1e39), "SamplingParams"),
        (linkw.StateOpSubmit(linkw.TickRejected(1)), r"StateOpSubmit\.op: .* is wanted, not TickRejected"),  # type: ignore[arg-type]
        (events.Appended("\ud800", []), r"Appended\.text: '.ud800' is no Unicode text"),
        (events.Appended(None, "abc"), r"Appended\.span: a list of token ids is wanted, not 'abc'"),  # type: ignore[arg-type]
        (events.Appended(None, [1] * 9 + [2.5]), r"span\[9\]: an integer .* is wanted, not 2.5"),  # type: ignore[list-item]
        (events.Message(1, 3, []), r"Message\.text: a string is wanted, not 3"),  # type: ignore[arg-type]
        (events.Message(1, b"x", []), r"Message\.text: a string is wanted, not b'x'"),  # type: ignore[arg-type]
        (events.QosSet(2, "no"), r"batch_invariant: True or False is wanted, not 'no'"),  # type: ignore[arg-type]
        (events.QosSet(2, 2), r"batch_invariant: True or False is wanted, not 2"),  # type: ignore[arg-type]
        (events.Purged(0, "Reroot"), "Descendants.Cascade or Descendants.Reroot is wanted, not 'Reroot'"),  # type: ignore[arg-type]
        (events.Created(None, "hot"), r"params: a GenParams \(temperature, .*\) is wanted, not 'hot'"),  # type: ignore[arg-type]
        (events.Created(None, events.GenParams("hot")), r"Created\.params\.temperature: a number .* not 'hot'"),  # type: ignore[arg-type]
        (events.Rebased(1, 1, events.GenParams(), [5]), r"edits\[0\]: Drop or Replace is wanted, not 5"),  # type: ignore[list-item]
        (session_api.PutMediaRequest("x", ""), r"PutMedia\.bytes: bytes is wanted, not 'x'"),  # type: ignore[arg-type]
        (object(), "object is no message"),
    ],
)
def test_values_out_of_their_type_do_not_encode(value: object, why: str) -> None:
    with pytest.raises(PostcardError, match=why):
        encode(value)


def test_spans_encode_from_any_sequence_of_integers() -> None:
    ids = [0, 127, 128, 49_151, 0xFFFFFFFF] * 5
    wanted = encode_tokens(ids)
    for form in (array("I", ids), np.array(ids, np.uint32), np.array(ids, np.int64), tuple(ids)):
        assert encode_tokens(form) == wanted  # type: ignore[arg-type]
        assert encode(linkw.TickEmit(7, form)) == b"\x07" + wanted  # type: ignore[arg-type]
    assert decode_tokens(b"\xff" + wanted, 1) == (ids, len(wanted) + 1)
    assert decode_tokens(encode_tokens([])) == ([], 1)
    with pytest.raises(PostcardError):
        encode_tokens([-1])


def test_the_last_field_that_may_be_missing() -> None:
    assert decode(linkw.SeedGrant, b"\x00\x09\xe8\x07") == linkw.SeedGranted(9, 1000, None)
    with pytest.raises(PostcardError):
        decode(linkw.SeedGrant, b"\x00\x09\xe8\x07\x01")
    inspection = session_api.Inspection(
        session_api.Summary(1, None, 0, None, False, 0, 0, 0, 0, 0),
        events.GenParams(),
        1, 0, 2, False, 0, None, [], session_api.Cold(), [], [], 2, bytes(range(16)),
    )  # fmt: skip
    whole = encode(session_api.InspectionResponse(inspection))
    shorter = decode(session_api.Response, whole[:-17])
    assert shorter.inspection.store_id is None
    for cut in range(1, 17):
        with pytest.raises(PostcardError):
            decode(session_api.Response, whole[:-cut])


def test_a_variant_is_asked_for_by_its_own_class_too() -> None:
    payload = encode(linkw.SeedRefused(-130))
    assert decode(linkw.SeedRefused, payload) == linkw.SeedRefused(-130)
    with pytest.raises(PostcardError, match="SeedRefused instead of SeedGranted"):
        decode(linkw.SeedGranted, payload)


SPECIFIED = [
    (linkw.RingAttach(1, linkw.RingSpec(1, linkw.RingKind.Tokens, 16_400, 64)), "01 01 00 90 80 01 40"),
    (
        linkw.TickSubmit(linkw.TickPlan(1, 0, 4096, 8)),
        "01 00 80 20 08 00 00 00 00 00 00 ff ff ff ff ff ff ff ff ff 01 00 ff ff ff ff ff ff ff ff ff 01",
    ),
    (linkw.TickEmit(7, [1, 300, 70_000]), "07 03 01 ac 02 f0 a2 04"),
    (linkw.TickRejected(-106), "01 d3 01"),
    (linkw.SeedRefused(-130), "01 83 02"),
    (linkw.ForwardStageReq([5, 6], 0, 12, None), "12 02 05 06 00 0c 00"),
    (session_api.ListRequest(), "07"),
    (session_api.AppendMessageRequest(1, 1, "hi"), "020101026869"),
    (session_api.GenerateRequest(1, 8), "030108"),
    (session_api.AppendToolResultRequest(1, 4, "x"), "0501040178"),
    (session_api.PinRequest(1, 5), "210105"),
    (session_api.AppendSystemRequest(1, None, ["{}"]), "22010001027b7d"),
    (session_api.ErrResponse("no"), "0d026e6f"),
    (session_api.ThrottledResponse(9), "1a09"),
    (
        events.Created(None, events.GenParams(0.5, float(np.float32(0.9)), 0.0, 40, 300)),
        "00 00 0000003f 6666663f 00000000 28 ac02",
    ),
    (events.Message(1, "hi", [1, 300]), "02 01 026869 0201ac02"),
    (events.EpochBump(), "07"),
]


@pytest.mark.parametrize(("value", "data"), SPECIFIED, ids=lambda v: type(v).__name__)
def test_the_vectors_of_the_specification(value: object, data: str) -> None:
    assert encode(value) == bytes.fromhex(data)
    assert decode(type(value), bytes.fromhex(data)) == value


def test_f32_prints_in_its_shortest_form() -> None:
    params = decode(events.GenParams, encode(events.GenParams(temperature=0.7, top_p=0.9, min_p=0.05)))
    assert params.temperature != 0.7
    assert to_json(params) == {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 0, "seed": 0}
    assert from_json(events.GenParams, to_json(params)) == params
    assert to_json(events.GenParams(math.nan, math.inf))["temperature"] is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("List", session_api.ListRequest()),
        ({"List": None}, session_api.ListRequest()),
        ({"Append": {"session": 1, "span": [1, 2]}}, session_api.AppendRequest(1, None, [1, 2])),
        (
            {"SetQos": {"session": 1, "class": 3, "batch_invariant": True, "later": [1]}},
            session_api.SetQosRequest(1, 3, True),
        ),
        (
            {"Rebase": {"session": 1, "edits": [{"Drop": {"from": 2, "to": 3}}]}},
            session_api.RebaseRequest(1, [events.Drop(2, 3)], None),
        ),
    ],
)
def test_json_that_reads(value: object, wanted: object) -> None:
    assert from_json(session_api.Request, value) == wanted


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("Nothing", "'Nothing' is no Request"),
        ("Read", "'Read' is no Request"),
        (["List"], "is no Request"),
        ({"List": None, "Tree": None}, "is no Request"),
        ({"Read": {"session": 1}}, r"^Read\.cursor is missing$"),
        ({"Create": {}}, r"^Create\.params is missing$"),
        (
            {"AppendMessage": {"session": 1, "role": "user", "text": "hi"}},
            r"role: an integer \(0 system, 1 user, 2 assistant\) is wanted, not 'user'",
        ),
        ({"AppendBlock": {"session": 1, "role": "tool", "kind": 1, "payload": ""}}, "2 assistant, 3 tool"),
        ({"SetQos": {"session": 1, "class": "agent", "batch_invariant": False}}, "2 agent, 3 background"),
        ({"Read": [1, 2]}, "Read is an object"),
        ({"Read": {"session": -1, "cursor": 0}}, "Read.session: an integer"),
        ({"Read": {"session": True, "cursor": 0}}, "Read.session: an integer"),
        ({"Read": {"session": 1.0, "cursor": 0}}, "Read.session: an integer"),
        ({"Read": {"session": 1 << 64, "cursor": 0}}, "Read.session: an integer"),
        ({"AppendMessage": {"session": 1, "role": 1, "text": 7}}, "AppendMessage.text: a string"),
        ({"AppendMessage": {"session": 1, "role": 1, "text": "\ud800"}}, "no Unicode text"),
        ({"Append": {"session": 1, "span": [1, -2]}}, "Append.span: an integer"),
        ({"PutMedia": {"bytes": [256], "mime": ""}}, "PutMedia.bytes: an array of numbers"),
        ({"Purge": {"session": 1, "expected_generation": 0, "mode": "Other"}}, "Cascade, Reroot"),
        ({"Create": {"params": {"temperature": "x"}}}, "Create.params: GenParams.temperature: a number"),
        ({"Create": {"params": {"temperature": 1e39}}}, "does not fit f32"),
    ],
)
def test_json_that_is_refused(value: object, why: str) -> None:
    with pytest.raises(PostcardError, match=why):
        from_json(session_api.Request, value)


def test_arrays_of_fixed_length_in_json() -> None:
    with pytest.raises(PostcardError, match="32 bytes"):
        from_json(Hash, {"digest": [0] * 31})
    with pytest.raises(PostcardError, match="array of 2"):
        from_json(linkw.Hello, {"proto_versions": [8], "link_role": "Worker", "auth": []})


EDGES = [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, 0x1FFFFF, 0x200000, 0xFFFFFFF, 0x10000000, 0xFFFFFFFF]


def varints(ids: list[int]) -> bytes:
    """The bytes of a span, one after the other."""
    out = bytearray()
    for value in [len(ids), *ids]:
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 0xFFFFFFFF)), max_size=30), st.binary(max_size=9))
def test_spans_of_values_of_every_length(ids: list[int], behind: bytes) -> None:
    data = varints(ids)
    assert encode_tokens(ids) == data
    assert decode_tokens(data + behind, 0) == (ids, len(data))
    for end in range(len(data)):
        with pytest.raises(PostcardError):
            decode_tokens(data[:end], 0)


@pytest.mark.parametrize("behind", [b"", bytes(9), b"\xff" * 9])
@pytest.mark.parametrize("value", [b"\xff\xff\xff\xff\x10", b"\x80\x80\x80\x80\x80\x01", b"\xff\xff\xff\xff\x8f\x00"])
def test_a_value_past_u32_is_refused_wherever_it_stands(value: bytes, behind: bytes) -> None:
    with pytest.raises(PostcardError):
        decode_tokens(b"\x02\x05" + value + behind, 0)


def test_very_many_ids_of_a_span() -> None:
    ids = [value % 200_000 for value in range((1 << 16) + 1)]
    found, end = decode_tokens(encode_tokens(ids), 0)
    assert found == ids
    assert encode_tokens(found)[:end] == encode_tokens(ids)


def test_very_many_ids_in_json() -> None:
    ids = list(range((1 << 16) + 2))
    event = events.Event(0, 1, 2, events.Message(1, "x", packed(ids)))
    told = json.loads(session_api.json_text(event))
    assert told["body"]["Message"]["span"] == ids
    assert from_json(events.Event, told) == event
    assert json.loads(session_api.json_text(session_api.CommittedResponse(event)))["Committed"]["event"] == told

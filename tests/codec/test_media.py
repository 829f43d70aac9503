"""Images and audio in prompts: where their placeholders stand in each dialect, and what is refused."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.conversation import Json
from superfluid.codec.dialects.dialect import NoChatDialect
from superfluid.codec.media import Medium, MissingMarker, StrayMarker, TooManyPlaceholders, place
from superfluid.link.events import Appended, Block, Body, GenerationPrompt, Message, Role
from superfluid.link.linkw import MediaInfo
from tests.codec import template_models
from tests.codec.byte_tokenizer import CHATML_MARKERS, CHATML_SILENT, ByteTokenizer
from tests.codec.test_atem import SPECIALS as ATEM_SPECIALS

IMAGE, AUDIO = {"type": "image_url", "image_url": {}}, {"type": "input_audio", "input_audio": {}}
FRAMES = ("<pic>", "<pic_begin>", "<pic_end>")
FINGERPRINT = 0xABC


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*parts: Json) -> dict[str, Json]:
    return {"role": "user", "content": list(parts)}


def medium(tokenizer: ByteTokenizer, token: str, begin: str = "", end: str = "", n: int = 3, blob: str = "b") -> Medium:
    ids = tokenizer.ids
    return Medium(blob, MediaInfo(n, ids[token], ids.get(begin, 0), ids.get(end, 0), FINGERPRINT))


def spell(codec: Codec, tokens: Sequence[int]) -> str:
    assert isinstance(codec.tokenizer, ByteTokenizer)
    return codec.tokenizer.spell(tokens)


def check_offsets(bodies: Sequence[Body], media: Sequence[Medium]) -> None:
    """Each block names its medium, and where its placeholders are in the stream."""
    stream = [token for body in bodies for token in getattr(body, "span", ())]
    blocks = [body for body in bodies if isinstance(body, Block)]
    for block, one in zip(blocks, media, strict=True):
        payload = json.loads(block.payload)
        assert payload["blob"] == one.blob
        at, token = payload["offset"], one.info.image_token_id
        assert stream[at : at + one.info.n_tokens] == [token] * one.info.n_tokens
        assert stream[at - 1] != token


TEMPLATES: dict[str, tuple[tuple[str, str, str], str]] = {
    "google-gemma-4-31B-it": (
        ("<|image|>", "<|image>", "<image|>"),
        "<|image><|image|><|image|><|image|><image|>",  # the template writes the placeholder alone
    ),
    "Kimi-K2-Instruct": (
        ("<|media_pad|>", "<|media_content|>", "<|media_end|>"),  # it writes all three
        "<|media_start|>image<|media_content|><|media_pad|><|media_pad|><|media_pad|><|media_end|>",
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": (("[IMG]", "", "[IMG_END]"), "[IMG][IMG][IMG][IMG_END]"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates(name: str, templates: Callable[[str], str]) -> None:
    frames, run = TEMPLATES[name]
    tokenizer = template_models.model(name, templates, [frame for frame in frames if frame])
    codec = Codec.open(tokenizer, "template")
    media = [medium(tokenizer, *frames, blob="one"), medium(tokenizer, *frames, blob="two")]
    quoted = f"no {frames[0]} here"
    rendered = codec.render([user(IMAGE, text("what is"), IMAGE, text(f"this? {quoted}"))], media=media)
    spelled = spell(codec, rendered.tokens)
    assert spelled.count(run) == 2 and spelled.count(frames[0]) == 2 * 3 + 1
    assert rendered.tokens.count(tokenizer.ids[frames[0]]) == 2 * 3  # the quoted one is text
    kinds = [type(body) for body in rendered.bodies]
    assert kinds == [Appended, Block, Block, GenerationPrompt]
    assert all(body.span == [] for body in rendered.bodies if isinstance(body, Block))
    check_offsets(rendered.bodies, media)


def test_a_template_that_writes_the_begin_token_alone() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text if p.type == 'text' else '<pic_begin>' }}{% endfor %}"
        "{% endif %};{% endfor %}"
    )
    tokenizer = ByteTokenizer(["<e>", *FRAMES], silent=["<e>"], eos="<e>", templates={None: source})
    codec = Codec.open(tokenizer)
    one = medium(tokenizer, *FRAMES, n=2)
    rendered = codec.render([user(text("<pic>"), IMAGE)], media=[one])
    assert spell(codec, rendered.tokens) == "user: <pic><pic_begin><pic><pic><pic_end>;"
    assert rendered.tokens.count(tokenizer.ids["<pic>"]) == 2  # though the vocabulary has it as an ordinary token
    assert codec.render([{"role": "user", "content": "<pic>"}]).tokens.count(tokenizer.ids["<pic>"]) == 1
    span, first = codec.media_span(Role.USER, one, "a", "b")
    assert (spell(codec, span), span[first]) == ("user: a<pic_begin><pic><pic><pic_end>b;", tokenizer.ids["<pic>"])
    history = [one.block(Role.USER, first, "a", "b", span)]
    assert spell(codec, codec.message_span(Role.USER, "c", history)) == "user: c;"


def test_media_of_two_kinds_stay_in_order(templates: Callable[[str], str]) -> None:
    tokenizer = template_models.model("google-gemma-4-31B-it", templates, ["<|image|>", "<|audio|>"])
    codec = Codec.open(tokenizer, "template")
    media = [medium(tokenizer, "<|audio|>", n=1), medium(tokenizer, "<|image|>", n=2)]
    rendered = codec.render([user(AUDIO, text("and"), IMAGE)], media=media)
    assert "<|audio|>and" in spell(codec, rendered.tokens).replace("\n", "")
    check_offsets(rendered.bodies, media)


@pytest.mark.parametrize(
    ("ids", "refusal"),
    [([7, 5, 8], MissingMarker), ([7], MissingMarker), ([5, 5, 5], StrayMarker)],
)
def test_markers_are_as_many_as_parts(ids: list[int], refusal: type[Exception]) -> None:
    with pytest.raises(refusal, match=r"^protocol: "):
        place(ids, [Medium("b", MediaInfo(2, 5, 0, 0, 0))] * 2)


def test_begin_and_end_are_added_where_they_are_not() -> None:
    one = Medium("b", MediaInfo(2, 5, 6, 7, 0))
    assert place([1, 5, 2], [one]) == ([1, 6, 5, 5, 7, 2], [2])
    assert place([6, 5, 2], [one]) == ([6, 5, 5, 7, 2], [1])
    assert place([6, 5, 7], [one]) == ([6, 5, 5, 7], [1])
    assert place([1, 6, 2], [one]) == ([1, 6, 5, 5, 7, 2], [2])


@pytest.mark.parametrize("count", [0, 4097])
def test_placeholders_that_fit_no_chunk(count: int) -> None:
    with pytest.raises(TooManyPlaceholders, match=f"image expands to {count} placeholders, beyond one prefill chunk"):
        Medium("b", MediaInfo(count, 5, 0, 0, 0))


def turns(codec: Codec, rendered: Sequence[Body]) -> list[tuple[str, str]]:
    return [(type(body).__name__, spell(codec, getattr(body, "span", ()))) for body in rendered]


@pytest.mark.parametrize("dialect", ["chatml", "atem"])
def test_message_by_message_a_medium_is_a_turn(dialect: str) -> None:
    chatml = dialect == "chatml"
    tokenizer = ByteTokenizer(
        [*(CHATML_MARKERS if chatml else ATEM_SPECIALS), "\n", *FRAMES],
        silent=CHATML_SILENT if chatml else ATEM_SPECIALS, bos=None if chatml else "<s>", auto_bos=not chatml,
        eos="<|im_end|>",
    )  # fmt: skip
    codec = Codec.open(tokenizer, dialect)
    media = [medium(tokenizer, *FRAMES, n=1), medium(tokenizer, *FRAMES, n=2)]
    messages = [
        {"role": "system", "content": "S"},
        user(text("a "), text("b"), IMAGE, IMAGE, text("<pic>")),
        {"role": "user", "content": "c"},
    ]
    bodies = codec.render(messages, media=media).bodies
    start, end = ("<|im_start|>user\n", "<|im_end|>\n") if chatml else ("<|start|>user<|message|>", "<|eot|>")
    first, second = "<pic_begin><pic><pic_end>", "<pic_begin><pic><pic><pic_end>"
    shown = turns(codec, bodies)
    assert shown[1:-1] == [
        ("Block", f"{start}a b{first}{end}"),
        ("Block", f"{start}{second}<pic>{end}"),
        ("Message", f"{start}c{end}"),
    ]
    assert isinstance(bodies[0], Message) and bodies[0].role == Role.SYSTEM
    check_offsets(bodies, media)
    block = bodies[2]
    assert isinstance(block, Block) and (block.role, block.kind, block.visibility_version) == (Role.USER, 7, 2)
    offset = block.payload.partition('"offset":')[2].partition(",")[0]
    expected = (
        f'{{"blob":"b","n_tokens":2,"image_token_id":{tokenizer.ids["<pic>"]},"offset":{offset},"pre_text":"",'
        '"post_text":"<pic>","media_identity":{"preprocessing_fp":"0000000000000abc",'
        '"encoder":"bundle-weights-identity"}}'
    )
    assert block.payload == expected
    span, at = codec.media_span(Role.USER, media[1], "x", "<pic>")
    assert (spell(codec, span), span[at]) == (f"{start}x{second}<pic>{end}", tokenizer.ids["<pic>"])
    assert span.count(tokenizer.ids["<pic>"]) == 2


def test_without_a_chat_dialect() -> None:
    codec = Codec.open(ByteTokenizer(FRAMES), "raw")
    one = medium(ByteTokenizer(FRAMES), *FRAMES)
    with pytest.raises(NoChatDialect):
        codec.media_span(Role.USER, one)


@pytest.mark.parametrize("count", [0, 2])
def test_as_many_media_as_parts(count: int) -> None:
    tokenizer = ByteTokenizer([*CHATML_MARKERS, "\n", *FRAMES], silent=CHATML_SILENT, eos="<|im_end|>")
    media: list[Any] = [medium(tokenizer, *FRAMES)] * count
    with pytest.raises(ValueError, match="media than were probed"):
        Codec.open(tokenizer, "chatml").render([user(IMAGE)], media=media)

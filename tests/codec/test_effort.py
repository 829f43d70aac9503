from superfluid.codec.codec import Codec
from superfluid.codec.effort import SHAPES, Effort, Shape
from superfluid.codec.template import ChatTemplate
from tests.codec.byte_tokenizer import ByteTokenizer

BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
REQUEST = Shape(True, False, False, None)


def test_a_template_without_effort_has_no_ladders() -> None:
    effort = Effort.learn(ChatTemplate(BODY))
    assert effort == Effort() and effort.identity == "" and effort.levels == []
    assert effort.native("high", REQUEST) == "high"


def test_levels_that_render_alike_go_by_the_name_they_spell() -> None:
    source = (
        "{% set e = reasoning_effort | default('low') %}"
        "{% if e in ('high', 'xhigh', 'max') %}Effort: High.{% elif e == 'none' %}No effort.{% else %}low {% endif %}"
    )
    effort = Effort.learn(ChatTemplate(source + BODY))
    assert effort.levels == ["none", "low", "high"]
    assert effort.identity == "/effort1:none,low,high"
    assert effort.native(" MAX ", REQUEST) == "high"
    assert effort.native("medium", REQUEST) == "high"  # ties go up
    assert effort.native("minimal", REQUEST) == "low"
    assert effort.native("turbo", REQUEST) == "turbo"
    assert effort.native(3, REQUEST) == 3


def test_refused_levels_and_unavailable_shapes() -> None:
    only = (
        "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}"
        "{{ raise_exception('no') }}{% endif %}"
    )
    effort = Effort.learn(ChatTemplate(only + BODY))
    assert effort.levels == ["low", "high"]
    tools = "{% if reasoning_effort is defined and tools %}{{ raise_exception('no') }}{% endif %}{{ reasoning_effort }}"
    effort = Effort.learn(ChatTemplate(tools + BODY))
    assert effort.levels == [] and None in effort.ladders and len(effort.ladders) == len(SHAPES) == 24
    assert effort.identity == "/effort1:none,minimal,low,medium,high,xhigh,max|!"


def test_a_request_is_rendered_with_the_native_level() -> None:
    source = (
        "{% if reasoning_effort is defined %}{{ {'low': 'low', 'high': 'high'}[reasoning_effort] ~ '!' }}{% endif %}"
        + BODY
    )
    source = source.replace(
        "[reasoning_effort]", "[reasoning_effort] if reasoning_effort in ('low', 'high') else raise_exception('no')"
    )
    tokenizer = ByteTokenizer(["</s>"], eos="</s>", templates={None: source})
    codec = Codec.open(tokenizer)
    shown = codec.render([{"role": "user", "content": "x"}], None, {"reasoning_effort": "max"})
    assert tokenizer.spell(shown.tokens).startswith("high")

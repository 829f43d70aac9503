"""Options: what each kind takes, and the words for what it does not."""

import pytest
from hypothesis import given, strategies as st

from superfluid.engines.kit.options import Option, OptionError

THREADS = Option("threads", "int", "0", "threads", least=0, most=512)
LAYERS = Option("layers", "int", "-1", "layers", least=-1)
FREE = Option("free", "int", "0", "any")
SCALE = Option("scale", "float", "0", "scale", least=0.0)
REPACK = Option("repack", "on-off", "on", "repack")
SPLIT = Option("split", "choice", "a", "split", ("a", "b"))
LABEL = Option("label", "text", "", "label")


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        (THREADS, "0", 0),
        (THREADS, "512", 512),
        (LAYERS, "-1", -1),
        (FREE, str(-(2**63)), -(2**63)),
        (SCALE, "1e-3", 0.001),
        (SCALE, "0", 0.0),
        (REPACK, "on", True),
        (REPACK, "off", False),
        (SPLIT, "b", "b"),
        (LABEL, " x", " x"),
    ],
)
def test_takes(option: Option, text: str, value: object) -> None:
    assert option.parse(text) == value
    assert type(option.parse(text)) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        (THREADS, "x", 'an integer expected, got "x"'),
        (THREADS, "", 'an integer expected, got ""'),
        (THREADS, "1_0", 'an integer expected, got "1_0"'),
        (THREADS, "900", "0 to 512 expected, got 900"),
        (THREADS, "-1", "0 to 512 expected, got -1"),
        (LAYERS, "-2", "at least -1 expected, got -2"),
        (FREE, str(2**63), f'an integer expected, got "{2**63}"'),
        (SCALE, "nan", 'a number expected, got "nan"'),
        (SCALE, "inf", 'a number expected, got "inf"'),
        (SCALE, "1_0", 'a number expected, got "1_0"'),
        (REPACK, "true", 'on or off expected, got "true"'),
        (SPLIT, "c", 'one of a, b expected, got "c"'),
        (LABEL, "", "a value expected"),
    ],
)
def test_refuses(option: Option, text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        option.parse(text)
    assert str(caught.value) == message


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_64_bit_integer_reads_back(value: int) -> None:
    assert FREE.parse(str(value)) == value


@pytest.mark.parametrize("option", [THREADS, LAYERS, FREE, SCALE, REPACK, SPLIT, LABEL])
def test_a_declaration_reads_back(option: Option) -> None:
    assert Option.from_report(option.report()) == option

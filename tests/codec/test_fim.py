"""Fill-in-the-middle: families by their markers, and prompts."""

import pytest

from superfluid.codec.codec import Codec
from superfluid.codec.fim import FAMILIES, Fim, FimMode
from superfluid.codec.framing import Encoder
from tests.codec.byte_tokenizer import ByteTokenizer


def fim(*specials: str, **kwargs: object) -> tuple[Fim, ByteTokenizer]:
    tokenizer = ByteTokenizer(specials, **kwargs)  # type: ignore[arg-type]
    found = Fim.discover(Encoder(tokenizer))
    assert found is not None
    return found, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_both_orders(family: str) -> None:
    made, tokenizer = fim(*FAMILIES[family])
    pre, suf, mid = FAMILIES[family]
    assert made.family == family
    assert tokenizer.spell(made.prompt("a", "b")) == f"{pre}a{suf}b{mid}"
    spm = f"{pre}a{suf}b{mid}" if family == "deepseek" else f"{pre}{suf}b{mid}a"
    assert tokenizer.spell(made.prompt("a", "b", FimMode.SPM)) == spm
    assert made.prompt("a", "b", 7) == made.prompt("a", "b")
    assert len(made.prompt("", "")) == 3


def test_the_first_whole_family_is_taken() -> None:
    made, _ = fim("<|fim_prefix|>", "<|fim_suffix|>", *FAMILIES["starcoder"], *FAMILIES["deepseek"])
    assert made.family == "starcoder"
    assert Fim.discover(Encoder(ByteTokenizer(["<|fim_prefix|>", "<|fim_suffix|>"]))) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("silent", [True, False])
def test_client_text_forms_no_marker(family: str, silent: bool) -> None:
    """Some vocabularies hold the markers as ordinary added tokens, which a template's markers would not include."""
    markers = list(FAMILIES[family])
    made, tokenizer = fim(*markers, silent=markers if silent else [])
    quoted = "x".join(markers)
    for mode in FimMode:
        ids = made.prompt(quoted, quoted, mode)
        assert [token for token in ids if token > 255] == [tokenizer.ids[m] for m in markers]
        assert tokenizer.spell(ids).count(quoted) == 2


def test_bos_by_the_familys_policy() -> None:
    made, tokenizer = fim("<s>", *FAMILIES["codellama"], bos="<s>", auto_bos=True)
    assert tokenizer.spell(made.prompt("a", "b")) == "<s>\u2581<PRE>a\u2581<SUF>b\u2581<MID>"
    quiet, tokenizer = fim("<s>", *FAMILIES["qwen"], bos="<s>")
    assert tokenizer.spell(quiet.prompt("a", "b"))[:3] == "<|f"


def test_the_codec_offers_it() -> None:
    assert Codec.open(ByteTokenizer()).fim is None
    found = Codec.open(ByteTokenizer(list(FAMILIES["qwen"]))).fim
    assert found is not None and found.family == "qwen"

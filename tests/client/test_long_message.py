"""A message of many tokens is told the same on every way."""

from collections.abc import Callable

import pytest

from superfluid.client import WebClient
from tests.api.web.conftest import sites  # noqa: F401  (a fixture)
from tests.api.web.serving import Site


@pytest.fixture
def site(sites: Callable[[str], Site]) -> Site:  # noqa: F811
    return sites("loop")


def test_a_long_message_is_the_same_in_the_answer_the_log_and_the_stream(site: Site) -> None:
    with site.server.blocking_client() as client, WebClient(site.url, site.token_file) as web:
        session = client.session()
        session.user("first")
        text = "some words " * 20_000
        event = session.user(text)
        assert len(event.body.span) > 1 << 16  # type: ignore[union-attr]
        assert session.events()[-1] == event == web.get(session.id).events()[-1]
        tokens = [token for one in session.events() for token in getattr(one.body, "span", ())]
        assert session.inspect().tokens == tokens

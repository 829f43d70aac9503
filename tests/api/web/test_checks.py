"""Who is answered over the web, check by check in the order of the table, and the token's file."""

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from superfluid.api.web.checks import Checks, WebRefusal, mint_token
from tests.api.web.serving import HOST, ORIGIN, Site, WebSocket, mode

TOKEN = "a1" * 32
BEARER = ("Authorization", f"Bearer {TOKEN}")
CSRF = ("X-Superfluid-CSRF", TOKEN)
PAGE = ("Origin", ORIGIN)
PROTOCOL = "Sec-WebSocket-Protocol"
V1 = (PROTOCOL, "superfluid.v1")


def raw(*headers: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([BEARER, CSRF], None),
        ([BEARER, BEARER, CSRF, CSRF], None),
        ([BEARER, CSRF, PAGE], None),
        ([], 401),
        ([CSRF], 401),
        ([("Authorization", f"bearer {TOKEN}"), CSRF], 401),
        ([("Authorization", TOKEN), CSRF], 401),
        ([("Authorization", f"Bearer {TOKEN} "), CSRF], 401),
        ([("Authorization", f"Bearer {TOKEN.upper()}"), CSRF], 401),
        ([("Authorization", "Bearer "), CSRF], 401),
        ([BEARER, ("Authorization", "Bearer no"), CSRF], 401),
        ([BEARER, ("Authorization", "Basic eA=="), CSRF], 401),
        ([("Authorization", "Bearer no"), ("Origin", "http://evil"), CSRF], 401),  # the first failure answers
        ([BEARER, ("Origin", "http://evil"), CSRF], 403),
        ([BEARER, PAGE, ("Origin", "http://evil"), CSRF], 403),
        ([BEARER, ("Origin", ORIGIN + "/"), CSRF], 403),
        ([BEARER, ("Origin", ORIGIN.upper()), CSRF], 403),
        ([BEARER, ("Origin", ""), CSRF], 403),
        ([BEARER], 403),
        ([BEARER, PAGE], 403),
        ([BEARER, ("X-Superfluid-CSRF", "no")], 403),
        ([BEARER, CSRF, ("X-Superfluid-CSRF", "no")], 403),
    ],
)
def test_requests(headers: list[tuple[str, str]], status: int | None) -> None:
    if status is None:
        Checks(TOKEN, [ORIGIN]).request(raw(*headers))
    else:
        with pytest.raises(WebRefusal) as refused:
            Checks(TOKEN, [ORIGIN]).request(raw(*headers))
        assert refused.value.status == status
        assert TOKEN not in refused.value.message


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([BEARER, PAGE], None),
        ([BEARER, PAGE, V1], "superfluid.v1"),
        ([PAGE, (PROTOCOL, f"superfluid.v1, superfluid.token.{TOKEN}")], "superfluid.v1"),
        ([PAGE, (PROTOCOL, f"superfluid.token.{TOKEN},superfluid.v1")], "superfluid.v1"),
        ([PAGE, V1, (PROTOCOL, f"superfluid.token.{TOKEN}")], "superfluid.v1"),
        ([BEARER, PAGE, (PROTOCOL, f"superfluid.v1, superfluid.token.{TOKEN}")], "superfluid.v1"),
        ([PAGE, V1], 401),
        ([PAGE, (PROTOCOL, "superfluid.v1, superfluid.token.no")], 401),
        ([PAGE, (PROTOCOL, f"superfluid.v1, superfluid.token.{TOKEN}, superfluid.token.no")], 401),
        ([BEARER, PAGE, (PROTOCOL, "superfluid.v1, superfluid.token.no")], 401),
        ([("Authorization", "Bearer no"), PAGE, (PROTOCOL, f"superfluid.v1, superfluid.token.{TOKEN}")], 401),
        ([BEARER, V1], 403),
        ([BEARER, V1, ("Origin", "null")], 403),
        ([BEARER, V1, PAGE, ("Origin", "http://evil")], 403),
        ([BEARER, ("Origin", "http://evil"), (PROTOCOL, "other")], 403),
        ([BEARER, PAGE, (PROTOCOL, "other")], 400),
        ([PAGE, (PROTOCOL, f"superfluid.token.{TOKEN}")], 400),
        ([BEARER, PAGE, (PROTOCOL, "Superfluid.v1")], 400),
    ],
)
def test_handshakes(headers: list[tuple[str, str]], wanted: str | int | None) -> None:
    checks = Checks(TOKEN, [ORIGIN])
    if isinstance(wanted, int):
        with pytest.raises(WebRefusal) as refused:
            checks.handshake(raw(*headers))
        assert refused.value.status == wanted
    else:
        assert checks.handshake(raw(*headers)) == wanted


def test_a_token_is_new_each_time_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "web-token"
    path.write_text("an older one, which all may read")
    path.chmod(0o644)
    with path.open() as held:
        first = mint_token(path)
        assert first not in held.read()
    assert mode(path) == 0o600
    assert path.read_text() == first
    assert len(first) == 64
    assert set(first) <= set("0123456789abcdef")
    assert mint_token(path) != first
    assert [entry.name for entry in tmp_path.iterdir()] == ["web-token"]


# ---- over the wire


def test_the_token_file_of_a_server(site: Site) -> None:
    assert mode(site.token_file) == 0o600
    assert len(site.token) == 64


def test_health_needs_no_token(site: Site) -> None:
    assert site.get("/web/health").status == 200


@pytest.mark.parametrize("path", ["/web/rpc", "/web/stream"])
def test_each_check_has_its_status(site: Site, path: str) -> None:
    good = site.headers
    without = {name: {key: value for key, value in good.items() if key != name} for name in good}
    for headers, status in (
        (without["Authorization"], 401),
        (good | {"Origin": "http://evil"}, 403),
        (without["X-Superfluid-CSRF"], 403),
        (good | {"Content-Type": "text/plain"}, 415),
    ):
        reply = site.post(path, "List", headers)
        assert reply.status == status
        assert list(reply.json) == ["Err"]
        assert reply.json["Err"]["message"]
    assert site.post(path, b"{", good).status == 400
    assert site.post(path, b"", good).status == 400
    assert site.post(path, {"Nothing": {}}, good).status == 422


@pytest.mark.parametrize(
    "body",
    [
        {"Create": {}},
        {"Read": {"session": -1, "cursor": 0}},
        {"Read": {"session": 1 << 64, "cursor": 0}},
        {"Read": {"session": 1.5, "cursor": 0}},
        {"Read": {"session": True, "cursor": 0}},
        {"List": {}, "Tree": {}},
        [],
        7,
        None,
    ],
)
def test_json_that_is_no_request(site: Site, body: Any) -> None:
    assert site.post("/web/rpc", body).status == 422


@pytest.mark.parametrize(
    "body",
    [
        {"session": 1},
        {"max_tokens": 1},
        {"session": 1, "max_tokens": 1 << 32},
        {"session": 1, "max_tokens": 1, "provisional": 1},
        {"session": "1", "max_tokens": 1},
        [],
    ],
)
def test_json_that_is_no_stream_request(site: Site, body: Any) -> None:
    assert site.post("/web/stream", body).status == 422


@pytest.mark.parametrize("body", ["List", {"List": None}])
def test_forms_of_a_request_without_fields(site: Site, body: Any) -> None:
    assert "Sessions" in site.rpc(body)


def test_a_page_of_a_listed_origin_is_answered_without_cors(site: Site) -> None:
    reply = site.post("/web/rpc", "List", site.headers | {"Origin": ORIGIN})
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_credentials_are_checked_before_the_body_is_read(site: Site) -> None:
    """A client that announces a body and sends none of it gets its 401, and a body that is too large a 413."""
    for headers, status in (({}, 401), (site.headers, 413)):
        connection = http.client.HTTPConnection(HOST, site.port, timeout=60)
        connection.putrequest("POST", "/web/rpc")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str((64 << 20) + 1))
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


def test_other_routes_and_methods(site: Site) -> None:
    assert site.post("/web/other", "List").status == 404
    assert site.post("/web/other", "List", {}).status == 401
    asked = http.client.HTTPConnection(HOST, site.port, timeout=60)
    asked.request("GET", "/web/rpc", headers=site.headers)
    assert asked.getresponse().status == 405
    asked.close()


# ---- handshakes over the wire


def handshake(site: Site, *headers: tuple[str, str], protocols: list[str] | None = None) -> WebSocket:
    return site.websocket(raw(*headers), protocols or [])


def test_a_handshake_echoes_only_the_version(site: Site) -> None:
    token = f"superfluid.token.{site.token}"
    for protocols in (["superfluid.v1", token], [token, "superfluid.v1"]):
        socket = handshake(site, PAGE, protocols=protocols)
        assert socket.refused is None
        assert socket.protocol == "superfluid.v1"
        assert "Sessions" in socket.ask("List")
        socket.close()


def test_a_handshake_without_a_subprotocol(site: Site) -> None:
    socket = handshake(site, ("Authorization", f"Bearer {site.token}"), PAGE)
    assert socket.protocol is None
    assert "Sessions" in socket.ask("List")


def test_a_handshake_whose_subprotocols_come_in_two_headers(site: Site) -> None:
    socket = handshake(site, PAGE, (PROTOCOL, f"superfluid.token.{site.token}"), protocols=["superfluid.v1"])
    assert socket.refused is None, socket.refusal
    assert socket.protocol == "superfluid.v1"


def test_refused_handshakes(site: Site) -> None:
    bearer = ("Authorization", f"Bearer {site.token}")
    for headers, protocols, status in (
        ([PAGE], ["superfluid.v1"], 401),
        ([PAGE], ["superfluid.v1", "superfluid.token.no"], 401),
        ([bearer], ["superfluid.v1"], 403),
        ([bearer, ("Origin", "http://evil")], ["superfluid.v1"], 403),
        ([bearer, PAGE], ["other"], 400),
    ):
        socket = handshake(site, *headers, protocols=protocols)
        assert socket.refused == status
        assert json.loads(socket.refusal)["Err"]["message"]

import asyncio
from typing import Any

import pytest

from vitals_dashboard.auth import HEALTH_PATH, Gate, cookie_name, cookie_value

TOKEN = "door-token-0123456789abcdef"
PORT = 8501
GOOD_COOKIE = f"{cookie_name(PORT)}={cookie_value(TOKEN)}"


class Inside:
    """The app behind the door; counts who came in."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.entered.append(scope["path"])


def knock(path: str = "/", *, query: str = "", cookie: str = "", kind: str = "http"):
    """Return who came in, and what the door answered."""
    inside, sent = Inside(), []
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "server": ("127.0.0.1", PORT),
        "headers": [(b"cookie", cookie.encode())] if cookie else [],
    }

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(Gate(inside, door_token=TOKEN)(scope, None, send))
    return inside.entered, sent


@pytest.mark.parametrize(
    "path", ["/", "/run", "/static/js/index.js", "/media/x.png", "/_stcore/host-config"]
)
def test_nothing_is_served_without_the_token(path):
    entered, sent = knock(path)
    assert [] == entered
    assert 401 == sent[0]["status"]
    assert b"vitals dashboard" in sent[1]["body"]


def test_the_page_for_strangers_holds_no_secret():
    _, sent = knock()
    assert TOKEN.encode() not in sent[1]["body"]
    assert cookie_value(TOKEN).encode() not in sent[1]["body"]


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        '=;;=,"',
        GOOD_COOKIE + "x",
        f"{cookie_name(PORT)}=",
        f"{cookie_name(PORT)}=\xff",
        f"{cookie_name(PORT)}={TOKEN}",
        f"{cookie_name(PORT + 1)}={cookie_value(TOKEN)}",
    ],
)
def test_a_websocket_with_a_wrong_cookie_is_closed(cookie):
    entered, sent = knock("/_stcore/stream", cookie=cookie, kind="websocket")
    assert [] == entered
    assert "websocket.close" == sent[0]["type"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_cookie_opens_the_door(kind):
    assert (["/run"], []) == knock("/run", cookie=f"a=b; {GOOD_COOKIE}", kind=kind)


@pytest.mark.parametrize(
    "foreign", ['prefs={"theme":"dark","n":1}', "user=Ada Lovelace", "a/b=1", "x"]
)
def test_what_other_programs_keep_beside_the_cookie_does_not_lock_out(foreign):
    for cookies in (f"{foreign}; {GOOD_COOKIE}", f"{GOOD_COOKIE};{foreign}"):
        assert (["/run"], []) == knock("/run", cookie=cookies)
    assert [] == knock("/run", cookie=foreign)[0]


def test_the_token_is_taken_out_of_the_address_and_becomes_a_cookie():
    entered, sent = knock("/run", query=f"run=01K&token={TOKEN}&log=true")
    headers = dict(sent[0]["headers"])
    assert [] == entered
    assert 303 == sent[0]["status"]
    assert b"/run?run=01K&log=true" == headers[b"location"]
    cookie = headers[b"set-cookie"].decode()
    assert cookie.startswith(GOOD_COOKIE + ";")
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert b"no-referrer" == headers[b"referrer-policy"]


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "/\\/evil.example"])
def test_the_way_in_never_leads_elsewhere(path):
    _, sent = knock(path, query=f"token={TOKEN}")
    location = dict(sent[0]["headers"])[b"location"].decode()
    assert location.startswith("/evil.example")


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "\u00fc"])
def test_a_wrong_token_in_the_address_opens_nothing(token):
    entered, sent = knock(query=f"token={token}")
    assert ([], 401) == (entered, sent[0]["status"])


def test_a_websocket_cannot_enter_with_the_token_in_its_address():
    entered, _ = knock("/_stcore/stream", query=f"token={TOKEN}", kind="websocket")
    assert [] == entered


def test_only_the_health_check_is_open_and_only_over_http():
    assert [HEALTH_PATH] == knock(HEALTH_PATH)[0]
    assert [] == knock(HEALTH_PATH, kind="websocket")[0]


def test_a_door_without_a_token_is_not_built():
    with pytest.raises(ValueError, match="too short"):
        Gate(Inside(), door_token="")

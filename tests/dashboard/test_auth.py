"""The door, asked as browsers and strangers ask; and the sessions behind it, along a clock."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vitals_dashboard import auth
from vitals_dashboard.auth import (
    CODE_LETTERS,
    CODE_PAUSE_SECONDS,
    CODE_SECONDS,
    CODE_TRIES,
    CONTROL_SECONDS,
    HEALTH_PATH,
    IDLE_SECONDS,
    MAX_SESSIONS,
    SESSION_SECONDS,
    BrowserSession,
    BrowserSessions,
    DashboardHosts,
    TokenMiddleware,
    proof,
)

TOKEN = "door-token-0123456789abcdef"
OWN = "0123456789abcdef0123456789abcdef.localhost"
PUBLIC = "vitals.example"
HOST = f"{OWN}:8501"
DOORS = DashboardHosts(token=TOKEN, own_host=OWN, public_url=f"https://{PUBLIC}")
STREAMLIT = "<html><script>\n inline()\n</script><script src=x></script></html>"


class Inside:
    """The app behind the door; counts who came in, and answers as Streamlit does."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.entered.append(scope["path"])
        if scope["type"] == "http":
            own = [(b"x-frame-options", b"ALLOW"), (b"set-cookie", b"_streamlit_xsrf=1; Path=/")]
            await send({"type": "http.response.start", "status": 200, "headers": own})
            await send({"type": "http.response.body", "body": b""})
        else:
            self.messages = [await receive() for _ in range(2)]


class House:
    """A door with its sessions; ``knock`` returns who came in, and what the door answered."""

    def __init__(self, doors: DashboardHosts = DOORS, **options: Any) -> None:
        self.doors, self.sessions, self.inside = doors, BrowserSessions(), Inside()
        self.gate = TokenMiddleware(
            self.inside, doors=doors, sessions=self.sessions, page=STREAMLIT, **options
        )

    def cookie(self, host: str = OWN) -> str:
        return f"{self.doors.cookie_name(host)}={self.sessions.open(host).key}"

    def knock(
        self,
        path: str = "/",
        *,
        query: str = "",
        kind: str = "http",
        method: str = "GET",
        receive: Any = None,
        **headers: str,
    ) -> tuple[list[str], list[dict[str, Any]]]:
        sent: list[dict[str, Any]] = []
        given = {"host": HOST} | {k.replace("_", "-"): v for k, v in headers.items()}
        if kind == "websocket":
            given.setdefault("origin", f"http://{given['host']}")
        scope = {
            "type": kind,
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
        }
        scope |= {"method": method} if kind == "http" else {}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def nothing() -> dict[str, Any]:
            return {"type": "websocket.receive", "bytes": b"x"}

        asyncio.run(self.gate(scope, receive or nothing, send))
        return self.inside.entered, sent


def knock(path: str = "/", **how: Any) -> tuple[list[str], list[dict[str, Any]]]:
    return House().knock(path, **how)


def headers_of(sent: list[dict[str, Any]]) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in sent[0]["headers"]}


# ----------------------------------------------------------------------------------------- the door


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
    assert OWN.encode() not in sent[1]["body"]


@pytest.mark.parametrize("change", ["", '=;;=,"', "{}x", "x{}", "{0}\xff"])
def test_a_websocket_with_a_wrong_cookie_is_closed(change):
    house = House()
    name, _, key = house.cookie().partition("=")
    wrong = change.format(key) if "{" in change else change
    entered, sent = house.knock("/_stcore/stream", cookie=f"{name}={wrong}", kind="websocket")
    assert [] == entered
    assert "websocket.close" == sent[0]["type"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_cookie_opens_the_door(kind):
    house = House()
    assert ["/run"] == house.knock("/run", cookie=f"a=b; {house.cookie()}", kind=kind)[0]


@pytest.mark.parametrize(
    "foreign", ['prefs={"theme":"dark","n":1}', "user=Ada Lovelace", "a/b=1", "x"]
)
def test_what_other_programs_keep_beside_the_cookie_does_not_lock_out(foreign):
    for form in (f"{foreign}; {{}}", f"{{}};{foreign}"):
        house = House()
        cookies = form.replace("{}", house.cookie())
        assert ["/run"] == house.knock("/run", cookie=cookies)[0]
    assert [] == knock("/run", cookie=foreign)[0]


def test_the_cookie_of_one_name_opens_no_other():
    """A session of ``localhost``, whose cookie other ports see, never becomes one of our name."""
    house = House()
    key = house.cookie("localhost").partition("=")[2]
    stolen = f"{house.doors.cookie_name(OWN)}={key}"
    assert [] == house.knock("/run", cookie=stolen)[0]
    assert ["/run"] == house.knock("/run", cookie=stolen, host="localhost:8501")[0]


def test_the_token_is_taken_out_of_the_address_and_becomes_a_cookie():
    house = House()
    entered, sent = house.knock("/run", query=f"run=01K&token={TOKEN}&log=true")
    answer = headers_of(sent)
    assert ([], 303) == (entered, sent[0]["status"])
    assert "./run?run=01K&log=true" == answer["location"]
    name, _, key = answer["set-cookie"].partition(";")[0].partition("=")
    assert house.doors.cookie_name(OWN) == name
    assert house.sessions.find(key, OWN) is not None and TOKEN not in key
    assert f"{name}={key}; Path=/; HttpOnly; SameSite=Strict" == answer["set-cookie"]


def test_who_opens_the_address_again_keeps_the_session():
    house = House()
    cookie = house.cookie()
    _, sent = house.knock(query=f"token={TOKEN}", cookie=cookie)
    assert headers_of(sent)["set-cookie"].startswith(f"{cookie};")
    _, sent = house.knock(query=f"token={TOKEN}", cookie=f"{cookie}x")
    assert not headers_of(sent)["set-cookie"].startswith(f"{cookie}")


def test_behind_tls_the_cookie_is_the_hosts_own_and_streamlits_are_secure_too():
    house = House()
    _, sent = house.knock(query=f"token={TOKEN}", host=PUBLIC)
    cookie = headers_of(sent)["set-cookie"]
    assert cookie.startswith("__Host-vitals-") and cookie.endswith("; Secure")
    _, sent = house.knock(host=PUBLIC, cookie=cookie.partition(";")[0])
    assert "_streamlit_xsrf=1; Path=/; Secure" == headers_of(sent)["set-cookie"]


def test_where_a_provider_lets_people_in_the_token_does_not():
    doors = DashboardHosts(token=TOKEN, own_host=OWN, public_url=f"https://{PUBLIC}", signs_on=True)
    for host, answer in ((PUBLIC, 200), (OWN, 303)):
        _, sent = House(doors).knock(query=f"token={TOKEN}", host=host)
        assert answer == sent[0]["status"]
    assert ["/x"] == House(doors).knock("/x", host=PUBLIC)[0], "the pages ask who it is"
    assert [] == House(doors).knock("/x", host="localhost")[0]


def test_under_a_path_the_cookie_keeps_to_it_and_the_session_can_only_look():
    doors = DashboardHosts(
        token=TOKEN, own_host=OWN, public_url="https://hub.example/user/ada/proxy/1"
    )
    cookie = doors.cookie("hub.example", "key")
    assert cookie.startswith("__Secure-vitals-") and "; Path=/user/ada/proxy/1/;" in cookie
    assert not doors.may_control("hub.example")


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "/\\/evil.example", "//"])
def test_the_way_in_never_leads_elsewhere(path):
    _, sent = knock(path, query=f"token={TOKEN}")
    location = headers_of(sent)["location"]
    assert location.startswith("./") and "\\" not in location and "//" not in location


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


def test_the_health_check_proves_that_it_knows_the_token():
    _, sent = knock(HEALTH_PATH, vitals_nonce="n1")
    assert proof(TOKEN, "n1") == headers_of(sent)["vitals-proof"]
    assert proof(TOKEN, "n1") != proof(TOKEN + "x", "n1")


def test_no_proof_tells_strangers_the_name_of_the_cookie_that_they_would_set():
    name = DOORS.cookie_name("localhost").removeprefix("vitals-")
    for nonce in ("cookie", ""):
        assert not proof(TOKEN, nonce).startswith(name)


def test_a_door_without_a_token_is_not_built():
    with pytest.raises(ValueError, match="too short"):
        DashboardHosts(token="", own_host=OWN)


def test_the_page_that_opened_the_browser_is_deleted_with_its_use(tmp_path: Path):
    page = tmp_path / "open.html"
    page.touch()
    house = House(redirect_file=page)
    house.knock(query="token=wrong")
    assert page.exists()
    house.knock(query=f"token={TOKEN}")
    assert not page.exists()


def test_who_follows_a_link_of_another_site_is_asked_to_ask_again():
    """A browser keeps a Strict cookie back then; the page asks by itself, so it is sent."""
    asked = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    _, sent = knock("/run", **asked)
    assert 200 == sent[0]["status"] and b'http-equiv="refresh" content="0"' in sent[1]["body"]
    _, sent = knock("/run", **asked | {"sec_fetch_site": "same-origin"})
    assert 401 == sent[0]["status"], "once only"


# ---------------------------------------------------------------------------------- host and origin


@pytest.mark.parametrize("host", [HOST, OWN.upper(), "localhost", "127.0.0.1:9", PUBLIC, OWN + "."])
def test_the_names_that_are_ours_are_answered(host):
    assert 401 == knock(host=host)[1][0]["status"]


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "x.localhost", f"a.{OWN}", f"{OWN}.evil.example", "0.0.0.0", "[::"],
)
def test_a_page_that_rebinds_its_name_to_this_host_gets_nothing(host):
    house = House()
    cookie = house.cookie()
    for kind in ("http", "websocket"):
        entered, sent = house.knock("/run", kind=kind, host=host, cookie=cookie)
        assert [] == entered
        assert (400 if kind == "http" else None) == sent[0].get("status")


WRONG_ORIGINS = [
    "",
    "null",
    "http://evil.example",
    f"http://{OWN}:9999",
    f"http://{OWN}",
    "http://localhost:8501",
    f"file://{HOST}",
    f"http://{HOST}.evil.example",
]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("origin", WRONG_ORIGINS)
def test_a_page_of_another_origin_gets_nothing_even_with_the_cookie(origin, kind):
    house = House()
    how = {"method": "POST"} if kind == "http" else {}
    entered, sent = house.knock("/x", kind=kind, cookie=house.cookie(), origin=origin, **how)
    assert [] == entered
    assert (403 if kind == "http" else None) == sent[0].get("status")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_what_changes_something_needs_our_own_origin(method):
    house = House()
    cookie = house.cookie()
    assert [] == house.knock("/x", method=method, cookie=cookie)[0]
    assert ["/x"] == house.knock("/x", method=method, cookie=cookie, origin=f"http://{HOST}")[0]


def test_behind_a_proxy_with_tls_the_origin_is_the_public_one():
    house = House()
    how = {"kind": "websocket", "host": PUBLIC, "cookie": house.cookie(PUBLIC)}
    assert [] == house.knock("/x", **how, origin=f"https://{PUBLIC}:444")[0]
    assert ["/x"] == house.knock("/x", **how, origin=f"https://{PUBLIC}")[0]


# ------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize(
    "how", [{}, {"host": "evil.example"}, {"query": f"token={TOKEN}"}, {"path": HEALTH_PATH}]
)
def test_every_answer_forbids_frames_other_hosts_and_guessed_types(how):
    _, sent = knock(how.get("path", "/run"), **{k: v for k, v in how.items() if k != "path"})
    answer = headers_of(sent)
    assert ("DENY", "nosniff", "no-referrer", "same-origin") == tuple(
        answer[name]
        for name in (
            "x-frame-options",
            "x-content-type-options",
            "referrer-policy",
            "cross-origin-resource-policy",
        )
    )
    assert 1 == [name for name, _ in sent[0]["headers"]].count(b"x-frame-options")
    policy = answer["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "object-src 'none'" in policy


def test_only_the_inline_script_of_streamlits_page_may_run():
    policy = auth.security_headers(STREAMLIT)["content-security-policy"]
    (script,) = [part for part in policy.split("; ") if part.startswith("script-src")]
    # printf '\n inline()\n' | openssl dgst -sha256 -binary | base64
    assert "script-src 'self' 'sha256-5xO49E38JoscZkJBpo32TWxbRPoYnLQwmSO+mxqaNTE='" == script


# ----------------------------------------------------------------------------------------- sessions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shown() -> list[str]:
    """The codes that the terminal has shown."""
    return []


@pytest.fixture
def sessions(clock: Clock, shown: list[str]) -> BrowserSessions:
    return BrowserSessions(shown.append, now=clock)


@pytest.fixture
def session(sessions: BrowserSessions) -> BrowserSession:
    return sessions.open(OWN)


def test_a_session_ends_a_day_after_its_last_request(sessions, session, clock):
    for _ in range(3):
        clock.now += IDLE_SECONDS - 1
        assert sessions.find(session.key, OWN) is session
    clock.now += IDLE_SECONDS
    assert sessions.find(session.key, OWN) is None


def test_a_session_that_is_kept_busy_ends_after_a_week(sessions, session, clock):
    while clock.now + 3600 < SESSION_SECONDS:
        clock.now += 3600
        assert sessions.find(session.key, OWN) is session
    clock.now = SESSION_SECONDS
    assert sessions.find(session.key, OWN) is None


def test_a_connection_ends_with_its_session():
    house = House()
    cookie = house.cookie()
    (session,) = house.sessions._sessions.values()

    async def receive() -> dict[str, Any]:
        house.sessions.end(session)  # as `Sign out` in another tab does
        return {"type": "websocket.receive", "bytes": b"rerun"}

    _, sent = house.knock("/s", kind="websocket", cookie=cookie, receive=receive)
    assert "websocket.disconnect" == house.inside.messages[0]["type"]
    assert "websocket.close" == sent[0]["type"]


def test_sessions_are_bounded_and_the_one_unused_for_longest_goes(sessions, session, clock):
    clock.now = 1.0
    for _ in range(MAX_SESSIONS):
        newest = sessions.open(OWN)
    assert sessions.find(session.key, OWN) is None
    assert sessions.find(newest.key, OWN) is newest


def test_the_code_of_the_terminal_gives_control_for_an_hour(sessions, session, clock, shown):
    assert "" == sessions.send_code(session)
    assert 0 == sessions.control_seconds(session)
    assert sessions.redeem(session, f" {shown[0].lower()} ")
    assert CONTROL_SECONDS == sessions.control_seconds(session)
    clock.now += CONTROL_SECONDS
    assert 0 == sessions.control_seconds(session)


def test_a_code_serves_once(sessions, session, shown):
    sessions.send_code(session)
    assert sessions.redeem(session, shown[0])
    assert not sessions.redeem(session, shown[0])


def test_a_code_is_short_lived(sessions, session, clock, shown):
    sessions.send_code(session)
    clock.now += CODE_SECONDS
    assert not sessions.redeem(session, shown[0])
    assert 0 == sessions.control_seconds(session)


def test_guessing_is_bounded(sessions, session, clock, shown):
    """An hour of it tries at most 1 in a billion of the codes."""
    tried = 0
    while clock.now < 3600:
        if sessions.has_code(session):
            assert not sessions.redeem(session, "AAAA-AAAA")
            tried += 1
        elif sessions.send_code(session):
            clock.now += 1
    assert len(shown) <= 3600 / CODE_PAUSE_SECONDS + 1
    assert CODE_TRIES * len(shown) >= tried > 1000
    assert tried / len(CODE_LETTERS) ** 8 < 1e-9
    assert len(set(shown)) == len(shown)


def test_after_few_tries_the_right_code_is_wrong_too(sessions, session, shown):
    sessions.send_code(session)
    assert [False] * CODE_TRIES == [sessions.redeem(session, "x") for _ in range(CODE_TRIES)]
    assert not sessions.redeem(session, shown[0])


def test_a_code_is_of_use_only_to_the_browser_that_asked_for_it(sessions, session, shown):
    sessions.send_code(session)
    other = sessions.open(OWN)
    assert not sessions.redeem(other, shown[0])
    assert sessions.redeem(session, shown[0])


@pytest.mark.parametrize("host", auth.LOOK_HOSTS)
def test_a_name_that_others_share_never_gets_a_code(sessions, shown, host):
    assert "read-only" in sessions.send_code(sessions.open(host))
    assert [] == shown


def test_a_dashboard_that_was_not_started_with_control_gives_no_code():
    plain = BrowserSessions()
    session = plain.open(OWN)
    assert "read-only" in plain.send_code(session)
    assert not plain.redeem(session, "")


def test_who_signed_out_controls_no_more(sessions, session, shown):
    sessions.send_code(session)
    sessions.redeem(session, shown[0])
    sessions.end(session)
    assert 0 == sessions.control_seconds(session)
    assert sessions.find(session.key, OWN) is None

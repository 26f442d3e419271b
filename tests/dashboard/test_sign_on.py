"""Single sign-on in a real browser, against a small OpenID provider of this test's own."""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from tests.dashboard.folder import write_run
from tests.support.dashboards import TABLE, dashboard
from tests.support.examples import one_in
from vitals_dashboard import launch

pytestmark = [pytest.mark.browser, pytest.mark.nightly]
pytest.importorskip("authlib", reason="st.login needs Authlib: pip install 'trainvitals[oidc]'")
CLIENT, SECRET = "vitals", "client-secret-of-this-test"


class Provider:
    """Discovery, authorization code with PKCE, RS256 id tokens; ``person`` is who signs in."""

    def __init__(self) -> None:
        from joserfc.jwk import RSAKey

        self.key = RSAKey.generate_key(2048, parameters={"kid": "1", "use": "sig", "alg": "RS256"})
        self.person: dict[str, object] = {}
        self.codes: dict[str, dict[str, str]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urlsplit(self.path)
                if asked.path == "/authorize":
                    query = dict(parse_qsl(asked.query))
                    code = secrets.token_urlsafe(16)
                    provider.codes[code] = query
                    back = urlencode({"code": code, "state": query["state"]})
                    self.send_response(302)
                    self.send_header("location", f"{query['redirect_uri']}?{back}")
                    self.send_header("content-length", "0")
                    self.end_headers()
                elif asked.path == "/jwks":
                    self._json({"keys": [provider.key.as_dict(private=False)]})
                else:
                    self._json(provider.metadata())

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                form = dict(parse_qsl(self.rfile.read(length).decode()))
                self._json(provider.token(form, self.headers.get("authorization", "")))

            def _json(self, value: object) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        return Handler

    def metadata(self) -> dict[str, object]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks",
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
        }

    def token(self, form: dict[str, str], authorization: str) -> dict[str, object]:
        from joserfc import jwt

        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        assert f"Basic {basic}" == authorization
        asked = self.codes.pop(form["code"])
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == asked["code_challenge"]
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "sub": "1", "iat": now, "exp": now + 600}
        claims |= {"nonce": asked["nonce"]} | self.person
        token = jwt.encode({"alg": "RS256", "kid": "1"}, claims, self.key)
        return {"access_token": "a", "token_type": "Bearer", "expires_in": 600, "id_token": token}


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    served = Provider()
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def public(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The public address of a dashboard whose people the provider knows; one may control."""
    tmp = tmp_path_factory.mktemp("tmp")
    (tmp / "runs").mkdir()
    write_run(tmp / "runs", name="kept")
    config = tmp / "oidc.toml"
    config.touch(mode=0o600)
    config.write_text(
        f'server_metadata_url = "{provider.url}/.well-known/openid-configuration"\n'
        f'client_id = "{CLIENT}"\nclient_secret = "{SECRET}"\n'
        'look = ["@example.org"]\ncontrol = ["ada@example.org"]\n'
    )
    port = launch.free_port(0)
    url = f"http://sign-on.localhost:{port}"
    options = ("--control", "--port", str(port), "--public-url", url, "--oidc", str(config))
    with dashboard(tmp / "runs", tmp, *options):
        yield url


def sign_in(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_role("button", name="Sign in").click()


def test_who_is_listed_for_control_has_it_and_signs_out(
    page: Any, public: str, provider: Provider
) -> None:
    provider.person = {"email": "ada@example.org", "email_verified": True}
    sign_in(page, public)
    page.wait_for_selector(TABLE)
    page.get_by_text("You may send commands.").wait_for()
    page.get_by_text("ada@example.org").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Sign in").wait_for()
    assert 0 == page.locator(TABLE).count()


def test_who_is_listed_to_look_can_only_look(page: Any, public: str, provider: Provider) -> None:
    provider.person = {"email": "bob@example.org", "email_verified": True}
    sign_in(page, public)
    page.wait_for_selector(TABLE)
    page.get_by_text("Your account has read access only").wait_for()
    assert 0 == page.get_by_role("button", name="Get control").count()


@pytest.mark.parametrize(
    "person",
    one_in(
        2,
        [
            pytest.param(
                {"email": "ada@example.org", "email_verified": False}, id="nobody verified it"
            ),
            pytest.param(
                {"email": "eve@elsewhere.example", "email_verified": True}, id="a stranger"
            ),
        ],
    ),
)
def test_anybody_else_sees_nothing(
    page: Any, public: str, provider: Provider, person: dict[str, object]
) -> None:
    provider.person = person
    sign_in(page, public)
    page.get_by_text("may not look here").wait_for()
    assert 0 == page.locator(TABLE).count()


def test_an_identity_that_nobody_signed_is_none(page: Any, public: str) -> None:
    forged = base64.b64encode(b'{"email": "ada@example.org", "email_verified": true}').decode()
    page.context.add_cookies([{"name": "_streamlit_user", "value": forged, "url": public}])
    page.goto(public)
    page.get_by_role("button", name="Sign in").wait_for()
    assert 0 == page.locator(TABLE).count()

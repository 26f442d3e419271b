from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.scopes import SCOPES
from trainvitals.errors import FormatError, InsecurePathError, StorageError, UsageError
from vitals_collector.api import auth
from vitals_collector.api.auth import (
    MAX_JSON_BYTES,
    AuthMiddleware,
    ServerTokens,
    check_bind,
    load_or_create_tokens,
)

TOKENS = ServerTokens(read="r" * 43, ingest="i" * 43, control="c" * 43)


async def echo(request: Request) -> PlainTextResponse:
    scopes = ",".join(sorted(request.state.scopes))
    return PlainTextResponse(f"{scopes}|{len(await request.body())}")


def client(**config) -> httpx.AsyncClient:
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    paths = ["/healthz", "/v1/runs", "/v1/ingest"]
    app = Starlette(routes=[Route(path, echo, methods=methods) for path in paths])
    ingest = Starlette(routes=[Route("/v1/ingest", echo, methods=["POST"])])
    app.add_middleware(AuthMiddleware, ingest=ingest, tokens=TOKENS, **config)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


async def ask(
    method: str = "GET", path: str = "/v1/runs", *, token: str = "", config=None, **kwargs
):
    headers = kwargs.pop("headers", {})
    if token:
        headers = {"Authorization": f"Bearer {token}", **headers}
    async with client(**(config or {})) as http:
        return await http.request(method, path, headers=headers, **kwargs)


def run(coroutine):
    import asyncio

    return asyncio.run(coroutine)


# ------------------------------------------------------------------------------------- tokens


def test_tokens_are_made_once_and_are_private(tmp_path: Path):
    path = tmp_path / "tokens.json"
    made = load_or_create_tokens(path)
    assert made == load_or_create_tokens(path)
    assert 0o600 == path.stat().st_mode & 0o777
    assert 3 == len({made.read, made.ingest, made.control})
    assert 43 <= min(len(made.read), len(made.ingest), len(made.control))


def test_a_token_never_appears_in_a_repr():
    assert "c" * 43 not in repr(TOKENS)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "tokens.json"
    load_or_create_tokens(path)
    path.chmod(0o640)
    with pytest.raises(InsecurePathError, match="mode 640"):
        load_or_create_tokens(path)


def test_a_link_in_place_of_the_token_file_is_refused(tmp_path: Path):
    load_or_create_tokens(tmp_path / "real.json")
    (tmp_path / "tokens.json").symlink_to(tmp_path / "real.json")
    with pytest.raises(StorageError):
        load_or_create_tokens(tmp_path / "tokens.json")


@pytest.mark.parametrize("raw", ["", "[]", '{"read": "x"}', '{"read":"","ingest":"","control":""}'])
def test_a_token_file_without_three_real_tokens_is_refused(tmp_path: Path, raw: str):
    path = tmp_path / "tokens.json"
    path.write_text(raw)
    path.chmod(0o600)
    with pytest.raises(FormatError):
        load_or_create_tokens(path)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    with pytest.raises(StorageError, match="cannot be created"):
        load_or_create_tokens(tmp_path / "absent" / "tokens.json")


def test_an_empty_token_opens_nothing():
    assert (frozenset(), "") == TOKENS.grants("")


# --------------------------------------------------------------------------------------- bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_may_be_listened_to_without_a_flag(host: str):
    check_bind(host, allow_remote=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.4", "node7.cluster"])
def test_anything_else_needs_the_flag(host: str):
    with pytest.raises(UsageError, match="other machines"):
        check_bind(host, allow_remote=False)
    check_bind(host, allow_remote=True)


# --------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize(
    ("token", "scopes"),
    [("r" * 43, "read"), ("i" * 43, "ingest"), ("c" * 43, "control,read")],
)
def test_each_token_has_its_scopes(token: str, scopes: str):
    assert f"{scopes}|0" == run(ask(token=token)).text


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer x", "Basic " + "c" * 43, "c" * 43]
)
def test_without_a_right_token_nothing_but_health_is_reached(header: str):
    headers = {"Authorization": header} if header else {}
    answer = run(ask(headers=headers))
    assert (401, "Bearer") == (answer.status_code, answer.headers["www-authenticate"])
    assert "V410" == answer.json()["code"]
    assert 404 != answer.status_code, "unknown routes must look the same as known ones"
    assert 401 == run(ask(path="/nowhere", headers=headers)).status_code
    assert 200 == run(ask(path="/healthz", headers=headers)).status_code


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:9", True),
        ("[::1]:8000", True),
        ("LOCALHOST", True),
        ("node7.cluster:8000", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("evil.example@127.0.0.1", False),
        ("127.0.0.1/evil", False),
        ("127.0.0.1:x", False),
        ("0.0.0.0", False),
        ("", False),
    ],
)
def test_only_own_names_are_answered_on_every_method(method: str, host: str, allowed: bool):
    answer = run(
        ask(method, token="c" * 43, headers={"Host": host}, config={"hosts": ["node7.cluster"]})
    )
    assert (200 if allowed else 403) == answer.status_code
    assert not allowed or answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://127.0.0.1:8000", True),
        ("https://vitals.example.org", True),
        ("http://127.0.0.1:9999", False),
        ("http://localhost:8000", False),
        ("http://evil.example", False),
        ("https://vitals.example.org.evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_pages_from_elsewhere_are_refused_on_every_method(method: str, origin: str, allowed: bool):
    config = {"origins": ["https://vitals.example.org"]}
    answer = run(ask(method, token="c" * 43, headers={"Origin": origin}, config=config))
    assert (200 if allowed else 403) == answer.status_code


def test_health_is_open_but_still_not_to_a_foreign_host():
    assert 403 == run(ask(path="/healthz", headers={"Host": "evil.example"})).status_code


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/v1/runs", "application/json", 200),
        ("/v1/runs", "application/json; charset=utf-8", 200),
        ("/v1/runs", "text/plain", 415),
        ("/v1/runs", "application/x-www-form-urlencoded", 415),
        ("/v1/runs", "multipart/form-data; boundary=x", 415),
        ("/v1/runs", "", 415),
        ("/v1/ingest", "application/octet-stream", 200),
        ("/v1/ingest", "text/plain", 415),
    ],
)
def test_bodies_are_json_or_rows(path: str, kind: str, status: int):
    headers = {"Content-Type": kind} if kind else {}
    answer = run(ask("POST", path, token="c" * 43, content=b"{}", headers=headers))
    assert status == answer.status_code


def test_a_large_body_is_refused_by_its_announced_length():
    body = b"x" * (MAX_JSON_BYTES + 1)
    headers = {"Content-Type": "application/json"}
    answer = run(ask("POST", token="c" * 43, content=body, headers=headers))
    assert 413 == answer.status_code


def test_a_large_body_without_a_length_is_refused_too():
    async def chunks():
        for _ in range(MAX_JSON_BYTES // 1024 + 1):
            yield b"x" * 1024

    headers = {"Content-Type": "application/json"}
    answer = run(ask("POST", token="c" * 43, content=chunks(), headers=headers))
    assert 413 == answer.status_code


def test_a_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auth, "BODY_SECONDS", 0.01)

    async def never():
        import asyncio

        yield b"{"
        await asyncio.Event().wait()

    async def trickle():
        async with client() as http:
            return await http.post(
                "/v1/runs",
                content=never(),
                headers={"Authorization": "Bearer " + "c" * 43, "Content-Type": "application/json"},
            )

    assert 408 == run(trickle()).status_code


def test_the_body_is_not_read_before_the_token_is_known():
    read = 0

    async def counted():
        nonlocal read
        read += 1
        yield b"{}"

    headers = {"Content-Type": "application/json"}
    assert 401 == run(ask("POST", content=counted(), headers=headers)).status_code
    assert 0 == read


def test_the_whole_body_reaches_the_route():
    headers = {"Content-Type": "application/octet-stream"}
    answer = run(ask("POST", "/v1/ingest", token="i" * 43, content=b"x" * 100_000, headers=headers))
    assert "ingest|100000" == answer.text


# ----------------------------------------------------------------------------- every real route


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory):
    from vitals_collector.api.app import CollectorSettings, create_app

    app = create_app(CollectorSettings(data=tmp_path_factory.mktemp("data")))
    yield app
    app.state.acting.close()
    app.state.store.close()


def leaves(routes, prefix: str = ""):
    """Yield every route with a path, wherever the framework keeps included routers."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from leaves(router.routes)
        elif hasattr(route, "routes") and route.routes:
            yield from leaves(route.routes)
        else:
            yield route


def known_routes(app) -> set[tuple[str, str]]:
    found = set()
    for route in leaves(app.routes):
        for method in (getattr(route, "methods", None) or {"?"}) - {"HEAD"}:
            found.add((method, route.path))
    return found


def test_every_route_of_the_app_is_in_the_table_and_the_reverse(collector):
    assert set(SCOPES) == known_routes(collector)


def test_the_openapi_document_names_no_route_beyond_the_table(collector):
    documented = {
        (method.upper(), path)
        for path, methods in collector.openapi()["paths"].items()
        for method in methods
    }
    pages = {(method, "/ack/{token}") for method in ("GET", "POST")}
    assert set(SCOPES) - {("GET", "/openapi.json")} - pages == documented


def test_each_route_opens_for_its_tokens_alone(collector, tmp_path):
    tokens = load_or_create_tokens(
        Path(collector.state.store.engine.url.database).parent / "tokens.json"
    )
    presented = {
        "none": "",
        "wrong": "x" * 43,
        "read": tokens.read,
        "ingest": tokens.ingest,
        "control": tokens.control,
    }
    values = {
        "run_id": "01JD0000000000000000000000",
        "step": "1",
        "number": "1",
        "silence_id": "1",
        "fingerprint": "x",
        "token": "x",
    }

    async def every():
        transport = httpx.ASGITransport(collector, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            found = {}
            for method, path in SCOPES:
                for name, token in presented.items():
                    headers = {"Authorization": f"Bearer {token}"} if token else {}
                    answer = await http.request(method, path.format(**values), headers=headers)
                    refused = {401: {"none", "wrong"}, 403: {"read", "ingest", "control"}}
                    assert answer.status_code < 500, (method, path, answer.text)
                    if name not in refused.get(answer.status_code, set()):
                        found.setdefault((method, path), set()).add(name)
            return found

    assert run(every()) == SCOPES

"""Who may look, who may control; with a second program on this machine that tries for both."""

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import samples
from tests.dashboard.conftest import texts, write_tokens
from tests.dashboard.look_back import proposed, with_look_back
from tests.dashboard.stranger import stranger
from tests.dashboard.stub import CONTROL, READ, Stub
from tests.house.pages import ROOT, block
from trainvitals.errors import InsecurePathError, UsageError
from vitals_dashboard import access, launch
from vitals_dashboard.cli import _build_access_options
from vitals_dashboard.settings import DashboardSettings, SignOn, check_public_url, read_sign_on

Open = Callable[..., AppTest]
GUIDE = ROOT / "docs" / "guides" / "dashboard-access.md"
TABLE = "[data-testid=stDataFrame] canvas"


# ------------------------------------------------------------------- pages, drawn without a browser


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def test_a_click_that_comes_after_the_control_has_ended_sends_nothing(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a request that was made by hand: the server draws the form, or there is none."""
    stub.add(proposed(with_look_back(samples.sample_run())))
    app = open_page("decisions", control=True)
    app.text_input(key="reason_do_4").set_value("bad shard")
    monkeypatch.setattr(access, "role", lambda: "look")
    press(app, "Send: rollback")
    assert ([], []) == (list(app.exception), stub.commands)


def test_a_session_that_has_ended_is_shown_nothing(
    stub: Stub, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.add(samples.sample_run())
    app = open_page("decisions")
    assert "decisions" in texts(app)
    monkeypatch.setattr(access, "role", lambda: "")
    app.run()
    assert "Signed out" in texts(app) and "decisions" not in texts(app)


def test_a_look_only_dashboard_does_not_even_hold_the_control_token(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.json", control=CONTROL)
    settings = DashboardSettings(door_token="t" * 32, collector_url="", token_file=str(file))
    assert (READ, "") == (settings.collector().tokens.read, settings.collector().tokens.control)
    write_tokens(file, read="", control=CONTROL)
    assert (CONTROL, "") == (
        settings.collector().tokens.read,
        settings.collector().tokens.control,
    ), "it must read"


# --------------------------------------------------------------------------- what the launcher does


def test_another_program_at_the_port_is_not_told_the_token() -> None:
    with stranger() as (port, seen), pytest.raises(UsageError, match="another program answers"):
        launch._has_proven_token(port, "door-token-0123456789abcdef")
    assert not any("door-token" in text for text in seen)


@pytest.mark.parametrize(
    "url",
    [
        "vitals.example",
        "http://vitals.example",
        "http://localhost:1",
        "https://localhost",
        "https://ada:secret@vitals.example",
        "https://vitals.example/?x=1",
        "https://[",
        "https://vitals.example:99999",
    ],
)
def test_a_public_address_is_one_with_tls_and_a_name_of_its_own(url: str) -> None:
    with pytest.raises(UsageError, match="--public-url is"):
        check_public_url(url)
    check_public_url("https://vitals.example/path")


def test_a_provider_needs_the_address_to_send_people_back_to(tmp_path: Path) -> None:
    for url in ("", "https://hub.example/path"):
        with pytest.raises(UsageError, match="--oidc needs --public-url"):
            _build_access_options(False, url, tmp_path / "oidc.toml")


# ------------------------------------------------------------------------------ roles by a provider

PROVIDER = """
server_metadata_url = "https://id.example/.well-known/openid-configuration"
client_id = "vitals"
client_secret = "s"
look = ["@example.org"]
control = ["ada@example.org"]
"""


def test_the_file_of_a_provider_is_as_the_guide_shows_it(tmp_path: Path) -> None:
    shown = block(GUIDE, "test: oidc").body
    sign_on = read_sign_on(provider_file(tmp_path, shown))
    assert ("email", 12.0) == (sign_on.claim, sign_on.hours)
    every = shown.replace("# claim", "claim").replace("# hours", "hours")
    assert "groups" == read_sign_on(provider_file(tmp_path, every)).claim


def provider_file(tmp_path: Path, text: str = PROVIDER, mode: int = 0o600) -> Path:
    path = tmp_path / "oidc.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def person(**claims: object) -> dict[str, object]:
    return {"iat": 1000, "email": "ada@example.org", "email_verified": True} | claims


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        (person(), "control"),
        (person(email="Bob@Example.org"), "look"),
        (person(email="eve@example.org.evil.example"), ""),
        (person(email="ada@example.org@evil.example"), ""),
        (person(email_verified=False), ""),
        (person(email_verified="true"), ""),
        ({"iat": 1000, "email": "ada@example.org"}, ""),
        (person(iat=1000 - 12 * 3600 - 1), ""),
        (person(iat=None), ""),
        ({}, ""),
    ],
)
def test_a_role_is_given_by_verified_address_for_some_hours(
    tmp_path: Path, claims: dict[str, object], role: str
) -> None:
    sign_on = read_sign_on(provider_file(tmp_path))
    assert role == sign_on.role(claims, unix_seconds=1000.0)


def test_a_role_is_given_by_another_claim_word_for_word() -> None:
    sign_on = SignOn(
        server_metadata_url="", client_id="", client_secret="",
        claim="groups", look=("ml",), control=("ml-leads",),
    )  # fmt: skip

    def role(groups: object) -> str:
        return sign_on.role({"iat": 0, "groups": groups}, unix_seconds=1.0)

    assert ["look", "control", "", "", ""] == [
        role(groups) for groups in (["x", "ml"], ["ml", "ml-leads"], ["ML"], "m", [1, None])
    ]
    assert "look" == role("ml")


def test_the_file_of_a_provider_is_private_and_whole(tmp_path: Path) -> None:
    with pytest.raises(InsecurePathError, match="other users can access it"):
        read_sign_on(provider_file(tmp_path, mode=0o644))
    with pytest.raises(UsageError, match="unknown field `lok`"):
        read_sign_on(provider_file(tmp_path, PROVIDER.replace("look", "lok")))
    with pytest.raises(UsageError, match="cannot be read"):
        read_sign_on(tmp_path / "none")


# -------------------------------------------------------------------------------- in a real browser

"""Our own programs in the browser, as Streamlit components: the charts, and a command to copy."""

from pathlib import Path
from typing import Any, Literal

from streamlit.components.v2 import component
from streamlit.components.v2.get_bidi_component_manager import get_bidi_component_manager
from streamlit.components.v2.manifest_scanner import ComponentConfig, ComponentManifest

from trainvitals import __version__

Program = Literal["chart", "command"]
_PACKAGE = "trainvitals"
_NAME: dict[Program, str] = {"chart": "charts", "command": "command"}


def register_component(program: Program) -> Any:
    """Register one of the dashboard's browser programs; return the function that mounts it.

    Streamlit finds such files itself only next to a project file named like the import package. As
    text, the program would be sent with each refresh, and our content policy would block it.
    """
    manager = get_bidi_component_manager()
    if manager.get(f"{_PACKAGE}.{_NAME[program]}") is None:
        parts = [ComponentConfig(name=name, asset_dir="browser") for name in _NAME.values()]
        manifest = ComponentManifest(name=_PACKAGE, version=__version__, components=parts)
        manager.register_from_manifest(manifest, Path(__file__).parent / "charts")
    return component(f"{_PACKAGE}.{_NAME[program]}", js=f"{program}.js")


def draw_copyable_command(
    text: str, *, key: str, width: Literal["stretch", "content"] = "stretch"
) -> None:
    """Draw a command on a dashboard page, with a button that copies it.

    ``st.code`` makes the browser load and run 1.5 MB for syntax colors, which delayed the curves
    for a third of a second.
    """
    register_component("command")(key=key, data=text, width=width, height="content")

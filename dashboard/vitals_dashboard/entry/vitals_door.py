"""Entry point of ``streamlit run``: the pages behind the authentication.

Streamlit puts this directory first on ``sys.path``, so no file in it may be named like any module.
"""

import os
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from vitals_dashboard import access, page
from vitals_dashboard.auth import TokenMiddleware
from vitals_dashboard.settings import load_settings

settings = load_settings(os.environ)
text = page.streamlit_index_page()
app = st.App(
    "vitals_pages.py",
    routes=page.routes(text),
    middleware=[
        Middleware(
            TokenMiddleware,
            doors=settings.hosts(),
            sessions=access.sessions(),
            page=text,
            redirect_file=Path(settings.redirect_file) if settings.redirect_file else None,
        )
    ],
)

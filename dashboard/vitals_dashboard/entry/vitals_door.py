"""What ``streamlit run`` starts: the pages behind the door.

Streamlit puts this folder first on ``sys.path``, so no file in it may be named like any module.
"""

import os

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from vitals_dashboard.auth import Gate
from vitals_dashboard.launch import ALLOWED_HOSTS
from vitals_dashboard.settings import load_settings

app = st.App(
    "vitals_pages.py",
    middleware=[
        Middleware(TrustedHostMiddleware, allowed_hosts=list(ALLOWED_HOSTS), www_redirect=False),
        Middleware(Gate, door_token=load_settings(os.environ).door_token),
    ],
)

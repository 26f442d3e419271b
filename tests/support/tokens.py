"""Tokens of a collector."""

import time

from tests.support.served import Served
from vitals_collector.storage import tokens


def token(served: Served, owner: str, *scopes: str, **limits) -> str:
    """Return the secret of a new token; with the scope ingest, where none is named."""
    scopes = scopes or ("ingest",)
    with served.store.write() as connection:
        _, secret = tokens.create(
            connection,
            owner=owner,
            scopes=scopes,
            by="test",
            now_unix_ns=time.time_ns(),
            **limits,
        )
    served.app.state.known_tokens.reload()
    return secret

"""Pushes the dashboard to Grafana: the one module that knows the library `grafana-api`.

Two faults of that library are kept from the caller: it fails on an answer with an empty body, and
on an error page that is not JSON but has the word "message" in it. The library's own calls for
data sources and alerts are for old servers; this module names the endpoints itself.
"""

import json
from typing import Any
from urllib.parse import urlsplit

from trainvitals.errors import (
    MissingDependencyError,
    TransportError,
    UnauthorizedError,
    UsageError,
    VitalsError,
)

FOLDER_UID = "trainvitals"
DATASOURCE_UID = "trainvitals-prometheus"


class _NotFoundError(TransportError):
    """Grafana has no such object."""


class GrafanaClient:
    """Creates or updates a folder, a data source and a dashboard on a Grafana server."""

    def __init__(
        self, url: str, token: str, *, timeout_seconds: float = 10.0, verify: bool = True
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{url!r} is not the address of a Grafana",
                hint="give it as http://grafana.example.org:3000",
            )
        try:
            from grafana_api.grafana_api import GrafanaAPI
        except ModuleNotFoundError:
            raise MissingDependencyError(
                "pushing to Grafana needs the package grafana_api",
                hint="pip install 'trainvitals[grafana]'; without --url the dashboard is a file",
            ) from None
        self._url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        path = parts.path.strip("/")
        self._api = GrafanaAPI(
            token,
            host=parts.netloc.rpartition("@")[2],
            url_path_prefix=f"{path}/" if path else "",
            protocol=parts.scheme,
            verify=verify,
            timeout=timeout_seconds,
        )

    def close(self) -> None:
        """Close the connections to the Grafana server."""
        self._api.s.close()

    def version(self) -> str:
        """Return the version of the Grafana server; "" if it does not reveal it."""
        return str(self._call_api("GET", "/health").get("version", ""))

    def ensure_folder(self, title: str = "Vitals") -> str:
        """Create the folder for the dashboard in Grafana unless it exists; return its uid."""
        try:
            self._call_api("GET", f"/folders/{FOLDER_UID}")
        except _NotFoundError:
            self._call_api("POST", "/folders", {"uid": FOLDER_UID, "title": title})
        return FOLDER_UID

    def ensure_datasource(self, prometheus_url: str) -> str:
        """Create or update Grafana's data source for Prometheus; return its uid."""
        body = {
            "uid": DATASOURCE_UID,
            "name": "Vitals Prometheus",
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus_url,
        }
        try:
            self._call_api("GET", f"/datasources/uid/{DATASOURCE_UID}")
        except _NotFoundError:
            self._call_api("POST", "/datasources", body)
        else:
            self._call_api("PUT", f"/datasources/uid/{DATASOURCE_UID}", body)
        return DATASOURCE_UID

    def push_dashboard(self, dashboard: dict[str, Any], *, folder_uid: str) -> str:
        """Create or replace the dashboard on the Grafana server; return its URL."""
        body = {
            "dashboard": {**dashboard, "id": None},
            "folderUid": folder_uid,
            "message": "vitals deploy grafana",
            "overwrite": True,
        }
        reply = self._call_api("POST", "/dashboards/db", body)
        return f"{self._url}{reply.get('url', '/d/' + str(dashboard['uid']))}"

    def _call_api(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call the API of the Grafana server; return the decoded response."""
        from grafana_api.grafana_api import GrafanaException
        from requests import RequestException

        try:
            reply = getattr(self._api, method)(path, json=body)
        except GrafanaException as error:
            raise self._refused(error, method, path) from error
        except json.JSONDecodeError as error:  # requests' own derives from it, and from OSError
            if error.doc.strip():
                raise self._not_grafana_error() from error
            return {}  # the library reads every body as JSON, an empty one too
        except TypeError as error:  # ... and indexes an error page as if it were JSON
            raise self._not_grafana_error() from error
        except RequestException as error:
            raise TransportError(
                f"{self._url} does not answer: {type(error).__name__}",
                hint="is Grafana running, and is the address right?",
            ) from error
        return reply if isinstance(reply, dict) else {}

    def _refused(self, error: Any, method: str, path: str) -> VitalsError:
        """Return the error for a response with which Grafana refused a request."""
        text = f"Grafana refused {method} {path}: {error}"
        if error.status_code in (401, 403):
            return UnauthorizedError(
                text, hint="the token needs a service account with the role Admin or Editor"
            )
        if error.status_code == 404:
            return _NotFoundError(text, hint=f"is {self._url} the address of a Grafana?")
        return TransportError(text, hint="the server's log says more")

    def _not_grafana_error(self) -> TransportError:
        """Return the error for a response that does not come from a Grafana server."""
        return TransportError(
            f"{self._url} answered with a page that is not Grafana's",
            hint="a proxy or a login page may stand in between; give the address of Grafana itself",
        )

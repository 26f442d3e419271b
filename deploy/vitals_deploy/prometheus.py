"""Prometheus: a scrape configuration, and rules on the alerts of the collector.

The rules never detect from scraped samples: at five steps per second a scrape sees one step in 75.
They forward the collector's alerts, and check what it cannot report: that it, or an agent, is down.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from ssl import PEM_cert_to_DER_cert

from trainvitals.alerting import ALERTS, RUNBOOK
from trainvitals.io.server_identity import SERVER_NAME, TlsTrust
from vitals_deploy.templates import fill_template

TOKEN_FILE = "vitals-read.token"
"""Placeholder for the token: Prometheus refuses a configuration without one."""
AGENTS_TOKEN_FILE = "vitals-agents.token"
"""Placeholder for the token for the agents."""
CERTIFICATE_FILE = "vitals-collector.pem"
"""Placeholder for the certificate that Prometheus checks before it sends the token."""

_TLS = '{"ca_file": "vitals-collector.pem", "server_name": "vitals-collector"}'
_DISCOVERY = "    # The collector lists the agents"
"""Start of the last part of the configuration, which ``_FROM_FILES`` can replace."""
_FROM_FILES = """\
    # Their ports change from job to job: the targets are read again whenever a file changes
    # (`vitals deploy prometheus --runs VITALS_DIR` writes one).
    file_sd_configs:
      - files: [agents/*.json]
        refresh_interval: 30s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertingRule:
    """One alerting rule. Its texts describe the event, the reaction of Vitals, and the fix."""

    name: str
    expr: str
    summary: str
    description: str
    did: str
    """Reaction of Vitals, as the end of a sentence that starts with its name."""
    to_do: str
    ends: str = "15 minutes have passed without a new occurrence."
    """End of the alert, as the end of a sentence; for the runbook."""
    hold: str = ""
    """Time for which the expression must hold, in Prometheus syntax; empty: immediately."""
    severity: str = "notify"
    """`page` or `notify`; empty if the series itself has a severity label."""


def _alert_text_template(texts: Mapping[str, str], otherwise: str) -> str:
    """Return the template with which a Prometheus rule selects the text by its alert."""
    alerts_of: dict[str, list[str]] = {}
    for alert, text in texts.items():
        alerts_of.setdefault(text, []).append(json.dumps(alert))
    cases = [
        f"if eq $labels.alert {' '.join(alerts)} }}}}{text}" for text, alerts in alerts_of.items()
    ]
    return "{{ " + "{{ else ".join(cases) + "{{ else }}" + otherwise + "{{ end }}"


_TOLD = tuple(alert for alert in ALERTS if alert.severity != "log")
_OF_RUN = "{{ if $labels.run }} on run {{ $labels.run }}{{ end }}"

_SECTION = "{{ $labels.alert | toLower }}"
_PAGE = "/{{ if $labels.run }}?run={{ $labels.run }}{{ end }}"

ENGINE_RULES = (
    AlertingRule(
        name="VitalsAlert",
        severity="",
        ends="",
        # The last value counts for a day: a collector that died resolves nothing. Only a later
        # value resolves it, its own or that of another collector on the same database.
        expr="max by (run, alert, severity, cause) (last_over_time("
        'collector_alert_firing{severity=~"page|notify"}[24h])) == 1 '
        "unless on (run, alert, severity, cause) max by (run, alert, severity, cause) "
        "(collector_alert_firing) == 0",
        summary="{{ $labels.alert }}"
        "{{ if $labels.cause }} ({{ $labels.cause }}){{ end }}" + _OF_RUN,
        description=_alert_text_template(
            {alert.name: alert.help for alert in _TOLD}, "These rules are older than this alert."
        )
        + " The evidence: `vitals alerts list`"
        + "{{ if $labels.run }}, `vitals show {{ $labels.run }}`{{ end }}.",
        did=_alert_text_template(
            {alert.name: alert.did for alert in _TOLD}, "acted as `vitals alerts list` shows."
        ),
        to_do=_alert_text_template(
            {alert.name: alert.to_do.replace(" RUN", " {{ $labels.run }}") for alert in _TOLD},
            "Read the runbook.",
        ),
    ),
)

ABSENCE_RULES = (
    AlertingRule(
        name="VitalsCollectorDown",
        # A failed scrape is noticed within two intervals, with the hold within 60 s. A Prometheus
        # that starts without data may first scrape after 20 s.
        expr='max(up{job="vitals-collector"}) == 0 or absent(up{job="vitals-collector"})',
        hold="30s",
        severity="page",
        summary="No collector responds: a halted run would raise no alert",
        description="All collectors are down, or Prometheus cannot reach them.",
        did="cannot alert now; training continues, and agents keep all rows in their spools.",
        to_do="Restart the collector.",
        ends="a collector responds again.",
    ),
    AlertingRule(
        name="VitalsAgentDown",
        # The state of a run counts for 50 min unless a collector reports another one: a dead
        # collector resolves nothing. This is less than the hour for which an ended run is exported.
        expr='up{job="vitals-agent"} == 0 and on (run) '
        '(last_over_time(train_run_state{state="running"}[50m]) == 1 '
        'unless on (run) train_run_state{state!="running"} == 1) '
        'or up{job="vitals-agent", run=""} == 0',
        hold="5m",
        summary="The agent {{ $labels.instance }} does not respond",
        description="An agent does not respond while its run continues.",
        did="took no action; training continues, and the journal keeps rows up to its size limit.",
        to_do="Restart the agent.",
        ends="the agent responds again, or its run has ended.",
    ),
    AlertingRule(
        name="VitalsAgentStalled",
        # The metrics of an agent that dies end with it: they count until VitalsAgentDown fires.
        expr="last_over_time(agent_cycle_age_seconds[15m]) > 120",
        hold="1m",
        summary="The agent {{ $labels.instance }} responds but makes no progress",
        description="An agent finished its last cycle two minutes ago. A full or hanging disk "
        "below its spool is the usual cause.",
        did="took no action; training continues.",
        to_do="Check that disk, then restart the agent.",
        ends="the agent finishes a cycle, or has not responded for 15 minutes.",
    ),
)

LOSS_RULES = (
    AlertingRule(
        name="VitalsRowsDropped",
        expr="increase(agent_dropped_rows_total[15m]) > 0",
        summary="The agent {{ $labels.instance }} dropped rows",
        description="A journal or the spool was full: the collector was too slow or down for too "
        "long.",
        did="counted the lost rows; training continues.",
        to_do="Check that the collector responds and has disk space.",
    ),
    AlertingRule(
        name="VitalsRowsLost",
        expr="increase(collector_lost_rows_total[15m]) > 0",
        summary="Rows never reached the collector",
        description="Sequence numbers have gaps: rows never reached the collector.",
        did="counted the lost rows.",
        to_do="`vitals show RUN` names the source; check its node's disk and its agent.",
    ),
    AlertingRule(
        name="VitalsSpoolDamaged",
        expr="increase(agent_corrupt_rows_total[15m]) > 0 "
        "or increase(collector_damaged_stretches_total[15m]) > 0",
        summary="{{ $labels.instance }} found damaged data in a spool or a journal",
        description="Checksums in a spool or a journal did not match.",
        did="quarantined the damaged rows and counted them.",
        to_do="Check the disk.",
    ),
    AlertingRule(
        name="VitalsStoreDamaged",
        expr="increase(collector_damaged_batches_total[15m]) > 0",
        summary="The collector's store is damaged",
        description="Stored rows fail their checksum.",
        did="leaves them out of query results; only `vitals sql` does not check them.",
        to_do="`vitals store check` lists them; check the disk.",
    ),
    AlertingRule(
        name="VitalsBatchesRejected",
        expr="sum by (reason) (increase("
        'collector_rejected_batches_total{reason!~"V24[01]"}[15m])) > 0',
        summary="The collector rejects batches: {{ $labels.reason }}",
        description="The collector rejects batches; usually an agent is newer than the collector.",
        did="counted the batches and stored nothing of them.",
        to_do="Update the collector.",
    ),
    AlertingRule(
        name="VitalsNotificationsFailing",
        expr="sum by (notifier) (increase("
        'collector_notifications_total{outcome=~"failed|dropped"}[15m])) > 0',
        summary="Alerts fail at the notifier {{ $labels.notifier }}",
        description="A receiver rejects alerts, or is down while too many wait for it.",
        did="keeps trying.",
        to_do="`vitals alerts test` shows what the receiver answers.",
    ),
)

ACCESS_RULES = (
    AlertingRule(
        name="VitalsAccessRefused",
        # For known tokens used beyond their rights, one request is enough. Missing and wrong tokens
        # also come from scanners or mistyped URLs: only many of them fire.
        expr="sum by (reason) (increase("
        'collector_refused_requests_total{reason!~"V41[01]"}[15m])) > 0 '
        'or sum by (reason) (increase(collector_refused_requests_total{reason=~"V41[01]"}[15m])) '
        "> 20 or sum by (reason) (increase("
        'collector_rejected_batches_total{reason=~"V24[01]"}[15m])) > 0',
        summary="The collector refuses access: {{ $labels.reason }}",
        description="Requests came with no or a wrong token (V410), for another host or page "
        "(V411), without the scope (V412), beyond the token's project or run (V413), with an "
        "expired or revoked token (V414), with rows of another token's run (V240), or with "
        "another writer key than the stream's (V241).",
        did="refused and counted them; agents keep the rows.",
        to_do="`vitals token list` shows the tokens and their owners. If a job has the wrong file, "
        "give it the right one; if a token is misused, `vitals token revoke ID`.",
    ),
)

GROUPS = (
    ("vitals-engine", ENGINE_RULES),
    ("vitals-absence", ABSENCE_RULES),
    ("vitals-loss", LOSS_RULES),
    ("vitals-access", ACCESS_RULES),
)


def prometheus_files(
    *,
    collector: str = "127.0.0.1:8765",
    alertmanager: str = "127.0.0.1:9093",
    token_file: str = TOKEN_FILE,
    tls: TlsTrust | None = None,
    agents: Iterable[Mapping[str, object]] | None = None,
    public_url: str = "",
    runbook_url: str = RUNBOOK,
) -> dict[str, str]:
    """Return the scrape configuration, the rules and, if given, the agents' targets.

    Args:
        collector: host and port of the collector.
        alertmanager: host and port of the Alertmanager.
        token_file: path of the collector's read token, as Prometheus sees it.
        tls: trust information in the collector's token file; None writes a placeholder.
        agents: target groups as `agent_targets` returns them; None: query the collector for them.
        public_url: public URL of the dashboard, for links from alerts to a run's page; "" for none.
        runbook_url: URL of the published runbook.
    """
    pem, server_name = prometheus_trust(tls)
    tls_config = {"ca_file": CERTIFICATE_FILE} if pem else {}
    tls_config |= {"server_name": server_name} if server_name else {}
    settings = {
        '"127.0.0.1:9093"': json.dumps(alertmanager),
        '"127.0.0.1:8765"': json.dumps(collector),
        '"https://127.0.0.1:8765/v1/sd/agents"': json.dumps(f"https://{collector}/v1/sd/agents"),
        f'"{TOKEN_FILE}"': json.dumps(token_file),
        _TLS: json.dumps(tls_config),
    }
    config = fill_template("prometheus.yml", settings)
    if agents is not None:
        config = config.partition(_DISCOVERY)[0] + _FROM_FILES
    made = {
        "prometheus.yml": config,
        "vitals_rules.yml": render_rules(public_url=public_url, runbook_url=runbook_url),
        TOKEN_FILE: "put the collector's read token here\n",
        AGENTS_TOKEN_FILE: "put the token of the agents' read.token here\n",
    }
    if pem:
        made[CERTIFICATE_FILE] = pem
    if agents is not None:
        made["agents/vitals.json"] = json.dumps(list(agents), indent=2) + "\n"
    return made


def prometheus_trust(tls: TlsTrust | None) -> tuple[str, str]:
    """Return the CA certificates (PEM) and the server name for Prometheus; "" for its defaults.

    Prometheus always checks a name: that in the URL, unless the certificate was created by a
    collector, which always uses the same name.
    """
    if tls is None:
        return "put the certificate of the collector's tokens.json here\n", SERVER_NAME
    is_own = all(SERVER_NAME.encode() in PEM_cert_to_DER_cert(pem) for pem in tls.certificates)
    server_name = SERVER_NAME if tls.certificates and is_own else ""
    return "".join(tls.certificates) or tls.ca, server_name


def render_rules(*, public_url: str = "", runbook_url: str = RUNBOOK) -> str:
    """Return the alert rules for Prometheus as YAML; strings are quoted as JSON, which is valid."""
    lines = ["# Alert rules of Vitals. Generated by `vitals deploy prometheus`.", "groups:"]
    for group, rules in GROUPS:
        lines += [f"  - name: {group}", "    rules:"]
        for rule in rules:
            lines += _render_rule(rule, public_url.rstrip("/"), runbook_url)
    return "\n".join(lines) + "\n"


def _render_rule(rule: AlertingRule, public_url: str, runbook_url: str) -> list[str]:
    lines = [f"      - alert: {rule.name}", f"        expr: {json.dumps(rule.expr)}"]
    if rule.hold:
        lines.append(f"        for: {rule.hold}")
    if rule.severity:
        lines += ["        labels:", f"          severity: {rule.severity}"]
    annotations = {
        "summary": rule.summary,
        "description": rule.description,
        "action_taken": f"Vitals {rule.did}",
        "to_do": rule.to_do,
        "runbook_url": f"{runbook_url}#{_SECTION if rule in ENGINE_RULES else rule.name.lower()}",
    }
    if public_url and rule in ENGINE_RULES:
        annotations["dashboard_url"] = public_url + _PAGE
    lines.append("        annotations:")
    return lines + [f"          {name}: {json.dumps(text)}" for name, text in annotations.items()]


def agent_targets(runs: Path) -> list[dict[str, object]]:
    """Return a Prometheus target group for each agent with a URL below the run directories."""
    groups: list[dict[str, object]] = []
    for path in sorted(runs.glob("*/agents/*/agent.json")):
        url = _agent_url(path)
        if url.startswith("http://"):
            labels = {"run": path.parents[2].name, "node": path.parent.name}
            groups.append({"targets": [url.removeprefix("http://").rstrip("/")], "labels": labels})
    return groups


def _agent_url(path: Path) -> str:
    """Return the URL in an agent's file, for Prometheus; empty if it has none."""
    try:
        return str(json.loads(path.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # an agent that is starting or ending has no URL to scrape

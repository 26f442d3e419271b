import http.client
import json
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.agent.builders import NODE, RUN
from tests.agent.fake_nvml import gpus
from trainvitals.catalog import CATALOG
from trainvitals.detect.registry import ACTED_CAUSES
from trainvitals.errors import UsageError
from trainvitals.io.client import CollectorClient
from trainvitals.records import Decision, DecisionMade
from vitals_agent.faults import PARTS
from vitals_agent.state_dir import AgentInfo

SPECS = {spec.name: spec for spec in CATALOG}


def get(agent, path: str, token: str | None = None, **headers: str):
    where = urlsplit(agent.info.url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    try:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.headers
    finally:
        connection.close()


def read_token(agent) -> str:
    return Path(agent.info.token_file).read_text().strip()


def scrape(agent) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return each sample's value by name and label values, in the order of the labels' names."""
    status, text, _ = get(agent, "/metrics", read_token(agent))
    assert 200 == status
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


@pytest.fixture
def busy(world):
    """An agent after a few cycles with a rank, a GPU and some decisions."""
    rank = world.rank()
    nvml = gpus("GPU-1")
    nvml.change("GPU-1", {"fields": {"4": {"error": nvml.NVML_ERROR_NOT_SUPPORTED}}})
    agent = world.agent(nvml=nvml)
    rank.step(0, 1, 2, grad_norm=0.5, tokens_seen=100, verdict=0, batch_index=4)
    rank.step(3, loss=float("nan"), verdict=1, skipped=1)
    for number, action in enumerate(("skip_step", "skip_step", "rollback")):
        decision = Decision(
            ledger_seq=number,
            action=action,
            step=3,
            decided_at_step=4,
            attempt=1,
            reason="because",
            rule="nonfinite",
            cause="nonfinite",
        )
        rank.say(DecisionMade(decision=decision), step=3)
    agent.cycle(0.0)
    agent.cycle(2.0)
    return agent


def test_every_name_type_and_label_is_the_catalogs(busy):
    _, text, _ = get(busy, "/metrics", read_token(busy))
    families = list(parse(text))
    assert len(families) > 25
    for family in families:
        spec = SPECS[family.name] if family.name in SPECS else SPECS[f"{family.name}_total"]
        assert (spec.kind, spec.help) == (family.type, family.documentation)
        for sample in family.samples:
            assert (spec.name, set(spec.labels)) == (sample.name, set(sample.labels))


def test_the_last_step_of_the_rank_and_the_samples_of_the_node_are_shown(busy):
    found = scrape(busy)
    assert 3 == found[("train_step", (RUN,))]
    assert 4 == found[("train_steps_total", (RUN,))]
    assert 1 == found[("train_nonfinite_total", (RUN,))]
    assert str(found[("train_loss", (RUN,))]) == "nan"
    assert 648.0 == found[("gpu_power_watts", ("GPU-1", NODE))]
    assert 1 == found[("train_process_alive", ("0", RUN))]
    assert found[("agent_spooled_rows_total", ())] > 4
    assert 2 == found[("train_skipped_steps_total", ("other", RUN))]
    assert 1 == found[("train_rollbacks_total", ("other", RUN))]


def test_what_was_not_measured_has_no_sample(busy):
    names = {name for name, _ in scrape(busy)}
    assert "train_grad_norm" not in names  # the last step had none
    assert "gpu_ecc_uncorrected_errors_total" not in names
    assert "agent_shipped_rows_total" not in names  # there is no collector


AGENT_COUNTERS = [m.name for m in CATALOG if (m.scope, m.kind) == ("agent", "counter")]


@pytest.mark.parametrize("name", AGENT_COUNTERS)
def test_each_counter_of_a_fresh_agent_with_a_collector_is_born_at_zero(world, name):
    agent = world.agent(client=CollectorClient("https://127.0.0.1:9", "token"))
    values = [value for (metric, _), value in scrape(agent).items() if metric == name]
    assert values
    assert {0.0} == set(values)


def test_each_part_of_an_agent_and_each_cause_of_a_run_has_a_count_before_it_fails(world):
    world.rank().step(0)
    agent = world.agent()
    agent.cycle(0.0)
    counts = scrape(agent)
    assert {0.0} == {counts["agent_part_failures_total", (part,)] for part in PARTS}
    for name in ("train_skipped_steps_total", "train_rollbacks_total"):
        assert {0.0} == {counts[name, (cause, RUN)] for cause in ACTED_CAUSES}


def test_open_metrics_is_served_to_who_asks_for_it(busy):
    accept = "application/openmetrics-text; version=1.0.0"
    _, text, headers = get(busy, "/metrics", read_token(busy), Accept=accept)
    assert "openmetrics" in headers["Content-Type"]
    assert "train_step" in {family.name for family in parse_open(text)}


@pytest.mark.parametrize("token", [None, "", "wrong", "\xe9"])
def test_nobody_reads_metrics_without_the_token(busy, token):
    status, text, headers = get(busy, "/metrics", token)
    assert (401, "Bearer") == (status, headers["WWW-Authenticate"])
    assert "train" not in text


def test_health_is_open_and_says_nothing_of_a_run(busy):
    status, text, _ = get(busy, "/healthz")
    assert (200, "ok") == (status, json.loads(text)["status"])
    assert RUN not in text


def test_an_agent_whose_cycle_stands_still_is_not_healthy(world, busy):
    world.clock.now_ns += 31 * 10**9
    status, text, _ = get(busy, "/healthz")
    assert (503, "stalled") == (status, json.loads(text)["status"])
    assert 31.0 == scrape(busy)["agent_cycle_age_seconds", ()]


def test_other_paths_are_not_found(busy):
    assert 404 == get(busy, "/debug", read_token(busy))[0]


def test_the_address_is_written_into_the_run_directory_and_token_and_file_are_private(world, busy):
    for home in (world.vitals_dir / "agents" / NODE, world.spool().parent):
        info = msgspec.json.decode((home / "agent.json").read_bytes(), type=AgentInfo)
        assert (os.getpid(), busy.info.url) == (info.pid, info.url)
        assert 0o600 == stat.S_IMODE(Path(info.token_file).stat().st_mode)
        assert 0o600 == stat.S_IMODE((home / "agent.json").stat().st_mode)


def test_the_token_stays_the_same_over_restarts(world):
    first = world.agent()
    token = read_token(first)
    first.stop()
    assert token == read_token(world.agent())
    assert len(token) >= 40


def test_a_given_token_opens_every_agent_and_the_old_one_no_more(world):
    own = world.agent()
    old = read_token(own)
    own.stop()
    shared = world.agent(scrape_token="shared-by-the-collector")
    assert 200 == get(shared, "/metrics", "shared-by-the-collector")[0]
    assert 401 == get(shared, "/metrics", old)[0]


def test_a_port_that_is_taken_is_a_clear_error_and_the_folder_is_given_back(world):
    port = urlsplit(world.agent().info.url).port
    with pytest.raises(UsageError, match=f"--listen 127.0.0.1:{port} cannot be used"):
        world.agent(node="node-b", port=port)
    world.agent(node="node-b")


def test_a_failing_part_is_counted_on_the_page(world):
    world.rank().step(0)
    agent = world.agent()
    agent.sampling._host.sample = lambda: 1 / 0
    agent.cycle(0.0)
    assert 1 == scrape(agent)[("agent_part_failures_total", ("sampler.node",))]

import re
from collections import Counter

import pytest

from trainvitals import catalog
from trainvitals.catalog import CATALOG, find_metric, steps_schema

SUFFIX_OF_UNIT = {
    "seconds": ("_seconds", "_seconds_total"),
    "bytes": ("_bytes", "_bytes_total", "_bytes_per_second"),
    "joules": ("_joules_total",),
    "ratio": ("_ratio", "_factor"),
    "watts": ("_watts",),
    "celsius": ("_celsius",),
    "hertz": ("_hertz",),
    "tokens": ("tokens_total", "tokens_trained_total", "tokens_per_second", "_tokens"),
}
PREFIXES = ("train_", "gpu_", "node_", "agent_", "collector_")


def test_no_name_and_no_column_is_there_twice():
    names = Counter(metric.name for metric in CATALOG)
    columns = Counter((m.stream, m.column) for m in CATALOG if m.stream)
    assert [] == [name for name, count in (names + columns).items() if count > 1]


def test_every_name_is_a_prometheus_name_with_one_of_our_prefixes_and_its_unit():
    other = tuple(f"_{unit}" for unit in ("seconds", "bytes", "watts", "celsius", "hertz"))
    for metric in CATALOG:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.startswith(PREFIXES)
        if metric.unit:
            assert metric.name.endswith(SUFFIX_OF_UNIT[metric.unit]), metric.name
        else:
            assert not metric.name.endswith(other), metric.name


def test_counters_and_infos_are_named_as_such_and_nothing_else_is():
    for metric in CATALOG:
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "info") == metric.name.endswith("_info"), metric.name


def test_the_help_is_a_sentence():
    for metric in CATALOG:
        assert re.match(r"[A-Z0-9].*\.$", metric.help, re.S), metric.name


def test_no_metric_has_a_label_without_a_bound():
    unbounded = {"step", "attempt", "incarnation", "text", "message", "path", "pid", "user"}
    for metric in CATALOG:
        assert set() == unbounded & set(metric.labels), metric.name
        assert len(metric.labels) <= 4, metric.name


def test_a_metric_is_found_by_its_name_and_by_its_column():
    for metric in CATALOG:
        assert metric is find_metric(metric.name)
        if metric.stream:
            assert metric is find_metric(f"{metric.stream}.{metric.column}")


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError, match=r"steps\.nothing"):
        find_metric("steps.nothing")


def test_every_stream_begins_with_the_same_columns():
    schemas = (
        steps_schema(),
        catalog.LAYERS_SCHEMA,
        catalog.SCALARS_SCHEMA,
        catalog.GPU_SCHEMA,
        catalog.NODE_SCHEMA,
        catalog.PROCESS_SCHEMA,
    )
    assert {catalog.ROW_COLUMNS} == {tuple(schema.columns[:4]) for schema in schemas}


def test_every_column_of_a_metric_is_in_its_stream():
    schemas = {
        "steps": steps_schema(),
        "layers": catalog.LAYERS_SCHEMA,
        "gpu": catalog.GPU_SCHEMA,
        "node": catalog.NODE_SCHEMA,
        "process": catalog.PROCESS_SCHEMA,
    }
    for metric in CATALOG:
        if metric.stream:
            columns = {column.name: column.kind for column in schemas[metric.stream].columns}
            assert metric.dtype == columns[metric.column], metric.name


def test_each_parameter_group_after_the_first_has_a_learning_rate_of_its_own():
    more = [c.name for c in steps_schema(num_groups=3).columns[len(steps_schema().columns) :]]
    assert ["learning_rate.1", "learning_rate.2"] == more


def test_a_row_has_at_most_so_many_learning_rates_and_can_be_written():
    schema = steps_schema(num_groups=10_000)
    schema.check()
    rates = [c.name for c in schema.columns if c.name.startswith("learning_rate")]
    assert catalog.MAX_GROUPS == len(rates)

"""Whether SQL is one question to the offered views, and nothing else.

The engine's own parser says what a text is. Every table that the parsed tree names has to be an
offered view or a part of the question itself, and every function that gives a table one that makes
numbers: the others read files, show the catalogue, or tidy up lakes.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import duckdb

from trainvitals.errors import UsageError
from vitals_collector.numbers.lake_views import VIEWS

EXAMPLE = "SELECT step, loss FROM steps WHERE run_id = '...' ORDER BY step"
_TABLE_FUNCTIONS = ("range", "generate_series", "unnest")
_REFUSED_FUNCTIONS = (
    *("getenv", "getvariable", "current_setting", "which_secret"),  # this process's own
    *("query", "query_table", "json_serialize_plan", "json_execute_serialized_sql"),
    *("write_log", "nextval", "currval", "setseed", "sleep_ms", "pg_sleep"),
)
_EXPLAIN = re.compile(r"\A\s*EXPLAIN\s+", re.IGNORECASE)


def check(
    connection: duckdb.DuckDBPyConnection, sql: str, views: Collection[str], taken: Collection[str]
) -> None:
    """Refuse what is no question to the views.

    Args:
        connection: whose parser is asked.
        sql: what somebody wants to run.
        views: the names that are offered, in lower case.
        taken: names that the engine or an attached database gives to something, in lower case: a
            part of a question is not called so, for it would be looked up where it does not reach.

    Raises:
        UsageError: it is no SQL, more than one statement, not a SELECT or EXPLAIN of one, or it
            asks for more than the views.
    """
    parsed = _parsed(connection, _explained(sql))
    parts = {name.casefold() for name in _part_names(parsed)}
    shadowed = sorted(parts & set(taken))
    if shadowed:
        raise UsageError(
            f"WITH {shadowed[0]}: that name belongs to something else here",
            hint=f"give this part of the question another name, such as my_{shadowed[0]}",
        )
    for refused in _refused(parsed, {*views, *parts}):
        if (view := refused.removeprefix("the table ").casefold()) in VIEWS:
            raise UsageError(
                f"nothing was recorded here yet that {view} would show",
                hint=f"so far there are {', '.join(sorted(views))}",
            )
        raise UsageError(
            f"{refused} is not offered: it may read or change more than what runs recorded",
            hint=f"ask the views {', '.join(sorted(views))}, such as {EXAMPLE}",
        )


def _explained(sql: str) -> str:
    """Return the one SELECT that this is, or that it explains."""
    try:
        statements = duckdb.extract_statements(sql)
        if len(statements) == 1 and statements[0].type == duckdb.StatementType.EXPLAIN:
            sql = _EXPLAIN.sub("", sql)
            statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise UsageError(f"this is no SQL: {error}", hint=EXAMPLE) from None
    kinds = [statement.type for statement in statements]
    if kinds != [duckdb.StatementType.SELECT]:
        names = ", ".join(kind.name for kind in kinds) or "nothing"
        raise UsageError(
            f"only one SELECT, or EXPLAIN of one, is taken; this is {names}", hint=EXAMPLE
        )
    return sql


def _parsed(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    tree = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchone()
    parsed = json.loads(tree[0]) if tree is not None else {"error": True}
    if parsed["error"]:
        raise UsageError("only SELECT is taken; this is a command in the form of one", hint=EXAMPLE)
    return parsed


def _part_names(node: Any) -> Iterator[str]:
    """Yield the names that WITH gives to parts of the question."""
    for at in _nodes(node):
        for part in at.get("cte_map", {}).get("map", ()):
            yield str(part["key"])


def _refused(node: Any, names: Collection[str]) -> Iterator[str]:
    """Yield what the parsed question asks for and must not."""
    for at in _nodes(node):
        kind, function = at.get("type"), at.get("function_name")
        if kind == "BASE_TABLE":
            path = [str(at.get(f"{part}_name", "")) for part in ("catalog", "schema", "table")]
            if any(path[:2]) or path[2].casefold() not in names:
                yield f"the table {'.'.join(part for part in path if part)}"
        elif kind == "SHOW_REF":
            yield "DESCRIBE, SHOW or SUMMARIZE"
        elif kind == "TABLE_FUNCTION":
            name = str(at.get("function", {}).get("function_name", "")).casefold()
            if name not in _TABLE_FUNCTIONS:
                yield f"the function {name or 'of a table'}"
        elif function is not None and str(function).casefold() in _REFUSED_FUNCTIONS:
            yield f"the function {function}"


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a parsed question that has properties."""
    if isinstance(node, list):
        for part in node:
            yield from _nodes(part)
    elif isinstance(node, dict):
        yield node
        for part in node.values():
            yield from _nodes(part)

"""What it costs to live in this house, measured: `python -m tests.house.measures` prints a table.

Sizes and names are read from the sources. The four events are traced: one guarded step, one ingest
request to its answer, one alert from its row to its notifier, one series request. A *move* is a
call of a function of another file. Of a request counts what runs in any thread until it is
answered, but for the threads of ``BACKGROUND``: they poll, and no answer waits for them. What the
watchers do with rows is part of the alert, which is traced through all of it in one thread.
"""

import ast
import functools
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any, NamedTuple

import torch

import trainer_hooks
from tests.collector.alerting import Place, decision, started
from tests.collector.rows import RUN, Writer
from tests.support.served import Served
from trainvitals.detect.registry import KINDS
from trainvitals.metrics import LAYER_METRICS, STEP_METRICS
from vitals_collector.api.app import CollectorSettings
from vitals_collector.storage.store import open_data_store

ROOT = Path(__file__).parents[2]
SHIPPED = ("trainvitals", "trainer_hooks", "agent", "collector", "dashboard", "deploy", "plugins")
BACKGROUND = frozenset({"vitals-engine", "vitals-upkeep", "vitals-lease"})
"""Threads of a collector that work beside its requests."""
VAGUE = frozenset({"gone", "found", "one", "said", "known", "wanted", "some", "told"})
"""Names of locals that do not say what they hold."""


def sources() -> list[Path]:
    """Return the files that users install."""
    return sorted(path for room in SHIPPED for path in (ROOT / room).rglob("*.py"))


# ------------------------------------------------------------------------- sizes and names


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a source, which several measures walk."""
    return ast.parse(path.read_text())


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each local and parameter where it is bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def is_forwarder(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether all it does is to call another with nothing but its own arguments."""
    body = [node for node in function.body if not _is_docstring(node)]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    if isinstance(call, ast.Await):
        call = call.value
    if not isinstance(call, ast.Call):
        return False
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    values = [value.value if isinstance(value, ast.Starred) else value for value in values]
    arguments = function.args
    own = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    own |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
    return all(isinstance(value, ast.Name) and value.id in own for value in values)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def tables_of_kinds() -> set[str]:
    """Return the shipped files where kinds of findings are listed by hand, three or more at a time.

    Words that are also names of metrics do not count.
    """
    kinds = set(KINDS) - {metric.column for metric in (*STEP_METRICS, *LAYER_METRICS)}
    files: set[str] = set()
    for path in sources():
        for statement in parsed(path).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            words = {n.value for n in ast.walk(statement) if isinstance(n, ast.Constant)}
            if len(words & kinds) >= 3:
                files.add(str(path.relative_to(ROOT)))
    return files


def sizes() -> dict[str, float]:
    """Return what the shipped sources come to."""
    counts: Counter[str] = Counter()
    for path in sources():
        text = path.read_text()
        tree = parsed(path)
        counts["files"] += 1
        counts["lines"] += len(text.splitlines())
        counts["comment lines"] += sum(line.lstrip().startswith("#") for line in text.splitlines())
        counts["vague locals"] += sum(name in VAGUE for name in bindings(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts["functions"] += 1
                counts["forwarders"] += is_forwarder(node)
    per_thousand = 1000 * counts["vague locals"] / counts["lines"]
    return {**counts, "vague locals in 1,000 lines": round(per_thousand, 2)}


# -------------------------------------------------------------------------- files per question


class Declared(NamedTuple):
    """A question as its struct's source declares it."""

    name: str
    method: str
    path: str
    answer: str
    fields: frozenset[str]


def declared_questions(tree: ast.AST) -> Iterator[Declared]:
    """Yield the questions that a source declares: structs under ``@route(METHOD, PATH)``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not node.bases:
            continue
        base = node.bases[0]
        if not isinstance(base, ast.Subscript) or not node.decorator_list:
            continue
        kind = ast.unparse(base.value)
        if kind in ("Question", "PerRunQuestion"):
            (decorator,) = node.decorator_list
            assert isinstance(decorator, ast.Call)
            method, path = (str(ast.literal_eval(argument)) for argument in decorator.args)
            fields = (s.target for s in node.body if isinstance(s, ast.AnnAssign))
            names = {target.id for target in fields if isinstance(target, ast.Name)}
            if kind == "PerRunQuestion":
                names.add("run_id")
            yield Declared(node.name, method, path, ast.unparse(base.slice), frozenset(names))


class Restatable(NamedTuple):
    """What of a source may say anew what can be asked, for whichever question."""

    named: frozenset[str]
    """Structs that it declares, or names other than to import, to make or to annotate with them."""
    functions: tuple[tuple[frozenset[str], str], ...]
    """Arguments and answer of each."""
    texts: frozenset[tuple[str, str]]
    """Each literal, and the one method that it is a route of; "" for any."""


def restatable(tree: ast.AST) -> Restatable:
    """Return what of a source may restate a question."""
    nodes = list(ast.walk(tree))
    elsewhere = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    elsewhere |= {id(part) for node in _annotations(nodes) for part in ast.walk(node)}
    methods = dict(_routes(nodes))
    named: set[str] = set()
    functions: list[tuple[frozenset[str], str]] = []
    texts: set[tuple[str, str]] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            if id(node) not in elsewhere:
                named.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = frozenset(a.arg for a in [*node.args.args, *node.args.kwonlyargs])
            answer = "" if node.returns is None else ast.unparse(node.returns).strip("'")
            functions.append((arguments, answer))
        elif text := _text(node):
            texts.add((text, methods.get(id(node), "")))
    return Restatable(frozenset(named), tuple(functions), frozenset(texts))


def restates(source: Restatable, question: Declared) -> bool:
    """Return whether a source says anew what can be asked. To ask, and to pass it on, is not that.

    It does where it names the struct other than to import, to make or to annotate with it;
    where it has the question's path, or the end of it, as a text; or where a function that takes
    its fields, and at most what is asked besides, says that it returns its answer.
    """
    return (
        question.name in source.named
        or any(
            answer == question.answer
            and question.fields <= arguments
            and len(arguments - question.fields) <= 1
            for arguments, answer in source.functions
        )
        or any(
            method in ("", question.method.lower()) and _is_end_of(text, question.path)
            for text, method in source.texts
        )
    )


def _annotations(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _routes(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the paths in ``@router.get(PATH)`` and the like, by id, and their method."""
    for node in nodes:
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.args and node.func.attr in {"get", "post"}:
            yield id(node.args[0]), node.func.attr


def _text(node: ast.AST) -> str:
    """Return a literal with ``{}`` for what is put into it; "" where it is none."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"{\w+}", "{}", node.value)
    return ""


def _is_end_of(text: str, path: str) -> bool:
    last = path.rpartition("/")[2]
    whole = re.sub(r"{\w+}", "{}", path)
    return len(text) > 1 and text.startswith("/") and "{}" != last and whole.endswith(text)


def files_per_question() -> dict[str, list[str]]:
    """Return for each question the shipped files that a change of it has to touch."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
    trees = {file: parsed(ROOT / file) for file in texts}
    by_file = {file: restatable(tree) for file, tree in trees.items()}
    questions = [question for tree in trees.values() for question in declared_questions(tree)]
    return {
        question.name: [
            file
            for file, source in by_file.items()
            if _may_restate(texts[file], question) and restates(source, question)
        ]
        for question in questions
    }


def _may_restate(text: str, question: Declared) -> bool:
    """Return whether a source has a word of it, without which it says nothing of the question."""
    answer = max(re.findall(r"\w+", question.answer), key=len)
    fixed = [part for part in question.path.split("/") if not part.startswith("{")]
    words = question.name, answer, fixed[-1]
    return any(word in text for word in words)


class Hops(NamedTuple):
    """What one event went through."""

    files: frozenset[str]
    num_functions: int
    num_moves: int

    @property
    def num_files(self) -> int:
        """Files of ours that it ran code of."""
        return len(self.files)


class Tracer:
    """Notes the calls of our own functions, in every thread that began after ``installed``."""

    def __init__(self) -> None:
        self._is_on = False
        self._calls: list[tuple[str, str, str]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook this thread and those to come."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def of(self, event: Callable[[], Any]) -> Hops:
        """Run it and return what it went through."""
        self._calls.clear()
        self._is_on = True
        try:
            event()
        finally:
            self._is_on = False
        calls = list(self._calls)
        return Hops(
            files=frozenset(file for file, _, _ in calls),
            num_functions=len({(file, name) for file, name, _ in calls}),
            num_moves=sum(file != caller for file, _, caller in calls),
        )

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        is_counted = self._is_on and event == "call"
        if not is_counted or threading.current_thread().name in BACKGROUND:
            return
        file = _ours(frame)
        if file is not None and not frame.f_code.co_name.startswith("<"):
            caller = frame.f_back
            while caller is not None and _ours(caller) is None:
                caller = caller.f_back
            of_caller = "" if caller is None else _ours(caller) or ""
            self._calls.append((file, frame.f_code.co_qualname, of_caller))


_PREFIXES = tuple(f"{ROOT / room}/" for room in SHIPPED)


def _ours(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return name[len(str(ROOT)) + 1 :] if name.startswith(_PREFIXES) else None


def trace_step(folder: Path) -> Hops:
    """Trace a healthy step of a guarded loop, its data included, once everything is warm."""
    tracer = Tracer()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.utils.data.DataLoader(torch.randn(200, 4), batch_size=1)
    hops: list[Hops] = []
    with trainer_hooks.watch(
        model, optimizer, mode="heal", checkpoints=True, dir=folder
    ) as monitor, tracer.installed():  # fmt: skip
        for batch in monitor.batches(data):
            loss = model(batch).square().mean()
            loss.backward()
            hops.append(tracer.of(lambda loss=loss: monitor.step(loss, max_norm=1.0)))
            if len(hops) == 47:
                break
    return hops[-1]


def trace_requests(folder: Path) -> tuple[Hops, Hops]:
    """Trace one batch to its answer, and one series to its."""
    tracer, writer = Tracer(), Writer()
    with tracer.installed(), Served(CollectorSettings(data=folder / "data")) as served:
        bodies = [writer.steps(range(i, i + 10), loss=2.0) for i in range(0, 50, 10)]
        headers = {"Content-Type": "application/octet-stream"}
        ways = [("POST", "/v1/ingest", {"content": body, "headers": headers}) for body in bodies]
        asks = [("GET", f"/v1/runs/{RUN}/series?metric=steps.loss&points=100", {})] * 5
        ingest, series = (
            [tracer.of(lambda way=way: _request(served, way)) for way in each]
            for each in (ways, asks)
        )
    return _quietest(ingest), _quietest(series)


def _quietest(hops: list[Hops]) -> Hops:
    """Return what one of the later ones went through while the background did least."""
    return min(hops[1:], key=lambda event: event.num_files)


def _request(served: Served, way: tuple[str, str, dict[str, Any]]) -> None:
    method, path, how = way
    scope = "ingest" if method == "POST" else "read"
    reply = served.request(method, path, scope, **how)
    assert reply.status_code == 200, reply.text


def trace_alert(folder: Path) -> Hops:
    """Trace a rollback from the batch that says so to the notifier that is told of it."""
    tracer = Tracer()
    store = open_data_store(folder / "store")
    place, writer = Place(store), Writer()
    place.send(writer.steps(range(6)))
    place.look()
    raw = writer.events(started(), decision(action="rollback"))
    with tracer.installed():
        hops = tracer.of(lambda: (place.send(raw), place.look()))
    store.close()
    assert ["TrainingRolledBack firing"] == place.heard.words
    return hops


def events() -> dict[str, Hops]:
    """Return the hops of the four events."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ingest, series = trace_requests(folder)
        step, alert = trace_step(folder / "runs"), trace_alert(folder)
    return {"step": step, "ingest": ingest, "alert": alert, "series": series}


def main() -> None:
    """Print the table."""
    for name, value in sizes().items():
        print(f"{name}: {value:,}")
    print(f"files with tables of kinds: {', '.join(sorted(tables_of_kinds()))}")
    num_files = [len(files) for files in files_per_question().values()]
    print(f"files per question: {max(num_files)} at most, {mean(num_files):.1f} on average")
    for name, hops in events().items():
        print(
            f"{name}: {hops.num_files} files, {hops.num_functions} functions, "
            f"{hops.num_moves} moves"
        )


if __name__ == "__main__":
    main()

"""`muster.open` and `muster.open_async` against a real domain, which runs in a process of its own."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import muster
from muster import blocking
from muster.app import file_formats
from muster.client import history as client_history
from muster.client import messages, rows, synchronous
from muster.core import errors, health, topics
from muster.core import messages as messages_
from muster.manage import protocol
from muster.manage.adapters import plugins
from muster.message.client import producers
from muster.pipeline.history import data_files, delta, rollup_rows
from muster.pipeline.history import tables as history_tables
from tests.cli import driver

PARTS = [
    synchronous.Muster,
    synchronous.Contexts,
    synchronous.Queue,
    synchronous.Notify,
    synchronous.Fleet,
]
ASYNC_ONLY = ("wait_stopped",)
EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = driver.init(tmp_path_factory.mktemp("client") / "home")
    answer = driver.run("up", "--detach", home=home)
    assert answer.code == 0, answer.err
    yield home
    assert driver.run("down", home=home).code == 0


@pytest.fixture
def m(home: Path) -> Iterator[synchronous.Muster]:
    with muster.open(home=home) as opened:
        yield opened


def examples(actual: object, globs: dict[str, Any]) -> list[doctest.DocTest]:
    """Those of the object, and of the methods of a class, which may be those of another class."""
    finder, members = doctest.DocTestFinder(recurse=False), [actual]
    if inspect.isclass(actual):
        members += [member for _, member in inspect.getmembers(actual, inspect.isfunction)]
    tests = [test for member in members for test in finder.find(member, globs=globs)]
    return [test for test in tests if test.examples]


# Examples in the documentation


@pytest.mark.parametrize("part", PARTS, ids=lambda part: str(part.__name__))
def test_the_examples_of_the_blocking_objects_are_true(part: type, m: synchronous.Muster):
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    tests = examples(part, {"m": m, "muster": muster})
    assert tests
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize(
    "part", [muster.Message, muster.Rows, synchronous.open], ids=["Message", "Rows", "open"]
)
def test_the_examples_without_a_domain_or_with_its_address_are_true(
    part: object, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MUSTER_HOME", str(home))
    runner = doctest.DocTestRunner()
    for test in examples(part, {"muster": muster, "Message": muster.Message, "Rows": muster.Rows}):
        runner.run(test)
    assert runner.failures == 0
    assert runner.tries


async def test_the_examples_of_the_asynchronous_objects_are_true(home: Path):
    """The same examples with ``await``; what they print is compared in the blocking form."""
    async with muster.open_async(home=home) as m:
        for part in PARTS:
            asynchronous = part.__orig_bases__[0].__args__[0]  # type: ignore[attr-defined]
            scope = {"m": m, "muster": muster}
            for test in examples(asynchronous, scope):
                for example in test.examples:
                    code = compile(example.source, test.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    result = eval(code, scope)
                    if inspect.isawaitable(result):
                        await result


def test_each_method_of_a_blocking_object_is_that_of_the_asynchronous_one():
    """Same names, same parameters: only `__getitem__` and the like, which cannot be awaited, are added."""
    others = (synchronous.Alerts, synchronous.Reports, synchronous.Receiver, synchronous.History)
    for part in (*PARTS, *others):
        asynchronous = part.__orig_bases__[0].__args__[0]  # type: ignore[attr-defined]
        offered = {
            name: inspect.signature(member)
            for name, member in inspect.getmembers(asynchronous, inspect.isfunction)
            if not name.startswith("_") and not name.startswith("serve") and name not in ASYNC_ONLY
        }
        for name, signature in offered.items():
            mine = inspect.signature(getattr(part, name))
            assert list(mine.parameters) == list(signature.parameters), f"{part.__name__}.{name}"


# Messages


def test_a_publish_that_is_refused_raises(home: Path, tmp_path: Path):
    creds = tmp_path / "ann.creds"
    issued = driver.quick(
        *("creds", "issue", "ann", "--role", "user", "--topic", "orders/>", "--to", creds), home=home
    )
    assert issued.code == 0, issued.err
    running = driver.quick("status", "-o", "json", home=home).json()
    with muster.open(running["servers"][0], creds=creds) as ann:
        assert ann.identity == "ann"
        assert ann.home is None
        ann.publish("orders/eu", "17 boxes")
        with pytest.raises(errors.Forbidden, match="ann may not publish to secrets/eu"):
            ann.publish("secrets/eu", "17 boxes")
        ann.publish("orders/eu", b"18 boxes")


def test_messages_in_all_forms_and_patterns(m: synchronous.Muster):
    with m.subscribe("Course=CPS616") as by_tag, m.subscribe("Course/>", where="rooms > 1") as by_field:
        m.publish("Course/CPS616/Session/HPJava", {"rooms": 2}, headers={"kind": "move"})
        first, second = by_tag.next(timeout_s=WAIT_S), by_field.next(timeout_s=WAIT_S)
        assert first == second
        assert (first.topic, first.json(), first.headers["kind"]) == (
            "Course/CPS616/Session/HPJava",
            {"rooms": 2},
            "move",
        )
        m.publish("Course/CPS616", "moved")
        assert by_tag.next(timeout_s=WAIT_S).text == "moved"
        with pytest.raises(errors.TimedOut):
            by_field.next(timeout_s=0.05)
    with pytest.raises(errors.NotConnected):
        by_tag.next(timeout_s=1)
    with pytest.raises(errors.InvalidInput):
        messages.PublishedMessage("x", b"\xff").text  # noqa: B018
    with pytest.raises(errors.InvalidInput):
        m.publish("", "nowhere")
    with pytest.raises(errors.Unavailable, match="no subscriber on nothing"):
        m.request("nothing", "")


# Services


class Order(msgspec.Struct):
    boxes: int


def test_handlers_receive_what_their_parameter_declares(m: synchronous.Muster):
    seen: list[Any] = []
    arrived = threading.Semaphore(0)

    def keep(value: Any) -> None:
        seen.append(value)
        arrived.release()

    @m.on("kinds/>")
    def message_itself(message: muster.Message) -> None:
        keep(message.topic)

    @m.on("kinds/>")
    def data(content: bytes) -> None:
        keep(content)

    @m.on("kinds/>")
    async def order(order: Order) -> None:
        keep(order)

    m.publish("kinds/a", {"boxes": 3})
    for _ in range(3):
        assert arrived.acquire(timeout=WAIT_S)
    assert [value for value in seen if isinstance(value, Order)] == [Order(3)]
    assert {value for value in seen if not isinstance(value, Order)} == {"kinds/a", b'{"boxes":3}'}

    m.publish("kinds/b", "not an order")  # logged; the handlers continue
    m.publish("kinds/c", {"boxes": 4})
    for _ in range(5):
        assert arrived.acquire(timeout=WAIT_S)
    assert Order(4) in seen

    with pytest.raises(errors.InvalidInput, match="2 parameters"):

        @m.on("kinds/>")
        def two(a: str, b: str) -> None: ...


def test_a_blocking_call_in_a_coroutine_handler_is_refused_and_does_not_hang(m: synchronous.Muster):
    @m.on("nested")
    async def nested(text: str) -> str:
        try:
            m.publish("other", text)
        except errors.InvalidInput as error:
            return error.message
        return "published"

    assert "would never return" in m.request("nested", "x", timeout_s=WAIT_S).text

    @m.on("plain")
    def plain(text: str) -> str:
        m.publish("other", text)
        return "published"

    assert m.request("plain", "x", timeout_s=WAIT_S).text == "published"


def test_a_queued_message_whose_handler_fails_is_delivered_again(m: synchronous.Muster):
    tries: list[str] = []
    handled = threading.Event()

    @m.on("queue:work")
    def work(text: str) -> None:
        tries.append(text)
        if len(tries) == 1:
            raise RuntimeError("the first attempt fails")
        handled.set()

    m.queue("work").send("four chairs")
    assert handled.wait(WAIT_S)
    assert tries == ["four chairs"] * 2


def test_iterating_a_queue_removes_what_was_handled(m: synchronous.Muster):
    queue = m.queue("iterated")
    for number in range(3):
        queue.send({"number": number}, properties={"number": number})
    assert len(queue) == 3
    assert [message.body()["number"] for message in queue.browse(where="number > 0")] == [1, 2]
    with contextlib.suppress(RuntimeError):
        for message in queue:
            assert message.body() == {"number": 0}
            raise RuntimeError("this one is not handled")
    assert [message.body()["number"] for message in queue.messages(timeout_s=2)] == [0, 1, 2]
    assert len(queue) == 0
    with pytest.raises(errors.TimedOut, match="queue iterated"):
        queue.receive(timeout_s=0.05)
    assert "iterated" in m.queues().to_pandas()["queue"].tolist()
    with pytest.raises(errors.NotFound, match="no queue 'iterate'") as misspelt:
        list(m.queue("iterate").browse())
    assert misspelt.value.hint == "did you mean iterated?"


def test_a_decorated_receiver_gets_the_events_that_its_policy_accepts(m: synchronous.Muster):
    m.notify.define("Printer", floor=int, tags={"colour", "fast"})
    m.notify.define_event("maintenance", floor=int)
    received: list[Any] = []
    arrived = threading.Event()

    @m.receiver(model="Printer", state={"floor": 2}, policy="maintenance AND floor < 5")
    def printer(event: dict[str, Any]) -> None:
        received.append(event)
        arrived.set()

    m.notify.send("maintenance", {"floor": 9}, to="floor = 2")
    m.notify.send("maintenance", {"floor": 3}, to="floor = 2")
    assert arrived.wait(WAIT_S)
    assert received == [{"floor": 3}]
    listed = m.notify.receivers("floor = 2")
    assert [row.receiver for row in listed] == [f"{m.identity}/printer"]
    assert listed.complete
    with pytest.raises(errors.InvalidInput, match="cannot have the type"):
        m.notify.define("Broken", when=complex)


class Lamp(muster.Adapter):
    """Manages a value in memory."""

    state = health.HealthState.DOWN
    exists = False

    async def create(self, config: dict[str, Any], *, start: bool) -> None:
        self.exists, self.config = True, config
        if start:
            await self.do_start()

    async def put(self, config: dict[str, Any]) -> None:
        self.config = config

    async def delete(self) -> None:
        self.exists = False

    async def observe(self) -> protocol.ObservedState:
        return protocol.ObservedState(self.exists, self.state)

    async def resume(self, config: dict[str, Any]) -> None:
        self.config = config

    async def do_start(self) -> None:
        self.state = health.HealthState.UP

    async def do_stop(self) -> None:
        self.state = health.HealthState.DOWN

    async def do_colour(self) -> str:
        return str(self.config["colour"])


def test_a_program_is_an_agent_with_its_own_type_of_resources(m: synchronous.Muster):
    m.adapter("lamp", agent="lamps")(Lamp)
    entry = {"name": "lamp-1", "type": "lamp", "agent": "lamps", "config": {"colour": "green"}}
    m.fleet.apply({"resources": [entry]}, wait_s=WAIT_S)
    assert m.fleet.execute("lamp-1", "colour") == "green"
    assert m.fleet["lamp-1"].type == "lamp"
    assert "lamps" in m.fleet.agents().to_pandas()["name"].tolist()
    m.fleet.delete("lamp-1", wait_s=WAIT_S)
    with pytest.raises(KeyError):
        m.fleet["lamp-1"]
    assert "lamp" in file_formats.schema("manifest")["$defs"]["ManifestEntry"]["properties"]["type"]["enum"]
    with pytest.raises(errors.InvalidInput, match="not a subclass"):
        m.adapter("other")(dict)  # type: ignore[type-var]
    m.close()
    assert "lamp" not in plugins.names()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_example_of_a_service_works_and_ends_well_at_a_signal(
    number: signal.Signals, home: Path, m: synchronous.Muster
):
    program = EXAMPLES / "service.py"
    child = subprocess.Popen(
        [sys.executable, program], env=driver.environment(home), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "serving as admin; Ctrl-C ends it\n"
        assert m.request("prices/chair", timeout_s=WAIT_S).text == "17.5"
        with m.subscribe("orders/accepted") as accepted:
            m.queue("orders").send('{"item": "chair", "count": 4}')
            assert accepted.next(timeout_s=WAIT_S).json() == {"item": "chair", "price": 70.0}
        m.publish("orders/done", "")
        assert child.stdout.readline() == "Order(item='chair', count=4)\n"
        os.kill(child.pid, number)
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.communicate()


@pytest.mark.may_block(reason="the cells of a notebook run in the thread of its event loop")
async def test_the_notebook_works_as_in_a_kernel(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_HOME", str(home))
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4
    scope: dict[str, Any] = {}
    results: list[Any] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            *statements, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(statements, []), "cell", "exec"), scope)
            if isinstance(last, ast.Expr):
                results.append(eval(compile(ast.Expression(last.value), "cell", "eval"), scope))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), scope)
    assert results[1:3] == [("orders/eu", 17), "17.50"]
    assert results[3]["key"].tolist() == ["printers/2", "printers/3"]
    assert results[4] == 3
    assert results[5]["name"].tolist() == ["sleeper-1", "sleeper-2"]


async def test_decorators_of_the_asynchronous_form_and_run(home: Path):
    async with muster.open_async(home=home) as m:

        @m.on("sum")
        async def add(numbers: list[int]) -> dict[str, int]:
            return {"sum": sum(numbers)}

        # A request waits for handlers that are just being started.
        assert (await m.request("sum", [1, 2], timeout_s=WAIT_S)).json() == {"sum": 3}
        running = asyncio.create_task(m.run())
        m.stop()
        await running

        @m.on("wrong/**/topic/>/x")
        async def never() -> None: ...

        with pytest.raises(errors.MusterError):
            await m.publish("x", "y")


async def test_a_cancelled_publish_does_not_cancel_the_handlers_that_are_starting(home: Path):
    async with muster.open_async(home=home) as m:

        @m.on("cancelled/echo")
        async def echo(text: str) -> str:
            return text

        publishing = asyncio.create_task(m.publish("cancelled/other", ""))
        await asyncio.sleep(0)  # it waits for the handler
        publishing.cancel()
        await asyncio.wait((publishing,))
        replies = await asyncio.gather(*(m.request("cancelled/echo", n, timeout_s=WAIT_S) for n in "12"))
        assert [reply.text for reply in replies] == ["1", "2"]


async def test_a_deeply_nested_message_matches_no_predicate_and_ends_no_subscription(home: Path):
    async with muster.open_async(home=home) as m, await m.subscribe("nested", where="a = 1") as nested:
        await m.publish("nested", b"[" * 100_000)
        await m.publish("nested", {"a": 1})
        assert (await nested.next(timeout_s=WAIT_S)).json() == {"a": 1}
        with pytest.raises(errors.InvalidInput):
            messages.PublishedMessage("nested", b"[" * 100_000).json()


async def test_an_error_of_a_subscription_reaches_its_reader(home: Path):
    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    async with muster.open_async(home=home) as m, await m.subscribe("broken") as subscription:
        subscription._accepts = broken
        await m.publish("broken", "")
        with pytest.raises(errors.InvariantViolation, match="ZeroDivisionError"):
            await subscription.next(timeout_s=WAIT_S)


EXITING = """
import sys, muster
with muster.open() as m:
    @m.on("exit/{kind}")
    {define} leave(text: str) -> str:
        sys.exit(3)
    m.publish("exit/{kind}", "x")
    m.run()
"""
BLOCKED = """
import signal, time, muster
from muster.client import services
services.END_S = 0.1
with muster.open() as m:
    @m.on("blocked")
    def sleep(text: str) -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.01)  # until the program is in `run`
        print("called", flush=True)
        time.sleep(600)
    m.publish("blocked", "x")
    m.run()
"""


@pytest.mark.parametrize("define", ["def", "async def"])
def test_sys_exit_in_a_handler_ends_run_with_that_status(define: str, home: Path):
    program = EXITING.format(define=define, kind=define.partition(" ")[0])
    ended = subprocess.run([sys.executable, "-c", program], env=driver.environment(home), timeout=WAIT_S)
    assert ended.returncode == 3


def test_a_signal_ends_a_program_whose_handler_does_not_return(home: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], env=driver.environment(home), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "called\n"
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.communicate()


# Resources


def test_a_command_inside_a_resource(m: synchronous.Muster):
    entry = {"name": "shop", "type": "process", "agent": "local", "config": {"command": ["sleep", "1000"]}}
    m.fleet.apply({"resources": [entry]}, wait_s=WAIT_S)
    done = m.fleet.run_inside("shop", "sh", "-c", "cat; echo no >&2; exit 3", data=b"x" * 200_000)
    assert (done.exit_code, done.text, done.errors) == (3, "x" * 200_000, b"no\n")
    assert m.fleet.run_inside("shop", "true", data=b"unread").exit_code == 0
    with pytest.raises(errors.NotFound, match="shpo"):
        m.fleet.run_inside("shpo", "true")
    m.fleet.delete("shop", wait_s=WAIT_S)


# Finding the domain, and the objects themselves


def test_the_domain_is_found_as_the_command_line_finds_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MUSTER_HOME", "MUSTER_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.NotFound, match="is not a home"):
        muster.open()
    monkeypatch.setenv("MUSTER_HOME", str(home))
    with muster.open() as m:
        assert (m.identity, m.home) == ("admin", home)
    monkeypatch.delenv("MUSTER_HOME")
    added = driver.quick("profile", "add", "lab", "--home", home, home=tmp_path)
    assert added.code == 0, added.err
    with muster.open(profile="lab") as m:
        assert (m.identity, m.home) == ("admin", home)
    with pytest.raises(errors.NotFound, match="no profile 'other'"):
        muster.open(profile="other")
    stopped = driver.init(tmp_path / "stopped")
    with pytest.raises(errors.Unavailable, match="is not running"):
        muster.open(home=stopped)


@pytest.mark.parametrize("content", ["no certificate", None])
def test_a_certificate_authority_that_cannot_be_read_is_named(content: str | None, tmp_path: Path):
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_text(content)
    with pytest.raises(errors.MusterError, match=r"ca\.pem"):
        muster.open("tls://127.0.0.1:1", ca=ca)


def test_completion_and_help_show_what_there_is(m: synchronous.Muster):
    assert {"publish", "contexts", "fleet", "queue"} <= set(dir(m))
    assert not [name for name in dir(m) if name.startswith("_")]
    assert {"open", "open_async", "connect", "Adapter"} <= set(dir(muster))
    m.contexts["printers/9"] = "busy"
    assert "printers/9" in m.contexts._ipython_key_completions_()
    assert "printers/9" in list(m.contexts)
    assert repr(m) == "<muster domain, connected as admin: connected>"
    assert "servers/web" in (muster.__doc__ or "")
    assert "await" not in (synchronous.Contexts.__doc__ or "")
    assert [change.reason for change in m.contexts.history("printers/9")] == ["put"]
    with pytest.raises(KeyError):
        m.contexts["nothing"]
    with pytest.raises(KeyError):
        del m.contexts["nothing"]


def test_a_closed_object_raises_an_error(home: Path):
    m = muster.open(home=home)
    m.close()
    m.close()
    with pytest.raises(errors.NotConnected):
        m.publish("x", "y")


async def test_the_blocking_form_works_inside_a_running_event_loop(home: Path):
    """As in a notebook."""

    def cell() -> str:
        with muster.open(home=home) as m, m.subscribe("cells") as cells:
            m.publish("cells", "hello")
            return cells.next(timeout_s=WAIT_S).text

    assert await asyncio.to_thread(cell) == "hello"


# History


@pytest.fixture
def tables(tmp_path: Path) -> str:
    alert = messages_.Alert(
        rule="hot",
        about="node:web-7",
        severity=messages_.Severity.CRITICAL,
        state=messages_.AlertState.FIRING,
        since_ms=1_700_000_000_000,
        at_ms=1_700_000_000_000,
    )
    stored = [msgspec.structs.replace(alert, about=f"node:web-{number}") for number in range(3)]
    root = str(tmp_path / "history")
    table = delta.HistoryTable(root, history_tables.ALERTS)
    written = data_files.write(root, history_tables.ALERTS, rollup_rows.alert_rows(stored), "one")
    table.commit(written.files, ("test", 1))
    return root


def test_the_history_is_read_by_sql_and_by_predicates(m: synchronous.Muster, tables: str):
    history = m.history.at(tables)
    counted = history.sql("SELECT severity, count(*) AS alerts FROM alerts GROUP BY severity")
    assert counted[0] == {"severity": "critical", "alerts": 3}
    assert counted.to_pandas()["alerts"].tolist() == [3]
    assert not history.sql("SELECT * FROM alerts", limit=2).complete
    matches = history.search("about = 'node:web-1'", table="alerts", columns=["about", "rule"])
    assert matches.to_dicts() == [{"about": "node:web-1", "rule": "hot"}]
    assert len(history.search("rule = 'cold'", table="alerts")) == 0
    assert len(history.search("TRUE", table="alerts", limit=2)) == 2
    with pytest.raises(errors.InvalidInput, match="SELECT"):
        history.sql("DROP TABLE alerts")
    with pytest.raises(errors.NotFound, match="no history"):
        m.history.sql("SELECT 1")  # of this domain, whose pipeline never ran


def test_the_history_of_a_domain_elsewhere_needs_its_location():
    elsewhere = client_history.AsyncHistory(None)
    with pytest.raises(errors.InvalidInput, match="location"):
        asyncio.run(elsewhere.sql("SELECT 1"))


# Rows


def test_rows_become_data_frames_whatever_they_contain():
    class Row(msgspec.Struct, array_like=True):
        name: str
        value: Any
        labels: dict[str, str]

    mixed = rows.Rows(
        [Row("a", 1, {}), Row("b", "text", {"tier": "front"}), Row("c", None, {"zone": "east"})],
        complete=False,
    )
    table = mixed.to_arrow()
    assert table.column("value").to_pylist() == ["1", '"text"', None]
    assert table.column("name").to_pylist() == ["a", "b", "c"]
    assert mixed.to_pandas().shape == (3, 3)
    assert len(mixed[1:]) == 2
    assert "and there are more" in repr(mixed)
    assert "<td>b</td>" in mixed._repr_html_()
    assert rows.Rows([]).to_arrow().num_rows == 0
    assert "0 rows" in repr(rows.Rows([]))
    assert rows.Rows(table=table).to_arrow() is table
    assert rows.Rows(table=table)[0]["name"] == "a"
    assert rows.Rows(table=table)[::2].to_arrow().column("name").to_pylist() == ["a", "c"]


def test_a_field_at_its_default_is_present_in_nested_values_too():
    service = messages_.ServiceReport(name="db")
    report = messages_.NodeReport(machine="m", sequence=1, at_ms=1, period_s=1.0, services=(service,))
    (row,) = rows.Rows([report]).to_dicts()
    (inner,) = row["services"]
    assert set(inner) == set(service.__struct_fields__)


def test_a_missing_library_for_data_frames_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(errors.MissingDependency, match="polars is not installed"):
        rows.Rows([{"a": 1}]).to_polars()


def test_an_iterator_that_is_left_early_is_closed_in_the_loop():
    closed = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    loop = blocking.EventLoopThread()
    try:
        iterator = loop.iterate(items())
        assert next(iterator) == 1
        iterator.close()  # type: ignore[attr-defined]
        assert closed.is_set()
        assert list(loop.iterate(items())) == [1, 2]
    finally:
        loop.stop()


def test_an_interrupt_ends_an_iteration_and_closes_it():
    closed = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.get_running_loop().create_future()
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.set()

    loop = blocking.EventLoopThread()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(loop.iterate(items()))
        assert closed.is_set()
    finally:
        loop.stop()


@pytest.mark.parametrize("topic", [3, None, b"orders"])
def test_a_topic_that_is_no_text_is_refused_in_words(topic: Any):
    for kind in (topics.Topic, topics.TopicPattern):
        with pytest.raises(errors.InvalidInput, match="a topic is text, not"):
            kind.parse(topic)


def test_a_body_that_no_message_has_is_refused_in_words():
    with pytest.raises(errors.InvalidInput, match=r"a body is text, bytes, .*, not object"):
        producers.to_message(object())  # type: ignore[arg-type]

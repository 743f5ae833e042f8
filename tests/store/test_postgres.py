"""PostgreSQL: passwords, restarts, connections that break during a commit."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec
import psycopg
import pytest

from muster.core import errors
from muster.store import api, database
from muster.store.postgres import connections, statements
from muster.testing.eventually import eventually
from tests import postgres


@pytest.fixture
def settings() -> api.StoreOptions:
    return api.StoreOptions(namespace=f"t_{secrets.token_hex(6)}")


@pytest.fixture
def own_server(postgres_server: postgres.PostgresServer) -> Iterator[postgres.PostgresServer]:
    """One that a test may stop. (The shared one shows that PostgreSQL can be started here at all.)"""
    with postgres.running() as server:
        yield server


def url_of(server: postgres.PostgresServer, database: str) -> str:
    return f"{server.url.rpartition('/')[0]}/{database}"


async def sql(server: postgres.PostgresServer, statement: str) -> None:
    async with await psycopg.AsyncConnection.connect(
        server.url, password=server.password, autocommit=True
    ) as connection:
        await connection.execute(statement.encode())


async def can_put(store: database.Store) -> bool:
    with contextlib.suppress(errors.Unavailable):
        await store.put("a", "k", b"2")
        return True
    return False


# -- opening -------------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_refused_and_not_repeated(postgres_server, settings):
    with pytest.raises(errors.Unauthorized) as caught:
        await database.open(postgres_server.url, settings=settings, password="wrong-as-can-be")
    assert "wrong-as-can-be" not in str(caught.value)
    with pytest.raises(errors.Unauthorized):
        await database.open(postgres_server.url, settings=settings)


async def test_no_server_and_no_database(postgres_server, settings):
    with pytest.raises(errors.NotConnected, match="cannot be reached"):
        await database.open("postgresql://postgres@127.0.0.1:1/postgres", settings=settings)
    with pytest.raises(errors.NotFound, match="nowhere"):
        await database.open(
            url_of(postgres_server, "nowhere"),
            settings=settings,
            password=postgres_server.password,
        )
    with pytest.raises(errors.InvalidInput, match="no-such-option"):
        await database.open(f"{postgres_server.url}?no-such-option=1", settings=settings)


@pytest.mark.parametrize("namespace", ["", "Muster", "1st", "a b", 'x"; DROP SCHEMA public; --', "x" * 41])
async def test_a_bad_namespace_is_refused(postgres_server, namespace):
    with pytest.raises(errors.InvalidInput, match="namespace"):
        await database.open(postgres_server.url, settings=api.StoreOptions(namespace=namespace))


async def test_a_user_without_the_right_to_create_a_schema_gets_an_error(postgres_server, settings):
    name = f"guest_{secrets.token_hex(4)}"
    await sql(postgres_server, f"CREATE ROLE {name} LOGIN PASSWORD 'guest'")
    with pytest.raises(errors.Forbidden):
        await database.open(
            postgres_server.url.replace("postgres@", f"{name}@"), settings=settings, password="guest"
        )


async def test_a_schema_of_something_else_and_one_of_a_newer_muster(postgres_server, settings):
    await sql(
        postgres_server, f"CREATE SCHEMA {settings.namespace}; CREATE TABLE {settings.namespace}.x (y int)"
    )
    with pytest.raises(api.StoreCorrupt, match="something else"):
        await database.open(postgres_server.url, settings=settings, password=postgres_server.password)
    newer = msgspec.structs.replace(settings, namespace=f"{settings.namespace}_newer")
    await (
        await database.open(postgres_server.url, settings=newer, password=postgres_server.password)
    ).close()
    await sql(postgres_server, f"UPDATE {newer.namespace}.head SET schema_version = 99")
    with pytest.raises(errors.Refused, match="newer Muster"):
        await database.open(postgres_server.url, settings=newer, password=postgres_server.password)


async def test_an_older_schema_is_migrated(postgres_server, settings, monkeypatch):
    await (
        await database.open(postgres_server.url, settings=settings, password=postgres_server.password)
    ).close()
    monkeypatch.setitem(statements.MIGRATIONS, statements.SCHEMA_VERSION, ("CREATE TABLE more (x int)",))
    monkeypatch.setattr(statements, "SCHEMA_VERSION", statements.SCHEMA_VERSION + 1)
    for _ in range(2):
        await (
            await database.open(postgres_server.url, settings=settings, password=postgres_server.password)
        ).close()
    await sql(postgres_server, f"SELECT x FROM {settings.namespace}.more")


async def test_many_processes_may_make_the_store_at_once(postgres_server, settings):
    stores = await asyncio.gather(
        *(
            database.open(postgres_server.url, settings=settings, password=postgres_server.password)
            for _ in range(5)
        )
    )
    assert len({store.identity for store in stores}) == 1
    for store in stores:
        await store.close()


async def test_a_database_without_an_encoding(postgres_server, settings):
    name = f"ascii_{secrets.token_hex(4)}"
    await sql(postgres_server, f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    url = url_of(postgres_server, name)
    async with await database.open(url, settings=settings, password=postgres_server.password) as store:
        version = await store.put("a", "é\0", b"1", expected_version=api.ABSENT)
        await store.put("a", "é\0", b"2", expected_version=version)
        assert [change.key for change in (await store.changes(0, collection="a")).changes] == ["é\0", "é\0"]


async def test_a_process_that_stops_in_a_batch_does_not_stop_the_others_for_ever(postgres_server, settings):
    limits = msgspec.structs.replace(settings, busy_timeout_s=0.2)
    async with await database.open(
        postgres_server.url, settings=limits, password=postgres_server.password
    ) as store:
        other = await psycopg.AsyncConnection.connect(postgres_server.url, password=postgres_server.password)
        async with other:
            await other.execute("SET idle_in_transaction_session_timeout = 600")
            await other.execute(f"SELECT * FROM {settings.namespace}.head FOR UPDATE")
            with pytest.raises(errors.Unavailable, match="lock"):
                await store.put("a", "k", b"1")

            await eventually(lambda: can_put(store))
            await other.close()


# -- a server that goes away ---------------------------------------------------------------------------------


async def test_a_restarted_server_is_not_noticed_between_calls(own_server, settings):
    async with await database.open(own_server.url, settings=settings, password=own_server.password) as store:
        await store.put("a", "k", b"1")
        assert await store.get("a", "k")
        await asyncio.to_thread(own_server.stop)
        await asyncio.to_thread(own_server.start)
        await store.put("a", "k", b"2")
        assert [record.value for record in await store.scan("a")] == [b"2"]


async def test_a_server_that_crashes_under_use_loses_nothing_acknowledged(own_server, settings):
    acknowledged: dict[str, bytes] = {}
    refused = asyncio.Event()
    stop = False

    async def write(store: database.Store, name: str) -> None:
        number = 0
        while not stop:
            number += 1
            try:
                await store.put("a", name, str(number).encode())
            except errors.Unavailable:
                refused.set()
                await asyncio.sleep(0.01)  # pace
            else:
                acknowledged[name] = str(number).encode()

    seen: dict[str, bytes | None] = {}

    async def follow(store: database.Store) -> None:
        async for changes in store.watch(after=0, collection="a"):
            seen.update((change.key, change.value) for change in changes)

    quick = msgspec.structs.replace(settings, busy_timeout_s=1.0, poll_s=0.05)
    async with await database.open(own_server.url, settings=quick, password=own_server.password) as store:
        tasks = [asyncio.create_task(write(store, str(i))) for i in range(10)]
        follower = asyncio.create_task(follow(store))
        await eventually(lambda: len(acknowledged) == 10)
        await asyncio.to_thread(own_server.stop, signal.SIGQUIT)
        async with asyncio.timeout(30):
            await refused.wait()
        before = dict(acknowledged)
        await asyncio.to_thread(own_server.start)
        actual = {record.key: record.value for record in await eventually(lambda: _scan(store)) or []}
        assert all(int(actual[name]) >= int(value) for name, value in before.items())
        await eventually(lambda: all(acknowledged[name] != before[name] for name in before))
        stop = True
        await asyncio.gather(*tasks)
        now = {record.key: record.value for record in await store.scan("a")}
        assert now == acknowledged
        await eventually(lambda: seen == now)
    await follower


async def _scan(store: database.Store) -> list[api.StoreRecord] | None:
    with contextlib.suppress(errors.Unavailable):
        return await store.scan("a")
    return None


class DatabaseProxy:
    """Stands between a store and its server, and misbehaves from the next COMMIT on."""

    def __init__(self, server: postgres.PostgresServer) -> None:
        self.plan = "pass"  # or: lose the commit, lose the answer, vanish, freeze
        self.silent = False  # from the next request on, as a host that fell off the network
        self._server = server
        self._gone = False
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            try:
                yield f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&gssencmode=disable"
            finally:
                listener.close()  # from Python 3.12 on, its end waits for those who are connected
                for task in self._connections:
                    task.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, there_writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        answers = asyncio.create_task(self._answer(there, writer))
        try:
            while (data := await reader.read(65536)) and not self._gone:
                if self.silent:
                    await asyncio.Event().wait()
                if b"COMMIT" in data and self.plan != "pass":
                    await self._misbehave(data, there_writer, answers)
                    break
                there_writer.write(data)
        except ConnectionError:
            return
        finally:
            answers.cancel()
            writer.close()
            there_writer.close()

    async def _misbehave(self, data: bytes, there: asyncio.StreamWriter, answers: asyncio.Task[None]) -> None:
        if self.plan == "freeze":
            await asyncio.Event().wait()
        self._gone = self.plan == "vanish"
        if self.plan != "lose the commit":
            answers.cancel()
            there.write(data)
            # The server works through its messages in order: when it hangs up, it has committed.
            there.write(b"X\0\0\0\4")
            await there.drain()
        self.plan = "pass"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()


async def test_a_commit_whose_answer_is_lost_counts_once(postgres_server, settings):
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(url, settings=settings, password=postgres_server.password) as store,
    ):
        proxy.plan = "lose the answer"
        version = await store.put("a", "k", b"1")
        assert proxy.plan != "lose the answer"
        assert await store.get("a", "k") == api.StoreRecord("k", b"1", version)
        assert len((await store.changes(0)).changes) == 1


async def test_a_commit_that_was_lost_is_refused(postgres_server, settings):
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(url, settings=settings, password=postgres_server.password) as store,
    ):
        proxy.plan = "lose the commit"
        with pytest.raises(errors.NotConnected):
            await store.put("a", "k", b"1")
        assert await store.get("a", "k") is None
        await store.put("a", "k", b"2")


async def test_a_commit_with_an_unknown_outcome_is_reported_as_such(postgres_server, settings):
    quick = msgspec.structs.replace(settings, busy_timeout_s=0.3)
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(url, settings=quick, password=postgres_server.password) as store,
    ):
        proxy.plan = "vanish"
        with pytest.raises(api.CommitOutcomeUnknown, match="broke while committing"):
            await store.put("a", "k", b"1")
        proxy._gone = False
        assert [record.value for record in await store.scan("a")] == [b"1"]


@pytest.mark.parametrize(("answer_s", "busy_s"), [(1.0, 1.0), (30.0, 0.3)], ids=["by us", "by the server"])
async def test_a_server_that_does_not_answer_is_given_up(postgres_server, settings, answer_s, busy_s):
    """Whichever ends a silent transaction first; the server does after two busy timeouts."""
    quick = msgspec.structs.replace(settings, answer_timeout_s=answer_s, busy_timeout_s=busy_s)
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(url, settings=quick, password=postgres_server.password) as store,
    ):
        proxy.plan = "freeze"
        with pytest.raises((errors.TimedOut, api.CommitOutcomeUnknown)):
            await store.put("a", "k", b"1")
        proxy.plan = "pass"
        await eventually(lambda: can_put(store))  # when the server has given up on the one that is frozen
        assert [change.value for change in (await store.changes(0)).changes] == [b"2"]


@pytest.mark.parametrize("others", [0, 3], ids=["alone", "with other writers"])
async def test_a_commit_that_a_crash_took_is_not_acknowledged(own_server, settings, monkeypatch, others):
    """After the crash, other transactions get the transaction ids and the positions that the lost one had."""
    carry_out = statements.execute_plan
    crashed = False

    async def crash_after(connection, plan, *rest):
        nonlocal crashed
        await carry_out(connection, plan, *rest)
        if not crashed:
            crashed = True
            await asyncio.to_thread(own_server.stop, signal.SIGQUIT)
            await asyncio.to_thread(own_server.start)
            for number in range(others):
                await other.put("a", f"other {number}", b"1")

    async with (
        await database.open(own_server.url, settings=settings, password=own_server.password) as store,
        await database.open(own_server.url, settings=settings, password=own_server.password) as other,
    ):
        monkeypatch.setattr(statements, "execute_plan", crash_after)
        with pytest.raises(errors.NotConnected):
            await store.put("a", "mine", b"1")
        assert await store.get("a", "mine") is None
        await store.put("a", "mine", b"2")
        assert len(await other.scan("a")) == others + 1


async def test_a_batch_is_recognised_by_its_token(postgres_server, settings):
    short = msgspec.structs.replace(settings, history_changes_max=2)
    async with await database.open(
        postgres_server.url, settings=short, password=postgres_server.password
    ) as store:
        version = await store.put("a", "k", b"1")
        async with await psycopg.AsyncConnection.connect(
            postgres_server.url, password=postgres_server.password, autocommit=True
        ) as connection:
            await connection.execute(f"SET search_path = {settings.namespace}".encode())
            ((token,),) = await statements.rows(connection, "SELECT batch FROM change")
            assert len(token) == 16
            assert await statements.was_committed(connection, version, token) is True
            assert await statements.was_committed(connection, version, b"another") is False
            assert await statements.was_committed(connection, version + 1, token) is False
            for number in range(2):
                await store.put("a", f"later {number}", b"1")
            assert await statements.was_committed(connection, version, token) is None


async def test_a_read_ends_in_time_when_the_server_falls_silent(postgres_server, settings):
    quick = msgspec.structs.replace(settings, answer_timeout_s=0.3, pool=1)
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(url, settings=quick, password=postgres_server.password) as store,
    ):
        await store.get("a", "k")
        proxy.silent = True
        async with asyncio.timeout(2):
            with pytest.raises(errors.TimedOut):  # while the idle connection is tried
                await store.get("a", "k")
        proxy.silent = False
        async with asyncio.timeout(2), store.snapshot():
            proxy.silent = True  # while the snapshot's transaction is ended
        proxy.silent = False
        assert await store.get("a", "k") is None


async def test_a_server_that_falls_silent_as_a_connection_begins_is_given_up(
    postgres_server, settings, monkeypatch
):
    quick = msgspec.structs.replace(settings, answer_timeout_s=0.3, pool=2)
    proxy = DatabaseProxy(postgres_server)
    connect = connections._Connection.connect

    async def fall_silent(*arguments, **options):
        made = await connect(*arguments, **options)
        proxy.silent = True  # before the settings of the connection are sent
        return made

    async with (
        proxy.listening() as url,
        await database.open(url, settings=quick, password=postgres_server.password) as store,
        store.snapshot(),  # so that another reader needs a new connection
    ):
        monkeypatch.setattr(connections._Connection, "connect", fall_silent)
        async with asyncio.timeout(5):
            with pytest.raises(errors.TimedOut):
                await store.get("a", "k")
        monkeypatch.undo()
        proxy.silent = False
        assert await store.get("a", "k") is None


async def test_a_cancelled_read_does_not_wait_for_a_silent_server(postgres_server, settings):
    proxy = DatabaseProxy(postgres_server)
    async with (
        proxy.listening() as url,
        await database.open(
            url, settings=msgspec.structs.replace(settings, pool=1), password=postgres_server.password
        ) as store,
    ):
        await store.get("a", "k")
        proxy.silent = True
        async with asyncio.timeout(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.get("a", "k"), 0.1)
        proxy.silent = False
        assert await store.get("a", "k") is None

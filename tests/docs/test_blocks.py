"""Every block of the README and of the pages in docs/ is tried, in order, as a newcomer would."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.bus.brokers import broker as brokers
from tests.docs import blocks

PATHS = [
    blocks.ROOT / "README.md",
    *sorted((blocks.ROOT / "docs").glob("*.md")),
    *sorted((blocks.ROOT / "docs" / "guides").glob("*.md")),
]
DEMO = "$ make demo"  # two minutes; tests/loop/test_outbreak.py runs its scenario
PAGES = [pytest.param(path.read_text(), id=path.name) for path in PATHS]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_run(page: str):
    assert blocks.faults(page) == []


@pytest.mark.timeout(420)
@pytest.mark.parametrize("page", PAGES)
async def test_every_block_does_what_it_shows(page: str, broker: brokers.Broker, tmp_path: Path):
    async with blocks.Reader(tmp_path, broker.url) as reader:
        for block in blocks.blocks(page):
            if block.text.strip().partition("\n")[0] != DEMO:
                await reader.try_(block)


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_the_demo_prints_what_the_readme_shows(broker: brokers.Broker, tmp_path: Path):
    (block,) = [block for block in blocks.blocks(PATHS[0].read_text()) if DEMO in block.text]
    async with blocks.Reader(tmp_path, broker.url) as reader:
        await reader.try_(block)


def test_the_figures_of_the_demo_are_those_of_the_stored_run():
    (block,) = [block for block in blocks.blocks(PATHS[0].read_text()) if DEMO in block.text]
    assert block.measured
    ((_, shown),) = blocks.steps(block.text)
    stored = (blocks.ROOT / "docs" / "pictures" / "demo.txt").read_text().splitlines()
    assert blocks.matches(shown, stored)


# The reader itself


def console(text: str) -> blocks.Block:
    return blocks.Block("console", text, 1)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["up: 3 brokers"], ["up: 3 brokers"], True),
        (["up: … brokers"], ["up: 3 brokers"], True),
        (["up: …"], ["down: 3"], False),
        (["first", "…", "last"], ["first", "a", "b", "last"], True),
        (["first", "…", "last"], ["first", "last"], True),
        (["first", "last"], ["first", "a", "last"], False),
        (["first"], ["first", "more"], False),
        (["f(x) = [1]"], ["f(x) = [1]"], True),
        (["took 0.5 s"], ["took 1.5 s"], False),
    ],
)
def test_what_counts_as_the_same(shown: list[str], printed: list[str], same: bool):
    assert blocks.matches(shown, printed) is same


def test_figures_of_a_measured_block_stand_for_any():
    assert blocks.matches(["took  0.5 s, 1,000 times"], ["took 12 s, 3 times"], measured=True)
    assert not blocks.matches(["took 0.5 s"], ["lasted 0.5 s"], measured=True)
    (block,) = blocks.blocks('```yaml title="a.yaml" measured\n{}\n```\n')
    assert (block.measured, block.title, block.text) == (True, "a.yaml", "{}\n")


async def test_commands_share_a_folder_and_what_differs_is_shown(tmp_path: Path):
    async with blocks.Reader(tmp_path) as reader:
        await reader.try_(console("$ echo hello > file\n$ cat file\nhello\n$ echo a \\\n    | tr a b\nb\n"))
        with pytest.raises(AssertionError, match=r"(?s)printed something else.*\| goodbye.*\| hello"):
            await reader.try_(console("$ cat file\ngoodbye\n"))
        with pytest.raises(AssertionError, match="exit code 3"):
            await reader.try_(console("$ exit 3\n"))


def test_here_documents_are_part_of_the_command():
    assert blocks.steps("$ cat > file <<'END'\n$ not a command\nEND\n$ cat file\n$ not…\n") == [
        ("cat > file <<'END'\n$ not a command\nEND", []),
        ("cat file", []),
        ("not…", []),
    ]


async def test_a_continuous_command_is_interrupted_at_the_end(tmp_path: Path):
    loop = "trap 'echo bye > said; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    async with blocks.Reader(tmp_path) as reader:
        await reader.try_(console(f"$ {loop}\nready\n"))
        await reader.try_(console("$ echo next\nnext\n"))
    assert (reader.folder / "said").read_text() == "bye\n"


async def test_the_muster_command_is_there(tmp_path: Path):
    async with blocks.Reader(tmp_path) as reader:
        await reader.try_(console("$ muster version -o json | head -1\n{\n"))


async def test_python_blocks_find_a_broker(broker: brokers.Broker, tmp_path: Path):
    program = """
import muster

async with await muster.connect() as near, await muster.connect("nats://127.0.0.1:4222") as far:
    news = await far.subscribe("news")
    await near.publish("news", b"hello")
    assert (await news.next(timeout_s=30)).data == b"hello"
"""
    async with blocks.Reader(tmp_path, broker.url) as reader:
        await reader.try_(blocks.Block("python", program, 1))
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            await reader.try_(blocks.Block("python", "1 / 0", 2))


def test_blocks_that_are_not_run_are_detected():
    text = "```bash\nls\n```\n\n    $ ls\n\n```text\npicture\n```\n"
    assert [fault.split(":")[0] for fault in blocks.faults(text)] == ["line 1", "line 5"]


async def test_a_command_whose_output_is_left_out_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks, "STAYS_S", 0.01)
    async with blocks.Reader(tmp_path, "nats://127.0.0.1:9") as reader:
        await reader.try_(console("$ sleep 0.3; touch made\n…\n$ ls made\nmade\n"))

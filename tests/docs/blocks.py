"""The fenced blocks of a text, and a runner that executes them in order.

    ```console          `$ command` lines, each followed by what it prints: `…` stands for anything within a
                        line, and alone on a line for any lines. What prints nothing here may print anything.
                        `# until Ctrl-C` marks a command that goes on.
                        A command ends with its line, unless that ends in a backslash or begins a
                        here-document.
                        A command that goes on after it has printed what is shown is left running, and is
                        interrupted (Ctrl-C) at the end.
    ```console measured the same, and each number stands for any number: it is from a run that is kept
    ```python           a program, which may await at its top level; it finds a broker at the usual address
    ```yaml, ```toml    is well-formed
    ```yaml title="F"   is well-formed, and the file F of the reader

All blocks of a text share one folder, in the reader's home.  Where a text says port 4222 or 8100,
the reader has a free one, so that it does not matter what else runs on the machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from muster.testing import child_process

ROOT = Path(__file__).parents[2]
RUN = ("console", "python", "yaml", "toml")
SHOWN = ("text", "mermaid")  # pictures and answers, not things to type

USUAL_PORT, WEB_PORT = "4222", "8100"
COMMAND_S_MAX = 60.0
MAKE_S_MAX = 280.0  # the demo plays a whole story
FLEET = "300"  # and with a small fleet, a short one
STAYS_S = 1.5  # a command that goes on for so long after it has printed what is shown is left running
STAYS = "# until Ctrl-C"  # after a command that goes on while the next ones are typed
ENDS_S_MAX = 20.0

_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"/]+)"')
_NUMBER = re.compile(r"\d[\d,.]*")
_UNFINISHED = re.compile(r"\\\Z|<<'?(\w+)\b(?!.*^\1$)", re.MULTILINE | re.DOTALL)  # …\ or a here-document
_USUAL_ADDRESS = re.compile(r"nats://(?:localhost|127\.0\.0\.1)(?::\d+)?")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    measured: bool = False
    title: str = ""


def blocks(markdown: str) -> list[Block]:
    return [
        Block(
            match[1],
            match[3],
            markdown.count("\n", 0, match.start()) + 1,
            measured="measured" in match[2].split(),
            title=title[1] if (title := _TITLE.search(match[2])) else "",
        )
        for match in _FENCE.finditer(markdown)
    ]


def faults(markdown: str) -> list[str]:
    """Blocks that are not run."""
    unknown = [
        f"line {block.line}: a ```{block.language} block is not run; {RUN} are, and {SHOWN} need not be"
        for block in blocks(markdown)
        if block.language not in RUN + SHOWN
    ]
    outside = [
        f"line {number}: a command outside a ```console block is not run"
        for number, line in enumerate(markdown.splitlines(), 1)
        if re.match(r"(    |\t)\$ ", line)
    ]
    return unknown + outside


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Commands, each with the lines shown under it."""
    collected: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if collected and not collected[-1][1] and _UNFINISHED.search(collected[-1][0]):
            collected[-1] = (f"{collected[-1][0]}\n{line}", [])
        elif line.startswith("$ "):
            collected.append((line[2:], []))
        elif collected:
            collected[-1][1].append(line.rstrip())
        else:
            raise AssertionError(f"a console block begins with a line that is no command: {line!r}")
    return collected


def matches(shown: list[str], printed: list[str], *, measured: bool = False) -> bool:
    def without_figures(line: str) -> str:
        return " ".join(_NUMBER.sub("0", line).split()) if measured else line.rstrip()

    pattern = "".join(
        r"(?:[^\n]*\n)*?"
        if line.strip() == "…"
        else re.escape(without_figures(line)).replace("…", "[^\n]*") + "\n"
        for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{without_figures(line)}\n" for line in printed)) is not None


class Reader:
    """Tries the blocks of one text. ``broker_url`` is where Python blocks find a broker; ``python``: that of
    the environment in which Muster is installed."""

    def __init__(self, folder: Path, broker_url: str = "", *, python: str | Path = sys.executable) -> None:
        self._broker_url = broker_url
        self._python = python
        self._going: list[child_process.ChildProcess] = []
        programs = folder / "programs"
        programs.mkdir()
        for name, arguments in (("muster", "-m muster"), ("pytest", "-m pytest"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {python} {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        self._programs = programs
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
            self._ports = {USUAL_PORT: str(free.getsockname()[1]), WEB_PORT: str(other.getsockname()[1])}
        self.home = folder / "home"
        self.folder = self.home / "new"
        self.folder.mkdir(parents=True)
        self._env = {
            "HOME": str(self.home),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "110",
            "FLEET": FLEET,
            "MUSTER_BUS__PORT": self._ports[USUAL_PORT],
            "PYTEST_PLUGINS": "muster.testing.plugin",  # which an installed Muster brings by itself
        }

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Ctrl-C for whatever still goes on; it has to end well."""
        going, self._going = self._going, []
        try:
            for child in reversed(going):
                if child.exit_code is None:
                    os.killpg(child.pid, signal.SIGINT)
                code = await child.wait(timeout_s=ENDS_S_MAX)
                assert code in (0, 130, -signal.SIGINT), f"{child.name} ended with {code}; {child.tail()}"
        finally:
            for child in going:
                await child.close()

    async def try_(self, block: Block) -> None:
        match block.language:
            case "console":
                for command, shown in steps(self._with_free_ports(block.text)):
                    await self._type(command, shown, measured=block.measured)
            case "python":
                await self._run_python(block)
            case "yaml":
                list(yaml.safe_load_all(block.text))
                if block.title:
                    (self.folder / block.title).write_text(self._with_free_ports(block.text))
            case "toml":
                tomllib.loads(block.text)
            case _:
                pass

    def _with_free_ports(self, text: str) -> str:
        for usual, free in self._ports.items():
            text = text.replace(usual, free)
        return text

    async def _type(self, text: str, shown: list[str], *, measured: bool = False) -> None:
        from_root = text.startswith("make ")
        if from_root and not (ROOT / ".venv" / ".base").exists():
            # These tests do not run in the environment that make sets up: the rest of the recipe does.
            text = text.replace("make", f"make -o setup -o .venv/.spark BIN={self._programs}", 1)
        child = await child_process.start(
            "bash",
            "-c",
            f"exec </dev/null\n{text}",
            env=self._env,
            cwd=ROOT if from_root else self.folder,
            name=text,
        )
        deadline = time.monotonic() + (MAKE_S_MAX if from_root else COMMAND_S_MAX)
        # Otherwise the page only says that it prints something and ends.
        certain = STAYS in text or any(line.strip("… ") for line in shown)
        try:
            while child.exit_code is None and not (
                certain and matches(shown, list(child.lines), measured=measured)
            ):
                assert time.monotonic() < deadline, _story(child, "neither ended nor printed that", shown)
                await child.ends_within(STAYS_S)
            if await child.ends_within(STAYS_S):
                assert child.exit_code == 0, _story(child, f"ended with exit code {child.exit_code}", shown)
                same = not shown or matches(shown, list(child.lines), measured=measured)
                assert same, _story(child, "printed something else", shown)
        except BaseException:
            await child.close()
            raise
        if child.exit_code is None:
            self._going.append(child)
        else:
            await child.close()

    async def _run_python(self, block: Block) -> None:
        program = self.folder / f"block-{block.line}.py"
        program.write_text(_USUAL_ADDRESS.sub(self._broker_url, block.text))
        runner = Path(__file__).with_name("run_block.py")
        name = f"the python block in line {block.line}"
        async with await child_process.start(
            *(self._python, "-W", "error", runner, program, self._broker_url),
            env=self._env,
            cwd=self.folder,
            name=name,
        ) as child:
            code = await child.wait(timeout_s=COMMAND_S_MAX)
            assert code == 0, f"{name} failed; {child.tail()}"


def _story(child: child_process.ChildProcess, what: str, shown: list[str]) -> str:
    return "\n".join(
        (f"$ {child.name}", f"it {what}; shown:", *(f"  | {line}" for line in shown), child.tail())
    )

"""Whatever the pages name exists: commands and options, names of the code, make targets, paths,
files, messages.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

import libra
from libra.cli.main import COMMANDS, parse_options

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "libra"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (
        *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
# The first column of the changelog's tables holds old names.
PAGES["CHANGELOG.md"] = re.sub(r"^\| `[^|]*(?=\|)", "", PAGES["CHANGELOG.md"], flags=re.MULTILINE)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(rf"libra(?:\.cli\.main)? ({'|'.join(COMMANDS)})\b(.*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
PUBLIC = "|".join(libra.__all__)
EVERY_PAGE = pytest.mark.parametrize("page", PAGES)


def blocks(page: str, *languages: str) -> list[str]:
    """Fenced blocks of a page in one of the languages."""
    return [text for info, text in FENCE.findall(PAGES[page]) if info.split(" ", 1)[0] in languages]


def shell_lines(page: str) -> list[str]:
    """Command lines of a page's shell blocks, continued lines joined."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def quoted(page: str) -> list[str]:
    """Text between single backticks."""
    found = re.findall(r"`([^`]+)`", FENCE.sub("", PAGES[page]))
    return [" ".join(text.split()) for text in found]


def code(page: str) -> str:
    """All code of a page: in Python blocks and between backticks."""
    return "\n".join([*blocks(page, "python"), *quoted(page)])


@cache
def options_of(command: str) -> frozenset[str]:
    """Every option that `libra COMMAND --help` lists."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        parse_options([command, "--help"])
    return frozenset(OPTION.findall(shown.getvalue()))


@cache
def words_of_the_code() -> frozenset[str]:
    tops = ("src", "benchmarks", "examples", "tests")
    files = [file for top in tops for file in (ROOT / top).rglob("*.py")]
    return frozenset(re.findall(r"\w+", "\n".join(file.read_text() for file in files)))


@cache
def members_of_classes() -> dict[str, frozenset[str]]:
    """Names that each class of the sources has: methods, fields and attributes of `self`."""
    members: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for kind in (
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)
        ):
            found = members.setdefault(kind.name, set())
            for node in ast.walk(kind):
                if isinstance(node, ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return {name: frozenset(found) for name, found in members.items()}


@cache
def resolve(name: str) -> object:
    """The object that a dotted name means.  ImportError or AttributeError if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@EVERY_PAGE
def test_command_lines_in_blocks_are_understood(page: str) -> None:
    for line in shell_lines(page):
        if found := COMMAND.search(line):
            words = shlex.split(found.group(2), comments=True)
            parse_options([found.group(1), *words])  # exits where it does not understand


@EVERY_PAGE
def test_every_command_starts_a_known_program(page: str) -> None:
    programs = {line.split()[0] for line in shell_lines(page)}
    assert programs <= {"libra", "make", "pip", "python", "torchrun"}
    commands = [line.split()[1] for line in shell_lines(page) if line.startswith("libra ")]
    assert set(commands) <= set(COMMANDS)


@EVERY_PAGE
def test_commands_of_scripts_are_understood(page: str) -> None:
    commands = [*shell_lines(page), *(text for text in quoted(page) if " " in text)]
    for line in commands:
        found = re.match(r"(?:python|torchrun .*?) ?(benchmarks/\w+)\.py\b(.*)", line)
        if found:
            script = importlib.import_module(found.group(1).replace("/", "."))
            tyro.cli(script.Args, args=shlex.split(found.group(2), comments=True))


@EVERY_PAGE
def test_options_in_the_text_exist(page: str) -> None:
    unknown = []
    for text in quoted(page):
        if text.startswith(("torchrun", "pip", "make")) and not COMMAND.search(text):
            continue  # options of other programs
        found = COMMAND.search(text)
        for option in OPTION.findall(text):
            known = option in options_of(found.group(1)) if found else _is_a_field(option)
            unknown += [] if known else [text]
    assert unknown == []


def _is_a_field(option: str) -> bool:
    if any(option in options_of(command) for command in COMMANDS):
        return True
    return option[2:].split(".")[-1].replace("-", "_") in words_of_the_code()


@EVERY_PAGE
def test_names_of_the_package_exist(page: str) -> None:
    missing = []
    for name in sorted(set(re.findall(r"(?<![\w./])libra(?:\.[A-Za-z_]\w*)+", code(page)))):
        try:
            resolve(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


@EVERY_PAGE
def test_imports_in_blocks_work(page: str) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.split(".")[0] in ("libra", "benchmarks", "examples", "torch"):
                for alias in node.names:
                    resolve(f"{module}.{alias.name}")


@EVERY_PAGE
def test_members_and_arguments_of_public_names_exist(page: str) -> None:
    missing = []
    for name, member in re.findall(rf"\b({PUBLIC})\.(?!py\b)(\w+)", code(page)):
        owner = getattr(libra, name)
        if not hasattr(owner, member) and f"self.{member}" not in inspect.getsource(owner):
            missing.append(f"{name}.{member}")
    for name, arguments in re.findall(rf"\b({PUBLIC})\(([^()]*)\)", code(page)):
        known = inspect.signature(getattr(libra, name)).parameters
        missing += [
            f"{name}({argument}=)"
            for argument in re.findall(r"\b(\w+)=(?!=)", arguments)
            if argument not in known
        ]
    assert missing == []


@EVERY_PAGE
def test_identifiers_in_the_text_exist(page: str) -> None:
    names = {text.removesuffix("()") for text in quoted(page)}
    names = {text for text in names if re.fullmatch(r"\w*(_|[a-z][A-Z])\w*", text)}
    assert names - words_of_the_code() == set()


@EVERY_PAGE
def test_members_of_classes_exist(page: str) -> None:
    classes = members_of_classes()
    missing = []
    for text in quoted(page):
        found = re.match(r"(?:libra\.)?([A-Z]\w+)\.(\w+)", text)
        if found and found.group(1) in classes:
            name, member = found.groups()
            missing += [] if member in classes[name] else [text]
    assert missing == []


@EVERY_PAGE
def test_names_stand_in_the_file_that_the_page_names(page: str) -> None:
    """`file.py`: `name`, `name` says where to look."""
    name = r"`[A-Za-z_]\w*`"
    text = " ".join(FENCE.sub("", PAGES[page]).split())
    missing = []
    for path, names in re.findall(rf"`([\w/]+\.py)`: ({name}(?:(?:,| and| or) {name})*)", text):
        (file,) = (top / path for top in (SOURCE, ROOT) if (top / path).exists())
        defined = re.findall(r"^(?:def|class) (\w+)|^(\w+)(?:: .*)? =", file.read_text(), re.M)
        for word in re.findall(r"\w+", names):
            missing += [] if word in {*sum(defined, ())} else [f"{path}: {word}"]
    assert missing == []


@EVERY_PAGE
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join([*shell_lines(page), *quoted(page)])
    assert set(re.findall(r"(?:^|\n)make ([a-z]+)", text)) <= targets


@EVERY_PAGE
def test_extras_of_the_package_exist(page: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r'(?:\.|libra-attention)\[([\w,]+)\]["\']', "\n".join(shell_lines(page)))
    extras = {extra for words in named for extra in words.split(",")}
    assert extras <= set(project["optional-dependencies"])


@EVERY_PAGE
def test_paths_in_the_repository_exist(page: str) -> None:
    tops = "src|tests|docs|benchmarks|examples"
    text = "\n".join([*shell_lines(page), *(f" {text} " for text in quoted(page))])
    found = set(re.findall(rf"(?<=[\s`])(?:{tops})/[\w./-]*\w/?(?=\s)", text))
    assert [path for path in sorted(found) if not (ROOT / path).exists()] == []
    files = {text for text in quoted(page) if re.fullmatch(r"[a-z_]+(/[a-z_]+)*\.(py|html)", text)}
    places = (SOURCE, ROOT, ROOT / "benchmarks", ROOT / "tests")
    missing = [file for file in files if not any((place / file).exists() for place in places)]
    assert sorted(set(missing) - {"quick.py"}) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "/" not in page])
def test_links_between_files_of_the_repository_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", PAGES[page])
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_architecture_names_every_source_file() -> None:
    named = set(quoted("ARCHITECTURE.md"))
    files = [file.relative_to(SOURCE) for file in SOURCE.rglob("*.py")]
    assert [str(f) for f in sorted(files) if f.stem != "__init__" and str(f) not in named] == []


def test_the_api_page_describes_every_public_name() -> None:
    described = set(re.findall(r"^::: libra\.(\w+)$", PAGES["docs/api.md"], re.MULTILINE))
    assert described == set(libra.__all__)


def test_the_configuration_page_describes_every_field_of_a_section() -> None:
    sections = PAGES["docs/configuration.md"].split("::: ")[1:]
    for section in (section for section in sections if "members:\n" in section):
        name, members = section.split("members:\n")
        kind: Any = resolve(name.split()[0])
        fields = [field.name for field in dataclasses.fields(kind)]
        assert re.findall(r"^ +- (\w+)$", members, re.MULTILINE) == fields


def test_the_index_links_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", PAGES["docs/index.md"]))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert pages - linked == {"index.md"}


def messages() -> list[str]:
    """Every text of the sources, with … where values are filled in."""
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_that_troubleshooting_explains_are_raised_somewhere() -> None:
    known = "\n".join(messages())
    page = PAGES["docs/troubleshooting.md"]
    explained = re.findall(r"\*\*`([^`]+)`\*\*", page)
    assert len(explained) > 15
    missing = []
    for message in explained:
        pattern = ".*?".join(re.escape(part.strip()) for part in message.split("…"))
        if not re.search(pattern, known):
            missing.append(message)
    assert missing == []


def test_the_drawings_can_be_made_again() -> None:
    pytest.importorskip("altair")
    script = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))
    packs = libra.pack_sequential(np.load(script["LENGTHS"]), tokens=262144, longer="drop")
    for chart in (
        script["draw_pools"](packs),
        script["draw_placement"](),
        script["draw_pipeline"](),
    ):
        assert chart.to_dict()

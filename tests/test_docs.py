"""The documentation is true where a program can tell: options, links, file names, rows, presets."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from qfleet.config.algorithms import ALGORITHMS, ALIASES
from qfleet.config.config import FIELDS
from qfleet.config.recipes import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCE = re.compile(r"\b(?:benchmarks|docs|qfleet|tests)/(?:[\w/]+\.py\b|[\w/]*/(?=`))")
TREE_LINE = re.compile(r"([\s│├└─]*)([\w./-]+(?:\.py|/))(?:\s|$)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_options", DOCS / "generate_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """A page without its code blocks, where brackets are not links."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    names = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {name.strip().replace(" ", "-") for name in names}


def broken_links(page: Path) -> list[str]:
    """Relative links that lead nowhere."""
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_options_are_up_to_date() -> None:
    written = (DOCS / "options.md").read_text(encoding="utf-8")
    assert written == generator().render(), "run: python docs/generate_options.py"


def test_options_hold_every_field_once() -> None:
    rows = re.findall(r"^\| (?:\*\*)?`(\w+)`", generator().render(), re.MULTILINE)
    assert sorted(rows) == sorted(FIELDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](gone.md) [b](#a-title) [c](#no-title) [d](page.md)\n")
    assert broken_links(page) == ["gone.md", "#no-title"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_are_named_exist(page: Path) -> None:
    named = set(SOURCE.findall(page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("row", ALGORITHMS)
def test_every_row_has_a_page_with_its_switches_and_its_curve(row: str) -> None:
    page = (DOCS / "algorithms" / f"{row}.md").read_text(encoding="utf-8")
    assert f"(`{row}`)" in page
    assert f"../images/{row}.png" in page
    for switch in ALGORITHMS[row]:
        assert f"`{switch}`" in page
    for alias in (alias for alias, name in ALIASES.items() if name == row):
        assert f"`{alias}`" in page
    assert f"]({row}.md)" in (DOCS / "algorithms" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_mentioned(preset: str) -> None:
    assert f"| `{preset}` |" in (DOCS / "cli.md").read_text(encoding="utf-8")


def named_in_trees(text: str) -> list[str]:
    """The paths of annotated trees in code blocks: folders and modules, one a line, indented."""
    found = []
    for fence in FENCE.findall(text):
        above: list[tuple[int, str]] = []
        for line in fence.splitlines():
            match = TREE_LINE.match(line)
            if match is None:
                continue
            depth, name = len(match[1]), match[2]
            above = [(d, path) for d, path in above if d < depth]
            path = (above[-1][1] if above else "") + name
            found.append(path)
            if name.endswith("/"):
                above.append((depth, path))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_trees_name_files_that_exist(page: Path) -> None:
    named = named_in_trees(page.read_text(encoding="utf-8"))
    roots = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir())
    assert [p for p in named if p.startswith(roots) and not (ROOT / p).exists()] == []


def test_a_path_of_a_tree_is_read_by_its_indentation() -> None:
    tree = "```\na/\n  b.py   text\n  c/     more\n    d.py\n  e.py\nf/\n```\n"
    assert named_in_trees(tree) == ["a/", "a/b.py", "a/c/", "a/c/d.py", "a/e.py", "f/"]


def test_no_test_file_imports_another() -> None:
    """Helpers live in tests/support."""
    imported = re.compile(r"^\s*(?:from|import) (test_\w+|tests)\b", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [str(path) for path in files if imported.search(path.read_text(encoding="utf-8"))] == []


CITED = re.compile(r"\bfaults? (\d+(?:(?:, | and | to )\d+)*)", re.IGNORECASE)


def numbers_in(citation: str) -> set[int]:
    """The numbers of a citation such as "1, 2 and 10 to 14"."""
    numbers: set[int] = set()
    for part in re.split(r", | and ", citation):
        first, _, last = part.partition(" to ")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def test_every_fault_that_a_test_cites_is_listed() -> None:
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (\d[\d, ]*) \|", page, re.MULTILINE)
    listed = {int(number) for cell in cells for number in cell.split(",")}
    cited: set[int] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for citation in CITED.findall(path.read_text(encoding="utf-8")):
            cited |= numbers_in(citation)
    assert {1, 18, 40} <= cited
    assert sorted(cited - listed) == []


def test_a_citation_of_faults_is_read_as_numbers() -> None:
    (citation,) = CITED.findall("Faults 1, 2 and 10 to 12 of a list")
    assert numbers_in(citation) == {1, 2, 10, 11, 12}

"""``qfleet docs``: open the documentation that ``make docs`` has built."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError, UnknownNameError

HELP = "open the documentation in a browser, as built by make docs"

DESCRIPTION = """Open the documentation in a browser.

It is built from the sources of qfleet: make docs

Examples:
  qfleet docs
  qfleet docs performance
"""


@dataclass(frozen=True)
class DocsOptions:
    page: tyro.conf.Positional[str] = "index"
    """Name of a page of docs/, without its suffix."""


def run(argv: list[str]) -> int:
    options = parse(DocsOptions, argv, "docs", DESCRIPTION)
    sources = Path(__file__).parents[2]
    pages = {page.stem: page for page in sorted((sources / "site").glob("*.html"))}
    if not pages:
        if (sources / "mkdocs.yml").is_file():
            raise ConfigError(f"the documentation of '{sources}' is not built yet; run: make docs")
        raise ConfigError("this qfleet was installed without its sources, which hold docs/")
    if options.page not in pages:
        raise UnknownNameError("page", options.page, pages)
    page = pages[options.page]
    print(page)
    webbrowser.open(page.as_uri())
    return 0

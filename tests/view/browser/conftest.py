"""Real runs of the tiny model, a real `agentgym view` on them, and a browser."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.view.browser.viewer import Watched, chromium, launch, route_of, serving, train

SCREENSHOTS = os.environ.get("AGENTGYM_SCREENSHOTS")
STEPS = 14 if SCREENSHOTS else 3
"""Longer curves, for the screenshots of the docs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if chromium() is None:
                item.add_marker(pytest.mark.skip(reason="Chromium is not installed: apt-get install chromium"))


@dataclass(frozen=True)
class Made:
    """The folders of the runs that the pages show."""

    folder: Path
    grpo: Path
    second: Path
    compaction: Path
    tree: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Train two runs of the quickstart, one with compaction and one with forks."""
    folder = tmp_path_factory.mktemp("runs").resolve()
    often = ("--eval-every", "4") if SCREENSHOTS else ()
    names = ("chase_grpo", "chase_grpo_seed_2", "chase_compaction", "chase_tree")
    made = Made(folder, *(folder / name for name in names))
    recipes = {
        made.grpo: ("chase_grpo", *often),
        made.second: ("chase_grpo", "--seed", "2", *often),
        made.compaction: ("chase_compaction",),
        made.tree: ("chase_tree",),
    }
    train(STEPS, recipes)
    return made


@pytest.fixture(scope="session")
def address(made: Made) -> Iterator[str]:
    """Yield the URL of a viewer of those runs."""
    with serving(made.folder) as printed:
        yield printed


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = launch(playwright)
        yield opened
        opened.close()


Open = Callable[..., Watched]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Yield a function that opens watched pages.

    A dialog, an error or a request to another host fails the test at its end.
    """
    pages: list[Watched] = []

    def open_page(address: str, **options: Any) -> Watched:
        pages.append(Watched(browser, address, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture
def viewer(opened: Open, address: str) -> Watched:
    """Return a page on the session's runs."""
    return opened(address)


@dataclass(frozen=True)
class Routes:
    """The routes of the runs."""

    grpo: str
    second: str
    compaction: str
    tree: str


@pytest.fixture
def routes(viewer: Watched, made: Made) -> Routes:
    ids = [route_of(viewer.page, folder) for folder in (made.grpo, made.second, made.compaction, made.tree)]
    return Routes(*ids)

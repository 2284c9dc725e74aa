"""Screenshots for the docs: the main pages with real runs. `make screenshots` writes them to docs/screenshots."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from agentgym.store.reader import RolloutStore
from tests.view.browser.conftest import SCREENSHOTS, Made, Open, Routes
from tests.view.browser.viewer import ROOT, Watched

LARGEST = 200_000
"""Maximum size of a screenshot in bytes."""


def curves(page: Page, routes: Routes, made: Made) -> str:
    return f"#/?runs={routes.grpo},{routes.second}"


def rollouts(page: Page, routes: Routes, made: Made) -> str:
    return f"#/{routes.compaction}/rollouts?q=Summarise&sort=reward&order=desc"


def forked(made: Made) -> int:
    """Return the number of a trained rollout with forks: the best one, and among equals the longest."""
    with RolloutStore(made.tree) as store:
        trained = [one for one in store.find(phase="train") if one.advantages[0] and len(one.rollout.segments) > 2]
    return max(trained, key=lambda one: (one.rollout.reward or 0, one.rollout.sampled_tokens)).number


def summarised(made: Made) -> int:
    """Return the number of a solved rollout with a compaction, from an early group with a signal."""
    with RolloutStore(made.compaction) as store:
        trained = [one for one in store.find(phase="train", step=1) if one.advantages[0] and one.rollout.reward == 1]
    return next(one.number for one in trained if len(one.rollout.segments) > 1 and any(one.advantages[0] or ()))


def rollout(page: Page, routes: Routes, made: Made) -> str:
    return f"#/{routes.tree}/rollout/{forked(made)}"


def tokens(page: Page, routes: Routes, made: Made) -> str:
    return f"#/{routes.compaction}/rollout/{summarised(made)}?view=tokens"


def colors(page: Page, routes: Routes, made: Made) -> str:
    return f"{tokens(page, routes, made)}&color=logprob"


def times(page: Page, routes: Routes, made: Made) -> str:
    return f"#/{routes.tree}/rollout/{forked(made)}?view=timeline"


def group_of(made: Made) -> tuple[str, list[int], int]:
    """Return the group of that rollout: its task, its rollouts from best to worst, and its step."""
    number = summarised(made)
    with RolloutStore(made.compaction) as store:
        found = next(store.find(ids=[str(number)]))
        lines = store.summaries(phase="train", step=found.step, ids=[found.rollout.group_id], order="best")
    return found.rollout.group_id, [line.number for line in lines], found.step


def group(page: Page, routes: Routes, made: Made) -> str:
    task, _, step = group_of(made)
    return f"#/{routes.compaction}/group?phase=train&step={step}&task={task}"


def compare(page: Page, routes: Routes, made: Made) -> str:
    _, numbers, _ = group_of(made)
    return f"#/compare/{routes.compaction}/{numbers[0]}/{numbers[-1]}"


def settings(page: Page, routes: Routes, made: Made) -> str:
    return f"#/{routes.tree}/settings?with={routes.compaction}"


PICTURES = {
    "curves": curves,
    "rollouts": rollouts,
    "rollout": rollout,
    "tokens": tokens,
    "colors": colors,
    "times": times,
    "group": group,
    "compare": compare,
    "settings": settings,
}
DARK = ("colors", "curves")
"""Pages that are also captured in dark mode."""
NAMES = [*PICTURES, *(f"{name}-dark" for name in DARK)]


def point(page: Page, name: str) -> None:
    """Move the pointer to a place where a reader would."""
    page.wait_for_load_state("networkidle")
    if name == "curves":
        expect(page.locator('[data-metric="reward"] path.line')).to_have_count(2)
        plot = page.locator('[data-metric="reward"] svg')
        bounds = plot.bounding_box()
        assert bounds is not None
        plot.hover(position={"x": bounds["width"] * 0.42, "y": 70})
    elif name == "rollouts":
        expect(page.get_by_text("cannot be searched yet")).to_have_count(0, timeout=60_000)
    elif name == "colors":
        expect(page.locator(".tokens .trained").first).to_be_visible()
        page.locator(".tokens .lp-2, .tokens .lp-3, .tokens .lp-4, .tokens .lp-5, .tokens .lp-6").last.hover()


@pytest.mark.parametrize("name", NAMES)
def test_screenshots_of_the_main_pages_are_small(
    opened: Open, address: str, routes: Routes, made: Made, name: str, tmp_path: Path
) -> None:
    page_name, _, theme = name.partition("-")
    watched: Watched = opened(address, color_scheme=theme or "light")
    page = watched.open(PICTURES[page_name](watched.page, routes, made))
    point(page, page_name)
    folder = ROOT / SCREENSHOTS if SCREENSHOTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size < LARGEST


def test_the_docs_have_a_screenshot_of_each_main_page() -> None:
    there = {path.stem for path in (ROOT / "docs/screenshots").glob("*.png")}
    assert there == set(NAMES)

"""A page that is open during its run: new data is added, and the rows in view stay in place."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.view.browser.conftest import Open
from tests.view.browser.viewer import Watched, route_of, serving, start_recipe

STARTED = """async () => {
  for (;;) {
    const { runs } = await (await fetch("api/runs")).json();
    if (runs.some((run) => run.rollouts > 100)) return;
    await new Promise((done) => setTimeout(done, 200));
  }
}"""
GROWN = "before => Number(document.querySelector('.count').textContent.split(' ')[0].replace(',', '')) > before"
MORE_POINTS = (
    "before => document.querySelector('[data-metric=reward] path.line')?.getAttribute('d').split('L').length > before"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a run that lasts longer than the tests."""
    folder = tmp_path_factory.mktemp("live").resolve() / "long"
    process = start_recipe("chase_grpo", folder, "--max-steps", "2000", "--eval-tasks", "0", "--save-every", "1000")
    yield folder
    process.terminate()
    process.wait()


@pytest.fixture
def live(opened: Open, running: Path) -> Iterator[Watched]:
    with serving(running.parent) as printed:
        watched = opened(printed)
        watched.page.evaluate(STARTED)
        yield watched


def test_new_rollouts_are_appended_and_the_visible_rows_stay(live: Watched, running: Path) -> None:
    page = live.open(f"#/{route_of(live.page, running)}/rollouts")
    expect(page.locator(".live")).to_contain_text(re.compile(r"live, \d+ of [\d,]+ steps done"))
    before = int(page.locator(".count").inner_text().split()[0].replace(",", ""))
    page.locator(".grid").evaluate("grid => { grid.scrollTop = 580; }")
    expect(page.locator(".grid .row", has_text="train").nth(14)).to_be_visible()
    page.wait_for_function(GROWN, arg=before, timeout=0)
    assert page.locator(".grid").evaluate("grid => grid.scrollTop") == 580


def test_with_the_newest_first_the_visible_rows_stay_visible(live: Watched, running: Path) -> None:
    page = live.open(f"#/{route_of(live.page, running)}/rollouts?sort=number&order=desc")
    grid = page.locator(".grid")
    grid.evaluate("grid => { grid.scrollTop = 870; }")
    in_sight = (
        "() => { const top = document.querySelector('.grid').getBoundingClientRect().top + 40; const row = "
        "[...document.querySelectorAll('.grid .row[data-number]')].find(r => r.getBoundingClientRect().top > top); "
        "return row && row.dataset.number }"
    )
    page.wait_for_function(f"{in_sight}")
    page.wait_for_function("() => document.querySelector('.grid').scrollTop === 870")
    seen = page.evaluate(in_sight)
    before = int(page.locator(".count").inner_text().split()[0].replace(",", ""))
    page.wait_for_function(GROWN, arg=before, timeout=0)
    page.wait_for_function("() => document.querySelector('.grid').scrollTop > 870")
    page.wait_for_function(f"wanted => ({in_sight})() === wanted", arg=seen)


def test_curves_grow_during_a_run(live: Watched, running: Path) -> None:
    page = live.open(f"#/?runs={route_of(live.page, running)}")
    expect(page.locator('[data-metric="reward"] path.line')).to_be_attached()
    before = page.locator('[data-metric="reward"] path.line').get_attribute("d") or ""
    page.wait_for_function(MORE_POINTS, arg=before.count("L") + 1, timeout=0)

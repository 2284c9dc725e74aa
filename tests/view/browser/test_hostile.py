"""Text from models and tools stays text: none of it runs, is fetched, or changes the page's text direction."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.view.browser.conftest import Open
from tests.view.browser.hostile import SCRIPT, TOKENS, write_hostile
from tests.view.browser.viewer import Watched, route_of, serving

OUTSIDE_ELEMENTS = "main script, main img, main link, main iframe, main [onerror], main [onload], main svg[onload]"
HIDDEN = r"[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The folder's name is hostile, too, as far as file systems allow.
    return write_hostile(tmp_path_factory.mktemp("hostile").resolve() / "<img src=x onerror=alert(0)>")


@pytest.fixture(scope="module")
def hostile_address(folder: Path) -> Iterator[str]:
    with serving(folder) as printed:
        yield printed


@pytest.fixture
def hostile(opened: Open, hostile_address: str) -> Watched:
    return opened(hostile_address)


GROUP = urlencode({"phase": "train", "step": 0, "task": SCRIPT})
PAGES = {
    "curves": "#/?runs={run}",
    "rollouts": "#/{run}/rollouts",
    "search": "#/{run}/rollouts?q=alert",
    "messages": "#/{run}/rollout/1",
    "failed": "#/{run}/rollout/2",
    "tokens": "#/{run}/rollout/1?view=tokens",
    "time": "#/{run}/rollout/1?view=timeline",
    "raw": "#/{run}/rollout/1?view=raw",
    "compare": "#/compare/{run}/1/2",
    "group": "#/{run}/group?" + GROUP,
    "tasks": "#/{run}/tasks?phase=",
    "task": "#/{run}/task?" + urlencode({"task": SCRIPT}),
    "failures": "#/{run}/failures",
    "settings": "#/{run}/settings",
}


def opened_all(page: Page) -> None:
    """Expand everything that is collapsed, as a reader would."""
    for more in page.locator("main .more").all():
        more.click()
    page.locator("main details:not([open])").evaluate_all("all => all.forEach(one => { one.open = true; })")


@pytest.mark.parametrize("name", PAGES)
def test_a_models_text_is_inert_on_every_page(hostile: Watched, folder: Path, name: str) -> None:
    page = hostile.open(PAGES[name].format(run=route_of(hostile.page, folder)))
    page.wait_for_load_state("networkidle")
    opened_all(page)
    assert page.locator(OUTSIDE_ELEMENTS).count() == 0
    assert page.evaluate(f"new RegExp({HIDDEN!r}, 'u').test(document.body.innerText + document.title)") is False
    titles = "[...document.querySelectorAll('[title], [aria-label]')].map(e => e.title + e.ariaLabel).join('')"
    assert page.evaluate(f"new RegExp({HIDDEN!r}, 'u').test({titles})") is False
    if name not in ("time", "curves"):
        expect(page.locator("main")).to_contain_text("<script>alert(")


def test_hidden_characters_are_labeled(hostile: Watched, folder: Path) -> None:
    page = hostile.open(f"#/{route_of(hostile.page, folder)}/rollout/1")
    found = page.locator("main .mark")
    labels = set(found.all_inner_texts())
    assert {"ESC[31m", "ESC[2J", "NUL", "BEL", "RLO", "PDF", "LRI", "PDI", "ZWSP", "BOM", "U+E0041", "\ufffd"} <= labels
    expect(page.locator(".mark", has_text="RLO").first).to_have_attribute("title", "U+202E right-to-left override")


def test_foreign_text_cannot_change_the_pages_text_direction(hostile: Watched, folder: Path) -> None:
    page = hostile.open(f"#/{route_of(hostile.page, folder)}/rollout/1")
    said = page.locator("main .said").evaluate_all("all => all.map(e => getComputedStyle(e).unicodeBidi)")
    assert said
    assert set(said) == {"isolate"}


def test_tokens_that_are_not_text_are_shown_one_by_one(hostile: Watched, folder: Path) -> None:
    page = hostile.open(f"#/{route_of(hostile.page, folder)}/rollout/1?view=tokens")
    tokens = page.locator(".tokens [data-i]")
    expect(tokens).to_have_count(2 * len(TOKENS))
    texts = tokens.all_inner_texts()
    assert texts[0] == "<script>alert(3)</script>"
    assert texts[1:3] == ["ESC[31m", "RLO"]
    assert "F0 9F" in texts[3]
    assert texts[5] == "NUL"
    assert texts[8] == "ZWSP"
    assert texts[9] == "∅"
    assert all(tokens.nth(place).bounding_box()["width"] > 0 for place in range(len(TOKENS)))  # type: ignore[index]


def test_a_link_with_a_script_in_it_shows_a_message(hostile: Watched) -> None:
    for route in (
        "#/<script>alert(4)</script>/rollouts",
        "#/javascript:alert(5)",
        "#/?runs=<img src=x onerror=alert(6)>",
    ):
        page = hostile.open(route)
        assert page.locator(OUTSIDE_ELEMENTS).count() == 0
    hostile.faults[:] = [fault for fault in hostile.faults if "404" not in fault]  # logged by the browser


def test_the_page_requests_a_policy_without_inline_scripts(hostile: Watched) -> None:
    refused = (
        "() => { const script = document.createElement('script'); script.textContent = 'window.ran = 1'; "
        "document.body.append(script); return window.ran }"
    )
    assert hostile.page.evaluate(refused) is None
    assert any("Content Security Policy" in fault for fault in hostile.faults)
    hostile.faults.clear()

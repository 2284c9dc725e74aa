"""The page without a mouse, in dark and light mode, and with a screen reader."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from agentgym.store.reader import RolloutStore
from tests.view.browser.conftest import Made, Open, Routes
from tests.view.browser.viewer import Watched, route_of

MAIN_PAGES = (
    *("curves", "rollouts", "rollout", "tokens", "logprob", "ratio", "advantage", "version", "time", "raw"),
    *("compare", "group", "tasks", "task", "failures", "settings", "help"),
)


def address_of(name: str, run: str, made: Made) -> str:
    """Return the route of a page about the run with compaction."""
    with RolloutStore(made.compaction) as store:
        best = next(one for one in store.find(order="best", phase="train") if one.advantages[0])
        group = [one.number for one in store.summaries(step=best.step, phase="train", ids=[best.rollout.group_id])]
    task = best.rollout.group_id
    other = next(number for number in group if number != best.number)
    rollout = f"#/{run}/rollout/{best.number}"
    return {
        "curves": f"#/?runs={run}",
        "help": f"#/?runs={run}",
        "rollout": rollout,
        "tokens": f"{rollout}?view=tokens",
        "time": f"{rollout}?view=timeline",
        "raw": f"{rollout}?view=raw",
        "compare": f"#/compare/{run}/{best.number}/{other}",
        "group": f"#/{run}/group?phase=train&step={best.step}&task={task}",
        "task": f"#/{run}/task?task={task}",
    }.get(name) or (
        f"{rollout}?view=tokens&color={name}"
        if name in ("logprob", "ratio", "advantage", "version")
        else f"#/{run}/{name}"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", MAIN_PAGES)
def test_axe_finds_no_serious_violation(opened: Open, address: str, made: Made, name: str, theme: str) -> None:
    watched = opened(address, color_scheme=theme)
    page = watched.open(address_of(name, route_of(watched.page, made.compaction), made))
    page.wait_for_load_state("networkidle")
    if name == "help":
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_be_visible()
    found = Axe().run(page).response["violations"]
    grave = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in grave] == []


def test_every_page_can_be_opened_and_left_by_keyboard(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollouts")
    current = page.locator(".grid .row.current .c-number")
    expect(current).to_have_text("1")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    expect(current).to_have_text("2")
    page.keyboard.press("Enter")
    expect(page.locator(".rollout-head .facts")).to_contain_text("#2")
    page.keyboard.press("t")
    expect(page.locator(".tokens")).to_be_visible()
    page.keyboard.press("n")
    expect(page.get_by_role("button", name="Log-prob")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("m")
    expect(page.locator(".conversation")).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator(".rollout-head .facts")).to_contain_text("#3")
    page.keyboard.press("Escape")
    expect(current).to_have_text("2")
    page.keyboard.press("g")
    expect(page.locator("table.attempts")).to_be_visible()
    page.keyboard.press("h")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_the_next_rollout_follows_the_order_of_the_table_it_was_opened_from(
    viewer: Watched, routes: Routes, made: Made
) -> None:
    with RolloutStore(made.grpo) as store:
        best = [one.number for one in store.summaries(order="best", phase="train")][:2]
    page = viewer.open(f"#/{routes.grpo}/rollouts?phase=train&sort=reward&order=desc")
    page.wait_for_selector(".grid .row[data-number]")
    first = page.locator(".grid .row .c-number").all_inner_texts()[:2]
    page.keyboard.press("Enter")
    expect(page.locator(".rollout-head .facts")).to_contain_text(f"#{first[0]} ")
    page.keyboard.press("j")
    expect(page.locator(".rollout-head .facts")).to_contain_text(f"#{first[1]} ")
    assert len(best) == 2
    page.keyboard.press("Escape")
    page.wait_for_url("**sort=reward**")


def test_help_lists_the_pages_keys_and_closes(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollouts")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("open the rollout")
    expect(dialog).to_contain_text("dark or light")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_keyboard_shortcuts_are_plain_letters_in_a_text_field(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("dhg?")
    expect(page.get_by_label("Search messages")).to_have_value("dhg?")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Search messages")).not_to_be_focused()


def test_the_system_sets_dark_or_light_mode_until_the_reader_does(opened: Open, address: str) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light, dark = opened(address).page, opened(address, color_scheme="dark").page
    assert light.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.evaluate(ground) == "rgb(16, 19, 23)"
    dark.wait_for_selector("h1")
    dark.keyboard.press("d")
    assert dark.evaluate(ground) == "rgb(255, 255, 255)"
    dark.reload()
    assert dark.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_first_tab_stop_skips_to_the_content(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/tasks")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()

"""The table of rollouts: filtered, searched, sorted, and shared by its URL."""

from playwright.sync_api import expect

from agentgym.store.reader import RolloutStore
from tests.view.browser.conftest import Made, Open, Routes
from tests.view.browser.viewer import Watched


def test_the_first_page_draws_the_curves_of_every_selected_run(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/?runs={routes.grpo},{routes.second}")
    reward = page.locator('[data-metric="reward"]')
    expect(reward.locator("path.line")).to_have_count(2)
    expect(reward.locator("polygon.band")).to_have_count(2)
    expect(reward.locator("circle.held")).not_to_have_count(0)
    page.get_by_role("checkbox", name="chase_grpo_seed_2").uncheck()
    expect(reward.locator("path.line")).to_have_count(1)
    assert routes.second not in page.url


def test_dragging_zooms_all_charts_until_a_double_click(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/?runs={routes.grpo}")
    plot = page.locator('[data-metric="reward"] svg')
    bounds = plot.bounding_box()
    assert bounds is not None
    page.mouse.move(bounds["x"] + bounds["width"] * 0.4, bounds["y"] + 60)
    page.mouse.down()
    page.mouse.move(bounds["x"] + bounds["width"] * 0.9, bounds["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Show all steps")).to_be_visible()
    assert "zoom=" in page.url
    plot.dblclick(position={"x": 100, "y": 60})
    expect(page.get_by_role("button", name="Show all steps")).to_be_hidden()
    assert "zoom=" not in page.url


def test_a_step_of_a_curve_links_to_its_rollouts(viewer: Watched, routes: Routes, made: Made) -> None:
    page = viewer.open(f"#/?runs={routes.grpo}")
    plot = page.locator('[data-metric="reward"] svg')
    bounds = plot.bounding_box()
    assert bounds is not None
    plot.click(position={"x": 60, "y": 60})  # near the first step
    page.get_by_role("link", name="Rollouts of this step").click()
    with RolloutStore(made.grpo) as store:
        expect(page.locator(".count")).to_have_text(f"{store.count(phase='train', step=0)} rollouts of {len(store)}")


def test_the_table_counts_match_the_store_with_every_filter(viewer: Watched, routes: Routes, made: Made) -> None:
    page = viewer.open(f"#/{routes.compaction}/rollouts")
    with RolloutStore(made.compaction) as store:
        whole, train, last = len(store), store.count(phase="train"), store.count(phase="train", step=2)
    count = page.locator(".count")
    expect(count).to_have_text(f"{whole} rollouts")
    page.get_by_label("phase").select_option("train")
    expect(count).to_have_text(f"{train} rollouts of {whole}")
    page.get_by_label("Step from", exact=True).fill("2")
    page.get_by_label("Step to", exact=True).fill("2")
    expect(count).to_have_text(f"{last} rollouts of {whole}")
    page.get_by_role("button", name="Clear").click()
    expect(count).to_have_text(f"{whole} rollouts")


def test_a_url_with_filters_shows_another_reader_the_same_rows(
    viewer: Watched, routes: Routes, made: Made, opened: Open, address: str
) -> None:
    with RolloutStore(made.grpo) as store:
        kept = [one for one in store.summaries(phase="train") if (one.reward or 0) >= 0.5]
    count, longest = f"{len(kept)} rollouts", str(max(one.tokens for one in kept))
    page = viewer.open(f"#/{routes.grpo}/rollouts")
    page.get_by_label("phase").select_option("train")
    page.get_by_label("Reward from", exact=True).fill("0.5")
    page.get_by_role("button", name="Tokens").click()
    page.get_by_role("button", name="Tokens").click()
    expect(page.get_by_role("columnheader", name="Tokens")).to_have_attribute("aria-sort", "descending")
    other = opened(address)
    for shown in (page, other.page):
        if shown is other.page:
            other.open(page.url.partition("/#")[2].join(["#", ""]))
        expect(shown.locator(".count")).to_contain_text(count)
        expect(shown.locator(".grid .row .c-tokens").first).to_have_text(longest)
    expect(other.page.get_by_label("Reward from", exact=True)).to_have_value("0.5")
    assert other.page.locator(".grid .row").all_inner_texts() == page.locator(".grid .row").all_inner_texts()


def test_a_search_finds_and_highlights_text(viewer: Watched, routes: Routes, made: Made) -> None:
    page = viewer.open(f"#/{routes.compaction}/rollouts")
    page.keyboard.press("/")
    page.keyboard.type("Summarise")
    with RolloutStore(made.compaction) as store:
        found = sum("Summarise" in str(one.rollout.transcript()) for one in store.find())
        whole = len(store)
    assert 0 < found < whole
    expect(page.locator(".count")).to_have_text(f"{found} rollouts of {whole}")
    expect(page.locator(".grid .row mark").first).to_have_text("Summarise")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Search messages")).to_have_value("Summarise")  # as long as the table is filtered by it
    expect(page.get_by_label("Search messages")).not_to_be_focused()


def test_the_slash_key_focuses_the_field_that_mentions_it(viewer: Watched, routes: Routes) -> None:
    page = viewer.open("#/")
    expect(page.locator("[data-metric]").first).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_placeholder("Find a metric ( / )")).to_be_focused()


def test_only_visible_rows_are_rendered(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.tree}/rollouts")
    expect(page.locator(".grid .row").first).to_be_visible()
    assert page.locator(".grid .row").count() < 60
    page.keyboard.press("End")
    expect(page.locator(".grid .row.current .c-number")).to_have_text(page.locator(".count").inner_text().split()[0])


def test_a_filter_without_matches_says_what_to_do(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollouts?task=of-no-run")
    expect(page.locator(".empty")).to_contain_text("No rollout matches these filters.")
    page = viewer.open(f"#/{routes.grpo}/rollouts?q=get+OR+ofnorun")
    expect(page.locator(".empty")).to_contain_text("A search finds rollouts that contain all of its words")


def test_a_reward_filter_that_is_not_a_number_is_refused_with_a_message(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollouts?reward_from=much")
    expect(page.locator(".empty")).to_contain_text("reward_from: expected a number")
    viewer.faults[:] = [fault for fault in viewer.faults if "400" not in fault]  # the browser logs the answer itself

"""The files of the viewer's page: small, complete, and unable to turn text into markup."""

import re
from pathlib import Path

import pytest

from agentgym.view.metrics import GROUPS

PAGE = Path(__file__).parents[2] / "agentgym/view/page"
LINES, FILES = 350, 12
SCRIPTS = sorted(PAGE.rglob("*.js"))
STYLES = sorted(PAGE.rglob("*.css"))
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|"
    r"createContextualFragment|srcdoc"
)
OUTSIDE = re.compile(r"https?://(?!www\.w3\.org/2000/svg)")
IMPORT = re.compile(r'(?:from|import) "([^"]+)"|import\("([^"]+)"\)')


def name_of(path: Path) -> str:
    return str(path.relative_to(PAGE))


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES], ids=name_of)
def test_each_file_of_the_page_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES


def test_each_folder_of_the_page_has_few_files() -> None:
    folders = {path.parent for path in SCRIPTS}
    assert {name_of(one): len(list(one.glob("*.js"))) for one in folders if len(list(one.glob("*.js"))) > FILES} == {}


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_turns_text_into_markup_or_code(path: Path) -> None:
    assert MARKUP.findall(path.read_text()) == []


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES, PAGE / "index.html"], ids=name_of)
def test_no_file_of_the_page_names_another_server(path: Path) -> None:
    assert OUTSIDE.findall(path.read_text()) == []


@pytest.mark.parametrize("path", [one for one in SCRIPTS if one.name != "theme_first.js"], ids=name_of)
def test_each_module_has_a_description_and_type_checking(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "// @ts-check"
    assert lines[1].startswith("/** ")


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_imported_modules_exist(path: Path) -> None:
    named = [one or other for one, other in IMPORT.findall(path.read_text())]
    assert [name for name in named if not (path.parent / name).resolve().is_file()] == []


def test_every_style_sheet_is_linked() -> None:
    linked = re.findall(r'href="(styles/[^"]+)"', (PAGE / "index.html").read_text())
    assert sorted(linked) == [name_of(path) for path in STYLES]


def test_the_page_has_no_inline_scripts_or_styles() -> None:
    text = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text) == []


@pytest.mark.parametrize("name", ["rollout/branches", "rollout/branch_tokens", "train/explained_variance"])
def test_metrics_of_branches_and_of_the_critic_have_named_charts(name: str) -> None:
    assert [group["title"] for group in GROUPS if name in group["names"]]

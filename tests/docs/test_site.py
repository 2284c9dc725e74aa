"""The documentation site: it builds without a warning, fetches nothing from other hosts, and has every page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.cli.main import COMMANDS
from tests.docs.blocks import DOCS, ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r"[\w/-]+\.md", CONFIG.partition("\nnav:\n")[2])
"""The pages in the site's navigation."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site and return its folder."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    decisions = {page for page in pages if re.match(r"decisions/\d", page)}
    assert sorted(pages - decisions - set(NAV)) == []


@pytest.mark.slow
def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    names = [page.removesuffix(".md") + ".html" for page in NAV]
    names = [re.sub(r"README\.html$", "index.html", name) for name in names]
    assert [name for name in names if not (site / name).is_file()] == []


@pytest.mark.slow
def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    fetched = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    found = {path.name: fetched.findall(path.read_text()) for path in site.rglob("*.html")}
    assert {name: tags for name, tags in found.items() if tags} == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text()), sheet


@pytest.mark.slow
def test_the_page_of_commands_has_the_help_of_each_command(site: Path) -> None:
    page = (site / "reference/commands.html").read_text()
    for name in COMMANDS:
        assert f"agentgym {name}" in page
    assert "Print the transcripts of this many rollouts" in page


@pytest.mark.slow
def test_the_settings_page_has_docstrings_and_defaults(site: Path) -> None:
    page = (site / "reference/settings.html").read_text()
    for part in ("lora_rank", "Rank of the LoRA adapter.", "group_size", "memory_mb"):
        assert part in page


@pytest.mark.parametrize("page", ["environments", "rollouts", "engines", "training", "evaluation", "testing"])
@pytest.mark.slow
def test_the_library_pages_have_docstrings(site: Path, page: str) -> None:
    text = (site / f"reference/api/{page}.html").read_text()
    assert text.count('class="doc doc-object') > 5


@pytest.mark.slow
def test_a_link_to_a_file_of_the_checkout_leads_to_its_page(site: Path) -> None:
    assert "href=project/readme.html" in (site / "index.html").read_text().replace('"', "")
    assert (
        "href=../gallery/tictactoe.html" in (site / "gallery/index.html").read_text().replace('"', "")
        or (site / "gallery/tictactoe.html").is_file()
    )

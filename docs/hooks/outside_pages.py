"""The pages of the site that lie outside of docs/, such as the README and the gallery's, and the links to them."""

import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.DOTALL | re.MULTILINE)


def outside() -> dict[str, str]:
    """Return the file of the repository behind each page of the site that is not under docs/."""
    made = {
        "project/readme.md": "README.md",
        "project/contributing.md": "CONTRIBUTING.md",
        "project/changelog.md": "CHANGELOG.md",
        "project/security.md": "SECURITY.md",
        "project/sandbox.md": "sandbox/README.md",
    }
    names = sorted(path.parent.name for path in ROOT.glob("envs/*/README.md"))
    return made | {f"gallery/{name}.md": f"envs/{name}/README.md" for name in names}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages, and a list of the gallery."""
    for page, source in outside().items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    lines = [f"- [{name}](../envs/{name})" for name in sorted(path.parent.name for path in ROOT.glob("envs/*/env.py"))]
    text = "# Gallery\n\nThe environments that come with agentgym, each with its own page.\n\n" + "\n".join(lines)
    files.append(File.generated(config, "gallery/index.md", content=text + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Lead each link to where its file is on the site; a file that is not there is named instead."""
    own = page.file.src_uri
    source = "docs/x.md" if own == "gallery/index.md" else outside().get(own, f"docs/{own}")
    parts = FENCE.split(markdown)
    return "".join(part if place % 2 else _relinked(part, source, own) for place, part in enumerate(parts))


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """List the decisions on their first page."""
    if page.file.src_uri != "decisions/README.md":
        return html
    items = []
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        items.append(f'<li style="list-style: none"><a href="{path.stem}.html">{escape(title)}</a></li>')
    return f"{html}<ul>{''.join(items)}</ul>"


def _relinked(text: str, source: str, page: str) -> str:
    def moved(match: re.Match[str]) -> str:
        words, (target, hash_mark, heading) = match[1], match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = _page_of(path)
        if found is None:
            return f"{words} (`{path}`)" if (ROOT / path).exists() else match[0]
        return f"[{words}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{hash_mark}{heading})"

    return LINK.sub(moved, text)


def _page_of(path: str) -> str | None:
    """Return the page of a file or folder of the repository; None for one that has none."""
    pages = {source: page for page, source in outside().items()} | {"docs/decisions": "decisions/README.md"}
    if path.startswith("docs/") and path not in pages:
        return path.removeprefix("docs/")
    return pages.get(path) or pages.get(f"{path}/README.md")

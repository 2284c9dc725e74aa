# ruff: noqa: T201 - its lines are its result
"""Count how often words of a private dialect stand in the prose of the tree, against an upper bound for each.

`make lint` runs it over docstrings, comments, messages and pages: `python tests/prose.py`. With `--list NAME` it prints
each place of one count, with `--by-file` the files that have the most.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("agentgym", "benchmarks", "docs", "envs", "recipes", "sandbox", "templates", "tests")
"""The folders whose Python files are read."""
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "envs", "sandbox", "templates")
"""The Markdown files that are read, and the folders that hold them."""
KINDS = ("docstring", "page", "comment", "message")
DATA = ("tests/sandboxes/payloads", "envs/repo/parts", "envs/code_repair/modules")
"""Folders of programs that are data of tests and environments."""
MESSAGES = ("agentgym", "benchmarks", "recipes", "sandbox")
"""The folders whose texts count as messages. In tests they are inputs, and trained models read the environments'."""


@dataclass(frozen=True)
class Count:
    """A phrase, and how often it may occur."""

    pattern: str
    bound: float | None
    """Occurrences per 10,000 words; None if the rate is only reported."""


AFTER_A_NOUN = r"(?= (?:and|as|at|but|for|from|has|if|in|is|or|so|that|to|which|with|without)\b|[^ \w]|$| ?\n)"
COUNTS = {
    "where": Count(r"(?-i:\b[Ww]here\b)", 15),
    "behind": Count(r"(?<!left )(?<!leaves )\bbehind (?!an? |one |`|the API|ssh)\w", 1),
    "goes on": Count(r"\b(?:goes|go|going|went|gone) on\b", 1),
    "is no X": Count(r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|\w+ than\b|\w+ an? )\w", 1),
    "of its own": Count(rf"\bof (?:its|their|his|her|our|one's) own\b{AFTER_A_NOUN}", 1),
    "what is": Count(
        r"(?:^|[.;:,(] |\b(?:of|from|to|with|by|in|on|for|than|as) )what (?:is|are|was|has|comes|came)\b[^?]*$", 1
    ),
    "if": Count(r"\bif\b", None),
}
"""The counts by name. In pydantic, click, hypothesis and networkx "where" has 6 to 16, the rest but "if" 0 or 1.

Natural uses do not count: `left behind`, `behind a proxy`, `is no longer`, `is no better than`, `of its own group`,
`says what is missing`, and questions.
"""


@dataclass(frozen=True)
class Text:
    """A piece of prose, and where it starts."""

    path: Path
    line: int
    kind: str
    """"docstring", "comment", "message" or "page"."""
    text: str


def texts(root: Path) -> Iterator[Text]:
    """Yield every piece of prose of the tree."""
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(path.is_relative_to(root / data) for data in DATA):
                yield from (text for text in of_code(path) if text.kind != "message" or folder in MESSAGES)
    for name in PAGES:
        for path in [root / name] if name.endswith(".md") else sorted((root / name).rglob("*.md")):
            if path.exists():
                yield from of_page(path)


def of_code(path: Path) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a Python file."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if id(node) in docstrings else "message"
            if kind == "docstring" or " " in node.value:
                yield Text(path, node.lineno, kind, without_code(node.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], "comment", token.string.lstrip("# "))


def of_page(path: Path) -> Iterator[Text]:
    """Yield the lines of a page that are not inside a block of code."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield Text(path, number, "page", without_code(line))


def without_code(text: str) -> str:
    """Return the text without what stands between backticks."""
    return re.sub(r"`[^`\n]*`", "`", text)


def rates(found: list[Text]) -> dict[str, float]:
    """Return occurrences per 10,000 words, by the count's name."""
    words = sum(len(text.text.split()) for text in found)
    return {name: 10_000 * sum(hits(text, name) for text in found) / max(words, 1) for name in COUNTS}


def hits(text: Text, name: str) -> int:
    """Return how often a phrase stands in the text."""
    return len(re.findall(COUNTS[name].pattern, text.text, re.IGNORECASE))


def main() -> int:
    """Print the table; return 1 if a rate is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", choices=COUNTS, help="print each place of this count")
    parser.add_argument("--by-file", action="store_true", help="print the files with the most of the bounded phrases")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that is read")
    args = parser.parse_args()
    found = list(texts(args.root))
    if args.list:
        for text in found:
            if hits(text, args.list):
                print(f"{text.path.relative_to(args.root)}:{text.line}: {' '.join(text.text.split())[:160]}")
        return 0
    if args.by_file:
        bounded = [name for name in COUNTS if COUNTS[name].bound is not None]
        worst = Counter({text.path: 0 for text in found})
        for text in found:
            worst[text.path] += sum(hits(text, name) for name in bounded)
        for path, count in worst.most_common(40):
            print(f"{count:5d}  {path.relative_to(args.root)}")
        return 0
    return report(found)


def report(found: list[Text]) -> int:
    """Print the rates of each kind of prose; return 1 if one is above its bound."""
    kinds = {
        kind: [text for text in found if text.kind == kind] for kind in ("docstring", "page", "comment", "message")
    }
    table = {kind: rates(chosen) for kind, chosen in kinds.items()}
    print(f"{'per 10,000 words':18}" + "".join(f"{kind + 's':>12}" for kind in kinds) + f"{'bound':>8}")
    print(f"{'words':18}" + "".join(f"{sum(len(t.text.split()) for t in chosen):12,d}" for chosen in kinds.values()))
    failed = False
    for name, count in COUNTS.items():
        cells = "".join(f"{table[kind][name]:12.1f}" for kind in kinds)
        over = count.bound is not None and any(table[kind][name] > count.bound for kind in kinds)
        failed |= over
        print(
            f"{name:18}{cells}{'-' if count.bound is None else f'{count.bound:.0f}':>8}{'  too many' if over else ''}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

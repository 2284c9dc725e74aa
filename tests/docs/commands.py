"""The shell commands in the docs: where they are, which of them the tests run, and why the others aren't run."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import DOCS, ROOT

PAGES = (
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "sandbox/README.md")),
    *sorted(ROOT.glob("envs/*/README.md")),
)
"""Every page that contains commands."""
LANGUAGES = {"python", "sh", "console", "text", "toml"}
"""The languages of blocks: `sh` has commands, `console` commands with their output, `text` anything else."""
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

RUN = (
    r"agentgym (check(?! polyglot)|export|import|ls|rescore|report|show(?! runs/(eval-)?Largest/)) ",
    r"agentgym doctor$",
    r"agentgym eval my_env:Pointers --model ",
)
"""Commands that are run in the folder of a reader who has followed the README."""
PARSED = {
    r"agentgym check polyglot$": "needs the images that the lines above build; the env's own tests build them",
    r"agentgym eval .*--url ": "needs a chat endpoint, as in tests/engines/endpoint",
    r"agentgym eval (judge_essay|negotiate) ": "needs a model from the hub",
    r"agentgym (doctor|eval|train) .*--model HuggingFaceTB/": "test_real_models.py runs it with another model",
    r"agentgym (show runs/(eval-)?Largest/|eval largest:Largest --model runs/)": "test_real_models.py runs it",
    r"agentgym eval nim .*--ray ": "starts a Ray cluster, or joins one; tests/cluster evaluates on one",
    r"agentgym gc$": "cleans up the whole machine; tests/cli runs it with separate folders",
    r"agentgym merge ": "needs the run of the line above; tests/cli merges an adapter",
    r"agentgym play ": "needs a player; the test of the tutorial runs it",
    r"agentgym sandbox build": "builds an image for minutes, as the tests marked docker do",
    r"agentgym serve ": "serves until it is stopped; tests/bridges uses it",
    r"agentgym view ": "serves until it is stopped; the test of the tutorial loads its page",
    r"python -m recipes\.": "takes a minute, or GPUs; tests/recipes and .ci/run use small models",
    r"python train_pointers\.py": "needs a minute, servers or a stopped run; tests/test_readme.py runs the file",
    r"torchrun ": "starts several processes, as tests/run/test_ranks.py does",
}
"""Commands that are not run but parsed by the program's own parser, and why."""
NOT_RUN = {
    r"(python -m )?pip install ": "needs the network; the names of its extras are checked",
    r"python -m venv ": "needs the network",
    r"python -m build( --wheel)?$": "the fixture `wheel` builds it, and its name is compared",
    r"uv ": "needs uv and the network",
    r"(twine|git) ": "is part of a release",
    r"(python|python -m pytest) lookup\.py$": "tests/test_readme.py runs the file",
    r"agentgym (eval lookup:Lookup --model|compare runs/eval-Lookup/)": "tests/test_readme.py runs it",
    r"python -m pytest envs/": "make test runs it",
    r"python -m sglang\.launch_server ": "needs a GPU; tests/benchmarks/test_gpu_docs.py reads its flags",
    r"python -m benchmarks\.sandbox ": "takes an hour; .ci/run calls its --help",
    r"ray start ": "starts a daemon; tests/cluster starts two nodes",
    r"make (quickstart|setup|test)$": "CI runs it; the name of the target is checked",
    r"\.venv/bin/pre-commit install$": "changes the checkout",
    r"\.venv/bin/python -m pytest tests/test_samples\.py$": "make test runs it",
    r"apt-get install |podman |export |for |done$|ssh ": "changes the machine or the shell",
}
"""Commands that are not run, and why."""


@dataclass(frozen=True)
class Command:
    """One command of a page, without its comment, and its line number."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def fences() -> list[tuple[Path, int, str, str]]:
    """Return the blocks of all pages: page, line, language and text."""
    found = [(page, text, match) for page in PAGES for text in [page.read_text()] for match in FENCE.finditer(text)]
    return [(page, text.count("\n", 0, match.start(3)) + 1, match[2], match[3]) for page, text, match in found]


def commands() -> list[Command]:
    """Return the commands of all `sh` blocks, in order."""
    found: list[Command] = []
    for page, first, language, text in fences():
        for line, words in enumerate(text.splitlines(), first):
            command = re.split(r"\s+#\s", words)[0].strip()
            if language == "sh" and command and not command.startswith("#"):
                found.append(Command(str(page.relative_to(ROOT)), line, command))
    return found


def rule_of(command: Command) -> list[str]:
    """Return the rules that match a command."""
    return [rule for rule in (*RUN, *PARSED, *NOT_RUN) if re.match(rule, command.text)]

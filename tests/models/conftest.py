"""The small pretrained models, if `make models` has fetched them."""

from pathlib import Path

import pytest

from recipes.real_models import GEMMA, SMOLLM2, RealModel


def folder_of(model: RealModel) -> Path:
    """Return the folder of a model; skip the test if it was not fetched."""
    if not model.folder.is_dir():
        pytest.skip(f"{model.name} is not in {model.folder.parent}; `make models` fetches it")
    return model.folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return folder_of(SMOLLM2)


@pytest.fixture(scope="session")
def gemma() -> Path:
    return folder_of(GEMMA)

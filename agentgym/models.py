"""Models that come with the library, by name, and what is said of a model that cannot be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentgym.failures import describe

SHIPPED = {"tiny": "chase"}
"""The folder of each shipped model among the checkpoints of a checkout, by the model's name."""


def find_model(model: Path | str) -> Path | str:
    """Return the folder of a model that comes with the library ("tiny"), and any other folder or hub name unchanged.

    "tiny" is a Qwen3 of 0.4 M parameters that runs on one CPU core. A folder of that name comes first.

    :raises ValueError: where this installation lacks the model.
    """
    name = str(model)  # A command line gives a Path for every model.
    if name not in SHIPPED or Path(model).exists():
        return model
    here = Path(__file__).parent
    for place in (here / "_models" / name, here.parent / "recipes" / "checkpoints" / SHIPPED[name]):
        if place.is_dir():
            return place
    raise ValueError(f"model: {name!r} is not in this installation ({here / '_models'}); install agentgym again")


@contextmanager
def loading(model: Path | str) -> Iterator[None]:
    """Turn what a model's files and the Hugging Face hub raise into ValueError, in one line that says what to give.

    RuntimeError and MemoryError pass: they say that the machine is too small, or that a library has a fault.
    """
    try:
        yield
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:  # A broken file raises whatever its reader meets: KeyError, bare Exception.
        wanted = "give the folder of a whole model, or a name on the Hugging Face hub"
        said = " ".join(describe(error).split())
        raise ValueError(f"model: {model} cannot be loaded; {wanted}: {said}") from error

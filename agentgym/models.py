"""Models that come with the library, by name."""

from pathlib import Path

SHIPPED = {"tiny": "chase"}
"""The folder of each shipped model among the checkpoints of a checkout, by the model's name."""


def find_model(model: Path | str) -> Path | str:
    """Return the folder of a model that comes with the library ("tiny"), and any other folder or hub name unchanged.

    "tiny" is a Qwen3 of 0.4 M parameters that runs on one CPU core. A folder of that name comes first.
    """
    if not isinstance(model, str) or model not in SHIPPED or Path(model).exists():
        return model
    here = Path(__file__).parent
    for place in (here / "_models" / model, here.parent / "recipes" / "checkpoints" / SHIPPED[model]):
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"model: {model!r} is not in this installation ({here / '_models'}); install agentgym again"
    )

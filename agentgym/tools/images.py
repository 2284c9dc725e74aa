"""Detection, before an env runs, of images that it is known to show: in prompts and in tool results."""

import types
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from agentgym.tools.tool import Stop, class_tools
from agentgym.types.messages import Image, first_image
from agentgym.types.task import Task


def image_in(env: Any, tasks: Iterable[Task]) -> str | None:
    """Return a phrase that says where an env shows its root conversation an image, or None if it isn't known to.

    Only the prompts of these tasks and declared tools whose annotation says that they always return images are
    considered.
    """
    if env.root_engine is not None:  # The policy doesn't read the root conversation.
        return None
    if (name := _image_tool(env)) is not None:
        return f"tool {name!r} of {env.__name__} returns an image"
    for task in tasks:
        if (place := first_image(task.prompt)) is not None:
            return f"the prompt of task {task.id!r} has an image, {place}"
    return None


@cache
def _image_tool(env: type) -> str | None:
    """Return the root conversation's first tool whose annotation says that it always returns images, or None."""
    for name, made in class_tools(env).items():
        if made.root and _is_image(get_type_hints(getattr(env, made.attribute)).get("return")):
            return name
    return None


def _is_image(hint: Any) -> bool:
    """Return whether every return value is or contains an image; a type that also allows plain text does not count."""
    if hint is Image:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        said = [one for one in inner if one not in (Stop, types.NoneType)]
        return bool(said) and all(map(_is_image, said))
    if origin is Annotated:
        return _is_image(inner[0])
    return origin is not None and any(one is Image or Image in get_args(one) for one in inner)

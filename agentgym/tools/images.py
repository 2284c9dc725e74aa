"""The search for images that an env is known to show before it is played: in prompts, and in what tools return."""

import types
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from agentgym.tools.tool import Stop, class_tools
from agentgym.types.messages import Image, first_image
from agentgym.types.task import Task


def image_in(env: Any, tasks: Iterable[Task]) -> str | None:
    """Return where an env shows an image to its root conversation, in the words of an error; None where none is known.

    That is the prompt of one of these tasks, or a declared tool whose annotation says that it returns images alone.
    """
    if env.root_engine is not None:  # The policy does not read it.
        return None
    if (name := _image_tool(env)) is not None:
        return f"tool {name!r} of {env.__name__} returns an image"
    for task in tasks:
        if (place := first_image(task.prompt)) is not None:
            return f"the prompt of task {task.id!r} has an image, {place}"
    return None


@cache
def _image_tool(env: type) -> str | None:
    """The first tool of the root conversation that says that it returns images alone; None where there is none."""
    for name, made in class_tools(env).items():
        if made.root and _is_image(get_type_hints(getattr(env, made.attribute)).get("return")):
            return name
    return None


def _is_image(hint: Any) -> bool:
    """Whether what is returned is an image, or has one in it; what may be text alone is none."""
    if hint is Image:
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        said = [one for one in inner if one not in (Stop, types.NoneType)]
        return bool(said) and all(map(_is_image, said))
    if origin is Annotated:
        return _is_image(inner[0])
    return origin is not None and any(one is Image or Image in get_args(one) for one in inner)

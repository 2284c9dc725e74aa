"""Message contents: text, or parts of text and images; reading, validating, joining and formatting them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.types.messages.image import BASE64, DATA, Image, shown_size

SEEING_ROLES = ("user", "tool")
"""The roles whose messages may contain images; no API accepts images from the system or the assistant."""
SEE_ELSEWHERE = (
    "evaluate with a chat endpoint whose model accepts images (ag.Endpoint, `agentgym eval --url`), or have the env "
    "describe the image as text"
)
"""What to do with an env that uses images when only text is supported; ends an error message."""
_DETAILS = ("auto", "low", "high")


def content_of(value: Any, where: str, role: str | None = None) -> Any:
    """Return a message's content in stored form: text, or a list of parts in the OpenAI format if it has an image.

    A list may contain texts, `ag.Image` objects and parts. Without an image it becomes one text, a line for each
    part.

    Args:
        value: The content.
        where: The path of the content in error messages, such as "messages[0].content".
        role: The role of its message; an image then requires the role "user" or "tool". None allows any.

    Raises:
        ValueError: If it isn't a valid content; the message names the part.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        got = type(value).__name__
        raise ValueError(f"{where}: must be text, or a list of parts such as ['Look:', ag.Image(data)], got {got}")
    if not value:
        raise ValueError(f"{where}: must not be an empty list of parts; use text or at least one part")
    parts = [_part(part, f"{where}[{place}]") for place, part in enumerate(value)]
    images = [place for place, part in enumerate(parts) if part["type"] == "image_url"]
    if not images:
        return "\n".join(part["text"] for part in parts)
    if role is not None and role not in SEEING_ROLES:
        raise ValueError(
            f"{where}[{images[0]}]: a message with the role {role!r} can't have an image; put it in a user message"
        )
    return [part for part in parts if part != {"type": "text", "text": ""}]


def kept_message(message: Any, where: str) -> Any:
    """Return a message with its content in stored form.

    Raises:
        ValueError: If the content is invalid; the message names the part.
    """
    content = message.get("content")
    if isinstance(content, str):
        return message
    return {**message, "content": content_of(content, f"{where}.content", message.get("role"))}


def _part(part: Any, where: str) -> Any:
    """Return one part in the OpenAI format; raise ValueError if it isn't a valid part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Image):
        return part.part
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: must be text, an ag.Image or a part, got {type(part).__name__}")
    given = {
        name: value for name, value in part.items() if value is not None
    }  # Arrow adds keys of other parts as None.
    if given.get("type") == "text" and given.keys() == {"type", "text"}:
        if not isinstance(given["text"], str):
            raise ValueError(f"{where}.text: must be text, got {type(given['text']).__name__}")
        return given
    if given.get("type") == "image_url" and given.keys() == {"type", "image_url"}:
        return {"type": "image_url", "image_url": _image_url(given["image_url"], f"{where}.image_url")}
    what = ", ".join(f"{name}: {value!r:.40}" for name, value in given.items())
    raise ValueError(
        f"{where}: must be {{'type': 'text', 'text': ...}}, {{'type': 'image_url', 'image_url': {{'url': ...}}}} or an "
        f"ag.Image, got {{{what}}}"
    )


def _image_url(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: must be an object with a url field, got {type(given).__name__}")
    kept = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(map(str, kept.keys() - {"url", "detail"})):
        raise ValueError(f"{where}: may only have the fields url and detail, but also has {unknown[0]!r:.80}")
    try:
        Image.from_data_url(kept.get("url", ""))
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    if "detail" in kept and kept["detail"] not in _DETAILS:
        raise ValueError(f"{where}.detail: must be one of {', '.join(_DETAILS)}, got {kept['detail']!r:.80}")
    return kept


def parts_of(content: Any) -> list[Any]:
    """Return the parts of a content; text is one part, and "" has no parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def is_image(part: Any) -> bool:
    """Return whether a part is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def image_of(part: Any) -> Image:
    """Return the image of a part."""
    return Image.from_data_url(part["image_url"]["url"])


def first_image(messages: Sequence[Any]) -> str | None:
    """Return the path of the first image, such as "messages[0].content[1]", or None if there is none."""
    for place, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if is_image(part) or isinstance(part, Image):
                return f"messages[{place}].content[{at}]"
    return None


def joined(contents: Sequence[Any], between: str) -> Any:
    """Return the contents as one, skipping empty ones, with the text `between` between two texts."""
    said = [content for content in contents if content]
    if all(isinstance(content, str) for content in said):
        return between.join(said)
    made: list[Any] = []
    for part in [part for content in said for part in parts_of(content)]:
        if made and made[-1]["type"] == part["type"] == "text":
            part = {"type": "text", "text": f"{made.pop()['text']}{between}{part['text']}"}
        made.append(part)
    return made


def text_of(content: Any) -> str:
    """Return a content as text, each image as a short description: `[image/png, 12 kB]`."""
    return content if isinstance(content, str) else "\n".join(map(part_text, content))


def part_text(part: Any) -> str:
    """Return a part as text; an image becomes a short description."""
    if not is_image(part):
        return str(part["text"])
    mime_type, _, written = part["image_url"]["url"].removeprefix(DATA).partition(BASE64)
    return f"[{mime_type}, {shown_size(len(written) * 3 // 4 - written[-2:].count('='))}]"

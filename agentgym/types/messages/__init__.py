"""Chat messages in the OpenAI format: their text, calls and images."""

from agentgym.types.messages.arguments import as_object, with_objects
from agentgym.types.messages.image import IMAGE_TYPES, MAX_IMAGE_BYTES, Image
from agentgym.types.messages.message import (
    ROLES,
    Content,
    Function,
    ImagePart,
    ImageURL,
    Message,
    Part,
    TextPart,
    ToolCall,
    role_of,
)
from agentgym.types.messages.parts import (
    SEE_ELSEWHERE,
    content_of,
    first_image,
    image_of,
    is_image,
    joined,
    kept_message,
    parts_of,
    text_of,
)

__all__ = [
    "IMAGE_TYPES",
    "MAX_IMAGE_BYTES",
    "ROLES",
    "SEE_ELSEWHERE",
    "Content",
    "Function",
    "Image",
    "ImagePart",
    "ImageURL",
    "Message",
    "Part",
    "TextPart",
    "ToolCall",
    "as_object",
    "content_of",
    "first_image",
    "image_of",
    "is_image",
    "joined",
    "kept_message",
    "parts_of",
    "role_of",
    "text_of",
    "with_objects",
]

"""`ag.Image` from bytes, files, Pillow and data URLs; anything that isn't an image is refused by its field."""

import io
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import agentgym as ag
from agentgym.types.messages import MAX_IMAGE_BYTES, image_of
from tests.types.messages.pictures import GIF, JPEG, OF_TYPE, PART, PNG, URL


@pytest.mark.parametrize("mime_type", list(OF_TYPE))
def test_the_media_type_is_read_from_the_bytes(mime_type: str) -> None:
    image = ag.Image(OF_TYPE[mime_type])
    assert (image.mime_type, image.data) == (mime_type, OF_TYPE[mime_type])
    assert ag.Image(bytearray(image.data), mime_type) == image  # type: ignore[arg-type]
    assert ag.Image.from_data_url(image.data_url) == image == image_of(image.part)


def test_every_source_of_a_picture_gives_the_same_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    assert ag.Image.from_path(tmp_path / "a.png") == ag.Image(PNG) == ag.Image.from_data_url(URL)
    assert ag.Image(JPEG, "image/jpg").mime_type == "image/jpeg"
    assert ag.Image(PNG).part == PART
    assert repr(ag.Image(PNG)) == f"<Image image/png, {len(PNG)} bytes>"


def test_a_pillow_picture_is_saved_in_the_requested_format() -> None:
    pillow = pytest.importorskip("PIL.Image")
    drawn = pillow.new("RGB", (3, 2), "red")
    for format, mime_type in (("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")):
        image = ag.Image.from_pil(drawn, format)
        assert image.mime_type == mime_type
        assert pillow.open(io.BytesIO(image.data)).size == (3, 2)
    with pytest.raises(TypeError, match=r"^image: must have a `save` method like Pillow's images, got bytes"):
        ag.Image.from_pil(PNG)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((b"",), "^data: empty; give the bytes of an image"),
        (("cat.png",), "^data: must be bytes, got str; see ag.Image.from_path"),
        ((b"<svg/>",), "^data: starts with b'<svg/>', so it isn't a PNG, JPEG, GIF or WebP; convert it"),
        ((PNG, "image/jpeg"), "^mime_type: 'image/jpeg', but the bytes are image/png; leave it out"),
        ((PNG, "text/html"), "^mime_type: 'text/html', but the bytes are image/png"),
        ((PNG + bytes(MAX_IMAGE_BYTES),), "^data: 20,000,070 bytes, but at most 20,000,000 are allowed; make"),
    ],
)
def test_bytes_that_are_not_a_displayable_image_are_refused_by_their_field(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ag.Image(*given)


def test_an_image_of_the_largest_size_is_accepted() -> None:
    assert len(ag.Image(PNG + bytes(MAX_IMAGE_BYTES - len(PNG))).data) == MAX_IMAGE_BYTES


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.com/cat.png", "^url: must be a base64 data URL, .* not fetched"),
        (None, "^url: must be a base64 data URL"),
        ("data:image/png,abc", "^url: must contain ';base64,' after its media type"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "^url: its media type must be one of image/png, .*got 'image/svg"),
        (URL[:-3], "^url: the part after ';base64,' is not base64 .*; is it truncated"),
        (f"{URL}\ud800", "^url: the part after ';base64,' is not base64"),
        (URL.replace("=", " ="), "^url: the part after ';base64,' is not base64"),
        ("data:image/png;base64,", "^data: empty"),
        (URL.replace("image/png", "image/webp"), "^mime_type: 'image/webp', but the bytes are image/png"),
    ],
)
def test_a_url_without_an_image_is_refused(url: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ag.Image.from_data_url(url)


def test_a_file_without_an_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    with pytest.raises(ValueError, match=r"^path: .*/a\.txt: data: starts with b'a cat'"):
        ag.Image.from_path(tmp_path / "a.txt")


class Seen(ag.Task):
    """A task with an image as a field."""

    picture: ag.Image


@pytest.mark.parametrize("given", [ag.Image(GIF), GIF, ag.Image(GIF).data_url, {"bytes": GIF, "path": "a.gif"}])
def test_a_task_may_hold_an_image_in_the_forms_that_data_sets_use(given: Any) -> None:
    task = Seen(id="t", prompt="Which animal?", picture=given)
    assert task.picture == ag.Image(GIF)
    assert Seen.model_validate_json(task.model_dump_json()) == task


def test_a_task_accepts_a_pillow_image() -> None:
    pillow = pytest.importorskip("PIL.Image")
    drawn = pillow.new("RGB", (3, 2), "red")
    assert Seen(id="t", prompt="What is it?", picture=drawn).picture == ag.Image.from_pil(drawn)


def test_a_task_field_that_is_not_an_image_is_refused_by_its_name() -> None:
    with pytest.raises(ValidationError, match=r"picture\n.*data: must be bytes, got int"):
        Seen.model_validate({"id": "t", "prompt": "x", "picture": 3})

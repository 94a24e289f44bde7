"""Images of rows become RGB from every source, and what cannot be read is an error that names it and the remedy."""

import base64
import io
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import numpy
import pytest
import torch
from PIL import Image

from hwgrpo.config.schema import DataImagesConfig
from hwgrpo.data import image_urls, images
from hwgrpo.data.images import ImageReader, images_in, is_empty
from hwgrpo.errors import DataError
from tests.support.models.tiny_image_prompts import picture

RED = (255, 0, 0)
DATA_URI = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"


def read(source, at=".", **settings):
    """Return an image as read from row 3 of a file in the folder `at`."""
    (one,) = ImageReader(DataImagesConfig(**settings)).read_all([source], Path(at), "f.jsonl, row 3")
    return one


def refusal(source, at=".", **settings):
    with pytest.raises(DataError) as error:
        read(source, at, **settings)
    assert str(error.value).startswith("f.jsonl, row 3: image 1")
    return str(error.value)


def file_of(image, form="png", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    return tmp_path


SOURCES = {
    "path": "a.png", "bytes": picture(), "view": memoryview(picture()), "uri": DATA_URI,
    "PIL": Image.new("RGB", (16, 16), "red"), "url is a path": {"url": "a.png"},
    "datasets": {"bytes": picture(), "path": "gone.png"}, "datasets, path": {"bytes": None, "path": "a.png"},
    "image": {"image": "a.png"}, "nested": {"image": {"bytes": picture(), "path": None}},
    "base64": {"base64": base64.b64encode(picture()).decode()},
    "lines": {"base64": base64.encodebytes(picture()).decode()},
    "openai": {"type": "image_url", "image_url": {"url": DATA_URI, "detail": "auto"}},
    "text": {"image_url": DATA_URI},
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_read(name, folder):
    one = read(SOURCES[name], folder)
    assert (one.image.mode, one.image.size, one.size, one.image.getpixel((3, 3))) == ("RGB", (16, 16), (16, 16), RED)
    assert (one.digest == read("a.png", folder).digest) == (name != "PIL")  # of the file, or of the pixels


@pytest.mark.parametrize("array", [numpy.zeros((2, 2)), torch.zeros(2, 2)], ids=["numpy", "torch"])
def test_an_array_is_no_empty_image(array):
    assert not is_empty(array)
    assert is_empty({"image": float("nan"), "path": numpy.float64("nan")})
    assert "is of type" in refusal({"image": array})


def test_relative_paths_begin_at_the_data_files_folder_or_the_setting(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert read("a.png", elsewhere, folder=str(folder)).image.size == (16, 16)
    assert read(str(folder / "a.png"), elsewhere).image.size == (16, 16)
    assert f"{elsewhere}/a.png' does not exist; relative paths begin at" in refusal("a.png", elsewhere)
    assert "is no regular file" in refusal(str(folder))


TRANSPARENT_PALETTE = Image.new("P", (16, 16), 1)
TRANSPARENT_PALETTE.putpalette([0, 0, 0, 9, 9, 9])
MODES = {
    "gray": (file_of(Image.new("L", (16, 16), 100)), (100, 100, 100)),
    "black and white": (file_of(Image.new("1", (16, 16), 1)), (255, 255, 255)),
    "palette": (file_of(Image.new("RGB", (16, 16), "red").quantize(4)), RED),
    "palette with transparency": (file_of(TRANSPARENT_PALETTE, transparency=1), (255, 255, 255)),
    "transparent": (file_of(Image.new("RGBA", (16, 16), (0, 0, 0, 0))), (255, 255, 255)),
    "half transparent": (file_of(Image.new("RGBA", (16, 16), (255, 0, 0, 51))), (255, 204, 204)),
    "gray with alpha": (file_of(Image.new("LA", (16, 16), (0, 0))), (255, 255, 255)),
    "transparent color": (file_of(Image.new("RGB", (16, 16), "red"), transparency=RED), (255, 255, 255)),
    "CMYK": (file_of(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "tiff"), RED),
    "16 bits": (file_of(Image.fromarray(numpy.full((16, 16), 32896, numpy.uint16))), (128, 128, 128)),
    "16 bits, dark": (file_of(Image.fromarray(numpy.full((16, 16), 400, numpy.uint16))), (2, 2, 2)),
    "32 bits": (file_of(Image.fromarray(numpy.full((16, 16), 65535, numpy.int32)), "tiff"), (255, 255, 255)),
    "GIF": (picture(form="gif"), RED),
    "BMP": (picture(form="bmp"), RED),
    "two JPEGs of a phone": (
        file_of(Image.new("RGB", (16, 16), "white"), "mpo", save_all=True, append_images=[Image.new("RGB", (8, 8))]),
        (255, 255, 255),
    ),
    "WebP": (picture(form="webp", lossless=True), RED),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb_with_white_where_it_is_transparent(name):
    content, color = MODES[name]
    assert {read(content).image.getpixel(place) for place in ((0, 0), (15, 15))} == {color}
    assert read(Image.open(io.BytesIO(content))).image.getpixel((0, 0)) == color


def test_an_image_is_turned_as_its_camera_says():
    image = Image.new("RGB", (24, 8))
    exif = image.getexif()
    exif[0x0112] = 6
    one = read(file_of(image, "jpeg", exif=exif))
    assert (one.image.size, one.size) == ((8, 24), (8, 24))


def test_larger_images_are_scaled_down_to_the_area_with_their_ratio():
    one = read(picture(300, 100), max_pixels=1200)
    assert (one.image.size, one.size) == ((60, 20), (300, 100))
    for width, height in ((301, 99), (7, 1100), (1999, 10)):
        scaled = read(picture(width, height), max_pixels=1000).image.size
        assert scaled[0] * scaled[1] <= 1000
        assert min(scaled) > 0
        assert (scaled[0] > scaled[1]) == (width > height)
    assert read(picture(30, 40), max_pixels=1200).image.size == (30, 40)
    assert read(picture(19, 1), max_pixels=1).image.size == (1, 1)


ANIMATED = file_of(
    Image.new("RGB", (8, 8), "red"), "gif", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]
)
BROKEN = {
    "truncated": (picture(64, 64, "red", "jpeg")[:-200], "broken or truncated"),
    "truncated PNG": (file_of(Image.effect_noise((64, 64), 90))[:900], "broken or truncated"),
    "no bytes": (b"", r"empty \(0 bytes\)"),
    "text": (b"<html>not found</html>", "no known format"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known format"),
    "animated": (ANIMATED, r"several frames \(GIF\)"),
    "animated object": (Image.open(io.BytesIO(ANIMATED)), "several frames"),
    "no width": (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
    "ratio": (picture(400, 2), "ratio of 200 or more"),
    "floats": (Image.new("F", (8, 8)), "floating point"),
    "32 bits": (Image.new("I", (8, 8), 70_000), "32 bits"),
    "negative": (Image.new("I", (8, 8), -1), "32 bits"),
    "null": (None, "of type NoneType; an image is a path"),
    "array": (numpy.zeros((8, 8, 3)), "of type ndarray"),
    "number": ({"path": 5}, "'path' is of type int"),
    "text for bytes": ({"bytes": "abc"}, "'bytes' is of type str"),
    "unknown field": ({"data": "abc"}, "a field 'data', which is not read; an image is"),
    "ignored field": ({"image": "a.png", "max_pixels": 5}, "a field 'max_pixels', which is not read"),
    "two": ({"image": "a.png", "url": "b.png"}, "an image in image and in url; leave one"),
    "empty dict": ({"bytes": None, "path": None}, "is empty; an image is"),
    "base64": ({"base64": "§"}, "not valid base64"),
    "URI": ("data:image/png,abc", "is not base64; write data:image/png;base64"),
    "file URL": ("file:///a.png", "scheme file://, which is not read; write the path alone"),
    "bucket": ({"url": "s3://a/b.png"}, "scheme s3://, which is not read; copy the file here"),
    "URL": ("https://127.0.0.1:1/a.png", r"none is fetched; .*data.images.allow_urls=true"),
    "URL in a block": ({"image_url": {"url": "HTTP://127.0.0.1:1/a.png"}}, "none is fetched"),
    "null byte": ("a\0.png", "a..00.png"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_an_error_with_its_reason(name):
    source, reason = BROKEN[name]
    with pytest.raises(DataError, match=rf"^f\.jsonl, row 3: image 1.*{reason}"):
        read(source)


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(images, "BOMB_PIXELS", 16 * 16 - 1)
    assert "has 16 x 16 pixels, and more than 255 are not decoded" in refusal(picture())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # PIL's own limit warns, and raises at twice that
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "has 16 x 16 pixels" in refusal(picture())
    assert "are not decoded" in refusal(picture(32, 32))


def test_a_file_larger_than_the_limit_is_not_read(folder, monkeypatch):
    size = len(picture()) / 2**20
    assert read("a.png", folder, max_mb=size).image.size == (16, 16)
    for source in (picture(), DATA_URI):
        assert "more than data.images.max_mb=" in refusal(source, folder, max_mb=size * 0.9)
    monkeypatch.setattr(Path, "read_bytes", None)
    assert "more than data.images.max_mb=" in refusal("a.png", folder, max_mb=size * 0.9)


def test_the_second_image_is_named_by_its_number(folder):
    with pytest.raises(DataError, match=r"^here: image 2 is empty \(0 bytes\)"):
        ImageReader(DataImagesConfig()).read_all(["a.png", b""], folder, "here")


def test_a_column_holds_a_list_or_one_image_and_what_is_not_filled_is_none():
    assert images_in("a.png") == images_in(["a.png"]) == images_in(numpy.array(["a.png"], object)) == ["a.png"]
    for empty in (None, [], [None, ""], {"bytes": None, "path": None}, float("nan"), ""):
        assert images_in(empty) == []
    assert images_in(["a.png", None]) == ["a.png", None]


class Server(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(picture())
        elif self.path == "/large.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(3 << 20))
        elif self.path in MOVED:
            self.send_response(302)
            self.send_header("Location", MOVED[self.path])
            self.end_headers()
        else:
            self.send_error(404)

    def log_message(self, format, *args):
        pass


MOVED = {"/moved": "/a.png", "/local": "file:///etc/passwd", "/ftp": "ftp://127.0.0.1/a.png", "/round": "/round"}


@pytest.fixture(scope="module")
def address():
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_urls_are_fetched_once_where_they_are_allowed(address, monkeypatch):
    monkeypatch.setattr(Server, "asked", [])
    reader = ImageReader(DataImagesConfig(allow_urls=True))
    for url in (f"{address}/a.png", f"{address}/moved", f"{address}/a.png"):
        (one,) = reader.read_all([{"url": url}], None, "here")
        assert one.image.getpixel((0, 0)) == RED
    assert Server.asked == ["/a.png", "/moved", "/a.png"]
    Server.asked.clear()
    assert "none is fetched" in refusal(f"{address}/a.png")
    assert Server.asked == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/local", "'file:///etc/passwd' is not allowed"),
        ("/ftp", "another scheme, is not followed"),
        ("/round", "cannot be fetched"),
        ("/none", "404"),
        ("/large.png", "larger than data.images.max_mb=1"),
    ],
)
def test_a_url_is_fetched_within_limits(address, path, reason):
    assert reason in refusal(f"{address}{path}", allow_urls=True, max_mb=1)


def test_a_slow_url_ends_at_the_limit_of_time(address, monkeypatch):
    monkeypatch.setattr(image_urls, "SECONDS", 0.0)
    assert "not complete after 0 s" in refusal(f"{address}/a.png", allow_urls=True)


def test_nothing_but_http_is_opened():
    with pytest.raises(DataError, match=r"cannot be fetched.*unknown url type: file"):
        image_urls.Downloads(100).get("file:///etc/passwd", "here")

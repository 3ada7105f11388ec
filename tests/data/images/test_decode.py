"""One image to 8-bit pixels: every mode and depth, orientation, and each kind of damage by name."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sfu.data.images.decode import ImageError, decode_image
from sfu.data.images.images import FileImages
from sfu.errors import DataError


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def rgb() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size=(5, 7, 3), dtype=np.uint8)


def test_colours_come_out_as_they_are_channels_first(rgb):
    pixels = decode_image(encoded(Image.fromarray(rgb)))
    assert pixels.shape == (3, 5, 7)
    np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), rgb)


def test_greyscale_is_repeated_for_three_channels_and_kept_for_one(rgb):
    grey = rgb[..., 0]
    data = encoded(Image.fromarray(grey))
    np.testing.assert_array_equal(decode_image(data).numpy(), np.stack([grey] * 3))
    np.testing.assert_array_equal(decode_image(data, 1).numpy(), grey[None])


def test_sixteen_bits_are_scaled_not_clipped():
    deep = np.array([[0, 256, 257], [32768, 65278, 65535]], dtype=np.uint16)
    pixels = decode_image(encoded(Image.fromarray(deep)), 1)
    assert pixels[0].tolist() == [[0, 1, 1], [128, 254, 255]]
    assert decode_image(encoded(Image.fromarray(deep), "TIFF"), 1).equal(pixels)


def test_sixteen_bit_colours_lose_the_low_byte_only():
    """A 16-bit RGB PNG, written by hand: Pillow cannot save one."""
    import zlib

    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    values = struct.pack(">6H", 0, 0x80FF, 0xFFFF, 0x0100, 0x7F00, 0xFE80)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    body = part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0" + values)) + part(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + body
    assert decode_image(data)[:, 0].T.flatten().tolist() == pytest.approx([0, 0x80, 0xFF, 1, 0x7F, 0xFE], abs=1)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_gives_the_colour_it_shows(mode):
    image = Image.new("RGB", (4, 3), (0, 0, 0)).convert(mode)
    for channels in (1, 3):
        kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
        pixels = decode_image(encoded(image, kind), channels)
        assert pixels.shape == (channels, 3, 4)
        assert int(pixels.max()) <= 2


def test_cmyk_jpeg_is_not_inverted():
    white = encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")
    red = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    assert int(decode_image(white).min()) > 250
    assert [int(v) for v in decode_image(red)[:, 4, 4]] == pytest.approx([254, 0, 0], abs=4)


def test_a_palette_with_transparency_and_an_animation_are_read():
    frames = [Image.new("P", (4, 4), colour) for colour in (1, 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 10, 20, 30, 200, 200, 200])
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], transparency=0)
    assert decode_image(data)[:, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(rgb, orientation):
    """What the viewer sees: the stored array is the upright one, turned the other way."""
    turned = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, 1), 7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
        8: lambda a: np.rot90(a, -1),
    }[orientation](rgb)  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(turned)), "PNG", exif=exif)
    np.testing.assert_array_equal(decode_image(data).permute(1, 2, 0).numpy(), rgb)


def test_a_file_cut_short_is_damaged_not_padded(rgb):
    big = Image.fromarray(np.kron(rgb, np.ones((20, 20, 1), dtype=np.uint8)))
    for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP"):
        whole = encoded(big, kind)
        with pytest.raises(ImageError):
            decode_image(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is empty"), (b"no image at all", "is none of BMP, GIF"), (b"\xff\xd8\xff\xe0broken", "is damaged")],
)
def test_what_is_no_image_is_said_to_be_none(data, message):
    with pytest.raises(ImageError, match=message):
        decode_image(data)


def test_pixels_without_a_range_are_refused():
    floating = Image.fromarray(np.full((3, 3), 0.5, dtype=np.float32))
    with pytest.raises(ImageError, match="floating-point pixels have no fixed range"):
        decode_image(encoded(floating, "TIFF"))
    wide = Image.fromarray(np.full((3, 3), 100_000, dtype=np.int32))
    with pytest.raises(ImageError, match="neither 8 nor 16 bits"):
        decode_image(encoded(wide, "TIFF"))


@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_take_no_more_memory_than_they_must(channels):
    drawn = np.random.default_rng(0).integers(0, 256, (3001, 2003, 3)[: 3 if channels == 3 else 2], dtype=np.uint8)
    data = encoded(Image.fromarray(drawn), "BMP")
    tracemalloc.start()
    found = decode_image(data, channels)
    assert tracemalloc.get_traced_memory()[1] < 1.6 * drawn.nbytes  # Pillow's own memory is not traced
    tracemalloc.stop()
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy().squeeze(), drawn)


def test_formats_that_run_programs_are_not_opened(monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    for name in ("gs", "gsc"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ImageError, match="is none of BMP, GIF"):
        decode_image(postscript)
    assert not ran.exists()
    with suppress(OSError):
        Image.open(io.BytesIO(postscript)).load()
    assert ran.exists()  # where it is opened, it does run


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match="more pixels than are safe"):
        decode_image(encoded(Image.new("RGB", (50, 50))))


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"broken\.jpg is none of BMP, GIF"):
        FileImages([path]).decode(0)
    with pytest.raises(DataError, match=r"absent\.jpg cannot be read \(No such file") as raised:
        FileImages([tmp_path / "absent.jpg"]).decode(0)
    assert not isinstance(raised.value, ImageError)  # the file may be back tomorrow, so this is not cached as damage


_HEADS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0"]


@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning")
@given(st.binary(max_size=200), st.sampled_from(_HEADS))
def test_no_bytes_raise_anything_else(tail, head):
    with contextlib.suppress(ImageError):
        decode_image(head + tail)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_one_wrong_byte_never_raises_anything_else(where, value):
    data = bytearray(encoded(Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)), "JPEG"))
    data[where % len(data)] = value
    with contextlib.suppress(ImageError):
        decode_image(bytes(data))

"""Decode one image file to 8-bit pixels, whatever its mode, depth and orientation.

Shapes: K channels (1 or 3), H rows, W columns.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from sfu.errors import DataError

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others run programs, as PostScript does
_MODES = {1: "L", 3: "RGB"}
_LARGE = 1 << 22  # pixels
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N", "I")


class ImageError(DataError):
    """An image cannot be decoded."""


def decode_image(data: bytes, channels: int = 3) -> Tensor:
    """Return the upright pixels of an encoded image, uint8 ``[K, H, W]`` (channels last in memory).

    The EXIF orientation is applied. 16-bit greyscale is scaled to 8 bits (65535 becomes 255); CMYK, palette and one-bit
    images are converted; an alpha channel is dropped, as torchvision's loader does. An animation gives its first frame.

    Raises:
        ImageError: The bytes are no image, are truncated, or hold floating-point numbers, which have no fixed range.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        image = _to_mode(image, _MODES[channels])
        pixels = _pixels(image, channels)
    except UnidentifiedImageError:
        raise ImageError(_what_it_is(data)) from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"has more pixels than are safe to decode ({error})") from None
    except MemoryError:
        raise
    except OSError as error:
        if "not available" in str(error):  # this Pillow lacks a codec; the image may be fine
            raise DataError(
                f"Pillow cannot read this kind of image here ({error}). Install a Pillow that can."
            ) from error
        raise ImageError(f"is damaged ({error})") from None
    except Exception as error:  # on damaged files, Pillow's plugins raise errors of many types
        raise ImageError(f"is damaged ({error})") from None
    return torch.from_numpy(pixels.reshape(image.height, image.width, channels)).permute(2, 0, 1)


def _what_it_is(data: bytes) -> str:
    """Say what a file is that is no image which Pillow may open here, as far as its first bytes tell."""
    if not data:
        return "is empty"
    start, what = data[:200].lstrip(), ""
    first_line = start.partition(b"\n")[0].rstrip()
    if start.startswith(b"version https://git-lfs."):
        what = ", but a pointer of Git LFS to it (`git lfs pull` fetches the image)"
    elif data[4:8] == b"ftyp":
        what = ", but HEIC, AVIF or a video, whatever its name (convert photos to JPEG or PNG)"
    elif start.startswith(b"<"):
        what = ", but a web page or XML (its download may have failed)"
    elif first_line.isascii() and first_line.decode().isprintable():
        what = f", but text that begins with {first_line.decode()[:40]!r}"
    return f"is none of {', '.join(_FORMATS)}{what}"


def _pixels(image: Image.Image, channels: int) -> np.ndarray:
    """Return the pixels, those of a large image band by band, since Pillow's copies take more memory than the image."""
    width, height = image.size
    if width * height <= _LARGE:
        return np.frombuffer(bytearray(image.tobytes()), np.uint8)  # half the time of np.array(image)
    pixels_HV = np.empty((height, width * channels), np.uint8)
    rows = max(1, _LARGE // (8 * width))
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        pixels_HV[top : top + rows] = np.frombuffer(band.tobytes(), np.uint8).reshape(-1, width * channels)
    return pixels_HV


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; convert the image to 8 or 16 bits")
    if image.mode in _DEEP_GREY:
        image = _eight_bits(image)
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ValueError(f"greyscale from {low} to {high} is neither 8 nor 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8), "L")

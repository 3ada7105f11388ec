"""Tiny datasets in the format of the real ones, and a web server for their archives."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BREEDS = ("n02085620-Chihuahua", "n02085782-Japanese_spaniel", "n02086240-Shih-Tzu")


@cache
def jpeg(seed: int = 0, size: tuple[int, int] = (12, 10)) -> bytes:
    """A colourful image, ``size`` in columns and rows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_folder(folder: Path, files: list[str]) -> Path:
    """One small JPEG for each name."""
    for number, name in enumerate(files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number % 7))
    return folder


def write_classes(folder: Path, classes: tuple[str, ...] = ("ant", "bee", "cat"), per_class: int = 4) -> Path:
    """One folder a class."""
    return write_folder(folder, [f"{name}/{number}.jpg" for name in classes for number in range(per_class)])


def publish_cifar(monkeypatch: Any, root: Path, reader: type, per_batch: int = 20) -> Path:
    """Pickled batches as Python 2 wrote them, and their checksums put where torchvision looks for the real ones."""
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    fine = reader.meta["key"] == "fine_label_names"
    n_classes = 100 if fine else 10
    rng = np.random.default_rng(0)
    sums = {}

    def save(name: str, content: dict[str, Any]) -> None:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()

    for name, _ in (*reader.train_list, *reader.test_list):
        labels = rng.integers(0, n_classes, per_batch).tolist()
        coarse = {"coarse_labels": [label // 5 for label in labels]} if fine else {}
        pixels = rng.integers(0, 256, (per_batch, 3072), dtype=np.uint8)
        save(name, {"data": pixels, "fine_labels" if fine else "labels": labels, **coarse})
    save(reader.meta["filename"], {reader.meta["key"]: [f"class {number}" for number in range(n_classes)]})
    for attribute in ("train_list", "test_list"):
        monkeypatch.setattr(reader, attribute, [[name, sums[name]] for name, _ in getattr(reader, attribute)])
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": sums[reader.meta["filename"]]})
    return folder


def write_caltech(root: Path) -> Path:
    """257 categories of one to three images, with the strays of the real archive."""
    folder = root / "caltech256" / "256_ObjectCategories"
    for number in range(1, 258):
        category = folder / f"{number:03d}.{'clutter' if number == 257 else f'thing-{number}'}"
        category.mkdir(parents=True)
        for image in range(1, 2 + number % 3):
            (category / f"{number:03d}_{image:04d}.jpg").write_bytes(jpeg(number % 5))
    (folder / "198.thing-198" / "RENAME2").write_text("stray")
    (folder / "056.thing-56" / "greg").mkdir()
    (folder / "056.thing-56" / "greg" / "056_0001.jpg").write_bytes(jpeg())
    return folder


def write_dogs(root: Path, per_part: int = 2) -> Path:
    """Three breeds with the official lists."""
    folder = root / "stanford_dogs"
    listed: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for label, breed in enumerate(BREEDS, start=1):
        synset = breed.split("-")[0]
        for number in range(2 * per_part):
            file = f"{breed}/{synset}_{number}.jpg"
            write_folder(folder / "Images", [file])
            listed["test" if number % 2 else "train"].append((file, label))
    write_dog_lists(folder, listed["train"], listed["test"])
    return folder


def write_dog_lists(folder: Path, train: list[tuple[str, int]], test: list[tuple[str, int]]) -> None:
    """The three .mat files, with the fields of the real ones."""
    from scipy.io import savemat

    for name, rows in (("train", train), ("test", test), ("file", train + test)):
        files = np.array([file for file, _ in rows], dtype=object)[:, None]
        annotations = np.array([file.removesuffix(".jpg") for file, _ in rows], dtype=object)[:, None]
        labels = np.array([label for _, label in rows], dtype=np.uint8)[:, None]
        savemat(folder / f"{name}_list.mat", {"file_list": files, "annotation_list": annotations, "labels": labels})


def pack(archive: Path, folder: Path, entries: list[str]) -> bytes:
    """A tar file (.tar.gz: compressed) of entries of a folder."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        for entry in entries:
            tar.add(folder / entry, entry)
    return archive.read_bytes()


@dataclass
class Server:
    """What the web server holds, how it misbehaves and what it was asked.

    Attributes:
        files: Contents by path.
        ranges: Whether it serves parts.
        drops: For one request after the other, the bytes after which it hangs up; then it serves whole answers.
        answers: Status codes to answer with first, and their Location.
        asked: Path and Range of every request.
    """

    files: dict[str, bytes]
    ranges: bool = True
    drops: list[int] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    stalls: bool = False
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One GET request."""
        wanted = handler.headers.get("Range")
        self.asked.append((handler.path, wanted))
        if self.answers:
            code, location = self.answers.pop(0)
            return self._head(handler, code, {"Location": location, "Content-Length": "0"})
        body = self.files.get(handler.path)
        if body is None:
            return self._head(handler, 404, {"Content-Length": "0"})
        start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and self.ranges else 0
        if start and start >= len(body):
            return self._head(handler, 416, {"Content-Range": f"bytes */{len(body)}", "Content-Length": "0"})
        span = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self._head(handler, 206 if start else 200, {**span, "Content-Length": str(len(body) - start)})
        rest = body[start:]
        if self.drops:
            handler.wfile.write(rest[: self.drops.pop(0)])
            handler.close_connection = True
            return None
        if self.stalls:
            handler.wfile.write(rest[: len(rest) // 2])
            handler.wfile.flush()
            self.go_on.wait(20)
            rest = rest[len(rest) // 2 :]
        handler.wfile.write(rest)
        return None

    @staticmethod
    def _head(handler: BaseHTTPRequestHandler, code: int, headers: dict[str, str]) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """A web server on this machine alone."""
    server = Server(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                server.answer(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    httpd.block_on_close = False
    thread = threading.Thread(target=lambda: httpd.serve_forever(poll_interval=0.02))
    thread.start()
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    try:
        yield server
    finally:
        server.go_on.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()

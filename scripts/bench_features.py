"""Compare a complete extraction with the bare forward pass of the same network, in images per second.

    python scripts/bench_features.py FOLDER [--sizes 32 64 128] [--images 4096] [--backbone resnet18] [--repeats 3]

FOLDER holds images, at any depth. An extraction digests every file, reads and decodes it, transforms it, runs the
network, and writes the chunks to an empty cache. The bare forward pass runs the same network, batch size and memory
format on pixels that are in memory already. The two alternate, and their medians are compared. The weights are random,
so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from sfu.data.backbones.backbone import Backbone
from sfu.data.features.extract import Extractor
from sfu.data.features.store import CHUNK_ROWS
from sfu.data.images.images import FileImages
from sfu.data.settings import BackboneSettings
from sfu.experiment.resources import measured
from sfu.experiment.validate import resolve_device

_SUFFIXES = {".jpg", ".jpeg", ".png"}


def main() -> None:
    given = _arguments()
    device = resolve_device(given.device)
    paths = sorted(path for path in given.folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    step = max(1, len(paths) // given.images)
    images = FileImages(paths[::step][: given.images])
    print(f"{len(images)} of {len(paths)} images, {given.backbone}, {device}, {torch.get_num_threads()} threads")
    print(f"{'pixels':>6} {'forward':>10} {'extraction':>11} {'ratio':>6} {'peak MiB':>9} {'of half as many':>16}")
    for size in given.sizes:
        config = BackboneSettings(
            name=given.backbone, weights="none", size=size, batch_size=given.batch_size, dtype=given.dtype
        )
        count = min(len(images), max(CHUNK_ROWS // 2, given.images * 32**2 // size**2))
        part = images.take(range(count))
        forward, extraction, peaks = [], [], []
        for _ in range(given.repeats):
            forward.append(_forward(config, part, device))
            rate, peak = _extraction(config, part, device)
            extraction.append(rate)
            peaks.append(peak)
        _, peak_of_half = _extraction(config, images.take(range(count // 2)), device)
        ratio = statistics.median(extraction) / statistics.median(forward)
        print(
            f"{size:>6} {statistics.median(forward):>8.0f}/s {statistics.median(extraction):>9.0f}/s {ratio:>6.1%} "
            f"{statistics.median(peaks):>9.0f} {peak_of_half:>16.0f}",
            flush=True,
        )


def _forward(config: BackboneSettings, images: FileImages, device: torch.device) -> float:
    """Return the images per second of the network alone, on pixels in memory."""
    backbone: Backbone = Extractor(config, device).backbone
    pixels = backbone.transform.pixels([images.decode(i) for i in range(config.batch_size)])
    batch = backbone.transform.normalized(pixels, device, backbone.dtype)
    count = 0
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        backbone.module(batch)
        _wait(device)
        started = time.perf_counter()
        while count < len(images):
            backbone.module(batch)
            count += len(batch)
        _wait(device)
    return count / (time.perf_counter() - started)


def _extraction(config: BackboneSettings, images: FileImages, device: torch.device) -> tuple[float, float]:
    """Return the images per second from files to chunks on disk, and the peak memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        config.cache = folder
        extractor = Extractor(config, device, say=lambda sentence: None)
        backbone = extractor.backbone
        backbone.features(backbone.transform.pixels([images.decode(i) for i in range(config.batch_size)]))  # warm
        os.environ["SFU_CACHE"] = folder  # so that the files' digests are not cached
        with measured(device) as usage:
            extractor.fill(extractor.store(images), images, fail_on_damage=True, shown={})
    return len(images) / usage.seconds, usage.peak_memory_mb


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--images", type=int, default=8192, help="at 32 pixels; fewer at larger sizes")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()

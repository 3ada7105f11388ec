"""One command that says whether a GPU gives the CPU's answers, how fast, and in how much memory.

    python scripts/gpu_check.py            # about a minute; without a GPU it compares the CPU with itself and says so

On made features of CIFAR-10's size (N = 50,000, D = 512, 10 classes): training, Unlearned(+), the default Unlearned(-),
the closed form and the paper's fit; eigen-solves of full-rank and rank-deficient matrices in float64 and float32;
features of made images through a random ResNet-18 at 64 pixels, in float32 and bfloat16.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from sfu.data.datasets.base import Dataset
from sfu.data.features.extract import Extractor
from sfu.data.images.images import ArrayImages
from sfu.data.settings import BackboneSettings
from sfu.experiment.config import RunConfig
from sfu.experiment.pipeline import run
from sfu.heads.files import load_head
from sfu.heads.settings import LinearSettings
from sfu.losses.base import make_loss
from sfu.operators.spectral import eigh
from sfu.reporting.loggers.base import NullLogger

METHODS = ["original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form", "unlearned_minus_paper"]
TOLERANCE = {"unlearned_minus_paper": 1e-3}  # a step a thousand times too long magnifies rounding


def make_features(path: Path, n_train: int, width: int) -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(width, width)) * np.geomspace(1, 0.03, width)
    centers = rng.normal(size=(10, width)) * 0.3
    arrays = {}
    for part, count in (("train", n_train), ("test", n_train // 5)):
        labels = rng.integers(0, 10, count)
        rows = centers[labels] + rng.normal(size=(count, width)) @ mixing / width**0.5 + 0.3
        arrays[f"{part}_features"] = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        arrays[f"{part}_labels"] = labels
    np.savez(path, **arrays)


def run_on(device: str, path: Path, folder: Path) -> dict:
    folder.mkdir()
    config = RunConfig(
        dataset=Dataset.make(name="features", path=str(path)), head=LinearSettings(l2=1e-4),
        loss=make_loss(name="quadratic"), logger=NullLogger(), methods=METHODS, device=device,
    )  # fmt: skip
    config.backbone.name = "none"
    return run(config, folder, show_progress=False)


def check_eigen_solves(device: torch.device) -> bool:
    sound = True
    for dtype in (torch.float64, torch.float32):
        for rank in (512, 40):
            rows = torch.randn(rank, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            matrix = (rows.T @ rows / rank).to(device, dtype)
            eigh(matrix)
            start = time.perf_counter()
            values, vectors = eigh(matrix)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            error = float(((vectors * values) @ vectors.T - matrix).norm() / matrix.norm())
            good = error < 1000 * torch.finfo(dtype).eps
            sound &= good
            what = f"eigh D=512 rank {rank:3d} {str(dtype)[6:]} on {device}"
            print(f"{what}: {seconds:.3f} s, error {error:.0e} {'ok' if good else 'BAD'}")
    return sound


def check_features(there: torch.device, count: int) -> bool:
    """Features of made images: the GPU's against the CPU's, and images per second of the whole extraction."""
    pixels = np.random.default_rng(0).integers(0, 256, size=(count, 32, 32, 3), dtype=np.uint8)
    images, found, sound = ArrayImages(pixels, "made images"), {}, True
    for device, dtype in ((torch.device("cpu"), "float32"), (there, "float32"), (there, "bfloat16")):
        with tempfile.TemporaryDirectory() as cache:
            config = BackboneSettings(name="resnet18", weights="none", size=64, dtype=dtype, cache=cache)
            extractor = Extractor(config, device, say=lambda sentence: None)
            backbone = extractor.backbone
            backbone.features(backbone.transform.pixels([images.decode(i) for i in range(config.batch_size)]))  # warm
            start = time.perf_counter()
            features = extractor.extract(images).features_MD
            rate = count / (time.perf_counter() - start)
        reference = found.setdefault("reference", features)
        error = float((features - reference).norm() / reference.norm())
        good = error < (1e-4 if dtype == "float32" else 3e-2)
        sound &= good
        print(f"features {dtype} on {device}: {rate:.0f} images/s, difference {error:.0e} {'ok' if good else 'BAD'}")
    return sound


def main() -> None:
    small = "--small" in sys.argv
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if there == "cpu":
        print("no GPU here: the CPU is compared with itself")
    root = Path(tempfile.mkdtemp())
    make_features(root / "features.npz", 2_000 if small else 50_000, 32 if small else 512)
    here_metrics, there_metrics = (run_on(d, root / "features.npz", root / n) for d, n in (("cpu", "a"), (there, "b")))
    sound = True
    print(f"{'method':22s} {'difference':>10s} {'cpu s':>8s} {there + ' s':>8s} {'cpu MiB':>9s} {there + ' MiB':>9s}")
    for name in METHODS:
        one, other = (load_head(root / n / "heads" / name).parameters_CE for n in ("a", "b"))
        difference = float((one - other).norm() / one.norm())
        good = difference < TOLERANCE.get(name, 1e-7)
        sound &= good
        first, second = here_metrics["rows"][name], there_metrics["rows"][name]
        print(
            f"{name:22s} {difference:10.1e} {first['seconds']:8.2f} {second['seconds']:8.2f} "
            f"{first['peak_memory_mb']:9.0f} {second['peak_memory_mb']:9.0f} {'ok' if good else 'BAD'}"
        )
    sound &= check_eigen_solves(torch.device(there))
    sound &= check_features(torch.device(there), 512 if small else 4096)
    print("all answers agree" if sound else "ANSWERS DIFFER")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()

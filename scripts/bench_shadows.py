"""Time the training of shadows: heads on random parts of one pool of rows, as attacks need them.

    OMP_NUM_THREADS=2 python scripts/bench_shadows.py [--loss softmax] [--shadows 256] [--device cuda] [--direct 2]

Rows are made up: N rows of norm 1 to train on, a fifth as many test rows, classes from a noisy linear teacher. Shadows
are drawn by :func:`sfu.evaluation.attacks.design.make_design` for a tenth of the rows to forget, and trained by
:class:`sfu.heads.subsets.SubsetTrainer` from the head on all N rows. --direct trains some of them alone, from zero, to
say how much longer that takes and how far the parameters differ. Wall times are upper bounds on a machine with other
work; processor time is the sum over threads.
"""

from __future__ import annotations

import argparse
import time

import torch

from sfu.data.split import ForgetSplit
from sfu.evaluation.attacks.design import make_design
from sfu.heads.settings import LinearSettings
from sfu.heads.subsets import SubsetTrainer
from sfu.heads.train import train_head, train_like
from sfu.losses.base import make_loss

_TEST_SHARE, _FORGET_SHARE, _NOISE = 0.2, 0.1, 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", default="quadratic")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--shadows", type=int, default=256)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--direct", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()

    drawn = torch.Generator().manual_seed(0)
    n_test = round(_TEST_SHARE * given.rows)
    scales = torch.logspace(0, -2, given.features)
    features = torch.randn(given.rows + n_test, given.features, generator=drawn) * scales
    features = torch.nn.functional.normalize(features, dim=1)
    teacher = torch.randn(given.features, given.classes, generator=drawn)
    outputs = features @ teacher
    noise = _NOISE * float(outputs.std()) * torch.randn(outputs.shape, generator=drawn)
    labels = (outputs + noise).argmax(1)
    order = torch.randperm(given.rows, generator=drawn)
    n_forget = round(_FORGET_SHARE * given.rows)
    split = ForgetSplit(order[:n_forget].sort().values, order[n_forget:].sort().values, "fraction")

    config, device = LinearSettings(l2=given.l2), torch.device(given.device)
    original, seconds = timed(
        lambda: train_head(
            features[: given.rows], labels[: given.rows], given.classes, config, make_loss(given.loss), seed=0,
            device=device, dtype=torch.float64,
        ),
        device,
    )  # fmt: skip
    print(f"{given.loss}, {given.rows:,} x {given.features}, {given.classes} classes, {device}, "
          f"{torch.get_num_threads()} threads; the head on all rows: {seconds:.1f} s")  # fmt: skip
    design = make_design(labels[: given.rows], labels[given.rows :], split, n_shadows=given.shadows, seed=0)
    subsets = [(*design.forgotten(number), design.retained(number)) for number in range(given.shadows)]
    known = [design.targets_T, design.others_O]

    def train() -> list:
        trainer, heads = SubsetTrainer(original, features, labels, config, seed=0, known=known), []
        for first in range(0, given.shadows, trainer.batch):
            part = subsets[first : first + trainer.batch]
            trainer.clear()
            heads += trainer.train(part, [original] * len(part), first=first)
        return heads

    before = time.process_time()
    heads, seconds = timed(train, device)
    spent = time.process_time() - before
    print(f"{given.shadows} shadows: {seconds:.1f} s, {1000 * seconds / given.shadows:.0f} ms each; {spent:.1f} s of "
          "processor time")  # fmt: skip
    for number in range(min(given.direct, given.shadows)):
        index = torch.cat(subsets[number])
        alone, seconds = timed(
            lambda index=index: train_like(original, features[index], labels[index], config, seed=0), device
        )
        off = float((alone.parameters_CE - heads[number].parameters_CE).norm() / alone.parameters_CE.norm())
        print(f"shadow {number} alone, from zero: {seconds:.1f} s; parameters differ by {off:.1e} of their norm")


def timed(make, device):
    """Return what a function returns, and the seconds it took."""
    started = time.perf_counter()
    found = make()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, time.perf_counter() - started


if __name__ == "__main__":
    main()

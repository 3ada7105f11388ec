"""Count how often the interval of each attack on Retrained holds one half, where there is nothing to find.

    OMP_NUM_THREADS=1 python scripts/attack_coverage.py [--seeds 20] [--shadows 64] [--loss quadratic]

Every seed draws a test part and a forget set of scikit-learn's digits, trains shadows, and attacks Retrained by every
attack. An interval of 95 % misses one half in one of twenty seeds. The script exits with 1 if an attack misses it so
often that this had a chance below 1 % (binomial). --original attacks Original instead, which must be found.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from scipy.stats import binom

from sfu.evaluation.attacks.base import Attack
from sfu.experiment import pipeline
from sfu.experiment.config import EvaluationSettings, RunConfig
from sfu.heads.settings import LinearSettings
from sfu.losses.base import make_loss

_CHANCE = 0.01


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--shadows", type=int, default=64)
    parser.add_argument("--loss", default="quadratic")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--original", action="store_true")
    given = parser.parse_args(arguments)

    row = "original" if given.original else "retrained"
    found: dict[str, list[dict[str, object]]] = {}
    for seed in range(given.seeds):
        config = RunConfig(
            head=LinearSettings(l2=given.l2), loss=make_loss(given.loss), seed=seed, methods=[row],
            evaluation=EvaluationSettings(attacks=Attack.names(), shadows=given.shadows),
        )  # fmt: skip
        config.backbone.name, config.forget.fraction = "none", 0.1
        with tempfile.TemporaryDirectory() as folder:
            rows = pipeline.run(config, Path(folder), show_progress=False)["rows"]
        for name, figures in rows[row]["attacks"].items():
            found.setdefault(name, []).append(figures)
    misses = 0
    print(f"{row}, {given.loss}, {given.seeds} seeds: mean area, its least and largest, intervals with one half")
    for name, seeds in found.items():
        areas = [figures["auc"] for figures in seeds]
        holds = sum(low <= 0.5 <= high for low, high in (figures["auc_interval"] for figures in seeds))
        print(f"{name:15} {statistics.fmean(areas):.3f}  {min(areas):.3f} {max(areas):.3f}  {holds} of {given.seeds}")
        misses += binom.cdf(holds, given.seeds, 0.95) < _CHANCE
    if misses and not given.original:
        print(f"{misses} attacks find something where there is nothing.")
    return int(misses > 0 and not given.original)


if __name__ == "__main__":
    sys.exit(main())

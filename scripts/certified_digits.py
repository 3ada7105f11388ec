"""A thousand certified removals on digits, one after another: what is left of the gradient and what the bounds say.

    python scripts/certified_digits.py                # all ten classes, logistic loss
    python scripts/certified_digits.py --loss softmax

The budget is that of epsilon 1 and delta 1e-4; removals go on beyond it here, to show where each bound meets it. The
training noise has a fixed seed, so that the numbers can be had again.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.certified_removal import BOUNDS, CertifiedRemoval, gradient_norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=["logistic", "softmax"], default="logistic")
    parser.add_argument("--l2", type=float, default=1e-2)
    parser.add_argument("--noise", type=float, default=10.0)
    parser.add_argument("--removals", type=int, default=1000)
    arguments = parser.parse_args()
    data = load_digits()
    features = torch.nn.functional.normalize(torch.from_numpy(data.data), dim=1)
    labels = torch.from_numpy(data.target).long()
    config = LinearSettings(l2=arguments.l2, objective_noise=arguments.noise)
    where = {"seed": 0, "noise_seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(features, labels, 10, config, make_loss(arguments.loss), **where)
    method = CertifiedRemoval(epsilon=1e6, bound="sharp")
    budget = CertifiedRemoval(epsilon=1.0, delta=1e-4).budget(arguments.noise)
    start = head.certificate.residual_bound
    total, exceeded, broken = dict.fromkeys(BOUNDS, start), dict.fromkeys(BOUNDS, 0), 0
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    print(f"budget {budget:.3f}; after training {start:.1e}")
    print(f"removed {'residual':>10s} " + " ".join(f"{name:>16s}" for name in BOUNDS))
    for done in range(1, arguments.removals + 1):
        row, keep = order[done - 1 : done], order[done:]
        retained = RetainedSet(features[keep], labels[keep])
        result = method.unlearn(ForgetRequest(head, features[row], labels[row]), MethodContext(), retained)
        head = result.head
        for name in BOUNDS:
            total[name] += result.details[f"bound_{name}"]
            exceeded[name] = exceeded[name] or (done if total[name] > budget else 0)
        left = gradient_norm(head, head.rows(retained.features_RD, retained.labels_R))
        broken += left > head.certificate.residual_bound
        if done in (1, 10, 100, arguments.removals):
            print(f"{done:7d} {left:10.2e} " + " ".join(f"{total[name]:16.2e}" for name in BOUNDS), flush=True)
    print(f"residual above the accumulated bound: {broken} times")
    print("first refused: " + ", ".join(f"{name} {exceeded[name] or 'none'}" for name in BOUNDS))


if __name__ == "__main__":
    main()

"""A thousand certified removals on digits, one after another: what is left of the gradient and what the bounds say.

    python scripts/certified_digits.py                  # all ten classes, logistic and softmax loss

It prints the two tables of docs/losses.md. The budget is that of epsilon 1 and delta 1e-4; removals go on beyond it
here, to show where each bound meets it. The training noise has a fixed seed, so that the numbers can be had again.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.certified_removal import CertifiedRemoval, gradient_norm

BOUNDS = ("sharp", "data_dependent", "worst_case")


def remove(loss: str, arguments: argparse.Namespace, budget: float) -> tuple[list[list[str]], list[str]]:
    """Remove rows one by one; return the lines of the first table and the line of the second, cell by cell."""
    data = load_digits()
    features = torch.nn.functional.normalize(torch.from_numpy(data.data), dim=1)
    labels = torch.from_numpy(data.target).long()
    config = LinearSettings(l2=arguments.l2, objective_noise=arguments.noise)
    where = {"seed": 0, "noise_seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(features, labels, 10, config, make_loss(loss), **where)
    method = CertifiedRemoval(epsilon=1e6, bound="sharp")
    start = head.certificate.residual_bound
    total, lines, broken = dict.fromkeys(BOUNDS, start), [], 0
    refused = dict.fromkeys(("measured", *BOUNDS), 0)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for done in range(1, arguments.removals + 1):
        row, keep = order[done - 1 : done], order[done:]
        retained = RetainedSet(features[keep], labels[keep])
        result = method.unlearn(ForgetRequest(head, features[row], labels[row]), MethodContext(), retained)
        head = result.head
        for name in BOUNDS:
            total[name] += result.details[f"bound_{name}"]
        left = gradient_norm(head, head.rows(retained.features_RD, retained.labels_R))
        broken += left > head.certificate.residual_bound
        for name, spent in {"measured": left, **total}.items():
            refused[name] = refused[name] or (done if spent > budget else 0)
        if done in (1, 100, arguments.removals):
            lines.append([f"`{loss}`", f"{done}", f"{left:.4g}", *(f"{total[name]:.4g}" for name in BOUNDS)])
    print(f"{loss}: residual above the accumulated bound: {broken} times", flush=True)
    return lines, [f"`{loss}`", *(str(done or f"none of {arguments.removals:,}") for done in refused.values())]


def show(header: list[str], lines: list[list[str]]) -> None:
    for cells in ([*header], ["---"] * len(header), *lines):
        print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=["logistic", "softmax"], default=["logistic", "softmax"])
    parser.add_argument("--l2", type=float, default=1e-2)
    parser.add_argument("--noise", type=float, default=10.0)
    parser.add_argument("--removals", type=int, default=1000)
    arguments = parser.parse_args()
    budget = CertifiedRemoval(epsilon=1.0, delta=1e-4).budget(arguments.noise)
    print(f"budget: {budget:.3f}")
    found = [remove(loss, arguments, budget) for loss in arguments.losses]
    bounds = [f"`{name}`" for name in BOUNDS]
    show(["loss", "removed", "measured residual", *bounds], [line for lines, _ in found for line in lines])
    show(["loss", "`measured`", *bounds], [line for _, line in found])


if __name__ == "__main__":
    main()

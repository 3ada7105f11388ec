"""KLoM of every row: the margins of an ensemble of heads that its method unlearned, against those of retrained heads.

What is compared, for ``evaluation.klom=M``:

- With ``head.training=exact``, each of M members draws as many retained rows as there are, with replacement. Original
  is trained on these and the forget rows, and the row's method unlearns the forget rows from it as in the run: a
  source-free one in a process of its own, one with the retained data from the drawn rows.
- With ``adam`` or ``sgd``, each member trains on all rows with a seed of its own, which the method has, too.
- The M reference heads are trained without the forget rows on M further draws (or with M further seeds), so Retrained's
  own KLoM shows what sampling alone leaves. All rows share the members and the reference.

Shapes: M members, N rows, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sfu.data.seal import sealed
from sfu.evaluation.distances import klom, klom_summary, label_margins
from sfu.experiment.context import RowResult, RunContext
from sfu.heads.base import Head
from sfu.heads.settings import Training
from sfu.heads.train import train_like
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.seeds import derive_seed
from sfu.unlearning.base import UnlearningMethod

log = logging.getLogger(__name__)

Compute = Callable[
    [RunContext, str, UnlearningMethod, ForgetRequest, "RetainedSet | None", MethodContext], RowResult
]  # fmt: skip
PARTS = ("forget", "test")


def klom_of_rows(run: RunContext, compute: Compute) -> dict[str, dict[str, Any]]:
    """Return what metrics.json says of the KLoM of each row; nothing with ``evaluation.klom=0``.

    Args:
        run: A run whose rows are done and whose data are loaded again.
        compute: Runs one method on one request.
    """
    n_heads = run.config.evaluation.klom
    if n_heads == 0:
        return {}
    able = {name: method for name, method in run.methods.items() if _can_repeat(run, name, method)}
    nothing = {"klom": None, "klom_forget": None, "klom_test": None}
    if run.data.n_classes < 2 or run.retrained is None:
        log.warning("KLoM needs a retrained head and at least two classes, so there is none.")
        return dict.fromkeys(run.methods, nothing)
    reference: list[Tensor] = []
    margins: dict[str, list[Tensor]] = {name: [] for name in able}
    with run.display.stage(f"KLoM over {n_heads} heads") as tick:
        for member in range(n_heads):
            rows, seed = _draw(run, f"reference {member}")
            reference.append(_margins(run, _train(run, rows, seed)))
            rows, seed = _draw(run, f"member {member}")
            original = _train(run, _with_forget_rows(run, rows), seed)
            request = replace(run.request, head=original)
            for name, method in list(able.items()):
                if (head := _unlearned(run, compute, name, method, request, rows, seed)) is None:
                    del able[name], margins[name]
                else:
                    margins[name].append(_margins(run, head))
            tick(member + 1, n_heads)
    found = {name: _summary(run, torch.stack(own), torch.stack(reference)) for name, own in margins.items()}
    return {name: found.get(name, nothing) for name in run.methods}


def _can_repeat(run: RunContext, name: str, method: UnlearningMethod) -> bool:
    """Whether the row can be run on other heads just as it was on this one."""
    outcome = run.results[name].unlearned
    if outcome is not None and (outcome.trials or method.augmentations):
        what = "its setting is chosen with Retrained at hand" if outcome.trials else "it augments images"
        log.warning("%s has no KLoM, because %s.", name, what)
    return outcome is not None and not outcome.trials and not method.augmentations


def _draw(run: RunContext, purpose: str) -> tuple[RetainedSet, int]:
    """Return the retained rows of one head, drawn with replacement if training is exact, and its seed."""
    seed = derive_seed(run.seeds["evaluation"], f"klom {purpose}")
    index_R = run.split.retain_R
    if run.config.head.training is Training.exact:
        drawn = torch.Generator().manual_seed(seed)
        index_R = index_R[torch.randint(len(index_R), (len(index_R),), generator=drawn)]
    return RetainedSet(run.data.train_features_ND[index_R], run.data.train_labels_N[index_R]), seed


def _with_forget_rows(run: RunContext, rows: RetainedSet) -> RetainedSet:
    forget_F = run.split.forget_F
    return RetainedSet(
        torch.cat([rows.features_RD, run.data.train_features_ND[forget_F]]),
        torch.cat([rows.labels_R, run.data.train_labels_N[forget_F]]),
    )


def _train(run: RunContext, rows: RetainedSet, seed: int) -> Head:
    like = run.request.head
    return train_like(like, rows.features_RD, rows.labels_R, run.config.head, seed=seed, noise_seed=seed)


def _unlearned(
    run: RunContext, compute: Compute, name: str, method: UnlearningMethod, request: ForgetRequest, rows: RetainedSet,
    seed: int,
) -> Head | None:  # fmt: skip
    """Return what a row makes of one member, or ``None`` if it fails."""
    seeds = {purpose: derive_seed(seed, purpose) for purpose in run.seeds} | {"training": seed}
    context = replace(run.method_context(), seeds=seeds, keep_path=False, keep_curvature=False)
    retained = rows if method.access is Access.RETAINED else None
    given = request.without_summary() if method.access is Access.FORGET else request
    with nullcontext() if retained is not None else sealed(run.sealed_paths):
        result = compute(run, name, method, given, retained, context)
    if result.unlearned is None:
        log.warning("%s has no KLoM, because it failed on one of the heads: %s", name, result.error)
        return None
    return result.unlearned.head


def _margins(run: RunContext, head: Head) -> Tensor:
    """Return the margins of the forget rows and then of the test rows."""
    forget_F, data = run.split.forget_F, run.data
    parts = (
        (data.train_features_ND[forget_F], data.train_labels_N[forget_F]), (data.test_features_TD, data.test_labels_T)
    )  # fmt: skip
    return torch.cat([label_margins(head.logits(features).double(), labels) for features, labels in parts])


def _summary(run: RunContext, own_MN: Tensor, reference_MN: Tensor) -> dict[str, Any]:
    n_forget = run.split.forget_F.numel()
    parts = dict(zip(PARTS, klom(own_MN, reference_MN).split([n_forget, own_MN.shape[1] - n_forget]), strict=True))
    found = {part: klom_summary(of_part) for part, of_part in parts.items() if of_part.numel()}
    return {"klom": {"heads": len(own_MN), **found}} | {
        f"klom_{part}": found[part]["percentile_95"] if part in found else None for part in PARTS
    }

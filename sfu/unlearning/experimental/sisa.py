r"""SISA: train on disjoint shards, so that forgetting means retraining only the shards that held the examples.

The answer is the mean of the shard models' outputs. For heads affine in their parameters that is one head, at the mean
of the shards' parameters, which the row returns.

**Caveat.** SISA is another way of training. It forgets without error from *its own* original, the ensemble trained on
all data, and not from the single head of this run; its distance to Retrained is that of an ensemble of heads that each
saw a fifth of the data.

Shards are drawn at random over all training rows. A deployment would load the shards without an example to forget from
storage. Here no ensemble was stored, so all shards are trained, and the details say how many held an example to forget
and how much space storing them takes. Slices within a shard would only save time if training were incremental.

Source: Bourtoule et al., Machine unlearning, IEEE S&P 2021; S = 5 shards. The paper lets shards vote, or averages their
softmax outputs; sfu averages the outputs themselves, which one head can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from sfu.errors import ConfigError
from sfu.heads.settings import HeadSettings
from sfu.heads.train import train_like
from sfu.lazy import torch
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.differentiable import remaining
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.settings import RunSettings


@dataclass(frozen=True)
class Sisa(UnlearningMethod, name="sisa"):
    """Train every shard on its retained rows, and return the mean head."""

    head: HeadSettings
    shards: int = setting(5, "S.", at_least=1)
    settings_used = ()
    access = Access.RETAINED

    @classmethod
    def from_config(cls, run: RunSettings, curvature: Any, settings: dict[str, Any]) -> Self:
        return super().from_config(run, curvature, {"head": run.head, **settings})

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        rows, like = remaining(retained, request, self.method_name), request.head.parameters_CE
        shard_N = torch.randint(self.shards, (request.head.n_train,), generator=context.generator("folds"))
        shard_R, shard_F = shard_N[: rows.count], shard_N[rows.count :]
        total_CE, empty = torch.zeros_like(like), [k for k in range(self.shards) if not (shard_R == k).any()]
        if empty:
            raise ConfigError(
                f"sisa: shards={self.shards} leaves a shard of the {rows.count} retained rows empty. Give fewer shards."
            )
        for shard in range(self.shards):
            part = rows.at((shard_R == shard).nonzero()[:, 0].to(rows.labels_N.device))
            trained = train_like(
                request.head, part.features_ND, part.labels_N, self.head, seed=context.seeds.get("training", 0),
                weights_N=part.weights_N,
            )  # fmt: skip
            total_CE += trained.parameters_CE
            context.report(shard + 1, self.shards)
        touched = shard_F.unique().numel()
        stored = self.shards * like.numel() * like.element_size() / 2**20
        details = {"shards": self.shards, "shards_retrained": touched, "storage_mb": stored}
        note = f"another way of training: {touched} of {self.shards} shards to retrain, {stored:.2g} MB to store"
        return UnlearningResult(request.unlearned_head(total_CE / self.shards), details=details, note=note)

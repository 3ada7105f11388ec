r"""Train many heads like one, each on its own subset of a pool of rows.

Under the quadratic loss a head is one factorisation of the sums :math:`A = \sum_i v_i a_i a_i^T` and
:math:`B = \sum_i v_i t_i a_i^T` over its rows. A subset is given in parts, and the sums of a part are made in the way
that adds up the fewest rows: its own, or those that it leaves out of a larger set whose sums are known. Parts that
several subsets share are summed once, and the factorisations of several subsets are batched. Heads of other losses are
trained to their optimum from a given head, which is near if it shares most of its rows. Heads of other training, or
with noise, are trained as they always are.

Shapes: P rows of the pool, B subsets, C classes, E = D features (+ 1 with bias), K directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from sfu.errors import SingularHessianError
from sfu.heads.base import Head
from sfu.heads.forgotten import Forgotten
from sfu.heads.kept import Kept
from sfu.heads.ledger import Ledger
from sfu.heads.linear import LinearHead
from sfu.heads.optimum import not_reached
from sfu.heads.projections import DIRECTIONS, projected
from sfu.heads.recipe import OPTIMUM
from sfu.heads.settings import HeadSettings, Keep, Training
from sfu.heads.sketch import Sketch
from sfu.heads.summary import bound_of_moments
from sfu.heads.train import train_like
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.gram import add_gram
from sfu.losses.rows import design_matrix
from sfu.operators.plan import plan_structure
from sfu.operators.structure import Structure
from sfu.seeds import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

BATCH_BYTES = 1 << 30
"""Memory for the matrices of the subsets that are factorised together."""
_PIECE = 8192  # rows of one product
_MATRICES = 8  # E x E matrices of a subset that exist at a time
_COPIES = 4  # of the parameters of a head


class _Sums(NamedTuple):
    """Sums over rows: ``v a a^T``, ``v t a^T``, weights v, classes, features, and projections with their squares."""

    moments_EE: Tensor
    cross_CE: Tensor
    weight_1: Tensor
    counts_C: Tensor
    features_D: Tensor
    projected_2K: Tensor

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(*(one + two for one, two in zip(self, other, strict=True)))

    def minus(self, other: _Sums) -> _Sums:
        return _Sums(*(one - two for one, two in zip(self, other, strict=True)))


class SubsetTrainer:
    """Trains heads with the kind, loss, class weights, device and dtype of ``original`` on rows of one pool.

    Attributes:
        batch: How many subsets are best trained at a time.
    """

    def __init__(
        self,
        original: Head,
        features_PD: Tensor,
        labels_P: Tensor,
        config: HeadSettings,
        *,
        seed: int,
        known: Sequence[Tensor] = (),
    ) -> None:
        """Sum over the pool, if the loss is quadratic.

        Args:
            original: The head to train others like.
            features_PD: Features of the pool.
            labels_P: Class numbers.
            config: Settings of training.
            seed: Seed of training that draws.
            known: Sets of row numbers from which parts of subsets are drawn.
        """
        self._original, self._config, self._seed = original, config, seed
        self._features_PD, self._labels_P = features_PD, labels_P
        self._by_sums = self._needs_sums_alone()
        self._known: list[tuple[Tensor, int, _Sums]] = []
        self._made: dict[bytes, _Sums] = {}
        self.batch = max(1, BATCH_BYTES // (8 * _COPIES * original.parameters_CE.numel()))
        if self._by_sums:
            width = original.parameters_CE.shape[1]
            self.batch = max(1, BATCH_BYTES // (8 * _MATRICES * width**2))
            self._weights_P = original.loss.row_weights(labels_P, None, torch.float64)
            for index in (torch.arange(len(labels_P)), *known):
                inside_P = torch.zeros(len(labels_P), dtype=torch.bool)
                inside_P[index] = True
                self._known.append((inside_P, len(index), self._sums(index)))

    def _needs_sums_alone(self) -> bool:
        original, config = self._original, self._config
        exact = config.training is Training.exact and config.objective_noise == 0
        if not isinstance(original, LinearHead) or not exact or original.layout is not Layout.shared:
            return False
        n_classes, width = original.parameters_CE.shape
        plan = plan_structure(Layout.shared, n_classes, width, original.n_train, original.parameters_CE.device)
        return plan.structure is Structure.shared

    def clear(self) -> None:
        """Drop the sums of parts that were met so far; they are needed no more once other subsets are trained."""
        self._made.clear()

    def train(
        self, subsets: Sequence[Sequence[Tensor]], starts: Sequence[Head], first: int = 0, *, summarised: bool = True
    ) -> list[Head]:
        """Return a head for each subset.

        Args:
            subsets: Disjoint parts of each subset, as row numbers of the pool.
            starts: A head for each subset, to start from where the optimum takes several steps.
            first: Number of the first subset, for the seeds of training that draws.
            summarised: Whether the heads must have what ``head.keep`` asks for of their rows.

        Raises:
            SfuError: A head cannot be trained (:func:`sfu.heads.train.train_like`).
        """
        if self._by_sums:
            return self._train_by_sums(subsets, summarised)
        return [
            train_like(
                self._original, self._features_PD[index], self._labels_P[index], self._config,
                seed=derive_seed(self._seed, f"subset {number}"), start_CE=start.parameters_CE,
            )
            for number, (index, start) in enumerate(zip(map(_joined, subsets), starts, strict=True), first)
        ]  # fmt: skip

    def _train_by_sums(self, subsets: Sequence[Sequence[Tensor]], summarised: bool) -> list[Head]:
        config = self._config
        sums = [reduce(_Sums.plus, map(self._sums_of, parts)) for parts in subsets]
        counts = [sum(map(len, parts)) for parts in subsets]
        weight_B11 = torch.stack([one.weight_1 for one in sums])[:, None]
        moments_BEE = torch.stack([one.moments_EE for one in sums]) / weight_B11
        cross_BCE = torch.stack([one.cross_CE for one in sums]) / weight_B11
        ridge_E = config.l2 * self._original.regularized_E.double()
        hessian_BEE = moments_BEE + torch.diag(ridge_E)
        factor_BEE, info_B = torch.linalg.cholesky_ex(hessian_BEE)
        if bool(info_B.any()):
            raise SingularHessianError(
                f"the Gram matrix of the {counts[int(info_B.argmax())]} rows of a shadow plus "
                f"head.l2={config.l2:g} is singular to float64 precision. Raise head.l2."
            )
        parameters_BCE = torch.cholesky_solve(cross_BCE.mT, factor_BEE).mT
        left_BCE = cross_BCE - parameters_BCE @ hessian_BEE
        parameters_BCE = parameters_BCE + torch.cholesky_solve(left_BCE.mT, factor_BEE).mT
        dtype = self._original.parameters_CE.dtype
        gradient_BCE = (rounded := parameters_BCE.to(dtype).double()) @ hessian_BEE - cross_BCE
        if dtype == torch.float64:
            worst = float(gradient_BCE.flatten(1).norm(dim=1).max())
            if not worst <= config.tolerance:
                raise not_reached(worst, config.tolerance, "on the rows of a shadow")
        return [
            self._head(
                one, parameters_CE, gradient_CE, self._kept(one, moments_EE, count) if summarised else Kept(), count
            )
            for one, parameters_CE, gradient_CE, moments_EE, count in zip(
                sums, rounded, gradient_BCE, moments_BEE, counts, strict=True
            )
        ]

    def _kept(self, sums: _Sums, moments_EE: Tensor, count: int) -> Kept:
        config = self._config
        kept = Kept(
            bound_of_moments(self._original.loss, moments_EE, rows=count), sums.counts_C / count,
            trace=float(moments_EE.trace()), projected_2K=sums.projected_2K / count,
        )  # fmt: skip
        if config.keep is Keep.full:
            return replace(kept, mean_D=sums.features_D / count, data_hessian=moments_EE)
        if config.keep is Keep.sketch:
            return replace(kept, mean_D=sums.features_D / count, sketch=Sketch.encode(moments_EE, config.sketch))
        return kept

    def _head(self, sums: _Sums, parameters_CE: Tensor, gradient_CE: Tensor, kept: Kept, count: int) -> Head:
        original, config = self._original, self._config
        head = replace(
            original, parameters_CE=parameters_CE, gradient_CE=gradient_CE, l2=config.l2, n_train=count, kept=kept,
            weight=None if self._weights_P is None else float(sums.weight_1),
            forgotten=Forgotten(ledger=Ledger() if config.ledger else None),
            recipe=replace(original.recipe, trained=OPTIMUM),
        )  # fmt: skip
        return head.to(original.parameters_CE.device, original.parameters_CE.dtype).laid_out()

    def _sums_of(self, part: Tensor) -> _Sums:
        """Sum over some rows, or take away the rows that they leave out of a known set, whichever are fewer."""
        inside_P = torch.zeros(len(self._labels_P), dtype=torch.bool)
        inside_P[part] = True
        ways: list[tuple[Tensor, _Sums | None]] = [(inside_P.nonzero().squeeze(1), None)]
        for known_P, count, sums in self._known:
            if count - len(part) <= len(ways[0][0]) and not bool((inside_P & ~known_P).any()):
                ways.append(((known_P & ~inside_P).nonzero().squeeze(1), sums))
        made = [way for way in ways if way[0].numpy().tobytes() in self._made]
        index, whole = min(made or ways, key=lambda way: len(way[0]))
        key = index.numpy().tobytes()
        if key not in self._made:
            self._made[key] = self._sums(index)
        own = self._made[key]
        return own if whole is None else whole.minus(own)

    def _sums(self, index: Tensor) -> _Sums:
        original = self._original
        like, (n_classes, width) = original.parameters_CE, original.parameters_CE.shape
        new = torch.zeros(width, width, dtype=torch.float64, device=like.device)
        moments_EE, cross_CE, weight_1 = new, new.new_zeros(n_classes, width), new.new_zeros(1)
        sums_D, projected_2K = new.new_zeros(original.n_features), []
        for part_B in index.split(_PIECE):
            features_BD, labels_B = self._features_PD[part_B], self._labels_P[part_B]
            design_BE = design_matrix(features_BD, original.bias, like.device, torch.float64)
            weighted_BE = design_BE
            if self._weights_P is not None:
                weights_B = self._weights_P[part_B].to(design_BE)
                weighted_BE, weight_1 = design_BE * weights_B[:, None], weight_1 + weights_B.sum()
            else:
                weight_1 = weight_1 + len(part_B)
            targets_BC = -original.loss.slopes(design_BE.new_zeros(len(part_B), n_classes), labels_B.to(like.device))
            add_gram(moments_EE, design_BE, weighted_BE)
            cross_CE.addmm_(targets_BC.T, weighted_BE)
            sums_D += design_BE[:, : original.n_features].sum(0)
            along_BK = projected(design_BE[:, : original.n_features])
            projected_2K.append(torch.stack([along_BK.sum(0), along_BK.square().sum(0)]))
        counts_C = self._labels_P[index].bincount(minlength=n_classes).double().to(like.device)
        return _Sums(
            moments_EE,
            cross_CE,
            weight_1,
            counts_C,
            sums_D,
            torch.stack(projected_2K or [new.new_zeros(2, DIRECTIONS)]).sum(0),
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))

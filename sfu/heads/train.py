"""Train a head as configured: the one entry that both Original and Retrained go through.

Shapes: N rows, D features, C classes; parameters ``_CE`` are ``[C, E]``, E = D (+ 1 with bias), or ``[1, p]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sfu.distributed import Ranks
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.heads.certificate import Certificate
from sfu.heads.descent import train_adam, train_sgd
from sfu.heads.exact import train_exact
from sfu.heads.forgotten import Forgotten
from sfu.heads.kept import Kept
from sfu.heads.ledger import Ledger
from sfu.heads.normal_equations import Checkpoint
from sfu.heads.optimum import rounding_bound, warn_if_separated, warn_of_absent_classes
from sfu.heads.recipe import EARLY_STOPPED, OPTIMUM
from sfu.heads.settings import HeadSettings, Training
from sfu.heads.summary import check_keep, summarise
from sfu.lazy import torch
from sfu.losses.base import Layout, Loss
from sfu.losses.rows import check_weights

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.heads.cores.core import Core


def train_head(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    head: HeadSettings,
    loss: Loss,
    *,
    device: torch.device,
    dtype: torch.dtype,
    core: Core | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> Head:
    """Train a head of the kind ``head.name`` on all rows given; ``balanced`` class weights are counted here.

    With ``ranks`` each process gives its own rows, and all get the head of all rows. Call it within
    :meth:`sfu.distributed.Ranks.together` then, so that an error of one process reaches the others.

    Exact training is float64 whatever ``dtype``; the head is rounded to it in the end, and its stored gradient is that
    of the rounded head. A linearised head needs its ``core``. ``options`` are further keywords of :func:`train_like`,
    of which ``seed`` is needed.

    Raises:
        SingularHessianError: Exact training with a singular Gram matrix and no regularisation.
        SolverError: Exact training did not reach ``head.tolerance``, or SGD diverged.
        ConfigError: The curvature to store is too large, or the loss's settings do not fit the data.
        DataError: The sample weights are not one finite number of at least 0 for each row, or are all 0.
    """
    made = loss.for_labels(labels_N, n_classes, ranks)
    untrained = Head.named(head.name, "head.name").untrained(head, made, features_ND.shape[1], n_classes, core)
    return train_like(untrained.to(device, dtype), features_ND, labels_N, head, ranks=ranks, **options)


def train_like(
    original: Head,
    features_ND: Tensor,
    labels_N: Tensor,
    config: HeadSettings,
    *,
    seed: int,
    weights_N: Tensor | None = None,
    noise: Certificate | None = None,
    noise_seed: int | None = None,
    start_CE: Tensor | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Head:
    """Train from zero on other rows, with the kind, loss, class weights, network, device and dtype of ``original``.

    Args:
        seed: Seed of the order of rows in gradient descent.
        weights_N: Sample weights.
        noise: With ``head.objective_noise``, the certificate whose b is used again; ``None`` draws a new b.
        noise_seed: Seed of b: results can be repeated, but certify nothing to whoever knows the seed. ``None`` uses the
            operating system's entropy.
        start_CE: Where exact training starts if the optimum takes several steps, such as the optimum of similar rows;
            by default at zero.
        checkpoint: Where exact training of a linearised head saves its progress.
        progress: Called with (steps done, largest number of steps).
        ranks: The processes whose rows are trained on together; ``None`` for the rows of this one alone.

    Raises:
        SfuError: See :func:`train_head`.
    """
    dtype, exact = original.parameters_CE.dtype, config.training is Training.exact
    if ranks is not None and not (exact and config.objective_noise == 0):
        raise ConfigError(
            "rows of several processes are only trained on with head.training=exact and without head.objective_noise, "
            "because each process would draw its own numbers. Set these, or train in one process."
        )
    if weights_N is not None:
        weights_N = check_weights(weights_N, labels_N, ranks)
    n_train = labels_N.shape[0] if ranks is None else int(ranks.add_up(torch.tensor(labels_N.shape[0])))
    zero_CE = torch.zeros_like(original.parameters_CE, dtype=torch.float64 if exact else dtype)
    blank = replace(
        original, parameters_CE=zero_CE, gradient_CE=zero_CE, l2=config.l2, n_train=n_train,
        weight=original.total_weight, kept=Kept(), certificate=None,
        forgotten=Forgotten(ledger=Ledger() if config.ledger else None),
        recipe=replace(original.recipe, trained=OPTIMUM if exact else EARLY_STOPPED),
    )  # fmt: skip
    check_keep(blank, config.keep)
    rows = blank.rows(features_ND, labels_N, weights_N, cache=True, ranks=ranks)
    certificate = None
    if config.objective_noise > 0 and noise is not None:
        certificate = replace(noise, secret_CE=noise.noise_CE.to(zero_CE), residual_bound=0.0)
    elif config.objective_noise > 0:
        shape = (blank.n_classes, rows.width)
        certificate = Certificate.draw(config.objective_noise, shape, zero_CE.device, noise_seed)
    blank = replace(blank, weight=None if rows.weights_N is None else rows.weight, certificate=certificate)
    warn_of_absent_classes(blank, rows)
    objective = blank.objective_of(rows.weight)
    if exact:
        start_CE = None if original.layout is Layout.shared else start_CE  # one step from zero is enough
        optimum = train_exact(
            objective, rows, zero_CE if start_CE is None else start_CE.to(zero_CE), tolerance=config.tolerance,
            max_iterations=config.max_iterations, warm=start_CE is not None, progress=progress, checkpoint=checkpoint,
        )  # fmt: skip
        parameters_CE, gradient_CE = rows.same(optimum.parameters_CE).to(dtype).double(), optimum.gradient_CE
    elif config.training is Training.sgd:
        parameters_CE = train_sgd(objective, rows, zero_CE, config.sgd, seed=seed, progress=progress)
    else:
        parameters_CE = train_adam(objective, rows, zero_CE, config.adam, seed=seed, progress=progress)
    if not exact or dtype != torch.float64:
        gradient_CE = objective.gradient(rows, parameters_CE)
    trained = replace(blank, parameters_CE=parameters_CE, gradient_CE=gradient_CE)
    if certificate is not None:
        bound = rows.weight * float(trained.gradient_CE.norm()) + rounding_bound(trained, rows)
        trained = replace(trained, certificate=replace(certificate, residual_bound=bound))
    warn_if_separated(trained, rows)
    trained = replace(trained, kept=summarise(trained, rows, config))
    return trained.to(zero_CE.device, dtype).laid_out()

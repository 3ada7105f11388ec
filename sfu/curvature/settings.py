"""Settings of curvature estimators, one dataclass each. This module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from sfu.data.augmentations import check_augmentations
from sfu.errors import ConfigError
from sfu.operators.structure import Structure
from sfu.registry import add_modules
from sfu.schema import Choice, plain_value, setting

_SETTINGS_HERE = ("base", "diagonal_fit", "hessians", "psd_fit", "shrinkage")

DEFAULT_ESTIMATOR = "psd_fit"


class Subspace(Enum):
    """Where a linearised head's Hessian is fitted: what conjugate gradients would explore, or random directions."""

    krylov = "krylov"
    random = "random"


class Measurement(Enum):
    """What is observed at a perturbed point."""

    loss = "loss"
    gradient = "gradient"


class Pairs(Enum):
    """Independent perturbations, or +d and -d together."""

    single = "single"
    antithetic = "antithetic"


class GradientTerm(Enum):
    """The sign of ``g^T d`` in the residual of a loss measurement: as published, as it should be, or left out."""

    paper = "paper"
    exact = "exact"
    none = "none"


class LowerBound(Enum):
    """The L of ``X >= L``: 0, ``l2 R``, or the forget set's share ``N_f/N H_f``."""

    zero = "zero"
    l2 = "l2"
    forget_share = "forget_share"


class Prior(Enum):
    """The X0 of the fit: 0, ``l2 R``, the identity matched in trace to the measurements, or their diagonal."""

    zero = "zero"
    l2 = "l2"
    identity = "identity"
    diagonal = "diagonal"


class Solver(Enum):
    """What solves the fit: the quickest of sfu's algorithms, one of them by name, or cvxpylayers (D <= 64)."""

    auto = "auto"
    projected_gradient = "projected_gradient"
    dual_newton = "dual_newton"
    cvxpylayers = "cvxpylayers"


class OnDoubt(Enum):
    """What happens to a step that may do harm, and to rows that contradict what is known of the head."""

    withhold = "withhold"
    apply = "apply"


class Regularization(Enum):
    """How the estimate is damped before it is inverted."""

    none = "none"
    fixed = "fixed"
    mean_eigenvalue = "mean_eigenvalue"
    cross_validated = "cross_validated"


@dataclass
class CurvatureSettings(Choice, kind="curvature"):
    """Base of the settings of all estimators. A member is registered under the name of its estimator."""

    prefix: ClassVar[str] = "curvature"
    chosen_by: ClassVar[str] = "estimator"

    estimator: str = setting("", "Where the Hessian of the Newton step comes from.")
    structure: Structure = setting(Structure.auto, "How the Hessian is held.", inherited=True)
    augment: list[str] = setting(
        [],
        "Augmentations of the forget images, whose curvature is averaged in; a random one may be named repeatedly.",
        inherited=True,
    )
    unlabelled: Any = setting(
        None, "File of features of unlabelled rows like the training rows, or a list of files.", inherited=True,
        location=True,
    )  # fmt: skip
    regularization: Regularization = setting(Regularization.cross_validated, "How the Hessian is damped.")
    rho: float = setting(0.0, "Damping, for regularization=fixed.", at_least=0)
    folds: int | None = setting(
        None, "Folds of the cross-validation; null: 5, or none below 5 rows; 0: none.", at_least=0,
        inherited=True,
    )  # fmt: skip
    on_doubt: OnDoubt = setting(
        OnDoubt.withhold, "What to do with a step that is predicted to do harm.", inherited=True
    )

    def check_settings(self) -> None:
        """Check the augmentations, the files and the folds."""
        check_augmentations(self.augment, "curvature.augment")
        given = plain_value(self.unlabelled)
        files = [given] if isinstance(given, str) else given
        if files is not None and not (
            isinstance(files, list) and all(isinstance(file, str) and file for file in files)
        ):
            raise ConfigError(
                f"curvature.unlabelled={given} names no files. Give the path of an .npz, .safetensors, .parquet or "
                ".arrow file, or a list of paths."
            )
        object.__setattr__(self, "unlabelled", files or None)
        if self.folds == 1:
            raise ConfigError(
                "curvature.folds=1 leaves no rows to estimate from. Give 0 (no cross-validation) or more."
            )
        if self.regularization is Regularization.cross_validated and self.folds == 0:
            raise ConfigError(
                "curvature.folds=0 contradicts curvature.regularization=cross_validated. Give at least 2 folds."
            )

    @property
    def applies_anyway(self) -> bool:
        """Whether the forget set is taken for a random sample, and the step applied whatever is predicted."""
        return self.on_doubt is OnDoubt.apply

    def files(self) -> list[str]:
        """Return the files of unlabelled rows."""
        return list(self.unlabelled or ())


add_modules(CurvatureSettings, "sfu.curvature.estimators", skip=_SETTINGS_HERE)


@dataclass
class PsdFitSettings(CurvatureSettings, name="psd_fit"):
    """A PSD-constrained fit to what perturbed heads show of the forget set: the paper's estimator."""

    perturbations: int | None = setting(
        None, "Perturbed heads; null: all that gradients can tell, or 500 losses.", at_least=1, inherited=True
    )
    measurement: Measurement = setting(Measurement.gradient, "What is observed at a perturbed head.")
    pairs: Pairs = setting(Pairs.single, "Independent perturbations, or +d and -d together.")
    per_class: bool = setting(True, "A perturbation for every class; false: one shared by all classes.")
    scale: float | None = setting(
        None, "Standard deviation of a perturbation's entries; null: 1, or small for losses that are not quadratic.",
        above=0,
    )  # fmt: skip
    gradient_term: GradientTerm = setting(GradientTerm.exact, "Sign of g^T d in the residual of a loss measurement.")
    lower_bound: LowerBound = setting(LowerBound.l2, "The L of X >= L.")
    subtract_lower_bound: bool = setting(False, "Use X - L, as the authors' notebook does.")
    prior: Prior = setting(Prior.identity, "The X0 of the fit.")
    prior_strength: float = setting(1e-8, "The mu of the fit, relative to the operator's largest eigenvalue.", above=0)
    solver: Solver = setting(Solver.auto, "Algorithm.", inherited=True)
    tolerance: float = setting(
        1e-8, "Relative duality gap; for cvxpylayers, the eps of SCS.", above=0, below=1, inherited=True
    )
    max_iterations: int | None = setting(
        None, "Iterations at most; null: what suits the algorithm.", at_least=1, inherited=True
    )
    subspace: Subspace = setting(Subspace.krylov, "Linearised heads: the subspace of the fit.")
    dimension: int = setting(16, "Linearised heads: its dimension.", at_least=1)

    def check_settings(self) -> None:
        """Check that pairs can be formed."""
        super().check_settings()
        if self.pairs is Pairs.antithetic and self.perturbations == 1:
            raise ConfigError("curvature.perturbations=1 is not a pair. Give at least 2, or curvature.pairs=single.")


@dataclass
class ClosedFormSettings(CurvatureSettings, name="closed_form"):
    """The forget set's own Hessian."""


@dataclass
class LedoitWolfSettings(CurvatureSettings, name="ledoit_wolf"):
    """The forget set's Hessian, shrunk towards the identity by Ledoit and Wolf's formula."""


@dataclass
class OasSettings(CurvatureSettings, name="oas"):
    """The forget set's Hessian, shrunk towards the identity by the oracle-approximating formula."""


@dataclass
class DiagonalSettings(CurvatureSettings, name="diagonal"):
    """A diagonal, fitted to losses at perturbed heads."""

    perturbations: int | None = setting(None, "Perturbed heads; null: 500.", at_least=1, inherited=True)
    scale: float | None = setting(
        None, "Standard deviation of a perturbation's entries; null: as for psd_fit.", above=0
    )
    prior_strength: float = setting(1e-8, "The mu of the fit, relative to its largest curvature.", above=0)


@dataclass
class TrainingCurvatureSettings(CurvatureSettings):
    """Base of estimators that know the training rows' curvature: there is nothing to cross-validate or augment."""

    augment: list[str] = field(default_factory=list, init=False)
    unlabelled: Any = field(default=None, init=False)
    regularization: Regularization = setting(
        Regularization.none, "How the Hessian is damped.",
        choices=(Regularization.none, Regularization.fixed, Regularization.mean_eigenvalue),
    )  # fmt: skip
    folds: int | None = field(default=None, init=False)


@dataclass
class ExactSettings(TrainingCurvatureSettings, name="exact"):
    """The retained data's own Hessian. Not source-free."""


@dataclass
class HutchinsonSettings(TrainingCurvatureSettings, name="hutchinson"):
    """The diagonal of the retained data's Hessian, by random signs. Not source-free."""

    probes: int = setting(32, "Random vectors.", at_least=1)


@dataclass
class StoredSettings(TrainingCurvatureSettings, name="stored"):
    """The training Hessian that was stored with the head, without the forget rows."""


def curvature_settings(given: CurvatureSettings | Mapping[str, Any] | None = None, **more: Any) -> CurvatureSettings:
    """Return settings of the estimator that ``estimator`` names (``psd_fit`` by default), from a mapping or keywords.

    A choice may be given by its name (``measurement="loss"``). Settings are returned as they are.

    Raises:
        ConfigError: An unknown estimator or key, a wrong type, or a value out of range.
    """
    if isinstance(given, CurvatureSettings) and not more:
        return given
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"curvature must be settings or a mapping of them, not {type(given).__name__}.")
    values = {**(given or {}), **more}
    name = str(values.pop("estimator", DEFAULT_ESTIMATOR))
    return CurvatureSettings.make(name, **values)

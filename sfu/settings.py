"""The typed configuration. Every key a user may set stands here with its type, default and meaning.

Group files in ``configs/`` fill these; an unknown key or a value of the wrong type is refused when they are composed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sfu.errors import ConfigError


class Training(Enum):
    """How a head is trained."""

    exact = "exact"
    adam = "adam"
    sgd = "sgd"


class CoreWeights(Enum):
    """Where the fixed weights of a linearised head come from: those of the backbone, or training on public images."""

    pretrained = "pretrained"
    pretrain = "pretrain"


class Damaged(Enum):
    """What to do with images that cannot be decoded: stop, or leave them out and list them."""

    fail = "fail"
    skip = "skip"


class Estimator(Enum):
    """Where the Hessian of the Newton step comes from; one file each in ``sfu/curvature/estimators``."""

    psd_fit = "psd_fit"
    closed_form = "closed_form"
    ledoit_wolf = "ledoit_wolf"
    oas = "oas"
    diagonal = "diagonal"
    hutchinson = "hutchinson"
    stored = "stored"
    reference = "reference"
    exact = "exact"


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


class Structure(Enum):
    """How a Hessian is held: chosen by size, one block shared by the classes, one a class, one in all, or products."""

    auto = "auto"
    shared = "shared"
    blocks = "blocks"
    dense = "dense"
    products = "products"


class Regularization(Enum):
    """How the estimate is damped before it is inverted."""

    none = "none"
    fixed = "fixed"
    mean_eigenvalue = "mean_eigenvalue"
    cross_validated = "cross_validated"


class Tune(Enum):
    """How the settings of methods with a grid of them are chosen; see ``sfu/unlearning/tuning.py``."""

    authors = "authors"  # as published
    source_free = "source_free"  # by the forget set and the head alone
    oracle = "oracle"  # by the distance to Retrained: not source-free


@dataclass
class DatasetConfig:
    """Group ``dataset``."""

    name: str = MISSING
    path: str | None = None  # a feature file (dataset=features) or a folder of images (dataset=image_folder)
    root: str | None = None  # where a public dataset lies or is put; None: datasets/ in sfu's cache folder
    download: bool = True  # fetch a public dataset that is not there
    labels_csv: str | None = None  # dataset=image_folder: columns file, label (and split: train or test)
    clutter: bool = False  # dataset=caltech256: keep the class of clutter
    official_split: bool = True  # dataset=stanford_dogs: 12,000/8,580; false: dataset.test_fraction of all
    limit_per_class: int | None = None  # only the first so many images of each class, of each part
    damaged: Damaged = Damaged.fail
    test_fraction: float = 0.2  # held out where the dataset has no test part
    normalize_rows: bool = False  # every row of every part to norm 1
    n_classes: int | None = None  # None: counted from the labels
    core_fraction: float = 0.0  # head=linearised: training images that are public, for the core, and no user's
    core_seed: int = 0  # which ones


@dataclass
class BackboneConfig:
    """Group ``backbone``: what turns images into features. It is frozen and in evaluation mode, always."""

    name: str = MISSING  # none, pixels, or a model of the library; auto: none for features, resnet18 for images
    library: str = "torchvision"  # or timm
    weights: str = "default"  # default, none (random), or a file: .safetensors, or a torch file of tensors alone
    seed: int = 0  # of weights=none
    size: int | None = None  # resize the shorter side, then crop the centre; None: what the weights were made with
    mean: list[float] | None = None  # of each channel, in 0..1; None: what the weights were made with
    std: list[float] | None = None
    dtype: str = "float32"  # of the forward pass; features are kept in float32
    batch_size: int = 256
    workers: int | None = None  # threads that decode; None: one for each core
    cache: str | None = None  # folder of extracted features; None: features/ in sfu's cache folder


@dataclass
class AdamConfig:
    """Settings of ``head.training=adam``."""

    lr: float = 1e-2
    batch_size: int = 256
    max_epochs: int = 100
    patience: int = 5
    tolerance: float = 1e-4


@dataclass
class SgdConfig:
    """Settings of ``head.training=sgd``."""

    lr: float = 0.05
    momentum: float = 0.9
    batch_size: int = 64
    epochs: int = 50
    milestones: list[int] = field(default_factory=lambda: [24, 39])  # epochs after which the rate falls
    decay: float = 0.1  # by this factor


@dataclass
class PretrainConfig:
    """How the core of a linearised head is trained on ``dataset.core_fraction`` (cross-entropy, SGD, one cycle)."""

    epochs: int = 10
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    augment: bool = True  # flips and shifts, a new draw for every batch
    seed: int = 0


@dataclass
class HeadConfig:
    """Group ``head``."""

    name: str = MISSING
    l2: float = 1e-3  # of the mean objective
    bias: bool = False  # never regularised
    training: Training = Training.exact
    tolerance: float = 1e-8  # exact: the gradient norm of the mean objective to reach
    max_iterations: int = 200  # exact: Newton steps (linearised, quadratic: products)
    objective_noise: float = 0.0  # exact: standard deviation of the b of certified removal's term b^T w / n
    store_curvature: bool = False  # keep the Hessian of the training rows with the head
    adam: AdamConfig = field(default_factory=AdamConfig)
    sgd: SgdConfig = field(default_factory=SgdConfig)
    # head=linearised
    layers: int = 1  # components from the end: 1 is the last linear layer
    core: CoreWeights = CoreWeights.pretrained
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    negative_slope: float = 0.0  # of the rectifiers of the linearised layers
    dtype: str = "float32"  # of passes through the linearised layers; vectors are in `dtype`
    batch_size: int | str = "auto"  # images of one pass; auto: what fits the device


@dataclass
class LossConfig:
    """Group ``loss``."""

    name: str = MISSING
    target_scale: float = 1.0  # quadratic: the value of the hot target
    smoothing: float = 0.5  # huber_hinge: half-width of the rounded corner
    class_weights: Any = None  # null, balanced, or a number for every class


@dataclass
class ForgetConfig:
    """What to forget; see :func:`sfu.data.split.make_split`."""

    fraction: float | None = None  # 0.1 if nothing else is given
    classes: list[Any] | None = None  # numbers, or names where the dataset has them
    indices: str | None = None  # a file of training row numbers
    files: str | None = None  # a text file of image files, one a line, as paths or their last parts


@dataclass
class CurvatureConfig:
    """Group ``curvature``: the estimate of the retained data's Hessian, and its regularisation."""

    estimator: Estimator = Estimator.psd_fit
    structure: Structure = Structure.auto  # how it is held
    # what is observed
    perturbations: int | None = None  # None: all that gradients can tell; of losses, 500
    measurement: Measurement = Measurement.gradient
    pairs: Pairs = Pairs.single
    per_class: bool = True  # False: one perturbation shared by all classes
    scale: float | None = None  # standard deviation of a perturbation's entries; None: 1, or small but for quadratic
    gradient_term: GradientTerm = GradientTerm.exact
    # the fit
    lower_bound: LowerBound = LowerBound.l2
    subtract_lower_bound: bool = False  # use X - L, as the authors' notebook does
    prior: Prior = Prior.identity
    prior_strength: float = 1e-8  # mu, relative to the operator's largest eigenvalue
    solver: Solver = Solver.auto
    tolerance: float = 1e-8
    max_iterations: int | None = None  # None: what suits the algorithm
    # a linearised head: the fit is to a subspace, and the identity elsewhere
    subspace: Subspace = Subspace.krylov
    dimension: int = 16
    # estimator=hutchinson: random vectors
    probes: int = 32
    # estimator=reference: public, unlabelled features
    reference_path: str | None = None
    reference_key: str = "features"
    reference_weight: float | None = None  # None: cross-validated
    # more curvature from the forget images alone: their flipped, cropped, ... copies, averaged in
    augment: list[str] = field(default_factory=list)
    # the inverse
    regularization: Regularization = Regularization.cross_validated
    rho: float = 0.0  # for regularization=fixed
    folds: int | None = None  # None: 5, or none below 20 rows to forget; 0: no cross-validation
    force: bool = False  # apply a step that is predicted to be worse than nothing


def curvature_settings(given: CurvatureConfig | Mapping[str, Any] | None) -> CurvatureConfig:
    """Settings with every type checked and every name of a choice turned into the choice.

    Raises:
        ConfigError: An unknown key, a wrong type or an unknown choice.
    """
    if not isinstance(given, CurvatureConfig | Mapping | None):
        raise ConfigError(f"curvature must be a CurvatureConfig or a mapping, not {type(given).__name__}.")
    try:
        layers = [OmegaConf.structured(CurvatureConfig)]
        if isinstance(given, CurvatureConfig):
            layers.append(OmegaConf.create(vars(given)))
        elif given is not None:
            layers.append(OmegaConf.create(dict(given)))
        made = OmegaConf.to_object(OmegaConf.merge(*layers))
    except OmegaConfBaseException as error:
        accepted = ", ".join(CurvatureConfig.__dataclass_fields__)
        raise ConfigError(f"{str(error).splitlines()[0]}. curvature takes {accepted}.") from error
    assert isinstance(made, CurvatureConfig)
    return made


@dataclass
class NewtonConfig:
    """Settings of every Newton step."""

    noise_sigma: float = 0.0  # Gaussian noise on the parameters
    steps: int = 1  # Newton steps, the curvature evaluated again before each
    batches: int = 1  # forget in so many parts, one after another


@dataclass
class MethodConfig:
    """A row of the table: a file of ``configs/method``, or an entry of ``variants``."""

    base: str | None = None  # variants only: the method to start from
    method: str | None = None  # a file in sfu/unlearning/methods
    curvature: Any = None  # a file of configs/curvature, a mapping, or None: over the run's `curvature`
    settings: dict[str, Any] = field(default_factory=dict)  # of the method itself
    grid: dict[str, Any] = field(default_factory=dict)  # for tune: settings (or curvature.KEY) to lists of values


@dataclass
class SeedsConfig:
    """Seeds; those left out are derived from ``seed``, but for ``objective``, which must be secret."""

    split: int | None = None
    training: int | None = None
    perturbation: int | None = None
    noise: int | None = None
    evaluation: int | None = None
    objective: int | None = None  # of head.objective_noise; None: the system's entropy. Given, it certifies nothing


@dataclass
class EvaluationConfig:
    """Settings of the evaluation."""

    membership_splits: int = 5
    trade_off: bool = False  # test and forget accuracy after each step of iterative methods: trade_off.json and .png


@dataclass
class LoggerConfig:
    """Group ``logger``."""

    name: str = MISSING
    mode: str | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


class Reuse(Enum):
    """When to take results that are kept from earlier runs, and to keep those of this one."""

    sweeps = "sweeps"
    always = "always"
    never = "never"


@dataclass
class RunConfig:
    """The whole configuration of a run."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    newton: NewtonConfig = field(default_factory=NewtonConfig)
    forget: ForgetConfig = field(default_factory=ForgetConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    methods: list[str] = field(default_factory=list)
    variants: dict[str, Any] = field(default_factory=dict)  # rows of your own: a MethodConfig each
    tune: Tune = Tune.authors
    tune_budget: int = 9  # settings tried for every method that has a grid, no more and no fewer
    seed: int = 0
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    device: str = "auto"
    dtype: str = "float64"
    threads: int | None = None  # CPU threads; None: as many as PyTorch takes by itself
    published: str | None = None  # a table of the paper to set beside the result of a sweep: table_1, ..., table_s2
    reuse: Reuse = Reuse.sweeps  # take what earlier sweeps computed under the very same settings, data and code


def register() -> None:
    """Make the schema known to Hydra as ``sfu_schema``."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="sfu_schema", node=RunConfig)

"""What the stages of one run share: its settings, and what earlier stages have left for later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sfu.data.backbones.backbone import Backbone
from sfu.data.canaries import Canaries
from sfu.data.feature_data import FeatureData
from sfu.data.features.extract import Extractor
from sfu.data.images.images import Images
from sfu.data.load import ImageParts
from sfu.data.split import ForgetSplit
from sfu.experiment.cache import StageCache
from sfu.experiment.config import RunConfig
from sfu.experiment.estimate import Estimate
from sfu.experiment.resources import Usage, measured
from sfu.experiment.validate import resolve_device, resolve_dtype
from sfu.heads.base import Head
from sfu.heads.cores.core import Core
from sfu.progress import ProgressDisplay, Tick
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult


@dataclass(frozen=True)
class RowResult:
    """The outcome of one method: what it returned, or the error that stopped it.

    Attributes:
        isolation: What protected the data from a source-free row (:data:`sfu.results.rows.PROTECTIONS`), with commas
            between; ``None`` for a row with data.
    """

    usage: Usage
    unlearned: UnlearningResult | None
    error: str | None = None
    isolation: str | None = None


@dataclass(repr=False)
class RunContext:
    """One run under way. Fields without a default exist once the stage that sets them has run.

    Attributes:
        config: The whole configuration.
        folder: Where the run writes heads and split.
        methods: The methods by row name.
        display: Progress on the terminal.
        on_stage: Called with the name and the seconds of every finished stage.
        cache: Results of earlier runs; none by default.
        methods_named: Whether the methods are the configuration's, which names can build again.
        images: The dataset before features are extracted, if it holds images.
        trunk: The backbone of a linearised head, below its ``core``.
        data: Features and labels; absent between the discard and the reload.
        canaries: The training rows that were spoiled, if any.
        data_record: What ``metrics.json`` says of the data.
        expected: What the run takes, estimated once the data are there; ``None`` for linearised heads.
        forget_images: The images to forget, and no others, if a method augments them.
        sealed_paths: Files and folders that source-free methods must not open.
        results: The outcome of every method that has run, by row name.
        retrained: The head to compare with; ``None`` if it could not be trained.
    """

    config: RunConfig
    folder: Path
    methods: Mapping[str, UnlearningMethod]
    display: ProgressDisplay = field(default_factory=lambda: ProgressDisplay(False))
    on_stage: Callable[[str, float], None] = lambda name, seconds: None
    cache: StageCache | None = None
    methods_named: bool = False

    seeds: dict[str, int] = field(init=False)
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)

    images: ImageParts | None = field(init=False, default=None)
    trunk: Backbone | None = field(init=False, default=None)
    core: Core | None = field(init=False, default=None)
    data: FeatureData = field(init=False)
    canaries: Canaries | None = field(init=False, default=None)
    data_record: dict[str, object] = field(init=False)
    split: ForgetSplit = field(init=False)
    expected: Estimate | None = field(init=False, default=None)
    forget_images: Images | None = field(init=False, default=None)
    request: ForgetRequest = field(init=False)
    sealed_paths: list[Path] = field(init=False)
    results: dict[str, RowResult] = field(init=False, default_factory=dict)
    retrained: Head | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Resolve seeds, device and dtype.

        Raises:
            ConfigError: The device is unknown or absent.
        """
        self.seeds = self.config.seed_for.resolve(self.config.seed)
        self.device, self.dtype = resolve_device(self.config.device), resolve_dtype(self.config.dtype)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Report the seconds of a block that succeeds as those of a stage."""
        with measured(self.device) as usage:
            yield
        self.on_stage(name, usage.seconds)

    def waiting(self, what: str) -> Callable[[], None]:
        """Return what tells the user that another job computes the same result."""
        return lambda: self.display.say(f"{what}: another job is computing the same result; waiting for it")

    def extractor(self, tick: Tick) -> Extractor:
        """Return what turns images into features."""
        return Extractor(self.config.backbone, self.device, progress=tick, say=self.display.say, backbone=self.trunk)

    def method_context(self, tick: Tick | None = None) -> MethodContext:
        """Return what methods may use besides their request."""
        evaluation = self.config.evaluation
        return MethodContext(
            dict(self.seeds), tick, normalize_rows=self.config.dataset.normalize_rows,
            keep_path=evaluation.trade_off, keep_curvature=evaluation.theory,
        )  # fmt: skip

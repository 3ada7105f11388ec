"""The command ``sfu-plan``: what to keep of the training rows, before they are discarded."""

from __future__ import annotations

import json
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.cli.commands import compose_settings, run_command
from sfu.errors import ConfigError
from sfu.lazy import first_imports

if TYPE_CHECKING:
    from sfu.evaluation.keep_options import KeepPlan, Outlook

_WIDTH = 80
_DESCRIPTION = """\
What to keep of the training rows before you discard them: the bytes it takes with the head, how close
to retraining a later request would come, and what it gives away. With a file of features, every way is tried on them.
With a saved head, random requests are predicted from what the head keeps.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed."""
    parser = ArgumentParser(prog="sfu-plan", description=_DESCRIPTION)
    parser.add_argument(
        "source", metavar="HEAD_OR_FEATURES",
        help="a file of features as for dataset=features (.npz, .safetensors), or a saved head without its suffix",
    )  # fmt: skip
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="with features, as for sfu: head.l2=1e-4 loss=softmax"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)
    run_command(parser, arguments)


def _plan(given: Namespace) -> None:
    from sfu.files import SECRET

    source = Path(given.source).expanduser()
    stem = source.with_suffix("") if source.suffix in (".json", SECRET, ".safetensors") else source
    if stem.with_name(stem.name + ".json").is_file():
        title, plan = _of_head(stem, given.settings)
    elif source.exists():
        title, plan = _of_features(source, given.settings)
    else:
        raise ConfigError(
            f"{source} is neither a file of features nor a saved head (looked from {Path.cwd()}). Give the path of an "
            ".npz or .safetensors file of features, or that of a head's files without their suffix."
        )
    print(json.dumps(_as_json(plan), indent=2) if given.json else f"{textwrap.fill(title, _WIDTH)}\n\n{table(plan)}")


def _of_head(stem: Path, settings: list[str]) -> tuple[str, KeepPlan]:
    with first_imports():
        from sfu.evaluation.keep_options import predicted_options
    from sfu.heads.files import load_head

    if settings:
        raise ConfigError(
            f"{settings[0]} does not apply to a saved head, which has settings of its own. Leave it out, or give a "
            "file of features."
        )
    head = load_head(stem)
    return f"{stem}: {head!r}", predicted_options(head)


def _of_features(path: Path, settings: list[str]) -> tuple[str, KeepPlan]:
    with first_imports():
        from sfu.evaluation.keep_options import measured_options
    from sfu.data.datasets.features import FeatureFile
    from sfu.data.load import load_dataset
    from sfu.experiment.validate import resolve_device, resolve_dtype
    from sfu.heads.settings import LinearSettings
    from sfu.progress import ProgressDisplay

    config = compose_settings(["dataset=features", *settings])
    if not isinstance(config.head, LinearSettings) or not isinstance(config.dataset, FeatureFile):
        raise ConfigError(
            "sfu-plan trains a linear head on the file that you give. Leave head=, dataset= and dataset.path= out."
        )
    config.dataset.path = str(path)
    seeds = config.seed_for.resolve(config.seed)
    with ProgressDisplay() as display:
        data = load_dataset(config.dataset, seeds["split"])
        with display.stage("trying what a head can keep") as tick:
            plan = measured_options(
                data, config.head, config.loss, device=resolve_device(config.device),
                dtype=resolve_dtype(config.dtype), seed=config.seed, progress=tick,
            )  # fmt: skip
    rows = f"{data.n_train:,} rows of {data.n_features:,} features, {data.n_classes} classes"
    return f"{path}: {rows}, loss={config.loss.name}, head.l2={config.head.l2:g}", plan


def table(plan: KeepPlan) -> str:
    """Return the plan as text of at most 80 columns."""
    lines = [
        f"{'':<39}distance to Retrained",
        f"{'kept':<23}{'bytes':>12}{'1 %':>7}{'10 %':>7}{'a class':>9}  gives away",
    ]
    for one in plan.options:
        first, second, third = map(_shown, one.outlooks)
        lines.append(f"{one.name:<23}{one.n_bytes:>12,}{first:>7}{second:>7}{third:>9}  {one.gives_away}".rstrip())
    remarks = [
        "0 is Retrained and 1 is doing nothing. 1 % and 10 % are random sets of rows. ~ is predicted, not measured; "
        "? cannot be predicted.",
        *plan.remarks,
        "Set head.keep=bound, sketch or full (and head.sketch) when you train. The difference of two means, or of two "
        "full Hessians, gives back a single forgotten row, and that of the moments of two heads tells something of it, "
        "so they are saved in a file for the head's owner alone (docs/contract.md).",
    ]
    return "\n".join([*lines, "", *(textwrap.fill(one, _WIDTH) for one in remarks)])


def _shown(outlook: Outlook | None) -> str:
    if outlook is None:
        return "?"
    return f"{'' if outlook.measured else '~'}{outlook.distance:.3f}"


def _as_json(plan: KeepPlan) -> dict[str, Any]:
    def told(outlook: Outlook | None) -> dict[str, Any] | None:
        return None if outlook is None else outlook._asdict()

    names = ("random_1", "random_10", "class")
    options = [
        {
            "kept": one.name, "bytes": one.n_bytes, "gives_away": one.gives_away,
            **{name: told(outlook) for name, outlook in zip(names, one.outlooks, strict=True)},
        }
        for one in plan.options
    ]  # fmt: skip
    return {"options": options, "remarks": plan.remarks}


if __name__ == "__main__":
    main()

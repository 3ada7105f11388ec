"""The command ``sfu``: compose a configuration, run it (or a sweep of it), print and save the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sfu import __version__
from sfu.config_files import MAIN_CONFIG, config_dir
from sfu.errors import SfuError
from sfu.experiment.dry_run import FLAG, dry_run, look_at_job

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Entry point of ``sfu`` and ``python -m sfu``; exits with 1 after a clear message if anything failed."""
    if sys.argv[1:] == ["--version"]:
        print(f"sfu {__version__}")
        return
    from sfu.data.features.ranks import launched_by_torchrun

    if launched_by_torchrun():
        print(
            "sfu: an experiment is one process. Under torchrun, extract the features first "
            "(torchrun ... -m sfu.cli.features extract key=value ...), then run sfu by itself.",
            file=sys.stderr,
        )
        sys.exit(1)
    asked_for_tracebacks = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra

    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from sfu.experiment.config import register
    from sfu.experiment.explain import explain

    register()
    failed, looking = False, FLAG in sys.argv[1:]
    try:
        main_of = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=MAIN_CONFIG)
        if looking:
            with dry_run(sys.argv) as tally:
                look: Callable[[], None] = main_of(lambda config: look_at_job(config, tally))
                look()
                print(tally.sentence())
        else:
            start: Callable[[], None] = main_of(_job)
            start()
    except KeyboardInterrupt:
        print("sfu: interrupted; what was finished is kept.", file=sys.stderr)
        sys.exit(130)
    except (SfuError, HydraException, OmegaConfBaseException, OSError) as error:
        if asked_for_tracebacks:
            raise
        print(f"sfu: {explain(error)}", file=sys.stderr)
        failed = True
    except RuntimeError as error:
        if asked_for_tracebacks or "srun" not in str(error):  # how submitit says that this is no Slurm machine
            raise
        print("sfu: launcher=slurm needs Slurm (srun is not found); try launcher=submitit_local here.", file=sys.stderr)
        failed = True
    finally:
        if not looking:
            _finish_sweep()
    if failed:
        sys.exit(1)


def _job(config: DictConfig) -> None:
    from sfu.experiment.job import run_job

    run_job(config)


def _finish_sweep() -> None:
    """Print and save the table of a sweep, if this was one and any job left a result."""
    from sfu.experiment.sweep import current_sweep, report_sweep

    sweep = current_sweep()
    if sweep is not None and sweep[0].is_dir():
        report_sweep(*sweep)

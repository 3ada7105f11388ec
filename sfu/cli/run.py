"""The command ``sfu``: compose a configuration, run it (or a sweep of it), print and save the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sfu import __version__
from sfu.cli.help import help_text, keys_text, rows_text
from sfu.config_files import MAIN_CONFIG, config_dir
from sfu.data.features.ranks import launched_by_torchrun
from sfu.errors import SfuError
from sfu.experiment.dry_run import FLAG, dry_run, inspect_job
from sfu.names import visible

if TYPE_CHECKING:
    from omegaconf import DictConfig

_UNDER_TORCHRUN = (
    "an experiment is one process. Under torchrun, extract the features first "
    "(torchrun ... -m sfu.cli.features extract key=value ...), then run sfu by itself."
)


def main() -> None:
    """Entry point of ``sfu`` and ``python -m sfu``; exits with 1 after a clear message if anything failed."""
    try:
        if _print_and_return(sys.argv[1:]):
            return
    except BrokenPipeError:  # sfu --keys | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except SfuError as error:
        _fail(str(error))
    if launched_by_torchrun():
        _fail(_UNDER_TORCHRUN)
    wants_tracebacks = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra

    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from sfu.experiment.explain import explain

    try:
        if FLAG in sys.argv[1:]:
            with dry_run(sys.argv) as tally:
                _compose_and_call(lambda config: inspect_job(config, tally))
                print(tally)
        else:
            try:
                _compose_and_call(_run_job)
            finally:
                _report_sweep()
    except KeyboardInterrupt:
        print("sfu: interrupted. Results that were finished are saved.", file=sys.stderr)
        sys.exit(130)
    except (SfuError, HydraException, OmegaConfBaseException, OSError) as error:
        if wants_tracebacks:
            raise
        _fail(explain(error))
    except (RuntimeError, ValueError) as error:
        if not wants_tracebacks and "srun" in str(error):  # how submitit says that this machine has no Slurm
            _fail("launcher=slurm needs Slurm, and srun is not found. Use launcher=submitit_local here.")
        if not wants_tracebacks and "Config group override" in str(error):
            _fail("a group of settings is null. Name one of its choices, as in dataset=digits.")
        raise


def _print_and_return(arguments: list[str]) -> bool:
    """Answer the flags that only print; ``False`` if there is none."""
    first, rest = (arguments or [""])[0], arguments[1:]
    if first == "--version":
        print(f"sfu {__version__}")
    elif first in ("-h", "--help"):
        print(help_text(), flush=True)
    elif first == "--rows":
        print(rows_text(), flush=True)
    elif first == "--keys":
        print(keys_text(rest), flush=True)
    else:
        return False
    return True


def _compose_and_call(task: Callable[[DictConfig], None]) -> None:
    """Call ``task`` with the configuration of every job that the command line asks for."""
    import hydra

    from sfu.experiment.config import register

    register()
    start: Any = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=MAIN_CONFIG)(task)
    start()


def _run_job(config: DictConfig) -> None:
    from sfu.experiment.job import run_job

    run_job(config)


def _report_sweep() -> None:
    """Print and save the table of a sweep, if this was one and any job left a result."""
    from sfu.experiment.sweep import report_sweep, take_sweep

    sweep = take_sweep()
    if sweep is not None and sweep[0].is_dir():
        report_sweep(*sweep)


def _fail(message: str) -> None:
    shown = visible(message, keep="\n")
    print(f"sfu: {shown}", file=sys.stderr)
    sys.exit(1)

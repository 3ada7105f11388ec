"""The command ``sfu``: compose a configuration, run it (or a sweep of it), print and save the result."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sfu import __version__
from sfu.cli.help import help_text, keys_text, rows_text
from sfu.config_files import MAIN_CONFIG, config_dir
from sfu.data.features.ranks import launched_by_torchrun
from sfu.errors import SfuError
from sfu.experiment.dry_run import FLAG, MULTIRUN, dry_run, inspect_job
from sfu.names import visible
from sfu.processes import die_with_parent, exit_code_of, signals_as_exceptions

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sfu.experiment.sweep import Sweep
    from sfu.results.run_folder import FoundRun

_UNDER_TORCHRUN = (
    "an experiment is one process. Under torchrun, extract the features first "
    "(torchrun ... -m sfu.cli.features extract key=value ...), then run sfu by itself."
)


def main() -> None:
    """Entry point of ``sfu`` and ``python -m sfu``; exits with 1 after a clear message if anything failed.

    It exits with 130 after Ctrl-C and with 143 after SIGTERM.
    """
    try:
        with signals_as_exceptions(_stop_jobs):
            _main()
    except KeyboardInterrupt as stop:
        print("sfu: interrupted. Results that were finished are saved.", file=sys.stderr)
        sys.exit(exit_code_of(stop))


def _main() -> None:
    try:
        if _print_and_return(sys.argv[1:]):
            return
    except BrokenPipeError:  # sfu --keys | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except SfuError as error:
        _fail(str(error))
    sys.argv[1:] = _multirun_first(sys.argv[1:])
    if launched_by_torchrun():
        _fail(_UNDER_TORCHRUN)
    wants_tracebacks = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of being printed by Hydra

    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from sfu.experiment.explain import explain, wrong_choice
    from sfu.experiment.quoting import unreadable

    try:
        if FLAG in sys.argv[1:]:
            with dry_run(sys.argv) as tally:
                _compose_and_call(lambda config: inspect_job(config, tally))
                print(tally)
        else:
            _run_jobs()
    except (SfuError, HydraException, OmegaConfBaseException, OSError) as error:
        if wants_tracebacks:
            raise
        _fail((isinstance(error, HydraException) and unreadable(sys.argv[1:])) or explain(error))
    except (RuntimeError, ValueError, TypeError) as error:
        if not wants_tracebacks and "srun" in str(error):  # how submitit says that this machine has no Slurm
            _fail("launcher=slurm needs Slurm, and srun is not found. Use launcher=submitit_local here.")
        problem = None if wants_tracebacks else wrong_choice(sys.argv[1:])
        if problem is not None:
            _fail(problem)
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


def _multirun_first(arguments: list[str]) -> list[str]:
    """Move ``-m`` to the front: Hydra takes settings in one place alone, and it may stand between them."""
    return sorted(arguments, key=lambda argument: argument not in MULTIRUN)


def _compose_and_call(task: Callable[[DictConfig], Exception | None]) -> None:
    """Call ``task`` with the configuration of every job that the command line asks for.

    Hydra prints a line of its own before it raises what a job has raised. The first error of a job in this process is
    therefore held until Hydra has returned, and raised then. In a process of a launcher, an error that the task returns
    has been recorded, and one that it raises has not.
    """
    import hydra

    from sfu.experiment.config import register

    main_process = os.getpid()
    errors: list[Exception] = []

    def call(config: DictConfig) -> None:
        here = os.getpid() == main_process
        try:
            error = task(config)
        except Exception as unrecorded:
            if not here:
                raise
            error = unrecorded
        if here and error is not None:
            errors.append(error)
        elif error is not None and not isinstance(error, SfuError | OSError):
            traceback.print_exception(error)

    register()
    start: Any = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=MAIN_CONFIG)(call)
    start()
    if errors:
        raise errors[0]


def _run_jobs() -> None:
    """Run the job, or the jobs of a sweep and then its table, whether or not all of them succeeded.

    Raises:
        ArtifactError: All jobs succeeded, but the table cannot be written.
        SfuError: A job failed.
    """
    try:
        _compose_and_call(_run_job)
    except BaseException:
        try:
            _report_sweep()
        except (SfuError, OSError) as error:
            print(f"sfu: the sweep's table could not be saved: {error}", file=sys.stderr)
        raise
    failed = _report_sweep()
    if failed:  # in processes of a launcher: others would have raised
        raise SfuError(f"job {failed[0].job}: {failed[0].problem}")


def _run_job(config: DictConfig) -> Exception | None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:  # a worker of launcher=local_2
        die_with_parent(parent.pid)
    from sfu.experiment.job import run_job

    with signals_as_exceptions():
        return run_job(config)


def _stop_jobs() -> None:
    module = sys.modules.get("sfu.experiment.sweep")  # slow to import, and imported once a sweep has started
    sweep: Sweep | None = None if module is None else module.current_sweep()
    if sweep is not None:
        sweep.stop_jobs()


def _report_sweep() -> list[FoundRun]:
    """Print and save the table of a sweep, if this was one and any job left a result; return the jobs that failed."""
    from sfu.experiment.sweep import report_sweep, take_sweep

    sweep = take_sweep()
    if sweep is None or not sweep.folder.is_dir():
        return []
    sweep.settle()
    report_sweep(sweep)
    return [run for run in sweep.jobs() if run.state == "failed"]


def _fail(message: str) -> None:
    shown = visible(message, keep="\n")
    print(f"sfu: {shown}", file=sys.stderr)
    sys.exit(1)

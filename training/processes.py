"""Processes of a run: their ranks, their number, and their common end."""

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from training.errors import LOST_LINE, LOST_PROCESS, UserError, is_agreed, is_launcher_error

LAUNCHER = "LATENT_THINKING_LAUNCHER"
"""Environment variable of launched ranks: the process id of rank 0, which started them."""
PATIENCE = 10.0
"""Seconds that a rank has to end after its launcher, before it is killed."""


class LostRankError(UserError):
    """Raised if a rank that this process launched fails after training."""


def is_later_rank(devices: str) -> bool:
    """Returns whether this process is known to be a rank above 0, before there is a trainer.

    Args:
        devices: ``--trainer.devices``. SLURM tasks with one device each are separate runs.
    """
    if torch.distributed.is_torchelastic_launched():
        return os.environ.get("RANK", "0") != "0"
    if (launcher := os.environ.get(LAUNCHER)) is not None:
        return int(launcher) != os.getpid()
    has_several = devices.isdecimal() and int(devices) > 1 and slurm_tasks() > 1
    return has_several and os.environ.get("SLURM_PROCID", "0") != "0"


def slurm_tasks() -> int:
    """Returns the number of tasks of the SLURM job step, 1 outside a job.

    Raises:
        UserError: If SLURM_NTASKS is not a number.
    """
    tasks = os.environ.get("SLURM_NTASKS") or "1"
    if not tasks.isdecimal():
        raise UserError(f"SLURM_NTASKS ({tasks}) must be a number of tasks; unset it outside SLURM")
    return int(tasks)


def settle_processes(trainer: L.Trainer, devices: object) -> None:
    """Takes this process's rank from the trainer, and checks the number of processes.

    Lightning's default for ``rank_zero_only`` is RANK or SLURM_PROCID, which pods and job steps
    also set for single-process programs.

    Args:
        trainer: Trainer that the processes will run.
        devices: The given ``--trainer.devices``, such as ``auto``.

    Raises:
        UserError: If the number of started processes differs from the trainer's, or MASTER_PORT
            cannot be used.
    """
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]
    environment: ClusterEnvironment | None = getattr(trainer.strategy, "cluster_environment", None)
    _check_num_processes(trainer, environment, chosen=str(devices) == "1")
    if environment is None or trainer.world_size == 1:
        return
    launches = isinstance(environment, LightningEnvironment)
    launches = launches and not environment.creates_processes_externally
    _check_port(binds=launches and environment.node_rank() == 0)
    end_with_launcher()
    if launches:
        os.environ[LAUNCHER] = str(os.getpid())  # for the ranks that it launches


def _check_num_processes(
    trainer: L.Trainer, environment: ClusterEnvironment | None, *, chosen: bool
) -> None:
    devices, nodes = trainer.num_devices, trainer.num_nodes
    options = f"--trainer.devices {devices} --trainer.num_nodes {nodes}"
    if torch.distributed.is_torchelastic_launched():
        launcher, cure = "torchrun", "--nproc_per_node"
        rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif environment is None:
        tasks = slurm_tasks()
        if tasks > 1 and chosen:
            rank_zero_info(f"SLURM has {tasks} tasks; each trains a separate run ({options})")
        elif tasks > 1:
            rank_zero_warn(
                f"SLURM has {tasks} tasks, and --trainer.devices auto is one device here: each "
                "task trains a separate run. For one run of all tasks set --trainer.devices to "
                "the tasks of a node and --trainer.num_nodes; for separate runs, as in a sweep, "
                "set --trainer.devices 1"
            )
        return
    else:
        launcher, cure = type(environment).__name__.removesuffix("Environment"), "--ntasks-per-node"
        rank, started = environment.global_rank(), environment.world_size()
    if started == devices * nodes:
        return
    if rank:  # all processes detect it, and the first reports it
        sys.exit(2)
    raise UserError(
        f"{launcher} has started {started} processes, but {options} is a run of {devices * nodes}; "
        f"start as many as that ({cure}), or change trainer.devices and trainer.num_nodes"
    )


def _check_port(binds: bool) -> None:
    """Checks MASTER_PORT before any process waits for another; if unset, a free port is used.

    Args:
        binds: Whether this process will listen on the port.
    """
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return
    cure = "set it to a free port, or unset it where --trainer.devices starts the processes"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT ({port}) is not a port from 1 to 65535; {cure}")
    if binds:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"MASTER_PORT ({port}) cannot be used: {reason}; {cure}") from error


def code_without_report(error: Exception) -> int | None:
    """Returns the exit code of a process that leaves the error report to the first process.

    It is None for the first process and for errors that may affect only one process. After an error
    of all ranks it is 0, because a launcher that sees a failure would kill rank 0 before it has
    reported.
    """
    if is_agreed(error) and int(getattr(rank_zero_only, "rank", 0) or 0):
        return 0
    if is_launcher_error(error) and os.environ.get("SLURM_PROCID", "0") != "0":
        return 2
    return None


def await_launched(trainer: L.Trainer, patience: float = 60) -> None:
    """Waits until the ranks that this process launched end without an error.

    Nothing else reads their exit codes, so a run with a rank that fails at its very end would count
    as successful.

    Args:
        trainer: Trainer that launched them.
        patience: Seconds to wait for each rank; after that, a warning is logged.

    Raises:
        LostRankError: If a rank ends with an error.
    """
    launched: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    # Lightning joins the processes of multiprocessing (ddp_spawn), and raises their errors
    processes = [process for process in launched if isinstance(process, subprocess.Popen)]
    if processes:
        launched.clear()  # Lightning's observer reads the list, and kills this process on an error
    for rank, process in enumerate(processes, start=1):
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            rank_zero_warn(f"process {rank} of the run has not ended after {patience:.0f} s")
            continue
        if code:
            raise LostRankError(
                f"process {rank} of the run has failed at its end (exit code {code}); its own "
                "message is above"
            )


def end_with_launcher(patience: float = PATIENCE) -> None:
    """Makes a launched rank end after rank 0, even while it waits for others.

    A rank that waits for a connection or in an NCCL collective does not notice the end of rank 0.

    Args:
        patience: Seconds that the rank has to end without being killed.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # not inherited by programs that this process starts
    if launcher is not None and int(launcher) != os.getpid():  # equal in the launcher itself
        watch: Any = threading.Thread(
            target=_await_end, args=(int(launcher), patience), name="launcher", daemon=True
        )
        watch.start()


def _await_end(launcher: int, patience: float) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    time.sleep(patience)
    print(f"error: {LOST_LINE}", file=sys.stderr, flush=True)
    os._exit(LOST_PROCESS)

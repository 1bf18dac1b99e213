"""Processes of a run: their ranks and their number, and that all of them end."""

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

from training.errors import LOST_LINE, LOST_PROCESS, UserError, is_agreed, of_launcher

LAUNCHER = "LATENT_THINKING_LAUNCHER"
"""Environment variable of launched ranks: the process id of rank 0, which has started them."""
PATIENCE = 10.0
"""Seconds that a rank has to end by itself once the process that launched it has ended."""


class LostRankError(UserError):
    """A rank that this process has launched has failed after training."""


def is_later_rank(devices: str) -> bool:
    """Whether this process certainly is a rank above 0 of a run; before there is a trainer.

    Args:
        devices: ``--trainer.devices``. Tasks of SLURM with one device each are runs of their own.
    """
    if torch.distributed.is_torchelastic_launched():
        return os.environ.get("RANK", "0") != "0"
    if (launcher := os.environ.get(LAUNCHER)) is not None:
        return int(launcher) != os.getpid()
    several = devices.isdecimal() and int(devices) > 1 and slurm_tasks() > 1
    return several and os.environ.get("SLURM_PROCID", "0") != "0"


def slurm_tasks() -> int:
    """Returns the number of tasks of the SLURM job step, 1 outside of one.

    Raises:
        UserError: If SLURM_NTASKS is no number.
    """
    tasks = os.environ.get("SLURM_NTASKS") or "1"
    if not tasks.isdecimal():
        raise UserError(f"SLURM_NTASKS ({tasks}) must be a number of tasks; unset it outside SLURM")
    return int(tasks)


def settle_processes(trainer: L.Trainer, devices: object) -> None:
    """Takes this process's rank from the trainer, and checks its processes against the launcher's.

    Lightning's own choice of the process that logs and writes, ``rank_zero_only``, begins with
    RANK or SLURM_PROCID, which pods and job steps have set for programs that are one process each.

    Args:
        trainer: What the processes will run.
        devices: ``--trainer.devices`` as it was given, such as ``auto``.

    Raises:
        UserError: If another number of processes was started than the trainer asks for, or
            MASTER_PORT cannot be used.
    """
    rank_zero_only.rank = trainer.global_rank  # type: ignore[attr-defined]
    environment: ClusterEnvironment | None = getattr(trainer.strategy, "cluster_environment", None)
    _check_number(trainer, environment, chosen=str(devices) == "1")
    if environment is None or trainer.world_size == 1:
        return
    launches = isinstance(environment, LightningEnvironment)
    launches = launches and not environment.creates_processes_externally
    _check_port(binds=launches and environment.node_rank() == 0)
    end_with_launcher()
    if launches:
        os.environ[LAUNCHER] = str(os.getpid())  # of the ranks that it launches


def _check_number(
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
            rank_zero_info(f"SLURM has {tasks} tasks; each trains a run of its own ({options})")
        elif tasks > 1:
            rank_zero_warn(
                f"SLURM has {tasks} tasks, and --trainer.devices auto is one device here: each "
                "task trains a run of its own. For one run of all tasks set --trainer.devices to "
                "the tasks of a node and --trainer.num_nodes; for separate runs, as in a sweep, "
                "set --trainer.devices 1"
            )
        return
    else:
        launcher, cure = type(environment).__name__.removesuffix("Environment"), "--ntasks-per-node"
        rank, started = environment.global_rank(), environment.world_size()
    if started == devices * nodes:
        return
    if rank:  # all processes see the same, and the first says it
        sys.exit(2)
    raise UserError(
        f"{launcher} has started {started} processes, but {options} is a run of {devices * nodes}; "
        f"start as many as that ({cure}), or change trainer.devices and trainer.num_nodes"
    )


def _check_port(binds: bool) -> None:
    """Checks MASTER_PORT before any process waits for another; without one, a free port is taken.

    Args:
        binds: Whether this process is the one that will listen there.
    """
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return
    cure = "set it to a free port, or unset it where --trainer.devices starts the processes"
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_PORT ({port}) is no port from 1 to 65535; {cure}")
    if binds:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"MASTER_PORT ({port}) cannot be used: {reason}; {cure}") from error


def code_without_report(error: Exception) -> int | None:
    """Returns the exit code of a process that leaves the report of an error to the first one.

    None is returned for the first process, and for an error that others need not have. After an
    error of all ranks it is 0: a launcher that sees one fail would kill rank 0 while it speaks.
    """
    if is_agreed(error) and int(getattr(rank_zero_only, "rank", 0) or 0):
        return 0
    if of_launcher(error) and os.environ.get("SLURM_PROCID", "0") != "0":
        return 2
    return None


def await_launched(trainer: L.Trainer, patience: float = 60) -> None:
    """Waits until the ranks that this process has launched end as it does, without an error.

    Nobody else sees their exit codes: a run of which one rank fails at its very end would count as
    done.

    Args:
        trainer: What has launched them.
        patience: Seconds for each of them to end. Longer ones are left with a warning.

    Raises:
        LostRankError: If one ends with an error.
    """
    launched: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    # processes of multiprocessing (ddp_spawn) are joined, and raise, within Lightning
    processes = [process for process in launched if isinstance(process, subprocess.Popen)]
    if processes:
        launched.clear()  # Lightning's observer reads the list, and kills this process at an error
    for rank, process in enumerate(processes, start=1):
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            rank_zero_warn(f"process {rank} of the run has not ended after {patience:.0f} s")
            continue
        if code:
            raise LostRankError(
                f"process {rank} of the run has failed at its end (exit code {code}); its own "
                "message stands above"
            )


def end_with_launcher(patience: float = PATIENCE) -> None:
    """Has a rank that rank 0 has launched end after that, also where it waits for others.

    A rank that waits for a connection, or in a collective of NCCL, does not see that rank 0 ended.

    Args:
        patience: Seconds to end by itself.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # not for programs that this process starts
    if launcher is not None and int(launcher) != os.getpid():  # one that launches a second run
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

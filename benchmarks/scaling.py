"""Strong and weak scaling: measured over processes of this machine, predicted for GPUs.

    python -m benchmarks.scaling --config configs/transformer/tiny.yaml
    python -m benchmarks.scaling --config configs/thoughtbubbles/772m.yaml --only predicted

Strong: all share the rows of one optimiser step. Weak: each has as many rows, whatever their
number. Measured are processes with one thread each (gloo, CPU, float32), which share this machine's
cores: their seconds say little where there are fewer cores than processes. Bytes are those that a
process sends by ring algorithms: of the payloads that FSDP2's collectives were given in a step, and
of the buckets that DDP says it reduces.
Predicted are GPUs in nodes of eight, see ``benchmarks.plan``.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fake_collectives import collective_ops
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import harness
from benchmarks.estimate import GPUS, Root, Transfer, count_transfer, sharded_run
from benchmarks.harness import Options
from benchmarks.plan import Strategy, chosen, plan, tokens_per_second
from benchmarks.planned_run import PlannedRun, read_run
from lightning_models.optim import build_optimizer

BASE = 8
"""GPUs that the config's rows of an optimiser step are for, in weak scaling."""

# ---- processes of this machine


class _Transfers(TorchDispatchMode):
    """Counts the payloads of collective operations."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads = Counter[Transfer]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in collective_ops:
            count_transfer(self.payloads, func, result, args, kwargs or {})
        return result

    def sent(self) -> float:
        """Returns the bytes that a process has sent."""
        return sum(kind.sent(payload) for kind, payload in self.payloads.items())


def _reduced(replica: nn.parallel.DistributedDataParallel) -> Counter[Transfer]:
    """Returns what DDP reduces in a step; its reducer's collectives are not dispatched."""
    sizes = str(replica._get_ddp_logging_data()["bucket_sizes"]).split(",")
    kind = Transfer("all_reduce", dist.get_world_size(), within_node=True)
    return Counter({kind: sum(map(int, sizes))})


def train_steps(rank: int, processes: int, job: dict[str, Any]) -> None:
    """Trains for some steps as one of several processes; the first writes what was measured.

    Args:
        rank: this process.
        processes: how many there are.
        job: ``words`` of ``train.py``, ``strategy``, ``rows`` of a process, ``rounds`` that are
            timed, ``folder`` to meet in and to write to.
    """
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    folder = Path(job["folder"])
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        run = read_run(job["words"], None, None)
        torch.manual_seed(0)
        model, batch, transfers = run.build(), run.batch(job["rows"]), _Transfers()
        assert model.network is not None
        root: nn.Module = Root(model.network)
        if processes > 1 and job["strategy"] == "ddp":
            replica = nn.parallel.DistributedDataParallel(root)
            transfers.payloads, root = _reduced(replica), replica
        elif processes > 1:
            root = sharded_run(model, init_device_mesh("cpu", (processes,)))
        exempt = model.no_decay_parameters()
        optimizer = build_optimizer(model.network, model.optimizer_config, no_decay=exempt)

        def step() -> None:
            """Trains once, all processes together."""
            dist.barrier()
            root(functools.partial(harness.objective, model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        with transfers if job["strategy"] == "fsdp" else contextlib.nullcontext():
            step()
        sent = transfers.sent()
        (times,) = harness.in_turn((step,), job["rounds"])
        if rank == 0:
            found = {"seconds": statistics.median(times), "sent": sent}
            (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def measure(job: dict[str, Any], processes: int) -> dict[str, float]:
    """Returns the median ``seconds`` of a step, and the bytes that a process has ``sent`` in one.

    Args:
        job: see ``train_steps``, without a folder.
        processes: how many share the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, {**job, "folder": folder})
        torch.multiprocessing.spawn(train_steps, arguments, nprocs=processes)
        text = Path(folder, "found.json").read_text(encoding="utf-8")
    found: dict[str, float] = json.loads(text)
    return found


def measured(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what processes of this machine sent and took, next to what the plan says they send."""
    run: PlannedRun = options.run
    job = {"words": options.words, "rounds": options.rounds}
    most = max(options.processes)
    for scaling in ("strong", "weak"):
        for strategy in ("ddp", "fsdp"):
            first: float | None = None
            for processes in sorted(options.processes):
                rows = options.batch * most // processes if scaling == "strong" else options.batch
                found = measure({**job, "strategy": strategy, "rows": rows}, processes)
                speed = rows * processes * run.row_tokens / found["seconds"]
                first = first or speed / processes
                yield {
                    "scaling": scaling,
                    "strategy": strategy,
                    "processes": processes,
                    "rows each": rows,
                    "sent MB": found["sent"] / 1e6,
                    "planned MB": planned(run, strategy, processes, rows) / 1e6,
                    "step s": found["seconds"],
                    "tokens/s": speed,
                    "efficiency": speed / processes / first,
                }


def planned(run: PlannedRun, strategy: str, processes: int, rows: int) -> float:
    """Returns the bytes that a process sends in a step of one micro-batch, as ``plan`` has it."""
    if processes == 1:
        return 0.0
    one = dataclasses.replace(run, rows=rows * processes, accumulate=1)
    mesh = () if strategy == "ddp" else (processes,)
    gpu = GPUS["h100"]
    return plan(one, Strategy(strategy, mesh), processes, gpu, 1.0, rows, on_gpu=False).sent


# ---- GPUs


def predicted(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what a run on 8 to 256 GPUs will take."""
    gpu, run = GPUS[options.gpu], options.run
    for scaling in ("strong", "weak"):
        first: float | None = None
        for gpus in sorted(options.gpus):
            if scaling == "strong" and gpus > run.rows_per_step:
                break  # there are no rows for more
            accumulate = run.accumulate
            if scaling == "weak":
                accumulate = max(1, run.accumulate * gpus // BASE)
            scaled = dataclasses.replace(run, accumulate=accumulate)
            tried, best = chosen(scaled, gpus, gpu, options.share)
            each = best or tried[-1]
            speed = tokens_per_second(scaled, each, gpus)
            first = first or speed / gpus
            yield {
                "scaling": scaling,
                "GPUs": gpus,
                "strategy": each.strategy.name if best else "none fits",
                "rows x accumulated": f"{each.micro_batch} x {each.accumulate}",
                "sent GB/step": each.sent / 1e9,
                "communication s": each.communication,
                "step s": each.seconds,
                "tokens/s": speed,
                "efficiency": speed / gpus / first,
            }


TABLES = {"measured": measured, "predicted": predicted}


def prepare(options: Options) -> None:
    """Reads the run.

    Raises:
        ValueError: if the config is not understood, or a number is out of its range.
    """
    if min(*options.processes, *options.gpus, options.batch) < 1 or not 0 < options.share <= 1:
        raise ValueError("--processes, --gpus and --batch must be at least 1, --share in (0, 1]")
    options.words = [f"--config={file}" for file in options.config]
    options.words += [f"--{word}" for word in vars(options).pop("set")]
    options.run = read_run(options.words, None, None)


def main() -> None:
    """Parses the command line and prints the tables that it asks for."""
    parser = harness.options_parser(__doc__, rounds=3, batch=4)
    parser.add_argument("--config", nargs="+", required=True, help="files, as train.py takes them")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--share", type=float, default=0.4, help="of peak FLOP/s; MFU")
    parser.add_argument("--set", nargs="+", default=[], help="data.batch_size=4 and the like")
    harness.run(parser, TABLES, prepare=prepare)


if __name__ == "__main__":
    main()

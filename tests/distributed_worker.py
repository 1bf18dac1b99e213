"""Trains methods for two steps and saves what they end with: one rank of several.

Usage: LOCAL_RANK=... MASTER_ADDR=... MASTER_PORT=... \\
    python tests/distributed_worker.py OUT TEXT STRATEGY,... METHOD...
"""

import contextlib
import faulthandler
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from formats import SENTENCES, StoredSentences
from methods import IN_FULL, METHODS, Method
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from callbacks import ResumeState, resume_position
from callbacks.hooks import gather
from lightning_models.checkpoint import (
    CheckpointError,
    read_checkpoint,
    read_whole,
    write_model_folder,
)
from lightning_models.generation import SamplingConfig, generate
from training import FullySharded

RUNS = [
    *IN_FULL,
    replace(
        next(method for method in IN_FULL if method.format is SENTENCES),
        name="streams of a corpus",
        format=StoredSentences(),
    ),
    *(method for method in METHODS if method not in IN_FULL),
]
"""Each method on fixed batches or windows, and one that reads sentences on those of a corpus."""

STRATEGIES = {
    "one": (1, lambda: "auto"),
    "one_bf16": (1, lambda: "auto"),
    "ddp": (2, lambda: "ddp"),
    "sharded": (2, lambda: FullySharded(sharded_checkpoints="in_background")),
    "sharded_bf16": (2, FullySharded),
    "sharded4": (4, FullySharded),
    "replicas": (4, lambda: FullySharded(shard_size=2, sharded_checkpoints=True)),
}
"""Number of processes, and the trainer's strategy; precision is bf16-mixed, or float64."""


def train(method: Method, strategy: str, text: str, cache: str) -> dict[str, Any]:
    """Returns weights, metrics and greedy texts after two steps, the same on every rank.

    The batch of all processes together is four windows, or streams, whatever their number is.
    """
    processes, build = STRATEGIES[strategy]
    mixed = strategy.endswith("bf16")
    model = method.build(**method.alone)
    network, model.network = model.network, None
    if not mixed:
        network.double()
    beside_stream = float_inputs(network)
    model.build_network = lambda: network  # to be sharded by configure_model
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=build(),
        precision="bf16-mixed" if mixed else None,
        max_steps=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        limit_val_batches=2,
        num_sanity_val_steps=processes > 1,  # gathers before the first step
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = method.format.dealt(text, cache, processes)
    if not mixed:
        torch.set_default_dtype(torch.float64)  # Lightning has no 64-true of sharded parameters
    try:
        trainer.fit(model, data)
        metrics = {"train/loss": trainer.callback_metrics["train/loss"].item()}
        (validated,) = trainer.validate(model, data, verbose=False)
    finally:
        torch.set_default_dtype(torch.float32)
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model.network, options=whole)
    ended = {
        "weights": {key: value.clone() for key, value in weights.items()},
        "metrics": metrics | validated,
        "sentence_steps": getattr(model, "sentence_steps", 0),
        "texts": greedy_texts(model.eval(), method.format.prompts, trainer),
    }
    with model.gathered():
        ended["gathered"] = sorted({str(p.dtype) for p in model.network.parameters()})
    ended["beside_stream"] = sorted(beside_stream)
    ended["moments"] = whole_moments(trainer)
    ended["own"] = sorted({str(x.dtype) for x in own_tensors(trainer) if x.is_floating_point()})
    if isinstance(trainer.strategy, FullySharded):
        ended["keeps_checkpoint"] = keeps_checkpoint(trainer, ended, Path(cache).parent)
        ended["keeps_gradients"] = keeps_gradients(model, method.batch(seed=trainer.global_rank))
    return ended


def float_inputs(network: torch.nn.Module) -> set[str]:
    """Returns a set that blocks add to: dtypes of what they take next to the residual stream."""
    seen: set[str] = set()

    def look(block: torch.nn.Module, args: Any, kwargs: Any) -> None:
        for each in tree_leaves((args[1:], kwargs)):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                seen.add(str(each.dtype))

    for block in getattr(network, "blocks", ()):
        block.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def keeps_checkpoint(trainer: L.Trainer, ended: dict[str, Any], folder: Path) -> bool:
    """Whether sharded weights and moments survive a checkpoint in every bit.

    They are overwritten as soon as it is asked for, and loaded, also from the one file that a
    process without shards writes. The file has the whole weights and moments; before the first
    update it has no moments, and neither has the optimiser.
    """
    strategy: Any = trainer.strategy
    path = Path(strategy.broadcast(folder / "parts.ckpt"))
    before = [tensor.clone() for tensor in own_tensors(trainer)]
    trainer.save_checkpoint(path)
    same = True
    for source in (path, path.with_name("one_file.ckpt")):
        for tensor in own_tensors(trainer):
            tensor.fill_(7)
        strategy.load_checkpoint(source)
        same &= all(map(torch.equal, before, own_tensors(trainer)))
        if source == path and trainer.is_global_zero:
            torch.save(read_whole(path), path.with_name("one_file.ckpt"))
        strategy.barrier()
    same &= loads_without_optimizers(trainer, path)
    same &= refuses_changed_parts(trainer, path)
    same &= trusts_no_listing(trainer, path)
    saved = read_whole(path)
    same &= all(
        torch.equal(saved["state_dict"][f"network.{key}"], weight)
        for key, weight in ended["weights"].items()
    )
    moments = flat_moments(saved["optimizer_states"][0])
    same &= moments.keys() == ended["moments"].keys()
    same &= all(torch.equal(moments[key], value) for key, value in ended["moments"].items())
    (optimizer,) = trainer.optimizers
    optimizer.state.clear()
    trainer.save_checkpoint(path)
    same &= not optimizer.state
    strategy.load_checkpoint(path)  # once it is written
    same &= not flat_moments(read_whole(path)["optimizer_states"][0])
    return same and not optimizer.state


def whole_moments(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Returns the optimiser's state by number of the parameter and key; all ranks must call it."""
    (optimizer,) = trainer.optimizers
    moments = flat_moments(optimizer.state_dict())
    return {
        key: (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for key, x in moments.items()
    }


def flat_moments(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{n}.{key}": x for n, each in state["state"].items() for key, x in each.items()}


def loads_without_optimizers(trainer: L.Trainer, path: Path) -> bool:
    """Whether an evaluation gets the weights of a checkpoint in parts, and of a model folder."""
    strategy: Any = trainer.strategy
    folder = path.with_name("folder")
    if trainer.is_global_zero:
        folder.mkdir(exist_ok=True)
        write_model_folder(folder, read_checkpoint(path).content)
    strategy.barrier()
    optimizers, strategy.optimizers = strategy.optimizers, []
    parameters = [p.detach().to_local() for p in trainer.lightning_module.parameters()]
    before, same = [p.clone() for p in parameters], True
    for source in (path, folder):
        for parameter in parameters:
            parameter.fill_(7)
        strategy.load_checkpoint(source)
        same &= all(map(torch.equal, before, parameters))
    strategy.optimizers = optimizers
    return same


def refuses_changed_parts(trainer: L.Trainer, path: Path) -> bool:
    """Whether the checkpoint has the digests of its parts, and all ranks refuse a changed byte."""
    strategy: Any = trainer.strategy
    content = torch.load(path, weights_only=True)
    if "shards" not in content:  # one file
        return True
    files = sorted((path.parent / content["shards"]["folder"]).iterdir())
    whole = {file.name: file.read_bytes() for file in files}
    sums = {name: hashlib.sha256(part).hexdigest() for name, part in whole.items()}
    refused = 0
    for file in files:
        for last in (whole[file.name][-1] ^ 1, whole[file.name][-1]):
            strategy.barrier()
            if trainer.is_global_zero:
                file.write_bytes(whole[file.name][:-1] + bytes([last]))
            strategy.barrier()
            try:
                strategy.load_checkpoint(path)
            except CheckpointError:
                refused += 1
    return sums == content["shards"]["sums"] and refused == len(files) == trainer.world_size


def trusts_no_listing(trainer: L.Trainer, path: Path) -> bool:
    """Whether parts that a network file system shows late are recorded, and not loaded without.

    Each rank sees only the part that another rank has written, and then all but the last rank see
    all parts.
    """
    strategy: Any = trainer.strategy
    if not strategy.sharded_checkpoints:
        return True
    rank, world = trainer.global_rank, trainer.world_size
    with unlisted(f"shard-{rank + 1:05}"):
        trainer.save_checkpoint(path)
        strategy._writer.wait()
    record = torch.load(path, weights_only=True)["shards"]
    parts = list((path.parent / record["folder"]).iterdir())
    same = {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}
    refused = 0
    for hidden in ("shard-00001", ""):
        with unlisted(hidden if hidden and rank == world - 1 else "nothing"):
            try:
                strategy.load_checkpoint(path)
            except CheckpointError:
                refused += 1
    return len(parts) == world and same == record["sums"] and refused == 1


@contextlib.contextmanager
def unlisted(start: str) -> Iterator[None]:
    """Leaves files whose names begin so out of all listings of folders."""
    listings = {name: getattr(Path, name) for name in ("glob", "iterdir")}

    def shorter(name: str) -> Any:
        return lambda *args: (p for p in listings[name](*args) if not p.name.startswith(start))

    with contextlib.ExitStack() as stack:
        for name in listings:
            stack.enter_context(mock.patch.object(Path, name, shorter(name)))
        yield


def own_tensors(trainer: L.Trainer) -> list[torch.Tensor]:
    """Returns this rank's parts of the parameters, and the optimiser's state of each."""
    (optimizer,) = trainer.optimizers
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [x for p in parameters for x in (p.detach(), *optimizer.state[p].values())]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def keeps_gradients(model: Any, batch: dict[str, Any]) -> bool:
    """Whether a checkpoint in the middle of a step keeps every bit of sharded gradients."""
    model.train().zero_grad()
    with model.precision_context():
        model.training_step(batch, 0).backward()
    before = local_gradients(model)
    resume, checkpoint = ResumeState(), {}
    with mock.patch.object(resume_position, "place_in_step", return_value=[1, 2]):
        resume.on_save_checkpoint(model.trainer, model, checkpoint)
    model.zero_grad()
    resume.on_load_checkpoint(model.trainer, model, checkpoint)
    resume._gradients = checkpoint["resume_state"]["gradients"]  # the trainer fits no longer
    resume.on_train_start(model.trainer, model)
    after = local_gradients(model)
    same = all(torch.equal(after[name], gradient) for name, gradient in before.items())
    return same and before.keys() == after.keys() and len(before) > 0


def local_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Returns this rank's parts of the gradients; without memory the sentence head has none."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.to_local() for name, grad in gradients.items() if grad is not None}


def greedy_texts(model: Any, prompts: list[list[int]], trainer: L.Trainer) -> list[list[int]]:
    """Returns continuations of all prompts, of which each rank writes some, of its own length."""
    streams = range(len(prompts))[trainer.global_rank :: trainer.world_size]  # as in one process
    own = [prompts[stream] for stream in streams]
    with model.gathered(), model.precision_context():
        greedy = SamplingConfig(temperature=0.0)
        length = 4 + trainer.global_rank
        options = {"max_new_tokens": length, "sampling": greedy, "streams": streams}
        texts = generate(model, own, **options) if own else []
    parts = gather(texts)
    return [parts[n % len(parts)][n // len(parts)][:4] for n in range(len(prompts))]


def main(out: str, text: str, strategies: str, *names: str) -> None:
    """Writes OUT/<strategy>/<method>.pt from rank zero, for methods in one process group."""
    torch.set_num_threads(1)
    faulthandler.enable()
    chosen = [method for method in RUNS if method.name in names]
    for strategy in strategies.split(","):
        for method in chosen:
            result = train(method, strategy, text, f"{out}/cache")
            if torch.distributed.get_rank() == 0:
                path = Path(out) / strategy / f"{method.name}.pt"
                path.parent.mkdir(exist_ok=True)
                torch.save(result, path)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Times a training, scoring or decoding step of one method against another's.

    python -m benchmarks.step --model ThoughtbubblesLM --against TransformerLM --equal_flops
    python -m benchmarks.step --model TransformerLM --against transformers --what train decode
    python -m benchmarks.step --model PonderLM --against TransformerLM --config dim=512 \
        --model_config max_steps=3 --peak
    python -m benchmarks.step --model ThinkingStatesLM --against ThinkingStatesLM --what decode \
        --against_config prefill=sequential

Weights and batches are random, with about the same number of tokens for both. Methods that read
questions get ``--steps`` reasoning steps with ``--thoughts`` tokens in total, at the ends of equal
parts of a query of ``--length`` tokens. ``transformers`` is its GPT-2 of the same shape. ``ratio``
is the first model's time over the second's, the median over alternating rounds.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_models
from benchmarks import harness
from benchmarks.harness import Options, Rows, Step
from callbacks.throughput import context_length, real_tokens
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig, generate
from training.plan import training_loss
from training.synthetic import make_batch, question_batch, without_files

MODULE = "benchmarks.step"
TRANSFORMERS = "transformers"
PHASES = ("train", "score", "decode")
MAX_LAYERS = 96
SHAPE: dict[str, Any] = {"num_layers": 4, "dim": 256, "num_heads": 4}


# ---- models


def model_class(name: str) -> type[LanguageModel]:
    """Returns a method by its name.

    Raises:
        ValueError: If the method does not exist.
    """
    cls = getattr(lightning_models, name, None) if name in lightning_models.__all__ else None
    if not (isinstance(cls, type) and issubclass(cls, LanguageModel)):
        raise ValueError(
            f"{name} is not a method; choose a class of lightning_models, e.g. PonderLM"
        )
    return cls


def fields_of(pairs: list[str]) -> dict[str, Any]:
    """Parses ``key=value`` arguments as fields of a config.

    Raises:
        ValueError: If an argument has a different form.
    """
    for word in pairs:
        if "=" not in word:
            raise ValueError(f"config ({word}) must be KEY=VALUE, such as dim=256")
    fields: Any = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))
    return fields


def outline(name: str, pairs: list[str], options: Options) -> LanguageModel:
    """Returns a method without a network, with the sizes of the options.

    Raises:
        ValueError: If the method does not have a field, or rejects a value.
    """
    cls: Any = model_class(name)
    config_class = get_type_hints(cls.__init__)["config"]
    names = {field.name for field in dataclasses.fields(config_class)}
    fields = fields_of(pairs)
    if not fields.keys() <= names:
        unknown = ", ".join(sorted(fields.keys() - names))
        raise ValueError(f"config ({unknown}) is unknown to {name}: {', '.join(sorted(names))}")
    sizes = {"vocab_size": options.vocab, "block_size": 4 * options.length, **SHAPE, **fields}
    try:
        return without_files(cls(config_class(**sizes)))
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def built(model: LanguageModel, options: Options) -> LanguageModel:
    """Builds the model's network from a fixed seed, on the device."""
    torch.manual_seed(0)
    model.configure_model()
    if options.compile:
        assert model.network is not None
        model.network.compile()
    return model.to(options.device)


def flops(model: LanguageModel, context: int, **changes: Any) -> float:
    """Returns the training FLOPs per token of the model with changed config fields."""
    other = without_files(model)
    other.config = dataclasses.replace(other.config, **changes)
    with torch.device("meta"):
        other.configure_model()
    return other.flops_per_token(context, training=True)


def equal_layers(target: float, model: LanguageModel, context: int) -> int:
    """Returns the number of layers at which training costs about ``target`` FLOPs per token."""
    base, with_layer = (flops(model, context, num_layers=layers) for layers in (1, 2))
    return min(max(1 + round((target - base) / (with_layer - base)), 1), MAX_LAYERS)


# ---- contenders


class Contender:
    """A model on the device, and a batch."""

    def __init__(self, model: LanguageModel, options: Options) -> None:
        self.model, self.options = built(model, options), options
        self.batch = {
            key: value.to(options.device) if isinstance(value, Tensor) else value
            for key, value in batch_of(model, options).items()
        }
        self.tokens = int(real_tokens(self.batch))
        self.flops = model.flops_per_token(context_length(self.batch), training=True)

    @property
    def module(self) -> nn.Module:
        """Module to train."""
        assert self.model.network is not None
        return self.model.network

    def loss(self) -> Tensor:
        """Returns the training objective."""
        return training_loss(self.model, self.batch)

    def score(self) -> Any:
        """Scores the batch."""
        return self.model.score(self.batch)

    def decode(self) -> list[list[int]]:
        """Continues prompts greedily."""
        batch, options = self.batch, self.options
        prompts = batch["query"] if "query" in batch else batch["tokens"][:, : options.prompt]
        if prompts.dim() == 3:  # the first sentence without its EOS
            prompts = batch["tokens"][:, 0, :-1]
        greedy = SamplingConfig(temperature=0)
        where = {"vocab_size": options.vocab, "device": options.device}
        rows = prompts.tolist()
        return generate(self.model, rows, max_new_tokens=options.new, sampling=greedy, **where)

    def step(self, phase: str) -> Step:
        """Returns a function that runs one of ``PHASES`` once."""
        if phase == "train":
            self.model.train()
            self.module.train()
            return harness.training_step(self.module, self.loss, bf16=self.options.bf16)
        work: Callable[[], Any] = self.score if phase == "score" else self.decode

        def step() -> None:
            """Runs in evaluation mode, without gradients."""
            self.module.eval()
            device, bf16 = torch.device(self.options.device).type, self.options.bf16
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=bf16):
                work()

        return step


class TransformersContender(Contender):
    """``transformers``' GPT-2 with random weights, on windows."""

    def __init__(self, options: Options) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {**SHAPE, **fields_of([*options.config, *options.against_config])}
        names = {"num_layers": "n_layer", "dim": "n_embd", "num_heads": "n_head"}
        shape: dict[str, Any] = {names[key]: size for key, size in sizes.items() if key in names}
        off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0, "n_positions": 4 * options.length}
        plain = outline("TransformerLM", [*options.config, *options.against_config], options)
        super().__init__(plain, options)
        self.network = GPT2LMHeadModel(GPT2Config(vocab_size=options.vocab, **shape, **off, **ends))
        self.network.to(options.device)
        if options.compile:
            self.network.compile()

    @property
    def module(self) -> nn.Module:
        """Module to train."""
        return self.network

    def loss(self) -> Tensor:
        """Returns nats per target."""
        logits = self.network(self.batch["tokens"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), self.batch["targets"].flatten())

    def score(self) -> Tensor:
        """Scores the batch."""
        return self.loss()

    def decode(self) -> list[list[int]]:
        """Continues prompts greedily."""
        prompts, new = self.batch["tokens"][:, : self.options.prompt], self.options.new
        counts = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        ones = torch.ones_like(prompts)
        generated: Any = self.network.generate(
            prompts, attention_mask=ones, do_sample=False, **counts
        )
        return generated[:, prompts.shape[1] :].tolist()


def batch_of(model: LanguageModel, options: Options) -> Mapping[str, Any]:
    """Returns a batch of the type that the model reads.

    Raises:
        ValueError: If a query cannot be divided into that many steps.
    """
    if model.reads != "reasoning":
        return make_batch(model, options.rows, options.length)
    steps, step_tokens = options.steps, options.thoughts // options.steps
    if options.length % steps or step_tokens < 2:
        raise ValueError(
            f"steps ({steps}) must divide length ({options.length}) and leave at least two of "
            f"thoughts ({options.thoughts}) each"
        )
    return question_batch(options.rows, options.length, steps, step_tokens, options.vocab, answer=4)


def contender(side: str, options: Options) -> Contender:
    """Returns the contender ``model`` or ``against``."""
    first = outline(options.model, [*options.config, *options.model_config], options)
    if side == "model":
        return Contender(first, options)
    if options.against == TRANSFORMERS:
        return TransformersContender(options)
    second = outline(options.against, [*options.config, *options.against_config], options)
    if options.equal_flops:
        target = flops(first, options.length)
        layers = equal_layers(target, second, options.length)
        second.config = dataclasses.replace(second.config, num_layers=layers)
    return Contender(second, options)


def build_step(options: Options) -> Step:
    """Returns a step of ``options.side``, for the measurement of memory."""
    return contender(options.side, options).step(options.phase)


def rows(options: Options) -> Rows:
    """Yields times, rates and, if requested, memory of each phase."""
    for phase in options.what:
        first, second = contender("model", options), contender("against", options)
        time = harness.compare(first.step(phase), second.step(phase), options.rounds)
        row: dict[str, Any] = {"step": phase, f"{options.model} s": time.ours}
        row |= {f"{options.against} s ": time.theirs, "ratio": time.ratio}
        counted = options.new * options.rows if phase == "decode" else None
        row["tokens/s"] = (counted or first.tokens) / time.ours
        row["tokens/s against"] = (counted or second.tokens) / time.theirs
        row["FLOPs/token ratio"] = first.flops / second.flops
        if options.peak:
            settings = {**vars(options), "phase": phase}
            for side in ("model", "against"):
                peak = harness.in_a_process(MODULE, {**settings, "side": side})
                row[f"MB {side}"] = peak / 1e6
        yield row


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = harness.options_parser(__doc__)
    parser.add_argument("--model", help="A class of lightning_models.")
    parser.add_argument("--against", help=f"Another class, or {TRANSFORMERS}.")
    parser.add_argument("--what", nargs="+", choices=PHASES, default=["train"])
    for name, text in (
        ("config", "both"),
        ("model_config", "model"),
        ("against_config", "against"),
    ):
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="KEY=VALUE", help=text)
    sizes = {"rows": 8, "length": 256, "vocab": 4096, "steps": 8, "thoughts": 64}
    for name, size in (sizes | {"prompt": 32, "new": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--equal_flops",
        action="store_true",
        help="Choose the number of layers of --against for equal FLOPs.",
    )
    parser.add_argument("--peak", action="store_true", help="Measure memory in fresh processes.")
    parser.add_argument("--compile", action="store_true")
    return parser


def main() -> None:
    """Prints the table."""
    harness.run(build_parser(), rows, build_step)


if __name__ == "__main__":
    main()

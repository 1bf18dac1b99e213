"""Text samples during training."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.hooks import gather
from callbacks.logging import log_text, takes_text
from callbacks.random_state import undisturbed

DEFAULT_PROMPTS = ("", "The ", "In this ")


class Samples(L.Callback):
    """Writes continuations of a few prompts to TensorBoard (``samples``) after validations.

    Training is not affected: random states and train/eval modes are restored, and if a model cannot
    generate, samples are disabled with a warning.

    Args:
        prompts: Texts to continue, empty for the start of a document. Null uses a few general
            ones.
        every_n_validations: Write after every n-th validation, or never if 0.
        max_new_tokens: Length of each continuation in tokens, limited by the block size.
        temperature: Divisor of the logits; 0 always picks the most likely token.
        seed: Seed of the draws, the same at each validation, so that texts can be compared.
    """

    def __init__(
        self,
        prompts: list[str] | None = None,
        every_n_validations: int = 1,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("every_n_validations", every_n_validations),
            ("max_new_tokens", max_new_tokens),
            ("temperature", temperature),
            ("seed", seed),
        ):
            if value < 0:
                raise ValueError(f"{name} ({value}) must not be negative")
        self.prompts = list(DEFAULT_PROMPTS if prompts is None else prompts)
        self.every_n_validations = every_n_validations
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.seed = seed
        self._validations = 0
        self._unable = False

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # all ranks generate, as sharded models need them; rank 0 writes
        if trainer.sanity_checking or trainer.state.fn != "fit" or self._unable:
            return
        self._validations += 1
        if not self.every_n_validations or self._validations % self.every_n_validations:
            return
        takers = [logger for logger in trainer.loggers if takes_text(logger)]
        has_takers = trainer.strategy.reduce_boolean_decision(bool(takers), all=False)
        if not (self.prompts and has_takers):
            return
        texts, problem = self._generate(trainer, pl_module)
        problems = [message for message in gather(problem) if message]
        if problems:  # on any rank; all ranks continue without samples
            self._unable = True
            rank_zero_warn(f"text samples are disabled: {problems[0]}")
        elif trainer.is_global_zero:
            for logger in takers:
                # the step of the scalars logged with this validation, counted from 0
                step = trainer.global_step - 1
                log_text(logger, "samples", as_markdown(self.prompts, texts), step)

    def _generate(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> tuple[list[str], str | None]:
        """Returns the continuations, and the error of this rank, if there was one."""
        model: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        with undisturbed(pl_module):
            try:
                texts: list[str] = model.generate_text(
                    self.prompts,
                    tokenizer=data.tokenizer,
                    max_new_tokens=self._length(data.tokenizer, model.context_limit),
                    temperature=self.temperature,
                    seed=self.seed,
                )
                return texts, None
            except Exception as error:  # no error of a new method may end its training
                name = type(pl_module).__name__
                return [], f"{name}.generate_text failed with {type(error).__name__}: {error}"

    def _length(self, tokenizer: Any, limit: int | None) -> int:
        """Returns max_new_tokens, limited by the context after the longest prompt."""
        if limit is None:
            return max(1, self.max_new_tokens)
        longest = max(len(tokenizer.prompt_ids(prompt)) for prompt in self.prompts)
        return max(1, min(self.max_new_tokens, limit - longest))


def as_markdown(prompts: Sequence[str], texts: Sequence[str]) -> str:
    """Formats prompts in bold, and continuations as indented (verbatim) blocks."""
    parts = []
    for prompt, text in zip(prompts, texts, strict=True):
        title = f"**{prompt!r}**" if prompt else "**(start of a document)**"
        block = "\n".join("    " + line for line in text.splitlines() or [""])
        parts.append(f"{title}\n\n{block}")
    return "\n\n".join(parts)

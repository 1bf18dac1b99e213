"""Prompts in, texts out: what every model does with its decode loop."""

from collections.abc import Sequence
from typing import Any

from lightning_models.generation import SamplingConfig, generate


class ContinuesText:
    """Mixed into ``LanguageModel``: writes with the model's ``init_cache`` and ``decode_step``."""

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any,
        max_new_tokens: int,
        first_row: int = 0,
        **sampling: Any,
    ) -> list[str]:
        """Returns a continuation of each prompt (an empty prompt starts a document).

        The training mode and the global random state are left as they are.

        Args:
            prompts: texts.
            tokenizer: the data's tokenizer (``datamodule.tokenizer``).
            max_new_tokens: upper bound on each continuation, in tokens.
            first_row: number of the first prompt's random stream, where prompts come in several
                calls.
            **sampling: fields of ``SamplingConfig``: temperature, top_k, top_p, seed.
        """
        rows = self.generate_ids(
            [tokenizer.prompt_ids(prompt) for prompt in prompts],
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            first_row=first_row,
            **sampling,
        )
        return [tokenizer.decode([i for i in row if i != tokenizer.stop_id]) for row in rows]

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokenizer: Any,
        max_new_tokens: int,
        first_row: int = 0,
        **sampling: Any,
    ) -> list[list[int]]:
        """Returns the new token ids of each prompt, the stop token included where it was reached.

        The training mode and the global random state are left as they are.

        Args:
            prompts: token ids, at least one each.
            tokenizer: the data's tokenizer, which has the stop token and the size of the
                vocabulary.
            max_new_tokens: as ``generate_text`` has it.
            first_row: as ``generate_text`` has it.
            **sampling: as ``generate_text`` has it.

        Raises:
            ValueError: if a prompt is empty.
        """
        model: Any = self
        was_training = model.training
        model.eval()
        try:
            with model.precision_context():
                return generate(
                    model,
                    prompts,
                    max_new_tokens=max_new_tokens,
                    sampling=SamplingConfig(**sampling),
                    eos_id=tokenizer.stop_id,
                    vocab_size=tokenizer.vocab_size,
                    device=model.device,
                    first_row=first_row,
                )
        finally:
            model.train(was_training)

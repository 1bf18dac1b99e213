"""Output of ``predict``: log-probabilities of each prompt, and a continuation."""

import json
from pathlib import Path
from typing import Any

import lightning as L

from callbacks.hooks import gather
from lightning_models.atomic_files import check_folder, write_whole


class Predictions(L.Callback):
    """Writes one JSON line per prompt, in the order of the prompts file.

    The keys are ``prompt``; ``tokens``, the prompt's ids; ``log_probs`` of the ids in nats;
    ``sequence_term``, nats that belong to the whole prompt; ``likelihood``, the kind of their sum;
    ``continuation``, a text.

    Args:
        output: File to write, which is replaced when all prompts are done.
        max_new_tokens: Maximum length of a continuation in tokens, limited by the block size; 0 for
            none.
        temperature: Divisor of the logits; 0 always picks the most likely token.
        top_k: Number of most likely tokens to sample from.
        top_p: Total probability of the most likely tokens to sample from.
        seed: Seed of the draws. Prompt r has the random stream (seed, r).
    """

    def __init__(
        self,
        output: str = "predictions.jsonl",
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens ({max_new_tokens}) must not be negative")
        self.output = Path(output).expanduser()
        self.max_new_tokens = max_new_tokens
        self.sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        self._rows: dict[int, dict[str, Any]] = {}

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rows = {}
        if self.output.is_dir():
            raise ValueError(f"predictions.output ({self.output}) is a folder; name a file in it")
        check_folder("predictions.output", self.output.parent)
        self.output.parent.mkdir(parents=True, exist_ok=True)

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if "prompt" not in batch:
            raise ValueError("predict needs prompts; set data.predict_file")
        indices = batch["sequence_id"].tolist()
        lengths = (batch["targets"] >= 0).flatten(1).sum(dim=1).tolist()
        texts = self._continue(trainer, pl_module, batch["prompt"], indices, lengths)
        for row, idx in enumerate(indices):
            predicted = batch["targets"][row] >= 0
            self._rows[idx] = {
                "prompt": batch["prompt"][row],
                "tokens": batch["targets"][row][predicted].tolist(),
                "log_probs": outputs.log_prob[row][predicted].tolist(),
                "sequence_term": outputs.sequence_term[row].item(),
                "likelihood": outputs.kind,
                "continuation": texts[row],
            }

    def _continue(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        prompts: list[str],
        indices: list[int],
        lengths: list[int],
    ) -> list[str]:
        """Returns continuations whose lengths are limited by the context after their prompts.

        Consecutive prompts draw from consecutive streams. If the limits differ, prompts are decoded
        one by one, so that a continuation never depends on others in the batch.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        limit = pl_module.context_limit
        budgets = [self.max_new_tokens if limit is None else limit - length for length in lengths]
        cuts = [min(self.max_new_tokens, tokens) for tokens in budgets]
        size = len(prompts) if len(set(cuts)) == 1 else 1
        texts: list[str] = []
        for start in range(0, len(prompts), size):
            texts += pl_module.generate_text(
                prompts[start : start + size],
                tokenizer=data.tokenizer,
                max_new_tokens=cuts[start],
                first_row=indices[start],
                **self.sampling,
            )
        return texts

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parts = gather(self._rows)
        if not trainer.is_global_zero:
            return
        rows = {idx: row for part in parts for idx, row in part.items()}
        lines = [json.dumps(rows[idx], ensure_ascii=False) + "\n" for idx in sorted(rows)]
        write_whole(self.output, "".join(lines))

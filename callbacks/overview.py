"""What a model is made of, before it trains: parameters by part, FLOPs per token, context."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from tabulate import tabulate

HEAD = "output head"
COLUMNS = ("left", "right", "right")


class ModelOverview(L.Callback):
    """Prints a model's parameters by part and its FLOPs per token when ``fit`` begins.

    In place of Lightning's summary, whose modules are not a method's parts and whose FLOPs know no
    attention and no repeated pass; ``trainer.enable_model_summary: false`` leaves it out.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the table on rank 0."""
        if trainer.is_global_zero:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            whole = getattr(data, "rows", "windows") != "windows"
            print(overview(pl_module, data.row_tokens("train") if whole else None), flush=True)


def overview(model: Any, row_tokens: int | None = None) -> str:
    """Returns parameters by part as a table, and a line with context and FLOPs per token.

    Args:
        model: a ``LanguageModel`` with its network, on any device.
        row_tokens: tokens of a row, where rows are documents or questions; None: windows.
    """
    parts = model.parameters_by_part()
    frozen = sum(p.numel() for p in model.network.parameters() if not p.requires_grad)
    table = tabulate(_rows(parts), headers=["part", "parameters", "share"], colalign=COLUMNS)
    context = row_tokens or model.config.block_size
    rows = "context of" if row_tokens is None else "rows of about"
    scoring, step = (model.flops_per_token(context, training=way) for way in (False, True))
    planned = " (planned; texts decide)" if model.adaptive or model.adaptive_training else ""
    note = f"\n{frozen:,} of them are frozen" if frozen else ""
    return (
        f"{type(model).__name__}\n{table}{note}\n"
        f"{rows} {context} tokens; FLOPs per token{planned}: {quantity(scoring)} scoring, "
        f"{quantity(step)} training"
    )


def _rows(parts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    total = sum(parts.values())
    rows = [(part, f"{count:,}", f"{count / total:.1%}") for part, count in parts.items()]
    if HEAD not in parts:
        rows.append((HEAD, "the embedding's", ""))
    return [*rows, ("total", f"{total:,}", "")]


def quantity(number: float) -> str:
    """Returns a number with three digits and its unit of a thousand, such as ``5.62 M``."""
    units = ["", " K", " M", " G", " T", " P", " E"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        del units[0]
    return f"{number:.3g}{units[0]}"

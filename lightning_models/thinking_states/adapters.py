"""LoRA (arXiv 2106.09685) on a backbone, through ``peft``."""

from typing import cast

from lightning_models.thinking_states.backbone import Backbone


def add_adapters(backbone: Backbone, *, rank: int, alpha: float, dropout: float) -> None:
    """Freezes a backbone, and adds low-rank matrices to every matrix of its layers.

    Args:
        backbone: The backbone, changed in place.
        rank: Rank of the added matrices.
        alpha: Scale of their products, which are multiplied by alpha / rank.
        dropout: Dropout probability before them.

    Raises:
        ValueError: If ``peft`` is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora_rank ({rank}) needs peft, which is not installed; pip install -e '.[lora]', or "
            "set lora_rank to null"
        ) from error
    matrices = {
        name.rpartition(".")[2]: type(module).__name__
        for name, module in backbone.layers.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.ndim == 2
    }
    backbone.requires_grad_(False)
    settings = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),  # divided by r; peft takes any number
        lora_dropout=dropout,
        target_modules=[*matrices],
        fan_in_fan_out="Conv1D" in matrices.values(),  # GPT-2's are transposed
    )
    inject_adapter_in_model(settings, backbone.layers)

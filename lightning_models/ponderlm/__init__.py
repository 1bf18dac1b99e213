"""PonderLM-3, its predecessors, and the baselines that compute as much (arXiv 2603.02023)."""

from lightning_models.ponderlm.config import PonderConfig, PonderingConfig, PonderLM2Config
from lightning_models.ponderlm.module import PonderLM, PonderLM2

__all__ = ["PonderConfig", "PonderLM", "PonderLM2", "PonderLM2Config", "PonderingConfig"]

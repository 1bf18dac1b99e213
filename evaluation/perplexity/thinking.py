"""What moved to ``evaluation.cost``, under its former name."""

from evaluation.cost import GeneratedSteps, StepCounter, Thinking, price_steps

__all__ = ["GeneratedSteps", "StepCounter", "Thinking", "price_steps"]

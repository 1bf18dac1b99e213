"""What an analysis found, as scalars and tables."""

from typing import Any

from callbacks.analysis.files import as_csv
from callbacks.gate_analysis.ages import Ages, Findings
from callbacks.gate_analysis.history import History, shares_over


def scalars(findings: Findings, memory_size: int | None) -> dict[str, float]:
    """Returns values by tag.

    ``memory_attention/layer_<l>/mean_age`` (sentences) and ``.../entropy`` (nats),
    ``gradient_reach/age_1`` (nats per unit of a sentence vector) and
    ``gradient_reach/beyond_memory``, the share of the reach that is beyond the memory's size.
    """
    values: dict[str, float] = {}
    for layer in sorted(findings.attention):
        values[f"memory_attention/layer_{layer}/mean_age"] = findings.mean_age(layer)
        values[f"memory_attention/layer_{layer}/entropy"] = findings.entropy(layer)
    if findings.reach.number:
        values["gradient_reach/age_1"] = float(findings.reach.means[0])
        beyond = None if memory_size is None else findings.beyond(memory_size)
        if beyond is not None:
            values["gradient_reach/beyond_memory"] = beyond
    return values


def tables(findings: Findings, memory_size: int | None) -> dict[str, str]:
    """Returns the CSV files of an analysis, by name."""
    values = scalars(findings, memory_size)
    found = {"scalars.csv": [{"name": tag, "value": value} for tag, value in values.items()]}
    if findings.reach.number:
        found["reach.csv"] = _reach_records(findings.reach, memory_size)
    if findings.attention:
        found["attention.csv"] = [
            record
            for layer in sorted(findings.attention)
            for record in _attention_records(layer, findings.attention[layer])
        ]
    return {name: as_csv(records) for name, records in found.items()}


def _reach_records(reach: Ages, memory_size: int | None) -> list[dict[str, Any]]:
    return [
        {
            "age": age,
            "gradient_norm": norm,
            "streams": int(count),
            "in_memory": "" if memory_size is None else int(age <= memory_size),
        }
        for age, (norm, count) in enumerate(zip(reach.means, reach.counts, strict=True), start=1)
    ]


def _attention_records(layer: int, ages: Ages) -> list[dict[str, Any]]:
    """Returns the weight of each age: over all slots, and over those who see so far back."""
    columns = zip(ages.spread, ages.means, ages.counts, strict=True)
    return [
        {"layer": layer, "age": age, "weight": weight, "weight_if_there": mean, "slots": int(slots)}
        for age, (weight, mean, slots) in enumerate(columns, start=1)
    ]


def run_tables(gates: History, norms: History) -> dict[str, str]:
    """Returns the CSV files of a training so far, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    if gates.rows:
        found["gates.csv"] = gates.records("gate")
    if norms.rows:
        found["gradient_norms.csv"] = norms.records("norm", "component")
        by_component = shares_over(norms)
        found["gradient_share.csv"] = [
            {"step": step, "sentence_steps": sentence_steps}
            | {component: float(values[row]) for component, values in by_component.items()}
            for row, (step, sentence_steps) in enumerate(
                zip(norms.steps, norms.sentence_steps, strict=True)
            )
        ]
    return {name: as_csv(records) for name, records in found.items()}

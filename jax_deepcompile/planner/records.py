"""Which of all that was proposed led to the plan in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_deepcompile.planner.plan import Prediction, Record


def that_led_to(prediction: Prediction, records: Sequence[Record]) -> list[Record]:
    """``records``, of which only those are accepted that the plan with this very ``prediction`` came of, in a chain.

    What was left for its memory, or an earlier plan that XLA schedules better, is without decisions accepted since.
    """
    kept: list[Record] = []
    for record in reversed(records):
        if record.after is prediction:
            prediction = record.before
        elif record.accepted:
            reason = f"{record.reason}, but a plan without it came out faster"
            record = dataclasses.replace(record, accepted=False, reason=reason)
        kept.insert(0, record)
    return kept

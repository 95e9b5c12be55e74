"""Which of all that was proposed led to the plan in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_deepcompile.planner.plan import Prediction, Record


def that_led_to(prediction: Prediction, records: Sequence[Record]) -> list[Record]:
    """``records``, of which only those are taken that the plan with this very ``prediction`` came of, each of the last.

    What was left for its memory, or an earlier plan that XLA schedules better, is without decisions taken since.
    """
    told: list[Record] = []
    for record in reversed(records):
        if record.after is prediction:
            prediction = record.before
        elif record.taken:
            reason = f"{record.reason}, but a plan without it came out faster"
            record = dataclasses.replace(record, taken=False, reason=reason)
        told.insert(0, record)
    return told

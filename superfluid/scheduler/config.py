"""What operators set of a scheduler, and what they see of the tick that runs."""

import attrs

from superfluid.scheduler.classes import Class
from superfluid.scheduler.pins import BUDGET_PCT
from superfluid.scheduler.planner import L, Plan, Settings


@attrs.frozen
class SchedulerConfig:
    """Operator settings. `class_lanes` caps lanes per class; `settings` are the planner's; pins may hold
    `pin_budget_pct` of the engine's pool, 0: they are recorded only; a tool call is leased for `tool_lease_ms`, 0: it
    stays open.
    """

    max_batch: int = 8
    class_lanes: dict[Class, int] = attrs.Factory(dict)
    settings: Settings = attrs.Factory(Settings)
    preemption: bool = True
    pin_budget_pct: int = BUDGET_PCT
    tool_lease_ms: int = 0


@attrs.define
class TickInFlight:
    """The tick that runs now, for gauges and the monitor. `started` in seconds of the trio clock."""

    started: float
    target: float
    lanes: int
    prefill_tokens: int
    prefill_lanes: int
    decode_lanes: int
    admits: int
    retires: int

    @classmethod
    def of(cls, plan: Plan[L], lanes: int, admits: int, started: float) -> "TickInFlight":
        return cls(
            started,
            plan.target,
            lanes,
            plan.prefill_tokens,
            len(plan.prefills),
            len(plan.decodes),
            admits,
            len(plan.retires),
        )

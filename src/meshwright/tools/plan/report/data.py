"""A plan as JSON: every number that the text and the page show, in bytes and seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ..result import Plan, RankPlan


def as_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data."""
    data: dict[str, Any] = asdict(plan)
    data["ranks"] = [_rank(rank) for rank in plan.ranks]
    data["fits"] = [{**asdict(fit), "margin": fit.margin, "verdict": fit.verdict} for fit in plan.fits]
    if plan.cost is not None:
        data["cost"] = {**asdict(plan.cost), "device_hours": plan.cost.device_hours, "money": plan.cost.money}
    return data


def as_json(plan: Plan) -> str:
    """Return a plan as JSON text."""
    return json.dumps(as_data(plan), indent=2)


def _rank(rank: RankPlan) -> dict[str, Any]:
    memory = rank.memory
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "memory": {
            "peak": asdict(memory.peak),
            "total": memory.total,
            "setup": memory.setup,
            "most": memory.most,
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "reserved_expandable": memory.expandable,
            "timeline": asdict(memory.timeline),
            "blocks_of_timeline": memory.shape_of or memory.blocks,
        },
        "ledger": [asdict(row) for row in rank.ledger],
        "timing": None if rank.timing is None else asdict(rank.timing),
    }

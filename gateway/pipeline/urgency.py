"""urgency: whether somebody waits for the answer; looked at only where a deployment has a queue or takes a priority.

The rule that matched decides, then a label `workload` of the request or of the key (batch, offline, interactive), then
the run: one in which nobody has said anything for ten minutes works alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.catalog import Deployment
from gateway.core.protection import PRIORITIES
from gateway.core.runs import INTERACTIVE_MS
from gateway.core.serving import Urgency
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.runs import labels_of

LABEL = "workload"
_WORDS = {"batch": Urgency.BATCH, "offline": Urgency.BATCH, "interactive": Urgency.INTERACTIVE}


def urgency_of(world: World, x: Exchange) -> Urgency:
    if x.urgency is None:
        x.urgency = _urgency_of(world, x)
    return x.urgency


def _urgency_of(world: World, x: Exchange) -> Urgency:
    if x.route.caps.urgency is not None:
        return x.route.caps.urgency
    own, key = _labelled(labels_of(x.incoming.headers)), _labelled(x.caller.key.labels)
    if Urgency.BATCH in (own, key):  # what an operator says of a key, no request takes back
        return Urgency.BATCH
    if own is not None or key is not None:
        return Urgency.INTERACTIVE
    run = x.run or world.runs.known(x.task.task_id)
    alone = run is not None and x.received_ms - max(run.began_ms, run.spoken_ms) >= INTERACTIVE_MS
    return Urgency.BATCH if alone else Urgency.INTERACTIVE


def _labelled(labels: Mapping[str, str]) -> Urgency | None:
    return _WORDS.get(labels.get(LABEL, "")) if labels else None


def priority_of(world: World, x: Exchange, deployment: Deployment) -> int:
    """What a server that schedules by priority is told; 0 to all others."""
    if not deployment.serving.takes_priority:
        return 0
    cap = x.route.caps.priority
    return cap if cap is not None else PRIORITIES[urgency_of(world, x)]

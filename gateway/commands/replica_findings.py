"""What doctor finds of replicas: it looks them up and asks each once, as a gateway does."""

from __future__ import annotations

import asyncio

from gateway.commands.check import where
from gateway.commands.findings import Finding, State
from gateway.core.catalog import Deployment, ReplicaKind
from gateway.core.replicas.group import label
from gateway.jobs.replica_watch import misfit
from gateway.ports import Replicas, Unanswered
from gateway.settings import Settings
from gateway.upstream.discovery import Discovery
from gateway.upstream.replicas import HttpReplicas

_SHOWN = 3


async def examine(settings: Settings) -> list[Finding]:
    """One finding for each deployment that has replicas."""
    deployments = [d for d in settings.catalog.deployments if d.replicas is not None]
    if not deployments:
        return []
    secrets = {name: secret.reveal() for name, secret in settings.credentials.items()}
    replicas = HttpReplicas(secrets, Discovery(), lambda _: None)
    await replicas.start()
    try:
        return list(await asyncio.gather(*(_finding(replicas, d) for d in deployments)))
    finally:
        await replicas.stop()


async def _finding(replicas: Replicas, deployment: Deployment) -> Finding:
    subject = f"replicas of {deployment.name}"
    source = deployment.replicas
    if source is None:
        raise ValueError(f"{deployment.name} has none")
    try:
        addresses = await replicas.find(deployment)
    except Unanswered as error:
        # From outside of the cluster nobody can ask it.
        state = State.WARN if source.kind is ReplicaKind.KUBERNETES else State.FAIL
        return Finding(subject, state, str(error), f"looked for: {where(source)}")
    problems = await asyncio.gather(*(_problem(replicas, deployment, a) for a in addresses))
    wrong = [f"{label(a)}: {p}" for a, p in zip(addresses, problems, strict=True) if p]
    good = len(addresses) - len(wrong)
    if not wrong:
        return Finding(subject, State.OK, f"{good} found, all serve {deployment.upstream_model}")
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    found = f"{good} of {len(addresses)} can be used; {'; '.join(wrong[:_SHOWN])}{more}"
    to_do = "the others serve meanwhile" if good else "start them, or mend `replicas:`"
    return Finding(subject, State.WARN if good else State.FAIL, found, to_do)


async def _problem(replicas: Replicas, deployment: Deployment, address: str) -> str:
    try:
        await replicas.metrics(deployment, address)
        return misfit(deployment, await replicas.models(deployment, address))
    except Unanswered as error:
        return str(error)

"""Who sends what to whom in a round of TDCD, following the algorithm box."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedlib.engine.draws import draw_one
from fedlib.papers.tiers.algorithm import TDCD, Cohort, TieredState, draw_ids
from fedlib.papers.tiers.asynchronous import AsyncState, AsyncTDCD
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.messages import Message


def messages(algorithm: TDCD, task: TieredTask, state: TieredState) -> list[Message]:
    """Return every array that the first run will exchange in the round after ``state``.

    The list follows the algorithm box: model and sample ids to the clients (line 4), embeddings
    to the hub (6), embeddings between hubs, foreign sums to the clients (8), models back (11);
    with private labels, derivatives and fresh embeddings as well. The hubs agree on the ids by a
    shared seed.
    """
    sent, send = _ledger(task, state.t)
    one = replace(state, x=state.x[:1], seeds=state.seeds[:1])
    drawn = draw_one(algorithm, one, task)
    silos = [Cohort.of(task, j, drawn, one.x) for j in range(task.N)]
    E, B = task.widths[0], drawn.ids.shape[1]
    for silo in silos:
        j, hub, P = silo.j, f"hub {silo.j}", task.models[silo.j].size
        count = (silo.weight > 0).sum(1).tolist()
        for k, samples in enumerate(count):
            client = f"client {k},{j}"
            send(hub, client, "model", P)
            send(hub, client, "sample ids", B)
            send(client, hub, "embeddings", samples, E)
            send(hub, client, "foreign embeddings", samples, E)
            send(client, hub, "model", P)
        for other in range(task.N):
            if other != j:
                send(hub, f"hub {other}", "embeddings", B, E)
        if isinstance(algorithm, LabelPrivateTDCD) and j > 0:
            for _ in range(algorithm.local_steps if algorithm.fresh else 1):
                send(hub, "hub 0", "fresh embeddings", B, E)
                send("hub 0", hub, "derivatives", B, E)
    return sent


def hub_messages(
    algorithm: AsyncTDCD, task: TieredTask, state: AsyncState, hub: int
) -> list[Message]:
    """Return every array of the round that a hub of the first run has under way.

    A hub knows every other hub's minibatches from the shared seed, but not how many rounds they
    will do before it publishes again. We take the simplest way out: its clients embed all rows they
    hold with the new average, and it publishes the whole table ``[M, E]``. The average is already
    with the clients when the next round begins.
    """
    count, name, P = int(state.rounds[0, hub]), f"hub {hub}", task.models[hub].size
    sent, send = _ledger(task, count)
    ids = draw_ids(state.seeds[:1], count, len(task.y), algorithm.batch_size)
    parts, (M, E, B) = task.rows[hub], (len(task.y), task.widths[0], ids.shape[1])
    for k, rows in enumerate(parts):
        client = f"client {k},{hub}"
        send(name, client, "sample ids", B)
        send(name, client, "foreign embeddings", int(np.isin(ids, rows).sum()), E)
        send(client, name, "model", P)
        send(name, client, "model", P)  # the average
        send(client, name, "embeddings", len(rows), E)
    for other in range(task.N):
        if other != hub:
            send(name, f"hub {other}", "embeddings", M, E)
    return sent


def _ledger(task: TieredTask, t: int) -> tuple[list[Message], Callable[..., None]]:
    """Return the messages of round ``t``, none yet, and what adds one to them."""
    sent: list[Message] = []

    def send(sender: str, receiver: str, content: str, *shape: int) -> None:
        size = 8 if content == "sample ids" else task.models[0].dtype(task.x[0]).itemsize
        sent.append(Message(t, sender, receiver, content, shape, int(np.prod(shape)) * size))

    return sent, send

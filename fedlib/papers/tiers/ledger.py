"""Who sends what to whom in a round of TDCD, following the algorithm box."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedlib.engine.draws import draw_one
from fedlib.papers.tiers.algorithm import TDCD, Cohort, TieredState
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.messages import Message


def messages(algorithm: TDCD, task: TieredTask, state: TieredState) -> list[Message]:
    """Return every array that the first run will exchange in the round after ``state``.

    The list follows the algorithm: models and embeddings between hub and clients, embeddings
    between hubs, models back; with private labels, derivatives and fresh embeddings as well.
    """
    out: list[Message] = []
    one = replace(state, x=state.x[:1], seeds=state.seeds[:1])
    drawn = draw_one(algorithm, one, task)
    silos = [Cohort.of(task, j, drawn, one.x) for j in range(task.N)]

    def send(sender: str, receiver: str, content: str, *shape: int) -> None:
        size = int(np.prod(shape)) * task.x[0].element_size()
        out.append(Message(state.t, sender, receiver, content, shape, size))

    E, B = task.widths[0], drawn.ids.shape[1]
    for silo in silos:
        j, hub, P = silo.j, f"hub {silo.j}", task.models[silo.j].size
        count = (silo.batch.weight > 0).sum(1).tolist()
        for k, held in enumerate(count):
            client = f"client {k},{j}"
            send(hub, client, "model", P)
            send(client, hub, "embeddings", held, E)
            send(hub, client, "foreign embeddings", held, E)
            send(client, hub, "model", P)
        for other in range(task.N):
            if other != j:
                send(hub, f"hub {other}", "embeddings", B, E)
        if isinstance(algorithm, LabelPrivateTDCD) and j > 0:
            for _ in range(algorithm.local_steps if algorithm.fresh else 1):
                send(hub, "hub 0", "fresh embeddings", B, E)
                send("hub 0", hub, "derivatives", B, E)
    return out

"""FedProx: local steps that are pulled back to where they began.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, *Federated Optimization in Heterogeneous Networks*,
MLSys 2020, Algorithm 2, with SGD as the local solver::

    1  for t = 0, 1, ...
    2      draw clients with weights q
    3      each of them: y = x
    4          K times: y <- y - η (∇F_k(y) + μ (y - x))
    5      x <- x + Σ_k q_k (y_k - x)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from fedlib.engine.checks import check_each
from fedlib.engine.draws import draw_one
from fedlib.engine.mixing import average
from fedlib.engine.steps import proximal
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, FedAvg, movements
from fedlib.papers.methods.common import Rate


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg, whose clients minimise ``h_k(w; w_t) = F_k(w) + μ/2 ‖w - w_t‖²`` inexactly.

    The paper leaves the local solver open: any w that shrinks the gradient of h_k enough. Here it
    is SGD on h_k, as in the authors' code. The paper's box draws clients in proportion to their
    samples and takes the plain mean. The authors' code draws them uniformly and weighs by samples,
    which is ``weights="sizes"``.

    Parameters
    ----------
    participation, lr, local_steps, batch_size, weights
        As for :class:`~fedlib.papers.fedavg.FedAvg`.
    mu
        μ, 0 or more; a number, or one a run. The paper tries values from 0.001 to 1. With 0 it is
        FedAvg.
    """

    mu: Rate = field(kw_only=True)

    per_run: ClassVar = ("lr", "mu")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("mu", self.mu)

    def round(
        self, state: fedavg.State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[fedavg.State, dict[str, Any]]:
        """Run one round of every run: lines 2 to 5 of the box."""
        drawn = drawn or draw_one(self, state, task)  # line 2
        x, cohort = state.x, drawn.q.shape[1]
        anchor = x.repeat_interleave(cohort, 0)  # line 3
        mu = column(self.mu, x, cohort) * anchor.new_ones(len(anchor), 1)
        d = movements(self, x, task, drawn, proximal(), anchor=anchor, mu=mu)  # line 4
        x = x + average(d, drawn.q)  # line 5
        return replace(state, x=x, cursor=drawn.cursor, t=state.t + 1), {}

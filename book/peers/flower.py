"""Time a round of federated averaging in Flower: the work of every script in this folder."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import time
from collections.abc import Iterable
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # both are read on import
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

CLIENTS, SAMPLES, COHORT, STEPS, BATCH, LR = 250, 240, 10, 5, 16, 0.01
WARM_UP = 2


class Net(nn.Module):
    """The Fashion-MNIST CNN of Wang and Ji (2022): 228,586 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        h = max_pool2d(relu(self.conv1(x)), 2)
        h = max_pool2d(relu(self.conv2(h)), 2).flatten(1)
        return self.fc2(relu(self.fc1(h)))


@functools.cache
def kept() -> tuple[Net, Tensor, Tensor]:
    """Return the model and all clients' data, made once in each worker process."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, SAMPLES, 1, 28, 28, generator=g)
    return Net(), x, torch.randint(10, (CLIENTS, SAMPLES), generator=g)


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take the local steps of one client."""
    net, x, y = kept()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    c = context.node_config["partition-id"]
    for rows in torch.randperm(SAMPLES)[: STEPS * BATCH].split(BATCH):
        optimizer.zero_grad()
        cross_entropy(net(x[c, rows]), y[c, rows]).backward()
        optimizer.step()
    arrays, metrics = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": SAMPLES})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes how long each round takes, from the sampling to the new average."""

    seconds: list[float]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start the clock and sample."""
        self.began = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average and stop the clock; a client that failed would make a round look fast."""
        replies = list(replies)
        if len(replies) != COHORT or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"round {server_round}: not every client of the round replied")
        out = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.began)
        return out


def measure(rounds: int, cpus: int) -> list[float]:
    """Return the seconds of each round after the warm-up."""
    strategy = TimedFedAvg(
        fraction_train=COHORT / CLIENTS,
        fraction_evaluate=0.0,
        min_train_nodes=COHORT,
        min_available_nodes=CLIENTS,
    )
    strategy.seconds = []
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord(Net().state_dict())
        strategy.start(grid, start, num_rounds=WARM_UP + rounds)

    backend = dict(init_args=dict(num_cpus=cpus), client_resources=dict(num_cpus=1, num_gpus=0.0))
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=backend)
    return strategy.seconds[WARM_UP:]


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are timed")
    cpus = os.cpu_count() or 1
    seconds = measure(parser.parse_args().rounds, cpus)
    row = dict(
        peer="Flower",
        version=version("flwr"),
        torch=torch.__version__,
        seconds_per_round=round(statistics.median(seconds), 5),
        rounds=len(seconds),
        what=f"Ray simulation (Ray {version('ray')}), actors with one CPU each: {cpus}",
        date=datetime.date.today().isoformat(),
    )
    print(json.dumps(row))


if __name__ == "__main__":
    # Workers import a module by its name, so the data they keep stays with them. What belongs to
    # __main__ is sent anew with each message instead, and a cache does not survive that.
    import flower

    flower.main()

"""The page on own data and models runs as it stands, and gives what a plain torch loop gives."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

PAGE = Path(__file__).parents[1] / "book" / "guides" / "bring_your_own.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Run the page from top to bottom in an empty folder; return its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_its_lines_fit_a_page():
    assert len(BLOCKS) == 6
    assert max(len(line) for block in BLOCKS for line in block.splitlines()) <= 88


def test_the_table_is_read_as_written(told):
    data, frame = told["data"], pd.read_csv("patients.csv")
    assert data.clients == ["east", "north", "west"] and data.classes == ["ill", "well"]
    assert len(data.x) + len(data.test_x) == len(frame) == 240
    x = torch.cat([data.x, data.test_x]).double().numpy() * data.std + data.mean
    ages = sorted(x[:, 0].round().astype(int))
    assert ages == sorted(frame["age"])
    for n, name in enumerate(data.clients):
        own = (frame["hospital"] == name).sum()
        assert data.sizes[n] == own - int(0.2 * own + 0.5)


def test_it_gives_what_a_plain_torch_loop_gives(told):
    """Each round, each hospital trains a copy of the server's module; all tensors are averaged."""
    data, fedavg, task = told["data"], told["fedavg"], told["task"]
    start = fedavg.init(task, (0,))
    server, cursor = task.model.to_module(start.x), start.cursor
    for _ in range(20):
        batches, cursor = data.next_batches((0,), torch.tensor([[0, 1, 2]]), cursor, 5, 8)
        hospitals = [copy.deepcopy(server).train() for _ in range(3)]
        for c, module in enumerate(hospitals):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for batch in batches:
                optimizer.zero_grad()
                cross_entropy(module(data.x[batch.rows[c]]), data.y[batch.rows[c]]).backward()
                optimizer.step()
        tables = [module.state_dict() for module in hospitals]
        server.load_state_dict({k: sum(t[k] for t in tables) / 3 for k in tables[0]})
    expected, found = server.eval()(data.test_x), told["trained"](data.test_x)
    assert (expected - found).abs().max() < 1e-4
    assert (task.model.to_module(start.x).eval()(data.test_x) - found).abs().max() > 0.1
    frame = told["history"].frame
    last = frame[(frame["round"] == 20) & (frame["seed"] == 0) & (frame["split"] == "test")]
    values = last.set_index("metric")["value"]
    assert values["loss"] == pytest.approx(cross_entropy(expected, data.test_y).item(), abs=1e-4)
    right = (expected.argmax(1) == data.test_y).double().mean().item()
    assert values["accuracy"] == pytest.approx(right)
    assert right > 0.7
    assert re.fullmatch("[0-9a-f]{64}", told["hashes"]["patients"])
    row = task.model.to_row(told["trained"]).float()
    assert torch.equal(row[0], told["history"].state.x[0])

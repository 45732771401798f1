"""Targets fit the loss, or a sentence says why not; and what an evaluation reports."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    roc_auc_score,
    top_k_accuracy_score,
)
from torch import nn

from fedlib.engine import models
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.losses import auroc
from fedlib.engine.model import Model
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.tiers import TieredTask

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 4))
CLASSES = RNG.integers(0, 3, 12)
BINARY = CLASSES % 2


def data_of(y, **options):
    return FederatedDataset.build(X, y, [np.arange(12)], **options)


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "words"),
    [
        ("half_square", 1, CLASSES, r"\[12\] of type torch.int64: .*y.astype.*y=None"),
        ("half_square", 1, X[:, :1], r"\[12, 1\] .*expected shape \[12\]"),
        ("half_square", 3, X[:, 0], r"3 outputs.*expected shape \[12, 3\]"),
        ("half_square", 2, X[:, :3], r"expected shape \[12, 2\]"),
        ("half_square", 1, np.where(CLASSES, X[:, 0], np.nan), "nan"),
        ("cross_entropy", 3, CLASSES[:, None], r"\[12, 1\].*squeeze"),
        ("cross_entropy", 3, CLASSES.astype(float), "whole numbers"),
        ("cross_entropy", 3, None, "whole numbers"),
        ("cross_entropy", 2, CLASSES, "0 to 1; got 0 to 2"),
        ("cross_entropy", 3, np.where(CLASSES == 1, -100, CLASSES), "got -100 to 2"),
        ("logistic", 1, CLASSES, r"0 and 1; got \[0, 1, 2\]"),
        ("logistic", 1, 2 * BINARY - 1, "0 and 1"),
        ("logistic", 1, BINARY[:, None], "squeeze"),
    ],
)
def test_targets_that_do_not_fit_are_refused(loss, outputs, y, words):
    model = Model(nn.Linear(4, outputs).double())
    with pytest.raises(FedlibError, match=words):
        Task(model, data_of(y), loss)
    fits = np.zeros(12, dtype=float if loss == "half_square" else int)
    with pytest.raises(FedlibError, match="test targets"):
        Task(model, data_of(fits, test_x=X, test_y=y), loss)
    if y is not None:
        with pytest.raises(FedlibError):
            TieredTask([model], [X], y, [[np.arange(12)]], loss_name=loss)


def test_logistic_takes_one_output():
    with pytest.raises(FedlibError, match="one output. For 2 use 'cross_entropy'"):
        Task(models.softmax(4, 2), data_of(BINARY), "logistic")


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int16, bool])
def test_classes_may_be_any_whole_numbers(kind):
    task = Task(models.softmax(4, 3), data_of(BINARY.astype(kind)))
    same = Task(models.softmax(4, 3), data_of(BINARY))
    batch = Batch(torch.arange(12).view(1, -1))
    tiered = TieredTask([task.model], [X], BINARY.astype(kind), [[np.arange(12)]])
    assert task.data.y.dtype == tiered.y.dtype == torch.int64
    assert torch.equal(task.grad(task.init((0,)), batch), same.grad(task.init((0,)), batch))


def test_what_is_not_numbers_is_refused():
    for x, y, words in (
        (X, np.array(["a"] * 12), "train targets .*ndarray <U1.*return_inverse"),
        (pd.DataFrame({"a": ["b"] * 12}), BINARY, "train features .*DataFrame.*from_frame"),
        (X, BINARY[:5], "12 train samples and 5 targets"),
    ):
        with pytest.raises(FedlibError, match=words):
            FederatedDataset.build(x, y, [np.arange(5)])


def test_a_table_is_read_by_place_and_not_by_index():
    table = pd.DataFrame(X, index=RNG.permutation(12))
    data = data_of(pd.Series(CLASSES, index=RNG.permutation(12)))
    assert torch.equal(data.y, torch.from_numpy(CLASSES))
    assert torch.equal(FederatedDataset.build(table, None, [[0]]).x, torch.from_numpy(X))


def test_no_target_is_a_target_of_zero():
    task = Task(models.location(4), data_of(None), "half_square")
    theta = torch.from_numpy(RNG.standard_normal((1, 4)))
    assert task.evaluate(theta)["loss"].item() == pytest.approx(
        0.5 * ((theta.numpy() - X) ** 2).sum(1).mean()
    )
    step = task.grad(theta, task.data.full_batch())
    assert np.allclose(step.numpy(), theta.numpy() - X.mean(0))


def test_several_real_targets_are_a_regression_each():
    y = RNG.standard_normal((12, 2))
    model = Model(nn.Linear(4, 2).double())
    task = Task(model, data_of(y, test_x=X[:5], test_y=y[:5]), "half_square")
    theta = task.init((0,))
    linear = model.to_module(theta)
    out = linear(task.data.x)
    (0.5 * (out - task.data.y) ** 2).sum(1).mean().backward()
    gradient = task.grad(theta, task.data.full_batch())
    expected = torch.cat([linear.weight.grad.flatten(), linear.bias.grad])
    assert (gradient[0] - expected).abs().max() < 1e-14
    half = 0.5 * ((out[:5] - task.data.y[:5]) ** 2).sum(1).mean().item()
    assert task.evaluate(theta, "test")["loss"].item() == pytest.approx(half)


def test_logistic_reports_what_scikit_learn_computes():
    task = Task(models.linear(4), data_of(BINARY, test_x=X, test_y=np.zeros(12)), "logistic")
    theta = torch.from_numpy(RNG.standard_normal((2, 4)))
    task.chunk = 20  # in pieces of two samples
    found = task.evaluate(theta)
    tiered = TieredTask([task.model], [X], BINARY, [[np.arange(12)]], loss_name="logistic")
    for r, row in enumerate(theta.numpy()):
        margin = X @ row
        assert found["loss"][r].item() == pytest.approx(log_loss(BINARY, 1 / (1 + np.exp(-margin))))
        assert found["accuracy"][r].item() == accuracy_score(BINARY, margin > 0)
        assert found["f1"][r].item() == f1_score(BINARY, margin > 0)
    whole = tiered.evaluate(theta)
    areas = [roc_auc_score(BINARY, X @ row) for row in theta.numpy()]
    assert whole.pop("auroc").tolist() == pytest.approx(areas)
    for name, value in whole.items():
        assert torch.allclose(value, found[name], atol=1e-15)
    nothing = task.evaluate(torch.zeros(1, 4).double(), "test")
    assert nothing["f1"].item() == 0 and nothing["accuracy"].item() == 1


def test_area_under_the_curve_with_ties_and_without_a_class():
    y = torch.tensor([0, 1, 1, 0])
    out = torch.tensor([[0.0, 0.0, 2.0, 1.0], [1.0, 2.0, 3.0, 0.0]])
    assert auroc(out, y).tolist() == [(0.5 + 0 + 1 + 1) / 4, 1.0]
    assert auroc(out, torch.zeros(4)).tolist() == [0.5, 0.5]


def test_five_likeliest_of_more_than_ten():
    x, y = RNG.standard_normal((30, 4)), np.arange(30) % 12
    held = [FederatedDataset.build(x, labels, [np.arange(30)]) for labels in (y, y % 10)]
    task = Task(models.softmax(4, 12), held[0])
    theta = torch.from_numpy(RNG.standard_normal((2, task.size)))
    found = task.evaluate(theta)["top5"]
    for r in (0, 1):
        scores = task.model.to_module(theta[r : r + 1])(torch.from_numpy(x)).detach().numpy()
        assert found[r].item() == pytest.approx(top_k_accuracy_score(y, scores, k=5))
    assert "top5" not in Task(models.softmax(4, 10), held[1]).evaluate(theta[:, :50])


def test_l2_is_not_negative():
    for l2 in (-0.1, float("nan")):
        with pytest.raises(FedlibError, match="l2 is a finite number of at least 0"):
            Task(models.softmax(4, 3), data_of(CLASSES), l2=l2)

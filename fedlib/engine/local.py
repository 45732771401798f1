"""Local SGD for many copies at once: the one hot path of the library, and its backends.

Copies never interact, so the rows of ``theta`` may be cut into pieces and the pieces computed in
any order. The backends differ in the cut, and in who computes a piece:

- ``loop``: one copy after the other;
- ``batched``: all copies together, as far as memory goes;
- ``recorded``: the same, its launches recorded once and replayed; the choice on a GPU;
- ``threads``: pieces that fit a core's cache, each computed by one core, side by side on as many
  cores as ``torch.get_num_threads()`` says; the choice on a CPU. The cut does not depend on the
  number of cores, and neither do the results.

What a copy does with its gradient is a rule of :mod:`fedlib.engine.steps`; plain SGD needs none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real

import torch
from torch import Tensor

from fedlib.engine.checks import check_rows, check_whole_number
from fedlib.engine.cores import side_by_side
from fedlib.engine.cost import check_room, count, room
from fedlib.engine.data import Batch
from fedlib.engine.recording import replayed
from fedlib.engine.steps import Now, Step
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown

BACKENDS = ("loop", "batched", "recorded", "threads")
CACHED = 2**19  # floats of parameters and samples that a core works on at a time, 2 MB
HELD = 64_000_000  # the same for all copies together, 256 MB


def local_sgd(
    task: Task,
    theta: Tensor,
    batches: Sequence[Batch],
    lr: float | Tensor,
    copies: int = 0,
    backend: str | None = None,
    step: Step | None = None,
    extras: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run SGD, or another local rule, on every row of ``theta``, one batch a step.

    Parameters
    ----------
    task
        Gives the loss.
    theta
        ``[C, P]`` starting points; left unchanged.
    batches
        One :class:`~fedlib.engine.data.Batch` of ``C`` rows for each step.
    lr
        Step size, a number or one a copy, ``[C]`` or ``[C, 1]``.
    copies
        At most this many copies in a piece, which bounds the memory; 0 lets the backend choose.
    backend
        ``"loop"``, ``"batched"``, ``"recorded"`` or ``"threads"``; None takes ``"threads"`` on a
        CPU and ``"recorded"`` elsewhere. Only steps of a lasting task, all copies in one piece,
        without a rule of their own, are recorded; others run as ``"batched"``.
    step
        The local rule, see :mod:`fedlib.engine.steps`; None is plain SGD.
    extras
        What the rule needs of each copy, by name: ``[C, ...]``, cut together with the rows.

    Returns
    -------
    Tensor
        ``[C, P]``: row ``c`` is ``theta[c]`` after ``len(batches)`` steps.

    Raises
    ------
    FedlibError
        For an unknown backend, ``"threads"`` away from the CPU, more copies than memory holds, or
        models, batches, rates, extras or a rule's result of another shape.
    """
    check_copies(task, theta, batches, copies)
    on_cpu = theta.device.type == "cpu"
    backend = backend or _default.get() or ("threads" if on_cpu else "recorded")
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "threads" and not on_cpu:
        raise FedlibError(f"'threads' is for the CPU; on {theta.device} use 'batched'.")
    check_room(len(theta), task.size, 1, theta)
    theta = theta.detach()
    check_rate(lr)
    lr = lr.to(theta).flatten() if isinstance(lr, Tensor) and lr.dim() else float(lr)
    if isinstance(lr, Tensor) and len(lr) != len(theta):
        raise FedlibError(f"{len(lr)} rates for {len(theta)} copies. Give one number, or one each.")
    extras = _checked(extras, len(theta))
    descend = _descend_dense if _is_dense(task) else _descend
    lasts = hasattr(task, "recordings") and all(_on_device(batch) for batch in batches)

    pieces = _cut(len(theta), copies or _copies_at_once(task, theta, batches, backend))
    if backend == "recorded" and step is None and lasts and len(pieces) == 1 and batches:
        return _recorded(task, descend, theta, batches, lr)
    out = torch.empty_like(theta)

    def work(rows: slice) -> None:
        piece, rate = theta[rows].clone(), lr[rows] if isinstance(lr, Tensor) else lr
        parts = [_rows(batch, rows) for batch in batches]
        if step is None:
            descend(task, piece, parts, rate)
        else:
            extra = {name: value[rows] for name, value in extras.items()}
            piece = _follow(step, extra, task, piece, parts, rate)
        out[rows] = piece

    if backend == "threads":
        side_by_side(work, pieces)
    else:
        for rows in pieces:
            work(rows)
    return out


_default: ContextVar[str | None] = ContextVar("backend", default=None)


@contextmanager
def everywhere(backend: str) -> Iterator[None]:
    """Let ``local_sgd`` use one backend wherever none is named, to compare it with another."""
    token = _default.set(backend)
    try:
        yield
    finally:
        _default.reset(token)


def _recorded(
    task: Task, descend: Callable, theta: Tensor, batches: Sequence[Batch], lr: float | Tensor
) -> Tensor:
    """Take the steps of all copies by replaying them; see :mod:`fedlib.engine.recording`."""
    who = ("visits",) if task.model.drops else ()  # nothing else asks whose a batch is
    names = ("rows", "weight", "jitter", *who)
    parts = [{name: getattr(b, name) for name in names} for b in batches]
    # a recording reads fixed tensors: all that the steps read is listed once, and ``plan`` says
    # which of the list is which part of which batch; batches that share a tensor share its place
    values = (theta, lr, *(t for part in parts for t in part.values()))
    tensors = {id(t): t for t in values if isinstance(t, Tensor)}
    where = {key: i for i, key in enumerate(tensors)}
    plan = [{n: where[id(t)] for n, t in part.items() if t is not None} for part in parts]
    padded = [b.padded for b in batches]

    def work(*inputs: Tensor) -> Tensor:
        fields = [{name: inputs[i] for name, i in part.items()} for part in plan]
        piece, rate = inputs[0].clone(), inputs[1] if isinstance(lr, Tensor) else lr
        current = [Batch(**p, padded=full) for p, full in zip(fields, padded, strict=True)]
        descend(task, piece, current, rate)
        return piece

    # the rest is written into the launches, numbers too: another value is another recording
    coarse = torch.backends.cuda.matmul.allow_tf32
    fixed = (task.model, task.data.x, task.data.y, task.loss_name, task.l2, coarse)
    key = (*fixed, None if isinstance(lr, Tensor) else lr, repr(plan), repr(padded))
    return replayed(task.recordings, key, work, list(tensors.values()))


def _descend(task: Task, theta: Tensor, batches: list[Batch], rate: float | Tensor) -> None:
    """Update ``theta`` in place by automatic differentiation, whatever the model.

    Each layer is a leaf that shares theta's memory. Splitting one flat leaf would copy the
    whole gradient once a layer in the backward pass.
    """
    views = task.model.views(theta)
    leaves = {name: views[name].detach().requires_grad_() for name in task.model.shapes}
    on_cpu = theta.device.type == "cpu"
    stretches = _stretches(rate) if isinstance(rate, Tensor) and on_cpu else []
    for batch in batches:
        gradients = _gradients(task, views | leaves, leaves, batch)
        for name, gradient in zip(leaves, gradients, strict=True):
            view = views[name]
            if task.l2:
                gradient = gradient + task.l2 * view
            if not isinstance(rate, Tensor):
                view.sub_(gradient, alpha=rate)
            elif not stretches:  # a device's numbers are not read on the host
                view.sub_(gradient * rate.view(-1, *[1] * (view.dim() - 1)))
            for rows, alpha in stretches:
                view[rows].sub_(gradient[rows], alpha=alpha)


def _stretches(rate: Tensor) -> list[tuple[slice, float]]:
    """Return neighbouring rows of one rate with that rate.

    A number is multiplied and subtracted with one rounding, a tensor with two. Taken by stretches,
    copies that share a call with other rates end with the same bits as without them.
    """
    values, counts = rate.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return [(slice(*ends), v) for *ends, v in zip(starts, stops, values.tolist(), strict=True)]


def _gradients(
    task: Task, values: dict[str, Tensor], leaves: dict[str, Tensor], batch: Batch
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        loss = task.losses(values, batch).sum()  # writes into the buffers' views
    return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)


@torch.no_grad()
def _follow(
    step: Step,
    extras: dict[str, Tensor],
    task: Task,
    theta: Tensor,
    batches: list[Batch],
    rate: float | Tensor,
) -> Tensor:
    """Return ``theta`` after the steps of a rule, its gradients by automatic differentiation."""
    rate = rate if isinstance(rate, float) else rate.view(-1, 1)
    for t, batch in enumerate(batches):
        gradient = _flat_gradient(task, batch, theta)  # moves the buffers in theta
        elsewhere = functools.partial(_gradient_elsewhere, task, batch)
        try:
            after = step(Now(theta, gradient, t, rate, extras, batch, elsewhere))
        except KeyError as error:
            raise FedlibError(
                f"The rule asks for {error}. It has the extras {[*extras]}; a tensor with a row "
                "for each copy: local_sgd(..., extras={name: tensor})."
            ) from error
        if not isinstance(after, Tensor) or after.shape != theta.shape:
            came = tuple(after.shape) if isinstance(after, Tensor) else repr(after)
            raise FedlibError(
                f"The rule returned {came}. Expected the rows' next parameters, a tensor "
                f"{tuple(theta.shape)}: return now.theta - now.rate * ..."
            )
        if task.model.buffers:  # no rule of the parameters' moves them
            after = torch.cat([after[:, : task.model.trained], theta[:, task.model.trained :]], 1)
        theta = after
    return theta


def _flat_gradient(task: Task, batch: Batch, theta: Tensor) -> Tensor:
    """Return every row's gradient of its regularised loss, ``[C, P]``; zero at buffers."""
    views, trained = task.model.views(theta), task.model.trained
    leaves = {name: views[name].detach().requires_grad_() for name in task.model.shapes}
    gradients = _gradients(task, views | leaves, leaves, batch)
    flat = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
    if task.l2:
        flat.add_(theta[:, :trained], alpha=task.l2)
    return torch.nn.functional.pad(flat, (0, theta.shape[1] - trained))


def _gradient_elsewhere(task: Task, batch: Batch, point: Tensor) -> Tensor:
    """Return the gradient at a point that stays as it is, buffers included."""
    return _flat_gradient(task, batch, point.clone())


def _is_dense(task: Task) -> bool:
    ours = type(task).losses is Task.losses and type(task).features is Task.features
    return ours and bool(task.model.dense) and task.loss_name == "cross_entropy"


@torch.no_grad()
def _descend_dense(task: Task, theta: Tensor, batches: list[Batch], rate: float | Tensor) -> None:
    """Update ``theta`` in place by the chain rule, written out for dense ReLU networks.

    With ``h_0 = x``, ``h_i = relu(W_i h_{i-1} + b_i)``, no ReLU on the last, and the cross-entropy
    on top, ``δ = (softmax - onehot) / B`` at the output, ``W_i`` moves by ``-rate δ h_{i-1}ᵀ``, and
    ``W_iᵀ δ``, where ``h_{i-1} > 0``, is the δ of the layer below. The gradient is added to the
    weights inside the matrix product and never stored.
    """
    views = task.model.views(theta)
    layers = [(views[f"{name}.weight"], views[f"{name}.bias"]) for name in task.model.dense]
    rate = (theta.new_full((len(theta),), rate) if isinstance(rate, float) else rate).view(-1, 1, 1)
    keep = 1 - task.l2 * rate
    for batch in batches:
        x, y = task.features(batch)
        h = [x.flatten(2).transpose(1, 2)]  # [C, features, B]
        for weight, bias in layers:
            z = torch.baddbmm(bias.unsqueeze(2), weight, h[-1])
            h.append(z if weight is layers[-1][0] else z.relu_())
        delta = h.pop().softmax(1)
        delta.scatter_add_(1, y.unsqueeze(1), torch.full_like(delta[:, :1], -1))
        delta *= rate / y.shape[1] if batch.weight is None else rate * batch.weight.unsqueeze(1)
        for i in reversed(range(len(layers))):
            weight, bias = layers[i]
            if i:
                below = torch.bmm(weight.transpose(1, 2), delta).masked_fill_(h[i] <= 0, 0)
            if task.l2:
                weight.mul_(keep)
                bias.mul_(keep.flatten(1))
            weight.baddbmm_(delta, h[i].transpose(1, 2), alpha=-1)
            bias.sub_(delta.sum(2))
            if i:
                delta = below


def _checked(extras: Mapping[str, Tensor] | None, copies: int) -> dict[str, Tensor]:
    """Refuse what cannot be cut together with the rows."""
    for name, value in (extras or {}).items():
        if not isinstance(value, Tensor) or value.shape[:1] != (copies,):
            came = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise FedlibError(
                f"extras['{name}'] is {came}. Expected a tensor with one row for each of the "
                f"{copies} copies, [{copies}, ...]; repeat_interleave gives every copy its run's."
            )
    return {name: value.detach() for name, value in (extras or {}).items()}


def check_copies(task: Task, theta: Tensor, batches: Sequence[Batch], copies: int) -> None:
    """Refuse models of another task, and batches for another number of copies."""
    check_rows(theta, task.size, task.model.dtype(task.data.x))
    for step, batch in enumerate(batches):
        if batch.rows.dim() != 2 or len(batch.rows) != len(theta) or not batch.rows.shape[1]:
            raise FedlibError(
                f"The batch of step {step} is {list(batch.rows.shape)}, theta has {len(theta)} "
                f"copies. Expected row numbers [{len(theta)}, B]."
            )
        if batch.weight is not None and batch.weight.shape != batch.rows.shape:
            raise FedlibError(
                f"The weights of step {step} are {list(batch.weight.shape)}, its row numbers "
                f"{list(batch.rows.shape)}. Expected one weight for each."
            )
    check_whole_number("copies", copies, 0)


def check_rate(lr: float | Tensor) -> None:
    """Refuse a step size that is neither a finite number nor a tensor; a device's are not read."""
    if isinstance(lr, Tensor) or isinstance(lr, Real) and math.isfinite(lr):
        return
    raise FedlibError(f"lr is a finite number, or a tensor with one for each copy; got {lr!r}.")


def _on_device(batch: Batch) -> bool:
    """Say whether all that a batch holds are tensors, which a recording can be given anew."""
    return batch.visits is None or isinstance(batch.visits, Tensor)


def _rows(batch: Batch, rows: slice) -> Batch:
    pick = lambda t: None if t is None else t[rows]  # noqa: E731
    parts = map(pick, (batch.weight, batch.jitter, batch.visits))
    return Batch(batch.rows[rows], *parts, batch.padded)  # type: ignore[call-arg]  # three parts


def _cut(total: int, size: int) -> list[slice]:
    """Cut ``total`` copies into nearly equal pieces of at most ``size``, an even number of them."""
    count = -(-total // size)
    count = min(total, count + count % 2) if count > 1 else count
    return [slice(total * i // count, total * (i + 1) // count) for i in range(count)]


def _copies_at_once(task: Task, theta: Tensor, batches: Sequence[Batch], backend: str) -> int:
    if backend == "loop" or not batches:
        return 1
    samples = batches[0].rows.shape[1] * task.data.x[0].numel()
    if backend == "threads":
        return max(1, CACHED // (task.size + samples))
    if theta.device.type != "cpu":
        return copies_that_fit(task, theta, batches[0])
    return max(1, HELD // (2 * task.size + 4 * samples))


def copies_that_fit(task: Task, theta: Tensor, batch: Batch) -> int:
    """Return how many copies a device has room for in one step, found by counting a step of one."""
    key = (str(theta.device), theta.dtype, batch.rows.shape[1], task.data.x.shape[1:])
    if key not in task.model.fits:
        first = _rows(batch, slice(0, 1))
        step = functools.partial(_descend, task, batches=[first], rate=0.0)
        step(theta=theta[:1].clone())  # what is done once for all is not counted
        made = count(lambda: step(theta=theta[:1].clone())).made
        task.model.fits[key] = max(1, room(theta.device) // made)
    return task.model.fits[key]

"""What a party that follows the protocol learns from what it received: S1 to S9, as functions.

Every function takes plain arrays: what the observer has on file, and what it must know besides.
Its notes say who observes, what must be known, and what the paper promises about it. The promises:

* **P1** When nobody colludes (threat model 1), nobody reaches another's score ``o_l``: the masks
  stay on (Section 6, Appendix B).
* **P2** When parties collude (threat model 2), masks may come off, but weights and features cannot
  be inferred *exactly*, for ``o = wᵀx`` has infinitely many solutions (Lemma 1).
* **P3** A party without labels knows ``ϑ``, but neither ``wᵀx`` nor the form of the loss, so it
  cannot infer labels *exactly*; parties without labels gain nothing by colluding.

Theorem 7 ("can prevent the inference attack") is argued as P1 to P3. The paper does not promise
secrecy against an active and a passive party that collude for labels, against malicious parties or
side knowledge, of approximate values, or of ``wᵀx`` from a dominator; and it says that labels may
be shared when training is over.

Shapes: n samples, T messages, S snapshots of SVRG. Scores are in the units of ``wᵀx``. Source of
the protocol: Q. Zhang, B. Gu, C. Deng and H. Huang, AAAI 2021. The attacks are written for it here;
their kinds are known: labels from gradients (Li et al., ICLR 2022) and from a party's own part of
the model (Fu et al., USENIX Security 2022), samples from gradients (Zhu et al., NeurIPS 2019),
features from scores of a joint model (Luo et al., ICDE 2021; Weng et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.linalg import expm, qr
from scipy.optimize import linear_sum_assignment, minimize
from scipy.special import expit

from fedlib.engine.checks import check_positive, check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.papers.vertical.secure import Seen, Trees, known, seen_by

RANK = 1e-9
"""Singular values below this share of the largest count as zero."""


# --- from ϑ: labels and scores --------------------------------------------------------------------


def labels(theta: np.ndarray, i: np.ndarray, n: int) -> np.ndarray:
    """S1: return the labels of all samples that a message was about.

    The observer is any party that receives ``(ϑ, i)``, alone. It must know that the task is binary,
    that the loss falls as the margin ``yz`` grows, and which class is called +1; not the loss, no
    score, no feature. Then ``ϑ = y L'(yz)`` with ``L' < 0``, so one message tells ``y = -sign ϑ``
    with certainty. If it does not know which class is +1, one global flip is left, which one known
    label or the ratio of the classes settles.

    P3 says that labels cannot be inferred exactly. For the classification problems of the paper
    this refutes it: one passive party, threat model 1, one message a label. SVRG's broadcast of
    ``ϑ`` for all n samples gives every label at the first snapshot.

    Parameters
    ----------
    theta, i
        ``[T]``, as received. For a snapshot's broadcast ``i`` is ``range(n)``.
    n
        Number of samples.

    Returns
    -------
    numpy.ndarray
        ``[n]``: -1 or +1, and 0 for a sample that no message was about.
    """
    theta, i = _messages(theta, i, n)
    y = np.zeros(n)
    y[i] = -np.sign(theta)
    return y


def two_groups(theta: np.ndarray) -> np.ndarray:
    """S1 without the loss: return the two classes of messages formed at ``w = 0``, up to a flip.

    The observer is any party that receives ``ϑ``, alone. It must know that the task is binary and
    that all blocks start at 0; the loss may be any with ``L'(0, 1) ≠ L'(0, -1)``. All scores are 0,
    so ``ϑ`` has two values: with SGD in the messages before the first update, with SVRG and SAGA in
    the first pass, for all samples. On P3 see :func:`labels`.

    Parameters
    ----------
    theta
        ``[T]``, all formed before the first update.

    Returns
    -------
    numpy.ndarray
        ``[T]``: -1 for the smaller value of ``ϑ``, +1 for the larger.

    Raises
    ------
    FedlibError
        When there are not exactly two values.
    """
    values, which = np.unique(np.asarray(theta), return_inverse=True)
    if len(values) != 2:
        raise FedlibError(
            f"Two values of theta are expected when all scores are 0; got {len(values)}. Were all "
            "of these messages formed before the first update?"
        )
    return 2.0 * which - 1


def labels_from_own(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """S9: return the labels that a party names by its own columns and weights, ``sign(x w)``.

    The observer is any party without labels, alone, after training. It needs nothing that was
    sent: its own block of the model was trained to tell the classes apart. So neither encryption of
    ``ϑ`` nor noise on it is in its way, as long as the model learns. This is the simplest label
    inference by the bottom model (Fu et al., USENIX Security 2022). The paper excludes approximate
    inference; so nothing is refuted.

    Parameters
    ----------
    x, w
        The party's columns and weights, ``[n, d]`` and ``[d]``.

    Returns
    -------
    numpy.ndarray
        ``[n]``: -1 or +1, 0 where the score is 0.
    """
    return np.sign(np.asarray(x, dtype=float) @ w)


def labels_from_odds(x: np.ndarray, odds: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """S9 with evidence: return labels by a model of own columns that is fitted to uncertain labels.

    The observer is any party without labels, alone. It knows the law of the noise, and with it for
    each sample the odds that what was sent gives for +1 against -1; for randomised response that
    is ``ε`` times the answer. It fits logistic regression on its own columns by maximum likelihood,
    each label summed over both values. Compare :func:`labels_from_own`.

    Parameters
    ----------
    x
        Own columns, ``[n, d]``.
    odds
        ``[n]``: logarithm of the odds. If all are 0, nothing is known, and all answers are 0.
    ridge
        Weight of the squared norm of the coefficients, a constant among them.

    Returns
    -------
    numpy.ndarray
        ``[n]``: -1 or +1, the model's answer.
    """
    columns = np.c_[np.asarray(x, dtype=float), np.ones(len(x))]

    def loss(v: np.ndarray) -> tuple[float, np.ndarray]:
        m = columns @ v
        likely = np.logaddexp(odds - np.logaddexp(0, -m), -np.logaddexp(0, m))
        slope = columns.T @ (expit(m) - expit(m + odds)) + ridge * v
        return float(ridge / 2 * v @ v - likely.sum()), slope

    start = columns.T @ np.tanh(np.asarray(odds) / 2) / len(columns)
    return np.sign(columns @ minimize(loss, start, jac=True, method="L-BFGS-B").x)


def labels_from_first_sum(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return the labels of a batch from ``Σ ϑ_i x_i`` at ``w = 0``, though it has more rows than d.

    The observer is the party that gets the sum for its own columns, alone. It must know the
    logistic loss and that all blocks start at 0: then ``ϑ = -y/2``, and ``Σ y_i x_i`` has a single
    solution of signs unless columns are coarse. Found by trying all signs of ``B - d`` rows and
    solving for the others; for larger batches the tool is lattice reduction.

    Parameters
    ----------
    x
        Own columns of the batch, ``[B, d]``, at most 20 rows more than columns.
    gradient
        ``[d]``.

    Returns
    -------
    numpy.ndarray
        ``[B]``: -1 or +1.

    Raises
    ------
    FedlibError
        When there is not one solution, as for sums that were formed later, or too many rows.
    """
    x = np.asarray(x, dtype=float)
    B, d = x.shape
    if B - d > 20:
        raise FedlibError(f"{B} rows and {d} columns: 2^{B - d} patterns are too many to try.")
    order = qr(x.T, pivoting=True, mode="r")[1]  # the first d rows are independent
    solved, tried = order[: min(B, d)], order[min(B, d) :]
    patterns = 1.0 - 2.0 * (np.arange(2 ** len(tried))[:, None] >> np.arange(len(tried)) & 1)
    rest = -2 * np.asarray(gradient) - patterns @ x[tried]
    signs = rest @ np.linalg.pinv(x[solved])
    good = np.flatnonzero((np.abs(np.abs(signs) - 1) < 1e-6).all(axis=1))
    if len(good) != 1:
        raise FedlibError(f"{len(good)} patterns of labels give this sum; were all scores 0?")
    y = np.empty(B)
    y[solved], y[tried] = np.sign(signs[good[0]]), patterns[good[0]]
    return y


def scores(theta: np.ndarray, y: np.ndarray, loss: str = "logistic") -> np.ndarray:
    """S2: return the scores ``wᵀx_i`` behind messages, exactly up to rounding.

    The observer is any party that receives ``ϑ``, alone. It must know the loss, which P3 denies to
    passive parties (the paper's is the usual one), and the label, which for the logistic loss
    :func:`labels` gives. The paper does not promise that ``wᵀx`` stays secret from the parties that
    launch updates; from others it does, as far as P3 rests on it.

    Parameters
    ----------
    theta, y
        ``[T]``.
    loss
        ``"logistic"``: ``z = y log(1/|ϑ| - 1)``, or ``"squared"``: ``z = ϑ/2 + y``.

    Returns
    -------
    numpy.ndarray
        ``[T]``. For the logistic loss the error grows with ``exp(-yz)``: ``1 - |ϑ|`` is then small.
    """
    theta, y = np.asarray(theta, dtype=float), np.asarray(y, dtype=float)
    if loss == "logistic":
        size = np.abs(theta)
        if not ((size > 0) & (size < 1)).all():
            raise FedlibError("The logistic loss has 0 < |theta| < 1; these come from another one.")
        return y * (np.log1p(-size) - np.log(size))
    if loss == "squared":
        return theta / 2 + y
    raise unknown("loss", loss, ("logistic", "squared"))


def regression_labels(theta: np.ndarray, loss: str = "squared") -> np.ndarray:
    """S3: return real labels from messages formed at ``w = 0``.

    The observer is any party that receives ``ϑ``, alone. It must know the loss and that all blocks
    start at 0, so that ``z = 0``: all n samples with SVRG and SAGA, which form a first pass there;
    with SGD only the messages before the first update. For squares of unknown scale the labels come
    out up to that scale. P3 denies the loss to passive parties; with the loss of the paper's
    problems (17) and (18) labels are inferred exactly.

    Parameters
    ----------
    theta
        ``[T]``.
    loss
        ``"squared"``: ``y = -ϑ/2``; ``"robust"``: the smaller root of ``ϑ = -y/(1 + y²/2)``, which
        is the label if ``|y| < √2`` (the product of the two roots is 2).

    Returns
    -------
    numpy.ndarray
        ``[T]``, in the units of the label.
    """
    theta = np.asarray(theta, dtype=float)
    if loss == "squared":
        return -theta / 2
    if loss == "robust":
        inside = 1 - 2 * theta**2
        if (inside < -1e-12).any():
            raise FedlibError("The robust loss has |theta| at most 1/√2; these are not from it.")
        return -2 * theta / (1 + np.sqrt(np.maximum(inside, 0)))
    raise unknown("loss", loss, ("squared", "robust"))


def _messages(theta: np.ndarray, i: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    theta, i = np.asarray(theta, dtype=float), np.asarray(i)
    check_whole_number("n", n)
    if theta.shape != i.shape or i.dtype.kind not in "iu" or ((i < 0) | (i >= n)).any():
        raise FedlibError(
            f"Every value comes with the number of its sample, 0 to {n - 1}; got "
            f"{[*theta.shape]} values and {[*i.shape]} numbers."
        )
    return theta, i


# --- from the sums: masks -------------------------------------------------------------------------


def unmask(
    transcript: Iterable[Seen], trees: Trees, coalition: Iterable[int]
) -> dict[int, np.ndarray]:
    """Return the scores of others that a coalition computes from one run of Algorithm 1.

    The observers are the parties of ``coalition``; one party is threat model 1. They know the
    trees. With one party, and trees that satisfy Definition 4, P1 says that no score comes out. It
    holds in Figure 5, and for :func:`~.secure.chains`; it does not for all trees of Definition 4
    (``T1 = ((1, 2), 3)``, ``T2 = ((1, 3), 2)``), nor for two parties, where the dominator
    subtracts its own score from the total. With several parties the paper itself shows an example.

    Parameters
    ----------
    transcript
        Of a run with these trees, see :func:`~.secure.aggregate`.

    Returns
    -------
    dict
        For each opened party its score as it went into the sum, ``[...]``: floats, or whole numbers
        modulo ``2^64``, which ``ModularMasks.decode`` reads.
    """
    coalition = {*coalition}
    mine = seen_by(transcript, coalition)
    order = ("own score", "own mask", "masked score", "mask")
    rows = [one.value for content in order for one in mine if one.content == content]
    stack = np.stack(rows)
    result = known(trees, coalition)
    out = {}
    for row, recipe in zip(result.sums, result.recipe, strict=True):
        party = int(np.flatnonzero(row)[0]) + 1
        if np.count_nonzero(row) == 1 and party not in coalition:
            # in the sums' own arithmetic: whole numbers wrap around, and -1 is 2^64 - 1
            out[party] = np.tensordot(recipe.astype(stack.dtype), stack, 1)
    return out


class Range(NamedTuple):
    """Where a masked score lies: ends of an interval, and its sign, 0 if not certain; ``[...]``."""

    low: np.ndarray
    high: np.ndarray
    sign: np.ndarray


def mask_range(masked: np.ndarray, width: float) -> Range:
    """S4: return what a uniform mask on ``[-B, B]`` leaves open about a score.

    The observer is the receiver of a lone masked score ``o + δ``, alone. It must know the law of
    the masks, which the paper does not fix. For scores within ``[-B, B]`` the sign of ``o`` is
    certain with probability ``E|o| / 2B``. P1 speaks of the true value, and that stays hidden: a
    limit of real-valued masks, no refutation.

    Parameters
    ----------
    masked
        ``[...]``.
    width
        B.
    """
    check_positive("width", width)
    masked = np.asarray(masked, dtype=float)
    low, high = masked - width, masked + width
    return Range(low, high, np.where(low > 0, 1, np.where(high < 0, -1, 0)))


class Averaged(NamedTuple):
    """Means over the visits to each sample, and how many there were; ``[n]``."""

    mean: np.ndarray
    visits: np.ndarray


def averaged(masked: np.ndarray, i: np.ndarray, n: int) -> Averaged:
    """S5: return for each sample the mean of the masked scores that were seen.

    The observer is the receiver of a lone masked score, alone. It must know that masks are fresh
    and have mean zero. After r visits to a sample the masks leave an error of standard deviation
    ``B/√(3r)`` if uniform on ``[-B, B]``, and the score meant is the mean over the visits, which is
    near the last one once ``w`` moves slowly. P1 holds in its letter, as in :func:`mask_range`.

    Parameters
    ----------
    masked, i
        ``[T]``.

    Returns
    -------
    Averaged
        NaN where a sample was never visited.
    """
    masked, i = _messages(masked, i, n)
    visits = np.bincount(i, minlength=n)
    with np.errstate(invalid="ignore"):
        return Averaged(np.bincount(i, masked, minlength=n) / visits, visits)


def low_digits(masked: np.ndarray, step: float) -> np.ndarray:
    """S6: return a score up to multiples of ``step`` when masks are multiples of it.

    The observer is the receiver of a lone masked score, alone. It must know that masks lie on a
    grid, as they do where wide masks are drawn with few digits. For ``|o| < step/2`` that is the
    score itself, which refutes P1 for such masks; the paper fixes no law, so it need not mean them.

    Parameters
    ----------
    masked
        ``[...]``.
    step
        Distance of the grid's points.
    """
    check_positive("step", step)
    return np.asarray(masked) - np.rint(np.asarray(masked) / step) * step


# --- from snapshots: features ---------------------------------------------------------------------


def snapshot_rank(snapshots: np.ndarray) -> int:
    """Return the numerical rank of scores at snapshots ``[S, n]``: the number of features.

    It is ``d_l`` once there are ``d_l`` independent snapshots and ``n ≥ d_l`` independent rows; the
    first of a run counts for nothing, as all is 0 there. See :func:`factor_snapshots`.
    """
    return _basis(snapshots).shape[1]


def _basis(snapshots: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the space of scores, ``[n, d]``."""
    left, sizes, _ = np.linalg.svd(np.asarray(snapshots, dtype=float).T, full_matrices=False)
    if not sizes.size or not sizes[0] > 0:
        raise FedlibError("All scores are 0: the first snapshot alone says nothing.")
    return left[:, sizes > RANK * sizes[0]]


class Factored(NamedTuple):
    """Features ``[n, d]`` and the weights at every snapshot ``[S, d]``."""

    x: np.ndarray
    w: np.ndarray


def factor_snapshots(snapshots: np.ndarray, rows: np.ndarray, features: np.ndarray) -> Factored:
    """S7: return all features and weights of a block from its scores at snapshots.

    The observer is the dominator (with :func:`scores`, any party that knows the loss): every
    snapshot of SVRG gives it ``O^s = X w^s`` for all n samples. X is the block of the other party
    if ``q = 2`` (threat model 1), of all others taken together if ``q ≥ 3`` (threat model 1), or of
    one party if all others pool what they have (threat model 2). It must know, from elsewhere, as
    many independent rows of X as X has columns, and X must have full column rank with ``d``
    independent snapshots. Then the weights at each snapshot follow from the known rows, and all
    other rows from the weights, to rounding.

    P2 says that weights and features cannot be inferred exactly. It excludes side knowledge, which
    this needs, so it is not refuted; but what Lemma 1 calls infinitely many solutions is one
    ``d x d`` matrix for all n rows of a whole run. For ``d = 1`` see :func:`lone_column`.

    Parameters
    ----------
    snapshots
        ``O``, ``[S, n]``.
    rows
        Numbers of the known rows.
    features
        Those rows, ``[len(rows), d]``.

    Raises
    ------
    FedlibError
        When snapshots or known rows are too few or dependent.
    """
    O, features = np.asarray(snapshots, dtype=float), np.asarray(features, dtype=float)
    d = snapshot_rank(O)
    if features.shape != (len(rows), d) or np.linalg.matrix_rank(features) < d:
        raise FedlibError(
            f"The snapshots have rank {d}: {d} independent known rows with {d} features each are "
            f"needed; got {[*features.shape]}. A block with more features needs more snapshots."
        )
    basis = _basis(O)
    mixing = np.linalg.lstsq(basis[rows], features, rcond=None)[0]
    x = basis @ mixing
    return Factored(x, np.linalg.lstsq(x, O.T, rcond=None)[0].T)


def lone_column(snapshots: np.ndarray) -> np.ndarray:
    """S7 for one feature: return the column up to a factor, scaled to a largest value of 1.

    Observer and promise as in :func:`factor_snapshots`, without known rows: a 0/1 column shows as
    two values.

    Parameters
    ----------
    snapshots
        ``[S, n]``, of rank 1.
    """
    basis = _basis(snapshots)
    if basis.shape[1] != 1:
        raise FedlibError(f"The snapshots have rank {basis.shape[1]}; one column has rank 1.")
    return basis[:, 0] / basis[np.abs(basis[:, 0]).argmax(), 0]


# --- from snapshots and ϑ: the Gram matrix, and beyond --------------------------------------------


class _Drive(NamedTuple):
    """What drove a block, in a basis of its scores.

    Attributes
    ----------
    basis
        ``[n, d]``, orthonormal.
    b
        Snapshots, ``[S + 1, d]``.
    f
        ``[S, T, d]``: step t of loop s subtracts ``lr`` times ``f @ R`` for features ``basis @ R``.
    """

    basis: np.ndarray
    b: np.ndarray
    f: np.ndarray


def _drive(snapshots: np.ndarray, theta: np.ndarray, i: np.ndarray, theta0: np.ndarray) -> _Drive:
    O, theta, theta0 = (np.asarray(a, dtype=float) for a in (snapshots, theta, theta0))
    i = np.asarray(i)
    S, n = len(theta), O.shape[1]
    if O.shape[0] != S + 1 or theta.ndim != 2 or i.shape != theta.shape or theta0.shape != (S, n):
        raise FedlibError(
            f"S inner loops of T steps lie between S + 1 snapshots: snapshots {[*O.shape]}, theta "
            f"{[*theta.shape]}, i {[*i.shape]}, theta0 {[*theta0.shape]}; expected [S + 1, n], "
            "[S, T], [S, T], [S, n]."
        )
    basis = _basis(O)
    if basis.shape[1] > S:
        raise FedlibError(f"{S} inner loops do not determine {basis.shape[1]} features.")
    change = theta - theta0[np.arange(S)[:, None], i]
    f = change[:, :, None] * basis[i] + (theta0 @ basis / n)[:, None]
    return _Drive(basis, O @ basis, f)


def gram_from_snapshots(
    snapshots: np.ndarray,
    theta: np.ndarray,
    i: np.ndarray,
    theta0: np.ndarray,
    lr: float,
    lam: float,
) -> np.ndarray:
    """S8: return ``G = X Xᵀ`` of a block from its scores at snapshots, without side data.

    The observer is as in :func:`factor_snapshots`: a dominator for the other party if ``q = 2``,
    or for all others as one block (threat model 1), or all but one together (threat model 2). It
    must know the step size and λ, which every party uses, that the regulariser is ``‖w‖²/2`` (or λ
    = 0), and which messages the block applied in each loop. All steps of an inner loop are known
    up to X itself: ``w ← p w - γ X_iᵀ(ϑ - ϑ0_i) - γ Xᵀϑ0/n`` with ``p = 1 - γλ``, so

        ``O^{s+1} - p^T O^s = -γ G a_s``

    with ``a_s`` made of what was sent. From as many loops as there are features G follows. The
    order within a loop hardly matters: in a wrong one ``p`` is raised to wrong powers in places,
    an error of the size of γλ times the delay, at most γλT in any order, and none for λ = 0.

    P2 in its letter survives for two features or more: an orthogonal matrix stays open, and labels
    of columns with it. All angles and distances between the samples' feature vectors are known, and
    for one feature all is known but a sign. With the paper's nonconvex regulariser even the
    orthogonal matrix closes, see :func:`features_up_to_signs`.

    Parameters
    ----------
    snapshots
        ``O``, ``[S + 1, n]``: the block's scores at each snapshot, and after the last loop.
    theta, i
        ``[S, T]``: messages of each inner loop in the order of their application.
    theta0
        ``[S, n]``: SVRG's broadcast at each snapshot.
    lr, lam
        γ and λ.

    Returns
    -------
    numpy.ndarray
        ``[n, n]``; :func:`embedding` factors it.
    """
    drive = _drive(snapshots, theta, i, theta0)
    return drive.basis @ _gram(drive, lr, lam) @ drive.basis.T


def _gram(drive: _Drive, lr: float, lam: float) -> np.ndarray:
    """Return the Gram matrix in the basis of the scores, ``[d, d]``."""
    check_positive("lr", lr)
    T, p = drive.f.shape[1], 1 - lr * lam
    powers = p ** np.arange(T - 1, -1, -1)
    a = np.einsum("t,std->sd", powers, drive.f)
    moved = -(drive.b[1:] - p**T * drive.b[:-1]) / lr
    G = np.linalg.lstsq(a, moved, rcond=None)[0]
    return (G + G.T) / 2


def embedding(G: np.ndarray, d: int) -> np.ndarray:
    """Return ``[n, d]`` features with this Gram matrix, the true ones but for a rotation."""
    values, vectors = np.linalg.eigh(G)
    return vectors[:, -d:] * np.sqrt(np.maximum(values[-d:], 0))


class Recovered(NamedTuple):
    """What :func:`features_up_to_signs` found.

    Attributes
    ----------
    x
        ``[n, d]``: the features up to the order and the signs of the columns, if ``residual`` is
        of the size of rounding.
    residual
        How far the found features miss the snapshots, relative to them. The attacker sees it, and
        so knows whether it succeeded.
    starts
        How many rotations were tried.
    """

    x: np.ndarray
    residual: float
    starts: int


def features_up_to_signs(
    snapshots: np.ndarray,
    theta: np.ndarray,
    i: np.ndarray,
    theta0: np.ndarray,
    lr: float,
    lam: float,
    starts: int = 6,
    seed: int = 0,
) -> Recovered:
    """R5: return the features themselves under the nonconvex regulariser, up to signs and order.

    The observer and what must be known are as in :func:`gram_from_snapshots`, but for the
    regulariser, which is the paper's ``½ Σ w²/(1 + w²)`` with ``λ > 0`` (its Problem 7). It acts
    on each weight for itself, so turning the features changes the course of training, and only the
    ``2^d d!`` signed orders of the columns give the same one. With ``X = F R``, F a basis of the
    snapshots, ``R`` is fitted so that the known messages lead from each snapshot to the next; the
    start is the Gram matrix of :func:`gram_from_snapshots`, turned at random. The fit moves along
    the rotations and across them by separate coordinates, since the snapshots tell rotations apart
    only by terms of order γλT.

    P2 says that features cannot be inferred exactly, and Lemma 1 gives rotations as the reason.
    For Problem 7 they are inferred exactly but for order and signs of the columns, by one dominator
    if ``q = 2`` (threat model 1), or by all others (threat model 2), without side knowledge.

    How far it goes. Equations are left over, and what is in the way are false minima: a limit of
    the search, which more starts and more loops push back. *Zero delay*, independent normal
    features, two snapshots more than twice the features: tests reach 8 features to at least six
    digits; in trials 16 came out for some data at the first start. Columns that are much alike
    (correlations near 1) come out with about seven loops a column where two and a half with three
    starts fail. Eight made columns of 200 rows did not, with up to ten loops a column and a few
    starts; that says nothing about a better search. *Delays*: if the order in which the block
    applied the messages is known, they change nothing. Where the order sent is taken for the order
    applied, or where several threads update a block from stale reads of it, the residual stops
    above rounding, so that it no longer tells a true minimum from a false one, and features are
    approximate: two to about three digits; three to five with errors from a thousandth to some ten
    per cent while messages are a few steps late, and useless in places when they are half an inner
    loop late. Lost messages were not tried.

    Parameters
    ----------
    snapshots, theta, i, theta0, lr, lam
        As in :func:`gram_from_snapshots`.
    starts
        Rotations to try, until one fits.
    seed
        Of the rotations.
    """
    check_positive("lr", lr)
    check_positive("lam", lam)
    check_whole_number("starts", starts)
    drive = _drive(snapshots, theta, i, theta0)
    values, vectors = np.linalg.eigh(_gram(drive, lr, lam))
    root = vectors * np.sqrt(np.maximum(values, 1e-2 * values.max()))
    best = None
    for start in range(starts):
        turn = np.linalg.qr(stream(seed, "attack", start).normal(size=root.shape))[0]
        R, residual = _fit(drive, root @ turn, lr, lam)
        if best is None or residual < best.residual:
            best = Recovered(drive.basis @ R, residual, start + 1)
        if residual < 1e-11:
            break
    return best._replace(starts=start + 1)


def _fit(
    drive: _Drive, R: np.ndarray, lr: float, lam: float, steps: int = 150
) -> tuple[np.ndarray, float]:
    """Return ``R[d, d]`` after damped Gauss–Newton steps ``R ← R exp(A + B)``, and the residual.

    A is antisymmetric and turns, B is symmetric and changes the Gram matrix.
    """
    damping = 1e-3
    r, J = _missed(drive, R, lr, lam, slopes=True)
    for _ in range(steps):
        scale = np.maximum(np.linalg.norm(J, axis=0), 1e-300)
        damped = np.vstack([J / scale, np.sqrt(damping) * np.eye(len(scale))])
        step = np.linalg.lstsq(damped, np.r_[-r, np.zeros(len(scale))], rcond=None)[0] / scale
        step /= max(1.0, np.abs(step).max())
        moved = R @ expm(_tangent(step, len(R)))
        size, before = np.linalg.norm(_missed(drive, moved, lr, lam)[0]), np.linalg.norm(r)
        if size < before:
            gained = 1 - size / before
            R, damping = moved, max(damping / 5, 1e-12)
            r, J = _missed(drive, R, lr, lam, slopes=True)
            if gained < 1e-6:
                break
        elif (damping := 4 * damping) > 1e8:
            break
    return R, float(np.linalg.norm(r))


def _tangent(step: np.ndarray, d: int) -> np.ndarray:
    """Return ``A + B`` from its entries: first A's above the diagonal, then B's from it on."""
    strict, whole = np.triu_indices(d, 1), np.triu_indices(d)
    A, B = np.zeros((d, d)), np.zeros((d, d))
    A[strict], B[whole] = np.split(step, [len(strict[0])])
    return A - A.T + B + np.triu(B, 1).T


def _missed(
    drive: _Drive, R: np.ndarray, lr: float, lam: float, slopes: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return by how much each loop, run with features ``F R``, misses the next snapshot.

    Returns
    -------
    tuple
        ``[S d]``, relative to the snapshots; with ``slopes`` its derivative along
        :func:`_tangent`'s coordinates ``[S d, d d]``.
    """
    (_, b, f), d = drive, len(R)
    scale, every = np.linalg.norm(b), np.arange(d)
    inverse = np.linalg.pinv(R)
    w = b[:-1] @ inverse.T
    J = -np.einsum("ka,sb->skab", inverse, w) if slopes else None
    for t, push in enumerate(np.moveaxis(f @ R, 1, 0)):
        q = 1 + w * w
        if slopes:
            J *= (1 - lr * lam * (1 - 3 * w * w) / q**3)[:, :, None, None]
            J[:, every, :, every] -= lr * f[None, :, t]
        w = w - lr * (push + lam * w / q**2)
    r = ((w @ R.T - b[1:]) / scale).ravel()
    if not slopes:
        return r, None
    J = np.einsum("xk,skab->sxab", R, J)
    J[:, every, every] += w[:, None]
    J = np.einsum("ac,rab->rcb", R, J.reshape(-1, d, d)) / scale  # along R ← R (1 + K)
    (a, c), (e, g) = np.triu_indices(d, 1), np.triu_indices(d)
    turned = J[:, a, c] - J[:, c, a]
    return r, np.hstack([turned, J[:, e, g] + (e != g) * J[:, g, e]])


# --- from every step of SGD -----------------------------------------------------------------------


def features_from_gathers(
    gathered: np.ndarray,
    theta: np.ndarray,
    i: np.ndarray,
    n: int,
    d: int,
    lr: float,
    lam: float,
    starts: int = 3,
    seed: int = 0,
) -> Recovered:
    """S8 for SGD from ``w = 0``: return features up to a rotation, from the scores of every step.

    The observer and what must be known are as in :func:`gram_from_snapshots`, and the number of
    features besides; who does not know it tries 1, 2, ..., until the residual is of the size of
    rounding. Every step is one equation, ``o_t = x_{i_t}ᵀ w_t`` with ``w_t = -γ Σ_{s<t} p^(t-1-s)
    ϑ_s x_{i_s}``, for the ``n d - d (d-1)/2`` numbers that are open up to a rotation. So a few
    passes more than there are features can be enough, for any n. Solved by the method of Levenberg
    and Marquardt from random starts.

    Parameters
    ----------
    gathered, theta, i
        ``[T]``: the block's score in each step, what was sent, and the sample.
    n, d
        Samples, and features of the block.
    lr, lam
        γ and λ.
    starts, seed
        How many random starts are tried, until one fits, and their seed.

    Returns
    -------
    Recovered
        With the residual relative to ``gathered``.

    Raises
    ------
    FedlibError
        When there are fewer steps than unknowns.
    """
    check_positive("lr", lr)
    check_whole_number("d", d)
    check_whole_number("starts", starts)
    theta, i = _messages(theta, i, n)
    o, open_numbers = np.asarray(gathered, dtype=float), n * d - d * (d - 1) // 2
    if len(o) < open_numbers:
        raise FedlibError(f"{len(o)} steps do not determine {open_numbers} numbers. Wait.")
    pushes, pushed = np.zeros((len(o), n)), np.zeros(n)  # w_t is pushes[t] @ features
    for t, (value, sample) in enumerate(zip(theta, i, strict=True)):
        pushes[t] = pushed
        pushed *= 1 - lr * lam
        pushed[sample] -= lr * value
    best = None
    for start in range(starts):
        x = stream(seed, "gathers", start).normal(size=(n, d))
        x *= np.sqrt(np.linalg.norm(o) / np.linalg.norm(np.sum(x[i] * (pushes @ x), axis=1)))
        x, residual = _fit_gathers(x, o, pushes, i)
        if best is None or residual < best.residual:
            best = Recovered(x, residual, start + 1)
        if residual < 1e-12:
            break
    return best._replace(starts=start + 1)


def _fit_gathers(
    x: np.ndarray, o: np.ndarray, pushes: np.ndarray, i: np.ndarray, steps: int = 300
) -> tuple[np.ndarray, float]:
    """Return features ``[n, d]`` after damped Gauss-Newton steps, and the relative residual."""
    every, size, damping = np.arange(len(o)), np.linalg.norm(o), 1e-2
    w = pushes @ x
    r = np.sum(x[i] * w, axis=1) - o
    for _ in range(steps):
        J = pushes[:, :, None] * x[i][:, None, :]
        J[every, i] += w
        J = J.reshape(len(o), -1)
        H, slope = J.T @ J, J.T @ r
        while damping < 1e8:
            damped = H + damping * np.diag(H.diagonal() + 1e-12 * H.diagonal().max())
            moved = x - np.linalg.solve(damped, slope).reshape(x.shape)
            w = pushes @ moved
            left = np.sum(moved[i] * w, axis=1) - o
            if np.linalg.norm(left) < np.linalg.norm(r):
                break
            damping *= 4
        else:
            break
        gained = 1 - np.linalg.norm(left) / np.linalg.norm(r)
        x, r, damping = moved, left, max(damping / 5, 1e-14)
        if np.linalg.norm(r) < 1e-14 * size or gained < 1e-6:
            break
    return x, float(np.linalg.norm(r) / size)


# --- how well it went -----------------------------------------------------------------------------


def distance(recovered: np.ndarray, true: np.ndarray, up_to: str = "nothing") -> float:
    """Return the relative error of recovered features, ``‖recovered - true‖ / ‖true‖`` at best.

    Parameters
    ----------
    recovered, true
        ``[n, d]``.
    up_to
        What may be undone first: ``"nothing"``, ``"signs"`` (and the order of columns), or
        ``"rotation"`` (an orthogonal matrix).
    """
    x, true = np.asarray(recovered, dtype=float), np.asarray(true, dtype=float)
    if x.shape != true.shape or x.ndim != 2:
        raise FedlibError(f"Compared are [n, d] and the same; got {x.shape}, {true.shape}.")
    if up_to == "signs":
        inner = true.T @ x
        rows, columns = linear_sum_assignment(-np.abs(inner))
        x = x[:, columns] * np.sign(inner[rows, columns])
    elif up_to == "rotation":
        left, _, right = np.linalg.svd(x.T @ true)
        x = x @ left @ right
    elif up_to != "nothing":
        raise unknown("freedom", up_to, ("nothing", "signs", "rotation"))
    return float(np.linalg.norm(x - true) / np.linalg.norm(true))

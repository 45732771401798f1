"""What protects labels and columns in VFB², what it costs, and what it leaves open.

Four protections of the algorithm as it is, measured in accuracy and bytes (:func:`measure`):

* **modular masks** (:class:`~.secure.ModularMasks`): end S4 to S6, not what is read from ``ϑ`` or
  from totals;
* **batch-level** ``ϑ``: parties get ``Σ ϑ_i x_i`` over a batch and no single ``ϑ_i``. Features and
  ``ϑ`` lie apart, so this sum needs
* **encryption** (:func:`encrypted_gradient`): ``ϑ`` travels under an additively homomorphic scheme;
* **noise** with label differential privacy: each label is randomised once, or every ``ϑ`` is.

None of them hides ``wᵀx`` from the party that launches an update, so S7 and S8 stay open to it.
:func:`guarded` is another training that bounds what anybody learns of a patient's columns too:
noise on scores and steps, and sums that survive a party that leaves.

Source: none of this is in the paper, which argues without it. Randomised response: Warner 1965;
label differential privacy: Chaudhuri and Hsu, COLT 2011, and Ghazi et al., NeurIPS 2021; normal
noise: Balle and Wang, ICML 2018, and Dong, Roth and Su, JRSS B 2022; its use in training: Abadi et
al., CCS 2016; encryption: Paillier, EUROCRYPT 1999.
"""

from __future__ import annotations

import math
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import norm

from fedlib.engine.checks import check_between, check_positive, check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.lab.vertical.attacks import labels_from_own
from fedlib.papers.vertical.secure import ModularMasks, aggregate_survivors, survivor_bytes

NOISES = ("none", "response", "laplace", "gaussian")
KEY_BITS = 2048
"""Length of Paillier's modulus; 112 bits of security by NIST SP 800-57. Shorter ones are toys."""


# --- noise on labels, or on ϑ ---------------------------------------------------------------------


def flip_probability(epsilon: float) -> float:
    """Return with which probability randomised response turns a label: ``1/(1 + e^ε)``."""
    check_positive("epsilon", epsilon)
    return float(expit(-epsilon))


def randomised_response(y: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Return labels of which each is turned once, for good, with :func:`flip_probability`.

    ε-differentially private for each label, for the whole run: a label ``+1`` becomes ``+1`` with
    probability ``e^ε/(1 + e^ε)``, and ``-1`` becomes ``+1`` with ``1/(1 + e^ε)``. The ratio is
    ``e^ε``, the same for the other answer, and all that follows, every ``ϑ`` at every visit, is
    computed from the answer (and from features, which the guarantee does not speak of). Privacy
    does not wear off with visits. From a run nobody names a label that is at even odds, *given the
    columns of all parties and all other labels*, with success above ``e^ε/(1 + e^ε)``. Own columns
    that say nothing are not enough: scores tell what the others' columns say.

    Parameters
    ----------
    y
        ``[n]``, -1 or +1.
    epsilon
        ε, above 0.
    """
    y = np.asarray(y, dtype=float)
    if not np.isin(y, (-1, 1)).all():
        raise FedlibError(f"Labels are -1 and 1; got {np.unique(y)[:5]}. From 0 and 1: 2*y - 1.")
    return np.where(rng.random(y.shape) < flip_probability(epsilon), -y, y)


def debiased_theta(z: np.ndarray, answered: np.ndarray, epsilon: float) -> np.ndarray:
    """Return ``ϑ`` of the logistic loss made unbiased for randomised labels.

    With p the probability of a turn, ``((1-p) ϑ(z, ỹ) - p ϑ(z, -ỹ)) / (1-2p)`` has the mean
    ``ϑ(z, y)`` over the answer ``ỹ``. It is computed from the answer alone, so it costs no privacy;
    its variance grows as ε falls.

    Parameters
    ----------
    z, answered
        Scores and randomised labels, ``[...]``.
    epsilon
        As in :func:`randomised_response`.
    """
    p = flip_probability(epsilon)
    kept, turned = (-side * expit(-side * z) for side in (answered, -answered))
    return ((1 - p) * kept - p * turned) / (1 - 2 * p)


def laplace_scale(epsilon: float, visits: int) -> float:
    """Return the scale b of Laplace noise on every ``ϑ`` that makes a run ε-private for each label.

    Changing a label moves ``ϑ`` of the logistic loss by exactly 1, whatever the score:
    ``σ(-z) + σ(z) = 1``. Densities of ``ϑ + Lap(b)`` for the two labels have a ratio of at most
    ``e^{1/b}``. A sample's r visits compose, each given what was sent before, to ``e^{r/b}``; so
    ``b = r/ε``. Everybody, the active party too, has to go on from the noisy ``ϑ``: otherwise
    later scores depend on the label by a way that the noise does not cover.

    Parameters
    ----------
    epsilon
        ε for the whole run.
    visits
        The most messages about one sample; passes in which all ``ϑ`` are formed count.
    """
    check_positive("epsilon", epsilon)
    check_whole_number("visits", visits)
    return visits / epsilon


def gaussian_scale(epsilon: float, delta: float, visits: int = 1) -> float:
    """Return σ of normal noise on every ``ϑ`` that makes a run (ε, δ)-private for each label.

    A message moves by 1, see :func:`laplace_scale`; r of them, each given what was sent before, are
    as hard to tell apart as one that moves by ``√r``. What r visits give away is therefore known
    exactly, see :func:`gaussian_delta`, which is solved for σ here.
    """
    check_positive("epsilon", epsilon)
    check_whole_number("visits", visits)
    if not 0 < delta < 1:
        raise FedlibError(f"delta is between 0 and 1, far below 1/n; got {delta!r}.")

    def excess(log_mu: float) -> float:
        return gaussian_delta(math.exp(log_mu), epsilon) - delta

    most = math.log(math.sqrt(2 * epsilon) + 40)  # where δ is as good as 1
    return math.sqrt(visits) / math.exp(brentq(excess, -40, most, xtol=1e-12))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the smallest δ for which normal noise is (ε, δ)-private; Balle and Wang (2018).

    Parameters
    ----------
    mu
        What can change, in standard deviations of the noise. Several releases add up to the root of
        the sum of squares, also where later ones depend on earlier ones. At even odds nobody tells
        the two possibilities apart with a probability above ``Φ(μ/2)``, see :func:`named_at_most`.
    """
    tail = norm.logcdf(-mu / 2 - epsilon / mu) + epsilon
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(min(tail, 0.0)))


def named_at_most(mu: float) -> float:
    """Return how often a yes or no at even odds given all else is named at most: ``Φ(μ/2)``."""
    return float(norm.cdf(mu / 2))


def total_epsilon(releases: Sequence[tuple[float, int]], delta: float) -> float:
    """Return ε of a whole training, counted by the accountant of Opacus (numerical composition).

    Parameters
    ----------
    releases
        Pairs: standard deviation of normal noise over the most that one secret moves the released
        number or vector, and how often such a release was made.
    delta
        δ for all together.

    Raises
    ------
    FedlibError
        If the package ``opacus`` is not installed.
    """
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise FedlibError(
            "Privacy is counted by the package opacus, which is not installed. "
            "What to do: pip install opacus."
        ) from error
    accountant = PRVAccountant()
    accountant.history = [(noise, 1.0, times) for noise, times in releases]  # 1: nobody is left out
    with np.errstate(divide="ignore"), warnings.catch_warnings(action="ignore"):
        return float(accountant.get_epsilon(delta=delta))


# --- encryption -----------------------------------------------------------------------------------


def keypair(bits: int = KEY_BITS) -> tuple[Any, Any]:
    """Return a public and a private key of Paillier's scheme.

    Where the package ``gmpy2`` is installed, all that is done with them is many times faster.

    Raises
    ------
    FedlibError
        If the package ``phe`` is not installed.
    """
    try:
        from phe import paillier
    except ImportError as error:
        raise FedlibError(
            "Encrypted messages need the package phe (Paillier's scheme), which is not installed. "
            "What to do: pip install phe."
        ) from error
    return paillier.generate_paillier_keypair(n_length=bits)


class Sealed(NamedTuple):
    """What :func:`encrypted_gradient` returns.

    Attributes
    ----------
    gradient
        ``Σ_i ϑ_i x_i``, ``[d]``: what the party without labels ends up with.
    blinded
        What the dominator decrypts: ``[d]`` whole numbers modulo n, uniform whatever the data are.
    bytes
        Sent in all, both ways.
    seconds
        For encrypting, for the party's products, and for decrypting.
    """

    gradient: np.ndarray
    blinded: list[int]
    bytes: int
    seconds: dict[str, float]


def encrypted_gradient(
    theta: np.ndarray, x: np.ndarray, keys: tuple[Any, Any], bits: int = 32
) -> Sealed:
    """Form ``Σ_i ϑ_i x_i`` of one party without showing it ``ϑ``, nor the dominator the sum.

    The dominator holds the keys and sends ``Enc(ϑ_i)`` for a batch. The party raises them to its
    features, multiplies, and blinds each sum with a fresh number uniform modulo n. The dominator
    decrypts the blinded sums and returns them; the party takes its blinds off.

    The dominator learns nothing, perfectly: blinded sums and fresh ciphertexts are uniform. The
    party sees ciphertexts, which tell it nothing under Paillier's assumption (deciding residues
    modulo ``n²``), and the sum. That sum gives every ``ϑ_i`` away where the batch has no more
    independent rows than the party has features, see :func:`theta_from_gradient`: one sample at a
    time, encryption protects no label. How a party learns its own updates cannot be mended by
    hiding ``ϑ``; for more, weights have to stay encrypted too.

    Parameters
    ----------
    theta
        ``[B]``.
    x
        The party's features of the batch, ``[B, d]``.
    keys
        As :func:`keypair` returns them.
    bits
        Binary digits after the point, of ``ϑ`` and of features.

    Raises
    ------
    FedlibError
        When the key is too short for the sum.
    """
    from phe.util import powmod  # with gmpy2, if that is installed

    public, private = keys
    theta, x = np.asarray(theta, dtype=float), np.asarray(x, dtype=float)
    whole = [[round(math.ldexp(float(v), bits)) for v in row] for row in x]
    sent = [round(math.ldexp(float(v), bits)) for v in theta]
    most = sum(abs(v) * max(map(abs, row), default=0) for v, row in zip(sent, whole, strict=True))
    if 2 * most >= public.n:
        raise FedlibError(f"A key of {public.n.bit_length()} bits is too short for these sums.")
    clock, square = [time.perf_counter()], public.nsquare
    sealed = [public.raw_encrypt(v % public.n) for v in sent]
    clock.append(time.perf_counter())
    blinds = [secrets.randbelow(public.n) for _ in range(x.shape[1])]
    sums = []
    for column, blind in zip(zip(*whole, strict=True), blinds, strict=True):
        total = public.raw_encrypt(blind)
        for cipher, factor in zip(sealed, column, strict=True):
            total = total * powmod(cipher, factor, square) % square
        sums.append(total)
    clock.append(time.perf_counter())
    blinded = [private.raw_decrypt(total) for total in sums]
    clock.append(time.perf_counter())
    opened = [(value - blind) % public.n for value, blind in zip(blinded, blinds, strict=True)]
    signed = [value - public.n if value > public.n // 2 else value for value in opened]
    seconds = dict(zip(("encrypt", "multiply", "decrypt"), np.diff(clock).tolist(), strict=True))
    return Sealed(
        np.array([math.ldexp(value, -2 * bits) for value in signed]),
        blinded,
        sealed_bytes(len(theta), [x.shape[1]], public.n.bit_length()),
        seconds,
    )


def sealed_bytes(batch: int, d: Sequence[int], bits: int = KEY_BITS) -> int:
    """Return the bytes that encrypted ``ϑ`` take for one batch and parties with ``d`` features.

    To each party a ciphertext for each sample; from it one for each feature, and a blinded number
    for each feature back. A ciphertext has twice the key's bits.
    """
    cipher, number = -(-2 * bits // 8), -(-bits // 8)
    return sum(batch * cipher + one * (cipher + number) for one in d)


def theta_from_gradient(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return ``ϑ`` of a batch from its gradient sum: what batch-level ``ϑ`` leaves open.

    The observer is the party that gets ``Σ ϑ_i x_i`` for its own rows ``x``, alone, with nothing to
    know besides. If its rows of the batch are independent, so at most as many as its features, the
    values are exact, and :func:`~.attacks.labels` follows. Otherwise the shortest solution is
    returned: it is a guess, and still better than chance. Known from J. Tan et al., 2022.

    Parameters
    ----------
    x
        ``[B, d]``.
    gradient
        ``[d]``.
    """
    return np.linalg.lstsq(np.asarray(x, dtype=float).T, gradient, rcond=None)[0]


# --- what it costs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protection:
    """A choice of protections; the default is the paper's own: real-valued masks and open ``ϑ``.

    Parameters
    ----------
    bits
        Binary digits of modular masks; None leaves sums real-valued.
    batch
        Samples of a step. Above 1, parties get sums over the batch, which takes encryption.
    noise
        One of ``NOISES``: nothing, randomised response once a label, or noise on each ``ϑ``.
    epsilon, delta
        Of the noise, for the whole run; δ for ``"gaussian"`` only.
    key
        Bits of the key that ``ϑ`` is encrypted with; 0 leaves it open. A batch has to have one.
    """

    bits: int | None = None
    batch: int = 1
    noise: str = "none"
    epsilon: float | None = None
    delta: float = 1e-6
    key: int = 0

    def __post_init__(self) -> None:
        check_whole_number("batch", self.batch)
        if self.noise not in NOISES:
            raise unknown("noise", self.noise, NOISES)
        if (self.noise == "none") != (self.epsilon is None):
            raise FedlibError("Noise comes with its epsilon, and epsilon with a kind of noise.")
        if self.noise != "none":
            check_positive("epsilon", self.epsilon)
        if self.batch > 1 and not self.key:
            raise FedlibError(
                "A sum over a batch is formed under encryption, as features and theta lie with "
                f"different parties. Say Protection(batch={self.batch}, key={KEY_BITS})."
            )


class Price(NamedTuple):
    """What a protection costs, and what it protects.

    Attributes
    ----------
    accuracy
        Share of test samples on the right side.
    sent
        Share of the training labels that a passive party names rightly by what it is sent.
    own
        The same by its own columns and weights, for the passive party that does it best.
    bytes
        Sent by all parties together, for each training sample visited.
    """

    accuracy: float
    sent: float
    own: float
    bytes: float


def measure(
    protection: Protection,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    blocks: Sequence[np.ndarray],
    lr: float,
    passes: int,
    lam: float = 1e-4,
    seed: int = 0,
) -> Price:
    """Train a logistic model by VFB²-SGD without delay under a protection; return cost and use.

    Party 0 holds the labels, and the others attack. Party 1 uses what reaches it: every ``ϑ``, of
    which it takes the sum over a sample's visits, or the sums over batches, which it solves for
    ``ϑ`` first. And each passive party names labels by its own columns and weights when training is
    over (:func:`~.attacks.labels_from_own`), for which nothing has to reach it. Samples come in
    shuffled passes, so that each has as many visits as there are passes. What encryption computes
    is computed here without it: the numbers are the same up to the last digit, see
    :func:`encrypted_gradient`.

    Parameters
    ----------
    train, test
        Features ``[n, d]`` and labels -1 or +1.
    blocks
        Columns of each of the q parties, two or more.
    lr
        Step size; of a batch the mean gradient is taken.
    passes
        Over the data.
    lam
        λ of ``‖w‖²/2``.
    """
    x, y = np.asarray(train[0], dtype=float), np.asarray(train[1], dtype=float)
    if wrong := [label for label in y if label not in (-1.0, 1.0)]:
        raise FedlibError(f"Labels are -1 or +1; got {wrong[0]:g}.")
    check_whole_number("The number of parties", len(blocks), 2)
    check_positive("lr", lr)
    check_whole_number("passes", passes)
    labels, spread = y, 0.0
    rng = stream(seed, "protection")
    if protection.noise == "response":
        labels = randomised_response(y, protection.epsilon, rng)
    elif protection.noise == "laplace":
        spread = laplace_scale(protection.epsilon, passes)
    elif protection.noise == "gaussian":
        spread = gaussian_scale(protection.epsilon, protection.delta, passes)
    w, evidence = np.zeros(x.shape[1]), np.zeros(len(y))
    for number in range(passes):
        order = stream(seed, "protected pass", number).permutation(len(y))
        for rows in np.split(order, range(protection.batch, len(y), protection.batch)):
            z = _gathered(protection, x[rows], w, blocks)
            theta = -labels[rows] * expit(-labels[rows] * z)
            if protection.noise == "response":
                theta = debiased_theta(z, labels[rows], protection.epsilon)
            elif spread:
                draw = rng.laplace if protection.noise == "laplace" else rng.normal
                theta = theta + draw(0.0, spread, theta.shape)
            gradient = theta @ x[rows]
            seen = theta
            if protection.key:
                mine = blocks[1]
                seen = theta_from_gradient(x[np.ix_(rows, mine)], gradient[mine])
            evidence[rows] -= seen
            w -= lr * (gradient / len(rows) + lam * w)
    return Price(
        float(np.mean(np.sign(test[0] @ w) == test[1])),
        float(np.mean(np.sign(evidence) == y)),
        named_by_own(x, y, w, blocks),
        sample_bytes(protection, blocks),
    )


def named_by_own(
    x: np.ndarray, y: np.ndarray, w: np.ndarray, blocks: Sequence[np.ndarray]
) -> float:
    """Return the share of labels that the best of the passive parties names by its own part."""
    return max(float(np.mean(labels_from_own(x[:, b], w[b]) == y)) for b in blocks[1:])


def _gathered(
    protection: Protection, x: np.ndarray, w: np.ndarray, blocks: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the scores of a batch as Algorithm 1 delivers them."""
    if protection.bits is None:
        return x @ w
    masks = ModularMasks(protection.bits)
    parts = np.stack([x[:, block] @ w[block] for block in blocks])
    return masks.decode(masks.encode(parts).sum(axis=0, dtype=np.uint64))  # masks cancel exactly


def sample_bytes(protection: Protection, blocks: Sequence[np.ndarray]) -> float:
    """Return the bytes that all parties send for each sample visited, requests left out.

    Masked sums take 8 bytes each, real or modular. An open ``ϑ`` takes 8 and its index 8.
    """
    others = [len(block) for block in blocks[1:]]
    open_bytes = 8 * len(others) * (2 + 1)  # up two trees, and the index
    if not protection.key:
        return float(open_bytes + 8 * len(others))
    return open_bytes + sealed_bytes(protection.batch, others, protection.key) / protection.batch


# --- columns and labels together ------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """The noise of :func:`guarded`, and how many parties must answer.

    Parameters
    ----------
    label
        Standard deviation of the noise on every ``ϑ``; a label moves it by 1.
    row
        That of the noise on scores and on steps, over the most that one sample's columns at one
        party can move them.
    score_limit, row_limit
        Where a party's score and the length of its rows are cut off: fixed before, not measured.
    threshold
        See :func:`~.secure.aggregate_survivors`; 2 is the lowest.
    """

    label: float = 0.0
    row: float = 0.0
    score_limit: float = 1.0
    row_limit: float = 3.0
    threshold: int = 2

    def __post_init__(self) -> None:
        check_positive("score_limit", self.score_limit)
        check_positive("row_limit", self.row_limit)
        check_between("label", self.label, 0)
        check_between("row", self.row, 0)


class Guarded(NamedTuple):
    """A guarded training.

    Attributes
    ----------
    w
        Weights after every step, ``[steps + 1, d]``; the first are 0.
    parts
        What each party put into the sum, ``[steps, q, n]``; the dominator learns the sum over q.
    theta
        What it sent, ``[steps, n]``.
    bytes
        Sent by all parties for each sample visited, as long as nobody leaves.
    """

    w: np.ndarray
    parts: np.ndarray
    theta: np.ndarray
    bytes: float


def guarded(
    guard: Guard,
    x: np.ndarray,
    y: np.ndarray,
    blocks: Sequence[np.ndarray],
    steps: int,
    lam: float = 1e-4,
    seed: int = 0,
    leaves: Mapping[int, int] | None = None,
) -> Guarded:
    """Train a logistic model by columns so that every message is private.

    In each step all samples are visited once. Party l scales each of its rows down to the length
    ``row_limit`` if it is longer, cuts its scores off at ``± score_limit``, adds normal noise and
    takes part in an aggregation that survives parties that leave. The dominator adds noise to
    ``ϑ`` and cuts it off at ``± 1``; everybody, the dominator too, goes on from that. Each party
    adds normal noise to its sum ``Σ ϑ_i x_i`` before it takes its step.

    What others see of one sample's columns at one party is then at most ``2 steps`` releases with
    noise ``row`` (scores, and steps, from which all later weights are computed), and of its label
    ``steps`` releases with noise ``label``; :func:`total_epsilon` adds them up. All others may
    collude.
    The step size is ``4 / (q row_limit²)``, one over the largest curvature possible: no data is
    asked. What was measured on the data before, as means and spreads of columns, is not counted.

    Parameters
    ----------
    x, y
        Features ``[n, d]`` and labels -1 or +1, of which party 1, ``blocks[0]``, is the dominator.
    steps
        How many, which is also how often each sample is visited.
    lam
        λ of ``‖w‖²/2``.
    leaves
        For parties that leave the number of the step in which they do not send any more; parties
        counted from 1, and not party 1. Their columns are lost to the model from then on.
    """
    x, y = np.asarray(x, dtype=float).copy(), np.asarray(y, dtype=float)
    check_whole_number("steps", steps)
    n, leaves = len(x), leaves or {}
    if odd := sorted({*leaves} - {*range(2, len(blocks) + 1)}):
        raise FedlibError(f"Parties that leave are of 2 to {len(blocks)}; got {odd}.")
    for own in blocks:
        length = np.linalg.norm(x[:, own], axis=1, keepdims=True)
        x[:, own] *= np.minimum(1, guard.row_limit / np.maximum(length, 1e-300))
    lr = 4 / (len(blocks) * guard.row_limit**2)
    rng = stream(seed, "guarded")
    w, put, sent = [np.zeros(x.shape[1])], [], []
    for step in range(steps):
        parts = np.stack([x[:, own] @ w[-1][own] for own in blocks])
        parts = parts.clip(-guard.score_limit, guard.score_limit)
        parts += rng.normal(0, guard.row * 2 * guard.score_limit, parts.shape)
        gone = {party for party, last in leaves.items() if last <= step}
        z = aggregate_survivors(parts, guard.threshold, rng, gone).total
        theta = -y * expit(-y * z) + rng.normal(0, guard.label, n)
        theta = theta.clip(-1, 1)
        push = theta @ x + rng.normal(0, guard.row * 2 * guard.row_limit, x.shape[1])
        stay = np.ones(x.shape[1])
        for party in gone:
            stay[blocks[party - 1]] = 0
        w.append((w[-1] - lr * (push / n + lam * w[-1])) * stay)
        put.append(parts)
        sent.append(theta)
    count = survivor_bytes(len(blocks), n) / n + (len(blocks) - 1) * 8
    return Guarded(np.array(w), np.array(put), np.array(sent), count)

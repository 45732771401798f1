"""Masked tree aggregation: who sums what with whom, what everybody sees, and what that gives away.

Algorithm 1 forms ``wᵀx_i = Σ_l o_l`` for the dominator. Party ``l`` draws a mask ``δ_l``; the sums
of ``o_l + δ_l`` go up a tree ``T1``, those of ``δ_l`` up another tree ``T2``, and the difference is
the score. Here is that algorithm with a transcript of what every party saw, the paper's condition
on the two trees (Definition 4), and the test that the condition stands for: what can a coalition
compute from its view?

A tree is a party's number or a tuple of trees, as in ``((1, 2), (3, 4))``. Parties sit on seats
``1 .. q``; seat 1 is the dominator's (:func:`seats` says who sits where). The party with the
lowest number below an inner node hosts it, as in Figure 5, so seat 1 hosts the root of every tree.

Source: Q. Zhang, B. Gu, C. Deng and H. Huang, *Secure Bilevel Asynchronous Vertical Federated
Learning with Backward Updating*, AAAI 2021, Algorithm 1, Section 6 and Appendix B.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError, unknown

Tree = int | tuple["Tree", ...]
Trees = tuple[Tree, Tree]

FIGURE_5: Trees = (((1, 2), (3, 4)), ((1, 3), (2, 4)))
"""The paper's example of two trees, for four parties."""

WORD = 64
"""Bits of the numbers that modular masks are added to."""


# --- trees ----------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A message on the way up a tree: the sum over the parties ``over``."""

    sender: int
    receiver: int
    over: tuple[int, ...]


def leaves(tree: Tree) -> tuple[int, ...]:
    """Return the parties of a tree in increasing order.

    Raises
    ------
    FedlibError
        When a party occurs twice, or an inner node has less than two children.
    """
    parties = sorted(_walk(tree))
    if len(set(parties)) < len(parties):
        raise FedlibError(f"Each party is one leaf of a tree; got {tree}.")
    return tuple(parties)


def _walk(tree: Tree) -> Iterable[int]:
    if not isinstance(tree, tuple):
        yield int(tree)
        return
    if len(tree) < 2:
        raise FedlibError(f"An inner node has two children or more; got {tree}.")
    for child in tree:
        yield from _walk(child)


def sends(tree: Tree) -> list[Send]:
    """Return the messages of a tree, children before parents.

    Every party but the root's host sends once, so there are ``q - 1``.
    """
    messages: list[Send] = []

    def up(node: Tree) -> tuple[int, ...]:
        if not isinstance(node, tuple):
            return (int(node),)
        parts = [up(child) for child in node]
        whole = tuple(sorted(sum(parts, ())))
        messages.extend(Send(part[0], whole[0], part) for part in parts if part[0] != whole[0])
        return whole

    up(tree)
    return messages


def chains(q: int) -> Trees:
    """Return the pair of chains: ``T1`` adds parties 1, 2, ..., q in turn, ``T2`` the other way.

    Partial sums of the one are over the first parties, of the other over the last, so the two are
    significantly different, and no single party's view gives anything away. The price is depth
    ``q - 1``.
    """
    check_whole_number("q", q, 2)
    first, second = 1, q
    for one, other in zip(range(2, q + 1), range(q - 1, 0, -1), strict=True):
        first, second = (first, one), (second, other)  # type: ignore[assignment]
    return first, second


def log_depth(q: int, left: str = "down") -> Trees:
    """Return two trees of depth about ``log2 q``: parties in order, and odd ones before even ones.

    ``T1`` splits ``1 .. q`` in halves, again and again. ``T2`` joins the odd parties' balanced tree
    with that of the even ones.

    Parameters
    ----------
    left
        What to do with an odd number: the left half is the smaller (``"down"``) or the larger
        (``"up"``). Both satisfy Definition 4. Only ``"down"`` hides every term from every single
        party (checked up to ``q = 40``); ``"up"`` does so for few q, see :func:`leak`.
    """
    check_whole_number("q", q, 2)
    if left not in ("down", "up"):
        raise unknown("rounding of the left half", left, ("down", "up"))
    parties = list(range(1, q + 1))
    return (
        _balanced(parties, left),
        (_balanced(parties[::2], left), _balanced(parties[1::2], left)),
    )


def _balanced(parties: Sequence[int], left: str) -> Tree:
    if len(parties) == 1:
        return parties[0]
    half = (len(parties) + (left == "up")) // 2
    return _balanced(parties[:half], left), _balanced(parties[half:], left)


def seats(q: int, dominator: int) -> tuple[int, ...]:
    """Return which of the parties ``0 .. q-1`` sits on each seat: the dominator on the first."""
    check_whole_number("q", q, 2)
    if not 0 <= dominator < q:
        raise FedlibError(f"Party {dominator} does not exist: there are {q}, counted from 0.")
    return dominator, *(party for party in range(q) if party != dominator)


def significantly_different(trees: Trees) -> bool:
    """Tell whether no subtree of one tree has the leaves of a subtree of the other.

    Compared are subtrees with more than one leaf and fewer than all (Definition 4 of the paper,
    after Gu et al., 2020). Single leaves are not compared, which is why the condition does not keep
    all masks on: a party may receive ``o_l + δ_l`` and ``δ_l`` themselves, see :func:`leak`.
    """
    check_trees(trees)
    first, second = (_inner(tree) for tree in trees)
    return not (first & second)


def _inner(tree: Tree) -> set[tuple[int, ...]]:
    """Return the leaves of every proper inner node."""
    nodes = [node for node in tree if isinstance(node, tuple)] if isinstance(tree, tuple) else []
    return {leaves(node) for node in nodes}.union(*map(_inner, nodes))


def check_trees(trees: Trees) -> int:
    """Return the number of parties, having refused trees that are not both over ``1 .. q``."""
    if not isinstance(trees, tuple) or len(trees) != 2:
        raise FedlibError("Two trees are needed: one for masked scores and one for masks.")
    first, second = (leaves(tree) for tree in trees)
    q = len(first)
    if first != second or first != tuple(range(1, q + 1)):
        raise FedlibError(
            f"Both trees have the leaves 1 .. q; got {list(first)} and {list(second)}."
        )
    check_whole_number("q", q, 2)
    return q


# --- what a coalition can compute -----------------------------------------------------------------


def view(trees: Trees, coalition: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the view of a coalition in one run of Algorithm 1 as rows over ``o`` and over ``δ``.

    Row ``r`` says that the coalition knows ``A_o[r] @ o + A_delta[r] @ δ``: first its members' own
    scores, then their own masks, then every sum that one of them received up ``T1`` and ``T2``.

    Returns
    -------
    tuple
        ``A_o`` and ``A_delta``, whole numbers ``[rows, q]``; column ``l - 1`` is party ``l``.
    """
    q = check_trees(trees)
    members = _members(coalition, q)
    up, masks = ([one.over for one in sends(tree) if one.receiver in members] for tree in trees)
    lone: list[tuple[int, ...]] = [(l,) for l in members]

    def ones(sums: list[tuple[int, ...]]) -> np.ndarray:
        return np.array([[l in over for l in range(1, q + 1)] for over in sums], dtype=np.int64)

    none: list[tuple[int, ...]] = [()]
    return (
        ones(lone + none * len(lone) + up + none * len(masks)),
        ones(none * len(lone) + lone + up + masks),
    )


def _members(coalition: Iterable[int], q: int) -> list[int]:
    members = sorted(set(coalition))
    if not members or not all(l in range(1, q + 1) for l in members):
        raise FedlibError(f"A coalition is made of parties from 1 to {q}; got {members}.")
    return members


class Known(NamedTuple):
    """Sums of scores that a coalition can compute, and how.

    Attributes
    ----------
    sums
        ``[r, q]``: independent rows over the scores, in reduced form. ``e_l`` is among them
        exactly if the score of party ``l`` can be computed.
    recipe
        ``[r, rows]``: the combinations of the view's rows that give them.
    """

    sums: np.ndarray
    recipe: np.ndarray


def known(trees: Trees, coalition: Iterable[int]) -> Known:
    """Return all that a coalition learns about the scores in one run of Algorithm 1.

    It can compute each sum whose masks cancel. With masks that are uniform modulo ``2^64`` it
    learns nothing else: the rest of its view is uniform whatever the scores are. With real-valued
    masks of any law it learns a little more (see ``attacks.mask_range``).

    Notes
    -----
    The sums over subtrees of two trees form a totally unimodular matrix (two laminar families,
    Edmonds 1970), and own values are sums over single leaves. So elimination meets no pivot other
    than ``±1``, ranks are the same over every field, and what holds for real numbers holds modulo
    ``2^64``.
    """
    A_o, A_delta = view(trees, coalition)
    q, rows = A_o.shape[1], len(A_o)
    whole = np.hstack([A_delta, A_o, np.eye(rows, dtype=np.int64)])
    _, unmasked = _reduced(whole, q)
    sums, _ = _reduced(unmasked[:, q:], q)
    return Known(sums[:, :q], sums[:, q:])


def _reduced(matrix: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with a pivot among the first columns, reduced, and the rows without one."""
    matrix, row = matrix.copy(), 0
    for column in range(columns):
        candidates = np.flatnonzero(matrix[row:, column])
        if not len(candidates):
            continue
        first = row + candidates[0]
        matrix[[row, first]] = matrix[[first, row]]
        matrix[row] *= matrix[row, column]  # 1 or -1, see :func:`known`
        others = np.flatnonzero(matrix[:, column])
        others = others[others != row]
        matrix[others] -= np.outer(matrix[others, column], matrix[row])
        row += 1
    return matrix[:row], matrix[row:]


def leak(trees: Trees, coalition: Iterable[int]) -> int:
    """Return how many independent sums of others' scores a coalition can compute.

    Written with ranks: ``rank [A_o | A_δ] - rank A_δ - |C|``. The dominator learns ``wᵀx_i`` in any
    case, so 1 is the least for a coalition with party 1, and 0 for one without; more says that the
    trees give terms or partial sums away.

    Notes
    -----
    Ours. Definition 4 does not imply it: for ``T1 = ((1, 2), 3)`` and ``T2 = ((1, 3), 2)``, which
    satisfy the definition, the dominator receives both other parties' masked scores and masks.
    """
    members = list(coalition)
    return len(known(trees, members).sums) - len(set(members))


def safe(trees: Trees, coalition: Iterable[int]) -> bool:
    """Tell whether a coalition learns nothing about others' scores but, with party 1, the total."""
    members = list(coalition)
    return leak(trees, members) <= (1 in members)


def opened(trees: Trees, coalition: Iterable[int]) -> tuple[int, ...]:
    """Return the parties outside a coalition whose own score it can compute."""
    members = {*coalition}
    sums = [np.flatnonzero(row) + 1 for row in known(trees, members).sums]
    return tuple(int(one[0]) for one in sums if len(one) == 1 and one[0] not in members)


# --- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RealMasks:
    """Real-valued masks, uniform on ``[-B, B]``. The paper fixes no law.

    Parameters
    ----------
    width
        B.
    dtype
        ``"float64"`` or ``"float32"``: the precision of scores, masks and sums.
    step
        Above 0, masks are rounded to multiples of it; 0 leaves them as drawn.
    accuracy
        The error in ``wᵀx_i`` that one is ready to accept, in the units of the score.

    Raises
    ------
    FedlibError
        On use, when masks of this width leave rounding errors above ``accuracy``: about ``q B u``
        with the unit roundoff u.
    """

    width: float
    dtype: str = "float64"
    step: float = 0.0
    accuracy: float = 1e-3

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float64"):
            raise unknown("precision", self.dtype, ("float32", "float64"))
        for name in ("width", "accuracy"):
            if not 0 < getattr(self, name) < float("inf"):
                raise FedlibError(
                    f"{name} is above 0 and finite; got {getattr(self, name)!r}. Masks that hide "
                    "whatever the scores are: ModularMasks()."
                )
        if not 0 <= self.step < self.width:
            raise FedlibError(f"step is at least 0 and below the width; got {self.step!r}.")

    def rounding(self, q: int) -> float:
        """Return the size of the error that rounding leaves in the sum, ``q B u``."""
        return q * self.width * float(np.finfo(self.dtype).eps) / 2

    def encode(self, scores: np.ndarray) -> np.ndarray:
        """Return scores ``[q, ...]`` as they are added to masks."""
        if (error := self.rounding(len(scores))) > self.accuracy:
            raise FedlibError(
                f"Masks of width {self.width:g} wash out the sum: in {self.dtype}, {len(scores)} "
                f"parties' rounding errors come to about {error:.2g}, and {self.accuracy:g} is "
                "accepted. Take narrower masks, float64, or ModularMasks(), whose sums are exact."
            )
        return np.asarray(scores, dtype=self.dtype)

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Return fresh masks."""
        masks = rng.uniform(-self.width, self.width, shape)
        if self.step:
            masks = np.rint(masks / self.step) * self.step
        return masks.astype(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return the unmasked sum as float64."""
        return np.asarray(total, dtype=np.float64)


@dataclass(frozen=True)
class ModularMasks:
    """Fixed-point scores plus uniform masks modulo ``2^64``: sums are exact, single terms hidden.

    A score is rounded to a multiple of ``2^-bits``. Whatever it is, the masked score is uniform on
    all 64-bit numbers: the mask hides it perfectly as long as nobody learns the mask.

    Parameters
    ----------
    bits
        Binary digits after the point, 0 to 52. The parties' sum must stay below ``2^(63 - bits)``.

    Notes
    -----
    The simulation draws masks from a seeded generator that is not made for cryptography, so that
    runs can be repeated. A deployment draws them from the operating system (``secrets``).
    """

    bits: int = 32

    def __post_init__(self) -> None:
        check_whole_number("bits", self.bits, 0)
        if self.bits > 52:
            raise FedlibError(f"At most 52 bits after the point; got {self.bits}.")

    def rounding(self, q: int) -> float:
        """Return the largest error of the sum: half a last digit from each party."""
        return q * 2.0 ** -(self.bits + 1)

    def encode(self, scores: np.ndarray) -> np.ndarray:
        """Return scores ``[q, ...]`` as whole numbers modulo ``2^64``.

        Raises
        ------
        FedlibError
            When a score is not finite, or so large that the sum of q such could overflow.
        """
        scores = np.asarray(scores, dtype=np.float64)
        limit = 2.0 ** (WORD - 1 - self.bits) / len(scores)
        if not (np.abs(scores) < limit).all():
            worst = scores.flat[np.argmax(~(np.abs(scores) < limit))]
            raise FedlibError(
                f"A score of {worst:g} does not fit: with {self.bits} bits after the point and "
                f"{len(scores)} parties each lies strictly within ±{limit:g}. Take fewer bits."
            )
        return np.rint(np.ldexp(scores, self.bits)).astype(np.int64).view(np.uint64)

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Return fresh masks, uniform on all 64-bit numbers."""
        return rng.integers(0, 2**WORD, shape, dtype=np.uint64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return the unmasked sum as float64, which holds it exactly below ``2^(53 - bits)``."""
        signed = np.asarray(total, dtype=np.uint64).view(np.int64)
        return np.ldexp(signed.astype(np.float64), -self.bits)


# --- the aggregation, and what was seen -----------------------------------------------------------


class Seen(NamedTuple):
    """One thing that a party saw: a sum over the parties ``over``, from ``sender``.

    Attributes
    ----------
    party
        Who saw it.
    sender
        Who sent it; ``party`` itself for own values.
    content
        ``"own score"``, ``"own mask"``, ``"masked score"`` (up T1), ``"mask"`` (up T2),
        ``"total"``.
    over
        The parties whose terms are in the sum.
    value
        As sent: floats, or whole numbers modulo ``2^64``; ``[...]``.
    """

    party: int
    sender: int
    content: str
    over: tuple[int, ...]
    value: np.ndarray


class Aggregated(NamedTuple):
    """The sum that party 1 has in the end, ``[...]``, and the transcript of the run."""

    total: np.ndarray
    transcript: list[Seen]


def aggregate(
    scores: np.ndarray,
    trees: Trees,
    masks: RealMasks | ModularMasks,
    rng: np.random.Generator,
) -> Aggregated:
    """Run Algorithm 1: sum masked scores up one tree and masks up the other.

    Parameters
    ----------
    scores
        ``o_l`` on the seats in order, ``[q]`` or ``[q, ...]``: all samples of a pass at once.
    trees
        Two trees over ``1 .. q``, such as :func:`chains` or :func:`log_depth` give them.
    masks
        The law of the masks and the arithmetic.
    rng
        Draws the masks, see :func:`fedlib.engine.rng.stream`.

    Returns
    -------
    Aggregated
        ``wᵀx_i``, and what every party saw on the way.

    Raises
    ------
    FedlibError
        When scores and trees disagree about q, or the masks would spoil the sum.
    """
    q = check_trees(trees)
    scores = np.asarray(scores)
    if not scores.ndim or len(scores) != q:
        raise FedlibError(f"The trees have {q} parties, the scores are {[*scores.shape]}.")
    encoded = masks.encode(scores)
    drawn = masks.draw(encoded.shape, rng)
    transcript = []
    for content, values in (("own score", encoded), ("own mask", drawn)):
        transcript += [Seen(l, l, content, (l,), values[l - 1]) for l in range(1, q + 1)]
    masked = _sum_up(trees[0], "masked score", encoded + drawn, transcript)
    total = masks.decode(masked - _sum_up(trees[1], "mask", drawn, transcript))[0]
    transcript.append(Seen(1, 1, "total", tuple(range(1, q + 1)), total))
    return Aggregated(total, transcript)


def _sum_up(tree: Tree, content: str, values: np.ndarray, transcript: list[Seen]) -> np.ndarray:
    """Return the sum of a tree's leaves, ``[1, ...]``, every message noted."""
    sums = {l: values[l - 1 : l].copy() for l in leaves(tree)}  # arrays wrap around silently
    for sender, receiver, over in sends(tree):
        transcript.append(Seen(receiver, sender, content, over, sums[sender][0]))
        sums[receiver] = sums[receiver] + sums[sender]
    return sums[1]


def seen_by(transcript: Iterable[Seen], coalition: Iterable[int]) -> list[Seen]:
    """Return what members of a coalition saw: their part of a transcript."""
    members = set(coalition)
    return [one for one in transcript if one.party in members]


# --- an aggregation that survives parties that leave ----------------------------------------------

PRIME = 2**127 - 1
"""Seeds and shares are whole numbers modulo this prime."""

# A seed's name: (l,) is party l's own, (l, m) with l < m is shared by a pair.
Name = tuple[int, ...]


def shares(
    secret: int, holders: Sequence[int], threshold: int, rng: np.random.Generator, p: int = PRIME
) -> dict[int, int]:
    """Return one share of a secret for each holder: any ``threshold`` give it back, fewer nothing.

    A share is the value at the holder's number of a polynomial of degree ``threshold - 1`` with
    random coefficients, whose value at 0 is the secret (Shamir, 1979). Through fewer points there
    goes one such polynomial for *every* secret.

    Parameters
    ----------
    secret
        0 to ``p - 1``.
    holders
        Different numbers, 1 to ``p - 1``.
    threshold
        1 to ``len(holders)``.
    p
        A prime.
    """
    check_whole_number("threshold", threshold)
    if threshold > len(holders):
        raise FedlibError(f"{len(holders)} holders cannot reach a threshold of {threshold}.")
    if len(set(holders)) < len(holders) or not all(0 < x < p for x in holders):
        raise FedlibError(
            f"Holders are different numbers from 1 on, as range(1, q + 1); got {[*holders]}. The "
            "value at 0 is the secret itself."
        )
    if not isinstance(secret, Integral) or not 0 <= secret < p:
        raise FedlibError(f"The secret is a whole number from 0 to {p - 1}; got {secret!r}.")
    terms = [secret, *(_whole(rng) % p for _ in range(threshold - 1))]
    return {x: sum(term * x**k for k, term in enumerate(terms)) % p for x in holders}


def joined(points: Mapping[int, int], p: int = PRIME) -> int:
    """Return the secret behind ``threshold`` or more :func:`shares`, by Lagrange's formula at 0."""
    total = 0
    for x, value in points.items():
        for other in points:
            if other != x:
                value = value * other * pow(other - x, -1, p) % p
        total += value
    return total % p


def _whole(rng: np.random.Generator) -> int:
    return int.from_bytes(rng.bytes(16), "little")


def expanded(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mask that a seed stands for: whole numbers modulo ``2^64``, by SHAKE-128."""
    size = math.prod(shape)
    drawn = hashlib.shake_128(seed.to_bytes(16, "little")).digest(8 * size)
    return np.frombuffer(drawn, dtype="<u8").reshape(shape)


class Dealt(NamedTuple):
    """What parties agree on before one aggregation: seeds, and who holds which share of them.

    Attributes
    ----------
    seeds
        One for each party and one for each pair.
    held
        For each party its share of every seed.
    """

    seeds: dict[Name, int]
    held: dict[int, dict[Name, int]]


def deal(q: int, threshold: int, rng: np.random.Generator) -> Dealt:
    """Draw the seeds of one aggregation and share each among all parties.

    A pair agrees on its seed, by a key exchange that is not part of the simulation, and the lower
    of the two shares it. Seeds are for *one* aggregation: a pair's seed that was used before would,
    once it is opened since one of the two left, take the masks off earlier sums. A deployment keeps
    one key a pair, and hashes it with the number of the step.
    """
    parties = range(1, q + 1)
    names = [(l,) for l in parties] + [(l, m) for l in parties for m in parties if l < m]
    seeds: dict[Name, int] = {name: _whole(rng) % PRIME for name in names}
    dealt = {name: shares(seed, parties, threshold, rng) for name, seed in seeds.items()}
    return Dealt(seeds, {l: {name: one[l] for name, one in dealt.items()} for l in parties})


def pairwise_masked(party: int, score: np.ndarray, seeds: Mapping[Name, int]) -> np.ndarray:
    """Return what a party sends: its score, its own mask, and one for each pair, plus or minus.

    In the sum over both of a pair their mask drops out.
    """
    sent = score + expanded(seeds[(party,)], score.shape)
    for pair, seed in seeds.items():
        if len(pair) == 2 and party in pair:
            mask = expanded(seed, score.shape)
            sent = sent + mask if party == pair[0] else sent - mask
    return sent


class Survived(NamedTuple):
    """What party 1 has after an aggregation in which parties may have left.

    Attributes
    ----------
    total
        The sum over the parties whose masked score came, ``[...]``.
    over
        These parties.
    sent
        For each of them what it sent, whole numbers modulo ``2^64``.
    told
        The shares that party 1 was given, by seed and holder.
    """

    total: np.ndarray
    over: tuple[int, ...]
    sent: dict[int, np.ndarray]
    told: dict[Name, dict[int, int]]


def aggregate_survivors(
    scores: np.ndarray,
    threshold: int,
    rng: np.random.Generator,
    gone: Container[int] = (),
    silent: Container[int] = (),
    masks: ModularMasks | None = None,
) -> Survived:
    """Add up masked scores, and finish when parties leave on the way.

    Every party sends its score under its own mask and one for each pair. Pairs' masks cancel where
    both have sent. Then party 1 asks those who are left for their shares: of the *own* seed of each
    party that has sent, and of the *pairs'* seeds of each that has not. A party that follows the
    rules never gives out both for the same party, and that is why there are two kinds of mask: one
    that is only late can be taken for gone, its pairs' masks become known, and its own stays on.

    A coalition of fewer than ``threshold`` parties learns, with party 1, the sum over the others
    that have sent and nothing else, if masks drawn from seeds pass for uniform ones; without party
    1 it learns nothing, as what was sent does not reach it. ``threshold`` parties with party 1 open
    everything. The sum comes out while ``threshold`` answer. It is a sum over *one* for
    ``threshold - 1`` colluders when all leave that may; up to ``threshold - 2`` always have two
    others or more in it.

    Parameters
    ----------
    scores
        ``o_l`` of parties ``1 .. q``, ``[q, ...]``.
    threshold
        How many must answer; 2 to q.
    rng
        Draws seeds and shares. In the simulation; in a deployment they come from the system.
    gone, silent
        Parties that leave before they send, and between sending and answering; not party 1.
    masks
        How scores are rounded, by default ``ModularMasks()``.

    Raises
    ------
    FedlibError
        When fewer than ``threshold`` parties answer.

    Notes
    -----
    K. Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning*, CCS
    2017, for parties that follow the rules; key exchange and signatures are left out. There the
    share is of a party's private key and not of each pair's seed, which is shorter.
    """
    masks = masks or ModularMasks()
    encoded = masks.encode(np.asarray(scores))
    parties = range(1, len(encoded) + 1)
    check_whole_number("threshold", threshold, 2)
    if 1 in gone or 1 in silent:
        raise FedlibError("Party 1 forms the sum, so it cannot leave.")
    seeds, held = deal(len(encoded), threshold, rng)
    sent = {l: pairwise_masked(l, encoded[l - 1], seeds) for l in parties if l not in gone}
    answer = [l for l in sent if l not in silent]
    if len(answer) < threshold:
        raise FedlibError(
            f"{len(answer)} parties answer and {threshold} are needed: the sum stays closed. Begin "
            "again with those who are left, or with a lower threshold, which fewer can conspire at."
        )
    told = {}
    for name in seeds:
        if sum(l in sent for l in name) == 1:  # own seed of one that sent, or a pair half gone
            told[name] = {l: held[l][name] for l in answer}
    total: Any = np.sum(list(sent.values()), axis=0, dtype=np.uint64)
    for name, points in told.items():
        mask = expanded(joined(points), encoded.shape[1:])
        total = total + mask if len(name) == 2 and name[1] in sent else total - mask
    return Survived(masks.decode(total), tuple(sent), sent, told)


def survivor_bytes(q: int, samples: int) -> float:
    """Return the bytes of one aggregation by :func:`aggregate_survivors` when nobody leaves.

    Shares of 16 bytes of each seed go to all others, masked sums of 8 bytes a sample and the shares
    of own seeds to party 1. Opening a party that left takes less than its masked sum would have.
    """
    dealt = (q + q * (q - 1) // 2) * (q - 1) * 16
    return dealt + (q - 1) * (8 * samples + 16 * q)

"""The noise that the hosted nodes share with others: who takes part when, and what they draw.

`join` is called once per start, before the first release: nodes tell each other their public keys
and what their ledgers hold, so that everybody knows in which steps everybody releases. In a step
every pair of releasing nodes of a group draws whole multiples of the lattice from its own stream;
the smaller node adds them, the larger subtracts them. As integers they cancel exactly.

One stream never meets two sums: keys are new at every start (see `pair_keys`), and `counts` refuses
a step that it has served.

The parties of a federation gather nothing (`Partners`): who releases when stands in the roster, and
keys come with the partners' notices. A pair whose ends have different keys, or one end of which
stays silent, leaves noise that does not cancel. That costs accuracy and no privacy, by the second
theorem of `cancelling`.

Legend: N hosted nodes, D coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, final

import numpy as np

from dpcsgp.errors import PrivateStepError, WireError
from dpcsgp.kernels.rounded_normal import rounded_normals
from dpcsgp.privacy.accounting import MOST_RELEASES, releases_within
from dpcsgp.privacy.cancelling import noise_groups
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.noise import SENSITIVITY_SLACK
from dpcsgp.privacy.pair_keys import KeyPairs, PublicHalf
from dpcsgp.privacy.shared_noise import SharedNoise
from dpcsgp.randomness import PairStreams, PrivateRandomness

_MOST_DIGITS: Final = 9  # of a node's number
_MOST_KINDS: Final = 100  # of releases in one ledger: a partner that stops makes one more

Releases = Sequence[tuple[ReleaseEvent, int]]
Gather = Callable[[str, Any], list[Any]]


class Partners(Protocol):
    """The other parties of a federation: each is told this start's key, and has told its own."""

    def announce(self, keys: KeyPairs, first_step: int) -> None:
        """Tell all others of this start; `first_step` is the first that it draws."""
        ...

    def streams(self, step: int) -> PairStreams:
        """Return the streams of all pairs of the hosted node in a step."""
        ...


@final
class PairNoise:
    """Shared noise of the hosted nodes, one object per start.

    Args:
        law: own and shared noise of all nodes of the run.
        nodes: numbers of the hosted nodes, in the order of all rows.
        random: their secret streams, from which key pairs are made.
        run_id: public name of the run.
        promises: (eps, delta) of every node of the run.
        partners: of the one hosted node, if it is a party of a federation.
    """

    def __init__(
        self,
        law: SharedNoise,
        nodes: Sequence[int],
        random: PrivateRandomness,
        run_id: str,
        promises: Sequence[tuple[float, float]],
        partners: Partners | None = None,
    ) -> None:
        self.law: Final = law
        self.nodes: Final = tuple(nodes)
        self._run_id, self._promises = run_id, tuple(promises)
        self._keys = KeyPairs(random)
        self._partners = partners
        self._streams: PairStreams | None = None
        self._ends: tuple[int, ...] = ()  # per node of the run: the first step without a release
        self._next_step = 0

    def join(
        self,
        first_step: int,
        steps: int,
        spent_by_node: Mapping[int, Releases],
        gather: Gather,
        paid_steps: Sequence[int] = (),
    ) -> list[int]:
        """Agree with all others on keys and on who releases when.

        Args:
            first_step: number of the step that comes next.
            steps: number of steps of the run.
            spent_by_node: what the hosted nodes' ledgers hold.
            gather: all-gathers a JSON value under a name, by rank.
            paid_steps: how many of the next steps each hosted node has released already.

        Returns:
            The first step in which each hosted node releases nothing any more.

        Raises:
            WireError: another process told something that does not fit.
        """
        if self._partners is not None:
            spent = spent_by_node[self.nodes[0]]
            return [self._join_parties(self._partners, first_step, steps, spent, *paid_steps)]
        told = self.meet(gather, spent_by_node, paid_steps)
        found = [_read_releases(node, told[node]) for node in range(len(self.law.own))]
        spent, paid = [releases for releases, _ in found], [count for _, count in found]
        ends = participation(self.law, self._promises, spent, steps - first_step, paid)
        self.begin(first_step, [first_step + end for end in ends])
        return [self._ends[node] for node in self.nodes]

    def _join_parties(
        self, partners: Partners, first_step: int, steps: int, spent: Releases, paid: int
    ) -> int:
        """Announce this start; return the first step that the own budget does not pay.

        All parties with data count as releasing in all steps: a roster whose promises do not pay
        for them is refused. One that stops all the same hides the others no worse, since they go on
        to add what they share with it.
        """
        if self.joined:
            raise PrivateStepError("shared noise: joined twice; keys serve one start only")
        node = self.nodes[0]
        drawn_from = first_step + paid
        partners.announce(self._keys, drawn_from)
        self.begin(first_step, [steps if factor else 0 for factor in self.law.factors])
        if not self.law.factors[node]:
            return first_step
        left = releases_within(self.law.event(node), *self._promises[node], spent)
        return min(steps, drawn_from + left)

    def meet(
        self,
        gather: Gather,
        spent_by_node: Mapping[int, Releases] | None = None,
        paid_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        """Agree on the keys of all pairs; return what every node said of its ledger, unread."""
        if self._streams is not None:
            raise PrivateStepError("shared noise: joined twice; keys serve one start only")
        mine = self._told(spent_by_node or {}, paid_steps)
        parts = gather("shared noise: keys", mine)
        told = _merged(parts, self.law)
        halves = {node: PublicHalf.from_json(node, value[0]) for node, value in told.items()}
        # The own ones from memory: what the network says of them may be of an earlier start.
        self._streams = self._keys.streams(self._run_id, halves | self._keys.halves)
        digests = gather("shared noise: check", _as_json(self._streams.fingerprints()))
        _compare(digests, [set(map(int, part)) for part in parts], len(self.law.own))
        return {node: value[1] for node, value in told.items()}

    @property
    def joined(self) -> bool:
        """Whether it is known who releases when."""
        return bool(self._ends)

    def begin(self, first_step: int, ends: Sequence[int]) -> None:
        """Take note of who releases when: each node up to the step before its end."""
        self._ends, self._next_step = tuple(ends), first_step

    def event(self, row: int, step: int) -> ReleaseEvent:
        """Return what this node's release costs in this step, with the pairs that it then has."""
        return self.law.event(self.nodes[row], self.active(step))

    def active(self, step: int) -> tuple[bool, ...]:
        """Return which nodes of the run release in a step."""
        return tuple(step < end for end in self._ends)

    def counts(self, step: int, dim: int) -> np.ndarray:
        """Return int32 (N, D): what each hosted node adds, in steps of the lattice.

        Raises:
            PrivateStepError: the streams of this step were drawn before.
        """
        counts_ND = np.zeros((len(self.nodes), dim), dtype=np.int32)
        row_of = {node: row for row, node in enumerate(self.nodes)}
        for low, high, drawn_D in self.draws(step, dim):
            # The smaller node adds, the larger one subtracts.
            if low in row_of:
                counts_ND[row_of[low]] += drawn_D
            if high in row_of:
                counts_ND[row_of[high]] -= drawn_D
        return counts_ND

    def draws(self, step: int, dim: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Draw a step's noise, pair by pair: (smaller node, larger node, int32 (D,)).

        Raises:
            PrivateStepError: the streams of this step were drawn before.
        """
        ready = self._streams is not None if self._partners is None else self.joined
        if not ready or step < self._next_step:
            raise PrivateStepError(
                f"step {step}: the streams of shared noise were drawn already, or nobody joined; "
                "a stream never meets two sums"
            )
        self._next_step = step + 1
        streams = self._streams if self._partners is None else self._partners.streams(step)
        assert streams is not None
        for low, high in self._pairs(step):
            drawn_D = np.empty(dim, dtype=np.int32)
            self._draw(streams, low, high, step, drawn_D)
            yield low, high, drawn_D

    def _pairs(self, step: int) -> list[tuple[int, int]]:
        """Return the pairs that draw in a step: both ends release, and one is hosted here."""
        active, hosted = self.active(step), set(self.nodes)
        return [
            pair
            for group in noise_groups(len(active))
            for pair in itertools.combinations((node for node in group if active[node]), 2)
            if not hosted.isdisjoint(pair)
        ]

    def _draw(
        self, streams: PairStreams, low: int, high: int, step: int, out_D: np.ndarray
    ) -> None:
        def stream(purpose: str, num_bytes: int) -> np.ndarray:
            return streams.bytes(low, high, purpose, step, num_bytes)

        rounded_normals(self.scale(out_D.size), out_D.size, stream, out_D)

    def scale(self, dim: int) -> float:
        """Return the standard deviation of a pair's noise in steps of the lattice."""
        return self.law.shared * (1 + SENSITIVITY_SLACK) / self.law.lattice(dim)

    def _told(
        self, spent_by_node: Mapping[int, Releases], paid_steps: Sequence[int]
    ) -> dict[str, Any]:
        """Return what the hosted nodes tell: public key and nonce, and their ledgers' releases."""
        paid = dict(zip(self.nodes, paid_steps, strict=False))
        return {
            str(node): [
                self._keys.halves[node].as_json(),
                [_write_releases(spent_by_node.get(node, ())), paid.get(node, 0)],
            ]
            for node in self.nodes
        }

    def __repr__(self) -> str:  # keys must never reach a log or a traceback
        return f"PairNoise(nodes={self.nodes})"


def participation(
    law: SharedNoise,
    promises: Sequence[tuple[float, float]],
    spent: Sequence[Releases],
    steps: int,
    paid: Sequence[int] | None = None,
) -> list[int]:
    """Return after how many of the coming steps each node has no budget left.

    A node that stops leaves the others with fewer pairs, which makes their further releases dearer:
    the account is made stretch by stretch, between one change and the next.

    Args:
        law: own and shared noise of all nodes.
        promises: (eps, delta) of every node.
        spent: each node's releases so far.
        steps: how many steps are to come.
        paid: how many of them each node has released already (they are among `spent`).
    """
    done, ends = 0, [0] * len(law.own)
    paid = paid or [0] * len(law.own)
    totals = [list(releases) for releases in spent]
    active = [bool(factor) for factor in law.factors]
    while done < steps and any(active):
        # Who pays in this stretch, and for how long everybody can with the pairs of now.
        paying = [node for node, is_active in enumerate(active) if is_active and paid[node] <= done]
        events = {node: law.event(node, tuple(active)) for node in paying}
        left = {
            node: releases_within(events[node], *promises[node], totals[node]) for node in paying
        }
        changes = [paid[node] - done for node, it in enumerate(active) if it and paid[node] > done]
        stretch = min([steps - done, *left.values(), *changes])
        if stretch == 0:
            active = [it and left.get(node, 1) > 0 for node, it in enumerate(active)]
            continue
        for node in paying:
            totals[node].append((events[node], stretch))
        done += stretch
        ends = [done if it else end for it, end in zip(active, ends, strict=True)]
    return ends


def _merged(parts: Sequence[Any], law: SharedNoise) -> dict[int, list[Any]]:
    """Return node -> what it told, each node once."""
    told: dict[int, list[Any]] = {}
    for part in parts:
        for name, value in part.items() if isinstance(part, dict) else ():
            short = name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS
            if short and isinstance(value, list) and len(value) == 2:
                told.setdefault(int(name), []).append(value)
    wanted = set(range(len(law.own)))
    if set(told) != wanted or any(len(values) != 1 for values in told.values()):
        raise WireError(
            f"shared noise: nodes {sorted(told)} told their keys, expected each of "
            f"0 to {len(wanted) - 1} once; run the same release on all machines"
        )
    return {node: values[0] for node, values in told.items()}


def _compare(parts: Sequence[Any], hosting: Sequence[set[int]], num_nodes: int) -> None:
    """Refuse pairs whose two ends have different keys, or one of which says nothing of it.

    Their noise would not cancel. Whoever holds the key of the run can still lie about all of it.
    """
    pairs = [pair for group in noise_groups(num_nodes) for pair in itertools.combinations(group, 2)]
    first: dict[str, Any] = {}
    for part, nodes in zip(parts, hosting, strict=True):
        wanted = {f"{low} and {high}" for low, high in pairs if low in nodes or high in nodes}
        if not isinstance(part, dict) or part.keys() != wanted:
            raise WireError(
                f"shared noise: the process of node {min(nodes, default=-1)} did not say which "
                "keys it has; run the same release on all machines"
            )
        for pair, digest in part.items():
            if first.setdefault(pair, digest) != digest:
                raise WireError(
                    f"shared noise: nodes {pair} have different keys, so their noise would not "
                    "cancel; a message between them was changed on the way, or the run differs"
                )


def _as_json(fingerprints: Mapping[tuple[int, int], str]) -> dict[str, str]:
    return {f"{low} and {high}": digest for (low, high), digest in fingerprints.items()}


def _write_releases(releases: Releases) -> list[list[Any]]:
    return [[event.as_json(), count] for event, count in releases]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_RELEASES:
        raise ValueError(f"{str(value)[:20]!r} releases")
    return value


def _read_releases(node: int, value: Any) -> tuple[list[tuple[ReleaseEvent, int]], int]:
    """Read what a node said: its ledger's releases, and how many of the next steps are paid."""
    try:
        releases, paid = value
        if len(releases) > _MOST_KINDS:
            raise ValueError(f"{len(releases)} kinds of releases")
        found = [(ReleaseEvent.from_json(event), _count(count)) for event, count in releases]
        return found, _count(paid)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"node {node} told releases that make no sense: {error}") from None

"""Run an audit: attack the message stream, draw the mechanism, verdict.

The attack covers everything up to the frames, but with few trials it says little at small eps; the
draws of the mechanism say how small a fault they would have shown.

In the attack a quarter of the trials teaches the attacker, a quarter picks its score and threshold,
and the other half, which it has never seen, decides. So the bound holds with 95 % confidence
whatever the attacker tried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast, final

import numpy as np
import torch

from dpcsgp.auditing.attack import Evidence, candidates, gather
from dpcsgp.auditing.bounds import (
    CONFIDENCE,
    Rates,
    any_mechanism,
    best_threshold,
    claimed_curve,
    same_family,
)
from dpcsgp.auditing.colluders import TrialPairs
from dpcsgp.auditing.draws import DRAWS
from dpcsgp.auditing.experiment import Setting, build_run, messages
from dpcsgp.auditing.faults import break_run, check_fault
from dpcsgp.auditing.laws import MechanismAudit, audit_mechanism
from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.privacy import composed_epsilon
from dpcsgp.privacy.events import relation_of_unit
from dpcsgp.randomness import PublicRandomness

TRIALS: Final = 1000
FEWEST_TRIALS: Final = 80
INFORMATIVE: Final = 0.5  # share of the claim below which a bound says nothing
_BATCH: Final = 500  # trials that run side by side


@final
@dataclass(frozen=True)
class Audit:
    """What was claimed, and what an attacker could show against it.

    `epsilon_reachable` is the bound that the same trials would give an attack that is always right.
    """

    epsilon_claimed: float
    epsilon_lower_bound: float
    epsilon_lower_bound_any_mechanism: float
    epsilon_reachable: float
    epsilon_reachable_any_mechanism: float
    delta: float
    confidence: float
    passed: bool  # the stream and the mechanism
    stream_passed: bool
    stream_informative: bool  # a bound of half the claim or more
    neighbouring_relation: str
    fault: str | None
    algorithm: str
    compression: str
    optimizer: str  # of the run; the attack is on the releases, which every optimizer is made of
    weight_decay: float
    noise_multiplier: float
    sampling_rate: float
    steps: int
    messages_per_trial: int
    trials: int
    attack: str
    hits: int
    false_alarms: int
    positives: int
    negatives: int
    mechanism: MechanismAudit
    seconds: float

    @property
    def attacks_releases(self) -> bool:
        """Whether the run's messages are other ones than those attacked, made of the same releases.

        Adam and weight decay are public rules that turn releases into messages. So no message says
        more than the releases do; SGD's messages, which are attacked, show them with least change.
        """
        return self.optimizer != "sgd" or self.weight_decay > 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "attacks_releases": self.attacks_releases}


def audit(
    config: Config,
    trials: int = TRIALS,
    fault: str | None = None,
    draws: int = DRAWS,
    sizes: Sequence[int] | None = None,
) -> Audit:
    """Attack the messages of `trials` victims, then draw the mechanism `draws` times.

    Half of the victims hold the canary; what the attacker tells apart bounds eps from below. The
    draws are held against the law that the mechanism states.

    With `privacy.seed` the audit is repeatable; without it, it uses the same fresh secret noise as
    a real run. `sizes` are the declared examples of the nodes of an own run.
    """
    if trials < FEWEST_TRIALS:
        raise ConfigError(
            f"--trials {trials}: expected at least {FEWEST_TRIALS}; the default is {TRIALS}"
        )
    started = time.monotonic()
    setting = Setting.of(config, sizes)
    check_fault(fault, setting.mechanism, setting.rows_per_unit)
    mechanism = audit_mechanism(setting, draws, fault)
    # trials run side by side in batches, every other one with the canary
    parts, num_messages = [], 0
    inside_T = np.arange(trials) % 2 == 0
    for number, start in enumerate(range(0, trials, _BATCH)):
        evidence, num_messages = _batch(setting, inside_T[start : start + _BATCH], fault, number)
        parts.append(evidence)
    evidence = Evidence(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rounds_TK", "steps_TS")
        )
    )
    return _judge(setting, evidence, inside_T, fault, num_messages, mechanism, started)


def _batch(
    setting: Setting, inside_T: np.ndarray, fault: str | None, number: int
) -> tuple[Evidence, int]:
    """Train one batch of victims; return the evidence and the number of messages per trial."""
    nodes = range(setting.group * len(inside_T))
    public = PublicRandomness((setting.config.run.seed + number) % 2**63, nodes)
    private = setting.private_streams(nodes, shift=number)
    run = build_run(setting, torch.from_numpy(inside_T), private, public, fault)
    pairs = cast(TrialPairs | None, run.gradients.mechanism.pairs)
    tape = messages(break_run(run, fault))
    return gather(setting, tape, public, pairs), len(tape)


def _judge(
    setting: Setting,
    evidence: Evidence,
    inside_T: np.ndarray,
    fault: str | None,
    num_messages: int,
    mechanism: MechanismAudit,
    started: float,
) -> Audit:
    """Bound eps from the attack's success on unseen victims, and compare it with the claim."""
    name, (hits, positives), (alarms, negatives) = _attack(setting, evidence, inside_T)
    # the bound of this attack, and of one that is always right with as many trials
    rates = Rates.of(hits, positives, alarms, negatives)
    perfect = Rates.of(positives, positives, 0, negatives)
    event, steps, delta = setting.event, setting.steps, setting.delta
    claimed = composed_epsilon([(event, steps)], delta)
    bound = same_family(rates, event, steps, delta)
    return Audit(
        epsilon_claimed=claimed,
        epsilon_lower_bound=bound,
        epsilon_lower_bound_any_mechanism=any_mechanism(rates, delta),
        epsilon_reachable=same_family(perfect, event, steps, delta),
        epsilon_reachable_any_mechanism=any_mechanism(perfect, delta),
        delta=delta,
        confidence=CONFIDENCE,
        passed=bound <= claimed and mechanism.passed,
        stream_passed=bound <= claimed,
        stream_informative=bound >= INFORMATIVE * claimed,
        neighbouring_relation=relation_of_unit(
            event.relation, "person" if setting.config.privacy.max_rows_per_unit else "example"
        ),
        fault=fault,
        algorithm=setting.config.algorithm.name,
        compression=setting.config.compression.spec,
        optimizer=setting.config.algorithm.optimizer,
        weight_decay=setting.config.algorithm.weight_decay,
        noise_multiplier=event.noise_multiplier,
        sampling_rate=event.sampling_rate,
        steps=steps,
        messages_per_trial=num_messages,
        trials=len(inside_T),
        attack=name,
        hits=hits,
        false_alarms=alarms,
        positives=positives,
        negatives=negatives,
        mechanism=mechanism,
        seconds=time.monotonic() - started,
    )


def _attack(
    setting: Setting, evidence: Evidence, inside_T: np.ndarray
) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Return the chosen score, and of the unseen victims with and without canary: flagged, all."""
    trials = len(inside_T)
    # learn scores on one quarter, choose score and threshold on the next, count on the unseen half
    learn, choose, decide = np.split(np.arange(trials), [trials // 4, trials // 2])
    scores = candidates(setting, evidence.of(learn), inside_T[learn])
    chosen, claims = evidence.of(choose), claimed_curve(setting.event, setting.steps, setting.delta)
    tried = {
        name: best_threshold(
            score(chosen)[inside_T[choose]], score(chosen)[~inside_T[choose]], claims
        )
        for name, score in scores.items()
    }
    name = max(tried, key=lambda name: tried[name][1])
    flagged = scores[name](evidence.of(decide)) > tried[name][0]
    inside = inside_T[decide]
    with_canary = (int(flagged[inside].sum()), int(inside.sum()))
    return name, with_canary, (int(flagged[~inside].sum()), int((~inside).sum()))

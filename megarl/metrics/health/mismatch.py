"""Do engine and trainer agree? H27: their log-probs on the same tokens, and what the pattern of a gap points to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import ClassVar

from megarl.metrics.health.alert import Severity
from megarl.metrics.health.rule import FINE, Finding, Rule, above, number
from megarl.metrics.health.seen import Seen

GAP = "mismatch/newest_logprob_gap_mean"
_FIRST, _LAST = "mismatch/logprob_gap_first_quarter", "mismatch/logprob_gap_last_quarter"
_RECENT_STEPS, _LEAST_STEPS = 20, 5
# Over so few tokens a mean may be far off by chance, over fewer more so. Clean gaps with a tail as heavy as that of a
# log-normal with sigma 2, on 2 to 16 servers with 20 to 1000 tokens each, made no alert in 300,000 simulated steps.
_FEW_TOKENS = 300

_WEIGHTS = "look at weights/version and at how weights get there (weights.transport)"
_BY_SERVER = (
    "{server} holds other weights than the rest or is broken; until it is started again its samples teach wrong "
    f"things. If it missed a push, {_WEIGHTS}."
)
_SUDDEN = f"it was fine before, so after the last push the engines serve stale or damaged weights: {_WEIGHTS}."
_POSITION = (
    "it grows along the response, which points to the engine's KV cache or to positions: compare the model's rope "
    "settings (model.config) and the engine's context and KV precision (generation.sglang)."
)
_ROUTING = (
    "the model is sparse, and engine and trainer may send tokens to different experts: let the engine return its "
    "routing (generation.sglang: {enable_return_routed_experts: true}) or use algorithm.correction.kind: mask."
)
_FIRST_STEP = (
    "it was there from the first step, which points to the chat template, to sampling (rollout.temperature) or to "
    "precision (model.dtype, generation.sglang)."
)


class H27EngineDisagrees(Rule):
    """Engine and trainer give the same tokens other probabilities than rounding explains.

    The gap itself is judged only where the newest samples come from the trained weights: of stale ones it also holds
    what was learned since. Servers are compared with each other on tokens of one version of the weights, which is fair
    in any case.
    """

    facts: ClassVar[tuple[str, ...]] = ("is_sparse",)

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        # gaps of the latest steps that were fine: what is wrong must not become what is usual
        self._usual: deque[float] = deque(maxlen=_RECENT_STEPS)

    def judge(self, seen: Seen) -> Finding | None:
        server = self._odd_server(seen)
        if server is not None:
            return server
        found = seen.all(GAP, "sample/staleness/min")
        if found is None or found[1] > 0:
            return None if len(seen.names.engine_gaps) < 2 else FINE
        gap = found[0]
        finding = above(GAP, gap, self.limits)
        jumped = self._jumped(gap)
        if finding.level == 0 and jumped and len(self._usual) >= _LEAST_STEPS:
            usual = f"above {number(self.limits['growth'])} times the usual {number(median(self._usual))}"
            finding = Finding(Severity.WARN, f"{GAP} is {number(gap)}, {usual}")
        if finding.level == 0:
            self._usual.append(gap)
            return FINE
        return finding._replace(remark=self._cause(seen, jumped))

    def _jumped(self, gap: float) -> bool:
        return bool(self._usual) and gap > max(self.limits["growth"] * median(self._usual), self.limits["floor"])

    def _cause(self, seen: Seen, jumped: bool) -> str:
        """In the order of how telling a pattern is. Empty: it came slowly, which is what the rule's advice is about."""
        if jumped:
            return _SUDDEN
        quarters = seen.all(_FIRST, _LAST)
        if quarters is not None and quarters[1] > self.limits["along"] * quarters[0]:
            return _POSITION
        if self.limits["is_sparse"]:
            return _ROUTING
        return "" if self._usual else _FIRST_STEP

    def _odd_server(self, seen: Seen) -> Finding | None:
        """The server whose gap stands out most, if one does."""
        found: dict[str, tuple[float, float]] = {}
        for one in seen.names.engine_gaps:
            pair = seen.all(one.root_gap, one.num_tokens)
            if pair is not None and pair[1] > 0:
                found[one.engine] = (pair[0], pair[1])
        if len(found) < 2:
            return None
        server = max(found, key=lambda name: found[name])
        root, num_tokens = found.pop(server)
        others = median(own for own, _ in found.values())
        num_others = sum(own_tokens for _, own_tokens in found.values())
        chance = 1 + _FEW_TOKENS / num_tokens + _FEW_TOKENS / num_others
        if root**2 <= max(self.limits["server"] * chance * others**2, self.limits["floor"]):
            return None
        text = f"mismatch/engine/{server}/root_gap_mean is {number(root)}, that of the other servers {number(others)}"
        return Finding(Severity.WARN, text, _BY_SERVER.format(server=server))

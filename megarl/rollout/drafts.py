"""Groups on their way: what their samples have so far, and what is still to be asked for.

A sample may be drawn in several parts, by weights of several versions, when a step did not wait for it to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import Group, Prompt, Sample, VersionSpan
from megarl.core.seeding import derive_seed
from megarl.data.tokenizer import Tokenizer
from megarl.rollout.single_turn import sample_of


@dataclass(slots=True)
class Draft:
    """One prompt and what its samples have so far. ``seeds`` has one seed per sample."""

    prompt: Prompt
    name: str
    seeds: list[int]
    # of each sample: what was drawn, joined; None before the first part
    drawn: list[Generation | None] = field(default_factory=list)
    # of each sample: how many parts that is
    num_parts: list[int] = field(default_factory=list)
    # of each sample that is drawn to its end and already being scored: the sample
    samples: dict[int, Sample] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.drawn = self.drawn or [None] * len(self.seeds)
        self.num_parts = self.num_parts or [0] * len(self.seeds)

    @property
    def is_whole(self) -> bool:
        """Whether no sample has anything left to draw."""
        return not self.open_samples

    @property
    def open_samples(self) -> list[int]:
        """The samples that still have something to draw."""
        return [i for i, drawn in enumerate(self.drawn) if drawn is None or drawn.finish == "abort"]

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that drew any of it; None if nothing is drawn."""
        return min((drawn.version for drawn in self.drawn if drawn is not None), default=None)

    def request(self, sample: int, params: SamplingParams) -> GenerationRequest:
        """Ask for the rest of a sample. A later part has a seed of its own: it must not draw like the first."""
        drawn, part = self.drawn[sample], self.num_parts[sample]
        seed = self.seeds[sample] if part == 0 else derive_seed(self.seeds[sample], "part", part)
        name = f"{self.name}/{sample}" if part == 0 else f"{self.name}/{sample}/{part}"
        if drawn is None:
            return GenerationRequest(name, self.prompt.token_ids, seed, params)
        left = replace(params, max_new_tokens=params.max_new_tokens - len(drawn.token_ids))
        return GenerationRequest(name, np.concatenate([self.prompt.token_ids, drawn.token_ids]), seed, left)

    def add(self, sample: int, part: Generation) -> None:
        """Take what was drawn for a sample, to its end or not."""
        if len(part.token_ids) == 0:
            return  # it never got its turn
        before = self.drawn[sample]
        self.drawn[sample] = part if before is None else join(before, part)
        self.num_parts[sample] += 1

    def start_over(self) -> None:
        """Forget what is drawn."""
        self.drawn, self.num_parts = [None] * len(self.seeds), [0] * len(self.seeds)
        self.samples.clear()

    def finish_early(self, sample: int, part: Generation, tokenizer: Tokenizer) -> Sample:
        """The sample that ends with this part, which was not added yet."""
        before = self.drawn[sample]
        whole = part if before is None else join(before, part)
        self.samples[sample] = sample_of(self.prompt.token_ids, self.seeds[sample], whole, tokenizer)
        return self.samples[sample]

    def group(self, tokenizer: Tokenizer) -> Group:
        """The finished group."""
        return Group(self.prompt, [self._sample(i, tokenizer) for i in range(len(self.seeds))])

    def _sample(self, sample: int, tokenizer: Tokenizer) -> Sample:
        if sample in self.samples:
            return self.samples[sample]
        drawn = self.drawn[sample]
        assert drawn is not None, "a whole draft has drawn all of its samples"
        return sample_of(self.prompt.token_ids, self.seeds[sample], drawn, tokenizer)

    def to_tree(self) -> dict[str, Any]:
        """Plain data and arrays for `core.wire`."""
        prompt = {name: getattr(self.prompt, name) for name in Prompt.__slots__}
        return {
            "prompt": {**prompt, "metadata": dict(self.prompt.metadata)},
            "name": self.name,
            "seeds": self.seeds,
            "drawn": [None if drawn is None else asdict(drawn) for drawn in self.drawn],
            "num_parts": self.num_parts,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Draft:
        """The inverse of `to_tree`."""
        drawn = [None if one is None else _generation_from(one) for one in tree["drawn"]]
        prompt = Prompt(**{**tree["prompt"], "messages": tuple(tree["prompt"]["messages"])})
        return cls(prompt, tree["name"], tree["seeds"], drawn, tree["num_parts"])


def new_draft(prompt: Prompt, name: str, num_samples: int, seed_parts: tuple[int | str, ...]) -> Draft:
    """A prompt of which nothing is drawn yet."""
    return Draft(prompt, name, [derive_seed(*seed_parts, column) for column in range(num_samples)])


def join(first: Generation, second: Generation) -> Generation:
    """Two parts of one sample as one."""
    spans = (*_spans(first, 0), *_spans(second, len(first.token_ids)))
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = merged[-1]._replace(stop=span.stop)
        else:
            merged.append(span)
    return Generation(
        id=second.id,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        finish=second.finish,
        version=min(first.version, second.version),
        spans=tuple(merged) if len(merged) > 1 else (),
        engine=second.engine,
        routed_experts=second.routed_experts,  # of all tokens: the first part was in the second's prompt
    )


def _spans(part: Generation, start: int) -> Sequence[VersionSpan]:
    own = part.spans or (VersionSpan(part.version, 0, len(part.token_ids)),)
    return [VersionSpan(span.version, span.start + start, span.stop + start) for span in own]


def _generation_from(tree: Mapping[str, Any]) -> Generation:
    return Generation(**{**tree, "spans": tuple(VersionSpan(*span) for span in tree["spans"])})

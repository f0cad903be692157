"""Where the samples of a run's stages come from: demonstrations, a recording, engines inside the ranks, or servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megarl.config.layout import max_prompt_tokens, model_shape
from megarl.config.rollout import RolloutSettings
from megarl.config.schema import RunConfig
from megarl.core.protocols import SamplingParams
from megarl.core.seeding import derive_seed
from megarl.core.world import World
from megarl.data.cursor import Cursor
from megarl.rollout.demonstrations import DemonstrationRollouts, why_no_room_to_show
from megarl.rollout.generated import GeneratedRollouts
from megarl.rollout.marking import Marking, keep_no_record
from megarl.rollout.prompt_stream import Measure, MixedPrompts, NoPrompts, PromptStream, SourceWalk, why_no_room
from megarl.rollout.recorded import RecordedRollouts, Recording, ReplayLimits
from megarl.rollout.rollout_plan import RolloutPlan
from megarl.rollout.server_rollouts import AheadPlan, ServerRollouts
from megarl.rollout.serving import Enter, ServerServing, Serving
from megarl.run.answering import build_answering
from megarl.run.inputs import Inputs
from megarl.run.progress import last_step_of
from megarl.run.stage import Rollouts


class RolloutBuilder:
    """Builds the rollouts of every stage, and remembers which of their parts a checkpoint must know."""

    def __init__(self, config: RunConfig, inputs: Inputs, world: World, recording: Path) -> None:
        """``recording`` is the directory for rollouts that are to be recorded."""
        # of the driver: what each stage draws from
        self.streams: dict[str, MixedPrompts] = {}
        # rollouts that may be drawn before their step has come
        self.ahead: ServerRollouts | None = None
        self._config = config
        self._inputs = inputs
        self._world = world
        self._recording = recording

    def shown(self, stage: str, purpose: str, batch_size: int, enter: Enter) -> DemonstrationRollouts:
        """Demonstrations, of prompts that fit into the model together with them."""
        measure = partial(
            why_no_room_to_show,
            encoder=self._inputs.encoder,
            max_prompt_tokens=max_prompt_tokens(self._config),
            max_tokens=model_shape(self._config).max_positions,
        )
        prompts = self._prompts(stage, purpose, measure)
        return DemonstrationRollouts(prompts, self._inputs.encoder, batch_size, enter)

    def played(self, serving: Serving | None, enter: Enter) -> Rollouts:
        """What the policy itself says in the main stage, now or when it was recorded."""
        config, inputs, rollout = self._config, self._inputs, self._config.rollout
        assert rollout is not None, "checked with the configuration"
        plan = self._plan(rollout)
        if rollout.replay is not None:
            return RecordedRollouts(Path(rollout.replay), self._replay_limits(plan), self._world)
        assert serving is not None, "built whenever something is generated"
        measure = partial(why_no_room, max_prompt_tokens=plan.max_prompt_tokens)
        prompts = self._prompts("main", "prompts", measure)
        record = Recording(self._recording, self._world).write if config.records else keep_no_record
        marking = Marking(inputs.scorer, inputs.filters, plan, enter, record, self._world)
        if not isinstance(serving, ServerServing) or rollout.converse is not None:
            answering = build_answering(config, inputs, serving, enter, self._world)
            return GeneratedRollouts(prompts, answering, plan, marking)
        ahead = AheadPlan(
            config.num_steps_ahead,
            rollout.max_staleness,
            rollout.extra_prompts,
            rollout.unfinished == "carry_over",
            last_step_of(config),
        )
        self.ahead = ServerRollouts(prompts, inputs.tokenizer, serving, plan, ahead, marking, self._world)
        return self.ahead

    def _plan(self, rollout: RolloutSettings) -> RolloutPlan:
        return RolloutPlan(
            rollout.prompts_per_step,
            rollout.group_size,
            SamplingParams(
                rollout.max_new_tokens,
                rollout.temperature,
                rollout.top_p,
                rollout.top_k,
                self._inputs.encoder.stop_token_ids,
            ),
            max_prompt_tokens(self._config),
            self._config.run.seed,
            learns=not self._config.only_generates,
            max_refills=rollout.max_refills,
        )

    def _replay_limits(self, plan: RolloutPlan) -> ReplayLimits:
        shape = model_shape(self._config)
        return ReplayLimits(shape.vocab_size, shape.max_positions, plan.params.max_new_tokens, plan.max_prompt_tokens)

    def _prompts(self, stage: str, purpose: str, measure: Measure) -> PromptStream:
        config, sources = self._config, self._inputs.train_prompts
        if not sources:
            return NoPrompts()
        seed = derive_seed(config.run.seed, purpose)
        walks = [
            SourceWalk(
                own.path,
                source,
                Cursor(len(source), seed + number, config.data.shuffle),
                measure,
                config.data.too_long,
                own.task,
            )
            for number, (source, own) in enumerate(zip(sources, config.data.train, strict=True))
        ]
        stream = MixedPrompts(walks, [own.weight for own in config.data.train])
        self.streams[stage] = stream
        return stream

"""What a server of your own says about a sample."""

from __future__ import annotations

from typing import Any

from megarl.config.reward_options import RemoteOptions
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt, Sample
from megarl.rewards.http_calls import Call
from megarl.rewards.reward import Reward


async def remote(prompt: Prompt, sample: Sample, **options: Any) -> Reward:
    """POST the sample as JSON to ``url``; the reply is ``{"reward": 0.5}``, and ``scores`` by name if there are any.

    The numbers are checked like those of every reward: what is not a finite number marks the sample failed.
    """
    settings = RemoteOptions(**options)
    call = Call(
        "remote", settings.url, settings.timeout_seconds, settings.max_tries, settings.headers, settings.api_key
    )
    reply = await call.post(
        {
            "id": prompt.id,
            "prompt": prompt.text,
            "messages": [dict(message) for message in prompt.messages],
            "answer": prompt.answer,
            "task": prompt.task,
            "metadata": dict(prompt.metadata),
            "response": sample.response,
            "turns": [turn._asdict() for turn in sample.turns],
            "finish": sample.finish,
            "num_response_tokens": sample.num_response_tokens,
        }
    )
    if not isinstance(reply, dict) or "reward" not in reply:
        call.refuse(f'{excerpt(repr(reply))[1:-1]}, which has no "reward"')
    return Reward(reply["reward"], reply.get("scores") or {})

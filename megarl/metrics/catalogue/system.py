"""Metrics of the machine: progress, speed, memory, and where the time of a step went."""

from __future__ import annotations

from megarl.metrics.catalogue.metric import Metric

_GENERATED = "steps that generate"

_PROGRESS = (
    Metric("training/global_step", "last", "steps", "Training steps made, this one included; 0 before the first."),
    Metric("training/epoch", "last", "epochs", "Whole passes over the prompts made before this step."),
    Metric("system/samples", "last", "samples", "Samples trained on since the run began, over all restarts."),
    Metric("system/tokens_total", "last", "tokens", "Tokens trained on since the run began, over all restarts."),
    Metric("system/tps", "derived", "tokens/s",
           "Tokens / timing_s/step_wall, both summed over the last 5 steps; all devices."),
    Metric("system/tps_gpu", "derived", "tokens/s/device", "system/tps / number of devices."),
    Metric("alerts/{rule}", "derived", "level",
           "What a health rule says of the step: 0 nothing, 1 info, 2 warning, 3 critical; see [health](health.md).",
           when="steps with what the rule looks at"),
    Metric("weights/version", "last", "version", "The version that the engines serve after the step.",
           when="steps that push weights"),
    Metric("weights/push_bytes", "sum", "bytes", "Bytes of weights sent to the engines.",
           when="steps that push weights"),
)  # fmt: skip

_SPEED = (
    Metric("perf/total_num_tokens", "sum", "tokens", "Prompt and response tokens of this step's batch."),
    Metric("perf/num_response_tokens", "sum", "tokens", "Tokens of this step's batch that the policy sampled."),
    Metric("perf/num_squared_tokens", "sum", "tokens²",
           "Sum over samples of the squared length, which attention's arithmetic grows with."),
    Metric("perf/throughput", "derived", "tokens/s/device",
           "perf/total_num_tokens / (timing_s/step · number of devices)."),
    Metric("perf/time_per_step", "derived", "s", "Equal to timing_s/step."),
    Metric("perf/mfu/{actor,critic}", "derived", "fraction",
           "Model arithmetic of all optimizer steps of the {policy,critic} / (execute seconds of its train_step · peak "
           "of all devices); recomputation is not counted.",
           when="the peak of every device is known (hardware.peak_tflops)"),
    Metric("perf/mfu/actor_infer", "derived", "fraction",
           "The same for the forward pass that computes the policy's log-probs.",
           when="the peak of every device is known (hardware.peak_tflops)"),
    Metric("perf/cpu_memory_used_gb", "max", "GiB", "Memory in use on the host, whoever uses it; the fullest host."),
    Metric("perf/cpu_memory_used_frac", "max", "fraction",
           "Memory in use on a host / memory of the host, or of its container where that has a limit; the fullest."),
    Metric("perf/max_memory_{allocated,reserved}_gb", "max", "GiB",
           "Peak memory that the device allocator had {handed out,taken} during the step's phases; the fullest "
           "device."),
    Metric("perf/allocator_retries", "sum", "failures",
           "Times that the device allocator had to give back cached memory and try again.", when="CUDA"),
)  # fmt: skip

_WALL = (
    Metric("timing_s/gen", "driver_sum", "s", "Generation, from waking the engines to the last sample.",
           {"roll": "time/rollout", "trinity": "time/gen"}, _GENERATED),
    Metric("timing_s/generate_sequences", "mean", "s", "Time an engine was busy generating; mean over engines.",
           {"trinity": "time/generate_sequences"}, _GENERATED),
    Metric("timing_s/generation_timing/{min,max}", "{min,max}", "s",
           "The {least,most} time that an engine was busy generating.",
           {"trinity": "time/generation_timing/{min,max}"}, _GENERATED),
    Metric("timing_s/reward", "driver_sum", "s",
           "Scoring, until the last reward has arrived.", {"trinity": "time/reward"}, _GENERATED),
    Metric("timing_s/old_log_prob", "driver_sum", "s",
           "Log-probs of the policy before the update.", {"trinity": "time/old_log_prob"}),
    Metric("timing_s/ref", "driver_sum", "s", "Log-probs of the reference model.", {"trinity": "time/ref"},
           "runs with a reference model"),
    Metric("timing_s/values", "driver_sum", "s", "Values of the critic before the update.", {"trinity": "time/values"},
           "runs with a critic"),
    Metric("timing_s/adv", "driver_sum", "s", "Computing advantages.", {"roll": "time/adv", "trinity": "time/adv"}),
    Metric("timing_s/update_actor", "driver_sum", "s",
           "All optimizer steps of the policy.", {"trinity": "time/update_actor"}),
    Metric("timing_s/update_critic", "driver_sum", "s",
           "All optimizer steps of the critic.", {"trinity": "time/update_critic"}, "runs with a critic"),
    Metric("timing_s/update_weights", "driver_sum", "s",
           "Sending weights to the engines.", {"trinity": "time/update_weights"}, "steps that push weights"),
    Metric("timing_s/testing", "driver_sum", "s", "Evaluation.", {"trinity": "time/eval"}, "steps with an evaluation"),
    Metric("timing_s/save_checkpoint", "driver_sum", "s", "What saving the step before held this one up.",
           {"trinity": "time/save_checkpoint"}, "steps after one that was saved"),
    Metric("timing_s/step", "driver_sum", "s",
           "Generation to weight update; without evaluation, checkpoints and logging.", {"trinity": "time/step"}),
    Metric("timing_s/step_wall", "driver_sum", "s",
           "The whole step, everything included.", {"trinity": "time/step_wall"}),
    Metric("time/wait_explore_step", "driver_sum", "s",
           "What the driver waited for scored samples; in a synchronous run the whole rollout."),
    Metric("time/read_experience", "driver_sum", "s", "Packing samples and dealing them to the ranks."),
    Metric("time/experience_pipeline/total", "driver_sum", "s",
           "Filtering groups, shaping rewards and comparing samples in groups."),
    Metric("time/experience_pipeline/operator/{filter}", "driver_sum", "s",
           "What one filter took; its place in rollout.filters, from 0, and its name.", when="with rollout.filters"),
    Metric("time/train_step", "derived", "s", "timing_s/update_actor + timing_s/update_critic."),
    Metric("time/sync_weight", "derived", "s", "Equal to timing_s/update_weights.", when="steps that push weights"),
    Metric("time/ref_log_probs_values_reward", "derived", "s",
           "timing_s/ref + timing_s/reward, of those that there are."),
    Metric("time/old_log_probs_values", "derived", "s", "timing_s/old_log_prob + timing_s/values, where there is one."),
    Metric("timing_per_token_ms/gen", "derived", "ms", "1000 · timing_s/gen / perf/num_response_tokens.",
           when=_GENERATED),
    Metric("timing_per_token_ms/{old_log_prob,ref,values,adv,update_critic,update_actor}", "derived", "ms",
           "1000 · timing_s of the phase / perf/total_num_tokens; several epochs do not multiply the tokens."),
)  # fmt: skip

_MOMENTS = {
    "start/offload": "before anything is onloaded for the phase; peaks have just been reset",
    "start/onload": "when its states are on the device, before the work",
    "end/onload": "after the work, before anything is offloaded",
    "end/offload": "when what the next phase does not need has left",
}
_STATS = "{allocated,reserved,max_allocated,max_reserved}"
_MEANINGS = "{memory in use,memory taken from the device,peak in use since the phase began,peak taken since then}"
_MEMORY_WHEN = "metrics.memory is not off"

_PHASES = (
    Metric("time/{infix}/{total,execute,onload,offload}", "span", "s",
           "Seconds of the slowest rank in the phase: {all of them,at work,moving states in,moving states out}."),
    Metric("time/{infix}/skew", "span", "s", "The slowest rank's total minus the fastest one's."),
    Metric("time/{infix}/{p50,p99}", "span", "s",
           "The {median,99th percentile} over ranks of the phase's total.", when="more than 16 ranks"),
    Metric("time/{infix}/failed", "sum", "failures", "Ranks that left the phase by an error.", when="a phase failed"),
    *(Metric(f"memory/{{infix}}/{moment}/{_STATS}/{{device}}", "gauge", "GiB",
             f"One device: {_MEANINGS}, {text}.", when=_MEMORY_WHEN) for moment, text in _MOMENTS.items()),
    Metric("memory/{infix}/end/onload/{max_allocated,max_reserved}_frac/{device}", "gauge", "fraction",
           "The peak {in use,taken} during load and work / memory of the device.", when=_MEMORY_WHEN),
    *(Metric(f"memory/{{infix}}/{moment}/device_used/{{device}}", "gauge", "GiB",
             f"Memory taken on the device by any process, {text}.", when="CUDA") for moment, text in _MOMENTS.items()),
    *(Metric(f"memory/{{infix}}/{moment}/{{stat}}/{{max,min,mean,argmax}}", "derived", "GiB",
             "Over devices: the {largest,smallest,mean,number of the device with the largest}.",
             when="in trackers: more than 16 devices, or metrics.memory: summary") for moment in _MOMENTS),
    Metric("memory/cpu/{infix}/start/{rss,vms}", "max", "GiB",
           "{Resident,Virtual} memory of a rank's process when it enters the phase; the largest.", when=_MEMORY_WHEN),
    Metric("memory/cpu/{infix}/end/{rss,vms}", "max", "GiB",
           "{Resident,Virtual} memory of a rank's process when it leaves the phase; the largest.", when=_MEMORY_WHEN),
    Metric("memory/cpu/{infix}/{start,end}/rss_node_sum", "node_sum", "GiB",
           "Resident memory of all ranks of a node when they {enter,leave} the phase; the fullest node.",
           when=_MEMORY_WHEN),
)  # fmt: skip

ENTRIES: tuple[Metric, ...] = (*_PROGRESS, *_SPEED, *_WALL, *_PHASES)

"""The names in the five documents that megarl began with; a reader of any of them must find each in a run.

ROLL's metric notes (in Chinese and English, the same names), one explained step of veRL, a guide to veRL's logs, and
Trinity-RFT's monitor reference.
"""

# 63 names
ROLL = """
actor/approxkl
actor/clipfrac
actor/kl_loss
actor/lr
actor/negative_sft_loss
actor/pg_loss
actor/policykl
actor/positive_sft_loss
actor/ppo_ratio_clipfrac
actor/ppo_ratio_high_clipfrac
actor/ppo_ratio_low_clipfrac
actor/ratio_max
actor/ratio_mean
actor/ratio_min
actor/sample_weights_max
actor/sample_weights_mean
actor/sample_weights_min
actor/sft_loss
actor/total_loss
actor/total_samples
actor/valid_sample_ratio
actor/valid_samples
actor/weighted_pg_loss
critic/advantages/max
critic/advantages/mean
critic/advantages/min
critic/clipfrac
critic/entropy/mean
critic/error
critic/loss
critic/lr
critic/old_log_prob/mean
critic/ref_log_prob/mean
critic/returns/max
critic/returns/mean
critic/returns/min
critic/reward_clip_frac
critic/rewards/max
critic/rewards/mean
critic/rewards/min
critic/score/max
critic/score/mean
critic/score/min
critic/value
critic/values/max
critic/values/mean
critic/values/min
critic/vpred
system/samples
system/tps
time/adv
time/old_log_probs_values
time/ref_log_probs_values_reward
time/rollout
tokens/prompt_length/max
tokens/prompt_length/mean
tokens/prompt_length/min
tokens/response_length/max
tokens/response_length/mean
tokens/response_length/min
val/score/max
val/score/mean
val/score/min
""".split()

# 26 names
ROLL_TEMPLATES = """
memory/cpu/{metric_infix}/end/rss
memory/cpu/{metric_infix}/end/vms
memory/cpu/{metric_infix}/start/rss
memory/cpu/{metric_infix}/start/vms
memory/{metric_infix}/end/offload/allocated/{device_id}
memory/{metric_infix}/end/offload/max_allocated/{device_id}
memory/{metric_infix}/end/offload/max_reserved/{device_id}
memory/{metric_infix}/end/offload/reserved/{device_id}
memory/{metric_infix}/end/onload/allocated/{device_id}
memory/{metric_infix}/end/onload/max_allocated/{device_id}
memory/{metric_infix}/end/onload/max_allocated_frac/{device_id}
memory/{metric_infix}/end/onload/max_reserved/{device_id}
memory/{metric_infix}/end/onload/max_reserved_frac/{device_id}
memory/{metric_infix}/end/onload/reserved/{device_id}
memory/{metric_infix}/start/offload/allocated/{device_id}
memory/{metric_infix}/start/offload/max_allocated/{device_id}
memory/{metric_infix}/start/offload/max_reserved/{device_id}
memory/{metric_infix}/start/offload/reserved/{device_id}
memory/{metric_infix}/start/onload/allocated/{device_id}
memory/{metric_infix}/start/onload/max_allocated/{device_id}
memory/{metric_infix}/start/onload/max_reserved/{device_id}
memory/{metric_infix}/start/onload/reserved/{device_id}
time/{metric_infix}/execute
time/{metric_infix}/offload
time/{metric_infix}/onload
time/{metric_infix}/total
""".split()

# 39 names
VERL_STEP = """
actor/entropy
actor/grad_norm
actor/kl_coef
actor/kl_loss
actor/lr
actor/pg_clipfrac
actor/pg_clipfrac_lower
actor/pg_loss
actor/ppo_kl
critic/advantages/mean
critic/returns/mean
critic/rewards/mean
critic/score/max
critic/score/mean
critic/score/min
perf/cpu_memory_used_gb
perf/max_memory_allocated_gb
perf/max_memory_reserved_gb
perf/mfu/actor
perf/throughput
perf/total_num_tokens
prompt_length/max
prompt_length/mean
prompt_length/min
response/aborted_ratio
response_length/clip_ratio
response_length/max
response_length/mean
response_length/min
timing_per_token_ms/gen
timing_per_token_ms/ref
timing_per_token_ms/update_actor
timing_s/gen
timing_s/generate_sequences
timing_s/reward
timing_s/step
timing_s/update_actor
training/epoch
training/global_step
""".split()

# 18 names
VERL_LOG = """
actor/entropy
actor/grad_norm
actor/pg_loss
actor/ppo_kl
critic/grad_norm
critic/rewards/mean
critic/score/mean
critic/vf_loss
perf/max_memory_allocated_gb
perf/throughput
response_length/mean
timing_s/gen
timing_s/step
timing_s/update_actor
timing_s/update_critic
training/epoch
training/global_step
val/test_score/openai/gsm8k
""".split()

# 30 names
TRINITY = """
bench/gsm8k-eval/accuracy/best@4
eval/dummy/accuracy
eval/dummy/accuracy/best@2
eval/dummy/accuracy/mean@2
eval/dummy/accuracy/mean@2/max
eval/dummy/accuracy/mean@2/mean
eval/dummy/accuracy/mean@2/min
eval/dummy/accuracy/mean@2/std
eval/dummy/accuracy/std@2
eval/dummy/accuracy/std@2/max
eval/dummy/accuracy/std@2/mean
eval/dummy/accuracy/std@2/min
eval/dummy/accuracy/std@2/std
eval/dummy/accuracy/worst@2
eval/gsm8k-eval/accuracy/mean@4
experience_pipeline/experience_count
experience_pipeline/group_advantages/reward_mean/mean
rollout/accuracy
rollout/accuracy/max
rollout/accuracy/mean
rollout/accuracy/min
rollout/format_score/mean
sample/model_version/mean
sample/task_count
time/eval
time/wait_explore_step
timing_per_token_ms/adv
timing_per_token_ms/update_actor
timing_per_token_ms/update_critic
timing_per_token_ms/values
""".split()

# 7 names
TRINITY_TEMPLATES = """
bench/{task_name}/{metric_name}/{statistic}
eval/{task_name}/{metric_name}/{statistic}
experience_pipeline/{metric_name}
rollout/{metric_name}/{statistic}
sample/{metric_name}
time/{operation_name}
{category}/{taskset_name}/{metric_name}/{statistic}
""".split()

# 14 names
TRINITY_FAMILIES = """
actor/
bench/
critic/
eval/
experience_pipeline/
global_seqlen/
perf/
prompt_length/
response_length/
rollout/
sample/
time/
time/experience_pipeline/
timing_per_token_ms/
""".split()

# what {metric_infix} stands for, after the cluster's name
PHASES = """
train_step
generate
model_update
compute_log_probs
do_checkpoint
compute_values
compute_rewards
""".split()

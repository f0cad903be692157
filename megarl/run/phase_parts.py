def part_table():
    w={"weights"}
    t={
     "actor_infer/generate": {"engine.weights","engine.kv_cache"},
     "reference/compute_log_probs": {"reference.weights"},
     "actor_train/compute_log_probs": {"actor.weights"},
     "critic/compute_values": {"critic.weights"},
     "critic/train_step": {"critic.weights","critic.grads","critic.optimizer"},
     "actor_train/train_step": {"actor.weights","actor.grads","actor.optimizer"},
     "actor_train/model_update": {"actor.weights","engine.weights"},
    }
    return {k: frozenset(v) for k,v in t.items()}

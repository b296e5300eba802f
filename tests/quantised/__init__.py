"""`model.base_weights` and `grpo.optimizer` in few bits; all but the refusals need bitsandbytes (`make quantised`)."""

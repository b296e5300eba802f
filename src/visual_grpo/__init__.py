"""Visual GRPO."""

"""The small Qwen2.5-VL: its modules and pretraining."""

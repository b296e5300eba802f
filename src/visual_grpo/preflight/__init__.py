"""What is looked at before the first node: do parameters, data, rewards, model and machine fit together?

Nothing is written here. All problems are told in one message, with the lines to paste.
"""

from visual_grpo.preflight.check import settled

__all__ = ["settled"]

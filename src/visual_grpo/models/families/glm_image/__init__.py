from visual_grpo.models.families.glm_image.model import FAMILY

__all__ = ["FAMILY"]

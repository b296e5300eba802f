"""Saved models of every family, as the pretend GPU's tests have them."""

from tests.pretend.conftest import qwen_image_folder, sd3_folder, vl_folder

__all__ = ["qwen_image_folder", "sd3_folder", "vl_folder"]

"""What is Stable Diffusion 3's own in the configuration."""

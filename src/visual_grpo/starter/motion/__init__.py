"""Shapes that move as their prompts say: their drawings, their reward, and the small video model."""

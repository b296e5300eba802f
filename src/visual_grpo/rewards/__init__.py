"""What judges the images: plain functions, combined by weight."""

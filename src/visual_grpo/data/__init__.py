"""Data preparation: reads records in common layouts, validates and splits them, and prepares their images."""

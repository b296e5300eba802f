"""Text-to-image records: read in the layouts people have, validated, split and prepared."""

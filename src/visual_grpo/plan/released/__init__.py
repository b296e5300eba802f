"""Released models built from their published sizes, without weights; one file a family."""

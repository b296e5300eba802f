"""People's choices between two pictures: their file, scores that follow from them, a reward that predicts them."""

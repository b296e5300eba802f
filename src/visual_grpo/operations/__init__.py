"""What a team does around trainings: plan, check, retrain, promote, reproduce, trace."""

"""The work around trainings: plan, check, retrain, promote, reproduce, trace."""

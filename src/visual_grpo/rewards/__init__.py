"""Rewards: functions that score samples, combined by weight."""

"""Flow models as policies, whose decisions are stochastic denoising steps."""

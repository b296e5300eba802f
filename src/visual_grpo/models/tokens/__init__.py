"""Language models as policies, whose decisions are generated tokens."""

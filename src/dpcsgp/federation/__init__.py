"""Parties without a server: who takes part, and what they agreed on."""

"""Carry what was learned in one model's coordinates to another's: fine-tunes, adapters, probes."""

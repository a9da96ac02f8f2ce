"""A model in hand: Model, Alignment, canonical form, orbit, widening, interpolation, inspection."""

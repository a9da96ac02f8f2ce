"""The laboratory: training, experiments (the papers' tables) and the demo."""

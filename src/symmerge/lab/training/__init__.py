"""Train stock models from different seeds: recipes, data sets, the step and the loop."""

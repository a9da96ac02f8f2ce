"""What flows through a model: activations, moments, statistics, correlations, probes."""

"""What flows through models: activations, their statistics, and probes to score merges on."""

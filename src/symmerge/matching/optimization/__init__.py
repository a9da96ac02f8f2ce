"""One optimisation loop for learned matching, soft matching and the laboratory's training."""

"""What learned and soft matching share: options, data, gradients along symmetries, learners."""

"""Where inputs come from: embedded data, files, the hub, self-generated text and dead leaves."""

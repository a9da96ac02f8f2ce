"""Does it compute the same? Inputs, stock modules and the gate before anything is written."""

"""How good is it? Tasks and their data, metrics, lines (barriers), planes and simplices."""
